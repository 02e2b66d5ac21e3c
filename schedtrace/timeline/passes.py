"""Common passes of ranks in lock-step: their lengths, and what one rank's prefill costs the others.

A pass lasts as long as its slowest rank needs. Its length without a prefill is estimated from the passes in
which no rank prefilled: a straight line is fitted to their median lengths against the number of requests on
the fullest rank. Every rank that only decodes in a pass with a prefill loses the additional time.
"""

from dataclasses import dataclass

import polars as pl

from schedtrace.timeline.step_time import fit_line

PASS = ("wave", "step_counter")
"""Columns of a step that identify the pass of ranks in lock-step to which it belongs."""
FEWEST_PASSES = 20
"""Minimum number of passes without prefill from which the length of a pass is estimated."""


@dataclass(frozen=True)
class PassTime:
    """Length of a pass without prefill."""

    base_us: float
    per_request_us: float

    def predicted_us(self, requests: pl.Expr) -> pl.Expr:
        """Return the predicted length of a pass in microseconds, given the fullest rank's request count."""
        return self.base_us + self.per_request_us * requests


def pass_time(passes: pl.DataFrame) -> PassTime | None:
    """Fit the length of passes without prefill (``RecordedRanks.passes``); None if there are too few."""
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
    """Passes with a prefill on any rank, and their cost to the other ranks."""

    passes: pl.DataFrame
    """Passes with a prefill, with ``excess_us``: their time beyond that of a pass without a prefill. Each
    individual excess contains noise, so only sums are meaningful."""
    stalled: pl.DataFrame
    """Turns of ranks that only decoded in such a pass, with the pass's ``excess_us``, in order of passes."""
    own: pl.DataFrame
    """Turns of ranks that prefilled in such a pass, with ``own_us``, the time of their own prefill: the
    excess times the ratio of their tokens to the most that a rank prefilled."""
    noise_us: float
    """Standard deviation of the lengths of passes without prefill around the model."""

    @property
    def stalling(self) -> pl.DataFrame:
        """Passes in which at least one rank only decoded."""
        return self.passes.join(
            self.stalled.select(PASS).unique(), on=PASS, how="semi", maintain_order="left"
        )

    def stalled_steps(self) -> dict[int, frozenset[int]]:
        """Return the steps that waited for another rank's prefill, by rank."""
        each = self.stalled.group_by("rank").agg("step")
        return {rank: frozenset(steps) for rank, steps in each.iter_rows()}

    def saved_us(self) -> float:
        """Return the most time, in microseconds, that simultaneous prefills of the ranks would save.

        With simultaneous prefills, the additional time of the passes would be at least that of the rank with
        the most prefill time.
        """
        each = self.own.group_by("rank").agg(pl.col("own_us").sum())["own_us"]
        longest = max(each.to_list(), default=0.0)
        return max(0.0, float(self.passes["excess_us"].sum()) - longest)


def measure_prefill_stalls(passes: pl.DataFrame, turns: pl.DataFrame) -> PrefillStalls | None:
    """Return the cost of prefills to other ranks; None if there are too few passes without a prefill."""
    model = pass_time(passes)
    if model is None:
        return None
    off = pl.col("length_us") - model.predicted_us(pl.col("largest"))
    noise = passes.filter(pl.col("prefilling") == 0).select(off.std()).item()
    excess = pl.col("length_us") - model.predicted_us(pl.col("decoding"))
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
