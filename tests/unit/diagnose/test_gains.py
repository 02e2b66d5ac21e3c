"""What a wider limit would gain, as far as a trace bounds it."""

from types import SimpleNamespace

import polars as pl
import pytest

from schedtrace.diagnose import gains
from schedtrace.diagnose.gains import (
    FixedShare,
    budget_times,
    fixed_share,
    host_gain,
    most_step_us,
    sets_pace,
    throughput_gain,
    unless_shown,
    with_more_running,
)
from schedtrace.diagnose.offered_load import OfferedLoad, came_at_once
from schedtrace.diagnose.rules.common import advise
from schedtrace.timeline.step_time import StepTime
from schedtrace.workloads.clients import Clients
from tests.makers import arrival, step


def engine(**known):
    """An engine that was busy for 1,000 us."""
    return SimpleNamespace(**{"busy_us": 1000, **known})


def states(**lengths):
    """One row per state, one after the other."""
    spans, now = [], 0
    for state, us in lengths.items():
        spans.append((state, now, now + us))
        now += us
    return pl.DataFrame(spans, schema=["state", "begin_us", "end_us"], orient="row")


def test_saved_time_is_more_throughput():
    """The same tokens in 800 to 900 us: a ninth to a quarter more; the middle is stated."""
    gain = throughput_gain(engine(), 100, 200)
    assert (gain.metric, gain.low_frac, gain.high_frac) == ("output_tokens_per_s", pytest.approx(1 / 9), 0.25)
    assert (gain.change_frac, gain.saved_frac) == (pytest.approx(13 / 72), 0.15)


@pytest.mark.parametrize(
    ("busy_us", "least_us", "most_us"),
    [(0, 0, 10), (1000, 0, 0), (1000, 0, 1000), (1000, 0, 5000), (1000, 0, 201), (1000, 700, 722)],
)
def test_what_a_trace_does_not_bound_is_no_gain(busy_us, least_us, most_us):
    """Nothing is saved, or all, or bounds more than 25 points apart: 0 to 25.2 %, 233 to 260 %."""
    assert throughput_gain(engine(busy_us=busy_us), least_us, most_us) is None


def test_bounds_of_25_points_are_a_gain():
    assert throughput_gain(engine(), 1, 200).high_frac == 0.25


def test_a_step_costs_at_most_the_models_base_and_the_hosts_time():
    """Two of three steps scheduled something; the host took 30 us for them."""
    known = {
        "engine_states": states(device=900, schedule=20, host_gap=10, idle=70),
        "steps": pl.DataFrame({"total_requests": [1, 0, 2]}),
    }
    assert most_step_us(engine(**known, step_time=SimpleNamespace(most_base_us=500.0))) == 515
    assert most_step_us(engine(**known, step_time=None)) is None
    known["steps"] = known["steps"][1:2]
    assert most_step_us(engine(**known, step_time=SimpleNamespace(most_base_us=500.0))) is None


def eight_at_a_time(waiting_steps=90, largest=20, waiting=2, longest=5, **model):
    """100 steps of 1,000 us with 8 of 10 requests, of 5 steps each, and those in which somebody waited."""
    steps = pl.DataFrame(
        {
            "total_requests": [8] * 100,
            "num_running_after": [8] * 100,
            "num_waiting_after": [waiting] * 100,
            "used_tokens": [8] * 99 + [largest],
            "prefill_tokens": [0] * 100,
            "decode_tokens": [8] * 100,
            "context_tokens": [0] * 100,
            "busy_us": [1000] * 100,
        }
    )
    names = [str(number) for number in range(160)]
    costs = {"base_us": 300.0, "per_prefill_token_us": 50.0, "per_decode_token_us": 80.0} | model
    timeline = engine(
        busy_us=100_000,
        steps=steps,
        step_time=StepTime(
            **costs, per_context_token_us=0.0, steps=100, error_frac=0.0, most_base_us=costs["base_us"]
        ),
        engine_states=states(device=95_000, schedule=5000),
        known_requests=pl.DataFrame({"request_id": names, "trial": [None] * 160}),
        stretches=pl.DataFrame(
            {"request_id": names, "step": [0] * 160, "last_step": [4] * 159 + [longest - 1]}
        ).lazy(),
    )
    return timeline, SimpleNamespace(steps=steps.head(waiting_steps))


