"""``preemption``: running requests lost their KV blocks and had to compute tokens again."""

from typing import Any

import msgspec
import polars as pl

from schedtrace.diagnose.kv_cache import resumptions, steps_per_block
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import Cost, StepExample, prefill_cost, said, step_finding
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

CRITICAL_RECOMPUTE_FRAC = 0.10
"""Share of recomputed tokens from which the finding is critical; it costs about as much throughput."""
MOST_VICTIMS = 10
"""Maximum number of requests that the evidence names."""
OFTEN = 3
"""Preemptions of one request that make a storm; the third shows that resuming does not help."""
FEWEST_PREEMPTIONS = 3
MUCH_FRAC = 0.10
"""Share of prefill done twice that makes a storm, with ``FEWEST_PREEMPTIONS`` or more."""
STORM_NEEDS = frozenset({Fact.REQUESTS, Fact.BLOCKS, Fact.TIMES})
"""Facts that a record must contain so that a storm can be judged."""
STORM = (
    " It is a storm: {cycles:n} came within {cycle_steps:n step} of admission, and {prefill_again_frac:%} of "
    "all prefill was done twice. The first was in {first_step:step} with {first_running:n request} running"
    "[ and {first_used_frac:%} of the KV cache in use]."
)
STORM_EXAMPLE = (
    "{at} preempted {request_id:id}[ (its preemption number {num_preemptions:n})][ {lasted_steps:n step} "
    "after its admission]: it lost {lost_tokens:n computed token} and was away for {away_us:us}."
)


class RepeatVictim(msgspec.Struct, kw_only=True):
    """A request that was preempted more than once."""

    request_id: str
    """vLLM's id of the request."""
    times: int
    """Number of its preemptions."""


class PreemptionExample(StepExample, kw_only=True):
    """Preemption of a request."""

    request_id: str
    """Request that was preempted."""
    for_request_id: str | None
    """Request for which it was preempted; None: not recorded."""
    lost_tokens: int
    """Computed tokens that it lost."""

    @property
    def whom(self) -> Message:
        """Words for the request that got the blocks."""
        if self.for_request_id == self.request_id:
            return say("for blocks that it needed itself")
        return say("for [{for_request_id:id}][{for_request_id:!}a request that is not recorded]", self)


class StormExample(StepExample, kw_only=True):
    """Preemption, and the time until its victim was admitted again."""

    request_id: str
    """Request that was preempted."""
    num_preemptions: int | None
    """Number of its preemptions, this one included."""
    lost_tokens: int
    """Computed tokens that it lost."""
    lasted_steps: int | None
    """Steps from its admission to the preemption."""
    resumed_step: int | None
    """Step that admitted it again; None: no step did."""
    away_us: int
    """Time from the start of the step that preempted it to that of the step that admitted it again; to its
    end, or to the trace's last output, if none did."""


class Storm(msgspec.Struct, kw_only=True):
    """Preemptions of the same requests again and again, or of much work."""

    cycles: int
    """Number of preemptions within ``cycle_steps`` of an admission."""
    cycle_steps: int
    """Number of steps that makes a cycle."""
    prefill_again_frac: float
    """Share of all prefill that was done twice."""
    first_step: int
    """First step that preempted a request."""
    first_running: int
    """Number of running requests before it."""
    first_used_frac: float | None
    """Share of KV blocks in use before it: ``1 - kv_blocks_free_before / (kv_blocks_total - 1)`` (one block
    is vLLM's null block); None: not known."""
    examples: list[StormExample]
    """Longest absences, of the requests hit most often if any was hit again."""


class Preemptions(Evidence, kw_only=True):
    """Preempted requests and their tokens."""

    victims: int
    """Number of different preempted requests."""
    repeat_victims: list[RepeatVictim]
    """Up to ten requests that were preempted more than once, most often preempted first."""
    for_itself: int
    """Number of preemptions in which the victim is the request whose allocation failed."""
    lost_tokens: int
    """Computed tokens that were lost."""
    recomputed_tokens: int
    """Tokens that were computed again."""
    computed_tokens: int
    """All computed tokens."""
    storm: Storm | None
    """Figures of a storm; None: there is no storm, or the record lacks the facts that show it."""
    examples: list[PreemptionExample]
    """Preemptions that lost the most tokens."""


