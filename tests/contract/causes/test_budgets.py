"""Budgets, seats and an empty queue: each exit of ``schedule()`` they lead to, as the trace has it."""

import pytest

pytest.importorskip("vllm")

from schedtrace.balance import balanced
from schedtrace.diagnose.analyze import analyze
from schedtrace.model.causes import Cause
from schedtrace.model.message import plain
from schedtrace.record.traced import traced_class
from schedtrace.simulate.driver import tiny_model
from tests.contract.causes.scenes import running, waiting
from tests.simulated import simulated

pytestmark = pytest.mark.vllm

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFT_MODEL = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3}
"""Takes a slot of the input budget for every request, besides its tokens."""
DECODES = {"prompt": 1, "max_tokens": 9}


def test_queue_empty(scene):
    told = scene().play(only=10)
    assert told.exits == [waiting("break", Cause.QUEUE_EMPTY, None, 246)]
    assert told.guards == ["not request_queue or input_budget <= draft_slots"]


def test_token_budget(scene):
    told = scene(max_num_batched_tokens=100).play(long=120, next=10)
    assert told.exits == [waiting("condition", Cause.TOKEN_BUDGET, "next", 0)]
    assert told.guards == ["token_budget > 0"]


def test_token_budget_with_nobody_waiting_names_nobody(scene):
    told = scene(max_num_batched_tokens=100).play(long=120)
    assert told.exits == [waiting("condition", Cause.TOKEN_BUDGET, None, 0)]


def test_token_budget_leaves_a_running_request_out(scene):
    """Drafts make a request want more than when it was admitted."""
    told = scene(max_num_batched_tokens=4, max_num_seqs=2, speculative_config=NGRAM, drafts=3).play(
        first=DECODES, second=DECODES, steps=2
    )
    assert told.tokens == {"first": 4}
    assert told.exits == [
        running("condition", Cause.TOKEN_BUDGET, "second", 0),
        waiting("condition", Cause.TOKEN_BUDGET, None, 0),
    ]
    assert told.guards[0] == "req_index < len(self.running) and token_budget > 0"


def test_input_budget(scene):
    told = scene(max_num_batched_tokens=40, speculative_config=DRAFT_MODEL).play(one=19, two=19, three=19)
    assert told.tokens == {"one": 19, "two": 19}
    assert told.exits == [waiting("break", Cause.INPUT_BUDGET, "three", 2)]
    assert told.guards == ["not request_queue or input_budget <= draft_slots"]


def test_input_budget_leaves_a_running_request_out(scene):
    engine = scene(max_num_batched_tokens=4, max_num_seqs=3, speculative_config=DRAFT_MODEL, drafts=3)
    told = engine.play(first=DECODES, second=DECODES, third=DECODES, steps=2)
    assert told.tokens == {"first": 3}
    assert told.exits == [
        running("break", Cause.INPUT_BUDGET, "second", 1),
        waiting("break", Cause.INPUT_BUDGET, "third", 1),
    ]
    assert told.guards[0] == "input_budget <= draft_slots"


def test_spec_decode_padding(scene):
    """A decode is admitted with room for all its drafts, or not at all."""
    engine = scene(max_num_batched_tokens=4, max_num_seqs=2, speculative_config=NGRAM)
    told = engine.after(runs={"prompt": 2, "max_tokens": 9}).play(wants_four=1)
    assert told.exits == [waiting("break", Cause.SPEC_DECODE_PADDING, "wants_four", 3)]
    assert told.guards == ["padded_num_tokens > request_token_budget"]


def test_max_num_seqs(scene):
    told = scene(max_num_seqs=2).play(one=10, two=10, three=10, four=10)
    assert told.exits == [waiting("break", Cause.MAX_NUM_SEQS, "three", 236)]
    assert told.guards == ["num_running >= self.max_num_active_reqs"]


def test_rank_balance(scene):
    """Two seats are free, and the other rank has one."""
    engine = scene(wrap=lambda base: traced_class(balanced(base)), max_num_seqs=4)
    engine.after(one=10, two=10)
    engine.scheduler.observe_ranks([2, 3])
    told = engine.play(three=10)
    assert told.exits == [waiting("break", Cause.RANK_BALANCE, "three", 254)]
    assert told.guards == ["num_running >= self.max_num_active_reqs"]


def test_max_num_active_seqs_counts_as_max_num_seqs(scene):
    told = scene(max_num_seqs=4, max_num_active_seqs=1).play(one=10, two=10)
    assert told.exits == [waiting("break", Cause.MAX_NUM_SEQS, "two", 246)]


def test_chunked_prefill_off(scene):
    told = scene(enable_chunked_prefill=False).play(fits=100, too_long=200)
    assert told.exits == [waiting("break", Cause.CHUNKED_PREFILL_OFF, "too_long", 156)]
    assert "num_new_tokens > request_token_budget" in told.guards[0]


def test_a_prompt_larger_than_the_budget_left_is_told_apart_from_late_arrivals(tmp_path):
    """The thread's other explanation."""

    def load(engine):
        for number, length in enumerate([100, 100, 100, 2000, 100]):
            engine.arrive(0, f"t1-{number}", length, 8)
        engine.run()

    off = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048, "max_model_len": 2048}
    [run] = analyze([simulated(tmp_path, load, trial_ids=True, **off)]).runs
    findings = {finding.code: finding for finding in run.every_finding()}
    blocked = findings["blocked-budget"]
    assert blocked.cause == "chunked_prefill_off"
    assert run.trials[0].new_per_step == [3, 1, 1]
    assert "t1-3 next in line, 3 running, 1,748 tokens of budget left" in plain(blocked.example)
    assert "arrival-limited" not in findings
