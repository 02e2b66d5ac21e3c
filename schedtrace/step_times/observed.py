"""Step times of a trace: one row per step, with its work and the time of each part."""

import polars as pl

from schedtrace.timeline.pieces import with_work
from schedtrace.timeline.spans import at_steps, level, overlap_us
from schedtrace.timeline.timeline import Timeline

RECORDED = (
    "step",
    "trial",
    "total_requests",
    "used_tokens",
    "start_us",
    "busy_us",
    "schedule_us",
    "update_us",
    "execute_after_us",
    "execute_us",
    "wave",
    "step_counter",
)
"""Columns of the timeline's steps."""
OF_BATCH = (
    "prefill_tokens",
    "prefill_requests",
    "prefill_attention",
    "decode_tokens",
    "decode_requests",
    "decode_context_tokens",
)
"""Columns that have the names and meanings of ``Batch``."""
WORKER_CLOCK_FRAC = 0.9
"""Share of the steps with tokens that must have the worker's clock for it to be used."""


def observed(timeline: Timeline) -> pl.DataFrame:
    """Return one row per step, in order.

    Columns: those of ``RECORDED``; ``first``, of the trial's steps with tokens; those of ``OF_BATCH``, and
    ``requests``, null where the trace does not tell; ``device_us`` (see ``with_device_us``); ``gap_us``,
    from the last update to this ``schedule()``, and ``arrivals`` let in during it, null where the engine was
    idle in between or did not wait for an output; ``wake_us``, for a step that ended an idle time: from when
    its first request was in the input queue until the engine took it in, null where that is not recorded.
    """
    works = pl.col("total_requests") > 0
    rows = (
        timeline.steps.select(*RECORDED)
        .join(_batches(timeline), on="step", how="left", maintain_order="left")
        .join(_gaps(timeline), on="step", how="left", maintain_order="left")
        .join(_wakes(timeline), on="step", how="left", maintain_order="left")
        .with_columns(
            first=works & (works.cast(pl.Int64).cum_sum().over("trial") == 1),
            requests=pl.col("prefill_requests") + pl.col("decode_requests"),
        )
    )
    # Where the trace does not know a request's prompt, or records no requests, the sums would be too small.
    tokens = pl.col("prefill_tokens") + pl.col("decode_tokens")
    complete = (tokens == pl.col("used_tokens")) & (pl.col("requests") == pl.col("total_requests"))
    columns = (pl.when(complete).then(name).alias(name) for name in (*OF_BATCH, "requests"))
    header = timeline.header
    overlapped = (header.batches_in_flight or 1) > 1 or bool(header.async_scheduling)
    return with_device_us(rows.with_columns(columns), overlapped=overlapped)


def with_device_us(rows: pl.DataFrame, *, overlapped: bool) -> pl.DataFrame:
    """Add ``device_us``: how long a batch kept the device, from when it could begin; null without tokens.

    A synchronous engine waits for all of ``busy_us``. With several batches in flight an output may be ready
    and wait for the host. So there, if the worker's clock is recorded, a batch lasts from the later of its
    dispatch and the end of the one before, both executions ending by that clock. ``execute_us`` itself would
    count twice the time in which two executions overlap.
    """
    works = rows.filter(pl.col("total_requests") > 0)
    recorded = works["execute_us"].is_not_null().sum() >= WORKER_CLOCK_FRAC * works.height
    ended = pl.col("start_us") + pl.col("execute_after_us") + pl.col("execute_us")
    free = ended.cum_max().forward_fill().shift(1).fill_null(0)
    begun = pl.max_horizontal(pl.col("start_us") + pl.col("schedule_us"), free)
    took = ended - begun if overlapped and recorded else pl.col("busy_us")
    return rows.with_columns(device_us=pl.when(pl.col("total_requests") > 0).then(took))


