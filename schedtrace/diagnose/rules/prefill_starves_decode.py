"""``prefill-starves-decode``: decoding requests waited longer because their steps also prefilled."""

import polars as pl

from schedtrace.diagnose.cache_use import cache_use
from schedtrace.diagnose.rule import Findings, Rule, Threshold
from schedtrace.diagnose.rules.allowed_settings import LONG_PREFILL, replay_advice
from schedtrace.diagnose.rules.arrival_limited import late_requests
from schedtrace.diagnose.rules.common import Fields, StepExample, Values, share_of_requests, step_finding
from schedtrace.diagnose.rules.smaller_budget import smaller_budget
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

FOUND_FROM_FRAC = 0.10
"""Least share of the time that decoding requests spent in steps."""

CRITICAL_FROM_FRAC = 0.25

WORTH_FRAC = 0.05
"""Least share of the requests' time that a smaller budget saves, from which large chunks are a root cause."""
SIZES = ("size", "step_us", "larger_us")
"""Figures of a smaller budget that the verdict states."""

PAUSE_TIMES = 10
"""Least ratio to the usual time at which users notice a step as a pause."""
MOST_FRAC = 0.5


class StretchedStep(StepExample, kw_only=True):
    """Step, and the time that its prefill added."""

    prefill_tokens: int
    """Tokens of prefills."""
    decode_tokens: int
    """Tokens of decodes."""
    busy_us: int
    """Time from the step's start to its output."""
    stretch_us: float
    """Time that its prefill added, by the step-time model."""


class StretchedDecodes(Evidence, kw_only=True):
    """Time that prefill added to the time between tokens."""

    stretch_frac: float
    """Share of all time between tokens, as above."""
    mean_stretch_us: float
    """Mean of ``stretch_us``."""
    max_busy_us: int
    """Longest of these steps."""
    median_decode_step_us: float | None
    """Median time of steps that only decode; None: there are none."""
    examples: list[StretchedStep]
    """Steps with the largest stretch."""


def _find(timeline: Timeline) -> Findings:
    decoding = timeline.steps.filter((pl.col("decode_tokens") > 0) & (pl.col("busy_us") > 0))
    all_us = _waited_us(decoding)
    # No step is stretched by more than its time: below the threshold, the slow model need not be asked.
    if not all_us or _waited_us(decoding.filter(pl.col("prefill_tokens") > 0)) / all_us < FOUND_FROM_FRAC:
        return
    mixed = stretched_steps(timeline)
    stretch_us = float((mixed["stretch_us"] * mixed["decode_tokens"]).sum() or 0)
    if stretch_us / all_us < FOUND_FROM_FRAC:
        return
    evidence = StretchedDecodes(
        stretch_frac=stretch_us / all_us,
        mean_stretch_us=float(mixed["stretch_us"].sum()) / mixed.height,
        max_busy_us=int(mixed["busy_us"].max()),  # type: ignore[arg-type]  # an integer column with rows
        median_decode_step_us=decoding.filter(pl.col("prefill_tokens") == 0)["busy_us"].median(),  # type: ignore[arg-type]  # of integers
        examples=StretchedStep.largest(mixed, "stretch_us"),
    )
    model = timeline.step_time
    severity = "critical" if evidence.stretch_frac >= CRITICAL_FROM_FRAC else "warning"
    fields: Fields = {
        "tokens": int(mixed["prefill_tokens"].sum()),
        "message": "{steps:n step}{trials} computed prefill chunks beside decodes, which delayed the "
        "decoding requests by {mean_stretch_us:us} a step on average: {stretch_frac:%} of all time "
        "between their tokens, by the step-time model.[ A step with decodes only took "
        "{median_decode_step_us:us} at the median.]",
        "example": "{at} took {busy_us:us} for {prefill_tokens:n prefill token} and "
        "{decode_tokens:n decode token}, about {stretch_us:us} of it for the prefill.",
        "cost_error_frac": None if model is None else model.error_frac,
    }
    smaller = smaller_budget(timeline)
    if smaller is not None and smaller.saved_frac >= WORTH_FRAC:
        fields |= {
            "title": "Prefill chunks are too large for the decodes beside them",
            "verdict": "Steps with prefill delay the decodes in them: steps of about {size:n token} took "
            "{step_us:us}, larger ones {larger_us:us} on average; smaller chunks would save at least "
            "{share:%} of the requests' time.",
            "holder": _holder(timeline, mixed),
            "share_frac": smaller.saved_frac,
            "cause": Cause.TOKEN_BUDGET,
            "advice": [smaller.advice(timeline)],
        }
    elif _interrupts(evidence) and not (_came_too_late(timeline, mixed) or _computed_again(timeline, mixed)):
        fields |= {
            "title": "Large prefill chunks interrupt the decodes",
            "verdict": "Prefill chunks interrupt the decodes: {steps:n step} with up to "
            "{most:n prefill token} took up to {max_busy_us:us}, where a step with decodes only takes "
            "{median_decode_step_us:us}; that is {stretch_frac:%} of the time between tokens.",
            "holder": _holder(timeline, mixed),
            "share_frac": share_of_requests(timeline, stretch_us),
            "advice": [replay_advice(LONG_PREFILL)],
        }
    else:
        fields["severity"] = severity
    most = max(evidence.examples, key=lambda step: step.busy_us).prefill_tokens
    sizes: Values = {} if smaller is None else {name: getattr(smaller, name) for name in SIZES}
    yield step_finding(timeline, mixed, evidence, values={"most": most, **sizes}, **fields)


