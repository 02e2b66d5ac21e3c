"""The tests' own perturbation of fitted figures (``tests/perturbed.py``)."""

import re
from importlib import import_module
from pathlib import Path

import polars as pl
import pytest

import schedtrace
from tests import perturbed

SOURCE = Path(schedtrace.__file__).parent
FITTING = re.compile(r"\b(least_squares|nnls|lstsq|polyfit|curve_fit|linregress|minimize|bootstrap)\(")


def test_all_modules_that_fit_are_perturbed():
    fitting = {
        ".".join(("schedtrace", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in SOURCE.rglob("*.py")
        if FITTING.search(path.read_text(encoding="utf-8"))
    }
    assert fitting == perturbed.FITS.keys()


@pytest.mark.skipif(not perturbed.SEED, reason="PERTURBED=0")
def test_a_fit_is_off_by_a_billionth():
    fit = import_module("schedtrace.step_times.cost_sums").fit_linear
    rows = pl.DataFrame({"us": [100.0 + 3 * n for n in range(30)], "tokens": list(range(30))})
    exact, found = fit.__wrapped__(rows, "us", ("tokens",)), fit(rows, "us", ("tokens",))
    assert found != exact
    assert found == fit(rows, "us", ("tokens",))
    assert found.base_us == pytest.approx(exact.base_us, rel=2e-9, abs=0)
    assert found.base_us != exact.base_us
    assert found.ranges == exact.ranges
