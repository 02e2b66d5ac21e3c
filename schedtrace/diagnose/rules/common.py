"""What several rules need: where a finding shows, what it cost, and parts of sentences."""

from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec
import polars as pl

from schedtrace.diagnose.behind_whom import behind_whom, with_holders
from schedtrace.diagnose.waits import Charged, ClassTime
from schedtrace.model.message import NOTHING, Count, Message, Steps, joined
from schedtrace.model.report import MAX_STEPS, Advice, Evidence, Finding, Gain
from schedtrace.model.say import names, parsed, say
from schedtrace.timeline.timeline import Timeline

CRITICAL_COST_FRAC = 0.10
WARNING_COST_FRAC = 0.01
"""A tenth of the run is worth stopping for; under a hundredth is in the noise of most runs."""
RESOLVED_FRAC = 0.005
"""What is less is 0 % in a sentence, and left out of it."""


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
    """``ms`` as a share of the busy time."""
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
    if frac < WARNING_COST_FRAC and model.error_frac >= round(frac, 4):  # the error has four digits, too
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


CRITICAL_WEIGHT_FRAC = 0.25
WARNING_WEIGHT_FRAC = 0.05
"""A quarter of the requests' time, or of the run, is worth stopping for; a twentieth an hour of work."""


def severity_by_weight(gain: Gain | None, share_frac: float | None) -> str:
    """Severity of a root cause: by what is gained, or by what it explains where no gain can be estimated."""
    weight = gain.saved_frac if gain else share_frac or 0.0
    if weight >= CRITICAL_WEIGHT_FRAC:
        return "critical"
    return "warning" if weight >= WARNING_WEIGHT_FRAC else "info"


def wait_finding(timeline: Timeline, waits: Charged, **fields: Any) -> Finding:
    """A root cause that requests waited for, with who waited behind whom.

    Args:
        timeline: The engine's trace.
        waits: What is charged to it.
        fields: The others of ``Finding``; ``gain`` decides the severity.
    """
    sources = waits.steps["waiting_via"].drop_nulls()
    given = {
        "share_frac": waits.share_frac,
        "severity": severity_by_weight(fields.get("gain"), waits.share_frac),
        "via": "source" if (sources == "source").any() else "inferred",
        "engine_rank": timeline.rank,
        "count": waits.steps.height,
        "trials": trial_numbers(waits.steps),
        "steps": step_numbers(waits.steps),
        "tokens": int(waits.steps.select(pl.col("waiting_tokens_after").max()).item() or 0),
    }
    finding = Finding(**with_sentences({**given, **fields}))
    behind = behind_whom(timeline, waits)
    return finding if behind is None else with_holders(timeline, finding, behind)


def step_numbers(steps: pl.DataFrame) -> list[int]:
    """The numbers of the steps that show a finding, the first ``MAX_STEPS``."""
    return steps["step"].unique().sort().head(MAX_STEPS).to_list()


def trial_numbers(steps: pl.DataFrame) -> list[int]:
    """The trials that show a finding; empty for a trace without trials."""
    return steps["trial"].drop_nulls().unique().sort().to_list()


def by_class(classes: list[ClassTime]) -> Message:
    """``0.6 requests of priority 0 and 7.4 requests of priority 9``."""
    return listed(
        [
            say(
                "{count:n1} requests of priority {priority:n}",
                count=ran.running,
                priority=ran.priority,
            )
            for ran in classes
        ]
    )


def only(values: pl.Series) -> str | None:
    """The value that all rows have; None where they differ, or have none."""
    different = values.unique().to_list()
    return different[0] if len(different) == 1 else None


def in_trials(timeline: Timeline, trials: list[int]) -> Message:
    """`` in 7 of 8 trials``, or nothing for a trace without several."""
    if not trials or len(timeline.trials()) == 1:
        return NOTHING
    of = Count(len(timeline.trials()), "trial")
    return say(" in {trials:n} of {of}", trials=len(trials), of=of)


