"""``other-limit``: KV loads, connectors that do not answer, batches in turn, and decodes with drafts."""

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, ScheduledRequest
from schedtrace.model.trace_facts import Admission, KvLoad
from tests.makers import arrival, finish, step

STORES = {"kv_transfer_config.kv_connector": "Tier", "kv_transfer_config.kv_role": "kv_both"}
PARKED = Exit("waiting", "continue", Cause.REMOTE_KV_PENDING, "b", via="source")


def about(cause, findings):
    [finding] = [finding for finding in findings if finding.cause == cause]
    return finding


def loaded(tokens=1000, **of_request):
    """b waits 0.2 s for so many tokens; a step takes 1,000 us, and 10 us for each prefill token."""
    lines = [
        step(
            number,
            start=number * 10_000,
            took=0,
            back=1000 + 10 * prefill,
            got={"a": 1 + prefill},
            prefill_tokens=prefill,
            decode_tokens=1,
            waiting=int(number < 20),
            exits=[PARKED] if number < 20 else [],
        )
        for number, prefill in enumerate([0, 50, 100, 0, 20] * 8)
    ]
    lines[0].arrived = [arrival("a", -10), arrival("b", 0, 10, prompt_tokens=tokens + 10, **of_request)]
    lines[0].kv_loads = [KvLoad("b", "begun", 500)]
    lines[20].kv_loads = [KvLoad("b", "arrived", 200_500)]
    lines[20].admitted = [Admission("b", 0, tokens)]
    return lines


def test_a_load_that_takes_longer_than_computing_its_tokens(found, recorded_words):
    finding = about(Cause.REMOTE_KV_PENDING, found("other-limit", *loaded(), settings=STORES))
    recorded_words(finding.holder, *finding.advice)


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (loaded(12_000), STORES),  # 120 ms to compute
        (loaded(remote="prefill"), STORES),
        (loaded(), STORES | {"kv_transfer_config.kv_role": "kv_consumer"}),
    ],
    ids=["hardly longer", "another engine computed it", "another engine computes all"],
)
def test_a_load_that_this_engine_cannot_do_without(found, lines, settings):
    [advice] = about(Cause.REMOTE_KV_PENDING, found("other-limit", *lines, settings=settings)).advice
    assert "KV connector" in str(advice.message)


@pytest.mark.parametrize(("until", "loading"), [(20, True), (10, False)])
def test_a_connector_that_does_not_answer_while_it_loads_for_another_request(
    found, recorded_words, until, loading
):
    """c waits for an answer for 0.2 s; b is being loaded all that time, or half of it."""
    lines = loaded()
    for line in lines[:20]:
        line.exits = [PARKED, Exit("waiting", "continue", Cause.CONNECTOR_UNDECIDED, "c", via="source")]
        line.num_waiting_after = 2
    lines[0].arrived.append(arrival("c", 0, 10, prompt_tokens=500))
    lines[20].kv_loads = []
    lines[until].kv_loads = [KvLoad("b", "arrived", until * 10_000 + 500)]
    finding = about(Cause.CONNECTOR_UNDECIDED, found("other-limit", *lines, settings=STORES))
    assert bool(finding.holder) == loading
    assert ("each other's loads" in str(finding.advice[0].message)) == loading
    if loading:
        recorded_words(finding.holder, finding.advice)


def turns(detail=None):
    """a and b compute in turn: each waits 5 ms for the other's batch after its own output is back."""
    lines = [
        step(
            number,
            back=15_000,
            got={"ab"[number % 2]: 1},
            new="ab"[number % 2] if number < 2 else "",
            running=2,
            exits=[Exit("running", "continue", Cause.NO_NEW_TOKENS, "ba"[number % 2], detail=detail)],
        )
        for number in range(20)
    ]
    lines[0].arrived = [arrival("a", -10, 0, prompt_tokens=1), arrival("b", -10, 0, prompt_tokens=1)]
    return lines


OVERLAPPED = {"async_scheduling": True, "batches_in_flight": 2, "pipeline_parallel_size": 1}


def test_batches_take_turns_under_a_class_that_waits_for_outputs(found, recorded_words):
    findings = found("other-limit", *turns(), **OVERLAPPED, scheduler_class="mine.Queue")
    finding = about(Cause.NO_NEW_TOKENS, findings)
    recorded_words(finding.title, finding.verdict, *finding.advice)


