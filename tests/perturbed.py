"""Every fitted figure is off by a billionth in every test: none may depend on the last bits of a processor.

Linear algebra adds in another order on another processor. ``PERTURBED=2`` draws other signs, 0 none.
"""

import os
import sys
from dataclasses import is_dataclass, replace
from functools import wraps
from importlib import import_module
from random import Random

import msgspec
import polars as pl

RELATIVE = 1e-9
FITS = {
    "schedtrace.timeline.step_time": ("fit_step_time", "fit_bent_time", "fit_line", "nearly_predicted"),
    "schedtrace.step_times.cost_sums": ("fit_linear",),
    "schedtrace.compare.significance": ("change_interval",),
    "schedtrace.diagnose.rules.slow_rank": ("_rates",),
}
"""Modules and their functions that fit. In an order in which none is imported before it is perturbed."""
RECORDED = ("ranges",)
"""Fields of a fit that are no fitted figures."""


def off(value, draw):
    """The same with other floats."""
    if isinstance(value, float | pl.Series):
        return value * (1 + draw.choice((-RELATIVE, RELATIVE)))
    if isinstance(value, tuple | list):
        return type(value)(off(one, draw) for one in value)
    if isinstance(value, dict):
        return {name: off(one, draw) for name, one in value.items()}
    if isinstance(value, msgspec.Struct):
        fitted = {name: one for name, one in msgspec.structs.asdict(value).items() if name not in RECORDED}
        return msgspec.structs.replace(value, **off(fitted, draw))
    return replace(value, **off(vars(value), draw)) if is_dataclass(value) else value


def perturbed(fit, seed):
    """The function with another result; the same for the same."""

    @wraps(fit)
    def fitted(*arguments, **named):
        found = fit(*arguments, **named)
        return off(found, Random(f"{seed} {found}"))  # noqa: S311  # no secret

    return fitted


def perturb(seed):
    """Have all fits perturbed, in all modules that import them from now on."""
    for name, fits in FITS.items():
        assert name not in sys.modules, f"{name} is imported already"
        module = import_module(name)
        for fit in fits:
            setattr(module, fit, perturbed(getattr(module, fit), seed))


SEED = int(os.environ.get("PERTURBED", "1"))
if SEED:
    perturb(SEED)
