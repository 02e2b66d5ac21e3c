"""``slow-steps``: steps took longer than their work explains, grouped by what they have in common.

Slow steps that nothing marks are a separate finding if they cost much.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from schedtrace.diagnose.excess_features import StepPhase, slow_phases
from schedtrace.diagnose.excess_words import (
    PARTS,
    SECONDS,
    compared_facts,
    steps_subject,
    tie_clause,
    title,
    trend,
)
from schedtrace.diagnose.gains import sets_pace, throughput_gain
from schedtrace.diagnose.rule import Findings, Rule, Threshold, share_frac
from schedtrace.diagnose.rules.allowed_settings import async_scheduling, current_value_note
from schedtrace.diagnose.rules.common import advise, largest, listed, step_finding
from schedtrace.diagnose.rules.slow_step_remedies import profile_advice, remedies, would_tell
from schedtrace.diagnose.rules.spec_decode import larger_steps
from schedtrace.model.message import NOTHING, Message, Number, Request, Steps, joined
from schedtrace.model.report import Advice, Evidence, Finding, Gain
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.events import FIRST
from schedtrace.timeline.timeline import Timeline

if TYPE_CHECKING:
    from schedtrace.diagnose.excess import Effect, PartExcess
    from schedtrace.diagnose.excess_candidates import Explanation

LEAST_FRAC = 0.01
"""Minimum share of the requests' time that an effect must cost to be reported."""
LEAST_UNMARKED_FRAC = 0.05
"""Minimum share of the requests' time, or of the busy time, that slow steps without a mark must cost, in
addition to ``LEAST_FRAC``."""
LEAST_IN_PHASES_FRAC = 0.5
"""Minimum share of the unmarked slow steps' excess that must lie in phases for the phases to be reported."""
HIDDEN = 0.95
"""Share of an excess from which on the message does not state how much of the excess the device waited."""
BEYOND_FRAC = 0.02
"""Maximum share of decode steps that contradict a captured graph's size as the limit of the fast steps."""
WHOLE_FROM = 10.0
"""Factor from which on the verdict rounds factors to a whole number."""
MOST_BY_CHANCE = 0.1
"""Maximum probability of a coincidence if requests start and end with a range of slow steps."""


class Condition(msgspec.Struct, kw_only=True):
    """Condition that the slow steps meet."""

    feature: str
    """Compared feature, for example ``batch`` or ``period``."""
    detail: str = ""
    """Name of the exit, trait, adapter or request."""
    more_than: float | None = None
    """Value above which steps are slow; None if the condition has no lower bound."""
    at_most: float | None = None
    """Value up to which steps are slow; None if the condition has no upper bound."""


class SlowPhase(msgspec.Struct, kw_only=True):
    """Stretch of time in which most steps are slow."""

    first_step: int
    """Number of the first slow step."""
    last_step: int
    """Number of the last slow step."""
    begin_us: int
    """Beginning of the phase, in microseconds since the recording began."""
    length_us: int
    """Length of the phase in microseconds."""

    @property
    def phase_steps(self) -> Steps:
        """Range of steps from the first slow one to the last."""
        return Steps(self.first_step, self.last_step)


class SlowSteps(Evidence, kw_only=True):
    """Steps that took longer than their work explains, and what they have in common."""

    part: str
    """Part of the step: ``execution``, ``schedule``, ``update`` or ``between``."""
    conditions: list[Condition]
    """Conditions that the slow steps share; for a trend, the value from which the time grows."""
    per_unit_us: float | None
    """Time in microseconds that each unit of a trend's feature adds; None without a trend."""
    looked_at: int
    """Number of examined steps."""
    inside: int
    """Number of examined steps that meet the conditions."""
    longer: int
    """Number of steps in ``inside`` that exceed the time of their work by more than half of ``excess_ms``."""
    outside: int
    """Number of examined steps that do not meet the conditions."""
    longer_outside: int
    """Number of steps in ``outside`` that exceed the time of their work by more than half of ``excess_ms``.
    """
    excess_ms: float
    """Median time in milliseconds by which the steps in ``inside`` exceed the time of their work."""
    factor: float
    """Median ratio of actual to expected time over the steps in ``inside``."""
    unexplained_frac: float | None
    """Share of the excess of all slow steps in this part that nothing in the trace explains."""
    model_error_frac: float
    """Typical relative error of the model of the expected time."""
    batch_size: int | None
    """Largest batch size that is not slow; None if the batch size is not a condition."""
    captured_tokens: int | None
    """Size in tokens of the largest captured CUDA graph, if only larger decode steps are slow; else None."""
    starting: list[str]
    """Requests whose first step is the first of a range of slow steps; empty if the slow steps are no range,
    or if this may be a coincidence."""
    ending: list[str]
    """Requests whose last step is the last of a range of slow steps; empty as for ``starting``."""
    phases: list[SlowPhase]
    """Phases of the slow steps if they recur at a period; empty if not."""


