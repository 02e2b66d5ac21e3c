"""Shared code of rules: findings from evidence and templates, their costs, and parts of sentences."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import TypedDict, Unpack

import polars as pl

from schedtrace.diagnose.waits import Charged, ClassTime, behind_whom, with_holders
from schedtrace.model.message import NOTHING, Message, Setting, Steps, Worded, joined
from schedtrace.model.report import MAX_STEPS, Advice, Evidence, Finding, Gain
from schedtrace.model.say import argument_names, parsed, say
from schedtrace.timeline.timeline import Timeline

CRITICAL_COST_FRAC = 0.10
WARNING_COST_FRAC = 0.01
"""Minimum share of the run at which a cost is a warning; a smaller cost is within the noise of most runs."""
RESOLVED_FRAC = 0.005
"""Smallest share that a sentence states; a smaller share would be printed as 0 % and is left out."""


class Waited(Evidence, kw_only=True):
    """Evidence about a wait."""

    wait_ms: float
    """Total time charged to this wait, over all requests."""
    requests: int
    """Number of requests that waited."""
    longest_ms: float
    """Total wait of the request that waited longest."""
    longest_request: str
    """Request that waited longest in total."""


class WaitFigures(TypedDict):
    """Fields of ``Waited``."""

    wait_ms: float
    requests: int
    longest_ms: float
    longest_request: str


def wait_figures(waits: Charged) -> WaitFigures:
    """Return the fields of ``Waited``."""
    return {
        "wait_ms": waits.time_us / 1e3,
        "requests": waits.requests,
        "longest_ms": waits.longest_us / 1e3,
        "longest_request": waits.longest_id,
    }


class CostFigures(TypedDict, total=False):
    """Fields of a ``Finding`` about the time that it cost."""

    cost_ms: float | None
    cost_frac: float | None
    cost_error_frac: float | None


def prefill_cost(timeline: Timeline, tokens: int) -> CostFigures:
    """Return the cost of this many prefill tokens; empty if the step-time model cannot resolve the cost."""
    model, busy_us = timeline.step_time, timeline.busy_us
    if not tokens or model is None or not model.per_prefill_token_us or not busy_us:
        return {}
    cost_us = tokens * model.per_prefill_token_us
    frac = cost_us / busy_us
    if frac < WARNING_COST_FRAC and model.error_frac >= round(frac, 4):  # the error has four digits, too
        return {}
    return {"cost_ms": cost_us / 1e3, "cost_frac": frac, "cost_error_frac": model.error_frac}


CRITICAL_WEIGHT_FRAC = 0.25
WARNING_WEIGHT_FRAC = 0.05
"""Minimum shares of the requests' time, or of the run, for a critical finding and for a warning."""


def severity_by_weight(gain: Gain | None, share_frac: float | None) -> str:
    """Return the severity of a root cause, by its gain or, without an estimate, by the share it explains."""
    weight = gain.saved_frac if gain else share_frac or 0.0
    return severity(weight, WARNING_WEIGHT_FRAC, CRITICAL_WEIGHT_FRAC)


def severity(frac: float, warning_from: float, critical_from: float) -> str:
    """Return ``critical``, ``warning`` or, below both thresholds, ``info``."""
    return "critical" if frac >= critical_from else "warning" if frac >= warning_from else "info"


class Figures(CostFigures, total=False):
    """Fields of a ``Finding`` that are not sentences, set by the finding's rule."""

    code: str
    severity: str
    share_frac: float | None
    gain: Gain | None
    leads: bool
    cause: str | None
    via: str
    location: str | None
    engine_rank: int
    engine_ranks: list[int]
    count: int
    trials: list[int]
    steps: list[int]
    tokens: int
    advice: list[Advice]
    cost_of: str
    tail: Message


class Fields(Figures, total=False):
    """Fields of a ``Finding`` as a rule states them; sentences may be templates."""

    title: str | Message
    verdict: str | Message
    holder: str | Message
    message: str | Message
    example: str | Message | None
    """Example; a template refers to the first of ``cases`` if there are any."""
    cases: pl.DataFrame


