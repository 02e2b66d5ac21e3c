"""``prefix-cache``: what had been cached was computed again, or hits went down when blocks were short."""

from typing import Any

import polars as pl

from schedtrace.diagnose.queue.resumptions import resumptions
from schedtrace.diagnose.rules.common import (
    at_step,
    counted,
    in_trials,
    severity_of,
    share,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "prefix-cache"
SUMMARY = (
    "what preempted requests had computed was no longer cached, or hits went down when blocks were short"
)
NEEDS = (Fact.CACHE, Fact.REQUESTS, Fact.LIVES, Fact.PREEMPTIONS, Fact.BLOCKS, Fact.CONFIG)

SHORT_FRAC = 0.10
"""Blocks are short with fewer than a tenth of them free."""
FEWEST_REQUESTS = 10
"""On either side, to compare their hits."""
DROP = 0.5
"""Half the hits: less than that lies within what workloads vary by."""
ADVICE = (
    "The cache keeps blocks that nobody uses until somebody needs them: more room for the KV cache "
    "(--gpu-memory-utilization, --kv-cache-memory-bytes) or fewer requests at once (--max-num-seqs) keeps "
    "them longer."
)


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/prefix-cache.md``."""
    block_size = timeline.header.block_size
    if not timeline.header.enable_prefix_caching or not block_size:
        return []
    back = resumptions(timeline).filter(pl.col("resumed_step").is_not_null())
    whole = pl.col("lost_tokens") // block_size * block_size
    back = back.with_columns(evicted_tokens=(whole - pl.col("found_tokens")).clip(0))
    came = _admitted(timeline)
    calm, short = _hit_frac(came.filter(~pl.col("short"))), _hit_frac(came.filter("short"))
    dropped = _enough(came) and calm is not None and short is not None and short < DROP * calm
    missed = back.filter(pl.col("evicted_tokens") > 0)
    if missed.is_empty() and not dropped:
        return []
    shown = missed if missed.height else came.filter("short")
    return [_finding(timeline, shown, back, came, calm=calm, short=short, dropped=dropped)]


def _finding(
    timeline: Timeline,
    shown: pl.DataFrame,
    back: pl.DataFrame,
    came: pl.DataFrame,
    *,
    calm: float | None,
    short: float | None,
    dropped: bool,
) -> Finding:
    hit_frac = _hit_frac(came)
    sums = (int(back[name].sum()) for name in ("evicted_tokens", "lost_tokens", "found_tokens"))
    evicted, lost, found = sums
    trials = trial_numbers(shown)
    message = ""
    where = in_trials(trials, len(timeline.trials()))
    if evicted:
        message = (
            f"{counted(back.height, 'preempted request')}{where} came back for {lost:,} computed tokens and "
            f"found {found:,} of them in the cache; {evicted:,} that had filled whole blocks were gone."
        )
    if dropped and calm is not None and short is not None:
        message += (
            f"{' ' if message else ''}Requests admitted with under {share(SHORT_FRAC)} of the KV blocks free "
            f"found {share(short)} of their prompts cached, the others {share(calm)}: the two go together, "
            "which does not say that one causes the other."
        )
    if hit_frac is not None:
        message += (
            f" Over all, {share(hit_frac)} of the prompt tokens admitted for the first time were cached."
        )
    cost_ms = _cost_ms(timeline, evicted)
    cost_frac = None if cost_ms is None or not timeline.duration_us else cost_ms * 1e3 / timeline.duration_us
    examples = _examples(shown)
    return Finding(
        code=CODE,
        severity=severity_of(cost_frac),
        cause=None,
        via="recorded",
        engine_rank=timeline.rank,
        count=shown["step"].n_unique(),
        trials=trials,
        steps=step_numbers(shown),
        tokens=evicted,
        message=message,
        advice=ADVICE,
        evidence={
            "prompt_tokens": int(came["prompt_tokens"].sum()),
            "cached_tokens": int(came["cached_tokens"].sum()),
            "hit_frac": hit_frac,
            "hit_frac_when_short": short,
            "hit_frac_otherwise": calm,
            "returned": back.height,
            "lost_tokens": lost,
            "found_tokens": found,
            "evicted_tokens": evicted,
            "example": _in_words(examples[0]),
            "examples": examples,
        },
        cost_ms=cost_ms,
        cost_frac=cost_frac,
        cost_error_frac=None
        if cost_ms is None or timeline.step_time is None
        else timeline.step_time.error_frac,
    )


def _admitted(timeline: Timeline) -> pl.DataFrame:
    """Requests scheduled for the first time, with ``cached_tokens`` and whether blocks were ``short``."""
    free = pl.col("kv_blocks_free_before") / pl.col("kv_blocks_total")
    return (
        timeline.admitted.lazy()
        .filter(pl.col("phase") == "new")
        .select("step", "trial", "request_id", pl.col("computed_tokens").alias("cached_tokens"))
        .collect()
        .join(timeline.arrivals.select("request_id", "prompt_tokens").unique("request_id"), on="request_id")
        .join(timeline.steps.select("step", short=(free < SHORT_FRAC).fill_null(value=False)), on="step")
        .sort("step", "request_id")
    )


def _hit_frac(came: pl.DataFrame) -> float | None:
    prompt = int(came["prompt_tokens"].sum())
    return int(came["cached_tokens"].sum()) / prompt if prompt else None


def _enough(came: pl.DataFrame) -> bool:
    short = int(came["short"].sum())
    return min(short, came.height - short) >= FEWEST_REQUESTS


def _cost_ms(timeline: Timeline, evicted: int) -> float | None:
    """The tokens that were gone, at what a prefill token takes."""
    if not evicted or timeline.step_time is None or not timeline.step_time.per_prefill_token_us:
        return None
    return evicted * timeline.step_time.per_prefill_token_us / 1e3


def _examples(shown: pl.DataFrame) -> list[dict[str, Any]]:
    if "evicted_tokens" not in shown.columns:
        return (
            shown.select("step", "trial", "request_id", "prompt_tokens", "cached_tokens").head(3).to_dicts()
        )
    columns = ("step", "trial", "request_id", "lost_tokens", "found_tokens", "evicted_tokens", "resumed_step")
    return shown.sort("evicted_tokens", "step", descending=[True, False]).select(columns).head(3).to_dicts()


def _in_words(example: dict[str, Any]) -> str:
    if "lost_tokens" not in example:
        return (
            f"{at_step(example)} admitted {example['request_id']} with {example['cached_tokens']:,} of "
            f"{counted(example['prompt_tokens'], 'prompt token')} cached."
        )
    return (
        f"{at_step(example)} preempted {example['request_id']} with {example['lost_tokens']:,} computed "
        f"tokens; in step {example['resumed_step']} it found {example['found_tokens']:,} of them."
    )