def _find(timeline: Timeline) -> Findings:
    lost = timeline.preemptions.filter(pl.col("in_schedule"))
    if lost.is_empty():
        return
    repeated = repeat_victims(lost)
    recomputed = int(timeline.steps["recomputed_tokens"].sum())
    computed = int(timeline.steps["used_tokens"].sum())
    part = recomputed / max(1, computed, recomputed)
    storm = _storm(timeline, repeated, recomputed)
    cost = prefill_cost(timeline, recomputed) if storm else Cost()
    critical = part >= CRITICAL_RECOMPUTE_FRAC or cost.severity(unknown="warning") == "critical"
    evidence = Preemptions(
        victims=lost["request_id"].n_unique(),
        repeat_victims=repeated[:MOST_VICTIMS],
        for_itself=lost.filter(pl.col("for_request_id") == pl.col("request_id")).height,
        lost_tokens=int(lost["lost_tokens"].sum()),
        recomputed_tokens=recomputed,
        computed_tokens=computed,
        storm=storm,
        examples=PreemptionExample.largest(lost, "lost_tokens"),
    )
    yield step_finding(
        timeline,
        lost,
        evidence,
        severity="critical" if critical else "warning",
        cause=Cause.KV_BLOCKS,
        tokens=evidence.lost_tokens,
        message="{steps:n preemption}{trials} discarded {lost_tokens:n computed token} of "
        "{victims:n request}{repeated}. vLLM computed {recomputed_tokens:n token} again, {part:%} of all "
        "tokens computed.{of_storm}",
        values={
            "repeated": repeatedly(repeated),
            "part": part,
            "of_storm": say(STORM, storm) if storm else NOTHING,
        },
        example=said(STORM_EXAMPLE, storm.examples[0])
        if storm
        else "{at} preempted {request_id:id} {whom}, which discarded {lost_tokens:n computed token}.",
        cost=cost,
    )


def _storm(timeline: Timeline, repeated: list[RepeatVictim], recomputed: int) -> Storm | None:
    """Return the figures of a preemption storm; None if there is none, or the trace cannot show one."""
    if not timeline.facts >= STORM_NEEDS:
        return None
    lost = resumptions(timeline)
    prefill = int((timeline.steps["used_tokens"] - timeline.steps["decode_tokens"]).sum())
    part = recomputed / max(1, prefill, recomputed)
    often = bool(repeated) and repeated[0].times >= OFTEN
    if not often and (lost.height < FEWEST_PREEMPTIONS or part < MUCH_FRAC):
        return None
    first = timeline.steps.filter(pl.col("step").is_in(pl.lit(lost["step"]).implode())).row(0, named=True)
    most = [victim.request_id for victim in repeated if victim.times == repeated[0].times]
    shown = lost.filter(pl.col("request_id").is_in(most)) if most else lost
    return Storm(
        cycles=lost.filter("cycle").height,
        cycle_steps=steps_per_block(timeline),
        prefill_again_frac=part,
        first_step=first["step"],
        first_running=first["num_running_before"],
        first_used_frac=_used_frac(first),
        examples=StormExample.largest(shown, "away_us"),
    )


def _used_frac(step: dict[str, Any]) -> float | None:
    """Return the share of the KV blocks in use before a step, without vLLM's null block."""
    total, free = step["kv_blocks_total"], step["kv_blocks_free_before"]
    if free is None or total is None or total < 2:  # noqa: PLR2004  # no block but the null block
        return None
    return float(1 - free / (total - 1))


def repeat_victims(lost: pl.DataFrame) -> list[RepeatVictim]:
    """Return the requests with more than one of these preemptions, the most often preempted first."""
    times = lost.group_by("request_id", maintain_order=True).agg(pl.len().alias("times"))
    again = times.filter(pl.col("times") > 1).sort("times", descending=True, maintain_order=True)
    return [RepeatVictim(**row) for row in again.to_dicts()]


def repeatedly(victims: list[RepeatVictim]) -> Message:
    """Return ``, 2 of them repeatedly (r4 3 times)``."""
    worst: RepeatVictim | None = victims[0] if victims else None
    return say("[, {count:n} of them repeatedly ({request_id:id} {times:n time})]", worst, count=len(victims))


RULE = Rule(
    code="preemption",
    summary="running requests lost their KV blocks and had to compute again",
    needs=frozenset({Fact.PREEMPTIONS}),
    find=_find,
    symptom_of=("kv-bound", "no-progress"),
)
