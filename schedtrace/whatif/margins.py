"""What a prediction owes to its replay being off from what was recorded.

A replay of the load as recorded that is off by 7 % is an error bar, not a refusal: a change is believed if it
gains more.
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
"""A replay that comes this near to what was recorded is not off: no cause is looked for."""
MOST_FRAC = 1 / 3
"""A replay that is off by more is of another load: it answers nothing."""
EXPLAINS_FRAC = 0.5
"""Share of the misfit from which interruptions are its likely cause."""


def drift(recorded: Sequence[float], replayed: Sequence[float]) -> float:
    """Return the variance of what replays of trials are off by (a logarithm), and the square of its mean."""
    off = [math.log(was / ours) for was, ours in zip(recorded, replayed, strict=False)]
    spread = statistics.variance(off) if len(off) > 1 else 0.0
    return spread + statistics.fmean(off) ** 2


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
    return causes
