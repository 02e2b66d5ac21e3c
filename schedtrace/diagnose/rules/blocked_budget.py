"""``blocked-budget``: token budget was left although requests waited; one finding per cause."""

from typing import Any

import polars as pl

from schedtrace.diagnose.rules.common import only, step_numbers, trial_numbers
from schedtrace.model.causes import ASKED_FOR, NOT_A_REFUSAL, Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Code, Count, Message, Number, Request, Share, Steps, message
from schedtrace.model.report import Finding
from schedtrace.model.vocabulary import advice, reason, reasoned_details
from schedtrace.timeline.timeline import Timeline

CODE = "blocked-budget"
SUMMARY = "token budget was left although requests waited; one finding per cause"
NEEDS = (Fact.QUEUE, Fact.EXITS)

_LIMITS = {cause: limits for cause in Cause if (limits := reasoned_details(cause, "waiting"))}
"""Several limits share these causes: the limit decides what helps."""


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/blocked-budget.md``."""
    blocked = timeline.steps.filter(
        (pl.col("remaining_budget") > 0)
        & (pl.col("num_waiting_after") > 0)
        & ~pl.col("waiting_cause").is_in([*NOT_A_REFUSAL, Cause.TOKEN_BUDGET])
    ).with_columns(
        unused=pl.min_horizontal(
            "remaining_budget", pl.col("waiting_tokens_after").fill_null(pl.col("remaining_budget"))
        ),
        limit=pl.when(pl.col("waiting_cause").is_in(list(_LIMITS))).then("waiting_detail"),
    )
    found = [
        _finding(timeline, str(cause), limit, steps)
        for (cause, limit), steps in blocked.group_by("waiting_cause", "limit", maintain_order=True)
    ]
    return sorted(found, key=lambda finding: -finding.tokens)


def _finding(timeline: Timeline, cause: str, limit: Any, steps: pl.DataFrame) -> Finding:
    working = timeline.steps.filter((pl.col("total_requests") > 0) | (pl.col("num_waiting_after") > 0)).height
    trials = trial_numbers(steps)
    left = 1 - float(steps["use_frac"].mean() or 0)  # type: ignore[arg-type]  # a column of floats
    waiting = steps["num_waiting_after"].sum() / steps.height
    examples = _examples(steps)
    return Finding(
        code=CODE,
        severity="info" if cause in ASKED_FOR else "warning",
        cause=cause,
        via=str(steps["waiting_via"].unique().sort()[0]),
        engine_rank=timeline.rank,
        count=steps.height,
        trials=trials,
        steps=step_numbers(steps),
        tokens=int(steps["unused"].sum()),
        message=message(
            "{steps} of {working}{in_trials} left {left} of the token budget unused on average although "
            "requests waited ({waiting} on average): {reason}. {lost}",
            steps=Count(steps.height, "step"),
            working=Number(working),
            in_trials=_in_trials(len(trials), len(timeline.trials())),
            left=Share(left),
            waiting=Number(float(waiting)),
            reason=reason(timeline.header, loop="waiting", cause=cause, detail=limit),
            lost=_could_have_used(steps),
        ),
        advice=advice(timeline.header, cause=cause, detail=limit),
        location=only(steps["waiting_location"]),
        evidence={
            "mean_budget_left_frac": left,
            "mean_waiting": waiting,
            "details": steps["waiting_detail"].drop_nulls().unique().sort().head(5).to_list(),
            "guards": steps["waiting_guard"].drop_nulls().unique().sort().head(5).to_list(),
            "example": _described(examples[0], several_places=only(steps["waiting_location"]) is None),
            "examples": examples,
        },
    )


def _in_trials(trials: int, of: int) -> Message:
    """`` in 7 of 8 trials``; nothing for a trace without trials."""
    if not trials:
        return NOTHING
    return message(" in {trials} of {of}", trials=Number(trials), of=Count(of, "trial"))


def _examples(steps: pl.DataFrame) -> list[dict[str, Any]]:
    """The three steps in which most waiting work would have fitted."""
    return (
        steps.sort("unused", "step", descending=[True, False])
        .select(
            "step",
            "trial",
            pl.col("waiting_request").alias("request_id"),
            pl.col("remaining_budget").alias("budget_left"),
            "num_waiting_after",
            "num_running_after",
            "kv_blocks_free_after",
            pl.col("waiting_location").alias("location"),
        )
        .head(3)
        .to_dicts()
    )


def _could_have_used(steps: pl.DataFrame) -> Message:
    """The budget that the waiting requests could have used without the cause."""
    known = steps.filter(pl.col("waiting_tokens_after").is_not_null())
    if known.is_empty():
        return message("How many tokens they wanted is not recorded.")
    mean = Number(round(known["unused"].sum() / known.height))
    text = "Otherwise each of those steps could have scheduled {mean} more tokens on average."
    return message(text, mean=mean)


def _described(example: dict[str, Any], *, several_places: bool) -> Message:
    refused, blocks, location = example["request_id"], example["kv_blocks_free_after"], example["location"]
    step = Steps(example["step"], example["step"], example["trial"])
    return message(
        "{step}: {waiting} waiting{refused}, {running} running, {budget} of budget left{free}{place}.",
        step=step,
        waiting=Count(example["num_waiting_after"], "request"),
        refused=message(", {head} next in line", head=Request(refused)) if refused else NOTHING,
        running=Number(example["num_running_after"]),
        budget=Count(example["budget_left"], "token"),
        free=NOTHING if blocks is None else message(", {blocks} free", blocks=Count(blocks, "KV block")),
        place=message(" (left at {place})", place=Code(location)) if several_places and location else NOTHING,
    )
