"""``preemption``: running requests lost their KV blocks and have to compute again."""

import msgspec
import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import StepExample, step_finding
from schedtrace.model.causes import Cause
from schedtrace.model.message import Message
from schedtrace.model.report import Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

CRITICAL_RECOMPUTE_FRAC = 0.10
"""A tenth of all tokens computed for the second time is about a tenth of the throughput."""
MOST_VICTIMS = 10
"""That the evidence names."""


class RepeatVictim(msgspec.Struct, kw_only=True):
    """One request that was preempted more than once."""

    request_id: str
    """vLLM's id of the request."""
    times: int
    """Number of its preemptions."""


class PreemptionExample(StepExample, kw_only=True):
    """One preemption of a request."""

    request_id: str
    """Request that was preempted."""
    for_request_id: str | None
    """Request that it was preempted for; None: not recorded."""
    lost_tokens: int
    """Computed tokens that it lost."""

    @property
    def whom(self) -> Message:
        """For whose sake."""
        if self.for_request_id == self.request_id:
            return say("for blocks that it needed itself")
        return say("for [{for_request_id:id}][{for_request_id:!}a request that is not recorded]", self)


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
    examples: list[PreemptionExample]
    """Preemptions that lost most tokens."""


def _find(timeline: Timeline) -> Findings:
    lost = timeline.preemptions.filter(pl.col("in_schedule"))
    if lost.is_empty():
        return
    repeated = repeat_victims(lost)
    recomputed = int(timeline.steps["recomputed_tokens"].sum())
    computed = int(timeline.steps["used_tokens"].sum())
    part = recomputed / max(1, computed, recomputed)
    evidence = Preemptions(
        victims=lost["request_id"].n_unique(),
        repeat_victims=repeated[:MOST_VICTIMS],
        for_itself=lost.filter(pl.col("for_request_id") == pl.col("request_id")).height,
        lost_tokens=int(lost["lost_tokens"].sum()),
        recomputed_tokens=recomputed,
        computed_tokens=computed,
        examples=PreemptionExample.largest(lost, "lost_tokens"),
    )
    yield step_finding(
        timeline,
        lost,
        evidence,
        severity="critical" if part >= CRITICAL_RECOMPUTE_FRAC else "warning",
        cause=Cause.KV_BLOCKS,
        tokens=evidence.lost_tokens,
        message="{steps:n preemption}{trials} discarded {lost_tokens:n computed token} of "
        "{victims:n request}{repeated}. vLLM computed {recomputed_tokens:n token} again, {part:%} of all "
        "tokens computed.",
        values={"repeated": repeatedly(repeated), "part": part},
        example="{at} preempted {request_id:id} {whom}, which discarded {lost_tokens:n computed token}.",
    )


def repeat_victims(lost: pl.DataFrame) -> list[RepeatVictim]:
    """Requests with more than one of these preemptions, the most often preempted first."""
    times = lost.group_by("request_id", maintain_order=True).agg(pl.len().alias("times"))
    again = times.filter(pl.col("times") > 1).sort("times", descending=True, maintain_order=True)
    return [RepeatVictim(**row) for row in again.to_dicts()]


def repeatedly(victims: list[RepeatVictim]) -> Message:
    """``, 2 of them repeatedly (r4 3 times)``."""
    worst: RepeatVictim | None = victims[0] if victims else None
    return say("[, {count:n} of them repeatedly ({request_id:id} {times:n time})]", worst, count=len(victims))


RULE = Rule(
    code="preemption",
    summary="running requests lost their KV blocks and had to compute again",
    needs=frozenset({Fact.PREEMPTIONS}),
    find=_find,
    symptom_of=("kv-bound", "no-progress"),
)
