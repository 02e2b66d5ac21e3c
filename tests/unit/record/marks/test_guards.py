"""A guard that somebody has named is known in that one module, if all the names are in it."""

import pytest

from schedtrace.record.marks import guards
from schedtrace.record.marks.guards import Guard, Registered, cause_of_end, cause_of_exit

NAMES = frozenset({"self", "running_on_ranks", "max_running_per_rank"})


@pytest.fixture(autouse=True)
def _one_is_registered(monkeypatch):
    guard = Guard("theirs", frozenset({"running_on_ranks", "max_running_per_rank"}), "rank_balance", "...")
    monkeypatch.setattr(guards, "registered_guards", lambda: Registered((guard,), ()))


def test_it_is_known_where_it_stands_whatever_the_loop():
    assert cause_of_exit("theirs", "waiting", NAMES, frozenset()) == "rank_balance"
    assert cause_of_exit("theirs", "running", NAMES | {"more", "64"}, frozenset({"outer"})) == "rank_balance"
    assert cause_of_end("theirs", "waiting", NAMES) == "rank_balance"


def test_it_is_not_known_anywhere_else():
    assert cause_of_exit("vllm.v1.core.sched.scheduler", "waiting", NAMES, frozenset()) == "other"


def test_it_is_not_known_by_some_of_its_names():
    assert cause_of_exit("theirs", "waiting", NAMES - {"running_on_ranks"}, frozenset()) == "other"
    assert cause_of_exit("theirs", "waiting", frozenset({"self", "more"}), NAMES) == "other"


def test_what_vllm_has_is_known_there_too():
    names = frozenset({"self", "len", "running", "max_num_running_reqs"})
    assert cause_of_exit("theirs", "waiting", names, frozenset()) == "max_num_seqs"