@pytest.mark.parametrize(
    ("detail", "header"),
    [
        ("max_model_len", {}),
        (None, {"pipeline_parallel_size": 2}),
        (None, {"async_scheduling": False}),
        (None, {"batches_in_flight": 1}),
    ],
    ids=["a cap", "a pipeline", "not asynchronous", "one batch"],
)
def test_other_requests_without_a_token_wait_for_no_class(found, detail, header):
    for finding in found("other-limit", *turns(detail), **OVERLAPPED | header):
        assert "turns" not in str(finding.title)


def unanswered(names="cde", answered=0):
    """These wait for the connector's answer from the first step on, one until the last of so many steps."""
    lines = [step(number, got={"a": 1}, new="a" * (number == 0), waiting=3) for number in range(20)]
    lines[0].arrived = [arrival("a", -10, 0), *(arrival(name, -10, 0) for name in names)]
    for line in lines:
        line.exits = [Exit("waiting", "continue", Cause.CONNECTOR_UNDECIDED, name) for name in names]
    for number in range(answered):
        lines[19 - number].requests = [ScheduledRequest(names[number], 0, 100, "new")]
    lines[10].finished = [finish("c", "ABORTED", output_tokens=0, finished_us=99_000, in_schedule=False)]
    return lines


def test_a_connector_that_never_answers(found, recorded_words):
    finding = about(Cause.CONNECTOR_UNDECIDED, found("other-limit", *unanswered()))
    recorded_words(finding.holder, *finding.advice)


@pytest.mark.parametrize("lines", [unanswered("cd"), unanswered("cdef", answered=2)], ids=["two", "half"])
def test_a_connector_that_answers_late(found, lines):
    finding = about(Cause.CONNECTOR_UNDECIDED, found("other-limit", *lines))
    assert not finding.holder


NAMES = [f"r{number}" for number in range(8)]
DRAFTS = {"speculative_config.num_speculative_tokens": 2}


def passed_over(cause, budget=8, held=2):
    """Eight requests on eight seats, of which so many decode with two drafts in a step of 8 tokens."""
    lines = []
    for number in range(40):
        order = NAMES[number % 8 :] + NAMES[: number % 8]
        skips = [Exit("running", "break", cause, name, budget - 3 * held) for name in order[held:]]
        lines.append(
            step(
                number,
                got=dict.fromkeys(order[:held], 3),
                budget=budget,
                running=8,
                decode_tokens=3 * held,
                draft_tokens=2 * held,
                exits=skips,
                ended=None,
            )
        )
    lines[0].arrived.extend(arrival(name, 0) for name in NAMES)
    return lines


def of_budget(budget=8):
    return {
        "settings": DRAFTS,
        "token_budget": budget,
        "max_num_running_reqs": 8,
        "scheduler_config": {"max_num_batched_tokens": budget, "max_num_seqs": 8},
    }


def test_padded_decodes_want_a_decode_of_every_seat(found, recorded_words):
    """Eight seats of 3 tokens: 24."""
    finding = about(
        Cause.SPEC_DECODE_PADDING,
        found("other-limit", *passed_over(Cause.SPEC_DECODE_PADDING), **of_budget()),
    )
    [advice] = finding.advice
    assert (advice.setting, advice.value) == ("max_num_batched_tokens", 24)
    recorded_words(finding.holder)


def test_a_budget_that_holds_them_all_is_not_what_is_too_small(found):
    lines = passed_over(Cause.SPEC_DECODE_PADDING, budget=24)
    finding = about(Cause.SPEC_DECODE_PADDING, found("other-limit", *lines, **of_budget(24)))
    assert [advice.setting for advice in finding.advice] == [None]
    assert not finding.holder


@pytest.mark.parametrize(("settings", "proposed"), [(DRAFTS, 24), ({}, None)])
def test_the_token_budget_wants_a_decode_of_every_seat_where_drafts_are_known(found, settings, proposed):
    """A value comes from a replay alone if a step holds them: no step is larger than the budget."""
    lines = passed_over(Cause.TOKEN_BUDGET)
    [finding] = found("token-budget-bound", *lines, **of_budget() | {"settings": settings})
    assert finding.evidence.proposed == proposed
    assert finding.advice[0].value == proposed