def listed(parts: list[Message], last: str = "and") -> Message:
    """``a, b and c``; parts that say nothing are left out."""
    said = [part for part in parts if part]
    return joined([joined(said[:-1], ", "), *said[-1:]], f" {last} ")


def finding_of(rank: int, rows: pl.DataFrame, **fields: Any) -> Finding:
    """A finding that no wait stands behind: recorded as a fact, as severe as its share of the requests' time.

    Args:
        rank: Of the engine.
        rows: What shows it: each counts; ``trial`` and ``step`` say where, as far as there are such columns.
        fields: The others of ``Finding``, or instead of these; as for ``with_sentences``.
    """
    given = {
        "severity": severity_by_weight(fields.get("gain"), fields.get("share_frac")),
        "cause": None,
        "via": "recorded",
        "engine_rank": rank,
        "count": rows.height,
        "trials": trial_numbers(rows) if "trial" in rows.columns else [],
        "steps": step_numbers(rows.drop_nulls("step")) if "step" in rows.columns else [],
        "tokens": 0,
    }
    return Finding(**with_sentences({**given, **fields}))


def with_sentences(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a ``Finding``, with what is a template made a sentence of ``schedtrace.model.say``.

    The values of ``title``, ``verdict``, ``holder`` and ``message`` are the evidence's; ``{share:%}`` is
    ``share_frac``. Those of ``example`` are its first example's; without examples there is none.
    """
    evidence = fields["evidence"]
    examples = getattr(evidence, "examples", [])
    said = dict(fields)
    for name in ("title", "verdict", "holder", "message"):
        template = fields.get(name)
        if isinstance(template, str):
            share = {"share": fields["share_frac"]} if "share" in names(parsed(template)) else {}
            said[name] = say(template, evidence, **share)
    if isinstance(template := fields.get("example"), str):
        said["example"] = say(template, examples[0]) if examples else None
    return said


def advise(
    template: str,
    evidence: object = None,
    /,
    *,
    setting: str | None = None,
    costs: str | Message = "",
    **values: Any,
) -> Advice:
    """Advice in the words of ``schedtrace.model.say``.

    Args:
        template: What to do.
        evidence: Its fields are the values that are not given by name.
        setting: As of ``Advice``.
        costs: Likewise; as words, or as a message where there are values in it.
        values: Of the template; ``value`` is the setting's new one and need not stand in the template.
    """
    placed = names(parsed(template))
    words = {name: value for name, value in values.items() if name != "value" or name in placed}
    return Advice(
        message=say(template, evidence, **words),
        setting=setting,
        value=values.get("value"),
        costs=costs if isinstance(costs, Message) else say(costs),
    )


class Waited(Evidence, kw_only=True):
    """What requests waited for a limit."""

    share_frac: float
    """Of all requests' time."""
    wait_ms: float
    requests: int
    longest_ms: float
    longest_request: str

    @classmethod
    def of(cls, waits: Charged, **others: Any) -> Self:
        """These figures, and the fields of the rule's own evidence."""
        return cls(
            share_frac=waits.share_frac,
            wait_ms=waits.time_us / 1e3,
            requests=waits.requests,
            longest_ms=waits.longest_us / 1e3,
            longest_request=waits.longest_id,
            **others,
        )


WAITED = "{requests:n request} waited, {longest_request:id} the longest ({longest_ms:ms})."
"""Of ``Waited``."""


Example = TypeVar("Example", bound=msgspec.Struct)


def first_examples(kind: type[Example], rows: pl.DataFrame, most: int = 3) -> list[Example]:
    """The first rows as examples: their fields are named as columns, of which there may be more."""
    return msgspec.convert(rows.head(most).to_dicts(), list[kind])  # type: ignore[valid-type]  # a type at run time


def share_of_requests(timeline: Timeline, time_us: float) -> float | None:
    """This as a share of all requests' time; None where that is not known."""
    return time_us / timeline.requests_us if timeline.requests_us else None
