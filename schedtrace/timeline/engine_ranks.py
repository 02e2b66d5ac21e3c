"""The ranks of one data-parallel run on one clock, and the passes that ranks in lock-step make together.

Ranks of a mixture-of-experts model run in lock-step: each makes one forward pass for every value of a common
step counter, a dummy batch where it has nothing to compute, and no rank begins a pass before all are through
the one before. Ranks of a dense model are independent engines (vLLM 0.14 and newer) and have no counter.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import polars as pl

from schedtrace.model.trace import Header
from schedtrace.timeline.prefill_stalls import PrefillStalls, prefill_stalls
from schedtrace.timeline.rank import PASS, Rank, rank_of
from schedtrace.timeline.rank_loads import RankLoads, rank_loads
from schedtrace.timeline.timeline import Timeline

SCHEMA = {
    "wave": pl.Int64,
    "step_counter": pl.Int64,
    "rank": pl.Int64,
    "trial": pl.Int64,
    "step": pl.Int64,
    "start_us": pl.Int64,
    "output_us": pl.Int64,
    "requests": pl.Int64,
    "prefill_tokens": pl.Int64,
    "decode_tokens": pl.Int64,
}


class Offset(NamedTuple):
    """What to add to times of one trace to have them on the clock of another, in microseconds."""

    us: int
    uncertainty_us: int | None
    """It may be off by so much; None: not known, since a host's wall clock is not known to be right."""


def offset(of: Header, to: Header) -> Offset:
    """From the clock of the trace with header ``of`` to that of the one with header ``to``.

    Processes of one machine read one monotonic clock: exact. Otherwise by wall clocks: the uncertainties of
    both readings and, unless it is one host, what NTP leaves open on each.
    """
    if (
        of.clock_id is not None
        and of.clock_id == to.clock_id
        and of.monotonic_anchor_us is not None
        and to.monotonic_anchor_us is not None
    ):
        return Offset(of.monotonic_anchor_us - to.monotonic_anchor_us, 0)
    parts = [of.wall_uncertainty_us, to.wall_uncertainty_us]
    if of.host != to.host:
        parts += [of.wall_max_error_us, to.wall_max_error_us]
    known = [part for part in parts if part is not None]
    return Offset(of.wall_anchor_us - to.wall_anchor_us, sum(known) if len(known) == len(parts) else None)


