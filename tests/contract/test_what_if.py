"""What ``step`` says a different limit would have allowed is what vLLM's scheduler does with that limit."""

import pytest

pytest.importorskip("vllm")

from schedtrace.explain.step import explain_step
from schedtrace.read.run import read_run
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver

pytestmark = pytest.mark.vllm

PROMPTS = {f"r{n}": tokens for n, tokens in enumerate([60, 90, 30, 150, 16, 17, 80, 48])}


def first_step(**options):
    """What the first step schedules with everybody queued: no earlier step depends on the limit."""
    engine = Driver(options.pop("wrap", None), **options)
    for name, tokens in PROMPTS.items():
        engine.add(name, tokens, 20)
    output = engine.step()
    engine.finish()
    return dict(output.num_scheduled_tokens)


CASES = [
    pytest.param({"max_num_seqs": 3}, "max_num_seqs", id="seats, all fit"),
    pytest.param({"max_num_seqs": 2, "max_num_batched_tokens": 256}, "max_num_seqs", id="seats, budget"),
    pytest.param({"max_num_seqs": 2, "num_blocks": 18}, "max_num_seqs", id="seats, blocks"),
    pytest.param(
        {"max_num_batched_tokens": 200, "max_num_seqs": 5}, "max_num_batched_tokens", id="budget, seats"
    ),
    pytest.param(
        {"max_num_batched_tokens": 100, "num_blocks": 23}, "max_num_batched_tokens", id="budget, blocks"
    ),
    pytest.param({"num_blocks": 14}, "kv_blocks", id="blocks"),
    pytest.param(
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        "max_num_batched_tokens",
        id="no chunks",
    ),
    pytest.param(
        {"long_prefill_token_threshold": 64, "max_num_batched_tokens": 1024},
        "long_prefill_token_threshold",
        id="threshold",
    ),
]


@pytest.mark.parametrize(("options", "limit"), CASES)
def test_the_real_scheduler_does_what_was_said(recording, options, limit):
    plain = {"max_num_batched_tokens": 512, "max_model_len": 256, "max_num_seqs": 16, **options}
    before = first_step(wrap=traced_class, **plain)
    story = explain_step(read_run(recording), 0)
    [answer] = [one for one in story.what_if if one.limit == limit]
    assert answer.request_ids
    changed = {limit: answer.then}
    if limit == "kv_blocks":
        changed = {"num_blocks": plain["num_blocks"] + answer.then - answer.now}
    after = first_step(**{**plain, **changed})
    more = {name: tokens for name, tokens in after.items() if tokens > before.get(name, 0)}
    assert set(more) == set(answer.request_ids)
    assert sum(after.values()) - sum(before.values()) == answer.tokens
