"""Metrics of serving as vLLM's benchmarks define them: latencies of requests, their tails, and throughput.

From its arrival to its first or last token, a request is in exactly one state at each moment, for one cause
or in one interruption. The latency of the slowest requests minus the latency of the requests around the
median therefore equals the sum of the differences in the time per state and cause (``tails``).

A trial of ``schedtrace run`` has a beginning and an end, so its throughput refers to its whole duration, as
in vLLM's benchmarks. The load of a server has neither, so its throughput refers to the time in which it had a
request, because idle hours say nothing about the engine.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import polars as pl

from schedtrace.diagnose.waits import mean
from schedtrace.model.causes import Cause
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import LatencyTail, RunReport, TailPart
from schedtrace.model.say import say
from schedtrace.model.statistics import Distribution, Percentiles
from schedtrace.read.trace import Trace
from schedtrace.timeline.engine_states import BUSY
from schedtrace.timeline.events import INTERRUPTED, STARVED
from schedtrace.timeline.frames import without_gaps
from schedtrace.timeline.pieces import place_of
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us, total_us, united
from schedtrace.timeline.timeline import Timeline, made_once

FINISHED = ["STOPPED", "LENGTH_CAPPED", "REPETITION"]
"""Names in ``RequestStatus`` of requests that finished with the requested output."""
_DONE = pl.col("status").is_in(FINISHED).fill_null(value=False)
ENDS = ("arrived_us", "first_token_us", "last_token_us", "output_tokens")
"""Columns of ``Finish`` from which latencies are computed."""


def with_latencies(requests: pl.DataFrame) -> pl.DataFrame:
    """Add latencies to rows with the columns of ``Finish``; null if a request has none or it is not recorded.

    * ``done``: whether the request finished with the requested output,
    * ``ttft_us``: from the arrival at the front end to the first token, however the request ended,
    * ``tpot_us``: time per output token after the first, and
    * ``e2e_us``: from the arrival to the last token, both only if ``done``.
    """
    tokens, decode_us = pl.col("output_tokens"), pl.col("last_token_us") - pl.col("first_token_us")
    return requests.with_columns(
        done=_DONE,
        ttft_us=pl.col("first_token_us") - pl.col("arrived_us"),
        tpot_us=pl.when(_DONE & (tokens > 1)).then(decode_us / (tokens - 1)),
        e2e_us=pl.when(_DONE).then(pl.col("last_token_us") - pl.col("arrived_us")),
    )


@made_once
def request_latencies(timeline: Timeline) -> pl.DataFrame:
    """Return a row per request that ended or is still present, in order of arrival at the front end.

    Columns: ``request_id``, ``trial``, those of ``ENDS`` and those of ``with_latencies``.
    """
    columns = ["request_id", "trial", *ENDS, "status"]
    ended = timeline.finishes.select(columns)
    asked = timeline.started_requests
    there = asked.join(ended, on="request_id", how="anti", maintain_order="left").select(
        "request_id", "trial", "arrived_us"
    )
    ids = there["request_id"]
    first = timeline.present.filter(pl.col("request_id").is_in(pl.lit(ids).implode()))
    first = first[["request_id", "first_token_us"]]
    if not ids.is_empty():  # the first tokens that they already have
        steps = timeline.steps.select(pl.col("step").cast(pl.Int64), "output_us").sort("step")
        opens = _outputs(timeline, steps, ids).filter("opens")
        seen = opens.select("request_id", first_token_us=steps["output_us"].gather(opens["first"]))
        first = pl.concat([first, seen]).group_by("request_id").agg(pl.col("first_token_us").min())
    there = there.join(first, on="request_id", how="left", maintain_order="left")
    rows = pl.concat([ended, there], how="diagonal_relaxed").sort("arrived_us", maintain_order=True)
    return with_latencies(rows).drop("status")


def percentiles(frame: pl.DataFrame, value: pl.Expr) -> Percentiles | None:
    """Return the mean and linearly interpolated percentiles of a value over the rows that have it."""
    values = frame.select(value.drop_nulls().alias("value"))["value"]
    if values.is_empty():
        return None
    p50, p90, p99 = (float(values.quantile(part, "linear") or 0.0) for part in (0.5, 0.9, 0.99))
    mean = float(values.mean() or 0.0)  # type: ignore[arg-type]  # a mean of floats is a float
    return Percentiles(count=len(values), mean=mean, p50=p50, p90=p90, p99=p99)


def distribution(values: pl.DataFrame) -> Distribution | None:
    """Return the distribution of ``us`` in ms, each value counted ``weight`` times; None without values."""
    rows = grouped_by_value(values)
    if rows.is_empty():
        return None
    us, weight = (rows[name].to_numpy() for name in ("us", "weight"))
    passed = weight.cumsum()
    count = int(passed[-1])

    def quantile(part: float) -> float:
        place = part * (count - 1)
        low, high = (us[int(passed.searchsorted(at, side="right"))] for at in (int(place), -(-place // 1)))
        return float(low + (place - int(place)) * (high - low)) / 1e3

    total_us = sum((us * weight).tolist())
    return Distribution(
        count=count,
        mean=total_us / count / 1e3,
        p50=quantile(0.5),
        p90=quantile(0.9),
        p99=quantile(0.99),
        max=float(us[-1]) / 1e3,
    )


def grouped_by_value(values: pl.DataFrame) -> pl.DataFrame:
    """Return each recorded value of ``us`` once, in order, with the sum of its weights."""
    import numpy as np  # noqa: PLC0415  # the command line must answer before it is loaded

    us, weight = (values[name].to_numpy().astype(float) for name in ("us", "weight"))
    counts = (weight > 0) & ~np.isnan(us)
    each, places = np.unique(us[counts], return_inverse=True)
    sums = np.bincount(places, weight[counts], minlength=len(each)).astype(np.int64)
    return pl.DataFrame({"us": each, "weight": sums})


def single(frame: pl.DataFrame, us: pl.Expr) -> pl.DataFrame:
    """Return the values with weight 1, for ``distribution``."""
    return frame.select(us=us.cast(pl.Float64), weight=pl.lit(1, pl.Int64))


def inter_token(timeline: Timeline) -> pl.DataFrame:
    """Return the times between consecutive outputs of requests (``us``), with their number (``weight``).

    Within a stretch of decodes, a request has an output in every step. Such times are therefore counted once
    per step, weighted by the number of these requests, instead of once per step and request.
    """
    import numpy as np  # noqa: PLC0415  # as above

    steps = timeline.steps.select(pl.col("step").cast(pl.Int64), "output_us").sort("step")
    output_us = steps["output_us"].to_numpy().astype(float)
    outputs = _outputs(timeline, steps)
    after = [np.minimum(outputs[name].to_numpy() + 1, steps.height) for name in ("first", "last")]
    begun, over = (np.bincount(places, minlength=steps.height + 1) for places in after)
    within_us, weights = np.diff(output_us, prepend=np.nan), (begun - over).cumsum()[: steps.height]
    pairs = outputs.with_columns(before=pl.col("last").shift(1).over("request_id")).drop_nulls("before")
    first, before = pairs["first"].to_numpy(), pairs["before"].to_numpy()
    behind = np.sort(timeline.gaps["next_step"].to_numpy())  # what came in a gap of the trace is not known
    gaps = np.searchsorted(behind, steps["step"].to_numpy(), side="right")
    between_us = (output_us[first] - output_us[before])[gaps[first] == gaps[before]]
    weights = np.pad(weights, (0, len(between_us)), constant_values=1)
    rows = {"us": np.concatenate([within_us, between_us]), "weight": weights}
    return grouped_by_value(pl.DataFrame(rows))


def _outputs(timeline: Timeline, steps: pl.DataFrame, ids: pl.Series | None = None) -> pl.DataFrame:
    """Return ``request_id``, and the places ``first`` and ``last`` of a stretch's steps with a token.

    A step yields a token if it computes the last existing token of the request: the last of the prompt or,
    after a preemption, the last sampled token. ``opens`` is whether the stretch's first token is the
    request's first.

    Args:
        timeline: Timeline of one engine.
        steps: Steps of the timeline, with ``output_us``.
        ids: Ids of the requests; None for all.
    """
    stretches = timeline.measured_stretches
    if ids is not None:
        stretches = stretches.filter(pl.col("request_id").is_in(pl.lit(ids).implode()))
    lost = pl.col("lost_tokens")
    tokens_known = pl.max_horizontal("prompt_tokens", pl.when(lost >= pl.col("prompt_tokens")).then(lost + 1))
    each = pl.col("scheduled_tokens").clip(1)
    silent = (-(-(tokens_known - pl.col("computed_tokens")) // each) - 1).clip(0)
    of_prompt = pl.col("computed_tokens") + pl.col("silent") * each < pl.col("prompt_tokens")
    outputs = (
        timeline.with_work(stretches.collect())
        .drop_nulls("prompt_tokens")
        .with_columns(silent=silent)
        .filter(pl.col("step") + pl.col("silent") <= pl.col("last_step"))
        .sort("request_id", "step", maintain_order=True)
    )
    outputs = place_of(outputs, steps, "step", "first")
    length = pl.col("last_step") - pl.col("step")
    # With steps in flight, another step may be scheduled before a request's last token is known.
    ended = timeline.finishes.drop_nulls("last_token_us").unique("request_id", keep="last")
    back = steps.select(pl.col("output_us").fill_null(strategy="forward").fill_null(0).cum_max())["output_us"]
    places = back.search_sorted(ended["last_token_us"], side="right")
    ends = ended.select("request_id", end=pl.lit(places).cast(pl.Int64) - 1)
    return (
        outputs.join(ends, on="request_id", how="left", maintain_order="left")
        .select(
            "request_id",
            opens=of_prompt & (lost < pl.col("prompt_tokens")),
            first=pl.col("first") + pl.col("silent"),
            last=pl.min_horizontal(pl.col("first") + length, "end"),
        )
        .filter(pl.col("first") <= pl.col("last"))
    )


FEWEST = 20
"""Minimum number of requests that can have a tail."""
SLOWEST_FRAC = 0.01
"""Share of the requests that count as the slowest, rounded up to a request."""
MIDDLE_FRAC = 0.1
"""Share of the requests, around the median, with which the slowest requests are compared."""
TIMES_MEDIAN = 3.0
"""Minimum ratio of the slowest requests' mean latency to the median for a tail."""
LEAST_FRAC = 0.01
"""Minimum share of the difference that a part must have to be reported."""
MOST_FRAC = 0.5
"""Minimum share of the mean time to first token that a wait must take to be named."""


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
    admitted = timeline.admitted.filter(pl.col("phase") == "new").unique("request_id", keep="last")
    computed = (pl.col("prompt_tokens") - pl.col("computed_tokens")).clip(
        0
    )  # not cached when it was admitted
    prefills = (
        timeline.known_requests.unique("request_id", keep="last")
        .join(admitted, on="request_id")
        .select("request_id", prefill_tokens=computed)
    )
    requests = requests.join(prefills, on="request_id", how="left", maintain_order="left")
    return [tail for metric in _METRICS if (tail := _tail(timeline, requests, metric)) is not None]


