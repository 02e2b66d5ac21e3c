"""``slow-steps``: steps that have something in common took longer than their work explains."""

import math
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from schedtrace.diagnose.excess_words import (
    MINUTES,
    PARTS,
    SECONDS,
    steps_subject,
    term_noun,
    term_nouns,
    tie_clause,
)
from schedtrace.diagnose.gains import sets_pace, throughput_gain
from schedtrace.diagnose.rule import Findings, Rule, Threshold, share_frac
from schedtrace.diagnose.rules.allowed_settings import current_value_note
from schedtrace.diagnose.rules.common import Cost, StepExample, advise, listed, step_finding
from schedtrace.model.message import NOTHING, Message, Number, Request, Steps, joined
from schedtrace.model.report import Advice, Evidence, Finding, Gain
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.events import FIRST
from schedtrace.timeline.timeline import Timeline

if TYPE_CHECKING:
    from schedtrace.diagnose.excess import Effect, PartExcess
    from schedtrace.diagnose.excess_search import Explanation

LEAST_FRAC = 0.01
"""Least share of the requests' time that an effect must cost to be reported."""
HIDDEN = 0.95
"""Share of an excess that costs time above which the message omits the part hidden behind the device."""
BEYOND_FRAC = 0.02
"""Largest share of steps on the wrong side of a captured graph's size."""
WHOLE_FROM = 10.0
"""Factor of the time from which the verdict rounds it to a whole number."""
MOST_BY_CHANCE = 0.1
"""Largest chance that requests start and end at the two ends of a range of steps by coincidence."""
PROFILE = "Profile one of these steps: the trace does not see inside {part}."


class SlowStep(StepExample, kw_only=True):
    """Step that took longer than its work explains."""

    total_requests: int
    """Number of requests that the step scheduled."""
    took_us: float
    """Time of the part in microseconds."""
    expected_us: float
    """Time in microseconds that the model predicts for the work."""


class Condition(msgspec.Struct, kw_only=True):
    """Condition that the slow steps meet."""

    feature: str
    """Compared feature, as in the table above."""
    detail: str = ""
    """Name of the exit, trait, adapter or request."""
    more_than: float | None = None
    """Value above which steps are slow; None if the condition has no lower bound."""
    at_most: float | None = None
    """Value up to which steps are slow; None if the condition has no upper bound."""


class SlowSteps(Evidence, kw_only=True):
    """Steps that took longer than their work explains, and what they have in common."""

    part: str
    """Part of the step: ``execution``, ``schedule``, ``update`` or ``between``."""
    conditions: list[Condition]
    """Conditions that the slow steps share; for a trend, the value from which the time grows."""
    trend: bool
    """Whether the time grows with the feature instead of jumping at a value."""
    per_unit_us: float | None
    """Time in microseconds that each unit of a trend's feature adds; None without a trend."""
    also: list[Condition]
    """Conditions that explain as much."""
    looked_at: int
    """Number of examined steps."""
    all_steps: int
    """Number of steps that have this part."""
    inside: int
    """Number of examined steps that meet the conditions."""
    longer: int
    """Number of these steps that exceed their work by more than half of ``excess_ms``."""
    outside: int
    """Number of examined steps that do not meet the conditions."""
    longer_outside: int
    """Number of these steps that exceed their work by as much."""
    excess_ms: float
    """Median time in milliseconds by which the steps inside exceed their work."""
    factor: float
    """Median ratio of actual to expected time of the steps inside."""
    explained_frac: float
    """Share of the model's error on held-out steps that the conditions remove."""
    unexplained_frac: float | None
    """Share of the slow steps' excess in this part that nothing in this trace explains."""
    model_error_frac: float
    """Typical relative error of the model."""
    batch_size: int | None
    """Largest batch size below the slow ones; None if the batch size is no condition."""
    captured_tokens: int | None
    """Size in tokens of the largest captured CUDA graph, if only larger decode steps are slow; else None."""
    request_ids: list[str]
    """Requests that the slow steps share, if a request is a condition."""
    starting: list[str]
    """Requests whose first step is the first of a range of slow steps; empty: no range, or a coincidence."""
    ending: list[str]
    """Requests whose last step is the last of this range."""
    examples: list[SlowStep]
    """Steps with the largest excess."""


