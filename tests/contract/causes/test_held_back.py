"""Requests that are held back: by a pause, the prefill cadence, the number of LoRA adapters."""

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from schedtrace.model.causes import Cause
from tests.contract.causes.scenes import nobody_is_left, running, waiting

pytestmark = pytest.mark.vllm


def adapter(number):
    return LoRARequest(f"adapter{number}", number, "/nowhere")


def test_paused_new(scene):
    engine = scene()
    engine.pause("PAUSED_NEW")
    told = engine.play(waits={})
    assert told.exits == [waiting("break", Cause.PAUSED, "waits", 256, detail="PAUSED_NEW")]
    assert told.guards == ["not request_queue or input_budget <= draft_slots"]


def test_paused_new_refuses_nobody_if_nobody_is_left(scene):
    engine = scene()
    engine.pause("PAUSED_NEW")
    assert engine.play().exits == [nobody_is_left(256)]


def test_paused_all(scene):
    engine = scene().after(runs={})
    engine.pause("PAUSED_ALL")
    told = engine.play(waits={})
    assert told.exits == [
        running("condition", Cause.PAUSED, "runs", 0, detail="PAUSED_ALL"),
        waiting("gate", Cause.PAUSED, "waits", 0, detail="PAUSED_ALL"),
    ]
    assert told.guards == [
        "req_index < len(self.running) and token_budget > 0",
        "not preempted_reqs and self._pause_state != PauseState.PAUSED_ALL",
    ]


def test_prefill_throttled(scene):
    engine = scene().after(decodes={"prompt": 10, "max_tokens": 9})
    told = engine.play(deferred=10, throttled=True)
    assert told.exits == [waiting("break", Cause.PREFILL_THROTTLED, "deferred", 255)]
    assert told.guards == ["defer_prefills and num_computed_tokens < request.num_tokens - 1"]


def test_prefill_throttled_while_it_runs(scene):
    engine = scene(max_num_batched_tokens=32)
    engine.after(decodes={"prompt": 10, "max_tokens": 9}, half_way=60)
    told = engine.play(throttled=True)
    assert told.exits == [
        running("continue", Cause.PREFILL_THROTTLED, "half_way", 31),
        nobody_is_left(31),
    ]
    assert told.guards[0] == "defer_prefills and request.is_prefill_chunk"


def test_lora_cap(scene):
    told = scene(enable_lora=True, max_loras=1).play(
        one={"lora_request": adapter(1)},
        other={"lora_request": adapter(2)},
        one_again={"lora_request": adapter(1)},
    )
    assert told.tokens == {"one": 10, "one_again": 10}
    assert told.exits == [waiting("continue", Cause.LORA_CAP, "other", 246), nobody_is_left(236)]
    assert "len(scheduled_loras) == self.lora_config.max_loras" in told.guards[0]


def test_after_64_skips_at_one_place_the_rest_share_a_line(scene):
    others = {f"other{number}": {"lora_request": adapter(2)} for number in range(100)}
    told = scene(enable_lora=True, max_loras=1).play(one={"lora_request": adapter(1)}, **others)
    assert told.exits == [
        *(waiting("continue", Cause.LORA_CAP, f"other{number}", 246) for number in range(64)),
        waiting("continue", Cause.LORA_CAP, None, 246, count=36),
        nobody_is_left(246),
    ]
