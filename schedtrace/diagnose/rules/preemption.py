"""``preemption``: running requests lost their KV blocks and have to compute again."""

from typing import Any

import polars as pl

from schedtrace.diagnose.rules.common import at_step, counted, in_trials, share, step_numbers, trial_numbers
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "preemption"
SUMMARY = "running requests lost their KV blocks and had to compute again"
NEEDS = (Fact.PREEMPTIONS,)
CRITICAL_RECOMPUTE_FRAC = 0.10
"""A tenth of all tokens computed for the second time is about a tenth of the throughput."""

ADVICE = (
    "The KV cache is too small for what runs at once: lower --max-num-seqs, keep a reserve with --watermark "
    "(vLLM 0.24 and newer), or give the cache more room (--gpu-memory-utilization, --kv-cache-memory-bytes, "
    "or a larger --num-gpu-blocks-override where one is set)."
)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/preemption.md``."""
    lost = timeline.preemptions.filter(pl.col("in_schedule"))
    if lost.is_empty():
        return []
    victims = lost.group_by("request_id", maintain_order=True).agg(pl.len().alias("times"))
    repeated = victims.filter(pl.col("times") > 1).sort("times", descending=True)
    for_others = lost.filter(pl.col("for_request_id") != pl.col("request_id"))
    trials = trial_numbers(lost)
    tokens = int(lost["lost_tokens"].sum())
    recomputed = int(timeline.steps["recomputed_tokens"].sum())
    computed = int(timeline.steps["used_tokens"].sum())
    part = recomputed / max(1, computed, recomputed)
    message = (
        f"{counted(lost.height, 'preemption')}{in_trials(trials, len(timeline.trials()))} threw away {tokens:,} "
        f"computed tokens of {counted(victims.height, 'request')}; {recomputed:,} were computed again "
        f"({share(part)} of all tokens computed)."
    )
    if repeated.height:
        worst = repeated.row(0, named=True)
        message += (
            f" {counted(repeated.height, 'request was', 'requests were')} hit more than once, "
            f"{worst['request_id']} {worst['times']} times."
        )
    examples = (
        lost.select("step", "trial", "request_id", "for_request_id", "lost_tokens", "num_preemptions")
        .sort("lost_tokens", "step", descending=[True, False])
        .head(3)
        .to_dicts()
    )
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
            message=message,
            advice=ADVICE,
            evidence={
                "victims": victims.height,
                "repeat_victims": repeated.head(10).to_dicts(),
                "for_another_request": for_others.height,
                "for_itself": lost.filter(pl.col("for_request_id") == pl.col("request_id")).height,
                "lost_tokens": tokens,
                "recomputed_tokens": recomputed,
                "computed_tokens": computed,
                "example": _in_words(examples[0]),
                "examples": examples,
            },
        )
    ]


def _in_words(example: dict[str, Any]) -> str:
    if example["for_request_id"] is None:
        whom = "for a request that could not be seen"
    elif example["for_request_id"] == example["request_id"]:
        whom = "by its own need of blocks"
    else:
        whom = f"for {example['for_request_id']}"
    return (
        f"{at_step(example)} preempted {example['request_id']} {whom}: "
        f"{example['lost_tokens']:,} computed tokens lost."
    )
