"""The exits and caps of a run, counted: how often, in how many steps, with how much budget left, for whom."""

import polars as pl

from schedtrace.model.report import CapRow, CauseRow
from schedtrace.timeline.timeline import Timeline

_EXIT = ["loop", "kind", "cause", "detail", "location", "via", "refusal"]
_CAP = ["cap", "location"]


def cause_table(views: list[Timeline]) -> list[CauseRow]:
    """One row per kind of exit over all engines: refusals first, the most frequent first."""
    exits = pl.concat([_of_engine(timeline, timeline.exits) for timeline in views])
    rows = (
        exits.group_by(_EXIT)
        .agg(
            pl.col("count").sum().alias("exits"),
            pl.struct("engine", "step").n_unique().alias("steps"),
            pl.col("request_id").drop_nulls().n_unique().alias("requests"),
            ((pl.col("budget_left") * pl.col("count")).sum() / pl.col("count").sum()).alias(
                "mean_budget_left"
            ),
        )
        .sort("refusal", "exits", *_EXIT[:-1], descending=[True, True, *[False] * 6])
    )
    return [CauseRow(**row) for row in rows.to_dicts()]


def cap_table(views: list[Timeline]) -> list[CapRow]:
    """One row per kind of cap over all engines, that which withheld most first."""
    caps = pl.concat([_of_engine(timeline, timeline.caps) for timeline in views])
    rows = (
        caps.group_by(_CAP)
        .agg(
            pl.len().alias("chunks"),
            pl.struct("engine", "step").n_unique().alias("steps"),
            pl.col("request_id").drop_nulls().n_unique().alias("requests"),
            (pl.col("wanted_tokens") - pl.col("capped_tokens")).sum().alias("withheld_tokens"),
            pl.struct("engine", "step", "remaining_budget")
            .unique()
            .struct.field("remaining_budget")
            .mean()
            .alias("mean_budget_left"),
        )
        .sort("withheld_tokens", *_CAP, descending=[True, False, False])
    )
    return [CapRow(**row) for row in rows.to_dicts()]


def _of_engine(timeline: Timeline, frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(engine=pl.lit(timeline.rank))
