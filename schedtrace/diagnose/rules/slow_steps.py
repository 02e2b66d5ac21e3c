"""``slow-steps``: steps that share something took longer than their tokens explain."""

import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import now
from schedtrace.diagnose.rules.common import Cost, StepExample, advise, listed, said, step_finding
from schedtrace.diagnose.step_groups import TRAITS, SlowGroup, StepGroup, judged_steps, slow_groups
from schedtrace.model.message import Message, Requests, joined
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.events import FIRST
from schedtrace.timeline.timeline import Timeline

LEAST_FRAC = 0.01
"""Share of the requests' time."""
MOST_REQUESTS = 3
"""More requests that come and go together are a phase of the load, not one request's presence."""

KINDS = {
    "batch_size": ("Slow steps above {size:n request}", "Steps above {size:n request}"),
    "trait": ("Slow steps with {trait}", "Steps with {trait}"),
    "request": ("Slow steps with one request", "Steps with {requests}"),
    "mixed": ("Slow steps that mix prefill and decode", "Steps that mix prefill and decode"),
    "first_steps": ("Slow first steps", "The first {size:n step}"),
    "first_use": ("Slow first step of a batch size", "The first steps of each batch size"),
}
"""Kind of a group to the finding's title, and to what its steps are called."""
PROFILE = "Profile one of these steps: the trace does not see inside a step."


class SlowStep(StepExample, kw_only=True):
    """A step that was slow for its size."""

    total_requests: int
    """Number of requests that the step scheduled."""
    busy_us: int
    """Time from the step's start to its output."""
    expected_us: float
    """Time that the step-time model expects."""


class SlowSteps(Evidence, kw_only=True):
    """Steps slow for their size, and what they share."""

    kind: str
    """What the steps share: ``batch_size``, ``trait``, ``request``, ``mixed``, ``first_steps`` or
    ``first_use``."""
    batch_size: int | None
    """Largest batch below them, of ``batch_size``."""
    trait: str | None
    """What their requests ask for, of ``trait``."""
    request_ids: list[str]
    """Requests that only these steps scheduled, of ``request`` and ``trait``."""
    also: list[str]
    """Kinds of the groups that explain nearly as much."""
    factor: float
    """Median of actual over expected time."""
    busy_ms: float
    """Time of these steps."""
    expected_ms: float
    """Time that the step-time model expects."""
    model_error_frac: float
    """Median relative error of the model on the other steps."""
    captured_tokens: int | None
    """Tokens of the largest captured CUDA graph, if it parts the slow decode steps from the others; else
    None."""
    examples: list[SlowStep]
    """Steps with the largest excess."""


def _find(timeline: Timeline) -> Findings:
    if (timeline.header.pipeline_parallel_size or 1) > 1:
        return  # batches in flight share the stages, so a step's time is not its own
    slow = slow_groups(timeline)
    total_us = timeline.requests_us if slow else 0
    if not slow or not total_us:
        return
    best, requests = slow[0], _requests(slow)
    # By the group's factor, not step by step: one step that waited for something else is not what they share.
    excess = best.steps.with_columns(excess_us=pl.col("expected_us") * (best.factor - 1))
    felt_us = excess.select((pl.col("excess_us") * pl.col("total_requests")).sum()).item()
    excess_us = float(excess["excess_us"].sum())
    share = min(1.0, felt_us / total_us)
    if _interruptions(timeline, best):
        return
    if share < LEAST_FRAC or (best.group.kind == "request" and len(requests) > MOST_REQUESTS):
        return
    captured = captured_tokens(timeline, best)
    alternatives = _other_explanations(slow, requests)
    title, _ = KINDS[best.group.kind]
    yield step_finding(
        timeline,
        best.steps,
        SlowSteps(
            kind=best.group.kind,
            batch_size=best.group.size if best.group.kind == "batch_size" else None,
            trait=best.group.trait,
            request_ids=list(requests),
            also=[group.kind for group in alternatives],
            factor=best.factor,
            busy_ms=int(best.steps["busy_us"].sum()) / 1e3,
            expected_ms=int(best.steps["expected_us"].sum()) / 1e3,
            model_error_frac=best.error_frac,
            captured_tokens=captured,
            examples=SlowStep.first(
                best.steps.sort(
                    pl.col("busy_us") - pl.col("expected_us"), descending=True, maintain_order=True
                )
            ),
        ),
        title=_said(title, best.group, requests),
        verdict="{subject} take {factor:n1} times as long as their tokens explain; the excess is "
        "{share:%} of the requests' time.",
        share_frac=share,
        holder=_holder(best.group, requests, alternatives, captured),
        message="{steps:n such step} took {busy_ms:ms} on the device; a model of all other steps expects "
        "{expected_ms:ms} (typical error {model_error_frac:%}). This is a correlation; an A/B run proves "
        "it.",
        values={"subject": _subject(best.group, requests)},
        advice=_advice(timeline, best, requests, captured),
        example="{at} with {total_requests:n request} took {busy_us:us} instead of {expected_us:us}.",
        cost=Cost(excess_us / 1e3, excess_us / timeline.busy_us, best.error_frac),
    )


