"""Requests whose clients left or sent them again, and the time that steps spent on them in vain."""

import polars as pl

from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.spans import at_steps, level
from schedtrace.timeline.step_time import StepTime, median

FEWEST_ABORTED = 3
"""Minimum number of aborted requests that can show a pattern."""
SAME_AGE_FRAC = 0.1
"""Largest spread of ages at abort, as a share of their median, that still indicates a client's timeout."""
ALIKE = ["prompt_tokens", "max_tokens", "lora", "prefix_hashes"]
"""Properties that a retry shares with the request that it repeats."""
ONCE_FRAC = 0.1
"""Minimum share of prompts that come only once; with fewer, a benchmark may be repeating its prompts."""
UNFINISHED_FRAC = 0.5
"""Minimum share of repeated requests that come again before the first attempt has finished."""
SHORTEST_TIMEOUT_US = 1_000_000
"""Minimum time, in microseconds, from a request to its retry; samples of one prompt are closer together."""
ABORTED_SCHEMA = {"step": pl.Int64, "begin_us": pl.Int64, "end_us": pl.Int64, "in_vain": pl.Float64}
"""Columns of ``work_for_aborted``."""


def is_aborted() -> pl.Expr:
    """Return an expression for whether the client, not the scheduler, aborted a request."""
    return (pl.col("status") == "ABORTED") & ~pl.col("in_schedule")


def have_same_age(ages: pl.Series) -> bool:
    """Return whether most requests were aborted at about the same age, which indicates a client's timeout."""
    spread = float((ages.quantile(0.9) or 0) - (ages.quantile(0.1) or 0))
    return ages.len() > 0 and spread <= SAME_AGE_FRAC * median(ages)


def abandoned_requests(frames: EngineFrames) -> pl.Series:
    """Return the ids of the requests whose clients left.

    These are all aborted requests if most were aborted at about the same age, otherwise those without a
    token; if few were aborted, they are the requests that were sent again (``sent_again``). Any other aborted
    request may have reached a stop string: vLLM's front end then aborts it, and its client got the answer.
    """
    aborted = frames.finishes.filter(is_aborted()).with_columns(us=pl.coalesce("abort_us", "finished_us"))
    if aborted.height < FEWEST_ABORTED:
        return sent_again(frames)["request_id"]
    ages = (aborted["us"] - aborted.select(pl.coalesce("arrived_us", "queued_us")).to_series()).drop_nulls()
    certain = aborted if have_same_age(ages) else aborted.filter(pl.col("output_tokens") == 0)
    return certain["request_id"].unique()


def sent_again(frames: EngineFrames) -> pl.DataFrame:
    """Return the unfinished requests that came again at about the same age, as after a client's timeout.

    A proxy may keep a request open after its client has left, so that no abort shows it. Columns: those of
    ``ALIKE``, ``request_id``, ``step``, ``trial``, ``queued_us``, ``output_tokens``, ``retry`` (the request
    that came instead) and ``age`` (how many microseconds later it came). Empty without prefix hashes.
    """
    ends = frames.finishes.select("request_id", "output_tokens", ended_us="finished_us")
    requests = (
        frames.first_arrivals.filter(pl.col("prefix_hashes").str.len_bytes() > 0)
        .select("request_id", "step", "trial", "queued_us", *ALIKE)
        .join(ends, on="request_id", how="left", maintain_order="left")
        .with_columns(
            retry=pl.col("request_id").shift(-1).over(ALIKE),
            age=pl.col("queued_us").shift(-1).over(ALIKE) - pl.col("queued_us"),
            alike=pl.len().over(ALIKE),
        )
    )
    again = requests.filter(pl.col("retry").is_not_null())
    unfinished = again.filter(
        (pl.col("queued_us") + pl.col("age") < pl.col("ended_us")).fill_null(value=True)
    )
    once = requests.filter(pl.col("alike") == 1).height
    prompts = once + again.height - again.filter(pl.col("request_id").is_in(again["retry"].implode())).height
    shows_a_timeout = (
        unfinished.height >= max(FEWEST_ABORTED, UNFINISHED_FRAC * again.height)
        and once >= ONCE_FRAC * prompts
        and median(unfinished["age"]) >= SHORTEST_TIMEOUT_US
        and have_same_age(unfinished["age"])
    )
    return unfinished if shows_a_timeout else unfinished.clear()


def work_for_aborted(frames: EngineFrames, model: StepTime | None) -> pl.DataFrame:
    """Return the steps that computed for requests whose clients left later; empty without a step-time model.

    Columns: ``step``, ``begin_us`` and ``end_us`` (start of the next step), and ``in_vain``, the share of
    that time in which the device worked for the abandoned requests. The part of a step's time beyond its base
    belongs to requests in proportion to their tokens; a step without other requests counts in full.
    """
    aborted = abandoned_requests(frames)
    if model is None or aborted.is_empty():
        return pl.DataFrame(schema=ABORTED_SCHEMA)
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
        .select(pl.col(name).cast(kind) for name, kind in ABORTED_SCHEMA.items())
    )
