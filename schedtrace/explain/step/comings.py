"""Who came and went around a step."""

from typing import Any

import polars as pl

from schedtrace.model.story import Leaver, Newcomer
from schedtrace.timeline.timeline import Timeline


def arrived(timeline: Timeline, row: dict[str, Any]) -> list[Newcomer]:
    """Requests that reached the scheduler since the step before ``row``, a row of ``timeline.steps``."""
    came = _since_last(timeline, row, timeline.arrivals.filter(~pl.col("streaming_update")), "queued_us")
    way = pl.col("queued_us") - pl.col("arrived_us")
    columns = ["request_id", "prompt_tokens", "max_tokens", "queued_us"]
    return [Newcomer(**one) for one in came.select(*columns, way.alias("on_its_way_us")).to_dicts()]


def finished(timeline: Timeline, row: dict[str, Any]) -> list[Leaver]:
    """Requests that left it since then."""
    gone = _since_last(timeline, row, timeline.finishes, "finished_us")
    return [Leaver(**one) for one in gone.select(*Leaver.__struct_fields__).to_dicts()]


def too_late(timeline: Timeline, row: dict[str, Any]) -> list[Newcomer]:
    """Who reached the front end before the step's output was back, but the scheduler only after it began."""
    later = timeline.steps.filter(pl.col("step") > row["step"]).head(1).to_dicts()
    if not later or row["output_us"] is None:
        return []
    return [
        one
        for one in arrived(timeline, later[0])
        if one.on_its_way_us is not None and one.queued_us - one.on_its_way_us <= row["output_us"]
    ]


def _since_last(timeline: Timeline, row: dict[str, Any], frame: pl.DataFrame, time: str) -> pl.DataFrame:
    """Events that came in this step's line, or after the step before began and before this one did."""
    before = timeline.steps.filter(pl.col("step") < row["step"])["start_us"].max()
    after = pl.lit(value=True) if before is None else pl.col(time) > before
    between = pl.col("step").is_null() & after & (pl.col(time) <= row["start_us"])
    return frame.filter((pl.col("step") == row["step"]) | between).sort(time, maintain_order=True)
