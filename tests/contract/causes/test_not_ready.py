"""Requests that wait for something of their own: a grammar, the next part of their input."""

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import StructuredOutputsParams

from schedtrace.model.causes import Cause
from tests.contract.causes.scenes import nobody_is_left, waiting

pytestmark = pytest.mark.vllm

BLOCKED = "not ready_to_schedule"
GRAMMAR = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
STREAMING = "WAITING_FOR_STREAMING_REQ"


def structured():
    return StructuredOutputsParams(json="{}")


def test_grammar_pending(scene):
    told = scene().play(structured={"structured_outputs": structured()}, plain=10)
    assert told.exits == [
        waiting("continue", Cause.GRAMMAR_PENDING, "structured", 256, detail=GRAMMAR),
        nobody_is_left(246),
    ]
    assert told.guards[0] == BLOCKED


def test_streaming_input_pending(scene):
    told = scene().play(session={"prompt": 10, "max_tokens": 1, "resumable": True}, steps=2)
    assert told.exits == [
        waiting("continue", Cause.STREAMING_INPUT_PENDING, "session", 256, detail=STREAMING),
        nobody_is_left(256),
    ]
    assert told.guards[0] == BLOCKED


def test_skips_for_another_cause_at_the_same_place_do_not_share_it(scene):
    session = {"prompt": 1, "max_tokens": 1, "resumable": True}
    engine = scene(max_num_seqs=70).after(**{f"session{number}": session for number in range(66)})
    told = engine.play(structured={"structured_outputs": structured()})
    assert told.exits[63:] == [
        waiting("continue", Cause.STREAMING_INPUT_PENDING, "session63", 256, detail=STREAMING),
        waiting("continue", Cause.STREAMING_INPUT_PENDING, None, 256, detail=STREAMING, count=2),
        waiting("continue", Cause.GRAMMAR_PENDING, "structured", 256, detail=GRAMMAR),
        nobody_is_left(256),
    ]