def _find(timeline: Timeline) -> Findings:
    from schedtrace.diagnose.excess import every_effect  # noqa: PLC0415  # NumPy and SciPy load late

    if not timeline.requests_us:
        return
    for excess, effect in every_effect(timeline):
        share = min(1.0, effect.felt_us / timeline.requests_us)
        if share < LEAST_FRAC or _first_steps(timeline, excess, effect):
            continue
        evidence: SlowSteps = _evidence(timeline, excess, effect)
        subject = steps_subject(excess, effect)
        advice, gain = _advice(timeline, excess, effect, evidence)
        yield step_finding(
            timeline,
            excess.steps.filter(pl.Series(effect.inside)),
            evidence,
            title=_title(excess, effect, subject),
            verdict=_trend(excess, effect, share) if evidence.trend else JUMP,
            share_frac=share,
            gain=gain,
            cause=excess.part,
            holder=_holder(excess, effect, evidence),
            message=MESSAGE,
            values={
                "subject": subject,
                "where": PARTS[excess.part],
                "times": Number(evidence.factor, 0 if evidence.factor >= WHOLE_FROM else 1),
                "rest": _rest(evidence),
                "longer_ms": effect.added_us / 1e3,
                "exposed_ms": effect.cost_us / 1e3 if effect.cost_us < HIDDEN * effect.added_us else None,
                "sample": say(" in a sample of {looked_at:n step}", evidence)
                if excess.is_sample
                else NOTHING,
            },
            advice=advice,
            example="{at} with {total_requests:n request} took {took_us:us} instead of {expected_us:us}.",
            cost=Cost(effect.cost_us / 1e3, effect.cost_us / timeline.busy_us, excess.error_frac),
        )


JUMP = (
    "{subject} take {excess_ms:ms} longer {where} than their work explains, {times} times as long "
    "({longer:n} of {inside:n}{rest}): {share:%} of the requests' time."
)
MESSAGE = (
    "{inside:n step}{sample} took {longer_ms:ms} longer[, {exposed_ms:ms} of it while the device waited]; a "
    "model of their work is off by {model_error_frac:%} (typical error).[ {unexplained_frac:%} of the excess "
    "of slow steps {where} is explained by nothing in this trace.] This is a correlation; an A/B run "
    "proves it."
)


def _rest(evidence: SlowSteps) -> Message:
    """State how many of the remaining steps are as slow."""
    if not evidence.longer_outside:
        return say("; none of the other {outside:n} does", evidence)
    return say("; {longer_outside:n} of the other {outside:n} do", evidence)


def _first_steps(timeline: Timeline, excess: "PartExcess", effect: "Effect") -> bool:
    """Return whether most of the added time is in first steps, which ``interruption`` reports."""
    first = timeline.events.filter(pl.col("kind") == FIRST)["step"]
    inside = pl.Series(effect.inside & excess.steps["step"].is_in(first.implode()).to_numpy())
    added = pl.Series(effect.excess_us)
    return bool(2 * added.filter(inside).sum() > added.sum())


