"""Two costs of which the slower one sets the time are fitted back; one sum stays one."""

import random

import polars as pl
import pytest

from schedtrace.step_times.cost_sums import FEWEST_OF_A_SUM, fit_larger

ONE = ("prefill_tokens", "decodes")
TWO = (("decodes",), ("batch_tokens",))
MEMORY = 6000 + 40 * pl.col("decodes")
COMPUTE = 1000 + 20 * pl.col("batch_tokens")


def steps(chunks, us, noise=0.0):
    """400 steps of 1 to 60 decodes; every fourth has a chunk of one of these sizes."""
    draw = random.Random(1)  # noqa: S311  # made-up steps
    decodes = [draw.randrange(1, 61) for _ in range(400)]
    prefill = [draw.choice(chunks) if number % 4 == 0 else 0 for number in range(400)]
    rows = pl.DataFrame({"decodes": decodes, "prefill_tokens": prefill})
    rows = rows.with_columns(batch_tokens=pl.col("decodes") + pl.col("prefill_tokens"))
    drawn = pl.Series([draw.gauss(1, noise) for _ in range(400)])
    return rows.with_columns(us=us * drawn)


def parts(larger):
    return [(part.base_us, part.factors) for part in larger.parts]


@pytest.mark.parametrize("noise", [0, 0.03])
def test_two_costs_are_fitted_back(noise):
    larger = fit_larger(steps([64, 512, 2000], pl.max_horizontal(MEMORY, COMPUTE), noise), "us", ONE, TWO)
    close = 1e-6 if noise == 0 else 0.1
    (memory_us, memory), (compute_us, compute) = parts(larger)
    assert (memory_us, memory["decodes"]) == pytest.approx((6000, 40), rel=close)
    assert (compute_us, compute["batch_tokens"]) == pytest.approx(
        (1000, 20), rel=max(close, 0.2 if noise else 0)
    )
    # A chunk of 150 tokens is free, one of 2,000 is not.
    assert larger.us({"decodes": 30, "prefill_tokens": 150, "batch_tokens": 180}) == pytest.approx(
        7200, rel=0.02
    )
    assert larger.us({"decodes": 30, "prefill_tokens": 2000, "batch_tokens": 2030}) == pytest.approx(
        41_600, rel=0.02
    )


@pytest.mark.parametrize("noise", [0, 0.03, 0.3])
def test_one_sum_stays_one(noise):
    us = 2000 + 20 * pl.col("prefill_tokens") + 40 * pl.col("decodes")
    larger = fit_larger(steps([64, 512, 2000], us, noise), "us", ONE, TWO)
    assert len(larger.parts) == 1
    assert larger.us({"decodes": 30, "prefill_tokens": 512, "batch_tokens": 542}) == pytest.approx(
        2000 + 512 * 20 + 1200, rel=0.02 + noise / 10
    )


@pytest.mark.parametrize(("large", "sums"), [(FEWEST_OF_A_SUM - 1, 1), (FEWEST_OF_A_SUM, 2)])
def test_how_many_large_steps_it_takes(large, sums):
    rows = steps([1], MEMORY).with_row_index()
    chunks = pl.when(pl.col("index") < large).then(400 * (1 + pl.col("index") % 4)).otherwise(0)
    rows = rows.with_columns(prefill_tokens=chunks.cast(pl.Int64))
    rows = rows.with_columns(batch_tokens=pl.col("decodes") + pl.col("prefill_tokens"))
    rows = rows.with_columns(us=pl.max_horizontal(MEMORY, COMPUTE))
    assert len(fit_larger(rows, "us", ONE, TWO).parts) == sums


def test_the_form_of_another_fit_is_kept():
    two = fit_larger(steps([64, 512, 2000], pl.max_horizontal(MEMORY, COMPUTE)), "us", ONE, TWO)
    one = fit_larger(steps([64], 5000 + 40 * pl.col("decodes")), "us", ONE, TWO)
    rows = steps([64, 512, 2000], pl.max_horizontal(MEMORY, COMPUTE), 0.03)
    assert [len(fit_larger(rows, "us", ONE, TWO, like).parts) for like in (one, two)] == [1, 2]


def test_outside_is_asked_of_the_part_that_sets_the_time():
    larger = fit_larger(steps([64, 512, 2000], pl.max_horizontal(MEMORY, COMPUTE)), "us", ONE, TWO)
    assert not larger.doublings_outside({"decodes": 30, "prefill_tokens": 1000, "batch_tokens": 1030})
    assert larger.doublings_outside({"decodes": 30, "prefill_tokens": 4000, "batch_tokens": 4030})
    assert larger.doublings_outside({"decodes": 90, "prefill_tokens": 0, "batch_tokens": 90})


def test_rows_and_one_step_are_priced_alike():
    rows = steps([64, 512, 2000], pl.max_horizontal(MEMORY, COMPUTE))
    larger = fit_larger(rows, "us", ONE, TWO)
    priced = rows.select(larger.expr()).to_series().to_list()
    assert priced == pytest.approx([larger.us(row) for row in rows.iter_rows(named=True)])