def bounds(most, *, recomputed_tokens=0, step_time=..., **known):
    timeline, waits = eight_at_a_time(**known)
    timeline.step_time = timeline.step_time if step_time is ... else step_time
    gain = with_more_running(timeline, waits, pl.lit(most), recomputed_tokens=recomputed_tokens)
    return gain and (gain.low_frac, gain.high_frac)


def saved(least_us, most_us):
    return pytest.approx([100_000 / (100_000 - us) - 1 for us in (least_us, most_us)])


NINE = saved((100 - 800 / 9 - 5) * 300, (100 - 800 / 9) * 350)
MORE_RUNNING = {
    # 90 steps hold two more each: 18 fewer. 80 to 85 are left; a step costs 300 to 350 us.
    "between the bounds of list scheduling": (10, {}, saved(15 * 300, 20 * 350)),
    "only steps with waiters count at least": (10, {"waiting_steps": 20}, saved(4 * 300, 20 * 350)),
    # 80 steps hold all turns at 10 a step; behind those of the longest one at most as many are left.
    "the longest request takes its steps": (10, {"longest": 15}, saved(5 * 300, 20 * 350)),
    "so many of them that it may be nothing": (10, {"longest": 90}, None),
    # 9 at once: 89 steps at least, 94 at most.
    "no more run than the limit allows": (9, {}, NINE),
    "no more run than were there": (10, {"waiting": 1}, NINE),
    "nobody waited": (10, {"waiting": 0}, None),
    "steps larger than any recorded one may save nothing": (10, {"largest": 9}, None),
    # A device that hides 8 decodes may not hide 10: of 1,000 us, 8 * 100 may be theirs.
    "a decode costs up to as much as a prefill token": (
        10,
        {"per_prefill_token_us": 100.0},
        saved(15 * 200, 20 * 350),
    ),
    "less is computed again at most": (10, {"recomputed_tokens": 20}, saved(15 * 300, 20 * 350 + 20 * 50)),
    "without a model": (10, {"step_time": None}, None),
}
"""800 turns of requests, at most 10 a step."""


@pytest.mark.parametrize(("most", "known", "expected"), MORE_RUNNING.values(), ids=MORE_RUNNING)
def test_more_running_save_between(monkeypatch, most, known, expected):
    monkeypatch.setattr(gains, "sets_pace", lambda _: True)
    assert bounds(most, **known) == expected


def test_where_clients_set_the_pace_more_running_gain_no_throughput(monkeypatch):
    monkeypatch.setattr(gains, "sets_pace", lambda _: False)
    assert bounds(10) is None


