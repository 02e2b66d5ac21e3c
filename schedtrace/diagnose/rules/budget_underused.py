"""``budget-underused``: a step left budget that the next step's new requests would have fitted into.

Only for records without queue lengths: with them, ``arrival-limited`` and ``blocked-budget`` tell why.
"""

from typing import Any

import polars as pl

from schedtrace.diagnose.rules.common import at_step, counted, in_trials, step_numbers, trial_numbers
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "budget-underused"
SUMMARY = "steps left budget that the next step's new requests would have fitted into; why is not told"
NEEDS = (Fact.REQUESTS,)
ADVICE = (
    "Record the same with schedtrace (schedtrace run, or SCHEDTRACE_DIR for a vLLM of your own): its trace "
    "has the queue and the exit taken, and tells the two apart."
)


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
    message = (
        f"{counted(missed.height, 'step')} of {working:,}{in_trials(trials, len(timeline.trials()))} left token "
        f"budget unused into which {counted(requests, 'request')} ({tokens:,} tokens), new in the step right "
        "after, would have fitted. Whether they had not arrived yet or waited and were refused cannot be "
        "told from this log: it has no queue lengths."
    )
    examples = missed.sort("missed_tokens", "step", descending=[True, False]).head(3).to_dicts()
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
            message=message,
            advice=ADVICE,
            evidence={"missed_requests": requests, "example": _in_words(examples[0]), "examples": examples},
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


def _in_words(example: dict[str, Any]) -> str:
    gap = "" if example["gap_ms"] is None else f", {example['gap_ms']:,.0f} ms later"
    return (
        f"{at_step(example)} scheduled {example['total_requests']:,} "
        f"({counted(example['used_tokens'], 'token')}) of the {example['next_total']:,} requests that step "
        f"{example['next_step']} had{gap}; "
        f"{counted(example['remaining_budget'], 'token')} of budget left."
    )
