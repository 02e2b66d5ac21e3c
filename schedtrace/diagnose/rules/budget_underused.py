"""``budget-underused``: a step left budget that the next step's new requests would have fitted into.

Only for records without queue lengths: with them, ``arrival-limited`` and ``blocked-budget`` know why.
"""

import polars as pl

from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.common import StepExample, in_trials, step_numbers, trial_numbers
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

CODE = "budget-underused"


class MissedExample(StepExample, kw_only=True):
    """One step and the next."""

    next_step: int
    gap_ms: float | None
    total_requests: int
    used_tokens: int
    remaining_budget: int
    next_total: int
    missed_requests: int
    missed_tokens: int


class MissedRequests(Evidence, kw_only=True):
    """New requests of the next steps that would have fitted."""

    missed_requests: int
    examples: list[MissedExample]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/budget-underused.md``."""
    if Fact.QUEUE in timeline.facts:
        return []
    missed = _missed(timeline)
    if missed.is_empty():
        return []
    requests, tokens = (int(missed[name].sum()) for name in ("missed_requests", "missed_tokens"))
    working = timeline.steps.filter(pl.col("total_requests") > 0).height
    trials = trial_numbers(missed)
    worst = missed.sort("missed_tokens", "step", descending=[True, False])
    examples = MissedExample.first(worst)
    return [
        Finding(
            code=CODE,
            severity="info",
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=missed.height,
            trials=trials,
            steps=step_numbers(missed),
            tokens=tokens,
            message=say(
                "{steps:n step} of {working:n}{trials} left token budget that {requests:n request} "
                "({tokens:n token}), new in the next step, would have fitted into. This log has no "
                "queue lengths: it does not show whether they had not arrived or were refused.",
                steps=missed.height,
                working=working,
                trials=in_trials(timeline, trials),
                requests=requests,
                tokens=tokens,
            ),
            evidence=MissedRequests(missed_requests=requests, examples=examples),
            example=_described(examples[0]),
        )
    ]


def _missed(timeline: Timeline) -> pl.DataFrame:
    """Steps with budget left for new requests of the next one, and how many of them would have fitted."""
    steps = timeline.steps.filter(pl.col("total_requests") > 0).sort("step")
    nexts = steps.select(
        "step",
        "trial",
        "total_requests",
        "used_tokens",
        "remaining_budget",
        next_step=pl.col("step").shift(-1),
        gap_ms=(pl.col("start_us").shift(-1) - pl.col("start_us")) / 1e3,
        seats=pl.col("max_num_running_reqs") - pl.col("total_requests"),
        next_total=pl.col("total_requests").shift(-1),
    ).filter(pl.col("remaining_budget") > 0)
    new = (
        timeline.admitted.lazy().filter(pl.col("phase") == "new").select("step", "scheduled_tokens").collect()
    )
    return (
        nexts.join(new, left_on="next_step", right_on="step", how="inner", maintain_order="left_right")
        .with_columns(
            so_far=pl.col("scheduled_tokens").cum_sum().over("step"),
            place=pl.int_range(1, pl.len() + 1).over("step"),
        )
        .filter(
            (pl.col("so_far") <= pl.col("remaining_budget"))
            & (pl.col("place") <= pl.col("seats")).fill_null(value=True)
        )
        .group_by("step", "trial", "next_step", "gap_ms", maintain_order=True)
        .agg(
            pl.col("total_requests", "used_tokens", "remaining_budget", "next_total").first(),
            pl.len().alias("missed_requests"),
            pl.col("scheduled_tokens").sum().alias("missed_tokens"),
        )
    )


def _described(example: MissedExample) -> Message:
    gap_ms = example.gap_ms
    return say(
        "{step} scheduled {scheduled:n} of the {total:n request} of {next:step} ({tokens:n "
        "token}) and left {budget:n token} of budget{gap}.",
        step=example.at,
        scheduled=example.total_requests,
        total=example.next_total,
        next=example.next_step,
        tokens=example.used_tokens,
        budget=example.remaining_budget,
        gap=NOTHING if gap_ms is None else say("; the next step began {gap:us} later", gap=1e3 * gap_ms),
    )


RULE = Rule(
    code=CODE,
    summary="steps left budget that the next step's new requests would have fitted into "
    "(this log does not record why)",
    needs=frozenset({Fact.REQUESTS}),
    find=find,
    symptom_of=("arrival-limited",),
)
