"""What a load asks of an engine at once: of all that was seen, since a window shows a part of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Demand:
    """As far as it was seen: more of the same load may ask for more."""

    requests: int = 0
    """Most of them in the scheduler after a step."""
    ended: int = 0
    """Requests that produced tokens and ended."""
    blocks: int = 0
    """KV blocks that their tokens filled, added up; 0 where the block size is unknown."""

    def __add__(self, later: "Demand") -> "Demand":
        return Demand(
            max(self.requests, later.requests), self.ended + later.ended, self.blocks + later.blocks
        )

    @property
    def blocks_each(self) -> float | None:
        """On average; None: not known."""
        return self.blocks / self.ended if self.blocks else None


def demand(timeline: "Timeline") -> Demand:
    """Of the steps of a timeline."""
    there = pl.col("num_running_after") + pl.col("num_waiting_after").fill_null(0)
    ended = timeline.finishes.filter(pl.col("output_tokens") > 0)
    blocks = 0
    if (size := timeline.header.block_size) is not None:
        tokens = pl.col("prompt_tokens") + pl.col("output_tokens")
        blocks = int(ended.select((-(-tokens // size)).sum()).item() or 0)
    return Demand(int(timeline.steps.select(there.max()).item() or 0), ended.height, blocks)
