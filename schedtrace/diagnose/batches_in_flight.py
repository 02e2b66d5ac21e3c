"""Batches that wait for each other: those that a pipeline has in flight, and those of ranks in lock-step.

A pipeline's batches are scheduled in turn, each again when its output is back. With ``depth`` batches in
flight, a request is in every ``depth``-th step until it ends: the step's number modulo ``depth`` identifies
the batch. ``tests/contract/facts/test_pipeline.py`` checks this with vLLM's scheduler. Ranks in lock-step
wait for the rank with the most requests, or with the most context, which sets the pace of all ranks.
"""

from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from schedtrace.diagnose.excess_work import fit_lad
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.step_time import fit_line
from schedtrace.timeline.timeline import Timeline

FEWEST_CYCLES = 20
"""Minimum number of cycles that show how the length of a cycle depends on its largest batch."""
UNEVEN_FRAC = 0.25
"""Minimum ``1 - mean / max`` of the ranks' mean loads, or of their contexts, for these to count as uneven."""
FEWEST_PASSES = 40
"""Minimum number of common steps without prefill that show the cost of context."""
EXPLAINED_FRAC = 0.7
"""Maximum share of the errors of a model without context that may remain in the model with context."""
LEAST_CONTEXT_FRAC = 0.05
"""Minimum share of the requests' time that even contexts would save."""
NAMED = 10
"""Maximum number of a batch's requests that are named."""


class Cohort(NamedTuple):
    """Batch in flight, followed over the whole run."""

    mean_requests: float
    """Mean number of requests in uneven cycles."""
    request_ids: list[str]
    """First ten requests of the batch, in order; empty if over a tenth of the requests change their batch."""
    requests: int
    """Number of requests that were ever in the batch; 0 if requests change their batch."""


