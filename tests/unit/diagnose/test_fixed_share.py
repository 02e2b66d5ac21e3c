"""Whether fuller or smaller steps shorten latencies, by the part of their time that is fixed."""

from types import SimpleNamespace

import polars as pl
import pytest

from schedtrace.diagnose import gains as module
from schedtrace.diagnose.gains import FixedShare, budget_times, fixed_share, unless_shown
from schedtrace.diagnose.offered_load import OfferedLoad
from schedtrace.diagnose.rules.common import advise

ADVICE = [
    advise("{option} {value:n}", setting="max_num_seqs", value=64),
    advise("{option} {value:n}", setting="block_size", value=16),
    advise("send long prompts to an engine of their own"),
]


def engine(step_us, sizes, *, decoding=0, running=8, waiting=8, host_us=0):
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
    return SimpleNamespace(steps=rows, engine_states=host), SimpleNamespace(steps=full)


SIZES = [100, 200, 300, 400] * 10


@pytest.mark.parametrize(
    ("step_us", "low", "high"),
    [
        (lambda _: 4000, 1.0, 1.0),
        (lambda tokens: 3000 + 10 * tokens, 3 / 7, 3 / 7),
        (lambda tokens: 10 * tokens, 0.0, 0.0),
        # A step of up to 100 tokens hides them behind reading the weights; none of the larger ones does.
        (lambda tokens: 10 * max(tokens, 100), 0.0, 0.0),
    ],
)
def test_the_fixed_share_is_that_of_steps_of_similar_size(step_us, low, high):
    share = fixed_share(*engine(step_us, [*[1, 2, 4, 50] * 20, *SIZES]))
    assert share[:2] == pytest.approx((low, high), abs=0.02)


def test_steps_of_one_size_show_no_share():
    share = fixed_share(*engine(lambda _: 4000, [400] * 40))
    assert (share.low_frac, share.high_frac) == pytest.approx((0, 1), abs=1e-4)


def test_too_few_similar_steps_show_no_share():
    assert fixed_share(*engine(lambda _: 4000, [*[1] * 100, *[400] * 19])) is None


def test_the_hosts_time_counts_as_fixed_at_most():
    share = fixed_share(*engine(lambda tokens: 10 * tokens, SIZES, host_us=1000))
    assert share == pytest.approx((0, 0.2, 5000), abs=1e-3)


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
    monkeypatch.setattr(module, "offered_load", lambda _: OfferedLoad(pace, 1.0))
    monkeypatch.setattr(module, "fixed_share", lambda *_: share)
    first, *rest = unless_shown(None, None, ADVICE)
    assert rest == ADVICE[1:]
    assert (first.setting, first.value) == (("max_num_seqs", 64) if shown else (None, None))
    assert (first == ADVICE[0]) is shown


@pytest.mark.parametrize(("pace", "value"), [("clock", None), ("at_once", 0.05)])
def test_a_reserve_is_left_to_a_replay_where_latency_counts(monkeypatch, pace, value):
    monkeypatch.setattr(module, "offered_load", lambda _: OfferedLoad(pace, 1.0))
    monkeypatch.setattr(module, "fixed_share", lambda *_: FixedShare(0.9, 0.9, 1000))
    reserve = advise("{option} {value:n}", setting="watermark", value=0.05)
    wider, reserve = unless_shown(None, None, [ADVICE[0], reserve])
    assert (wider.value, reserve.value) == (64, value)


def test_advice_to_replay_states_value_and_reason(monkeypatch, recorded_words):
    monkeypatch.setattr(module, "offered_load", lambda _: OfferedLoad("clock", 1.0))
    for share in (FixedShare(0.1, 0.4, 1000), FixedShare(0.1, 0.104, 1000), None):
        monkeypatch.setattr(module, "fixed_share", lambda *_, share=share: share)
        recorded_words(unless_shown(None, None, ADVICE)[0].message)


@pytest.mark.parametrize(
    ("low", "high", "decoding", "pace", "times"),
    [
        (0.5, 0.6, 4, "clock", 2.0),
        (0.5, 0.6, 4, "at_once", 2.0),
        (0.49, 0.6, 4, "clock", None),
        # 16 requests gain 0.5 * 1000 us each; 8 decodes lose a token of 1000 us.
        (0.5, 0.6, 8, "clock", None),
        # 16 requests lose 0.1 * 1000 us each; 4 decodes gain 1000 us.
        (0.0, 0.1, 4, "clock", 0.5),
        (0.0, 0.1, 1, "clock", None),
        (0.0, 0.1, 4, "at_once", None),
        (0.0, 1.0, 4, "clock", None),
    ],
)
def test_a_budget_is_doubled_or_halved_by_what_a_step_less_saves(
    monkeypatch, low, high, decoding, pace, times
):
    monkeypatch.setattr(module, "offered_load", lambda _: OfferedLoad(pace, 1.0))
    timeline, waits = engine(lambda _: 1000, SIZES, decoding=decoding)
    decodes = timeline.steps.with_columns(prefill_tokens=pl.lit(0), decode_tokens=pl.lit(8))
    timeline.steps = pl.concat([timeline.steps, decodes], how="vertical_relaxed")
    assert budget_times(timeline, waits, FixedShare(low, high, 1000)) == times


def test_without_steps_that_only_decode_a_token_has_no_cost():
    timeline, waits = engine(lambda _: 1000, SIZES, decoding=4)
    assert budget_times(timeline, waits, FixedShare(0.6, 0.7, 1000)) is None
