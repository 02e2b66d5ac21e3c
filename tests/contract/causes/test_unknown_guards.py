"""Guards of a scheduler that is not vLLM's: unknown with their text, or named by an entry point."""

from importlib.metadata import EntryPoint

import pytest

pytest.importorskip("vllm")

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import ChunkCap
from schedtrace.record.marks import guards
from schedtrace.record.traced import traced_class
from tests.contract.causes import toy_scheduler
from tests.contract.causes.scenes import nobody_is_left, waiting

pytestmark = pytest.mark.vllm

QUOTA = "num_new_tokens > quota"
VALUES = "num_new_tokens = 50; quota = 40"


@pytest.fixture
def told(scene):
    """What was told of a prompt that is counted as 60 of a quota of 100, and of one behind it."""

    def play():
        told = scene(wrap=lambda plain: traced_class(toy_scheduler.with_quota(plain))).play(
            first=70, held_back=50
        )
        assert told.tokens == {"first": 70}
        return told

    return play


@pytest.fixture
def _named(monkeypatch):
    entry_point = EntryPoint("toy", f"{toy_scheduler.__name__}:GUARDS", "schedtrace.guards")
    monkeypatch.setattr(guards, "entry_points", lambda group: [entry_point] * (group == entry_point.group))
    guards.registered_guards.cache_clear()
    yield
    guards.registered_guards.cache_clear()


def test_other(told):
    told = told()
    assert told.exits == [
        waiting("continue", Cause.OTHER, "held_back", 186, guard=QUOTA, values=VALUES),
        nobody_is_left(186),
    ]
    assert told.guards[0] == QUOTA
    [exit_guard, statement] = sorted(told.header.unknown_guards, reverse=True)
    assert exit_guard.endswith(f": {QUOTA}")
    assert statement.endswith(": num_new_tokens = min(num_new_tokens, self.most_counted)")
    assert told.header.registered_causes == {}


def test_other_cap(told):
    told = told()
    statement = "num_new_tokens = min(num_new_tokens, self.most_counted)"
    assert told.caps == [
        ChunkCap("first", Cap.OTHER, wanted_tokens=70, capped_tokens=60, statement=statement)
    ]
    assert told.statements == [statement]


@pytest.mark.usefixtures("_named")
def test_a_guard_named_by_its_author_has_that_cause(told):
    told = told()
    assert told.exits == [waiting("continue", "toy_quota", "held_back", 186), nobody_is_left(186)]
    assert told.header.registered_causes["toy_quota"] == "the step's quota of prompt tokens is spent"
    assert [unknown for unknown in told.header.unknown_guards if QUOTA in unknown] == []


@pytest.mark.usefixtures("_named")
def test_a_cap_named_by_its_author(told):
    told = told()
    assert told.caps == [ChunkCap("first", "toy_most_counted", wanted_tokens=70, capped_tokens=60)]
    assert told.header.registered_causes["toy_most_counted"] == "the most that is counted of one prompt"
    assert told.header.unknown_guards == []