def cycles(timeline: Timeline, depth: int) -> pl.DataFrame:
    """Return groups of ``depth`` consecutive steps without prefill, with at least ``depth`` requests.

    Columns: ``step`` (the first), ``trial``, ``sizes`` (requests of each step), ``requests`` (their sum),
    ``largest`` (of the sizes), ``best`` (the largest if the sizes were even) and ``cycle_us`` (from the
    output before the cycle to its last output).
    """
    back = pl.col("output_us")
    return (
        timeline.steps.with_columns(before_us=back.shift(1).over("trial"))
        .with_columns(cycle=pl.col("step") // depth)
        .group_by("trial", "cycle", maintain_order=True)
        .agg(
            pl.col("step").first(),
            sizes=pl.col("total_requests"),
            requests=pl.col("total_requests").sum(),
            largest=pl.col("total_requests").max(),
            prefill=pl.col("prefill_tokens").sum() + pl.col("recomputed_tokens").fill_null(0).sum(),
            cycle_us=back.last() - pl.col("before_us").first(),
        )
        .filter(
            (pl.col("sizes").list.len() == depth)
            & (pl.col("prefill") == 0)
            & (pl.col("requests") >= depth)
            & (pl.col("cycle_us") > 0)
        )
        .with_columns(best=-(-pl.col("requests") // depth))
        .drop("cycle", "prefill")
    )


def executed_batches(timeline: Timeline) -> pl.DataFrame:
    """Return the steps that scheduled something and whose execution is recorded, in order.

    Columns: ``step``, ``trial``, ``start_us``, ``total_requests``, ``num_running_after``, ``execute_us`` and
    ``in_flight``: batches whose execution had not ended when this one was scheduled, including this one.
    """
    ended = pl.col("start_us") + pl.col("execute_after_us") + pl.col("execute_us")
    steps = (
        timeline.steps.filter((pl.col("total_requests") > 0) & pl.col("execute_us").is_not_null())
        .with_columns(scheduled_us=pl.col("start_us") + pl.col("schedule_us"), ended_us=ended.cum_max())
        .with_row_index("at")
    )
    over = steps["ended_us"].search_sorted(steps["scheduled_us"], side="right").cast(pl.Int64)
    return steps.select(
        *("step", "trial", "start_us", "total_requests", "num_running_after", "execute_us"),
        in_flight=(pl.col("at").cast(pl.Int64) - over).clip(0) + 1,
    )


def even_cycle_frac(every: pl.DataFrame, uneven: pl.DataFrame) -> float | None:
    """Estimate how long uneven cycles would take with even batches, as a share of their actual time.

    A stage takes longer for a larger batch, and a batch comes back only after all stages, so a cycle takes as
    long as its largest batch. A straight line fitted to cycle length against the size of the largest batch
    shows how long a cycle with a smaller batch takes. None if there are too few cycles, or too few sizes.
    """
    if every.height < FEWEST_CYCLES or every["largest"].n_unique() < 2:  # noqa: PLR2004  # a line
        return None
    lengths = every.group_by("largest").agg(pl.col("cycle_us").median(), weight=pl.len().sqrt())
    base, slope = fit_line(lengths["largest"], lengths["cycle_us"], lengths["weight"])
    now = float((base + slope * uneven["largest"]).sum())
    even = float((base + slope * uneven["best"]).sum())
    if slope <= 0 or min(now, even) <= 0:
        return None
    # Twice as small a batch takes at best half the time.
    return max(even / now, int(uneven["best"].sum()) / int(uneven["largest"].sum()))


def cohorts(timeline: Timeline, uneven: pl.DataFrame, depth: int) -> list[Cohort]:
    """Return the batches in flight in these cycles, with request names only if requests keep their batch."""
    members = (
        timeline.stretches.group_by("request_id", maintain_order=True)
        .agg(
            (pl.col("step") % depth).first().alias("cohort"),
            stays=((pl.col("step") % depth).n_unique() == 1) & (pl.col("step") == pl.col("last_step")).all(),
        )
        .collect()
    )
    stay = bool(members.height and members["stays"].sum() / members.height >= 0.9)  # noqa: PLR2004  # nearly all
    rows = []
    for number in range(depth):
        mean = uneven.select(pl.col("sizes").list.get(number).mean()).item()
        names = (
            members.filter(pl.col("cohort") == number)["request_id"]
            if stay
            else pl.Series([], dtype=pl.String)
        )
        rows.append(Cohort(float(mean), names.head(NAMED).to_list(), names.len()))
    return rows


class UnevenContext(msgspec.Struct, kw_only=True):
    """Uneven context of the ranks' requests; the rank with the most context sets the pace of common steps."""

    requests_frac: float
    """Share of the requests' time that even contexts would save."""
    mean_tokens: float
    """Mean number of context tokens on the rank with the most, over common steps without prefill."""
    mean_others: float
    """Mean number of context tokens on each of the remaining ranks."""
    request_id: str
    """Request with the longest prompt on the rank with the most context tokens in total."""
    prompt_tokens: int
    """Length of the prompt of ``request_id``."""


def uneven_context(ranks: RecordedRanks) -> tuple[int, UnevenContext] | None:
    """Return the rank with the most context tokens in total, and the cost of uneven contexts in common steps.

    The lengths of common steps without prefill are fitted to the largest number of requests and of context
    tokens on a rank. None if ranks do not run in lock-step, or contexts are even, cost little, or do not
    explain the lengths.
    """
    if not ranks.lockstep or ranks.missing_ranks:
        return None
    plain = ranks.passes.filter(pl.col("prefilling") == 0).drop_nulls(("most_context", "context_tokens"))
    size, most = len(ranks.each), plain["most_context"].to_numpy().astype(float)
    if plain.height < FEWEST_PASSES or not most.max(initial=0.0):
        return None
    even = plain["context_tokens"].to_numpy() / size
    if 1 - even.sum() / most.sum() < UNEVEN_FRAC:
        return None
    length, largest = (plain[name].to_numpy().astype(float) for name in ("length_us", "largest"))
    plainly = np.column_stack([np.ones(len(length)), largest / largest.max()])
    with_context = np.column_stack([plainly, most / most.max()])
    errors = [
        np.abs(length - columns @ fit_lad(columns, length)).sum() for columns in (plainly, with_context)
    ]
    slope_us = float(fit_lad(with_context, length)[-1]) / float(most.max())
    saved_us = np.minimum(slope_us * (most - even), length)
    felt_frac = float((saved_us * plain["requests"].to_numpy()).sum()) / ranks.total_requests_us
    if errors[1] > EXPLAINED_FRAC * errors[0] or felt_frac < LEAST_CONTEXT_FRAC:
        return None
    rank = int(
        ranks.turns.group_by("rank")
        .agg(pl.col("context_tokens").sum())
        .sort("context_tokens", "rank")["rank"][-1]
    )
    longest = (
        ranks.timeline(rank).known_requests.drop_nulls("prompt_tokens").sort("prompt_tokens", "request_id")
    )
    return rank, UnevenContext(
        requests_frac=min(1.0, felt_frac),
        mean_tokens=float(most.mean()),
        mean_others=float((plain["context_tokens"].to_numpy() - most).mean()) / max(1, size - 1),
        request_id=str(longest["request_id"][-1]),
        prompt_tokens=int(longest["prompt_tokens"][-1]),
    )
