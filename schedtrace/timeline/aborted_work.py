"""Device time spent on requests whose clients did not wait for the answer."""

import polars as pl

from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.spans import at_steps, level
from schedtrace.timeline.step_time import StepTime, median

FEWEST_ABORTED = 3
"""Fewest aborted requests that can show a pattern."""
SAME_AGE_FRAC = 0.1
"""Largest spread of the ages at abort, as a share of their median, that shows a client's timeout."""
SCHEMA = {"step": pl.Int64, "begin_us": pl.Int64, "end_us": pl.Int64, "in_vain": pl.Float64}
"""Columns of ``work_for_aborted``."""


def is_aborted() -> pl.Expr:
    """Return whether a finish is an abort by the client, not by the scheduler."""
    return (pl.col("status") == "ABORTED") & ~pl.col("in_schedule")


def have_same_age(ages: pl.Series) -> bool:
    """Return whether most requests were aborted at about the same age, as by a client's timeout."""
    spread = float((ages.quantile(0.9) or 0) - (ages.quantile(0.1) or 0))
    return ages.len() > 0 and spread <= SAME_AGE_FRAC * median(ages)


def abandoned_requests(frames: EngineFrames) -> pl.Series:
    """Return the requests whose clients certainly left: aborted without a token, or all at the same age.

    Any other aborted request may have reached a stop string, at which vLLM's front end aborts it; its client
    got the answer.
    """
    aborted = frames.finishes.filter(is_aborted()).with_columns(us=pl.coalesce("abort_us", "finished_us"))
    if aborted.height < FEWEST_ABORTED:
        return aborted["request_id"].clear()
    ages = (aborted["us"] - aborted.select(pl.coalesce("arrived_us", "queued_us")).to_series()).drop_nulls()
    certain = aborted if have_same_age(ages) else aborted.filter(pl.col("output_tokens") == 0)
    return certain["request_id"].unique()


def work_for_aborted(frames: EngineFrames, model: StepTime | None) -> pl.DataFrame:
    """Return the steps that computed for requests whose clients left later; empty without a step-time model.

    Columns: ``step``, ``begin_us`` and ``end_us`` (start of the next step), and ``in_vain``, the share of
    that time in which the device worked for the abandoned requests. Their share of a step's time beyond its
    base equals their share of its tokens; a step without further requests counts in full.
    """
    aborted = abandoned_requests(frames)
    if model is None or aborted.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    theirs = frames.stretches.filter(pl.col("request_id").is_in(pl.lit(aborted).implode()))
    tokens = level(theirs, "step", pl.col("last_step") + 1, their_tokens=pl.col("scheduled_tokens"))
    predicted = model.predicted()
    part = (pl.col("their_tokens") / pl.col("used_tokens")) * (predicted - model.base_us) / predicted
    alone = pl.col("their_tokens") >= pl.col("used_tokens")
    length = pl.col("end_us") - pl.col("begin_us")
    busy = (pl.col("busy_us") / length).clip(0, 1)
    return (
        at_steps(tokens, frames.steps)
        .with_columns(
            begin_us="start_us", end_us=pl.col("start_us").shift(-1).fill_null(pl.lit(frames.end_us))
        )
        .filter((pl.col("their_tokens") > 0) & (length > 0) & (pl.col("busy_us") > 0))
        .with_columns(in_vain=pl.when(alone).then(1.0).otherwise(part) * busy)
        .select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
    )
