"""Whether requests waited for a limit or for the device."""

import pytest

from schedtrace.diagnose.root_causes import share_scaled
from schedtrace.diagnose.rules import RULES
from schedtrace.diagnose.rules.full_device import gain_without, prefill_work
from schedtrace.diagnose.waits import charged
from schedtrace.model.causes import Cause
from schedtrace.model.trace_facts import Admission
from tests.makers import arrival, finish, step

REQUESTS, SEATS, OUTPUTS = 12, 4, 8


def rounds(view_of, *, base_us, per_request_us, least=1):
    """Twelve requests at once on four seats, in rounds that end with smaller and smaller steps."""
    lines, at, number = [], 0, 0
    everybody = [arrival(f"r{group}-{seat}", -20) for group in range(3) for seat in range(SEATS)]
    for group in range(REQUESTS // SEATS):
        names = [f"r{group}-{seat}" for seat in range(SEATS)]
        waiting = REQUESTS - SEATS * (group + 1)
        sizes = [SEATS] * OUTPUTS + list(range(SEATS - 1, least - 1, -1))
        for place, size in enumerate(sizes):
            busy = base_us + per_request_us * size
            lines.append(
                step(
                    number,
                    start=at,
                    took=0,
                    back=busy,
                    got=dict.fromkeys(names[:size], 1),
                    new=names if not place else [],
                    running=size,
                    waiting=waiting,
                    ended=Cause.MAX_NUM_SEQS if waiting else Cause.QUEUE_EMPTY,
                    prefill_tokens=0,
                    decode_tokens=size,
                    arrived=everybody if not number else [],
                    finished=[finish(name, finished_us=at + busy) for name in names]
                    if place == len(sizes) - 1
                    else [],
                )
            )
            at, number = at + busy, number + 1
    return view_of(*lines, max_num_running_reqs=SEATS)


def found(timeline):
    [finding] = RULES["max-num-seqs-bound"](timeline)
    return finding


def test_a_step_that_costs_as_much_by_the_request_gains_nothing_from_seats(view_of, recorded_words):
    finding = found(rounds(view_of, base_us=0, per_request_us=1000))
    assert finding.gain is None
    assert [(each.setting, each.value) for each in finding.advice] == [(None, None)]
    recorded_words(finding.title, finding.verdict)


def test_of_several_engines_no_gain_of_one_is_said(view_of, recorded_words):
    finding = found(rounds(view_of, base_us=100, per_request_us=1000))
    recorded_words(finding.verdict, share_scaled(finding, 0.5).verdict)


def test_a_step_that_costs_the_same_whatever_it_holds_gains_from_seats(view_of, recorded_words):
    timeline = rounds(view_of, base_us=4000, per_request_us=0)
    recorded_words(found(timeline).title)
    # Of 11 steps each while 8 and while 4 waited: 8 with four requests, then three, two and one.
    saved = 8 * 8 / 12 + 8 / 11 + 8 / 10 + 8 / 9 + 8 * 4 / 8 + 4 / 7 + 4 / 6 + 4 / 5
    waits = charged(timeline, Cause.MAX_NUM_SEQS)
    assert gain_without(timeline, waits, Cause.MAX_NUM_SEQS) == pytest.approx(33 / (33 - saved) - 1, rel=0.01)


def test_where_all_steps_did_the_same_the_limit_stays_the_verdict(view_of, recorded_words):
    """Four requests in each step: what one takes is not known, nor that seats gain nothing."""
    timeline = rounds(view_of, base_us=0, per_request_us=1000, least=SEATS)
    recorded_words(found(timeline).title)
    # All of a step may be its own cost: of eight steps each, while 8 and while 4 waited.
    saved = 8 * 8 / 12 + 8 * 4 / 8
    waits = charged(timeline, Cause.MAX_NUM_SEQS)
    assert gain_without(timeline, waits, Cause.MAX_NUM_SEQS) == pytest.approx(24 / (24 - saved) - 1, rel=0.01)


@pytest.mark.parametrize(
    ("base_us", "block", "caching"),
    [(100, 500, True), (100, 50, True), (100, 500, False), (5000, 500, True)],
    ids=["shorter than a block", "longer than one", "no caching", "mostly the fixed part of a step"],
)
def test_prefill_that_fills_the_device_and_that_no_cache_spares(
    view_of, base_us, block, caching, recorded_words
):
    """30 prompts of 60 to 350 tokens, each prefilled in a step of its own; a token takes 10 us."""
    lines, at = [], 0
    for number, tokens in enumerate(range(60, 360, 10)):
        name, busy = f"r{number}", base_us + 10 * tokens
        looked = Admission(name, 0, 0, tokens // block, miss="short" if tokens <= block else "not_cached")
        sent = arrival(name, at - 5, prompt_tokens=tokens)
        work = {"prefill_tokens": tokens, "decode_tokens": 0}
        lines.append(
            step(
                number,
                start=at,
                took=0,
                back=busy,
                got={name: tokens},
                new=[name],
                arrived=[sent],
                admitted=[looked],
                **work,
            )
        )
        at += busy
    recorded_words(prefill_work(view_of(*lines, block_size=block, enable_prefix_caching=caching)))
