"""``balance-candidate``: what it could save at most that ranks in lock-step prefill at the same time."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, finding_of, step_numbers, trial_numbers
from schedtrace.diagnose.rules.prefill_stall import FOUND_FROM_FRAC, RESOLVED
from schedtrace.diagnose.uneven_ranks import has_balance_scheduler, prefill_interval
from schedtrace.model.report import Evidence
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import PASS, RecordedRanks

WARNING_FRAC = 0.05
"""Largest possible saving, as a share of all passes' time, from which the finding is a warning."""


class AlonePrefill(StepExample, kw_only=True):
    """A common step in which a single rank prefilled, with that rank's step."""

    rank: int
    """Rank that prefilled."""
    prefill_tokens: int
    """Tokens that it prefilled."""
    excess_us: int
    """Time that the common step took longer than common steps without prefill."""


class BalanceCandidate(Evidence, kw_only=True):
    """The bound, and what it is made of."""

    prefill_passes: int
    """Number of common steps in which a rank prefilled."""
    alone_passes: int
    """Number of common steps in which exactly one rank prefilled."""
    prefill_ms: float
    """Time that common steps with a prefill took longer than those without."""
    aligned_ms: float
    """The same if every rank prefilled the same chunks at the same time: at least what those of the rank
    with most of it took."""
    saved_ms: float
    """Difference of the two, which is the most that can be saved."""
    most_gain_frac: float
    """Rise of throughput, at most."""
    most_running: int
    """Most requests that ran at a time on one rank."""
    seats: int
    """``max_num_seqs``. Balance scheduling closes its gate only if a rank has ``seats - 1`` requests
    running."""
    examples: list[AlonePrefill]
    """Longest such steps."""


def _find(ranks: RecordedRanks) -> Findings:
    stalls, header = ranks.prefill_stalls, ranks.header
    if stalls is None or has_balance_scheduler(header) or (prefill_interval(header) or 1) > 1:
        return
    saved_us, prefill_us = stalls.saved_us(), float(stalls.passes["excess_us"].sum())
    frac = saved_us / ranks.passes_us
    noise_us = stalls.noise_us * stalls.passes.height**0.5
    alone = stalls.passes.filter(pl.col("prefilling") == 1)
    if frac < FOUND_FROM_FRAC or saved_us < RESOLVED * noise_us or alone.is_empty():
        return
    turns = stalls.own.join(alone.select(PASS), on=PASS, how="semi", maintain_order="left")
    longest = turns.sort("excess_us", "step", descending=[True, False])
    evidence = BalanceCandidate(
        prefill_passes=stalls.passes.height,
        alone_passes=alone.height,
        prefill_ms=prefill_us / 1e3,
        aligned_ms=(prefill_us - saved_us) / 1e3,
        saved_ms=saved_us / 1e3,
        most_gain_frac=ranks.passes_us / (ranks.passes_us - saved_us) - 1,
        most_running=ranks.most_running,
        seats=ranks.seats_per_rank,
        examples=AlonePrefill.first(longest.with_columns(pl.col("excess_us").round().cast(pl.Int64))),
    )
    first = evidence.examples[0]
    yield finding_of(
        evidence,
        engine_rank=first.rank,
        count=alone.height,
        trials=trial_numbers(alone),
        severity="warning" if frac >= WARNING_FRAC else "info",
        engine_ranks=sorted(turns["rank"].unique().to_list()),
        steps=step_numbers(turns.filter(pl.col("rank") == first.rank)),
        tokens=int(turns["prefill_tokens"].sum()),
        message="In {alone_passes:n} of {prefill_passes:n common step} with a prefill one rank alone "
        "prefilled. If all ranks prefilled at the same time, the same chunks would take at most "
        "{saved_ms:ms} ({frac:%} of the busy time) less: at most {most_gain_frac:%} more throughput. "
        "Requests would wait longer for their first token.",
        values={"frac": frac},
        example="{at} of rank {rank:n} prefilled {prefill_tokens:n token} alone, for which the common "
        "step took {excess_us:us} longer.",
    )


RULE = Rule(
    code="balance-candidate",
    summary="ranks in lock-step prefill in different steps; what it could save at most to align them",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=_find,
    symptom_of=("prefill-stall",),
)
