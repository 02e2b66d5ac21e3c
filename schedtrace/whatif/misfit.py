"""Margin that the misfit of a replay adds to a prediction.

The misfit is the error of a replay with the recorded settings. A misfit of 7 % widens the error bar and does
not forbid a prediction: a change counts if it gains more than that.
"""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from schedtrace.timeline.spans import LENGTH_US

if TYPE_CHECKING:
    from schedtrace.whatif.prediction import RecordedLoad

REPRODUCES_WITHIN = 0.05
"""Largest misfit, as a share, that needs no explanation."""
MOST_FRAC = 1 / 3
"""Largest misfit, as a share, that allows a prediction; beyond it the replay does not reproduce the load."""
EXPLAINS_FRAC = 0.5
"""Least share of the misfit that interruptions must account for to be its likely cause."""


def drift(recorded: Sequence[float], replayed: Sequence[float]) -> float:
    """Return the variance of the trials' misfits (log ratios) plus the square of their mean."""
    off = [math.log(was / ours) for was, ours in zip(recorded, replayed, strict=False)]
    spread = statistics.variance(off) if len(off) > 1 else 0.0
    return spread + statistics.fmean(off) ** 2


def likely_causes(base: "RecordedLoad", off_frac: float) -> list[str]:
    """Return the recorded events that a replay cannot reproduce, as clauses of a sentence.

    Args:
        base: Recorded load.
        off_frac: Misfit of its replay, as a share.
    """
    causes = []
    if starved := sum(timeline.starved_steps.len() for timeline in base.timelines):
        causes.append(f"in {starved:,} steps the engine waited for a processor")
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
    return causes