def arriving(*moments):
    """Eleven steps of 10 ms; requests come at these."""
    lines = [step(number) for number in range(11)]
    for number, moment in enumerate(moments):
        lines[-(-moment // 10_000)].arrived.append(arrival(str(number), None, moment))
    return lines


@pytest.mark.parametrize(
    ("moments", "at_once"),
    [([0] * 10, True), ([0] * 9 + [50_000], True), ([0] * 8 + [50_000] * 2, False), ([], False)],
)
def test_nine_tenths_before_a_tenth_of_the_steps_came_at_once(view_of, moments, at_once):
    lines = arriving(*moments)
    for line in lines:
        line.arrived = list(line.arrived)
    assert came_at_once(view_of(*lines)) is at_once


def answers(think_us, working_frac=1.0):
    return OfferedLoad("answers", working_frac, clients=Clients("loop", 2, (think_us,)), latency_ms=0.9)


@pytest.mark.parametrize(
    ("load", "trials", "does"),
    [
        (answers(45.0), [None], True),
        (answers(46.0), [None], False),
        (answers(0.0, 0.95), [None], True),
        (answers(0.0, 0.949), [None], False),
        (OfferedLoad("at_once", 1.0), [None], True),
        (OfferedLoad("at_once", 0.949), [None], False),
        (OfferedLoad("at_once", 0.949), [1, 2], True),
        (OfferedLoad("clock", 1.0), [None], False),
        (OfferedLoad("unknown", 1.0), [None], False),
    ],
)
def test_an_engine_sets_the_pace_of_clients_that_wait_for_it(monkeypatch, load, trials, does):
    """They send the next request within a twentieth of 900 us; idle time between trials does not count."""
    monkeypatch.setattr(gains, "offered_load", lambda _: load)
    assert sets_pace(engine(trials=lambda: trials)) is does


@pytest.mark.parametrize(
    ("paced", "metric", "low", "high"),
    [(True, "output_tokens_per_s", 1 / 0.9 - 1, 1 / 0.84 - 1), (False, "tpot_p50_ms", -0.2, -0.1)],
)
def test_where_the_client_sets_the_pace_less_host_time_is_sooner_not_more(
    monkeypatch, paced, metric, low, high
):
    """A tenth is hidden for sure; at most 0.16, of the 0.8 that does not depend on the requests."""
    monkeypatch.setattr(gains, "sets_pace", lambda _: paced)
    view = engine(
        engine_states=states(device=970, schedule=30),
        steps=pl.DataFrame({"total_requests": [1, 2]}),
        step_time=SimpleNamespace(most_base_us=385.0),
    )
    gain = host_gain(view, 100, 160)
    assert (gain.metric, gain.low_frac, gain.high_frac) == (metric, pytest.approx(low), pytest.approx(high))
    assert gain.change_frac == pytest.approx((low + high) / 2)
    assert gain.saved_frac > 0


ADVICE = [
    advise("{option} {value:n}", setting="max_num_seqs", value=64),
    advise("{option} {value:n}", setting="block_size", value=16),
    advise("send long prompts to an engine of their own"),
]


WAITS = SimpleNamespace(steps=None)


def prefill_steps(step_us, sizes, *, decoding=0, running=8, waiting=8, host_us=0):
    """Steps of these numbers of prefill tokens; in the largest ones, requests waited."""
    rows = pl.DataFrame({"used_tokens": sizes}).with_columns(
        pl.lit(running).alias("total_requests"),
        pl.lit(running).alias("num_running_after"),
        pl.lit(waiting).alias("num_waiting_after"),
        pl.col("used_tokens").alias("prefill_tokens"),
        pl.lit(decoding).alias("decode_tokens"),
        pl.lit(0).alias("context_tokens"),
        pl.Series("busy_us", [step_us(size) for size in sizes]),
    )
    host = pl.DataFrame({"state": ["schedule"], "begin_us": [0], "end_us": [host_us * len(sizes)]})
    full = rows.filter(pl.col("used_tokens") == max(sizes))
    return SimpleNamespace(steps=rows, engine_states=host), full


SIZES = [100, 200, 300, 400] * 10


@pytest.mark.parametrize(
    ("step_us", "host_us", "low", "high"),
    [
        (lambda _: 4000, 0, 1.0, 1.0),
        (lambda tokens: 3000 + 10 * tokens, 0, 3 / 7, 3 / 7),
        (lambda tokens: 10 * tokens, 0, 0.0, 0.0),
        (lambda tokens: 10 * tokens, 1000, 0.0, 0.2),  # the host's time counts as fixed at most
        # A step of up to 100 tokens hides them behind reading the weights; none of the larger ones does.
        (lambda tokens: 10 * max(tokens, 100), 0, 0.0, 0.0),
    ],
)
def test_the_fixed_share_is_that_of_steps_of_similar_size(step_us, host_us, low, high):
    steps = prefill_steps(step_us, [*[1, 2, 4, 50] * 20, *SIZES], host_us=host_us)
    share = fixed_share(*steps)
    assert share[:2] == pytest.approx((low, high), abs=1e-3)
    assert share.step_us == step_us(400) + host_us


def test_steps_nearest_in_size_contradict_a_fixed_share_that_all_similar_steps_suggest():
    """Up to 300 tokens hide behind reading the weights, which most similar steps do; larger steps do not."""
    sizes = [*[110, 150, 200, 250] * 20, *[300, 340, 380, 400] * 10]
    steps = prefill_steps(lambda tokens: 10 * max(tokens, 300), sizes)
    assert fixed_share(*steps, at_budget=True).low_frac == pytest.approx(0, abs=0.02)
    assert fixed_share(*steps).favours_fuller


def test_steps_of_one_size_show_no_share():
    share = fixed_share(*prefill_steps(lambda _: 4000, [400] * 40))
    assert (share.low_frac, share.high_frac) == pytest.approx((0, 1), abs=1e-4)


def test_too_few_similar_steps_show_no_share():
    assert fixed_share(*prefill_steps(lambda _: 4000, [*[1] * 100, *[400] * 19])) is None


@pytest.mark.parametrize(
    ("pace", "share", "shown"),
    [
        ("clock", FixedShare(0.5, 0.6, 1000), True),
        ("clock", FixedShare(0.49, 0.6, 1000), False),
        ("clock", None, False),
        ("unknown", FixedShare(0.0, 0.1, 1000), False),
        ("at_once", FixedShare(0.0, 0.1, 1000), True),
        ("answers", FixedShare(0.0, 0.1, 1000), True),
    ],
)
def test_a_larger_limit_is_named_only_if_fuller_steps_shorten_latencies(monkeypatch, pace, share, shown):
    """At the engine's own pace they raise throughput; the advice that fills no step stays in any case."""
    monkeypatch.setattr(gains, "offered_load", lambda _: OfferedLoad(pace, 1.0))
    monkeypatch.setattr(gains, "fixed_share", lambda *_: share)
    first, *rest = unless_shown(None, WAITS, ADVICE)
    assert rest == ADVICE[1:]
    assert (first.setting, first.value) == (("max_num_seqs", 64) if shown else (None, None))
    assert (first == ADVICE[0]) is shown


@pytest.mark.parametrize(("pace", "value"), [("clock", None), ("at_once", 0.05)])
def test_a_reserve_is_left_to_a_replay_where_latency_counts(monkeypatch, pace, value):
    monkeypatch.setattr(gains, "offered_load", lambda _: OfferedLoad(pace, 1.0))
    monkeypatch.setattr(gains, "fixed_share", lambda *_: FixedShare(0.9, 0.9, 1000))
    reserve = advise("{option} {value:n}", setting="watermark", value=0.05)
    wider, reserve = unless_shown(None, WAITS, [ADVICE[0], reserve])
    assert (wider.value, reserve.value) == (64, value)


def test_advice_to_replay_states_value_and_reason(monkeypatch, recorded_words):
    monkeypatch.setattr(gains, "offered_load", lambda _: OfferedLoad("clock", 1.0))
    for share in (FixedShare(0.1, 0.4, 1000), FixedShare(0.1, 0.104, 1000), None):
        monkeypatch.setattr(gains, "fixed_share", lambda *_, share=share: share)
        recorded_words(unless_shown(None, WAITS, ADVICE)[0].message)


@pytest.mark.parametrize(
    ("low", "high", "decoding", "pace", "times"),
    [
        (0.5, 0.6, 4, "clock", 2.0),
        (0.5, 0.6, 4, "answers", 2.0),
        (0.49, 0.6, 4, "clock", None),
        # 16 requests gain 0.5 * 1000 us each; 8 decodes lose a token of 1000 us.
        (0.5, 0.6, 8, "clock", None),
        # 16 requests lose 0.1 * 1000 us each; 4 decodes gain 1000 us.
        (0.0, 0.1, 4, "clock", 0.5),
        (0.0, 0.1, 1, "clock", None),
        (0.0, 0.1, 4, "answers", None),
        (0.0, 1.0, 4, "clock", None),
    ],
)
def test_a_budget_is_doubled_or_halved_by_what_a_step_less_saves(
    monkeypatch, low, high, decoding, pace, times
):
    monkeypatch.setattr(gains, "offered_load", lambda _: OfferedLoad(pace, 1.0))
    timeline, full = prefill_steps(lambda _: 1000, SIZES, decoding=decoding)
    decodes = timeline.steps.with_columns(prefill_tokens=pl.lit(0), decode_tokens=pl.lit(8))
    timeline.steps = pl.concat([timeline.steps, decodes], how="vertical_relaxed")
    assert budget_times(timeline, full, FixedShare(low, high, 1000)) == times


@pytest.mark.parametrize(
    ("low", "waiting_tokens", "times"),
    [
        (0.1, 0, 2.0),
        (0.099, 0, None),
        (0.1, 1200, 4.0),
        (0.1, 1199, 2.0),
        (0.1, None, 2.0),
        (0.0, 1200, None),
    ],
)
def test_where_all_come_at_once_half_the_steps_save_half_their_fixed_time(
    monkeypatch, low, waiting_tokens, times
):
    """All busy time is that of the full steps of 400 tokens: a fixed tenth of it saves a twentieth."""
    monkeypatch.setattr(gains, "offered_load", lambda _: OfferedLoad("at_once", 1.0))
    timeline, full = prefill_steps(lambda _: 1000, SIZES)
    timeline.busy_us = 1000 * full.height
    full = full.with_columns(waiting_tokens_after=pl.lit(waiting_tokens, pl.Int64))
    assert budget_times(timeline, full, FixedShare(low, 1.0, 1000)) == times


def test_without_steps_that_only_decode_a_token_has_no_cost(monkeypatch):
    monkeypatch.setattr(gains, "offered_load", lambda _: OfferedLoad("clock", 1.0))
    timeline, full = prefill_steps(lambda _: 1000, SIZES, decoding=4)
    assert budget_times(timeline, full, FixedShare(0.6, 0.7, 1000)) is None