def captured_tokens(timeline: Timeline, slow: SlowGroup) -> int | None:
    """Tokens of the largest captured CUDA graph, if the slow decode steps have more and the others not.

    None: none is captured, the header does not record it, or the cliff is elsewhere.
    """
    settings = timeline.header.settings
    sizes = settings.get("compilation_config.cudagraph_capture_sizes") or []
    largest = settings.get("compilation_config.max_cudagraph_capture_size") or max(sizes, default=0)
    if not largest or settings.get("compilation_config.cudagraph_mode") == "NONE":
        return None
    decodes = judged_steps(timeline).filter(pl.col("prefill_tokens") == 0)
    inside = pl.col("step").is_in(slow.group.members.implode())
    of_others, of_slow = decodes.filter(~inside), decodes.filter(inside)
    fits = of_others.height and of_others.select((pl.col("used_tokens") <= largest).all()).item()
    exceeds = of_slow.height and of_slow.select((pl.col("used_tokens") > largest).all()).item()
    return int(largest) if slow.group.kind == "batch_size" and fits and exceeds else None


def _interruptions(timeline: Timeline, slow: SlowGroup) -> bool:
    """Return whether most of the excess of the first steps is an ``interruption``."""
    if slow.group.kind != "first_steps":
        return False
    steps = timeline.events.filter(pl.col("kind") == FIRST)["step"].implode()
    excess = slow.steps.with_columns(us=pl.col("busy_us") - pl.col("expected_us"))
    return bool(2 * excess.filter(pl.col("step").is_in(steps))["us"].sum() > excess["us"].sum())


def _requests(slow: list[SlowGroup]) -> tuple[str, ...]:
    """Return the requests that the slow steps share, those of near ties included."""
    if slow[0].group.kind != "request":
        return slow[0].group.requests
    return tuple(slow_group.group.requests[0] for slow_group in slow if slow_group.group.kind == "request")


def _other_explanations(slow: list[SlowGroup], requests: tuple[str, ...]) -> list[StepGroup]:
    """Near ties that say something else: another kind of group, or another trait of the same requests."""
    best, *rest = (group.group for group in slow)
    different = [group for group in rest if group.kind == "trait" or group.kind != best.kind]
    named = [group for group in different if group.kind == "request"]
    return [
        group
        for group in different
        if group.kind != "request"
        or (len(named) <= MOST_REQUESTS and not set(group.requests) <= set(requests))
    ]


def _subject(group: StepGroup, requests: tuple[str, ...]) -> Message:
    """Return what the group's steps are called."""
    _, subject = KINDS[group.kind]
    return _said(subject, group, requests)


def _said(template: str, group: StepGroup, requests: tuple[str, ...]) -> Message:
    trait = TRAITS[group.trait].words if group.trait else None
    values = {"size": group.size or 0, "trait": trait, "requests": Requests(list(requests), len(requests))}
    return said(template, values=values)


def _holder(
    group: StepGroup, requests: tuple[str, ...], alternatives: list[StepGroup], captured: int | None
) -> Message:
    """Say which requests, or what else, go with the slow steps."""
    parts = []
    if captured is not None:
        parts.append(
            say(
                "The largest captured CUDA graph ({sizes:setting}) holds {tokens:n token}; larger batches "
                "run without one.",
                sizes="cudagraph_capture_sizes",
                tokens=captured,
            )
        )
    elif group.kind == "trait":
        parts.append(_said("They schedule {requests}.", group, requests))
    if alternatives:
        also = listed([_subject(alternative, alternative.requests) for alternative in alternatives])
        parts.append(say("Nearly as good an explanation: {also}.", also=also))
    return joined(parts)


def _advice(
    timeline: Timeline, slow: SlowGroup, requests: tuple[str, ...], captured: int | None
) -> list[Advice]:
    match slow.group.kind:
        case "batch_size":
            return _batch_advice(timeline, slow, captured) or [advise(PROFILE)]
        case "trait" | "request":
            without = "Run the same load without {requests} and compare the two with {diff:code}."
            named = Requests(list(requests), len(requests))
            return [advise(without, requests=named, diff="schedtrace diff")]
        case "mixed":
            return [advise(PROFILE)]
        case _:
            return [
                advise(
                    "Warm the engine up with batches of these sizes before it serves or is measured "
                    "({warmup:setting} of {run:code}).",
                    warmup="--warmup",
                    run="schedtrace run",
                )
            ]


def _batch_advice(timeline: Timeline, slow: SlowGroup, captured: int | None) -> list[Advice]:
    advice = []
    if captured is not None:
        advice.append(
            advise(
                "Capture graphs for {most:n request}: a larger {option} (now {now:n}), or more "
                "{sizes:setting} where they are given.",
                setting="max_cudagraph_capture_size",
                most=int(slow.steps["total_requests"].max()),  # type: ignore[arg-type]  # integers
                now=captured,
                sizes="--cudagraph-capture-sizes",
                costs="Graphs take start-up time and device memory, so the KV cache gets smaller.",
            )
        )
    if _loses_throughput(timeline, slow):
        name = timeline.seats_name
        advice.append(
            advise(
                "Compare with a run with {option} {value:n}{now}: below that size the steps finish more "
                "tokens a second.",
                setting=name,
                value=slow.group.size or 0,
                now=now(timeline, name),
                costs="Requests above {value:n} wait for a seat.",
            )
        )
    return advice


def _loses_throughput(timeline: Timeline, slow: SlowGroup) -> bool:
    """Return whether decode steps of the size below the cliff finish more requests' tokens a second."""
    decodes = judged_steps(timeline).filter(pl.col("prefill_tokens") == 0)
    rate = pl.col("total_requests") / pl.col("busy_us")
    size = pl.col("total_requests")
    at_cliff = decodes.filter(size <= slow.group.size).filter(size == size.max())
    above = decodes.filter(size > slow.group.size)
    return bool((at_cliff.select(rate.median()).item() or 0) > (above.select(rate.median()).item() or 0))


RULE = Rule(
    code="slow-steps",
    summary="steps that share a batch size, a request or another trait took longer than their tokens explain",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES}),
    find=_find,
    proven=((None, "max_num_seqs"),),
)