class FirstTokenWait(NamedTuple):
    """Wait because of one cause, which takes most of the mean time to first token."""

    cause: str
    share_frac: float
    """Share of the mean time to first token."""
    mean_us: float
    """Mean time to first token."""


def first_token_wait(timeline: Timeline) -> FirstTokenWait | None:
    """Return the wait that takes at least half of the mean time to first token; None if there is none."""
    requests = request_latencies(timeline).unique("request_id", keep="last", maintain_order=True)
    requests = requests.drop_nulls(["ttft_us", "arrived_us", "first_token_us"])
    if requests.is_empty():
        return None
    parts, _ = _parts(timeline, requests, _METRICS[0])
    mean_us = float(parts["us"].sum())
    refused = parts.filter(pl.col("state") == "waiting", pl.col("cause").is_in([*map(str, Cause)]))
    for cause, us in refused.filter(pl.col("us") >= MOST_FRAC * mean_us)[["cause", "us"]].iter_rows():
        return FirstTokenWait(cause, us / mean_us, mean_us)
    return None


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
        prefill_tokens=mean(slowest, pl.col("prefill_tokens")),
        usual_prefill_tokens=mean(middle, pl.col("prefill_tokens")),
        output_tokens=mean(slowest, pl.col("output_tokens")),
        usual_output_tokens=mean(middle, pl.col("output_tokens")),
    )


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
    """Add ``us``, the length of each row, and move the time that the device took too long to rows of its own.

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


Over = Literal["trial", "requests"]
"""Period of the throughput: the whole trial, or the time in which there were requests."""
NOT_IDLE_FRAC = 0.99
"""Share of time with requests below which a report names the period of the throughput."""
SPAN = {"begin_us": pl.Int64, "end_us": pl.Int64}
"""Columns of a table of spans of time."""


class Throughput(NamedTuple):
    """Rates as vLLM's benchmarks print them."""

    requests_per_s: float
    total_tokens_per_s: float
    output_tokens_per_s: float