def _evidence(timeline: Timeline, excess: "PartExcess", effect: "Effect") -> SlowSteps:
    import numpy as np  # noqa: PLC0415  # as above

    explanation, inside = effect.explanation, effect.inside
    added = effect.excess_us[inside]
    rows = excess.steps.select("step", "trial", "total_requests").with_columns(
        took_us=pl.Series(excess.times_us), expected_us=pl.Series(excess.expected_us)
    )
    worst = rows.filter(pl.Series(inside)).sort(
        pl.col("took_us") - pl.col("expected_us"), descending=True, maintain_order=True
    )
    unexplained_frac = excess.unexplained_us / excess.excess_us if excess.excess_us else 0.0
    starting, ending = _at_the_ends(timeline, excess, effect)
    return SlowSteps(
        part=excess.part,
        conditions=_conditions(explanation),
        trend=explanation.slope,
        per_unit_us=_per_unit_us(effect) if explanation.slope else None,
        also=[condition for also in explanation.also for condition in _conditions(also)],
        looked_at=excess.steps.height,
        all_steps=excess.all_steps,
        inside=int(inside.sum()),
        longer=int(effect.longer[inside].sum()),
        outside=int((~inside).sum()),
        longer_outside=int(effect.longer[~inside].sum()),
        excess_ms=float(np.median(added)) / 1e3,
        factor=effect.factor,
        explained_frac=explanation.explained,
        unexplained_frac=unexplained_frac if unexplained_frac >= LEAST_FRAC else None,
        model_error_frac=excess.error_frac,
        batch_size=_cliff(explanation),
        captured_tokens=captured_tokens(timeline, excess, effect),
        request_ids=[
            term.feature.detail for term in explanation.terms if term.feature.kind in ("request", "length")
        ],
        starting=starting,
        ending=ending,
        examples=SlowStep.first(worst),
    )


def _at_the_ends(timeline: Timeline, excess: "PartExcess", effect: "Effect") -> tuple[list[str], list[str]]:
    """Return the requests that start with the first and end with the last of a range of slow steps.

    Both are empty if the slow steps are no range, the range has an open end, or so many steps start and end
    requests that both may be a coincidence.
    """
    terms = effect.explanation.terms
    has_ends = {term.above for term in terms if term.feature.kind == "clock"} == {True, False}
    if excess.is_sample or not has_ends:
        return [], []
    inside = excess.steps["step"].filter(pl.Series(effect.inside))
    ends = [pl.col("step").min(), pl.col("last_step").max()]
    lives = timeline.stretches.group_by("request_id").agg(*ends).sort("request_id").collect()
    starting = lives.filter(step=int(inside[0]))["request_id"].to_list()
    ending = lives.filter(last_step=int(inside[-1]))["request_id"].to_list()
    chance = lives["step"].n_unique() * lives["last_step"].n_unique() / excess.all_steps**2
    return (starting, ending) if starting and ending and chance <= MOST_BY_CHANCE else ([], [])


def _per_unit_us(effect: "Effect") -> float:
    """Return the time in microseconds that a unit of a trend's feature adds."""
    import numpy as np  # noqa: PLC0415  # as above

    (term,) = effect.explanation.terms
    inside = effect.inside
    return float(np.median(effect.excess_us[inside] / (term.feature.values[inside] - term.cut)))


def _conditions(explanation: "Explanation") -> list[Condition]:
    conditions = []
    for term in explanation.terms:
        cut = term.cut if term.feature.kind in SECONDS else float(math.floor(term.cut))
        side = {"more_than": cut} if term.above else {"at_most": cut}
        conditions.append(Condition(feature=term.feature.kind, detail=term.feature.detail, **side))
    return conditions


def _cliff(explanation: "Explanation") -> int | None:
    """Return the largest batch size below the slow ones; None if the batch size is no condition."""
    if explanation.slope:
        return None
    sizes = [
        math.floor(term.cut)
        for term in explanation.terms
        if term.above and term.feature.kind in ("batch", "decode_tokens", "running")
    ]
    return max(sizes, default=None)


def _title(excess: "PartExcess", effect: "Effect", subject: Message) -> Message:
    if effect.explanation.slope:
        (term,) = effect.explanation.terms
        return say("Time {where} grows with {what}", where=PARTS[excess.part], what=term_nouns(term))
    head = str(subject.arguments.get("head", ""))
    lowered = {**subject.arguments, "head": head.lower()} if head else subject.arguments
    return say("Slow {subject}", subject=Message(subject.template.replace("Steps", "steps", 1), lowered))


