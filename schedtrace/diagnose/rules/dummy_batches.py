"""``dummy-batches``: ranks in lock-step ran batches without a request, only because others had one."""

import msgspec
import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, finding_of, step_numbers, trial_numbers
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import RecordedRanks

FOUND_FROM_FRAC = 0.01
"""Least share of the ranks' time from which the finding is reported."""
WARNING_FRAC = 0.25


class RankDummies(msgspec.Struct, kw_only=True):
    """Dummy batches of a rank."""

    rank: int
    """Data-parallel rank."""
    batches: int
    """Number of its dummy batches."""
    steps_frac: float
    """Share of its batches, with a request or without, that were dummies."""
    time_ms: float
    """Time of its dummy batches."""
    time_frac: float
    """Share of the time of its batches."""


class DummyExample(StepExample, kw_only=True):
    """Dummy batches between two steps of a rank, with the step after them."""

    rank: int
    """Data-parallel rank."""
    batches: int
    """Number of dummy batches before the step."""


class DummyBatches(Evidence, kw_only=True):
    """Number of dummy batches, and their time."""

    batches: int
    """Number of dummy batches of all ranks."""
    steps_frac: float
    """Share of all ranks' batches, with a request or without, that were dummies."""
    time_ms: float
    """Time of the dummy batches, added up over the ranks."""
    time_frac: float
    """Share of the time of all ranks' batches."""
    ranks: list[RankDummies]
    """Figures of each rank."""
    examples: list[DummyExample]
    """Longest gaps between two steps of a rank; the step is the one after the gap."""


def _find(ranks: RecordedRanks) -> Findings:
    if not ranks.lockstep or ranks.passes.is_empty():
        return
    turns = dict(ranks.turns.group_by("rank").len().iter_rows())
    whole_us = ranks.lockstep_us
    each = [
        RankDummies(
            rank=rank,
            batches=batches,
            steps_frac=batches / (batches + turns.get(rank, 0)),
            time_ms=time_us / 1e3,
            time_frac=time_us / whole_us,
        )
        for rank, batches, time_us in ranks.dummies.select("rank", "batches", "time_us").iter_rows()
    ]
    batches, time_ms = sum(figures.batches for figures in each), sum(figures.time_ms for figures in each)
    frac = 1e3 * time_ms / (whole_us * len(each))
    if not batches or frac < FOUND_FROM_FRAC:
        return
    gaps = _gaps(ranks)
    most = max(each, key=lambda figures: figures.time_ms)
    evidence = DummyBatches(
        batches=batches,
        steps_frac=batches / (batches + sum(turns.values())),
        time_ms=time_ms,
        time_frac=frac,
        ranks=each,
        examples=DummyExample.largest(gaps, "batches"),
    )
    yield finding_of(
        evidence,
        engine_rank=most.rank,
        steps=step_numbers(gaps.filter(pl.col("rank") == most.rank)),
        severity="warning" if frac >= WARNING_FRAC else "info",
        engine_ranks=[figures.rank for figures in each if figures.batches],
        count=batches,
        trials=trial_numbers(ranks.turns),
        message="{steps_frac:%} of the ranks' batches held no request and ran only because other ranks "
        "had some: {batches:n dummy batch/dummy batches}, {time_frac:%} of the ranks' time. Rank "
        "{rank:n} ran most of them: {own:n}, {own_frac:%} of its time.",
        values={"rank": most.rank, "own": most.batches, "own_frac": most.time_frac},
        example="Before {at} rank {rank:n} ran {batches:n dummy batch/dummy batches} in a row.",
    )


def _gaps(ranks: RecordedRanks) -> pl.DataFrame:
    """Return dummy batches between two turns of a rank, with the step after them."""
    between = pl.col("step_counter").diff().over("rank", "wave", "trial") - 1
    return (
        ranks.turns.select("rank", "wave", "step_counter", "trial", "step")
        .sort("rank", "wave", "step_counter")
        .with_columns(batches=between)
        .filter(pl.col("batches") > 0)
    )


RULE = Rule(
    code="dummy-batches",
    summary="ranks in lock-step ran batches without a request, only to keep others company",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=_find,
    symptom_of=("rank-imbalance",),
)
