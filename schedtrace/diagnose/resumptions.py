"""Preempted requests: how long they had run, how long they were away, and what they found on their return."""

from functools import partial

import polars as pl

from schedtrace.timeline.timeline import Timeline

STEPS_OF_A_BLOCK = 16
"""vLLM's block size on GPUs, where the trace does not tell it."""


def steps_of_a_block(timeline: Timeline) -> int:
    """Steps in which a decoding request fills one KV block; who lasted no longer did not even do that."""
    return timeline.header.block_size or STEPS_OF_A_BLOCK


def resumptions(timeline: Timeline) -> pl.DataFrame:
    """One row per preemption in ``schedule()``, in their order.

    Columns: those of ``model.trace.Preemption``, ``step``, ``trial`` and

    * ``lasted_steps``: steps since the request was last admitted; null where that is not in the trace,
    * ``cycle``: at most ``steps_of_a_block``,
    * ``resumed_step``: the step that admitted it again; null if none did before it ended or the trace did,
    * ``found_tokens``: of ``lost_tokens``, those it found in a cache then; null with ``resumed_step``,
    * ``away_us``: from the start of the step that preempted it to that of ``resumed_step``, or to its end, or
      to the last output of the trace.
    """
    lost = timeline.preemptions.filter(pl.col("in_schedule"))
    admitted = (
        timeline.admitted.lazy()
        .select("request_id", "computed_tokens", pl.col("step").alias("resumed_step"))
        .collect()
        .sort("resumed_step")
    )
    last = admitted.select("request_id", pl.col("resumed_step").alias("admitted_step"))
    began = timeline.steps.select(
        pl.col("step").alias("resumed_step"), pl.col("start_us").alias("resumed_us")
    )
    ended = timeline.finishes.select("request_id", "finished_us").unique("request_id", keep="last")
    end_us = timeline.steps.select(pl.max_horizontal("start_us", "output_us").max()).item()
    asof = partial(
        pl.DataFrame.join_asof,
        left_on="step",
        by="request_id",
        check_sortedness=False,
        coalesce=False,
        allow_exact_matches=False,
    )
    with_last = asof(lost.with_row_index("at"), last, right_on="admitted_step", strategy="backward")
    return (
        asof(with_last, admitted, right_on="resumed_step", strategy="forward")
        .join(began, on="resumed_step", how="left", maintain_order="left")
        .join(ended, on="request_id", how="left", maintain_order="left")
        .with_columns(
            lasted_steps=pl.col("step") - pl.col("admitted_step"),
            found_tokens=pl.min_horizontal(
                pl.when(pl.col("resumed_step").is_not_null()).then("computed_tokens"), "lost_tokens"
            ),
            away_us=pl.coalesce("resumed_us", "finished_us", pl.lit(end_us)) - pl.col("start_us"),
        )
        .with_columns(cycle=(pl.col("lasted_steps") <= steps_of_a_block(timeline)).fill_null(value=False))
        .sort("at")
        .drop("at", "admitted_step", "computed_tokens", "resumed_us", "finished_us")
    )
