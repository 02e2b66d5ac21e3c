"""Runs on disk for the commands to read, and a ``run`` that starts no vLLM."""

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Preemption
from tests import makers
from tests.makers import step

BLOCKED = step(0, got={"a": 1}, waiting=1, waiting_tokens_after=9, ended=Cause.KV_BLOCKS)
PREEMPTED = step(0, prefill_tokens=10, recomputed_tokens=5, preempted=[Preemption("a", 5)])


@pytest.fixture
def quiet(tmp_path):
    return makers.run_folder(tmp_path / "quiet", step(0, got={"a": 10}, new="a"))


@pytest.fixture
def warned(tmp_path):
    return makers.run_folder(tmp_path / "warned", BLOCKED)


@pytest.fixture
def critical(tmp_path):
    return makers.run_folder(tmp_path / "critical", PREEMPTED)


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
