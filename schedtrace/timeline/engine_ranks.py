"""The ranks of one data-parallel run on one clock, and the passes that ranks in lock-step make together.

Ranks of a mixture-of-experts model run in lock-step: each makes one forward pass for every value of a common
step counter, a dummy batch where it has nothing to compute, and no rank begins a pass before all are through
the one before. Ranks of a dense model are independent engines (vLLM 0.14 and newer) and have no counter.

A pass is as long as its slowest rank needs. How long it would be without a prefill is known from the passes
in which no rank prefilled: a line through their median lengths over the most requests of a rank. What a pass
with a prefill takes beyond that, every rank pays that only decodes in it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import polars as pl

from schedtrace.model.trace import Header
from schedtrace.timeline.rank import PASS, Rank, RankLoads, rank_loads, rank_of
from schedtrace.timeline.step_time import fit_line
from schedtrace.timeline.timeline import Timeline

FEWEST_PASSES = 20
"""Without prefill, to know what a pass takes."""

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


@dataclass(frozen=True)
class PassTime:
    """How long a pass without prefill takes."""

    base_us: float
    per_request_us: float

    def expected_us(self, requests: pl.Expr) -> pl.Expr:
        """For so many requests on the rank with most of them."""
        return self.base_us + self.per_request_us * requests


def pass_time(passes: pl.DataFrame) -> PassTime | None:
    """Fitted to passes without prefill (``Ranks.passes``); None: there are too few."""
    plain = passes.filter(pl.col("prefilling") == 0)
    if plain.height < FEWEST_PASSES:
        return None
    lengths = (
        plain.group_by("largest").agg(pl.col("length_us").median(), weight=pl.len().sqrt()).sort("largest")
    )
    if lengths.height > 1:
        base, slope = fit_line(lengths["largest"], lengths["length_us"], lengths["weight"])
        if slope > 0 and base + slope > 0:
            return PassTime(base, slope)
    return PassTime(float(plain.select(pl.col("length_us").median()).item()), 0.0)


@dataclass(frozen=True)
class PrefillStalls:
    """Passes with a prefill on any rank, and what they cost the others."""

    passes: pl.DataFrame
    """``Ranks.passes`` with a prefill, and ``excess_us``: what they took beyond a pass without one. Noise
    makes an excess too large or too small, so only sums of it say something."""
    stalled: pl.DataFrame
    """``Ranks.turns`` of ranks that only decoded in such a pass, with its ``excess_us``, by passes."""
    own: pl.DataFrame
    """``Ranks.turns`` of ranks that prefilled in it, with ``own_us``, what their prefill takes alone: of the
    excess the share that their tokens are of the most that a rank prefilled."""
    noise_us: float
    """Standard deviation of passes without prefill around the model."""

    @property
    def stalling(self) -> pl.DataFrame:
        """The passes in which a rank only decoded."""
        return self.passes.join(
            self.stalled.select(PASS).unique(), on=PASS, how="semi", maintain_order="left"
        )

    def steps(self) -> dict[int, frozenset[int]]:
        """Rank to its steps that waited."""
        each = self.stalled.group_by("rank").agg("step")
        return {rank: frozenset(steps) for rank, steps in each.iter_rows()}

    def saved_us(self) -> float:
        """At most saved if the ranks prefilled the same chunks at the same time.

        The passes then would take at least as long as the prefills of the rank that has most of them.
        """
        each = self.own.group_by("rank").agg(pl.col("own_us").sum())["own_us"]
        longest = max(each.to_list(), default=0.0)
        return max(0.0, float(self.passes["excess_us"].sum()) - longest)


def prefill_stalls(passes: pl.DataFrame, turns: pl.DataFrame) -> PrefillStalls | None:
    """Of ``Ranks.passes`` and ``Ranks.turns``; None where too few passes show what one takes."""
    model = pass_time(passes)
    if model is None:
        return None
    off = pl.col("length_us") - model.expected_us(pl.col("largest"))
    noise = passes.filter(pl.col("prefilling") == 0).select(off.std()).item()
    excess = pl.col("length_us") - model.expected_us(pl.col("decoding"))
    prefills = passes.filter(pl.col("prefilling") > 0).with_columns(excess_us=excess)
    turns = turns.join(
        prefills.select(*PASS, "excess_us", "most_prefill"), on=PASS, maintain_order="left"
    ).sort(*PASS, "rank")
    own = pl.col("excess_us") * pl.col("prefill_tokens") / pl.col("most_prefill")
    return PrefillStalls(
        passes=prefills,
        stalled=turns.filter(pl.col("prefill_tokens") == 0),
        own=turns.filter(pl.col("prefill_tokens") > 0).with_columns(own_us=own),
        noise_us=float(noise or 0.0),
    )


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
