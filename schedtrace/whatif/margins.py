"""What a prediction's interval owes to its replay: what that is off by, and its steps beyond the record.

A replay of the load as recorded that is off by 7 % is an error bar, not a refusal: a change is believed if it
gains more. Steps outside the recorded range are as uncertain as the fit is on steps that it has not seen:
those with most tokens are held out, and predicted from the others.
"""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from schedtrace.errors import InputError
from schedtrace.step_times.fitted import Fitted
from schedtrace.step_times.fitting import DEVICE, fit_rows
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.workloads.prefixes import CHARACTERS, MOST_BLOCKS

if TYPE_CHECKING:
    from schedtrace.whatif.prediction import RecordedLoad

REPRODUCES_WITHIN = 0.05
"""A replay that comes this near to what was recorded is not off: no cause is looked for."""
MOST_FRAC = 1 / 3
"""A replay that is off by more is of another load: it answers nothing."""
HELD_OUT_FRAC = 0.25
"""Share of the steps, those with most tokens, that the fit is tried on without having seen them."""
FEWEST_STEPS = 30
"""Fewest smaller steps to fit; with fewer, nothing is added."""
EXPLAINS_FRAC = 0.5
"""Share of the misfit from which interruptions are its likely cause."""


def drift(recorded: Sequence[float], replayed: Sequence[float]) -> float:
    """Return the variance of what replays of trials are off by (a logarithm), and the square of its mean."""
    off = [math.log(was / ours) for was, ours in zip(recorded, replayed, strict=False)]
    spread = statistics.variance(off) if len(off) > 1 else 0.0
    return spread + statistics.fmean(off) ** 2


def beyond(fitted: Fitted, outside_frac: float) -> float:
    """Return the variance that a replay's steps outside the recorded range add to the logarithm of a ratio.

    Args:
        fitted: The step times.
        outside_frac: Share of the replayed steps that lie outside.
    """
    return (outside_frac * held_out_error(fitted)) ** 2 if outside_frac else 0.0


def held_out_error(fitted: Fitted) -> float:
    """Return what a fit to the smaller steps is off by on the time of the largest, as a logarithm."""
    if fitted.rows is None:
        return 0.0
    rows = fitted.rows.with_columns(batch_tokens=pl.col("prefill_tokens") + pl.col("decode_tokens"))
    rows = rows.drop_nulls(("device_us", *DEVICE)).filter(pl.col("device_us") > 0)
    most = rows["batch_tokens"].quantile(1 - HELD_OUT_FRAC, "lower")
    smaller, larger = rows.filter(pl.col("batch_tokens") <= most), rows.filter(pl.col("batch_tokens") > most)
    if smaller.height < FEWEST_STEPS or larger.is_empty():
        return 0.0
    try:
        device = fit_rows(smaller, fitted.fit.source).device
    except InputError:
        return 0.0
    predicted_us, took_us = larger.select(device.expr().sum(), took=pl.col("device_us").sum()).row(0)
    return abs(math.log(predicted_us / took_us)) if predicted_us > 0 else 0.0


def likely_causes(base: "RecordedLoad", off_frac: float) -> list[str]:
    """Return what happened in the recording that a replay does not have, as clauses of a sentence.

    Args:
        base: The recorded load.
        off_frac: What its replay is off by.
    """
    causes = []
    if starved := sum(timeline.starved_steps.len() for timeline in base.timelines):
        causes.append(f"in {starved:,} steps processors were short")
    interrupted_us = sum(int(timeline.events.select(LENGTH_US.sum()).item()) for timeline in base.timelines)
    busy_us = sum(timeline.busy_us for timeline in base.timelines)
    if busy_us and interrupted_us / busy_us >= EXPLAINS_FRAC * abs(off_frac):
        causes.append(f"interruptions took {interrupted_us / busy_us:.0%} of the engine's time")
    external = pl.LazyFrame(schema={"external_tokens": pl.Int64})
    brought = sum(
        timeline.lists.get("admitted", external)
        .select((pl.col("external_tokens").fill_null(0) > 0).sum())
        .collect()
        .item()
        for timeline in base.timelines
    )
    if brought:
        causes.append(f"{brought:,} requests got tokens from a KV connector")
    hashed = pl.col("prefix_hashes").str.len_bytes() == MOST_BLOCKS * CHARACTERS
    long = sum(timeline.arrivals.filter(hashed).height for timeline in base.timelines)
    if long:
        causes.append(f"what {long:,} prompts share is known of their first {MOST_BLOCKS} blocks only")
    return causes
