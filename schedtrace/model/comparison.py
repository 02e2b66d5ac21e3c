"""What ``diff`` finds out about two runs; ``docs/report-format.md`` describes its JSON form."""

from typing import Any

import msgspec

COMPARISON_SCHEMA_VERSION = 1


class ConfigChange(msgspec.Struct, kw_only=True):
    """One setting that differs."""

    name: str
    base: Any
    new: Any
    given: bool
    """Whether a person gave it on either side, or vLLM resolved it differently."""


class Sample(msgspec.Struct, kw_only=True):
    """One metric over the trials of one run."""

    count: int
    mean: float
    min: float
    max: float

    def same_figures(self, other: "Sample") -> bool:
        """Whether the figures are alike, whatever the number of trials."""
        return (self.mean, self.min, self.max) == (other.mean, other.min, other.max)


class MetricChange(msgspec.Struct, kw_only=True):
    """One metric on both sides."""

    name: str
    unit: str
    higher_is_better: bool | None
    """None: a shape, neither good nor bad by itself."""
    base: Sample
    new: Sample
    change_frac: float | None
    """``new / base - 1`` of the means; None where the base is 0."""
    beyond_spread: bool | None
    """Whether no trial of one side lies within the range of the other; None with one trial on a side."""


class FindingChange(msgspec.Struct, kw_only=True):
    """One kind of finding (code and cause) on both sides."""

    code: str
    cause: str | None
    state: str
    """``appeared``, ``went``, ``stayed``."""
    base_count: int
    new_count: int
    base_trials: list[int]
    new_trials: list[int]
    message: str
    """Of the new run's finding, or of the base's if it went."""


class CauseChange(msgspec.Struct, kw_only=True):
    """How often one kind of refusal happened in two runs."""

    loop: str
    cause: str
    detail: str | None
    base_exits: int
    new_exits: int
    base_steps_frac: float
    """Share of the steps that show it."""
    new_steps_frac: float


class Comparison(msgspec.Struct, kw_only=True):
    """The answer of ``schedtrace diff``."""

    schema_version: int = COMPARISON_SCHEMA_VERSION
    verdict: str
    base_path: str
    new_path: str
    base_label: str
    new_label: str
    notes: list[str]
    """What to keep in mind: problems of the traces, trials on one side only."""
    config: list[ConfigChange]
    metrics: list[MetricChange]
    causes: list[CauseChange]
    """Every kind of refusal of either run, the largest change first."""
    findings: list[FindingChange]
