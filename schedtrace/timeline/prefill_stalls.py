"""What ranks in lock-step wait for when another rank prefills.

A pass is as long as its slowest rank needs. How long it would be without a prefill is known from the passes
in which no rank prefilled: a line through their median lengths over the most requests of a rank. What a pass
with a prefill takes beyond that, every rank pays that only decodes in it.
"""

from dataclasses import dataclass

import polars as pl

from schedtrace.timeline.rank import PASS
from schedtrace.timeline.step_time import fit_line

FEWEST_PASSES = 20
"""Without prefill, to know what a pass takes."""


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