def _interrupts(evidence: StretchedDecodes) -> bool:
    """Return whether users notice such a step as a pause, and not only as a slightly slower stream."""
    usual_us = evidence.median_decode_step_us
    return usual_us is not None and evidence.mean_stretch_us >= PAUSE_TIMES * usual_us


def _came_too_late(timeline: Timeline, mixed: pl.DataFrame) -> bool:
    """Return whether most prefill is for requests that were sent with the decoding ones but arrived late."""
    if not timeline.closed_workload:
        return False
    late = late_requests(timeline)[["request_id"]]
    each = timeline.prefills.join(mixed.select(pl.col("step").cast(pl.Int64)), on="step", how="semi")
    of_late = each.join(late, on="request_id", how="semi")["scheduled_tokens"].sum()
    return int(of_late) >= MOST_FRAC * int(mixed["prefill_tokens"].sum())


def _computed_again(timeline: Timeline, mixed: pl.DataFrame) -> bool:
    """Return whether most prefill is of tokens that earlier prompts had computed: the cache lost them."""
    each = timeline.prefills.join(mixed.select(pl.col("step").cast(pl.Int64)), on="step", how="semi")
    missed = cache_use(timeline).join(each, on="request_id", how="semi")["missed_tokens"].sum() or 0
    return int(missed) >= MOST_FRAC * int(mixed["prefill_tokens"].sum())


def _holder(timeline: Timeline, mixed: pl.DataFrame) -> Message:
    """Return the names of the requests whose prompts were prefilled."""
    each = timeline.prefills.join(mixed.select(pl.col("step").cast(pl.Int64)), on="step", how="semi")
    each = each.group_by("request_id").agg(pl.col("scheduled_tokens").sum(), pl.col("prompt_tokens").first())
    largest = each.sort("scheduled_tokens", "request_id", descending=[True, False])
    if largest.is_empty():
        return NOTHING
    return say(
        "The chunks are of {prompts:n prompt}; the largest is {request:id} ({tokens:n token}).",
        prompts=largest.height,
        request=str(largest["request_id"][0]),
        tokens=int(largest["prompt_tokens"][0]),
    )


def _waited_us(steps: pl.DataFrame) -> int:
    """Return the total time that decoding requests spent in these steps."""
    return int((steps["busy_us"] * steps["decode_tokens"]).sum() or 0)


def stretched_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps with both kinds of work, with ``stretch_us``: the time of prefill in the model."""
    model = timeline.step_time
    mixed = timeline.steps.filter(
        (pl.col("decode_tokens") > 0) & (pl.col("prefill_tokens") > 0) & (pl.col("busy_us") > 0)
    )
    per_token = 0.0 if model is None else model.per_prefill_token_us
    return mixed.with_columns(stretch_us=pl.min_horizontal(pl.col("prefill_tokens") * per_token, "busy_us"))


RULE = Rule(
    code="prefill-starves-decode",
    summary="steps with prefill chunks stretched the time between the tokens of running requests",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS}),
    find=_find,
    symptom_of=("prefix-cache", "token-budget-bound", "long-prompt", "arrival-limited"),
    threshold=Threshold(FOUND_FROM_FRAC, lambda finding: getattr(finding.evidence, "stretch_frac", None)),
)
