"""Result of ``diff`` for two runs; ``docs/report-format.md`` describes its JSON form."""

from enum import StrEnum
from typing import Any, Literal

import msgspec

from schedtrace.model.message import NOTHING, Message

COMPARISON_SCHEMA_VERSION = 4


class ConfigChange(msgspec.Struct, kw_only=True):
    """Setting that differs between the two runs."""

    name: str
    base: Any
    new: Any
    given: bool
    """Whether a user set the value on either side; otherwise vLLM resolved it differently."""
    base_origin: Message = NOTHING
    """Origin of the base's value: ``given``, ``default for LLM_CLASS``, ``derived``, ...; empty: unknown, or
    a setting that does not affect scheduling."""
    new_origin: Message = NOTHING


class Sample(msgspec.Struct, kw_only=True):
    """Values of a metric over the trials of a run."""

    values: list[float]
    """Values by trial, in order."""
    count: int
    effective_count: float
    """Number of independent trials that would carry as much information; lower than ``count`` if slow phases
    of the machine affected consecutive trials."""
    mean: float
    min: float
    max: float

    def same_figures(self, sample: "Sample") -> bool:
        """Return whether the figures are the same, whatever the number of trials."""
        return (self.mean, self.min, self.max) == (sample.mean, sample.min, sample.max)


class Outcome(StrEnum):
    """Result for a metric, in one word."""

    SAME = "same"
    """The figures are the same on both sides."""
    BETTER = "better"
    """Significant after correction, and an improvement."""
    WORSE = "worse"
    DIFFERS = "differs"
    """Significant after correction, but neither direction is better, or ranks and means disagree."""
    EXACT = "differs exactly"
    """The same value in every base trial and another value in every new trial, so no test is needed."""
    NONE_FOUND = "no difference found"
    TOO_FEW = "too few trials to tell"
    """Too few trials for any outcome to be significant."""
    ONE_EACH = "one against one"
    """Two servers, compared without an estimate of the metric's own variation."""


class MetricChange(msgspec.Struct, kw_only=True):
    """Values of one metric on both sides, and the result of comparing them."""

    name: str
    unit: str
    higher_is_better: bool | None
    """Direction of improvement; None if neither direction is better."""
    base: Sample
    new: Sample
    change_frac: float | None
    """``new / base - 1`` of the means; None where the base is 0."""
    beyond_spread: bool | None
    """Whether no trial of one side lies within the range of the other side; None if a side has a single
    trial."""
    outcome: Outcome
    """Result in one word; see ``Outcome``."""
    significant: bool | None
    """Whether the sides differ by more than chance explains; None if there are too few trials to show any
    difference."""
    p: float | None
    """P-value of the two-sided Mann-Whitney U test or, for servers, of Student's t in a block bootstrap; None
    if not tested."""
    p_corrected: float | None
    """``p`` after Holm's correction for all ``tests``; 0.05 or less is significant."""
    effect: float | None
    """Cliff's delta, -1 to 1: the share of pairs of trials in which the new value is higher, minus the share
    in which it is lower."""
    ci_low_frac: float | None
    """Lower end of the 95 % bootstrap interval of ``change_frac``; None if it cannot be computed."""
    ci_high_frac: float | None
    """Upper end of the interval of ``ci_low_frac``; None if it cannot be computed."""
    noise_floor_frac: float | None
    """Smallest change that would be significant in 4 of 5 cases, with this number of trials and their spread.
    """
    trials_needed: int | None
    """Number of trials per side that would give a noise floor of 5 %; None if the spread is unknown."""

    @property
    def worsened(self) -> bool:
        """Whether the sides differ by more than chance explains, and the new side is worse."""
        if self.outcome is Outcome.EXACT and self.higher_is_better is not None:
            return (self.new.mean < self.base.mean) == self.higher_is_better
        return self.outcome is Outcome.WORSE


