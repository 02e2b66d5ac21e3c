"""``head-of-line``: a request refused for its own size held up others behind it that would have fitted."""

from typing import Any

import polars as pl

from schedtrace.diagnose.queue.behind_head import behind_head
from schedtrace.diagnose.rules.common import at_step, counted, in_trials, only, step_numbers, trial_numbers
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.admission import refused_heads
from schedtrace.timeline.timeline import Timeline

CODE = "head-of-line"
SUMMARY = "a refused request held up others behind it that would have fitted; one finding per cause"
NEEDS = (Fact.QUEUE, Fact.EXITS, Fact.LIVES, Fact.BLOCKS, Fact.REQUESTS, Fact.TIMES, Fact.CONFIG)
ADVICE: dict[str, str] = {
    Cause.KV_BLOCKS: (
        "vLLM admits in the order of its queue. More room for the KV cache (--gpu-memory-utilization, "
        "--kv-cache-memory-bytes) lets the large request in; --no-scheduler-reserve-full-isl lets it begin "
        "with its first chunk; an engine of their own for long prompts keeps them out of the way."
    ),
    Cause.CHUNKED_PREFILL_OFF: (
        "Switch chunked prefill on (--enable-chunked-prefill): the large prompt then takes what is left, "
        "piece by piece."
    ),
}
ADVICE_OTHER = "vLLM admits in the order of its queue: send such requests to an engine of their own."


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/head-of-line.md``."""
    heads = refused_heads(timeline)
    passed = _with_wait(timeline, behind_head(timeline, heads))
    found = [
        _finding(timeline, str(cause), rows, heads.filter(pl.col("cause") == cause))
        for (cause,), rows in passed.group_by("cause", maintain_order=True)
    ]
    return sorted(found, key=lambda finding: -finding.count)


def _finding(timeline: Timeline, cause: str, passed: pl.DataFrame, heads: pl.DataFrame) -> Finding:
    held_up = _held_up(heads, passed)
    trials = trial_numbers(held_up)
    tokens, waited_ms = int(passed["tokens"].sum()), int(passed["waited_us"].sum()) / 1e3
    longest_ms = int(passed["waited_us"].max() or 0) / 1e3  # type: ignore[arg-type]  # an integer column
    worst = passed.sort("waited_us", "step", descending=[True, False])
    examples = worst.head(3).drop("cause", "left_step").to_dicts()
    message = (
        f"{held_up.height:,} of {counted(heads.height, 'step')} that refused the next request for its own "
        f"size{in_trials(trials, len(timeline.trials()))} held up others behind it that would have fitted: "
        f"{counted(passed.height, 'request')} ({counted(tokens, 'token')} in the first step that could have "
        f"taken them), which left the queue {waited_ms / passed.height:,.1f} ms later on average, "
        f"{longest_ms:,.1f} ms at most."
    )
    return Finding(
        code=CODE,
        severity="warning" if any(passed["left_step"] > passed["step"] + 1) else "info",
        cause=cause,
        via=str(heads["via"].unique().sort()[0]),
        location=only(heads["location"]),
        engine_rank=timeline.rank,
        count=held_up.height,
        trials=trials,
        steps=step_numbers(held_up),
        tokens=tokens,
        message=message,
        advice=ADVICE.get(cause, ADVICE_OTHER),
        evidence={
            "refused_steps": heads.height,
            "heads": heads["head"].n_unique(),
            "requests_held_up": passed.height,
            "held_up_ms": waited_ms,
            "longest_ms": longest_ms,
            "example": _in_words(examples[0]),
            "examples": examples,
        },
    )


def _held_up(heads: pl.DataFrame, passed: pl.DataFrame) -> pl.DataFrame:
    """Those of ``heads`` after which somebody waited who would have been let pass then or before."""
    could, left = passed["step"].to_numpy(), passed["left_step"].to_numpy()
    return heads.filter([bool(((could <= step) & (step < left)).any()) for step in heads["step"]])


def _with_wait(timeline: Timeline, passed: pl.DataFrame) -> pl.DataFrame:
    """With ``waited_us``: from the step that could have taken a request to the one that did, or the end."""
    start = timeline.steps.select("step", "start_us")
    last = timeline.steps.select(pl.max_horizontal("start_us", "output_us").max()).item()
    return (
        passed.join(start, on="step", how="left", maintain_order="left")
        .join(start.rename({"step": "left_step", "start_us": "left_us"}), on="left_step", how="left")
        .with_columns(waited_us=pl.col("left_us").fill_null(pl.lit(last)) - pl.col("start_us"))
        .drop("start_us", "left_us")
    )


def _in_words(example: dict[str, Any]) -> str:
    left_over = (
        f"{counted(example['budget_left'], 'token')} of budget, "
        f"{counted(example['kv_blocks_free'], 'KV block')} and {counted(example['seats_left'], 'seat')}"
    )
    return (
        f"{at_step(example)} refused {example['head']} ({counted(example['head_tokens'], 'token')}) and left "
        f"{left_over} over; {example['request_id']} behind it would have taken "
        f"{counted(example['tokens'], 'token')} and {counted(example['blocks'], 'block')}, and waited "
        f"{example['waited_us'] / 1e3:,.1f} ms more."
    )