def _trend(excess: "PartExcess", effect: "Effect", share: float) -> Message:
    """Return the verdict on a time that grows with a feature."""
    import numpy as np  # noqa: PLC0415  # as above

    (term,) = effect.explanation.terms
    each_us = _per_unit_us(effect)
    most_us = float(np.quantile(effect.excess_us, 0.98))
    steps = excess.steps["step"]
    if term.feature.kind in SECONDS:
        grows = say("grows by {each:us} a minute{whose}", each=each_us * 60, whose=MINUTES[term.feature.kind])
    else:
        grows = say("grows by {each:us} for each {noun}", each=each_us, noun=term_noun(term))
    return say(
        "Time {where} {grows}, up to {most:us} beyond what a step's work explains ({span}): {share:%} of the "
        "requests' time.",
        where=PARTS[excess.part],
        grows=grows,
        most=most_us,
        span=Steps(int(steps[0]), int(steps[-1])),
        share=share,
    )


def _holder(excess: "PartExcess", effect: "Effect", evidence: SlowSteps) -> Message:
    """Name the captured graphs, the requests at the ends and the explanations that explain as much."""
    parts = []
    if evidence.starting:
        parts.append(
            say(
                "The first of these steps is the first step of {starting}, and the last is the last step of "
                "{ending}.",
                starting=listed([say("{request}", request=Request(name)) for name in evidence.starting]),
                ending=listed([say("{request}", request=Request(name)) for name in evidence.ending]),
            )
        )
    if evidence.captured_tokens is not None:
        parts.append(
            say(
                "The largest captured CUDA graph ({sizes:setting}) holds {tokens:n token}; larger batches "
                "run without one.",
                sizes="cudagraph_capture_sizes",
                tokens=evidence.captured_tokens,
            )
        )
    if effect.explanation.also:
        also = [
            joined([tie_clause(excess, term, slope=tie.slope) for term in tie.terms], " and ")
            for tie in effect.explanation.also
        ]
        parts.append(
            say(
                "As good an explanation: steps {also}; a run in which only one of these changes tells "
                "them apart.",
                also=listed(also, "or"),
            )
        )
    return joined(parts)


def captured_tokens(timeline: Timeline, excess: "PartExcess", effect: "Effect") -> int | None:
    """Return the size in tokens of the largest captured CUDA graph if only larger decode steps are slow.

    None: no graph is captured, the header does not record it, or the cliff is elsewhere.
    """
    settings = timeline.header.settings
    sizes = settings.get("compilation_config.cudagraph_capture_sizes") or []
    largest = settings.get("compilation_config.max_cudagraph_capture_size") or max(sizes, default=0)
    if excess.part != "execution" or _cliff(effect.explanation) is None:
        return None
    if not largest or settings.get("compilation_config.cudagraph_mode") == "NONE":
        return None
    is_decode = (pl.col("prefill_tokens") == 0) & (pl.col("decode_tokens") > 0)
    decodes = excess.steps.with_columns(inside=pl.Series(effect.inside)).filter(is_decode)
    wrong = decodes.select(((pl.col("used_tokens") > largest) != pl.col("inside")).mean()).item()
    return int(largest) if wrong is not None and wrong <= BEYOND_FRAC else None


def _advice(
    timeline: Timeline, excess: "PartExcess", effect: "Effect", evidence: SlowSteps
) -> tuple[list[Advice], Gain | None]:
    """Return the advice, and the gain as far as the trace bounds it.

    If a further cause explains as much, the only advice is to profile a slow step.
    """
    explanation = effect.explanation
    profile = advise(PROFILE, part="a step" if excess.part == "execution" else PARTS[excess.part][3:])
    if explanation.also:
        return [profile], None
    kinds = {term.feature.kind for term in explanation.terms}
    if evidence.batch_size is not None and excess.part == "execution":
        return _batch_advice(timeline, excess, evidence, profile)
    connector = timeline.header.settings.get("kv_transfer_config.kv_connector")
    asks = any(term.feature.detail.startswith("connector") for term in explanation.terms)
    if connector and (asks or kinds & {"loads", "parked"}):
        look = (
            "Look at what the KV connector {name:code} does {where}: it is called there, and no setting of "
            "the scheduler changes it."
        )
        return [advise(look, name=str(connector), where=PARTS[excess.part])], None
    if kinds & {"request", "length", "trait", "lora"}:
        members = [
            say("{request}", request=Request(term.feature.detail))
            if term.feature.kind == "length"
            else term_nouns(term)
            for term in explanation.terms
            if term.feature.kind in ("request", "length", "trait", "lora")
        ]
        without = "Run the same load without {requests} and compare the two with {diff:code}."
        return [advise(without, requests=listed(members), diff="schedtrace diff")], None
    if "first_use" in kinds:
        warm = (
            "Warm the engine up with batches of these sizes before it serves or is measured "
            "({warmup:setting} of {run:code})."
        )
        return [advise(warm, warmup="--warmup", run="schedtrace run")], None
    advice = [profile]
    if evidence.starting:
        names = [say("{request}", request=Request(name)) for name in evidence.starting + evidence.ending]
        compare = (
            "Compare what {requests} ask for with what other requests ask for: the trace does not record "
            "every sampling option."
        )
        advice.insert(0, advise(compare, requests=listed(names)))
    return advice, None


