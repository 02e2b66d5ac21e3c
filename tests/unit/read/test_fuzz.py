"""Broken runs end in a result or in a clear error; ``tools/bench/fuzz_reader.py`` tries many more."""

import contextlib
import io
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedtrace.cli.main import main
from schedtrace.errors import ExitCode
from tests.fuzz import reading
from tests.fuzz.mutate import LOGS, TRACES, case
from tests.seeds import COUNT

slow = settings(suppress_health_check=[*HealthCheck])


def ends_well(folder, files):
    """``analyze`` says something: a result on stdout, or one error that names the file."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    path = folder if len(files) > 1 else folder / next(iter(files))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["analyze", str(path)])
    for name in files:
        (folder / name).unlink()
    assert code in {ExitCode.OK, ExitCode.INPUT}
    assert "Traceback" not in out.getvalue() + err.getvalue()
    if code == ExitCode.OK:
        assert out.getvalue()
    else:
        assert out.getvalue() == ""
        assert err.getvalue().startswith(f"schedtrace: {path}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@slow
@given(st.randoms(use_true_random=False))
def test_a_mutated_record_ends_in_a_result_or_an_error(folder, random):
    ends_well(folder, case(random))


@slow
@given(
    st.sampled_from(["engine-0.jsonl", "some.log"]),
    st.sampled_from([*LOGS, *TRACES]),
    st.binary(max_size=300),
)
def test_any_bytes_in_and_after_a_record_end_in_a_result_or_an_error(folder, name, source, noise):
    content = source.read_bytes()[:3000]
    ends_well(folder, {name: noise})
    ends_well(folder, {name: content + noise + b"\n" + content})


@pytest.mark.parametrize("number", range(4 * COUNT))
def test_every_command_ends_well_on_a_run_that_says_what_cannot_be(tmp_path, number):
    for words, run in reading.runs(Random(number), tmp_path, 5):  # noqa: S311  # repeatable
        assert len(run().how) == 1, words
