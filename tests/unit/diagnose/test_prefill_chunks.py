"""Findings about the prefill of prompts: capped in small chunks, or together in one step."""

import pytest

from schedtrace.diagnose.rules.prefill_chunks import together
from schedtrace.model.causes import Cap
from schedtrace.model.trace import ChunkCap, ScheduledRequest
from tests.makers import arrival, finish, step


def capped(*, times=10, fixed_us=1000, per_token_us=0, left=500, cap=Cap.LONG_PREFILL):
    """80 steps in which one or two requests decode; half compute 20 or 40 tokens of a prompt, capped."""
    lines = []
    for number in range(80):
        chunk = (0, 20, 0, 40)[number % 4]
        decodes = {"d": 1, "e": 1} if number % 8 < 4 else {"d": 1}
        tokens = decodes | ({"p": chunk} if chunk else {})
        line = step(
            number,
            start=(fixed_us + 40 * per_token_us) * number,
            took=0,
            back=fixed_us + per_token_us * chunk,
            got=tokens,
            budget=sum(tokens.values()) + left,
            decode_tokens=len(decodes),
            prefill_tokens=chunk,
            arrived=[] if number else [arrival(name, 0, 0, prompt_tokens=9000) for name in "dep"],
        )
        line.caps = [ChunkCap("p", cap, round(times * chunk), chunk)] if chunk else []
        lines.append(line)
    return lines


def test_chunks_a_tenth_as_large_as_they_might_be(found, recorded_words):
    """Each of 40 chunks takes a step of 1,000 us, and is a tenth of what fits; three live for 80,000 us."""
    [finding] = found("capped-prefill", *capped())
    evidence = finding.evidence
    assert (evidence.requests, evidence.chunks, finding.count) == (1, 40, 40)
    assert evidence.full_chunks == pytest.approx(4)
    assert evidence.low_frac == pytest.approx(1, abs=1e-3)
    assert finding.share_frac == pytest.approx(40 * 900 / (3 * 80_000), rel=2e-3)
    assert [(advice.setting, advice.value) for advice in finding.advice] == [
        ("long_prefill_token_threshold", 0)
    ]
    recorded_words(finding)


def test_the_budget_that_is_left_bounds_a_chunk(found):
    """Chunks of 20 and 40 tokens might have had 30 more."""
    [finding] = found("capped-prefill", *capped(left=30))
    assert finding.evidence.full_chunks == pytest.approx(20 * 20 / 50 + 20 * 40 / 70)


def test_where_several_partial_prefills_are_allowed_zero_is_no_choice(found):
    """vLLM then sets a threshold by itself."""
    config = {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 40}
    [finding] = found("capped-prefill", *capped(), scheduler_config=config)
    assert (finding.advice[0].value, finding.evidence.threshold) == (1000, 40)


@pytest.mark.parametrize(("admitted", "late_us"), [("", 0), ("x", 3000), ("xy", 4000), ("xyz", 4000)])
def test_requests_that_arrive_meanwhile_would_wait_for_full_chunks(found, admitted, late_us):
    """The prompt begins at 1,000 us and would take 4,000; they come at 2,000, 4,000 and 6,000 us."""
    lines = capped()
    for number, name in enumerate(admitted):
        lines[2 + 2 * number].requests.append(ScheduledRequest(name, 0, 1, "new"))
        lines[2 + 2 * number].finished = [finish(name, finished_us=0)]
    [finding] = found("capped-prefill", *lines)
    assert finding.share_frac == pytest.approx((36_000 - late_us) / (3 * 80_000), rel=4e-2)


@pytest.mark.parametrize(
    ("load", "shows"),
    [
        ({"times": 1.15}, True),
        ({"times": 1.1}, False),
        ({"cap": Cap.TOKEN_BUDGET}, False),
        ({"cap": Cap.LONG_PREFILL_ADAPTIVE}, False),
        ({"left": 0}, False),
        ({"fixed_us": 10, "per_token_us": 50}, False),
    ],
    ids=["2 % of the time", "less", "budget", "adaptive", "no budget left", "tokens take the time"],
)
def test_when_capped_chunks_are_found(found, load, shows):
    assert bool(found("capped-prefill", *capped(**load))) is shows


