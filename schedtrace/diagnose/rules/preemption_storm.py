"""``preemption-storm``: the same requests lose their blocks again and again, or much work is done twice."""

from typing import Any

import polars as pl

from schedtrace.diagnose.queue.resumptions import resumptions, steps_of_a_block
from schedtrace.diagnose.rules.common import (
    at_step,
    counted,
    in_trials,
    severity_of,
    share,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.causes import Cause
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "preemption-storm"
SUMMARY = "the same requests were preempted again and again, or much of the prefill was done twice"
NEEDS = (Fact.PREEMPTIONS, Fact.REQUESTS, Fact.BLOCKS, Fact.TIMES)

OFTEN = 3
"""Preemptions of one request: the second may be bad luck, the third says that coming back does not help."""
FEWEST_PREEMPTIONS = 3
MUCH_FRAC = 0.10
"""A tenth of the prefill done twice, by ``FEWEST_PREEMPTIONS`` or more: one or two are no storm."""
ENDINGS = {1: "st", 2: "nd", 3: "rd"}
ADVICE = (
    "More run at once than the KV cache can hold to their end. No preemption happened with fewer than "
    "{fewest:,} running: a --max-num-seqs below that (now {seats:,}) or a reserve (--watermark, vLLM 0.24 "
    "and newer) stops the cycle; more room for the KV cache (--gpu-memory-utilization, "
    "--kv-cache-memory-bytes) moves it up."
)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/preemption-storm.md``."""
    lost = resumptions(timeline)
    if lost.is_empty():
        return []
    victims = lost.group_by("request_id", maintain_order=True).agg(pl.len().alias("times"))
    again = victims.filter(pl.col("times") > 1).sort("times", descending=True, maintain_order=True)
    recomputed = int(timeline.steps["recomputed_tokens"].sum())
    prefill = int((timeline.steps["used_tokens"] - timeline.steps["decode_tokens"]).sum())
    part = recomputed / max(1, prefill, recomputed)
    often = max(victims["times"]) >= OFTEN
    if not often and (lost.height < FEWEST_PREEMPTIONS or part < MUCH_FRAC):
        return []
    return [_finding(timeline, lost, again, recomputed=recomputed, part=part)]


def _finding(
    timeline: Timeline, lost: pl.DataFrame, again: pl.DataFrame, *, recomputed: int, part: float
) -> Finding:
    steps = timeline.steps.filter(pl.col("step").is_in(lost["step"].implode()))
    first = steps.row(0, named=True)
    cycles = lost.filter("cycle")
    victims = lost["request_id"].n_unique()
    trials = trial_numbers(lost)
    repeated = ""
    if again.height:
        worst = again.row(0, named=True)
        repeated = f", {again.height:,} of them repeatedly ({worst['request_id']} {worst['times']} times)"
    used = _used_frac(first)
    level = "" if used is None else f", at {share(used)} of the KV cache used"
    again_frac = f"{recomputed:,} tokens were computed again, {share(part)} of all prefill"
    message = (
        f"{counted(lost.height, 'preemption')}{in_trials(trials, len(timeline.trials()))} hit "
        f"{counted(victims, 'request')}{repeated}; {cycles.height:,} came within "
        f"{steps_of_a_block(timeline)} steps of being scheduled. {again_frac}. It began at step {first['step']} "
        f"with {first['num_running_before']:,} running{level}."
    )
    cost_ms = _cost_ms(timeline, recomputed)
    cost_frac = None if cost_ms is None or not timeline.duration_us else cost_ms * 1e3 / timeline.duration_us
    severity = severity_of(cost_frac, unknown="warning")
    examples = _examples(lost, again)
    fewest = int(steps["num_running_before"].min())  # type: ignore[arg-type]  # an integer column
    return Finding(
        code=CODE,
        severity="warning" if severity == "info" else severity,
        cause=Cause.KV_BLOCKS,
        via="recorded",
        engine_rank=timeline.rank,
        count=lost.height,
        trials=trials,
        steps=step_numbers(lost),
        tokens=recomputed,
        message=message,
        advice=ADVICE.format(fewest=fewest, seats=timeline.seats),
        evidence={
            "victims": victims,
            "repeat_victims": again.head(10).to_dicts(),
            "cycles": cycles.height,
            "cycle_steps": steps_of_a_block(timeline),
            "recomputed_tokens": recomputed,
            "recomputed_frac": part,
            "first_step": first["step"],
            "first_running": first["num_running_before"],
            "first_used_frac": used,
            "fewest_running": fewest,
            "away_ms": int(lost["away_us"].sum()) / 1e3,
            "longest_away_ms": int(lost["away_us"].max() or 0) / 1e3,  # type: ignore[arg-type]
            "example": _in_words(examples[0]),
            "examples": examples,
        },
        cost_ms=cost_ms,
        cost_frac=cost_frac,
        cost_error_frac=None
        if cost_ms is None or timeline.step_time is None
        else timeline.step_time.error_frac,
    )


def _used_frac(step: dict[str, Any]) -> float | None:
    """Share of the KV blocks in use before a step; one block, vLLM's null block, is nobody's."""
    total, free = step["kv_blocks_total"], step["kv_blocks_free_before"]
    if free is None or total is None or total < 2:  # noqa: PLR2004  # no block but the null block
        return None
    return float(1 - free / (total - 1))


def _cost_ms(timeline: Timeline, recomputed: int) -> float | None:
    """Tokens computed again, at what a prefill token takes; None where no step tells what it takes."""
    if timeline.step_time is None or not timeline.step_time.per_prefill_token_us:
        return None
    return recomputed * timeline.step_time.per_prefill_token_us / 1e3


def _examples(lost: pl.DataFrame, again: pl.DataFrame) -> list[dict[str, Any]]:
    """The longest absences, of those hit most often if any was hit again."""
    most = again.filter(pl.col("times") == pl.col("times").max())["request_id"]
    shown = lost.filter(pl.col("request_id").is_in(most.implode())) if again.height else lost
    columns = ("step", "trial", "request_id", "for_request_id", "num_preemptions", "lost_tokens")
    return (
        shown.sort("away_us", "step", descending=[True, False])
        .select(*columns, "lasted_steps", "resumed_step", "away_us")
        .head(3)
        .to_dicts()
    )


def _in_words(example: dict[str, Any]) -> str:
    nth = (
        "" if example["num_preemptions"] is None else f" for the {_ordinal(example['num_preemptions'])} time"
    )
    lasted = example["lasted_steps"]
    since = "" if lasted is None else f", {counted(lasted, 'step')} after it was scheduled"
    return (
        f"{at_step(example)} preempted {example['request_id']}{nth}{since}: "
        f"{example['lost_tokens']:,} computed tokens lost, {example['away_us'] / 1e3:,.1f} ms away."
    )


def _ordinal(number: int) -> str:
    teens = number // 10 % 10 == 1
    return f"{number}{'th' if teens else ENDINGS.get(number % 10, 'th')}"
