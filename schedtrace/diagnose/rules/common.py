"""What several rules need: where a finding shows, what it cost, and parts of sentences."""

from dataclasses import dataclass
from typing import Self

import msgspec
import polars as pl

from schedtrace.model.message import NOTHING, Count, Message, Number, Steps, joined, message
from schedtrace.model.report import MAX_STEPS
from schedtrace.timeline.timeline import Timeline

CRITICAL_COST_FRAC = 0.10
WARNING_COST_FRAC = 0.01
"""A tenth of the run is worth stopping for; under a hundredth is in the noise of most runs."""


class StepExample(msgspec.Struct, kw_only=True):
    """One case of a finding, at one step."""

    step: int
    trial: int | None

    @property
    def at(self) -> Steps:
        """The step as an argument of a message."""
        return Steps(self.step, self.step, self.trial)

    @classmethod
    def first(cls, rows: pl.DataFrame, most: int = 3) -> list[Self]:
        """The first rows as examples; columns are named as the fields."""
        return [cls(**row) for row in rows.head(most).select(cls.__struct_fields__).to_dicts()]


@dataclass(frozen=True)
class Cost:
    """Time that a finding cost, by the step-time model."""

    ms: float | None = None
    """None: there is no model, or it does not resolve so little."""
    frac: float | None = None
    """``ms`` as a share of the run."""
    error_frac: float | None = None
    """Typical relative error of the model."""
    unresolved: bool = False
    """There is an estimate, but it is smaller than the model's error and under 1 % of the run."""

    def severity(self, *, unknown: str) -> str:
        """Severity by cost; ``unknown`` where there is no estimate."""
        return "info" if self.unresolved else severity_of(self.frac, unknown=unknown)


def model_cost(timeline: Timeline, cost_us: float | None) -> Cost:
    """An estimate that rests on the step-time model, unless the model does not resolve it."""
    model, duration_us = timeline.step_time, timeline.busy_us
    if model is None or cost_us is None or not duration_us:
        return Cost()
    frac = cost_us / duration_us
    if frac < WARNING_COST_FRAC and model.error_frac > frac:
        return Cost(unresolved=True)
    return Cost(cost_us / 1e3, frac, model.error_frac)


def prefill_cost(timeline: Timeline, tokens: int) -> Cost:
    """What so many prefill tokens cost; unknown where no step shows what one takes."""
    model = timeline.step_time
    if not tokens or model is None or not model.per_prefill_token_us:
        return Cost()
    return model_cost(timeline, tokens * model.per_prefill_token_us)


def severity_of(cost_frac: float | None, *, unknown: str = "info") -> str:
    """Severity by cost; ``unknown`` where there is no estimate."""
    if cost_frac is None:
        return unknown
    if cost_frac >= CRITICAL_COST_FRAC:
        return "critical"
    return "warning" if cost_frac >= WARNING_COST_FRAC else "info"


def step_numbers(steps: pl.DataFrame) -> list[int]:
    """The numbers of the steps that show a finding, the first ``MAX_STEPS``."""
    return steps["step"].unique().sort().head(MAX_STEPS).to_list()


def trial_numbers(steps: pl.DataFrame) -> list[int]:
    """The trials that show a finding; empty for a trace without trials."""
    return steps["trial"].drop_nulls().unique().sort().to_list()


def only(values: pl.Series) -> str | None:
    """The value that all rows have; None where they differ, or have none."""
    different = values.unique().to_list()
    return different[0] if len(different) == 1 else None


def in_trials(timeline: Timeline, trials: list[int]) -> Message:
    """`` in 7 of 8 trials``, or nothing for a trace without trials."""
    if not trials:
        return NOTHING
    of = Count(len(timeline.trials()), "trial")
    return message(" in {trials} of {of}", trials=Number(len(trials)), of=of)


def listed(parts: list[Message], last: str = "and") -> Message:
    """``a, b and c``; parts that say nothing are left out."""
    said = [part for part in parts if part]
    return joined([joined(said[:-1], ", "), *said[-1:]], f" {last} ")