CONFIG = {"max_num_seqs": 8, "max_num_batched_tokens": 1000, "enable_chunked_prefill": True, "policy": "fcfs"}


def prompts(names, *, outputs=3, busy=8000):
    """Prompts of 100 tokens that end in one step, then decode; a step without a prompt takes 1 ms."""
    came = [arrival(name, None, 0) for name in names]
    got, tokens = dict.fromkeys(names, 100), 100 * len(names)
    lines = [step(0, took=10, back=busy + 10, got=got, new=names, arrived=came, prefill_tokens=tokens)]
    starts = [10_000 + 1100 * number for number in range(outputs)]
    lines += [
        step(number, start=us, took=10, back=1010, got=dict.fromkeys(names, 1), decode_tokens=len(names))
        for number, us in enumerate(starts[:-1], 1)
    ]
    lines.append(
        step(outputs, start=starts[-1], finished=[finish(name, finished_us=starts[-1]) for name in names])
    )
    return lines


def test_prompts_wait_for_each_other(view_of):
    """7 of 8 ms are for 200 tokens, half of them another's."""
    [row] = together(view_of(*prompts("ab"))).to_dicts()
    assert (row["step"], row["busy_us"], row["prefill_tokens"], row["prompts"]) == (0, 8000, 200, 2)
    assert row["others_us"] == pytest.approx(7000)


def test_one_prompt_waits_for_nobody(view_of, found):
    assert together(view_of(*prompts("a"))).is_empty()
    assert found("batched-prefill", *prompts("a"), scheduler_config=CONFIG) == []


def test_a_prompt_that_goes_on_in_another_step_has_no_token_to_wait_for(view_of):
    lines = prompts("ab")
    lines[0].arrived = [arrival("a", None, 0), arrival("b", None, 0, prompt_tokens=101)]
    assert together(view_of(*lines)).is_empty()


def test_batched_prefill_is_found_where_it_takes_more_than_half_of_the_time(found):
    """Each of four prompts waits 5.25 ms of its 11.1 ms for the others, or 6 ms."""
    assert found("batched-prefill", *prompts("abcd", outputs=2), scheduler_config=CONFIG) == []
    [finding] = found("batched-prefill", *prompts("abcd", outputs=2, busy=9000), scheduler_config=CONFIG)
    assert finding.evidence.prompts == 4


def test_requests_without_known_times_wait_for_nobody(found):
    lines = prompts("abcd")
    for line in lines:
        line.finished = [finish(name, finished_us=0) for name in "abcd"]
    assert found("batched-prefill", *lines, scheduler_config=CONFIG) == []


def test_nothing_smaller_is_proposed_than_vllm_accepts(found):
    """Without chunked prefill a step takes a whole prompt: 2,048 tokens."""
    whole = {**CONFIG, "enable_chunked_prefill": False}
    assert found("batched-prefill", *prompts("abcd", outputs=2, busy=9000), scheduler_config=whole) == []


def test_where_the_settings_are_not_recorded_it_is_found_without_advice(found):
    unknown = {"max_num_seqs": 8}
    [finding] = found("batched-prefill", *prompts("abcd", outputs=2, busy=9000), scheduler_config=unknown)
    assert finding.advice == []


def test_what_a_prompt_costs_is_not_known_if_all_steps_are_alike(view_of):
    """Without decodes and other sizes, the whole time of a step may be its constant part."""
    lines = []
    for number in range(30):
        names = [f"r{number}-{place}" for place in range(4)]
        came = [arrival(name, None, 0, prompt_tokens=20) for name in names]
        got, us = dict.fromkeys(names, 20), 20_000 * number
        lines.append(
            step(number, start=us, took=10, back=9010, got=got, new=names, arrived=came, prefill_tokens=80)
        )
    assert together(view_of(*lines))["others_us"].to_list() == [0] * 30