class FindingChange(msgspec.Struct, kw_only=True):
    """Kind of finding (code and cause) on both sides of the comparison."""

    code: str
    cause: str | None
    state: str
    """``appeared``, ``went``, ``stayed``. A finding with a threshold also stayed if its share crossed
    ``threshold_frac`` by less than a factor of two.
    """
    base_count: int
    new_count: int
    base_trials: list[int]
    new_trials: list[int]
    base_frac: float | None = None
    """Share that is compared with the threshold; the largest, if the base has several such findings; None
    without one, or if its finding does not depend on a share."""
    new_frac: float | None = None
    threshold_frac: float | None = None
    """Threshold for ``base_frac`` and ``new_frac``."""
    message: str | Message
    """Sentence of the finding in the new run or, if that run has none, in the base."""


class CauseChange(msgspec.Struct, kw_only=True):
    """Frequency of one kind of refusal in both runs."""

    loop: str
    cause: str
    detail: str | None
    base_exits: int
    new_exits: int
    base_steps_frac: float
    """Share of the base's steps with this refusal."""
    new_steps_frac: float


class DecidedStep(msgspec.Struct, kw_only=True):
    """Step of one side: its decision, and the state on which it is based."""

    step: int
    """Number of the step in the trace."""
    requests: int
    """Number of scheduled requests."""
    tokens: int
    first_different: str | None
    """First request, in the order of scheduling, that the other side scheduled differently: its number and
    its tokens.
    """
    preempted: list[int | None]
    """Numbers of the preempted requests."""
    causes: list[str]
    """Reasons why the step ended: ``loop: cause`` of each distinct exit."""
    arrived: int
    """Number of the trial's requests that had reached the scheduler when the step began."""
    num_running_before: int
    num_waiting_before: int
    token_budget: int
    max_num_running_reqs: int
    kv_blocks_free_before: int | None


class Divergence(msgspec.Struct, kw_only=True):
    """First step of a trial at which the two runs decided differently."""

    trial: int | None
    at: int
    """Number of steps before this one that both sides decided identically; steps that had nothing to decide
    do not count."""
    base: DecidedStep | None
    """Step of the base; None if the base had no further step."""
    new: DecidedStep | None
    decided: list[str]
    """Parts of the decision that differ: ``scheduled``, ``preempted``, ``causes``."""
    given: list[str]
    """Inputs of the decision that differ: fields of ``DecidedStep``. Empty if no recorded input differs."""


class Decisions(msgspec.Struct, kw_only=True):
    """Agreement of both runs' schedulers on engine 0, trial by trial from the first step."""

    trials_compared: int
    """Number of trials that both sides have; a trace without trials counts as one."""
    trials_alike: int
    """Number of trials in which all steps were decided identically."""
    common_steps: list[int]
    """Number of identically decided steps before the first difference, for each compared trial."""
    first: Divergence | None
    """Divergence of the first trial that has one."""


class Comparison(msgspec.Struct, kw_only=True):
    """Result of ``schedtrace diff``."""

    schema_version: int = COMPARISON_SCHEMA_VERSION
    verdict: Message
    base_path: str
    new_path: str
    base_label: str
    new_label: str
    notes: list[Message]
    """Notes on the comparison: problems of the traces, trials on one side only."""
    config: list[ConfigChange]
    metrics: list[MetricChange]
    causes: list[CauseChange] | None
    """Every kind of refusal in either run, the largest change first; None if a side does not record
    refusals.
    """
    findings: list[FindingChange]
    unjudged: list[str] = []
    """Codes of findings that are not compared, because one of the records cannot show them."""
    compared_by: Literal["trials", "requests"]
    """Unit of comparison. ``requests``: two servers, which have no trials, are compared by blocks of their
    requests and of time.
    """
    tests: int
    """Number of tested metrics, for which ``p_corrected`` is corrected; a metric that repeats another does
    not count.
    """
    trials_least: int
    """Minimum number of trials per side with which a difference in some metric can be significant."""
    decisions: Decisions

    @property
    def undecided(self) -> bool:
        """Whether some figures might differ, but there are too few trials, or requests, to judge them."""
        if self.compared_by == "requests":
            return not self.tests
        return any(metric.outcome is Outcome.TOO_FEW for metric in self.metrics)