class UnmarkedSteps(Evidence, kw_only=True):
    """Steps that took longer than their work explains, and that no recorded feature marks."""

    part: str
    """Part of the step: ``execution``, ``schedule``, ``update`` or ``between``."""
    looked_at: int
    """Number of examined steps."""
    slow: int
    """Number of examined slow steps that no feature marks."""
    excess_ms: float
    """Total time in milliseconds by which such steps, in the whole run, exceed the time of their work."""
    first_step: int
    """First of the examined slow steps."""
    last_step: int
    """Last of the examined slow steps."""
    phases: list[SlowPhase]
    """Phases of slow steps; empty if less than half of the excess lies in phases."""
    model_error_frac: float
    """Typical relative error of the model of the work."""


def _find(timeline: Timeline) -> Findings:
    from schedtrace.diagnose.excess import (  # noqa: PLC0415  # SciPy loads late
        SEVERAL,
        every_effect,
        is_clock_range,
        part_excesses,
    )

    if not timeline.requests_us:
        return
    unmarked = []
    for excess in part_excesses(timeline):
        left = excess.unmarked
        share, of_busy = left.felt_us / timeline.requests_us, left.cost_us / timeline.busy_us
        if share >= LEAST_FRAC and max(share, of_busy) >= LEAST_UNMARKED_FRAC:
            unmarked.append(excess)
    yield from (_unmarked_finding(timeline, excess) for excess in unmarked)
    for excess, effect in every_effect(timeline):
        has_phases = excess in unmarked and len(excess.unmarked.phases) >= SEVERAL
        if has_phases and is_clock_range(effect.explanation):
            continue  # the finding about all phases names this phase
        share = min(1.0, effect.felt_us / timeline.requests_us)
        if share < LEAST_FRAC or _is_reported_elsewhere(timeline, excess, effect):
            continue
        evidence: SlowSteps = _evidence(timeline, excess, effect)
        subject = steps_subject(excess, effect)
        slow = excess.steps.with_columns(
            took_us=pl.Series(excess.times_us),
            expected_us=pl.Series(excess.expected_us),
        ).filter(pl.Series(effect.inside))
        advice, gain = _advice(timeline, excess, effect, evidence)
        yield step_finding(
            timeline,
            slow,
            evidence,
            title=title(excess, effect, subject),
            verdict=JUMP
            if evidence.per_unit_us is None
            else trend(excess, effect, evidence.per_unit_us, share),
            share_frac=share,
            gain=gain,
            cause=excess.part,
            holder=_holder(excess, effect, evidence),
            message=MESSAGE,
            values={
                "subject": subject,
                "where": PARTS[excess.part],
                "times": Number(evidence.factor, 0 if evidence.factor >= WHOLE_FROM else 1),
                "rest": say("; {longer_outside:n} of the other {outside:n} do", evidence)
                if evidence.longer_outside
                else say("; none of the other {outside:n} does", evidence),
                "longer_ms": effect.added_us / 1e3,
                "exposed_ms": effect.cost_us / 1e3 if effect.cost_us < HIDDEN * effect.added_us else None,
                "sample": say(" in a sample of {looked_at:n step}", evidence)
                if excess.is_sample
                else NOTHING,
            },
            advice=advice,
            example="{at} with {total_requests:n request} took {took_us:us} instead of {expected_us:us}.",
            cases=slow.sort(pl.col("took_us") - pl.col("expected_us"), descending=True, maintain_order=True),
            cost_ms=effect.cost_us / 1e3,
            cost_frac=effect.cost_us / timeline.busy_us,
            cost_error_frac=excess.error_frac,
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


def _unmarked_finding(timeline: Timeline, excess: "PartExcess") -> Finding:
    """Return the finding about slow steps that no feature in the trace marks."""
    left = excess.unmarked
    rows = excess.steps[["step", "trial", "total_requests"]].with_columns(
        took_us=pl.Series(excess.times_us),
        expected_us=pl.Series(excess.expected_us),
        left_us=pl.Series(left.excess_us),
    )
    slow = rows.filter(pl.col("left_us") > 0)
    phases = _phases(timeline, left.phases)
    in_phase = pl.any_horizontal(
        pl.lit(value=False), *(pl.col("step").is_between(p.first_step, p.last_step) for p in phases)
    )
    in_phases_us = float(slow.filter(in_phase)["left_us"].sum())
    total_us = float(slow["left_us"].sum())
    evidence = UnmarkedSteps(
        part=excess.part,
        looked_at=excess.steps.height,
        slow=slow.height,
        excess_ms=total_us * excess.all_steps / excess.steps.height / 1e3,
        first_step=int(slow["step"][0]),
        last_step=int(slow["step"][-1]),
        phases=phases if in_phases_us >= LEAST_IN_PHASES_FRAC * total_us else [],
        model_error_frac=excess.error_frac,
    )
    return step_finding(
        timeline,
        slow,
        evidence,
        title="Slow steps that nothing in this trace explains",
        verdict="{slow:n} of {looked_at:n step} took longer {where} than their work explains, {excess_ms:ms} "
        "in total: {share:%} of the requests' time. Nothing in this trace tells why.",
        share_frac=min(1.0, left.felt_us / timeline.requests_us),
        cause=f"{excess.part} unexplained",
        holder=say("They lie in {phases}.", phases=_when(evidence.phases))
        if evidence.phases
        else say("They are spread over {span}.", span=Steps(evidence.first_step, evidence.last_step)),
        message="These recorded facts do not mark them: {compared_facts}. A model of their work is off by "
        "{model_error_frac:%} (typical error).",
        values={"where": PARTS[excess.part], "compared_facts": joined(compared_facts(excess.compared), ", ")},
        advice=[would_tell(excess.part)],
        example="{at} with {total_requests:n request} took {took_us:us} instead of {expected_us:us}.",
        cases=largest(slow, "left_us"),
        cost_ms=left.cost_us / 1e3,
        cost_frac=left.cost_us / timeline.busy_us,
        cost_error_frac=excess.error_frac,
    )


def _phases(timeline: Timeline, phases: "Sequence[StepPhase]") -> list[SlowPhase]:
    return [
        SlowPhase(
            first_step=phase.first_step,
            last_step=phase.last_step,
            begin_us=phase.begin_us + timeline.offset_us,
            length_us=phase.end_us - phase.begin_us,
        )
        for phase in phases
    ]


def _when(phases: list[SlowPhase]) -> Message:
    """State the number of the phases, their lengths, and when the first and the last occurred."""
    first, *later = phases
    return say(
        "{count:n phase} of {shortest:us}[ to {longest:us}], [{later:?}the first ]{begin_us:us} into the "
        "recording ({phase_steps})[, the last after {last:us} ({last_steps})]",
        first,
        count=len(phases),
        shortest=min(phase.length_us for phase in phases),
        longest=max(phase.length_us for phase in phases) if later else None,
        later=bool(later),
        last=later[-1].begin_us if later else None,
        last_steps=later[-1].phase_steps if later else NOTHING,
    )


def _is_reported_elsewhere(timeline: Timeline, excess: "PartExcess", effect: "Effect") -> bool:
    """Return whether ``interruption`` or ``spec-decode`` reports these steps.

    ``interruption`` does if most of the added time is in first steps, and ``spec-decode`` if only drafts
    explain the time and are a loss.
    """
    first = timeline.events.filter(pl.col("kind") == FIRST)["step"]
    inside = pl.Series(effect.inside & excess.steps["step"].is_in(first.implode()).to_numpy())
    added = pl.Series(effect.excess_us)
    if 2 * added.filter(inside).sum() > added.sum():
        return True
    return effect.explanation.feature_families == {"drafts"} and larger_steps(timeline) is not None


def _evidence(timeline: Timeline, excess: "PartExcess", effect: "Effect") -> SlowSteps:
    explanation, inside = effect.explanation, effect.inside
    added = effect.excess_us[inside]
    per_unit_us = None
    if explanation.slope:
        (term,) = explanation.terms
        per_unit_us = float(np.median(added / (term.feature.values[inside] - term.cut)))
    unexplained_frac = excess.unexplained_us / excess.excess_us if excess.excess_us else 0.0
    starting, ending = _at_the_ends(timeline, excess, effect)
    returns = any(term.feature.kind == "period" for term in explanation.terms)
    conditions = []
    for term in explanation.terms:
        cut = term.cut if term.feature.kind in SECONDS else float(math.floor(term.cut))
        side = {"more_than": cut} if term.above else {"at_most": cut}
        conditions.append(Condition(feature=term.feature.kind, detail=term.feature.detail, **side))
    return SlowSteps(
        part=excess.part,
        conditions=conditions,
        per_unit_us=per_unit_us,
        looked_at=excess.steps.height,
        inside=int(inside.sum()),
        longer=int(effect.longer[inside].sum()),
        outside=int((~inside).sum()),
        longer_outside=int(effect.longer[~inside].sum()),
        excess_ms=float(np.median(added)) / 1e3,
        factor=effect.factor,
        unexplained_frac=unexplained_frac if unexplained_frac >= LEAST_FRAC else None,
        model_error_frac=excess.error_frac,
        batch_size=_cliff(explanation),
        captured_tokens=captured_tokens(timeline, excess, effect),
        starting=starting,
        ending=ending,
        phases=_phases(timeline, slow_phases(excess.steps, inside)) if returns else [],
    )


def _at_the_ends(timeline: Timeline, excess: "PartExcess", effect: "Effect") -> tuple[list[str], list[str]]:
    """Return the requests that start with a range of slow steps, and those that end with it.

    Both lists are empty if the slow steps are not a range, if the range has an open end, or if so many steps
    start and end requests that both may be a coincidence.
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


def _cliff(explanation: "Explanation") -> int | None:
    """Return the largest batch size that is not slow; None if the batch size is not a condition."""
    if explanation.slope:
        return None
    sizes = [
        math.floor(term.cut)
        for term in explanation.terms
        if term.above and term.feature.kind in ("batch", "decode_tokens", "running")
    ]
    return max(sizes, default=None)


def _holder(excess: "PartExcess", effect: "Effect", evidence: SlowSteps) -> Message:
    """Name phases, requests at the ends of a range, captured graphs, and equally good explanations."""
    parts = []
    if evidence.phases:
        parts.append(
            say(
                "{phases}. Nothing else in this trace goes with them, so it does not tell why.",
                phases=_when(evidence.phases),
            )
        )
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

    None if no graph is captured, the header does not record it, or the jump in time is elsewhere.
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

    If another cause explains equally much, the only advice is to profile a slow step.
    """
    explanation = effect.explanation
    profile = profile_advice(excess, explanation)
    if explanation.also:
        return [profile], None
    if evidence.batch_size is not None and excess.part == "execution":
        return _batch_advice(timeline, excess, evidence, profile)
    advice = remedies(timeline, excess.part, explanation.terms) or [profile]
    if evidence.starting:
        names = [say("{request}", request=Request(name)) for name in evidence.starting + evidence.ending]
        compare = (
            "Compare what {requests} ask for with what other requests ask for: the trace does not record "
            "every sampling option."
        )
        advice.insert(0, advise(compare, requests=listed(names)))
    if excess.part != "execution" and timeline.header.async_scheduling is False:
        advice.insert(0, async_scheduling())
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
    """Return the least and most microseconds saved if no decode batch had more requests than ``size``.

    None if no step shows the time of batches near that size, or of larger ones.
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
    """Return whether the additional seats that ``seats`` advises would make such slow steps more frequent."""
    evidence = slow.evidence
    if not isinstance(evidence, SlowSteps) or seats.code != "max-num-seqs-bound":
        return False
    return evidence.part == "execution" and evidence.batch_size is not None and bool(slow.advice)


RULE = Rule(
    code="slow-steps",
    summary="steps took longer than their work explains: steps that have something in common, or that "
    "nothing in the trace marks; one of each kind per part",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=_find,
    threshold=Threshold(LEAST_FRAC, share_frac),
    proven=(("execution", "max_num_seqs"),),
)
