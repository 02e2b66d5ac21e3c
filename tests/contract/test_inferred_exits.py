"""Why a step stopped, inferred from the state it left behind: one scene for each cause that can be told."""

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.outputs import DraftTokenIds

from schedtrace.read.run import read_run
from schedtrace.record import traced
from schedtrace.record.marks.marking import Instrumented
from schedtrace.simulate import Driver as Engine

pytestmark = pytest.mark.vllm

COLUMNS = ["loop", "kind", "cause", "request_id", "budget_left", "detail"]
NOBODY_WAITS = ("waiting", "condition", "queue_empty", None)


@pytest.fixture(autouse=True)
def _nothing_can_be_proven(monkeypatch):
    monkeypatch.setattr(traced, "instrument", lambda _: Instrumented((), ("schedule: no source",)))


class Watched(Engine):
    """An engine traced without its source, never left with the recorder's ``allocate_slots``."""

    def __init__(self, **options):
        super().__init__(traced.traced_class.__wrapped__, **options)

    def schedule(self, *args):
        output = super().schedule(*args)
        assert "allocate_slots" not in vars(self.scheduler.kv_cache_manager)
        return output


@pytest.fixture
def exits(recording):
    """The exits of the last step, once the trace is closed."""

    def read(engine):
        engine.scheduler.shutdown()
        [trace] = read_run(recording).traces
        every = trace.exits().collect()
        assert set(every["via"]) == {"inferred"}
        return every.filter(step=trace.steps["step"].max()).select(COLUMNS).rows()

    return read


TWO_BLOCKS = {"prompt": 32, "max_tokens": 40}
SESSION = {"prompt": 10, "max_tokens": 1, "resumable": True}
STRUCTURED = {"structured_outputs": StructuredOutputsParams(json="{}")}
GRAMMAR, STREAMING = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_STREAMING_REQ"
SCENES = {
    "queue_empty": ({}, {"only": 10}, 1, (*NOBODY_WAITS, 246, None)),
    "queue_empty, nothing to do": ({}, {}, 1, (*NOBODY_WAITS, 256, None)),
    "token_budget": (
        {"max_num_batched_tokens": 100},
        {"long": 120, "next": 10},
        1,
        ("waiting", "condition", "token_budget", "next", 0, None),
    ),
    "max_num_seqs": (
        {"max_num_seqs": 2},
        {"one": 10, "two": 10, "three": 10, "four": 10},
        1,
        ("waiting", "break", "max_num_seqs", "three", 236, None),
    ),
    "max_num_seqs, of active ones": (
        {"max_num_seqs": 4, "max_num_active_seqs": 1},
        {"one": 10, "two": 10},
        1,
        ("waiting", "break", "max_num_seqs", "two", 246, None),
    ),
    "kv_blocks": (
        {"num_blocks": 10},
        {"fits": 100, "does_not": 100, "would": 10},
        1,
        ("waiting", "break", "kv_blocks", "does_not", 156, None),
    ),
    "preempted_this_step": (
        {"num_blocks": 1 + 4, "enable_prefix_caching": False},
        {"stays": TWO_BLOCKS, "victim": TWO_BLOCKS},
        2,
        ("waiting", "gate", "preempted_this_step", None, 255, None),
    ),
    "chunked_prefill_off": (
        {"enable_chunked_prefill": False},
        {"fits": 100, "too_long": 200},
        1,
        ("waiting", "break", "chunked_prefill_off", "too_long", 156, "prompt of 200 tokens"),
    ),
    "grammar_pending": (
        {},
        {"structured": STRUCTURED, "plain": 10},
        1,
        ("waiting", "continue", "grammar_pending", "structured", 246, GRAMMAR),
    ),
    "streaming_input_pending": (
        {},
        {"session": SESSION},
        2,
        ("waiting", "continue", "streaming_input_pending", "session", 256, STREAMING),
    ),
    "output_in_flight": (
        {"async_scheduling": True},
        {"last_token": {"prompt": 10, "max_tokens": 1}, "goes_on": {"prompt": 10, "max_tokens": 9}},
        2,
        ("running", "continue", "output_in_flight", "last_token", 255, None),
        (*NOBODY_WAITS, 255, None),
    ),
}
"""Options of the engine, requests by their prompt or options, steps, and the exits of the last of these."""


@pytest.mark.parametrize("name", SCENES)
def test_a_cause_that_the_state_tells(exits, name):
    options, requests, steps, *expected = SCENES[name]
    engine = Watched(**options)
    for request_id, about in requests.items():
        engine.add(request_id, **(about if isinstance(about, dict) else {"prompt": about}))
    for _ in range(steps):
        engine.step()
    assert exits(engine) == expected


def test_token_budget_leaves_a_running_request_out(exits):
    """Possible with draft tokens only: without them a request never wants more than when it was admitted."""
    engine = Watched(max_num_batched_tokens=4, max_num_seqs=2)
    engine.add("first", prompt=1, max_tokens=9)
    engine.add("second", prompt=1, max_tokens=9)
    engine.step()
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["first"], [[5, 5, 5]]))
    engine.schedule()
    assert exits(engine) == [
        ("running", "condition", "token_budget", "second", 0, None),
        (*NOBODY_WAITS, 0, None),
    ]


@pytest.mark.parametrize("state", ["PAUSED_NEW", "PAUSED_ALL"])
def test_paused(exits, state):
    engine = Watched()
    engine.add("waits")
    engine.pause(state)
    engine.step()
    assert exits(engine) == [("waiting", "gate", "paused", None, 256, state)]


def test_other_where_the_state_does_not_tell(recording, exits):
    """Prefills that the data-parallel coordinator throttles leave no mark on the state."""
    engine = Watched()
    engine.add("decodes", prompt=10, max_tokens=9)
    engine.step()
    engine.add("deferred", prompt=10)
    engine.step(True)
    assert exits(engine) == [("waiting", "break", "other", "deferred", 255, None)]
    [trace] = read_run(recording).traces
    guard = trace.exits().collect()["guard"][-1]
    assert guard == "the state after schedule() does not tell which exit was taken"
