"""Latency tail: what makes the slowest requests slow, even if it is a small share of all requests' time.

From its arrival to its first or last token, a request is in exactly one state at each moment, for one cause
or in one interruption. The latency of the slowest requests minus the latency of the requests around the
median therefore equals the sum of the differences in the time per state and cause.
"""

import math
from dataclasses import dataclass

import polars as pl

from schedtrace.diagnose.latencies import request_latencies
from schedtrace.model.report import LatencyTail, TailPart
from schedtrace.timeline.events import INTERRUPTED, STARVED
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us
from schedtrace.timeline.timeline import Timeline

FEWEST = 20
"""Fewest requests that can have a tail."""
SLOWEST_FRAC = 0.01
"""Share of the requests that count as the slowest, rounded up to a request."""
MIDDLE_FRAC = 0.1
"""Share of the requests, around the median, with which the slowest requests are compared."""
TIMES_MEDIAN = 3.0
"""Least ratio of the slowest requests' mean latency to the median that makes them a tail."""
LEAST_FRAC = 0.01
"""Least share of the difference that a part must have to be reported."""


@dataclass(frozen=True)
class _Metric:
    """Latency metric and the period of a request that it measures."""

    name: str
    """Name of the metric in the report."""
    value: str
    """Column with the latency in microseconds."""
    begin: str
    """Column with the start of the period in microseconds."""
    end: str
    """Column with the end of the period in microseconds."""
    per: pl.Expr
    """Divisor of the period, such as the number of output tokens after the first."""


_ONE = pl.lit(1.0)
_METRICS = (
    _Metric("ttft_ms", "ttft_us", "arrived_us", "first_token_us", _ONE),
    _Metric("tpot_ms", "tpot_us", "first_token_us", "last_token_us", pl.col("output_tokens") - 1.0),
    _Metric("e2e_ms", "e2e_us", "arrived_us", "last_token_us", _ONE),
)


def tails(timeline: Timeline) -> list[LatencyTail]:
    """Return the tails of TTFT, TPOT and end-to-end latency, if the slowest requests form a tail."""
    requests = request_latencies(timeline).unique("request_id", keep="last", maintain_order=True)
    prompts = timeline.known_requests.unique("request_id", keep="last")[["request_id", "prompt_tokens"]]
    requests = requests.join(prompts, on="request_id", how="left", maintain_order="left")
    return [tail for metric in _METRICS if (tail := _tail(timeline, requests, metric)) is not None]


def _tail(timeline: Timeline, requests: pl.DataFrame, metric: _Metric) -> LatencyTail | None:
    ranked = requests.drop_nulls([metric.value, metric.begin, metric.end]).sort(metric.value, "request_id")
    count = ranked.height
    slowest = ranked.tail(math.ceil(SLOWEST_FRAC * count))
    median_us, slowest_us = ranked[metric.value].median(), slowest[metric.value].mean()
    if count < FEWEST or not isinstance(median_us, float) or not isinstance(slowest_us, float):
        return None
    if slowest_us < TIMES_MEDIAN * median_us:
        return None
    size = max(1, round(MIDDLE_FRAC * count))
    middle = ranked.slice((count - size) // 2, size)
    (slow, rows), (usual, _) = (_parts(timeline, group, metric) for group in (slowest, middle))
    differences = (
        slow.join(usual, on=("state", "cause"), how="full", coalesce=True, nulls_equal=True, suffix="_usual")
        .select("state", "cause", us=pl.col("us").fill_null(0) - pl.col("us_usual").fill_null(0))
        .sort("us", "state", "cause", descending=[True, False, False], nulls_last=True)
    )
    whole_us = float(differences["us"].sum())
    parts = [
        TailPart(state=state, cause=cause, time_ms=us / 1e3, share_frac=us / whole_us)
        for state, cause, us in differences.iter_rows()
        if whole_us > 0 and abs(us) >= LEAST_FRAC * whole_us
    ]
    if not parts:
        return None
    main = rows.filter(pl.col("state") == parts[0].state, pl.col("cause").eq_missing(pl.lit(parts[0].cause)))
    return LatencyTail(
        engine_rank=timeline.rank,
        metric=metric.name,
        requests=count,
        slowest=slowest.height,
        slowest_request=str(slowest["request_id"][-1]),
        slowest_ms=slowest_us / 1e3,
        median_ms=median_us / 1e3,
        parts=parts,
        first_step=main["begin_step"].min(),  # type: ignore[arg-type]  # a column of integers
        last_step=main["end_step"].max(),  # type: ignore[arg-type]  # a column of integers
        prompt_tokens=_mean(slowest["prompt_tokens"]),
        usual_prompt_tokens=_mean(middle["prompt_tokens"]),
        output_tokens=_mean(slowest["output_tokens"]),
        usual_output_tokens=_mean(middle["output_tokens"]),
    )


def _mean(values: pl.Series) -> float | None:
    mean = values.drop_nulls().mean()
    return float(mean) if isinstance(mean, int | float) else None


def _parts(timeline: Timeline, group: pl.DataFrame, metric: _Metric) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the requests' mean time in microseconds by ``state`` and ``cause``, and the rows behind it."""
    window = group.select("request_id", window_begin=metric.begin, window_end=metric.end, per=metric.per)
    rows = (
        timeline.interrupted_states.join(window, on="request_id", how="inner", maintain_order="left")
        .with_columns(
            begin_us=pl.max_horizontal("begin_us", "window_begin"),
            end_us=pl.min_horizontal("end_us", "window_end"),
        )
        .filter(LENGTH_US > 0)
    )
    rows = _with_slow_steps(timeline, rows)
    means = rows.group_by("state", "cause").agg(us=(pl.col("us") / pl.col("per")).sum() / group.height)
    return means, rows


def _with_slow_steps(timeline: Timeline, rows: pl.DataFrame) -> pl.DataFrame:
    """Add ``us``, the length of each row, and split off the time in which the device took too long.

    ``interrupted_states`` leaves that time in the state of a computing request, because the request is in its
    own step and does not wait. Here it becomes a row of its own, in the state ``interrupted``.
    """
    columns = ["state", "cause", "begin_step", "end_step", "us", "per"]
    slow = merged(timeline.events.filter(pl.col("part") == "device", pl.col("kind") != STARVED))
    own = rows.filter(pl.col("state") != INTERRUPTED)
    lost = pl.zeros(own.height, pl.Int64, eager=True)
    pieces = [rows.filter(pl.col("state") == INTERRUPTED).with_columns(us=LENGTH_US.cast(pl.Int64))]
    for kind in slow["kind"].unique(maintain_order=True):
        spans = slow.filter(pl.col("kind") == kind)
        within = overlap_us(own, spans).cast(pl.Int64)
        lost += within
        first, last = spans["step"].min(), spans["step"].max()
        pieces.append(
            own.with_columns(
                us=within,
                state=pl.lit(INTERRUPTED),
                cause=pl.lit(kind),
                begin_step=pl.max_horizontal("begin_step", pl.lit(first)),
                end_step=pl.min_horizontal("end_step", pl.lit(last)),
            )
        )
    pieces.append(own.with_columns(us=LENGTH_US.cast(pl.Int64) - lost))
    return pl.concat([piece.select(columns) for piece in pieces], how="vertical_relaxed").filter(
        pl.col("us") > 0
    )
