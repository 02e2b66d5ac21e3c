"""``budget-saturated``: the whole token budget was spent and requests still waited for tokens."""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import StepExample, in_trials, step_numbers, trial_numbers
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

CODE = "budget-saturated"


class FullStep(StepExample, kw_only=True):
    """One saturated step."""

    num_waiting_after: int
    waiting_tokens_after: int | None
    total_requests: int
    used_tokens: int


class Saturation(Evidence, kw_only=True):
    """Waiting after saturated steps, and what else they had used up."""

    mean_waiting: float
    max_waiting_tokens: int | None
    steps_without_seat: int
    steps_without_block: int
    examples: list[FullStep]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/budget-saturated.md``."""
    full = timeline.steps.filter((pl.col("remaining_budget") == 0) & (pl.col("eligible_after") > 0))
    if full.is_empty():
        return []
    working = timeline.steps.filter(pl.col("total_requests") > 0).height
    trials = trial_numbers(full)
    known = full["waiting_tokens_after"].drop_nulls().to_list()
    most = max(known, default=0)
    evidence = Saturation(
        mean_waiting=int(full["eligible_after"].sum()) / full.height,
        max_waiting_tokens=most if known else None,
        steps_without_seat=full.filter(pl.col("num_running_after") >= timeline.seats).height,
        steps_without_block=full.filter(pl.col("kv_blocks_free_after") == 0).height,
        examples=FullStep.first(full.sort("num_waiting_after", "step", descending=[True, False])),
    )
    return [
        Finding(
            code=CODE,
            severity="info",
            cause=Cause.TOKEN_BUDGET,
            via="recorded",
            engine_rank=timeline.rank,
            count=full.height,
            trials=trials,
            steps=step_numbers(full),
            tokens=most,
            message=say(
                "{steps:n step} of {working:n}{trials} spent the whole token budget while "
                "{waiting:n1} requests on average waited for tokens{most}.",
                steps=full.height,
                working=working,
                trials=in_trials(timeline, trials),
                waiting=evidence.mean_waiting,
                most=say(", {tokens:n token} at most", tokens=most) if known else NOTHING,
            ),
            evidence=evidence,
            example=_described(evidence.examples[0]),
        )
    ]


def _described(example: FullStep) -> Message:
    return say(
        "{step} spent {tokens:n token} on {running:n request} while {waiting:n request} waited.",
        step=example.at,
        tokens=example.used_tokens,
        running=example.total_requests,
        waiting=example.num_waiting_after,
    )


RULE = Rule(
    code=CODE,
    summary="steps spent the whole token budget while requests waited",
    needs=frozenset({Fact.QUEUE}),
    find=find,
    symptom_of=("token-budget-bound", "long-prompt"),
)
