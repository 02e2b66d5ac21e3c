import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from schedtrace.model.trace_facts import CacheGroup
from tests.makers import arrival, finish, step

CODE = "never-fits"
DENSE = CacheGroup("FullAttention", 10, 4)
"""The pool of ``makers`` has 100 blocks, one of them vLLM's null block: 990 tokens."""


def refused(number, cause=Cause.KV_BLOCKS, **fields):
    """A step that refused w, with nobody running and two more behind it."""
    exit_ = Exit("waiting", "break", cause, "w", budget_left=1000)
    given = {"running": 0, "waiting": 3, "ended": exit_, "kv_blocks_free_after": 99}
    return step(number, **{**given, **fields})


def came(prompt=1200, **fields):
    """w comes first, then a and b."""
    return [arrival("w", -20, prompt_tokens=prompt, **fields), arrival("a", -20), arrival("b", -20)]


def refusals(many, prompt=1200, cause=Cause.KV_BLOCKS, first=0, **fields):
    return [refused(first, cause, arrived=came(prompt), **fields)] + [
        refused(number, cause, **fields) for number in range(first + 1, first + many)
    ]


def test_a_prompt_that_needs_more_blocks_than_there_are(found):
    [finding] = found(CODE, *refusals(10), cache_groups=[DENSE])
    assert (finding.leads, finding.severity, finding.cause) == (True, "critical", "kv_blocks")
    assert (finding.count, finding.steps, finding.tokens) == (10, list(range(10)), 1200)
    evidence = finding.evidence
    assert (evidence.blocks_usable, evidence.longest_sequence_tokens, evidence.delayed_requests) == (
        99,
        990,
        2,
    )
    # The trace ends with the last output, 91 ms after the first step.
    evidence = finding.evidence
    assert (evidence.blocks_needed, evidence.waited_ms, evidence.waiting_behind) == ([120], 91.01, 2)
    assert finding.share_frac == pytest.approx((91.01 + 2 * 91.0) / (3 * 91.02))
    more, shorter = finding.advice
    assert (more.setting, more.value) == ("num_gpu_blocks_override", 121)
    assert (shorter.setting, shorter.value) == ("max_model_len", 990)


@pytest.mark.parametrize(("many", "every_us", "there"), [(9, 10_000, False), (10, 1, True), (2, 10**6, True)])
def test_ten_refusals_or_a_second_prove_it(found, many, every_us, there):
    lines = [refused(0, arrived=came()), *[refused(n, start=n * every_us) for n in range(1, many)]]
    assert bool(found(CODE, *lines)) is there


@pytest.mark.parametrize(
    "others",
    [
        {"running": 1},
        {"kv_loads_parked": 1},
        {"finished_holding": 1},
        {"deferred_free_blocks": 1},
        {"kv_blocks_free_after": 98},
    ],
    ids=str,
)
def test_while_somebody_holds_something_a_refusal_proves_nothing(found, others):
    assert found(CODE, *refusals(20, **others)) == []


def test_a_prompt_counted_too_long_is_found_while_others_run(found):
    lines = refusals(10, running=4, kv_blocks_free_after=3)
    assert len(found(CODE, *lines, cache_groups=[DENSE])) == 1
    lines = refusals(10, prompt=990, running=4, kv_blocks_free_after=3)
    assert found(CODE, *lines, cache_groups=[DENSE]) == []


def test_the_wait_for_the_next_step_is_no_wait_behind_it(found):
    """c comes between two steps, and the next one takes it."""
    lines = refusals(10)
    lines[5] = refused(5, got={"c": 100}, new="c", arrived=[arrival("c", 45_000)])
    [finding] = found(CODE, *lines, cache_groups=[DENSE])
    assert finding.evidence.delayed_requests == 2


def test_one_that_runs_later_fitted_after_all(found):
    assert found(CODE, *refusals(20), step(20, got={"w": 100}, new="w")) == []


def test_one_that_finished_fitted(found):
    assert found(CODE, *refusals(20), step(20, finished=[finish("w", "STOPPED")])) == []
    assert len(found(CODE, *refusals(20), step(20, finished=[finish("w", "ABORTED")]))) == 1


@pytest.mark.parametrize(
    "cause", [Cause.TOKEN_BUDGET, Cause.MAX_NUM_SEQS, Cause.PAUSED, Cause.GRAMMAR_PENDING]
)
def test_only_its_own_size_can_be_too_large(found, cause):
    assert found(CODE, *refusals(20, cause=cause)) == []


