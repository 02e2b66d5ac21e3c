"""Runs on disk for the commands to read, and a ``run`` that starts no vLLM."""

import pytest

from schedtrace.model.causes import Cause
from tests import makers
from tests.makers import arrival, finish, step

BLOCKED = [
    step(
        0,
        back=10_000,
        got={"a": 1},
        waiting=1,
        waiting_tokens_after=9,
        ended=Cause.KV_BLOCKS,
        arrived=[arrival("b", 0, 0)],
    ),
    step(1, got={"b": 100}, new="b", finished=[finish("a", finished_us=10_000)]),
]
"""b waits 10 ms for KV blocks."""


@pytest.fixture
def quiet(tmp_path):
    return makers.run_folder(tmp_path / "quiet", step(0, got={"a": 10}, new="a"))


@pytest.fixture
def warned(tmp_path):
    """b waits a tenth of its time: a warning."""
    ended = step(2, start=99_000, finished=[finish("b", finished_us=100_000)])
    return makers.run_folder(tmp_path / "warned", *BLOCKED, ended)


@pytest.fixture
def critical(tmp_path):
    """b waits ten elevenths of its time."""
    return makers.run_folder(tmp_path / "critical", *BLOCKED)


@pytest.fixture
def plans(monkeypatch):
    """The plans that ``run`` and ``diff --run`` would have executed; each leaves a trace of one step."""
    made = []

    def run_plans(plans, **how):
        for plan in plans:
            plan.how = how
            made.append(plan)
            makers.run_folder(plan.folder, step(0, got={"a": 10}, new="a"), about=plan.manifest)

    monkeypatch.setattr("schedtrace.cli.run.run_plans", run_plans)
    return made
