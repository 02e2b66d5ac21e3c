"""Who would be looked at next, in older releases; the contract tests see the one that is installed."""

from enum import Enum
from types import SimpleNamespace

import pytest

from schedtrace.record import vllms_own
from schedtrace.record.queues import Queues, _request_in, first_of, head
from tests.toys import Queue


class Policy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class One(SimpleNamespace):
    """A request that is taken by its number."""

    def __lt__(self, other):
        return self.number < other.number


class Foreign:
    """A queue that must not be asked."""

    def __len__(self):
        raise AssertionError

    __bool__ = __iter__ = peek_request = __len__


FIRST, SECOND = One(number=1), One(number=2)


@pytest.mark.parametrize(
    ("policy", "waiting", "skipped", "first"),
    [
        ("fcfs", [FIRST], [SECOND], SECOND),
        ("fcfs", [FIRST], [], FIRST),
        ("fcfs", [], [SECOND], SECOND),
        ("fcfs", [], [], None),
        ("priority", [FIRST], [SECOND], FIRST),
        ("priority", [SECOND], [FIRST], FIRST),
        ("priority", [SECOND], [], SECOND),
    ],
)
def test_vllm_0_18_to_0_30(policy, waiting, skipped, first):
    queues = {"waiting": Queue(waiting), "skipped_waiting": Queue(skipped)}
    assert head(SimpleNamespace(policy=Policy(policy), **queues)) == first


def test_requests_are_compared_only_if_it_is_known_what_that_does(monkeypatch):
    queues = {"waiting": Queue([FIRST]), "skipped_waiting": Queue([SECOND])}
    monkeypatch.setattr(vllms_own, "_is_own_owner", lambda owner, _: owner is not One)
    vllms_own._is_own_class.cache_clear()
    assert head(SimpleNamespace(policy=Policy.PRIORITY, **queues)) is None


def test_a_scheduler_with_a_choice_of_its_own_is_not_second_guessed():
    class Chooses(SimpleNamespace):
        def _select_waiting_queue_for_scheduling(self):
            raise AssertionError

    queues = {"waiting": Queue([FIRST]), "skipped_waiting": Queue([SECOND])}
    assert head(Chooses(policy=Policy.FCFS, **queues)) is None


def test_before_vllm_0_18():
    assert head(SimpleNamespace(waiting=Queue([FIRST, SECOND]))) == FIRST


def test_to_vllm_0_11_a_heap_holds_priority_arrival_and_request():
    assert [_request_in(entry) for entry in ((1, 0.5, FIRST), FIRST)] == [FIRST, FIRST]


@pytest.mark.parametrize(
    ("aside", "number"), [(Queue([FIRST, SECOND]), 2), ({"a": FIRST}, 1), ([], 0), (Foreign(), 0)]
)
def test_requests_set_aside_are_counted_where_nobody_need_be_asked(aside, number):
    scheduler = SimpleNamespace(waiting=Queue(), deferred_waiting=aside)
    assert Queues(scheduler).num_not_ready(scheduler) == number


def test_a_foreign_queue_is_not_asked_and_who_neither_runs_nor_is_done_waits():
    requests = dict.fromkeys(("a", "b", "c", "kept"))
    queues = {"waiting": Foreign(), "skipped_waiting": Foreign()}
    scheduler = SimpleNamespace(running=[1], requests=requests, **queues)
    counted = Queues(scheduler)
    counted.freed("gone")
    counted.freed("kept")
    assert (counted.count_waiting(scheduler), counted.num_not_ready(scheduler)) == (2, 0)
    assert (head(scheduler), first_of(scheduler.waiting)) == (None, None)
    assert counted.foreign(scheduler) == [f"{__name__}.Foreign"]


def test_seen_from_outside_who_is_done_and_kept_for_its_blocks_does_not_wait():
    runs, waits, kept = (
        SimpleNamespace(status=SimpleNamespace(name=name))
        for name in ("RUNNING", "WAITING_FOR_REMOTE_KVS", "FINISHED_LENGTH_CAPPED")
    )
    requests = {"runs": runs, "waits": waits, "kept": kept}
    foreign = SimpleNamespace(running=[runs], requests=requests, waiting=Foreign())
    assert Queues(foreign).num_waiting_seen_from_outside(foreign) == 1
    own = SimpleNamespace(running=[runs], requests=None, waiting=Queue([waits]))
    assert Queues(own).num_waiting_seen_from_outside(own) == 1


def test_sessions_between_two_parts_do_not_wait_in_a_foreign_queue():
    waits = SimpleNamespace(status=SimpleNamespace(name="WAITING"))
    scheduler = SimpleNamespace(running=[], requests={}, waiting=Foreign())
    counted = Queues(scheduler)
    assert not counted.any_waiting(scheduler, 0)
    scheduler.requests = {"session": waits}
    assert not counted.any_waiting(scheduler, 1)
    assert counted.any_waiting(scheduler, 0)


def test_the_latest_request_that_waits_ends_the_walk_of_a_foreign_queue():
    class Finished(SimpleNamespace):
        @property
        def status(self):
            looked.append(self)
            return SimpleNamespace(name="FINISHED_STOPPED")

    looked = []
    kept = [Finished() for _ in range(3)]
    waits = SimpleNamespace(status=SimpleNamespace(name="WAITING"))
    requests = dict(enumerate([*kept, *[waits] * 10_000, kept[0]]))
    scheduler = SimpleNamespace(running=[], requests=requests, waiting=Foreign())
    assert Queues(scheduler).any_waiting(scheduler, 0)
    assert looked == [kept[0]]
    scheduler.requests = dict(enumerate(kept))
    assert not Queues(scheduler).any_waiting(scheduler, 0)
