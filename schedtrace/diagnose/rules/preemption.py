"""``preemption``: running requests lost their KV blocks and have to compute again."""

import msgspec
import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import StepExample, in_trials, step_numbers, trial_numbers
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Count, Message, Number, Request, Share, message
from schedtrace.model.report import Evidence, Finding
from schedtrace.timeline.timeline import Timeline

CODE = "preemption"
CRITICAL_RECOMPUTE_FRAC = 0.10
"""A tenth of all tokens computed for the second time is about a tenth of the throughput."""
MOST_VICTIMS = 10
"""That the evidence names."""


class RepeatVictim(msgspec.Struct, kw_only=True):
    """One request that was preempted more than once."""

    request_id: str
    times: int


class PreemptionExample(StepExample, kw_only=True):
    """One preemption."""

    request_id: str
    for_request_id: str | None
    lost_tokens: int
    num_preemptions: int | None


class Preemptions(Evidence, kw_only=True):
    """Preempted requests and their tokens."""

    victims: int
    repeat_victims: list[RepeatVictim]
    for_another_request: int
    for_itself: int
    lost_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    examples: list[PreemptionExample]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/preemption.md``."""
    lost = timeline.preemptions.filter(pl.col("in_schedule"))
    if lost.is_empty():
        return []
    repeated = repeat_victims(lost)
    victims = lost["request_id"].n_unique()
    trials = trial_numbers(lost)
    tokens = int(lost["lost_tokens"].sum())
    recomputed = int(timeline.steps["recomputed_tokens"].sum())
    computed = int(timeline.steps["used_tokens"].sum())
    part = recomputed / max(1, computed, recomputed)
    examples = PreemptionExample.first(lost.sort("lost_tokens", "step", descending=[True, False]))
    return [
        Finding(
            code=CODE,
            severity="critical" if part >= CRITICAL_RECOMPUTE_FRAC else "warning",
            cause=Cause.KV_BLOCKS,
            via="recorded",
            engine_rank=timeline.rank,
            count=lost.height,
            trials=trials,
            steps=step_numbers(lost),
            tokens=tokens,
            message=message(
                "{preemptions}{trials} discarded {lost} of {victims}{repeated}. vLLM computed {recomputed} "
                "again, {part} of all tokens computed.",
                preemptions=Count(lost.height, "preemption"),
                trials=in_trials(timeline, trials),
                lost=Count(tokens, "computed token"),
                victims=Count(victims, "request"),
                repeated=repeatedly(repeated),
                recomputed=Count(recomputed, "token"),
                part=Share(part),
            ),
            evidence=Preemptions(
                victims=victims,
                repeat_victims=repeated[:MOST_VICTIMS],
                for_another_request=lost.filter(pl.col("for_request_id") != pl.col("request_id")).height,
                for_itself=lost.filter(pl.col("for_request_id") == pl.col("request_id")).height,
                lost_tokens=tokens,
                recomputed_tokens=recomputed,
                computed_tokens=computed,
                examples=examples,
            ),
            example=_described(examples[0]),
        )
    ]


def repeat_victims(lost: pl.DataFrame) -> list[RepeatVictim]:
    """Requests with more than one of these preemptions, the most often preempted first."""
    times = lost.group_by("request_id", maintain_order=True).agg(pl.len().alias("times"))
    again = times.filter(pl.col("times") > 1).sort("times", descending=True, maintain_order=True)
    return [RepeatVictim(**row) for row in again.to_dicts()]


def repeatedly(victims: list[RepeatVictim]) -> Message:
    """``, 2 of them repeatedly (r4 3 times)``."""
    if not victims:
        return NOTHING
    return message(
        ", {count} of them repeatedly ({request} {times})",
        count=Number(len(victims)),
        request=Request(victims[0].request_id),
        times=Count(victims[0].times, "time"),
    )


def _described(example: PreemptionExample) -> Message:
    if example.for_request_id is None:
        whom = message("for a request that is not recorded")
    elif example.for_request_id == example.request_id:
        whom = message("for blocks that it needed itself")
    else:
        whom = message("for {request}", request=Request(example.for_request_id))
    return message(
        "{step} preempted {request} {whom}, which discarded {lost}.",
        step=example.at,
        request=Request(example.request_id),
        whom=whom,
        lost=Count(example.lost_tokens, "computed token"),
    )


RULE = Rule(
    code=CODE,
    summary="running requests lost their KV blocks and had to compute again",
    needs=frozenset({Fact.PREEMPTIONS}),
    find=find,
    symptom_of=("kv-bound", "no-progress"),
)
