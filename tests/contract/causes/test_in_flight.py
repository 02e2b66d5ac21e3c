"""Steps whose output is still on its way: async scheduling and pipeline parallelism."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler

from schedtrace.model.causes import Cap, Cause
from schedtrace.model.trace import ChunkCap
from schedtrace.record.traced import traced_class
from tests.contract.causes.scenes import nobody_is_left, running, waiting

pytestmark = pytest.mark.vllm


def test_output_in_flight(scene):
    told = scene(async_scheduling=True).play(
        last_token={"prompt": 10, "max_tokens": 1}, goes_on={"prompt": 10, "max_tokens": 9}, steps=2
    )
    assert told.exits == [running("continue", Cause.OUTPUT_IN_FLIGHT, "last_token", 256), nobody_is_left(255)]
    assert ">= request.num_prompt_tokens + request.max_tokens" in told.guards[0]


def test_no_new_tokens(scene):
    """With pipeline parallelism a request's next token is not known while its last step is on its way."""
    told = scene(pipeline_parallel_size=2).play(on_its_way=10, steps=2)
    assert told.exits == [running("continue", Cause.NO_NEW_TOKENS, "on_its_way", 256), nobody_is_left(256)]
    assert told.guards[0] == "num_new_tokens == 0"
    assert told.caps == []


def test_no_new_tokens_at_max_model_len(scene):
    told = scene(async_scheduling=True, max_model_len=32).play(full={"prompt": 31, "max_tokens": 9}, steps=2)
    assert told.exits == [
        running("continue", Cause.NO_NEW_TOKENS, "full", 256, detail=Cap.MAX_MODEL_LEN),
        nobody_is_left(256),
    ]
    assert told.guards[0] == "num_new_tokens == 0"
    assert told.caps == [ChunkCap("full", Cap.MAX_MODEL_LEN, wanted_tokens=1, capped_tokens=0)]


def test_pp_stagger(scene):
    """By hand: only the V2 model runner, which needs Triton, has requests wait for their turn to decode."""
    engine = scene(async_scheduling=True, pipeline_parallel_size=2)
    engine.scheduler.use_v2_model_runner = True
    engine.add("waits_a_turn", prompt=10)
    engine.schedule()
    engine.schedule()
    told = engine.told()
    assert told.exits == [running("continue", Cause.PP_STAGGER, "waits_a_turn", 256), nobody_is_left(256)]
    assert told.guards[0] == "self.current_step < request.next_decode_eligible_step"


def reads(engine, steps):
    """A read-only request of a diffusion model: it ends with the output of so many denoising steps."""
    extra = {"diffusion_read_only": True, "diffusion_max_steps": steps, "diffusion_canvas_length": 1}
    engine.add("reads", prompt=10).sampling_params.extra_args = extra


def test_pp_stagger_is_not_what_a_read_of_a_diffusion_model_waits_for(scene):
    """The same field, at pipeline size 1: all of its steps are in flight."""
    engine = scene(wrap=lambda _: traced_class(DiffusionAsyncScheduler), async_scheduling=True)
    engine.scheduler.use_v2_model_runner = True
    reads(engine, steps=2)
    for _ in range(3):
        engine.schedule()
    told = engine.told()
    assert told.tokens == {}
    assert told.exits == [
        running("continue", Cause.OUTPUT_IN_FLIGHT, "reads", 256, detail="diffusion_read_only"),
        nobody_is_left(256),
    ]
    assert told.guards[0] == "self.current_step < request.next_decode_eligible_step"
    assert engine.told(1).tokens == {"reads": 1}


def test_a_read_of_a_diffusion_model_waits_its_turn_like_any_other(scene):
    """By hand, as above: one step of two is in flight."""
    engine = scene(
        wrap=lambda _: traced_class(DiffusionAsyncScheduler), async_scheduling=True, pipeline_parallel_size=2
    )
    engine.scheduler.use_v2_model_runner = True
    reads(engine, steps=2)
    engine.schedule()
    engine.schedule()
    assert engine.told().exits == [running("continue", Cause.PP_STAGGER, "reads", 256), nobody_is_left(256)]


def test_who_is_held_back_from_decoding_by_somebody_else_is_held_back_for_an_unknown_reason(scene):
    class HoldsBack(AsyncScheduler):
        def schedule(self, *args):
            for request in self.running:
                request.next_decode_eligible_step = self.current_step + 2
            return super().schedule(*args)

    told = scene(wrap=lambda _: traced_class(HoldsBack), async_scheduling=True).play(held_back=10, steps=2)
    guard = "self.current_step < request.next_decode_eligible_step"
    assert told.exits == [
        running("continue", Cause.OTHER, "held_back", 256, guard=guard),
        nobody_is_left(256),
    ]


def test_stale_output_pending(scene):
    """Three batches in flight: the victim's two chunks are still on their way when it is preempted."""
    engine = scene(
        pipeline_parallel_size=3,
        num_blocks=1 + 3,
        max_num_batched_tokens=16,
        scheduler_reserve_full_isl=False,
    )
    told = engine.play(
        stays={"prompt": 16, "max_tokens": 40}, victim={"prompt": 64, "max_tokens": 40}, steps=5
    )
    assert told.tokens == {}
    assert told.exits == [
        running("continue", Cause.NO_NEW_TOKENS, "stays", 16),
        waiting("continue", Cause.STALE_OUTPUT_PENDING, "victim", 16),
        nobody_is_left(16),
    ]
    assert told.guards[1] == "request.num_stale_output_tokens and (not request.drop_stale_output)"
