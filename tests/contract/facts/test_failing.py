"""A fact that cannot be read is left out and said once; the decisions are recorded on."""

import pytest

pytest.importorskip("vllm")

from tests.contract.facts.told import Traced, lines, steps
from tests.contract.loads import under_load

pytestmark = pytest.mark.vllm

FACTS = "schedtrace.record.facts"


def broken(*_args, **_options):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "place",
    [
        f"{FACTS}.SchedulerFacts.note_call",
        f"{FACTS}.admissions",
        f"{FACTS}.Inputs.input_times",
        f"{FACTS}.Inputs.abort_us",
        "schedtrace.record.facts.Prefixes.keep_prompt",
    ],
)
def test_recording_goes_on(place, recording, monkeypatch, warnings):
    monkeypatch.setattr(place, broken)
    engine = under_load(Traced, "aborts")
    told = steps(recording)
    notices = [line["message"] for line in lines(recording) if line["type"] == "notice"]
    assert notices == ["facts beside the decisions may be missing: ZeroDivisionError()"]
    assert warnings == [f"schedtrace: {notices[0]}"]
    assert lines(recording)[-1] == {"type": "end", "at_us": lines(recording)[-1]["at_us"], "steps": len(told)}
    arrived = {entry["request_id"] for line in lines(recording) for entry in line.get("arrived", ())}
    assert arrived == set(engine.requests)


def test_holders_that_cannot_be_looked_at(recording, monkeypatch, warnings):
    monkeypatch.setattr("schedtrace.record.allocation.refused_head", broken)
    under_load(Traced, "tight_kv")
    said = "exits may lack details: a mark in schedule() failed: ZeroDivisionError()"
    assert [line["message"] for line in lines(recording) if line["type"] == "notice"] == [said]
    assert warnings == [f"schedtrace: {said}"]
    exits = [taken for step in steps(recording) for taken in step["exits"] if taken["loop"] == "waiting"]
    refused = [taken["blocks_needed"] for taken in exits if taken["cause"] == "kv_blocks"]
    assert min(refused) > 0


def test_a_header_without_them(recording, monkeypatch):
    monkeypatch.setattr("schedtrace.record.header.settings", broken)
    Traced().scheduler.shutdown()
    first = lines(recording)[0]
    assert first["notices"] == [
        "the engine's settings and cache groups could not be read: ZeroDivisionError()"
    ]
    assert "cache_groups" not in first