def _batches(timeline: Timeline) -> pl.DataFrame:
    """Return ``OF_BATCH`` of each step. A stretch that passes its request's prompt is cut there."""
    got, computed = pl.col("scheduled_tokens"), pl.col("computed_tokens")
    length = pl.col("last_step") - pl.col("step") + 1
    missing = pl.max_horizontal("prompt_tokens", "lost_tokens") - computed
    stretches = (
        with_work(timeline, timeline.stretches.filter(got > 0).collect())
        .filter(pl.col("prompt_tokens").is_not_null())
        .with_columns(prefill_steps=((missing + got - 1) // got).clip(0, length))
    )
    decodes_from = pl.col("step") + pl.col("prefill_steps")
    prefill = stretches.filter(pl.col("prefill_steps") > 0).with_columns(last_step=decodes_from - 1)
    decode = stretches.filter(pl.col("prefill_steps") < length).with_columns(
        step=decodes_from, computed_tokens=computed + pl.col("prefill_steps") * got
    )
    parts = pl.concat(
        [
            _parts(prefill, "prefill", got, 2 * got * computed + got * got, 2 * got * got),
            _parts(decode, "decode", got, computed, got),
        ],
        how="diagonal",
    ).fill_null(0)
    summed = {name: name for name in parts.columns if name not in {"step", "last_step"}}
    sums = at_steps(level(parts, "step", pl.col("last_step") + 1, **summed), timeline.steps.select("step"))
    attention, context = (
        pl.col(f"{kind}_at_zero") + pl.col("step") * pl.col(f"{kind}_slope") for kind in ("prefill", "decode")
    )
    return sums.with_columns(prefill_attention=attention / 2, decode_context_tokens=context).select(
        "step", *OF_BATCH
    )


def _parts(
    stretches: pl.DataFrame, kind: str, tokens: pl.Expr, value: pl.Expr, slope: pl.Expr
) -> pl.DataFrame:
    """Return what each stretch adds to its steps: ``value`` in its first step, growing by ``slope``."""
    return stretches.select(
        "step",
        "last_step",
        tokens.alias(f"{kind}_tokens"),
        pl.lit(1, pl.Int64).alias(f"{kind}_requests"),
        slope.alias(f"{kind}_slope"),
        (value - pl.col("step") * slope).alias(f"{kind}_at_zero"),
    )


def _gaps(timeline: Timeline) -> pl.DataFrame:
    """Return ``step``, ``gap_us`` (the host's time since the update before each step) and ``arrivals``."""
    updated = (
        timeline.steps.filter((pl.col("total_requests") > 0) & pl.col("update_us").is_not_null())
        .select(begin_us=pl.col("output_us") + pl.col("update_us"))
        .sort("begin_us")
    )
    steps = timeline.steps.select("step", end_us="start_us").sort("end_us")
    gaps = (
        steps.with_columns(before_us=pl.col("end_us").shift(1))
        .join_asof(updated, left_on="end_us", right_on="begin_us", coalesce=False)
        .filter(pl.col("before_us") < pl.col("begin_us"))
    )
    idle = timeline.engine_states.filter(pl.col("state") == "idle")
    queued = timeline.arrivals.select(pl.col("queued_us").cast(pl.Int64)).sort("queued_us")
    queued = queued.with_row_index("arrived", 1).with_columns(pl.col("arrived").cast(pl.Int64))

    def arrived_before(moment: str) -> pl.Series:
        moments = gaps.select(pl.col(moment).cast(pl.Int64))
        return moments.join_asof(queued, left_on=moment, right_on="queued_us")["arrived"].fill_null(0)

    return (
        gaps.with_columns(
            arrivals=arrived_before("end_us") - arrived_before("begin_us"), idle_us=overlap_us(gaps, idle)
        )
        .filter(pl.col("idle_us") == 0)
        .select("step", "arrivals", gap_us=pl.col("end_us") - pl.col("begin_us"))
    )


def _wakes(timeline: Timeline) -> pl.DataFrame:
    """Return ``step`` and ``wake_us``: the time until an idle engine took in its next request."""
    work = pl.col("num_running_after") + pl.col("num_waiting_after")
    idle = timeline.steps.sort("step").filter(
        (pl.col("total_requests").shift(1).fill_null(0) == 0) & (work.shift(1).fill_null(0) == 0)
    )
    arrivals = (
        timeline.arrivals.filter(pl.col("input_queue_us").is_not_null())
        .group_by("step")
        .agg(wake_us=(pl.col("queued_us").min() - pl.col("input_queue_us").min()).cast(pl.Float64))
    )
    return idle.select("step").join(arrivals, on="step").filter(pl.col("wake_us") >= 0)
