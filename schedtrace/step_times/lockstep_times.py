"""Of ranks in lock-step: whose batch a pass waited for, and what it takes them to agree."""

from collections.abc import Sequence

import polars as pl

from schedtrace.read.trace import Trace
from schedtrace.step_times.fitting import Source, fit_rows

ROUNDS = 4
"""Of choosing the slowest rank by a fit, and fitting to those chosen."""


def of_slowest(rows: pl.DataFrame, source: Source) -> pl.DataFrame:
    """The rows of all ranks, with ``device_us`` of each pass's slowest rank only; null for the others.

    A pass takes as long as its slowest rank, so the time that the others see belongs to a batch of which
    their own rows know nothing. Which rank that was follows from the fit, and the fit from that: they are
    found in turns, beginning with the rank that has most tokens. Ranks of one trial become one part: whoever
    draws neighbouring steps draws whole passes.

    Args:
        rows: Of ``observed``, of all ranks of one run.
        source: Of the rows.

    Raises:
        InputError: too few steps have an output and requests that are known.
    """
    passes = ("trial", "wave", "step_counter")
    rows = rows.sort(passes, maintain_order=True).with_columns(
        part=pl.col("trial").rank("dense").fill_null(1) - 1
    )
    took = pl.col("device_us")
    work = pl.col("prefill_tokens") + pl.col("decode_tokens")
    slowest = _slowest(rows, work)
    chosen = rows.with_columns(device_us=pl.when(slowest).then(took))
    for _ in range(ROUNDS):
        fitted = fit_rows(chosen, source).device.expr()
        tokens = rows.with_columns(batch_tokens=work)
        again = _slowest(tokens, fitted)
        following = rows.with_columns(device_us=pl.when(again).then(took))
        if following.equals(chosen):
            break
        chosen = following
    return chosen


def gathering_us(traces: Sequence[Trace]) -> float | None:
    """What it would add to each loop of recorded ranks to gather a number of each (``schedtrace.balance``).

    The recorded ranks agree in all-reduces of the same kind, on the same threads and hosts. Of each, the rank
    that came last waited for nobody: the median over all-reduces of what it took that rank.

    Returns:
        Microseconds; 0.0 where the recorded ranks did gather, so that the gaps between their steps have it;
        None where no all-reduce of several ranks is recorded.
    """
    if traces[0].header.scheduler_class.startswith("schedtrace.balance."):
        return 0.0
    met = pl.concat(trace.syncs for trace in traces).group_by("wave", "step_counter").agg(
        pl.len(), pl.col("took_us").min()
    )  # fmt: skip
    whole = met.filter((pl.col("len") == len(traces)) & (pl.col("len") > 1))
    return None if whole.is_empty() else float(whole.select(pl.col("took_us").median()).item())


def _slowest(rows: pl.DataFrame, cost: pl.Expr) -> pl.Series:
    """Whether a row's cost is the largest of its pass; of equal ones the first."""
    named = ("trial", "wave", "step_counter")
    costs = rows.with_columns(cost=cost.fill_null(-1.0)).with_row_index("row")
    best = (
        costs.filter(pl.col("total_requests") > 0)
        .sort("cost", descending=True, maintain_order=True)
        .group_by(named, maintain_order=True)
        .first()
    )
    return costs["row"].is_in(best["row"].implode())
