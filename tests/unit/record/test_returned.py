"""Samples stand for outputs only where both agree; otherwise the outputs are read."""

from types import SimpleNamespace

import pytest

from schedtrace.record.capture import ALL, only_samples, tokens_got


def step(number=3, drafts=None):
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys("abc"[:number], 1), scheduled_spec_decode_tokens=drafts or {}
    )


def sampled(*lengths, ids="abc"):
    return SimpleNamespace(req_ids=list(ids), sampled_token_ids=[[7] * length for length in lengths])


def returned(**tokens):
    """One client's outputs: request to number of tokens."""
    outputs = [SimpleNamespace(request_id=one, new_token_ids=[7] * number) for one, number in tokens.items()]
    return SimpleNamespace(outputs=outputs)


GOT = {
    "one each": (step(), sampled(1, 1, 1), {0: returned(a=1, b=1, c=1)}, ALL),
    "a chunk among them": (step(), sampled(1, 0, 1), {0: returned(a=1, c=1)}, (["a", "c"], None)),
    "in the runner's order": (
        step(), sampled(0, 1, 1, ids="cba"), {0: returned(a=1, b=1)}, (["b", "a"], None)
    ),
    "one dropped": (step(), sampled(1, 1, 1), {0: returned(a=1, c=1)}, (["a", "c"], [1, 1])),
    "an output without a token": (
        step(), sampled(1, 0, 1), {0: returned(a=1, b=0, c=1)}, (["a", "b", "c"], [1, 0, 1])
    ),
    "two tokens": (step(), sampled(2, 1, 1), {0: returned(a=2, b=1, c=1)}, (["a", "b", "c"], [2, 1, 1])),
    "drafts": (
        step(drafts={"a": [7]}), sampled(1, 1, 1), {0: returned(a=1, b=1, c=1)}, (list("abc"), [1] * 3)
    ),
    "two clients": (
        step(), sampled(1, 1, 1), {0: returned(a=1), 1: returned(b=1, c=1)}, (list("abc"), [1] * 3)
    ),
    "the outputs must be read": (step(), None, {0: returned(a=1, b=1, c=1)}, (list("abc"), [1] * 3)),
    "nothing": (step(0), sampled(ids=""), {}, ([], None)),
}  # fmt: skip


@pytest.mark.parametrize(("output", "samples", "outputs", "got"), GOT.values(), ids=GOT)
def test_tokens_got(output, samples, outputs, got):
    assert tokens_got(output, samples, outputs) == got


@pytest.mark.parametrize(
    ("facts", "runner", "only"),
    [
        ({}, "generate", True),
        ({"connector": None, "ec_connector": None}, "generate", True),
        ({"connector": object()}, "generate", False),
        ({"ec_connector": object()}, "generate", False),
        ({"is_mm_encoder_only": True}, "generate", False),
        ({}, "pooling", False),
        ({}, None, False),
    ],
)
def test_outputs_are_samples_only_where_nothing_else_is_emitted(facts, runner, only):
    config = SimpleNamespace(model_config=SimpleNamespace(runner_type=runner))
    assert only_samples(SimpleNamespace(vllm_config=config, **facts)) is only