Values = Mapping[str, Worded]
"""Values that templates name in addition to the fields of the evidence."""


def finding_of(
    evidence: Evidence,
    shown: pl.DataFrame | None = None,
    *,
    values: Values = MappingProxyType({}),
    title: str | Message = NOTHING,
    verdict: str | Message = NOTHING,
    holder: str | Message = NOTHING,
    message: str | Message = NOTHING,
    example: str | Message | None = None,
    cases: pl.DataFrame | None = None,
    **figures: Unpack[Figures],
) -> Finding:
    """Return a finding; by default it is about a recorded fact without a cause.

    Args:
        evidence: Evidence with the finding's figures.
        shown: One row per step that shows the finding, with ``step`` and ``trial``; it determines ``count``,
            ``trials`` and ``steps``, unless ``figures`` contains them.
        values: As in ``Values``; templates may also name ``steps`` (``count``), ``tokens`` and ``share``
            (``share_frac``).
        title: Title; like all sentences, a message or a template over evidence and values.
        verdict: As in ``Finding``.
        holder: As in ``Finding``.
        message: As in ``Finding``.
        example: As in ``Finding``.
        cases: Rows; the example is about the first row. A template names its columns, and its step as
            ``at``. None: the example is about the evidence.
        figures: The finding's other fields. ``severity`` defaults to that of a root cause with this gain and
            share.
    """
    if shown is not None:
        figures = {"count": shown.height, "trials": trial_numbers(shown), **figures}
        if "steps" not in figures:
            figures["steps"] = step_numbers(shown)
    share_frac = figures.get("share_frac")
    defaults: Figures = {
        "code": "",  # its rule's, which sets it
        "severity": severity_by_weight(figures.get("gain"), share_frac),
        "cause": None,
        "via": "recorded",
        "tokens": 0,
    }
    figures = {**defaults, **figures}
    values = {"steps": figures["count"], "tokens": figures["tokens"], "share": share_frac, **values}
    if isinstance(example, str):
        example = said(example, evidence, values) if cases is None else _about_first(example, cases, values)
    return Finding(
        evidence=evidence,
        title=said(title, evidence, values),
        verdict=said(verdict, evidence, values),
        holder=said(holder, evidence, values),
        message=said(message, evidence, values),
        example=example,
        **figures,
    )


def first_step(rows: pl.DataFrame) -> Steps:
    """Return the step of the first of these rows."""
    return Steps(rows["step"][0], rows["step"][0], rows["trial"][0])


