"""Gaps of the trace: requests' states during a gap, and the requests that left in it.

``EngineFrames.gaps`` has the gaps. In a gap, the state of a request is ``NOT_RECORDED``; a request that is
not recorded after the gap has no end.
"""

import polars as pl

from schedtrace.read.gaps import DROPPED
from schedtrace.timeline.frames import EngineFrames

NOT_RECORDED = "not_recorded"
"""State of a request, and of the engine, in a gap."""


def recorded(states: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``request_states`` or ``engine_states`` outside of gaps."""
    return states.filter(pl.col("state") != NOT_RECORDED)


def missing_us(frames: EngineFrames) -> int:
    """Return the length of all gaps, in microseconds."""
    return int(frames.gaps.select((pl.col("to_us") - pl.col("from_us")).sum()).item() or 0)


def missing_steps(frames: EngineFrames) -> int:
    """Count the steps that lie in gaps."""
    missing = pl.col("last_step") - pl.col("first_step") + 1
    return int(frames.gaps.select(missing.clip(0).sum()).item() or 0)


def after(frames: EngineFrames) -> pl.DataFrame:
    """Return the requests present after a gap, with ``next_step``, the first step after it."""
    steps = frames.gaps.select("next_step", at_us="told_us").drop_nulls().unique("at_us", keep="first")
    return frames.there_after.join(steps, on="at_us", maintain_order="left")


def gone(frames: EngineFrames) -> pl.DataFrame:
    """Return the requests that left, or may have left, in a gap: they are not recorded afterwards.

    Columns: ``request_id``; ``gone_us``, from which nothing is known; ``gone_step``, the first step after the
    gap.
    """
    gaps = frames.gaps.filter(pl.col("kind") != DROPPED).sort("next_step")
    if gaps.is_empty():
        return pl.DataFrame(schema={"request_id": pl.String, "gone_us": pl.Int64, "gone_step": pl.Int64})
    signs = [
        frames.stretches.select("request_id", step=pl.col("last_step")).collect(),
        _numbered(frames, frames.arrivals, "queued_us"),
        frames.arrivals.select("request_id", "step").drop_nulls(),
        _numbered(frames, frames.present, "at_us"),
        frames.preemptions.select("request_id", "step"),
        frames.exits.select("request_id", "step").drop_nulls(),
        after(frames).select("request_id", step="next_step"),
    ]
    last = (
        pl.concat([sign.cast({"step": pl.Int64}) for sign in signs])
        .group_by("request_id")
        .agg(pl.col("step").max())
    )
    return (
        last.join(frames.finishes.select("request_id"), on="request_id", how="anti")
        .sort("step")
        .join_asof(
            gaps.select(gone_step="next_step", gone_us="from_us"),
            left_on=pl.col("step") + 1,
            right_on="gone_step",
            strategy="forward",
            coalesce=False,
        )
        .drop_nulls("gone_us")
        .select("request_id", "gone_us", "gone_step")
    )


def _numbered(frames: EngineFrames, rows: pl.DataFrame, moment: str) -> pl.DataFrame:
    """Return the last step begun at each row's moment: ``request_id`` and ``step`` (-1 for none)."""
    numbers = frames.steps.sort("step")["step"]
    places = (
        frames.steps.sort("step")["start_us"].search_sorted(rows[moment], side="right").cast(pl.Int64) - 1
    )
    step = pl.select(pl.when(places >= 0).then(numbers.gather(places.clip(0)))).to_series().fill_null(-1)
    return rows.select("request_id").with_columns(step=step)


def without_gaps(spans: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return spans of time (``begin_us``, ``end_us``, other columns) without the parts in gaps."""
    columns = {"state": pl.String, "cause": pl.String, "begin_step": pl.Int64, "end_step": pl.Int64}
    missing = [pl.lit(None, kind).alias(name) for name, kind in columns.items() if name not in spans.columns]
    cut = cut_by_gaps(spans.with_columns(*missing, tokens=pl.lit(0)), gaps)
    return cut.filter(pl.col("state").ne_missing(NOT_RECORDED)).select(spans.columns)


def cut_by_gaps(states: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return states with their parts in gaps as ``NOT_RECORDED``, without steps, tokens or cause.

    Args:
        states: ``begin_us``, ``end_us``, ``state``, ``cause``, ``begin_step``, ``end_step`` and ``tokens``.
        gaps: ``EngineFrames.gaps``.
    """
    gaps = gaps.filter(pl.col("to_us") > pl.col("from_us")).sort("from_us")
    if gaps.is_empty() or states.is_empty():
        return states
    first = gaps["to_us"].search_sorted(states["begin_us"], side="right").cast(pl.Int64)
    after_last = gaps["from_us"].search_sorted(states["end_us"], side="left").cast(pl.Int64)
    numbered = states.with_row_index("span").with_columns(first=first, count=(after_last - first).clip(0))
    whole, hit = numbered.filter(pl.col("count") == 0), numbered.filter(pl.col("count") > 0)
    inside = hit.with_columns(gap=pl.int_ranges("first", pl.col("first") + pl.col("count"))).explode("gap")
    inside = inside.with_columns(
        begin_us=pl.max_horizontal("begin_us", pl.lit(gaps["from_us"].gather(inside["gap"]))),
        end_us=pl.min_horizontal("end_us", pl.lit(gaps["to_us"].gather(inside["gap"]))),
        state=pl.lit(NOT_RECORDED),
        tokens=pl.lit(0, states.schema["tokens"]),
        **{name: pl.lit(None, states.schema[name]) for name in ("cause", "begin_step", "end_step")},
    ).filter(pl.col("end_us") > pl.col("begin_us"))
    last = pl.col("first") + pl.col("count")
    between = hit.with_columns(gap=pl.int_ranges("first", last + 1)).explode("gap")
    before = (between["gap"] - 1).clip(0)
    following = between["gap"].clip(None, gaps.height - 1)
    is_first, is_last = pl.col("gap") == pl.col("first"), pl.col("gap") == last
    between = between.with_columns(
        begin_us=pl.when(is_first).then("begin_us").otherwise(pl.lit(gaps["to_us"].gather(before))),
        end_us=pl.when(is_last).then("end_us").otherwise(pl.lit(gaps["from_us"].gather(following))),
        begin_step=pl.when(is_first).then("begin_step").otherwise(pl.lit(gaps["next_step"].gather(before))),
        end_step=pl.when(is_last)
        .then("end_step")
        .otherwise(pl.lit(gaps["first_step"].gather(following)) - 1),
    )
    recorded = between.filter(pl.col("end_us") > pl.col("begin_us"))
    steps_known = pl.col("begin_step") <= pl.col("end_step")
    recorded = recorded.with_columns(
        tokens=pl.when(pl.int_range(pl.len()).over("span") == 0).then("tokens").otherwise(0),
        **{name: pl.when(steps_known).then(name) for name in ("begin_step", "end_step")},
    )
    columns = [*states.columns, "span"]
    return (
        pl.concat([part.select(columns) for part in (whole, inside, recorded)])
        .sort("span", "begin_us", "end_us", maintain_order=True)
        .drop("span")
    )
