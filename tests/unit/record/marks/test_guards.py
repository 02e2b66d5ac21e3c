"""A guard that somebody has named is known in that one module, if all the names are in it."""

import pytest

from schedtrace.record.marks import guards
from schedtrace.record.marks.guards import Guard, Registered, end_cause, exit_cause

NAMES = frozenset({"self", "running_on_ranks", "max_running_per_rank"})


@pytest.fixture(autouse=True)
def _one_is_registered(monkeypatch):
    guard = Guard("theirs", frozenset({"running_on_ranks", "max_running_per_rank"}), "rank_balance", "...")
    monkeypatch.setattr(guards, "registered_guards", lambda: Registered((guard,), ()))


def test_it_is_known_where_it_stands_whatever_the_loop():
    assert exit_cause("theirs", "waiting", NAMES, frozenset()) == "rank_balance"
    assert exit_cause("theirs", "running", NAMES | {"more", "64"}, frozenset({"outer"})) == "rank_balance"
    assert end_cause("theirs", "waiting", NAMES) == "rank_balance"


def test_it_is_not_known_anywhere_else():
    assert exit_cause("vllm.v1.core.sched.scheduler", "waiting", NAMES, frozenset()) == "other"


def test_it_is_not_known_by_some_of_its_names():
    assert exit_cause("theirs", "waiting", NAMES - {"running_on_ranks"}, frozenset()) == "other"
    assert exit_cause("theirs", "waiting", frozenset({"self", "more"}), NAMES) == "other"


def test_what_vllm_has_is_known_there_too():
    names = frozenset({"self", "len", "running", "max_num_running_reqs"})
    assert exit_cause("theirs", "waiting", names, frozenset()) == "max_num_seqs"
