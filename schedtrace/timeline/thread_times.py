"""Whether engine, workers and front end had the processors that they were ready to use."""

import polars as pl

from schedtrace.timeline.timeline import Timeline


def thread_times(timeline: Timeline) -> pl.DataFrame:
    """One row per thread that the trace has seen twice between its first step and its end.

    Columns: ``role`` (``engine``, ``worker``, ``front_end``), ``pid``, ``tid``, ``span_us`` (from the first
    to the last time it was seen), ``ran_us`` and ``waited_us`` (ready, with no processor free) within it.
    """
    began = timeline.steps.select(pl.col("start_us").min()).item()
    seen = timeline.cpu.filter(pl.col("at_us").is_between(began, timeline.end_us)).sort("at_us")
    grown = [(pl.col(name).last() - pl.col(name).first()).alias(name) for name in ("ran_us", "waited_us")]
    span = (pl.col("at_us").last() - pl.col("at_us").first()).alias("span_us")
    return (
        seen.group_by("role", "pid", "tid", maintain_order=True)
        .agg(span, *grown)
        .filter(pl.col("span_us") > 0)
    )
