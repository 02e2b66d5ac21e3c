"""The requests' way from the client to the engine's queue."""

import polars as pl

from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.spans import united
from schedtrace.timeline.timeline import Timeline

OFFLINE_CONTEXT = "LLM_CLASS"
"""vLLM's usage context of ``LLM(...)``."""


def is_offline(timeline: Timeline) -> bool:
    """Whether ``LLM(...)`` hands over whole batches: throughput counts then, not each time to first token."""
    configured = timeline.front_end.configured if timeline.front_end else None
    return timeline.closed_workload or (
        configured is not None and configured.usage_context == OFFLINE_CONTEXT
    )


def ways_to_engine(timeline: Timeline) -> pl.DataFrame:
    """One row per request whose arrival at the front end and first token are known.

    Columns, in microseconds:

    * ``request_id``, ``trial``, ``begin_us``: its arrival at the front end,
    * ``end_us``: when it had been prepared for the engine; its entry into the engine's queue where that is
      not recorded,
    * ``before_us``: until the engine's input thread took it, or all of it where that is not recorded,
    * ``prepare_us``: in that thread (block hashes, grammar); null: not recorded,
    * ``input_queue_us``: from ``end_us`` until the engine took it between two steps; null: not recorded,
    * ``ttft_us``: from ``begin_us`` to the first token's output in the engine.
    """
    first_tokens = timeline.finishes.select("request_id", "first_token_us").drop_nulls()
    prepared = pl.coalesce("input_queue_us", "queued_us")
    return (
        timeline.first_arrivals.filter(pl.col("arrived_us").is_not_null())
        .join(first_tokens.unique("request_id"), on="request_id", maintain_order="left")
        .select(
            "request_id",
            "trial",
            begin_us="arrived_us",
            end_us=pl.max_horizontal(prepared, "arrived_us"),
            before_us=(pl.coalesce("received_us", "queued_us") - pl.col("arrived_us")).clip(0),
            prepare_us=(pl.col("input_queue_us") - pl.col("received_us")).clip(0),
            input_queue_us=(pl.col("queued_us") - pl.col("input_queue_us")).clip(0),
            ttft_us=pl.col("first_token_us") - pl.col("arrived_us"),
        )
        .filter(pl.col("ttft_us") > 0)
    )


def idle_meanwhile_us(timeline: Timeline, ways: pl.DataFrame) -> int:
    """For how long the engine had no request while at least one was on its way to it."""
    began = timeline.steps.select(pl.col("start_us").min()).item()
    if ways.is_empty() or began is None:
        return 0
    spans = united(ways)
    before_first = (pl.min_horizontal("end_us", pl.lit(began)) - pl.col("begin_us")).clip(0)
    idle = with_engine_time(spans, timeline.engine_states)["idle_us"].sum()
    return int(idle + spans.select(before_first.sum()).item())