def largest(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the rows in descending order of a column; rows with equal values by step."""
    return rows.sort(column, "step", descending=[True, False])


def _about_first(words: str, cases: pl.DataFrame, values: Values) -> Message | None:
    """Return a template filled with the columns of the first row, and with its step, if any, as ``at``."""
    if cases.is_empty():
        return None
    at = {"at": first_step(cases)} if "step" in cases.columns else {}
    return said(words, SimpleNamespace(**cases.row(0, named=True)), {**values, **at})


def said(words: str | Message, fields: object = None, values: Values = MappingProxyType({})) -> Message:
    """Return a template filled with these fields, and with values for names that are not fields."""
    if isinstance(words, Message):
        return words
    places = {name for name in argument_names(parsed(words)) if name in values and not hasattr(fields, name)}
    return say(words, fields, **{name: values[name] for name in places})


def advise(
    words: str,
    fields: object = None,
    *,
    setting: str | None = None,
    value: float | str | bool | None = None,
    costs: str | Message = NOTHING,
    **values: Worded,
) -> Advice:
    """Return a piece of advice.

    Args:
        words: Template with these fields and values; it may also name ``value``, and ``option`` (the option
            as typed).
        fields: Fields, for example of the evidence.
        setting: Field of vLLM's ``EngineArgs``.
        value: Advised value.
        costs: Side effects, as a template.
        values: Values by the names in the templates.
    """
    option = Setting(f"--{(setting or '').replace('_', '-')}")
    every = {"option": option, "value": value, **values}
    message, costs = said(words, fields, every), said(costs, fields, every)
    return Advice(message=message, setting=setting, value=value, costs=costs)


def step_finding(
    timeline: Timeline,
    shown: pl.DataFrame,
    evidence: Evidence,
    *,
    values: Values = MappingProxyType({}),
    **fields: Unpack[Fields],
) -> Finding:
    """Return a finding about the steps of one engine.

    Args:
        timeline: The engine's trace.
        shown: As for ``finding_of``.
        evidence: Evidence with the finding's figures.
        values: As for ``finding_of``; templates may also name ``trials``, the phrase "in n of m trials"
            (empty if the run has only one trial).
        fields: As for ``finding_of``.
    """
    of_engine: Fields = {
        "engine_rank": timeline.rank,
        "trials": trial_numbers(shown),
        **fields,
    }
    trials, of_run, in_trials = len(of_engine["trials"]), len(timeline.trials()), NOTHING
    if trials and of_run != 1:
        in_trials = say(" in {trials:n} of {all:n trial}", trials=trials, all=of_run)
    return finding_of(evidence, shown, values={"trials": in_trials, **values}, **of_engine)


def wait_finding(
    timeline: Timeline,
    waits: Charged,
    evidence: Evidence,
    *,
    values: Values = MappingProxyType({}),
    **fields: Unpack[Fields],
) -> Finding:
    """Return a root cause that requests waited for, with a statement about which requests held them up.

    Args:
        timeline: The engine's trace.
        waits: Time charged to the wait.
        evidence: Evidence with the finding's figures.
        values: As for ``step_finding``.
        fields: As for ``step_finding``; ``gain`` decides the severity.
    """
    sources = waits.steps["waiting_via"].drop_nulls()
    of_wait: Fields = {
        "share_frac": waits.share_frac,
        "via": "source" if (sources == "source").any() else "inferred",
        "tokens": int(waits.steps.select(pl.col("waiting_tokens_after").max()).item() or 0),
        **fields,
    }
    finding = step_finding(timeline, waits.steps, evidence, values=values, **of_wait)
    behind = behind_whom(timeline, waits)
    return finding if behind is None else with_holders(timeline, finding, behind)


def step_numbers(steps: pl.DataFrame) -> list[int]:
    """Return the numbers of the steps that show a finding, up to ``MAX_STEPS``."""
    return steps.select(pl.col("step").drop_nulls().unique().sort().head(MAX_STEPS))["step"].to_list()


def trial_numbers(steps: pl.DataFrame) -> list[int]:
    """Return the trials that show a finding; empty for a trace without trials."""
    trials = steps["trial"]
    return [] if trials.null_count() == trials.len() else trials.unique().drop_nulls().sort().to_list()


def by_class(classes: list[ClassTime]) -> Message:
    """Describe classes: ``0.6 requests of priority 0 and 7.4 requests of priority 9``."""
    return listed([say("{running:n1} requests of priority {priority:n}", ran) for ran in classes])


def only(values: pl.Series) -> str | None:
    """Return the value that all rows share; None if rows differ or have no value."""
    different = values.unique().to_list()
    return different[0] if len(different) == 1 else None


def listed(parts: list[Message], last: str = "and") -> Message:
    """Join parts as ``a, b and c``; leave out empty parts."""
    filled = [part for part in parts if part]
    return joined([joined(filled[:-1], ", "), *filled[-1:]], f" {last} ")


PRESENT = pl.max_horizontal("num_running_after", "total_requests") + pl.col("num_waiting_after").fill_null(0)
"""Number of requests that ran or waited in a step."""
WAITED = "{requests:n request} waited, {longest_request:id} the longest ({longest_ms:ms})."
"""Sentence about the fields of ``Waited``."""


def share_of_requests(timeline: Timeline, time_us: float) -> float | None:
    """Return a time as a share of all requests' time, at most 1; None if their time is unknown."""
    return min(1.0, time_us / timeline.requests_us) if timeline.requests_us else None
