"""The exits and caps of a run, counted: how often, in how many steps, with how much budget left, for whom."""

from collections.abc import Sequence

import polars as pl

from schedtrace.model.report import CapRow, CauseRow
from schedtrace.timeline.timeline import Timeline

_EXIT = ["loop", "kind", "cause", "detail", "location", "via", "refusal"]
_CAP = ["cap", "location"]
_REQUESTS = pl.col("request_ids").explode().drop_nulls().n_unique()


def exit_counts(timeline: Timeline) -> pl.DataFrame:
    """One row per kind of exit of one engine: ``exits``, ``steps``, ``request_ids``, budget ``left``."""
    return timeline.exits.group_by(_EXIT).agg(
        pl.col("count").sum().alias("exits"),
        pl.col("step").n_unique().cast(pl.Int64).alias("steps"),
        pl.col("request_id").drop_nulls().unique().alias("request_ids"),
        (pl.col("budget_left") * pl.col("count")).sum().alias("left"),
    )


def cause_table(engines: Sequence[pl.DataFrame]) -> list[CauseRow]:
    """One row per kind of exit over all engines: refusals first, the most frequent first.

    Args:
        engines: ``exit_counts`` of each engine.
    """
    rows = (
        pl.concat(engines)
        .group_by(_EXIT)
        .agg(pl.col("exits", "steps", "left").sum(), requests=_REQUESTS)
        .with_columns(mean_budget_left=pl.col("left") / pl.col("exits"))
        .drop("left")
        .sort("refusal", "exits", *_EXIT[:-1], descending=[True, True, *[False] * 6])
    )
    return [CauseRow(**row) for row in rows.to_dicts()]


def cap_counts(timeline: Timeline) -> pl.DataFrame:
    """One row per kind of cap of one engine: ``chunks``, ``steps``, ``request_ids``, ``withheld_tokens``.

    And of their steps the budget that was ``left`` in all, and in how many it is ``known``.
    """
    of_steps = pl.struct("step", "remaining_budget").unique().struct.field("remaining_budget")
    return timeline.caps.group_by(_CAP).agg(
        pl.len().cast(pl.Int64).alias("chunks"),
        pl.col("step").n_unique().cast(pl.Int64).alias("steps"),
        pl.col("request_id").drop_nulls().unique().alias("request_ids"),
        (pl.col("wanted_tokens") - pl.col("capped_tokens")).sum().alias("withheld_tokens"),
        of_steps.sum().cast(pl.Int64).alias("left"),
        of_steps.count().cast(pl.Int64).alias("known"),
    )


def cap_table(engines: Sequence[pl.DataFrame]) -> list[CapRow]:
    """One row per kind of cap over all engines, that which withheld most first.

    Args:
        engines: ``cap_counts`` of each engine.
    """
    rows = (
        pl.concat(engines)
        .group_by(_CAP)
        .agg(pl.col("chunks", "steps", "withheld_tokens", "left", "known").sum(), requests=_REQUESTS)
        .with_columns(mean_budget_left=pl.when(pl.col("known") > 0).then(pl.col("left") / pl.col("known")))
        .drop("left", "known")
        .sort("withheld_tokens", *_CAP, descending=[True, False, False])
    )
    return [CapRow(**row) for row in rows.to_dicts()]
