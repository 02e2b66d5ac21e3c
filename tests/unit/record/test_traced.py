"""The traced class hands on every call, and notes it where it records."""

from unittest.mock import Mock, call

import pytest

from schedtrace.record import traced
from schedtrace.record.disguise import RECORDERS

KEYWORDS = {"delay": True}
HOOKS = {
    "_preempt_request": [call.request_preempted, call.request_was_preempted],
    "_free_request": [call.request_freed, call.request_was_freed],
    "_update_from_kv_xfer_finished": [call.kv_loads_ended],
    "add_request": [call.request_arrives],
    "shutdown": [call.close],
}


def answers(name):
    return lambda _, *given, **keywords: (name, given, keywords)


Scheduler = type("Scheduler", (), {name: answers(name) for name in HOOKS})
"""Its methods answer with their name and what they were given."""


def made(monkeypatch, recorder):
    monkeypatch.setattr(traced, "open_recorder", lambda scheduler: RECORDERS.put(scheduler, recorder))
    return traced.traced_class(Scheduler)()


@pytest.mark.parametrize("name", HOOKS)
def test_a_call_is_handed_on_where_nothing_is_recorded(monkeypatch, name):
    assert getattr(made(monkeypatch, None), name)("a", 1, **KEYWORDS) == (name, ("a", 1), KEYWORDS)


@pytest.mark.parametrize(("name", "notes"), HOOKS.items())
def test_a_call_is_noted_and_handed_on(monkeypatch, name, notes):
    recorder = Mock()
    scheduler = made(monkeypatch, recorder)
    given = {"_free_request": ("a",), "shutdown": ()}.get(name, (scheduler, "a"))
    after = {"_free_request": (scheduler, "a")}.get(name, ())
    expected = [note(*given) for note in notes[:1]] + [note(*after) for note in notes[1:]]
    assert getattr(scheduler, name)("a", 1, **KEYWORDS) == (name, ("a", 1), KEYWORDS)
    assert recorder.mock_calls == expected


def test_a_scheduler_without_these_methods_gets_none():
    bare = traced.traced_class(type("Bare", (), {}))
    assert not any(hasattr(bare, name) for name in list(HOOKS)[:3])
