"""``budget-saturated``: the whole token budget was spent and requests still waited for tokens."""

from typing import Any

import polars as pl

from schedtrace.diagnose.rules.common import at_step, counted, in_trials, step_numbers, trial_numbers
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "budget-saturated"
SUMMARY = "steps spent the whole token budget while requests waited"
NEEDS = (Fact.QUEUE,)
ADVICE_FULL = (
    "A larger --max-num-batched-tokens alone admits nobody here: {what} in these steps, too. It lets running "
    "prompts take larger chunks."
)
ADVICE = (
    "The budget of {token_budget:,} tokens is what limits these steps: a larger --max-num-batched-tokens "
    "starts prompts sooner (lower TTFT) and makes each step longer (higher inter-token latency, more "
    "activation memory)."
)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/budget-saturated.md``."""
    full = timeline.steps.filter((pl.col("remaining_budget") == 0) & (pl.col("eligible_after") > 0))
    if full.is_empty():
        return []
    working = timeline.steps.filter(pl.col("total_requests") > 0).height
    trials = trial_numbers(full)
    waiting = full["eligible_after"].sum() / full.height
    known = full["waiting_tokens_after"].drop_nulls().to_list()
    most = max(known, default=0)
    at_once = f" (at most {most:,} tokens at once)" if known else ""
    message = (
        f"{counted(full.height, 'step')} of {working:,}{in_trials(trials, len(timeline.trials()))} spent "
        f"the whole token budget while {waiting:,.1f} requests waited for tokens on average{at_once}."
    )
    examples = (
        full.sort("num_waiting_after", "step", descending=[True, False])
        .select("step", "trial", "num_waiting_after", "waiting_tokens_after", "total_requests", "used_tokens")
        .head(3)
        .to_dicts()
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
            message=message,
            advice=_advice(timeline, full),
            evidence={
                "mean_waiting": waiting,
                "max_waiting_tokens": most if known else None,
                "steps_without_seat": full.filter(pl.col("num_running_after") >= timeline.seats).height,
                "steps_without_block": full.filter(pl.col("kv_blocks_free_after") == 0).height,
                "example": _in_words(examples[0]),
                "examples": examples,
            },
        )
    ]


def _advice(timeline: Timeline, full: pl.DataFrame) -> str:
    """A larger budget helps only where another request could have been admitted at all."""
    no_seat = full.filter(pl.col("num_running_after") >= timeline.seats).height
    no_block = full.filter(pl.col("kv_blocks_free_after") == 0).height
    if 2 * no_seat > full.height:
        return ADVICE_FULL.format(
            what=f"{no_seat} of {full.height} had no seat left ({timeline.seats:,} run)"
        )
    if 2 * no_block > full.height:
        return ADVICE_FULL.format(what=f"{no_block} of {full.height} had no free KV block left")
    return ADVICE.format(token_budget=timeline.token_budget)


def _in_words(example: dict[str, Any]) -> str:
    return (
        f"{at_step(example)} spent all {example['used_tokens']:,} tokens on "
        f"{counted(example['total_requests'], 'request')}; {example['num_waiting_after']:,} waited."
    )
