import math

import numpy as np
import polars as pl
import pytest

from schedtrace.timeline import step_time
from schedtrace.timeline.step_time import correlation_time, fit_step_time


def steps(count):
    """Steps that take 1 ms and 2, 3 and 0.01 us a token of each kind."""
    at = pl.int_range(1, count + 1, eager=True)
    work = pl.DataFrame(
        {"prefill_tokens": at * 7 % 500, "decode_tokens": at * 3 % 64, "context_tokens": at * 131 % 20_000}
    )
    busy = 1000 + 2 * pl.col("prefill_tokens") + 3 * pl.col("decode_tokens") + 0.01 * pl.col("context_tokens")
    return work.with_columns(busy_us=busy)


@pytest.mark.parametrize(("most", "used"), [(200, 100), (100, 100), (99, 50), (34, 34), (33, 25)])
def test_of_many_steps_evenly_chosen_ones_give_the_same_model(monkeypatch, most, used):
    monkeypatch.setattr(step_time, "MOST_STEPS", most)
    model = fit_step_time(steps(100))
    assert model.steps == used
    costs = (model.per_prefill_token_us, model.per_decode_token_us, model.per_context_token_us)
    assert (model.base_us, *costs) == pytest.approx((1000, 2, 3, 0.01), rel=0.01)
    took = steps(100).select("busy_us", predicted=model.predicted())
    assert took["predicted"].to_list() == pytest.approx(took["busy_us"].to_list(), rel=0.01)


def test_too_few_steps_have_no_model():
    assert fit_step_time(steps(19)) is None
    assert fit_step_time(steps(20)).steps == 20


def test_steps_without_tokens_show_nothing():
    """An asynchronous engine runs steps without tokens before an output is back."""
    empty = pl.DataFrame(dict.fromkeys(step_time.FEATURES, [0] * 200) | {"busy_us": [100] * 200})
    assert fit_step_time(pl.concat([steps(100), empty], how="vertical_relaxed")) == fit_step_time(steps(100))
    assert fit_step_time(empty) is None


def test_work_that_no_step_has_costs_nothing():
    decodes = steps(40).with_columns(
        busy_us=1000 + 3 * pl.col("decode_tokens"), prefill_tokens=0 * pl.col("prefill_tokens")
    )
    assert fit_step_time(decodes).per_prefill_token_us == 0


def test_costs_that_no_step_tells_apart_are_alike():
    """Every step has four decodes: half of its time is that of a step, half that of its decodes."""
    alike = steps(40).with_columns(prefill_tokens=0, decode_tokens=4, context_tokens=0, busy_us=1000)
    model = fit_step_time(alike)
    assert (model.base_us, model.per_decode_token_us) == pytest.approx((500, 125))
    assert model.most_base_us == pytest.approx(1000, rel=0.01)


def test_decodes_of_one_batch_may_be_all_base_though_prefills_take_less():
    """A step with one decode takes 6,039 us; a prefill of one token would take 1,020."""
    prefills = (pl.int_range(pl.len()) % 12 == 0).cast(pl.Int64)
    tokens = prefills * (100 + pl.int_range(pl.len()))
    frame = steps(400).with_columns(
        prefill_tokens=tokens,
        decode_tokens=1 - prefills,
        busy_us=6039 + prefills * (20 * tokens - 5039),
        context_tokens=pl.lit(0),
    )
    model = fit_step_time(frame)
    assert model.most_base_us == pytest.approx(1000, rel=0.01)
    assert model.most_decode_base_us == pytest.approx(6039, rel=1e-4)


def test_steps_of_several_sizes_bound_the_base():
    assert fit_step_time(steps(100)).most_base_us == pytest.approx(1000, rel=0.02)
    noisy = steps(400).with_columns(
        busy_us=pl.col("busy_us") * (1 + (pl.int_range(pl.len()) * 37 % 5 - 2) / 50)
    )
    assert 1000 < fit_step_time(noisy).most_base_us < 1100


@pytest.mark.parametrize("apart", [True, False])
def test_the_order_of_the_steps_changes_no_digit(apart):
    """Nor another processor, which adds in another order: not even where each step has one request."""
    frame = steps(400).with_columns(busy_us=pl.col("busy_us") * (1 + pl.int_range(pl.len()) * 37 % 100 / 99))
    if not apart:
        prefills = (pl.int_range(pl.len()) % 12 == 0).cast(pl.Int64)
        frame = frame.with_columns(
            prefill_tokens=900 * prefills, decode_tokens=1 - prefills, busy_us=6039 + 17_961 * prefills
        )
    model, shuffled = fit_step_time(frame), fit_step_time(frame.sample(400, seed=1, shuffle=True))
    assert model == fit_step_time(frame.reverse())
    costs = ("base_us", "per_prefill_token_us", "per_decode_token_us", "per_context_token_us", "error_frac")
    assert [getattr(shuffled, name) for name in costs] == pytest.approx(
        [getattr(model, name) for name in costs]
    )


def test_a_run_of_alike_residuals_tells_as_much_as_a_fraction_of_them():
    """Autocorrelations of four 1s and four -1s: 1 + 5/8, 2/8 - 1/8, then -4/8 - 3/8, where the sum ends."""
    assert correlation_time(np.array([1.0] * 4 + [-1.0] * 4)) == pytest.approx(2 * (13 / 8 + 1 / 8) - 1)
    assert correlation_time(np.array([1.0, -1.0] * 4)) == 1
    assert correlation_time(np.zeros(9)) == 1


def test_a_drifting_pace_hides_the_base():
    """Twelve requests all the time, whose context grows and shrinks with a pace that drifts by itself."""
    pace = [10_000 + 2_000 * math.sin(number / 100) for number in range(900)]
    rows = [
        {"busy_us": us, "prefill_tokens": 0, "decode_tokens": 12, "context_tokens": round(7_500 + 0.2 * us)}
        for us in pace
    ]
    noise = pl.Series([(number * 37 % 19 - 9) * 100 for number in range(900)])
    frame = pl.DataFrame(rows).with_columns(pl.col("context_tokens") + noise, pl.col("busy_us") * 1.0)
    assert fit_step_time(frame).most_base_us > 8_000
