"""The finding of ``examples/rank_balance``."""

from importlib import import_module
from pathlib import Path

import pytest

from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.rank_traces import write_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "rank_balance"
CLASS = "schedtrace.balance.BalanceScheduler"


@pytest.fixture
def rule(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    return import_module("rank_balance.findings").RULE


@pytest.fixture
def timeline(tmp_path):
    """``timeline(passes, ...)``: that of rank 0 of a run of these passes."""

    def make(passes, **fields):
        return make_timeline(read_run(write_ranks(tmp_path / "run", passes, **fields)).traces[0])

    return make


def test_a_gate_without_ranks_in_lockstep(rule, timeline, recorded_words):
    """One of 16 requests waits for 30 steps, all of its time."""
    gated = timeline(
        [[(15, 0)]] * 30, lockstep=False, refused="rank_balance", scheduler_class=CLASS, exits_via="source"
    )
    [finding] = rule(gated)
    assert (finding.code, finding.count, finding.evidence.closed_steps) == ("balance-without-effect", 30, 30)
    assert finding.share_frac == pytest.approx(1 / 16)
    recorded_words(finding)


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [(2, {"scheduler_class": CLASS}), (1, {"lockstep": False})],
    ids=["ranks", "vLLM's own"],
)
def test_ranks_in_lockstep_and_other_schedulers_are_not_reported(rule, timeline, ranks, fields):
    assert rule(timeline([[(8, 0)] * ranks] * 30, **fields)) == []