@dataclass
class Ranks:
    """What is known of all ranks of one run together; none of their timelines is kept."""

    each: list[Rank]
    """In their order."""
    timeline: Callable[[int], Timeline]
    """The timeline of a rank, made again: for what only one rank in question has to tell."""

    @classmethod
    def of(cls, timelines: Iterable[Timeline]) -> Self:
        """Of timelines that are there anyway."""
        known = {timeline.rank: timeline for timeline in timelines}
        return cls([rank_of(timeline) for timeline in known.values()], known.__getitem__)

    @property
    def header(self) -> Header:
        """Of the first rank; settings are the same for all."""
        return self.each[0].header

    @property
    def seats(self) -> int:
        """How many requests may run at once on one rank."""
        return self.each[0].seats

    @cached_property
    def offsets_us(self) -> dict[int, int]:
        """What to add to each rank's times to have them on the clock of the first one's trace."""
        return {rank: one.us for rank, one in self._offsets.items()}

    @cached_property
    def _offsets(self) -> dict[int, Offset]:
        return {rank.number: offset(rank.header, self.header) for rank in self.each}

    @cached_property
    def hosts(self) -> int:
        """On how many the ranks ran."""
        return len({rank.header.host for rank in self.each})

    @cached_property
    def uncertainty_us(self) -> int | None:
        """How far the clocks of two ranks may be off; None: not known."""
        known = [one.uncertainty_us for one in self._offsets.values() if one.uncertainty_us is not None]
        return max(known) if len(known) == len(self._offsets) else None

    @cached_property
    def lockstep(self) -> bool:
        """Whether the ranks step together. False for one rank, and where no counter was recorded."""
        return len(self.each) > 1 and any(rank.in_lockstep for rank in self.each)

    @cached_property
    def missing(self) -> int:
        """Ranks of a lock-step run without a trace here: what they made others wait for is not known."""
        size = max(rank.header.data_parallel_size or 1 for rank in self.each)
        return max(0, size - len(self.each)) if self.lockstep else 0

    @cached_property
    def requests_us(self) -> int:
        """All requests' time on all ranks."""
        return sum(rank.requests_us for rank in self.each)

    @property
    def most_running(self) -> int:
        """Requests that ran at a time on one rank, at most."""
        return max(rank.most_running for rank in self.each)

    @cached_property
    def turns(self) -> pl.DataFrame:
        """One row per rank and pass in which it computed something; a rank without a row ran a dummy batch.

        Columns, in order of ranks and their steps: ``wave``, ``step_counter``, ``rank``, ``trial``, ``step``;
        ``start_us`` and ``output_us`` on the common clock; ``requests``; ``prefill_tokens`` (with those
        that a preemption had thrown away) and ``decode_tokens``. Empty for independent ranks.
        """
        if not self.lockstep:
            return pl.DataFrame(schema=SCHEMA)
        return pl.concat([self._turns(rank) for rank in self.each])

    def _turns(self, rank: Rank) -> pl.DataFrame:
        later = self.offsets_us[rank.number]
        return (
            rank.steps.filter(pl.col("wave").is_not_null())
            .with_columns(
                pl.col("start_us", "output_us") + later,
                rank=pl.lit(rank.number, pl.Int64),
                prefill_tokens=pl.col("used_tokens") - pl.col("decode_tokens"),
            )
            .select(*SCHEMA)
        )

    @cached_property
    def passes(self) -> pl.DataFrame:
        """One row per pass in which a rank computed something, in their order.

        Columns: ``wave``, ``step_counter``, ``trial``; ``begin_us`` and ``end_us``: from when the last rank
        was through the pass before to when the last one is through this (before the first of a wave, or
        after passes of dummy batches only: from the first start); ``length_us``; ``computing`` and
        ``prefilling``: how many ranks did; ``largest`` and ``decoding``: most requests of a rank, and most
        that may have decoded; ``requests``: of all ranks; ``most_prefill`` tokens of a rank.
        """
        of_wave = pl.col("wave")
        follows = (of_wave == of_wave.shift(1)) & (
            pl.col("step_counter") == pl.col("step_counter").shift(1) + 1
        )
        return (
            self.turns.group_by(*PASS)
            .agg(
                pl.col("trial").first(),
                first_us=pl.col("start_us").min(),
                end_us=pl.col("output_us").max(),
                computing=pl.len(),
                prefilling=(pl.col("prefill_tokens") > 0).sum(),
                largest=pl.col("requests").max(),
                decoding=pl.min_horizontal("requests", "decode_tokens").max(),
                requests=pl.col("requests").sum(),
                most_prefill=pl.col("prefill_tokens").max(),
            )
            .sort(*PASS)
            .with_columns(begin_us=pl.when(follows).then(pl.col("end_us").shift(1)).otherwise("first_us"))
            .with_columns(length_us=pl.col("end_us") - pl.col("begin_us"))
            .filter(pl.col("length_us") > 0)
            .drop("first_us")
        )

    @cached_property
    def passes_us(self) -> int:
        """The time of all passes."""
        return int(self.passes["length_us"].sum())

    @cached_property
    def waves(self) -> pl.DataFrame:
        """One row per wave and trial: ``passes`` from the first that computed to the last, ``time_us``."""
        return self.passes.group_by("wave", "trial").agg(
            passes=pl.col("step_counter").max() - pl.col("step_counter").min() + 1,
            time_us=pl.col("end_us").max() - pl.col("begin_us").min(),
        )

    @cached_property
    def lockstep_us(self) -> int:
        """The time from the first to the last computing pass of each wave and trial, added up."""
        return int(self.waves["time_us"].sum())

    @cached_property
    def dummies(self) -> pl.DataFrame:
        """One row per rank of a lock-step run: ``rank``, ``batches`` and ``time_us`` of its dummy batches.

        A pass between the first and the last in which a rank computed something (of the same wave and
        trial), and in which this one did not. So those are left out that only the end of a wave took.
        A dummy batch lasts as long as its pass.
        """
        whole, whole_us = int(self.waves["passes"].sum()), self.lockstep_us
        took = self.turns.select(*PASS, "rank").join(self.passes.select(*PASS, "length_us"), on=PASS)
        each = took.group_by("rank").agg(turns=pl.len(), own_us=pl.col("length_us").sum())
        ranks = pl.DataFrame({"rank": [rank.number for rank in self.each]}).join(
            each, on="rank", how="left", maintain_order="left"
        )
        return ranks.select(
            "rank",
            batches=whole - pl.col("turns").fill_null(0).cast(pl.Int64),
            time_us=whole_us - pl.col("own_us").fill_null(0),
        )

    @cached_property
    def prefill_stalls(self) -> PrefillStalls | None:
        """What ranks in lock-step waited for prefills of others; None: not known."""
        return None if self.missing else prefill_stalls(self.passes, self.turns)

    @cached_property
    def loads(self) -> RankLoads | None:
        """How many requests each rank had over time; None where none has a request."""
        return rank_loads(self.each, self.offsets_us)
