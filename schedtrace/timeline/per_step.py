"""Table with a row per step, which the report page, the live view and exported traces use."""

import polars as pl

from schedtrace.model.causes import NOT_A_REFUSAL
from schedtrace.timeline.timeline import Timeline

CHART_SCHEMA = {
    "step": pl.Int64,
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "decode_tokens": pl.Int64,
    "prefill_tokens": pl.Int64,
    "recompute_tokens": pl.Int64,
    "unused_tokens": pl.Int64,
    "token_budget": pl.Int64,
    "cause": pl.String,
    "requests": pl.Int64,
    "running": pl.Int64,
    "waiting": pl.Int64,
    "kv_used": pl.Int64,
    "kv_total": pl.Int64,
    "preempted": pl.Int64,
}


def per_step(timeline: Timeline, offset_us: int = 0) -> pl.DataFrame:
    """Return one row per step, in order.

    Columns: ``step``, ``trial``; ``begin_us`` and ``end_us``: from the step's start until its output was
    back, or until ``schedule()`` returned where no output is recorded (steps overlap under asynchronous
    scheduling); ``decode_tokens``, ``prefill_tokens`` and ``recompute_tokens`` add up to the scheduled
    tokens; ``unused_tokens`` is the rest of ``token_budget``; ``cause`` is the reason why requests were left
    waiting, null if none was refused; ``requests`` in the step; ``running`` and ``waiting`` after it;
    ``kv_used`` of ``kv_total`` blocks after it; ``preempted`` requests. A value that is not recorded is null.

    Args:
        timeline: Timeline of one engine.
        offset_us: Microseconds to add to the timeline's times to convert them to another rank's clock
            (``RecordedRanks.offsets_us``).
    """
    steps = timeline.steps
    preempted = timeline.preemptions.group_by("step").agg(preempted=pl.len())
    recompute = pl.col("recomputed_tokens").fill_null(0)
    prefill = pl.coalesce(pl.col("used_tokens") - pl.col("decode_tokens"), "prefill_tokens") - recompute
    refused = (pl.col("num_waiting_after") > 0) & ~pl.col("waiting_cause").is_in(
        [str(cause) for cause in NOT_A_REFUSAL]
    )
    return (
        steps.join(preempted, on="step", how="left", maintain_order="left")
        .select(
            "step",
            "trial",
            "token_budget",
            begin_us=pl.col("start_us") + offset_us,
            end_us=pl.coalesce("output_us", "end_us") + offset_us,
            decode_tokens="decode_tokens",
            prefill_tokens=prefill.clip(0),
            recompute_tokens=recompute,
            unused_tokens=pl.col("token_budget") - pl.col("used_tokens"),
            cause=pl.when(refused).then("waiting_cause"),
            requests="total_requests",
            running="num_running_after",
            waiting="num_waiting_after",
            kv_used=pl.col("kv_blocks_total") - pl.col("kv_blocks_free_after"),
            kv_total="kv_blocks_total",
            preempted=pl.col("preempted").fill_null(0),
        )
        .select(pl.col(name).cast(kind) for name, kind in CHART_SCHEMA.items())
    )