def _batch_advice(
    timeline: Timeline, excess: "PartExcess", evidence: SlowSteps, profile: Advice
) -> tuple[list[Advice], Gain | None]:
    advice, gain = [], None
    size = evidence.batch_size or 0
    if evidence.captured_tokens is not None:
        advice.append(
            advise(
                "Capture graphs for {most:n request}: a larger {option} (now {now:n}), or more "
                "{sizes:setting} where they are given.",
                setting="max_cudagraph_capture_size",
                most=int(excess.steps["total_requests"].max()),  # type: ignore[arg-type]  # integers
                now=evidence.captured_tokens,
                sizes="--cudagraph-capture-sizes",
                costs="Graphs take start-up time and device memory, so the KV cache gets smaller.",
            )
        )
    saved = _saved_us(excess, size)
    if saved is not None and saved[0] > 0 and (not timeline.seats or size < timeline.seats):
        name = timeline.seats_name
        gain = None if advice or not sets_pace(timeline) else throughput_gain(timeline, *saved)
        advice.append(
            advise(
                "Compare with a run with {option} {value:n}{now}: below that size the steps finish more "
                "tokens a second.",
                setting=name,
                value=size,
                now=current_value_note(timeline, name),
                costs="Requests above {value:n} wait for a seat.",
            )
        )
    return advice or [profile], gain


def _saved_us(excess: "PartExcess", size: int) -> tuple[float, float] | None:
    """Return the least and most time in microseconds saved if no decode batch exceeded a size.

    None: no step shows the time of batches near that size, or above it.
    """
    is_decode = (pl.col("prefill_tokens") == 0) & (pl.col("decode_tokens") > 0)
    steps = excess.steps.with_columns(took_us=pl.Series(excess.times_us)).filter(is_decode)
    below, above = (
        steps.filter(pl.col("total_requests") <= size),
        steps.filter(pl.col("total_requests") > size),
    )
    largest = below.filter(pl.col("total_requests") >= 0.9 * pl.col("total_requests").max())
    if largest.is_empty() or above.is_empty():
        return None
    each = largest.select(
        (pl.col("took_us") / pl.col("total_requests")).quantile(at).alias(str(at)) for at in (0.9, 0.1)
    ).row(0)
    scale = excess.all_steps / excess.steps.height
    took, requests = above.select(pl.col("took_us").sum(), pl.col("total_requests").sum()).row(0)
    least, most = (scale * (float(took) - float(requests) * cost) for cost in each)
    return least, most


def contradicts(slow: Finding, seats: Finding) -> bool:
    """Return whether the extra seats that ``seats`` advises would make more of the slow steps."""
    evidence = slow.evidence
    if not isinstance(evidence, SlowSteps) or seats.code != "max-num-seqs-bound":
        return False
    return evidence.part == "execution" and evidence.batch_size is not None and bool(slow.advice)


RULE = Rule(
    code="slow-steps",
    summary="steps that have something in common took longer than their work explains; one per part",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=_find,
    threshold=Threshold(LEAST_FRAC, share_frac),
    proven=(("execution", "max_num_seqs"),),
)
