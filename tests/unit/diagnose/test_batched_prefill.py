"""Prompts of 100 tokens that end in one step of 8 ms, then decode; a step without a prompt takes 1 ms."""

import pytest

from schedtrace.diagnose.rules.batched_prefill import together
from tests.makers import arrival, finish, step

CONFIG = {"max_num_seqs": 8, "max_num_batched_tokens": 1000, "enable_chunked_prefill": True, "policy": "fcfs"}


def prompts(names, *, outputs=3, busy=8000):
    """They come at once; each has so many tokens."""
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


def test_it_is_found_where_it_takes_more_than_half_of_the_time(found):
    """Of its 11.1 ms each of four prompts waits 5.25 ms for the others, or 6 ms."""
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
