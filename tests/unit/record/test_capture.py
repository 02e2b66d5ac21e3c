"""A step is steady only if all of it is: the same requests, in the same order, each one token further."""

from types import SimpleNamespace

import pytest

from schedtrace.record.capture import ALL, FULL_EVERY_NS, SteadySteps, only_samples, tokens_got


def output(ids="ab", computed=(10, 20), tokens=(1, 1), new=(), drafts=None, resumed=()):
    """A ``SchedulerOutput``."""
    every = [*ids, *(one for one, _ in new)]
    return SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(ids), num_computed_tokens=list(computed), resumed_req_ids=set(resumed)
        ),
        scheduled_new_reqs=[SimpleNamespace(req_id=one, num_computed_tokens=at) for one, at in new],
        num_scheduled_tokens=dict(zip(every, tokens, strict=True)),
        total_num_scheduled_tokens=sum(tokens),
        scheduled_spec_decode_tokens=drafts or {},
    )


@pytest.fixture
def steps():
    """Two steps have been seen: a full one, and one that is not due."""
    found = SteadySteps()
    assert found.changed_rows(output(computed=(9, 19)), FULL_EVERY_NS)[1] is True
    return found


NOT_STEADY = {
    "another order": output("ba"),
    "another request": output("ac"),
    "one gone": output("a", (10,), (1,)),
    "one more": output(new=[("c", 0)], tokens=(1, 1, 1)),
    "two tokens": output(tokens=(1, 2)),
    "two tokens and none": output(tokens=(2, 0)),
    "one further by two, one by none": output(computed=(11, 19)),
    "one back, one further by three": output(computed=(8, 22)),
    "one not further": output(computed=(10, 19)),
    "a draft": output(drafts={"a": [7]}),
    "one resumed": output(resumed="b"),
}


@pytest.mark.parametrize("other", NOT_STEADY.values(), ids=NOT_STEADY)
def test_any_difference_is_kept(other, steps):
    rows, full = steps.changed_rows(other, FULL_EVERY_NS + 1)
    assert (rows.ids, rows.computed) == (
        other.scheduled_cached_reqs.req_ids, other.scheduled_cached_reqs.num_computed_tokens
    )  # fmt: skip
    assert full is False


def test_steady_steps_follow_each_other(steps):
    for further in range(3):
        assert steps.changed_rows(output(computed=(10 + further, 20 + further)), FULL_EVERY_NS + 1) == (
            None,
            False,
        )
    rows, _ = steps.changed_rows(output(computed=(12, 22)), FULL_EVERY_NS + 1)
    assert rows.computed == [12, 22]


def test_after_a_while_a_step_is_kept_in_full(steps):
    assert steps.changed_rows(output(), 2 * FULL_EVERY_NS - 1) == (None, False)
    rows, full = steps.changed_rows(output(computed=(11, 21)), 2 * FULL_EVERY_NS)
    assert (rows.computed, full) == ([11, 21], True)


def test_a_chunk_is_never_followed_by_a_steady_step(steps):
    assert steps.changed_rows(output(tokens=(1, 7)), FULL_EVERY_NS + 1)[0] is not None
    assert steps.changed_rows(output(computed=(11, 27)), FULL_EVERY_NS + 1)[0] is not None
    assert steps.changed_rows(output(computed=(12, 28)), FULL_EVERY_NS + 1) == (None, False)


def test_new_requests_with_one_token_may_be_followed_by_a_steady_step(steps):
    assert steps.changed_rows(output(new=[("c", 5)], tokens=(1, 1, 1)), FULL_EVERY_NS + 1)[0].new == [
        ("c", 5)
    ]
    following = output("abc", (11, 21, 6), (1, 1, 1))
    assert steps.changed_rows(following, FULL_EVERY_NS + 1) == (None, False)


def test_a_step_that_is_lost_is_followed_by_one_in_full(steps):
    steps.start_over()
    rows, full = steps.changed_rows(output(), FULL_EVERY_NS + 1)
    assert (rows.ids, full) == (["a", "b"], True)


def test_empty_steps_are_steady():
    steps = SteadySteps()
    nothing = output("", (), ())
    assert steps.changed_rows(nothing, FULL_EVERY_NS)[0].ids == []
    assert steps.changed_rows(nothing, FULL_EVERY_NS + 1) == (None, False)


def test_more_tokens_than_are_packed_are_no_error(steps):
    assert steps.changed_rows(output(computed=(10, 2**32)), FULL_EVERY_NS + 1)[0].computed == [10, 2**32]
    assert steps.changed_rows(output(computed=(11, 2**32 + 1)), FULL_EVERY_NS + 1)[0].computed == [
        11,
        2**32 + 1,
    ]


def test_where_lines_are_full_no_step_is_steady():
    steps = SteadySteps(never=True)
    for further in range(3):
        rows, full = steps.changed_rows(output(computed=(10 + further, 20 + further)), further)
        assert (rows.computed[0], full) == (10 + further, True)


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