def throughput(requests: int, prompt_tokens: int, output_tokens: int, seconds: float) -> Throughput:
    """Return the rates of finished requests, prompt tokens and output tokens, in a time above 0."""
    return Throughput(requests / seconds, (prompt_tokens + output_tokens) / seconds, output_tokens / seconds)


def over(timeline: Timeline) -> Over:
    """Return the period that the throughput covers: whole trials, if the trace has them in full."""
    return "trial" if timeline.whole_trials else "requests"


@made_once
def counted_spans(timeline: Timeline) -> pl.DataFrame:
    """Return the counted periods of each trial, by the wall clock: ``trial``, ``begin_us`` and ``end_us``.

    A whole trial has one row, from the start of its first step to its last output. Otherwise, there is one
    row for every uninterrupted period in which the engine had a request. Gaps of the trace are cut out in
    both cases.
    """
    anchor = timeline.header.wall_anchor_us
    if timeline.whole_trials:
        spans = timeline.steps.group_by("trial", maintain_order=True).agg(
            begin_us=pl.col("start_us").min(), end_us=pl.col("output_us").max()
        )
        spans = without_gaps(spans, timeline.gaps)
    else:
        busy = timeline.engine_states.filter(pl.col("state").is_in(BUSY))
        spans = pl.concat(
            [
                united(of_trial).with_columns(trial=pl.lit(of_trial["trial"][0], pl.Int64))
                for of_trial in busy.partition_by("trial")
            ]
            or [pl.DataFrame(schema={**SPAN, "trial": pl.Int64})]
        )
    return spans.select(
        pl.col("trial").cast(pl.Int64), pl.col("begin_us", "end_us").cast(pl.Int64) + anchor
    ).drop_nulls(["begin_us", "end_us"])


