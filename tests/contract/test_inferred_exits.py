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


def test_queue_empty(exits):
    engine = Watched()
    engine.add("only", prompt=10)
    engine.step()
    assert exits(engine) == [(*NOBODY_WAITS, 246, None)]


def test_a_step_with_nothing_to_do_ends_with_an_empty_queue(exits):
    engine = Watched()
    engine.step()
    assert exits(engine) == [(*NOBODY_WAITS, 256, None)]


def test_token_budget(exits):
    engine = Watched(max_num_batched_tokens=100)
    engine.add("long", prompt=120)
    engine.add("next", prompt=10)
    engine.step()
    assert exits(engine) == [("waiting", "condition", "token_budget", "next", 0, None)]


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


def test_max_num_seqs(exits):
    engine = Watched(max_num_seqs=2)
    for name in ("one", "two", "three", "four"):
        engine.add(name, prompt=10)
    engine.step()
    assert exits(engine) == [("waiting", "break", "max_num_seqs", "three", 236, None)]


def test_max_num_active_seqs_counts_as_max_num_seqs(exits):
    engine = Watched(max_num_seqs=4, max_num_active_seqs=1)
    engine.add("one", prompt=10)
    engine.add("two", prompt=10)
    engine.step()
    assert exits(engine) == [("waiting", "break", "max_num_seqs", "two", 246, None)]


def test_kv_blocks(exits):
    engine = Watched(num_blocks=10)
    engine.add("fits", prompt=100)
    engine.add("does_not", prompt=100)
    engine.add("would", prompt=10)
    engine.step()
    assert exits(engine) == [("waiting", "break", "kv_blocks", "does_not", 156, None)]


def test_preempted_this_step(exits):
    engine = Watched(num_blocks=1 + 4, enable_prefix_caching=False)
    engine.add("stays", prompt=32, max_tokens=40)
    engine.add("victim", prompt=32, max_tokens=40)
    engine.step()
    engine.step()
    assert exits(engine) == [("waiting", "gate", "preempted_this_step", None, 255, None)]


@pytest.mark.parametrize("state", ["PAUSED_NEW", "PAUSED_ALL"])
def test_paused(exits, state):
    engine = Watched()
    engine.add("waits")
    engine.pause(state)
    engine.step()
    assert exits(engine) == [("waiting", "gate", "paused", None, 256, state)]


def test_chunked_prefill_off(exits):
    engine = Watched(enable_chunked_prefill=False)
    engine.add("fits", prompt=100)
    engine.add("too_long", prompt=200)
    engine.step()
    told = ("waiting", "break", "chunked_prefill_off", "too_long", 156, "prompt of 200 tokens")
    assert exits(engine) == [told]


def test_grammar_pending(exits):
    engine = Watched()
    engine.add("structured", structured_outputs=StructuredOutputsParams(json="{}"))
    engine.add("plain", prompt=10)
    engine.step()
    status = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
    assert exits(engine) == [("waiting", "continue", "grammar_pending", "structured", 246, status)]


def test_streaming_input_pending(exits):
    engine = Watched()
    engine.add("session", prompt=10, max_tokens=1, resumable=True)
    engine.step()
    engine.step()
    status = "WAITING_FOR_STREAMING_REQ"
    assert exits(engine) == [("waiting", "continue", "streaming_input_pending", "session", 256, status)]


def test_output_in_flight(exits):
    engine = Watched(async_scheduling=True)
    engine.add("last_token", prompt=10, max_tokens=1)
    engine.add("goes_on", prompt=10, max_tokens=9)
    engine.step()
    engine.step()
    assert exits(engine) == [
        ("running", "continue", "output_in_flight", "last_token", 255, None),
        (*NOBODY_WAITS, 255, None),
    ]


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
