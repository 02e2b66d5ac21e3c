"""Traces by hand, read back the way ``analyze`` reads them."""

from pathlib import Path

import pytest

from schedtrace.cli.main import main
from schedtrace.diagnose.rules import RULES
from schedtrace.read.run import read_run
from schedtrace.read.trace import read_trace
from schedtrace.timeline.timeline import make_timeline
from tests import makers
from tests.unit.judged_once import judge_once, make_tables_once, one_engine_once
from tests.unit.recorded_words import RecordedWords

READ_JUDGEMENTS = {"cli", "compare", "explain", "fleet", "present", "watch", "test_rank_findings.py"}
"""Folders and files of tests of what follows from a judgement of single engines."""


@pytest.fixture(scope="module", autouse=True)
def _each_timeline_judged_once(request):
    """Judge a timeline anew only if no test of ``READ_JUDGEMENTS`` had the same in this worker."""
    with pytest.MonkeyPatch.context() as patch:
        if READ_JUDGEMENTS.intersection(request.path.relative_to(Path(__file__).parent).parts):
            patch.setattr("schedtrace.diagnose.analyze.one_engine", one_engine_once)
            patch.setattr("schedtrace.watch.judge.judge_engine", judge_once)
            patch.setattr("schedtrace.timeline.timeline.make_tables", make_tables_once)
        yield


@pytest.fixture
def trace_of(tmp_path):
    """``trace_of(step(0), ..., token_budget=...)``: the trace of these lines, its header as told."""

    def read(*lines, closed=True, tail=b"", **header):
        path = tmp_path / "engine-0.jsonl"
        return read_trace(makers.write_trace(path, makers.header(**header), *lines, closed=closed, tail=tail))

    return read


@pytest.fixture
def view_of(trace_of):
    """The same as the rules see it."""
    return lambda *lines, **header: make_timeline(trace_of(*lines, **header))


@pytest.fixture
def found(view_of):
    """``found("preemption", step(0), ...)``: what this rule finds in these lines."""
    return lambda code, *lines, **header: RULES[code](view_of(*lines, **header))


@pytest.fixture
def run_of(tmp_path):
    """``run_of("base", step(0), ..., about=manifest())``: a run read from its folder."""
    return lambda name, *lines, **told: read_run(makers.run_folder(tmp_path / name, *lines, **told))


@pytest.fixture
def file(tmp_path):
    """``file("x.csv", "...")``: the path of a file with this content."""

    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def cli(capsys, monkeypatch):
    """``cli("analyze", path)``: the exit code, what went to stdout and what to stderr."""

    def call(*arguments):
        capsys.readouterr()
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr("sys.argv", ["schedtrace", *words])
        code = main(words)
        return (int(code), *capsys.readouterr())

    return call


@pytest.fixture
def recorded_words(request):
    """``recorded_words(finding.verdict, ...)``: these are the sentences that are recorded for this test."""
    words = RecordedWords(request.path, request.node.name)
    yield words
    words.check_all_said()