def counted_s(engines: Iterable[pl.DataFrame]) -> dict[int | None, float]:
    """Return the counted seconds of each trial; a moment with several engines counts once.

    Args:
        engines: ``counted_spans`` of each engine.
    """
    spans = pl.concat(engines).partition_by("trial", as_dict=True)
    return {trial: covered_seconds(of_trial) for (trial,), of_trial in spans.items()}


def request_presence(trace: Trace, begin_us: int, end_us: int) -> pl.DataFrame:
    """Return the time span of each request in the scheduler, cut to the time between two moments."""
    there = trace.present.select("request_id", queued_us="at_us")
    begun = pl.concat([there, trace.arrivals[["request_id", "queued_us"]]])
    ended = trace.finishes.group_by("request_id").agg(end_us=pl.col("finished_us").max())
    return (
        begun.group_by("request_id")
        .agg(begin_us=pl.col("queued_us").min())
        .join(ended, on="request_id", how="left")
        .select(begin_us="begin_us", end_us=pl.col("end_us").fill_null(end_us))
        .select(pl.col(name).cast(kind).clip(begin_us, end_us) for name, kind in SPAN.items())
        .filter(LENGTH_US > 0)
    )


def counted_time(run: RunReport) -> Message:
    """Return a note on the period that a run's throughput covers, if the run was idle for part of it.

    Examples: ``while requests were present (38 of 57 s)``, ``over whole trials (57 s, requests for 38 s)``.
    """
    trials = [trial for trial in run.trials if trial.throughput_s]
    counted = sum({trial.trial: trial.throughput_s or 0.0 for trial in trials}.values())
    lasted = sum(
        max((report.duration_s or 0.0 for report in trials if report.trial == number), default=0.0)
        for number in {trial.trial for trial in trials}
    )
    busy_ms = dict.fromkeys((trial.engine_rank for trial in trials), 0.0)
    for part in run.engine_time:
        if part.engine_rank in busy_ms and part.state in BUSY:
            busy_ms[part.engine_rank] += part.time_ms
    busy = max(busy_ms.values(), default=0.0) / 1e3
    if {trial.throughput_over for trial in trials} == {"requests"} and counted < NOT_IDLE_FRAC * lasted:
        return say(
            "while requests were present ({counted:n} of {lasted:n} s)",
            counted=counted,
            lasted=lasted,
        )
    if {trial.throughput_over for trial in trials} == {"trial"} and busy < NOT_IDLE_FRAC * counted:
        return say(
            "over whole trials ({counted:n} s, requests for {busy:n} s)",
            counted=counted,
            busy=busy,
        )
    return NOTHING


def covered_seconds(spans: pl.DataFrame) -> float:
    """Return the seconds that these spans cover, each moment once."""
    return total_us(united(spans)) / 1e6


def sampled_tokens(steps: pl.DataFrame, finished: pl.DataFrame) -> int:
    """Return the number of output tokens of these steps or, if not recorded, of the finished requests."""
    if "output_tokens" in steps.columns and steps["output_tokens"].count():
        return int(steps["output_tokens"].sum())
    return int(finished["output_tokens"].sum())
