"""What several rules need: lists of steps and trials, and words for numbers."""

import polars as pl

from schedtrace.model.report import MAX_STEPS


def step_numbers(steps: pl.DataFrame) -> list[int]:
    """The numbers of the steps that show a finding, the first ``MAX_STEPS``."""
    return steps["step"].unique().sort().head(MAX_STEPS).to_list()


def trial_numbers(steps: pl.DataFrame) -> list[int]:
    """The trials that show a finding; empty for a trace without trials."""
    return steps["trial"].drop_nulls().unique().sort().to_list()


CRITICAL_COST_FRAC = 0.10
WARNING_COST_FRAC = 0.01
"""A tenth of the run is worth stopping for; under a hundredth is in the noise of most runs."""


def severity_of(cost_frac: float | None, *, unknown: str = "info") -> str:
    """Severity by estimated cost; ``unknown`` where there is no estimate."""
    if cost_frac is None:
        return unknown
    if cost_frac >= CRITICAL_COST_FRAC:
        return "critical"
    return "warning" if cost_frac >= WARNING_COST_FRAC else "info"


def only(values: pl.Series) -> str | None:
    """The value that all rows have; None where they differ, or have none."""
    different = values.unique().to_list()
    return different[0] if len(different) == 1 else None


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 step``, ``1,234 steps``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def share(fraction: float) -> str:
    """``44 %``; what is not quite nothing or not quite all says so."""
    if 0 < fraction < 0.005:  # noqa: PLR2004  # would be rounded to nothing
        return "under 1 %"
    if 0.995 < fraction < 1:  # noqa: PLR2004  # would be rounded to all
        return "over 99 %"
    return f"{100 * fraction:.0f} %"


def in_trials(trials: list[int], of: int) -> str:
    """`` in 7 of 8 trials``, or nothing for a trace without trials."""
    return f" in {len(trials)} of {counted(of, 'trial')}" if trials else ""


def at_step(example: dict[str, object]) -> str:
    """``step 12 of trial 3``."""
    trial = example.get("trial")
    return f"step {example['step']}" + (f" of trial {trial}" if trial is not None else "")
