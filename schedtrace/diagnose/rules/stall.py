"""``stall``: the engine stepped, scheduled nothing, and had requests that waited or ran."""

from typing import Any

import polars as pl

from schedtrace.diagnose.queue.empty_steps import empty_steps
from schedtrace.diagnose.rules.common import (
    at_step,
    counted,
    in_trials,
    only,
    severity_of,
    share,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.causes import ASKED_FOR, Cause
from schedtrace.model.facts import Fact
from schedtrace.model.message import Message
from schedtrace.model.report import Finding
from schedtrace.model.vocabulary import advice
from schedtrace.timeline.timeline import Timeline

CODE = "stall"
SUMMARY = "the engine stepped without scheduling anything although it had requests; one finding per cause"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.TIMES)

FEWEST_STEPS = 10
"""vLLM sleeps 1 ms after an empty step: about 10 ms. One or two are usual (outputs in flight)."""
LONG_US = 100_000
"""A pause that a person feels, whatever the number of steps."""

NOBODYS_FAULT = ASKED_FOR | {Cause.STREAMING_INPUT_PENDING}
"""Somebody asked for the pause, or the client has not sent its input yet."""
ADVICE_NOTHING_RUNS = (
    "Nothing runs that could free blocks: the request needs more than the KV cache has "
    "({capacity:,} tokens), or requests that wait hold blocks (KV connector). Abort it to go on; "
    "--max-model-len no larger than the KV cache refuses such requests at once, or give the cache more room."
)
ADVICE = "See the cause in docs/causes.md, and what happened at the first of these steps."


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/stall.md``."""
    long = (pl.col("steps") >= FEWEST_STEPS) | (pl.col("stalled_us") >= LONG_US)
    stalls = empty_steps(timeline).filter(long)
    found = [
        _finding(timeline, str(cause), rows)
        for (cause,), rows in stalls.group_by("cause", maintain_order=True)
    ]
    return sorted(found, key=lambda finding: -finding.count)


def _finding(timeline: Timeline, cause: str, stalls: pl.DataFrame) -> Finding:
    stalled_us, steps = int(stalls["stalled_us"].sum()), int(stalls["steps"].sum())
    part = stalled_us / _span_us(timeline)
    unended = int(stalls["unended"].sum())
    longest = stalls.sort("stalled_us", "step", descending=[True, False])
    worst = longest.row(0, named=True)
    trials = trial_numbers(stalls)
    every = stalls.select(pl.int_ranges("step", pl.col("step") + pl.col("steps")).explode().alias("step"))
    message = (
        f"{counted(stalls.height, 'stall')}{in_trials(trials, len(timeline.trials()))} of "
        f"{counted(steps, 'step')} that scheduled nothing although requests waited or ran (cause {cause}): "
        f"{stalled_us / 1e3:,.1f} ms in all, {share(part)} of the run. The longest began at step "
        f"{worst['step']}, {worst['since_us'] / 1e6:,.3f} s into the recording, and lasted "
        f"{worst['stalled_us'] / 1e3:,.1f} ms and {counted(worst['steps'], 'step')}."
    )
    if unended:
        message += f" {unended:,} had not ended when the {'trial' if trials else 'trace'} ended."
    severity = "critical" if unended else severity_of(part)
    examples = longest.head(3).drop("cause", "via", "location").to_dicts()
    return Finding(
        code=CODE,
        severity="info" if cause in NOBODYS_FAULT else severity,
        cause=cause,
        via=str(stalls["via"].unique().sort()[0]),
        location=only(stalls["location"]),
        engine_rank=timeline.rank,
        count=steps,
        trials=trials,
        steps=step_numbers(every),
        tokens=0,
        message=message,
        advice=_advice(timeline, cause, num_running=worst["num_running"]),
        evidence={
            "stalls": stalls.height,
            "unended": unended,
            "stalled_ms": stalled_us / 1e3,
            "longest_ms": worst["stalled_us"] / 1e3,
            "longest_steps": worst["steps"],
            "since_step": int(stalls["step"].min()),  # type: ignore[arg-type]  # an integer column
            "example": _in_words(examples[0]),
            "examples": examples,
        },
        cost_ms=stalled_us / 1e3,
        cost_frac=part,
    )


def _span_us(timeline: Timeline) -> int:
    """From each trial's first step to its last step's end or output, added up."""
    last = pl.max_horizontal("end_us", "output_us").max()
    return max(1, int(timeline.steps.group_by("trial").agg(last - pl.col("start_us").min())["end_us"].sum()))


def _advice(timeline: Timeline, cause: str, *, num_running: int) -> Message | str:
    header = timeline.header
    if cause == Cause.KV_BLOCKS and not num_running and header.kv_blocks_total and header.block_size:
        return ADVICE_NOTHING_RUNS.format(capacity=(header.kv_blocks_total - 1) * header.block_size)
    if cause in {Cause.PAUSED, Cause.KV_BLOCKS, Cause.CHUNKED_PREFILL_OFF, Cause.STREAMING_INPUT_PENDING}:
        return advice(header, cause=cause)
    return ADVICE


def _in_words(example: dict[str, Any]) -> str:
    refused = f", {example['request_id']} refused" if example["request_id"] else ""
    return (
        f"{at_step(example)} began a stall of {counted(example['steps'], 'step')} and "
        f"{example['stalled_us'] / 1e3:,.1f} ms: {counted(example['num_waiting'], 'request')} waiting, "
        f"{example['num_running']:,} running{refused}."
    )