def test_what_the_header_does_not_tell_is_not_claimed(found, recorded_words):
    """Of an aligned Mamba group only vLLM knows the need."""
    mamba = CacheGroup("Mamba", 10, 4, speculative_blocks=0, cache_mode="align")
    [finding] = found(CODE, *refusals(10), cache_groups=[DENSE, mamba])
    recorded_words(finding.verdict)
    assert finding.evidence.longest_sequence_tokens is None
    assert [one.value for one in finding.advice] == [None, None]


def test_groups_are_added_up(found, recorded_words):
    """A window is counted with its cap at admission: 60 + 7 blocks, and a sequence of 920 tokens fits."""
    window = CacheGroup("SlidingWindow", 10, 4, window=64, admission_cap=7)
    [finding] = found(CODE, *refusals(10, prompt=1000), cache_groups=[DENSE, window])
    assert finding.evidence.blocks_needed == [100, 7]
    assert finding.evidence.longest_sequence_tokens == 920
    recorded_words(finding.verdict)


def test_slots_for_drafts_are_left_free(found):
    settings = {"scheduler.num_lookahead_tokens": 5}
    [finding] = found(CODE, *refusals(10), cache_groups=[DENSE], settings=settings)
    assert finding.evidence.longest_sequence_tokens == 985


def itself(number, **fields):
    """w runs alone, outgrows the cache and is preempted for its own allocation."""
    lost = Preemption("w", 980, "w", blocks_needed=2, blocks_freed=98)
    ends = [
        Exit("running", "break", Cause.PREEMPTED_ITSELF, "w"),
        Exit("running", "break", Cause.KV_BLOCKS, "w"),
    ]
    given = {"running": 0, "waiting": 1, "preempted": [lost], "exits": ends, "kv_blocks_free_after": 99}
    return step(number, **{**given, **fields})


@pytest.mark.parametrize(("times", "there"), [(1, False), (2, True)])
def test_one_that_preempts_itself_alone_again_and_again(found, times, there):
    lines = [step(0, got={"w": 980}, new="w", arrived=[arrival("w", 0, prompt_tokens=980, max_tokens=50)])]
    for number in range(1, 2 * times, 2):
        lines += [itself(number), step(number + 1, got={"w": 980}, resumed="w")]
    findings = found(CODE, *lines, cache_groups=[DENSE])
    assert bool(findings) is there
    if there:
        evidence = findings[0].evidence
        assert (evidence.self_preemptions, evidence.tokens, evidence.blocks_needed) == (2, 981, [99])


def test_a_prompt_above_the_budget_with_chunked_prefill_off(found, recorded_words):
    config = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1000}
    [finding] = found(CODE, *refusals(10, cause=Cause.CHUNKED_PREFILL_OFF), scheduler_config=config)
    assert [(one.setting, one.value) for one in finding.advice] == [("enable_chunked_prefill", True)]
    recorded_words(finding.verdict)


def test_blocks_of_mamba_above_the_budget(found, recorded_words):
    mamba = CacheGroup("Mamba", 1024, 4, cache_mode="align")
    [finding] = found(CODE, *refusals(10, cause=Cause.MAMBA_ALIGNMENT), cache_groups=[DENSE, mamba])
    [advice] = finding.advice
    assert (advice.setting, advice.value) == ("max_num_batched_tokens", 1024)
    recorded_words(finding.verdict)


@pytest.mark.parametrize(("freeable", "there"), [(64, True), (32, False)])
def test_an_item_above_the_encoder_cache(found, freeable, there):
    """Waiting requests may hold encoder outputs: only an empty cache proves that the item is too large."""
    empty = step(0, encoder_slots_freeable=64)
    lines = refusals(10, cause=Cause.ENCODER_BUDGET, first=1, encoder_slots_freeable=freeable)
    assert bool(found(CODE, empty, *lines)) is there


def test_one_finding_a_cause(found, recorded_words):
    other = Exit("waiting", "break", Cause.KV_BLOCKS, "x", budget_left=1000)
    arrived = [arrival("w", 0, prompt_tokens=1200), arrival("x", 0, prompt_tokens=1500)]
    lines = [step(0, arrived=arrived), *[refused(n) for n in range(1, 11)]]
    lines.append(step(11, finished=[finish("w", "ABORTED", finished_us=110_000)]))
    lines += [refused(n, ended=other) for n in range(12, 22)]
    [finding] = found(CODE, *lines, cache_groups=[DENSE])
    assert (finding.evidence.requests, finding.count, finding.tokens) == (2, 20, 2700)
    recorded_words(finding.message)
