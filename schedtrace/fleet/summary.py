"""Summary of one engine's trace, kept after the engine's timeline is released.

Latencies remain as mergeable sketches (DDSketch), whose percentiles have a bounded relative error.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import polars as pl
from ddsketch import DDSketch
from ddsketch.ddsketch import BaseDDSketch
from ddsketch.mapping import LogarithmicMapping
from ddsketch.store import DenseStore

from schedtrace.diagnose.analyze import Timelines, analyze_run
from schedtrace.diagnose.serving_metrics import request_latencies
from schedtrace.diagnose.verdict import leading
from schedtrace.fleet.tenants import TenantKey, gpus_of, tenant_fields
from schedtrace.fleet.transfers import transfer_fields
from schedtrace.model.fleet import (
    EngineSummary,
    FleetLatency,
    SummaryFinding,
    SummaryPace,
    SummarySketch,
    SummaryState,
    SummaryTime,
)
from schedtrace.model.message import Message, Value
from schedtrace.model.printable import json_of
from schedtrace.model.report import Finding
from schedtrace.read.run import Run
from schedtrace.timeline.frames import missing_us
from schedtrace.timeline.step_time import FEATURES
from schedtrace.timeline.timeline import Timeline
from schedtrace.timeline.window import Window

CELLS = 40
"""Number of equal parts of a recording in which arrivals are counted."""
CLASSES_PER_DOUBLING = 2
"""Number of classes of work per doubling of the tokens."""
FEWEST_STEPS = 3
"""Minimum number of steps of a class for which a median is kept."""


def summarize_run(
    run: Run, window: Window | None, content: str, tenant_key: TenantKey | None = None
) -> EngineSummary:
    """Return the summary of a run's first engine, for a window if any, and by tenant if there is a key.

    Raises:
        InputError: If its trace cannot be read.
        UsageError: If the window contains no step, or the record has no times.
    """
    timelines = Timelines(run, window)
    report = analyze_run(run, window, timelines=timelines)
    timeline, header = timelines.at(0), run.traces[0].header
    role = header.settings.get("kv_transfer_config.kv_role")
    clock_errors = (header.wall_uncertainty_us, header.wall_max_error_us)
    trials = report.trials
    finished = [trial.requests_finished for trial in trials]
    roots = [finding for finding in report.findings if finding.is_root]
    leads = leading(report.findings)[:1]
    return EngineSummary(
        content=content,
        window=str(window) if window is not None else "",
        host=header.host,
        pid=header.pid,
        engine_rank=header.engine_rank,
        model=header.model,
        device=header.device,
        role=role if isinstance(role, str) else "",
        vllm_version=header.vllm_version,
        clock=header.clock,
        clock_id=header.clock_id,
        begin_unix_us=header.wall_anchor_us + timeline.begin_us,
        clock_error_us=None if None in clock_errors else sum(error or 0 for error in clock_errors),
        token_budget=header.token_budget,
        max_num_seqs=header.max_num_running_reqs,
        max_model_len=header.max_model_len,
        kv_blocks=header.kv_blocks_total,
        block_size=header.block_size,
        steps=timeline.steps.height,
        length_us=max(0, timeline.end_us - timeline.begin_us),
        busy_us=timeline.busy_us,
        missing_us=missing_us(timeline),
        requests_us=timeline.requests_us,
        finished=None if None in finished else sum(count or 0 for count in finished),
        output_tokens_per_s=trials[0].output_tokens_per_s if len(trials) == 1 else None,
        **_arrivals(timeline),
        times=[
            SummaryTime(part=part.part, cause=part.cause, us=round(1e3 * part.time_ms))
            for part in report.time_split
        ],
        states=[
            SummaryState(state=state.state, us=round(1e3 * state.time_ms)) for state in report.engine_time
        ],
        sketches=list(_sketches(timeline)),
        findings=[_finding(root, leads=root in leads) for root in roots],
        paces=paces(timeline.steps),
        lacks=report.lacks,
        problems=[message_json(problem) for problem in report.problems],
        gpus=gpus_of(header),
        **({} if tenant_key is None else tenant_fields(timeline, tenant_key)),
        **transfer_fields(timeline),
    )


def _arrivals(timeline: Timeline) -> dict[str, Any]:
    """Return the fields of a summary that are about arrivals."""
    rows = timeline.arrivals.filter(~pl.col("streaming_update"))
    moments = rows.select(us=pl.coalesce("arrived_us", "queued_us"))["us"].drop_nulls().sort()
    gaps = moments.diff().fill_null(0)
    longest = gaps.arg_max() if gaps.len() else None
    begin_us, length_us = timeline.begin_us, max(1, timeline.end_us - timeline.begin_us)
    counts = [0] * CELLS
    for us in moments:
        counts[min(CELLS - 1, max(0, (us - begin_us) * CELLS // length_us))] += 1
    return {
        "requests": rows.height,
        "arrived_tokens": int(rows["prompt_tokens"].sum()),
        "arrivals_us": moments[-1] - moments[0] if moments.len() else 0,
        "quiet_us": 0 if longest is None else gaps[longest],
        "quiet_begin_us": moments[longest - 1] - begin_us if longest else 0,
        "arrivals": counts,
    }


def _sketches(timeline: Timeline) -> Iterator[SummarySketch]:
    latencies = request_latencies(timeline)
    columns = {
        "queue": timeline.queue_times["queue_us"],
        **{name: latencies[f"{name}_us"] for name in ("ttft", "tpot", "e2e")},
    }
    for metric, values in columns.items():
        sketch = sketch_of(metric, (values.drop_nulls().cast(pl.Float64) / 1e3).to_list())
        if sketch is not None:
            yield sketch


def _finding(root: Finding, *, leads: bool) -> SummaryFinding:
    gain = root.gain
    return SummaryFinding(
        code=root.code,
        severity=root.severity,
        leads=leads,
        share_frac=root.share_frac,
        saved_frac=gain.saved_frac if gain else None,
        title=message_json(root.title),
        holder=message_json(root.holder),
    )


def paces(steps: pl.DataFrame) -> list[SummaryPace]:
    """Return the median device time of steps for each class of work.

    Args:
        steps: Steps of a timeline.
    """
    if not {"execution_us", *FEATURES} <= {*steps.columns}:
        return []
    classes = []
    for tokens in map(pl.col, FEATURES):  # class 0, or the rounded logarithm of the number of tokens
        logarithm = (tokens.clip(1).log(2) * CLASSES_PER_DOUBLING).round().cast(pl.Int64) + 1
        classes.append(pl.when(tokens <= 0).then(0).otherwise(logarithm).cast(pl.String))
    rows = (
        steps.filter(pl.col("total_requests") > 0)
        .with_columns(us="execution_us")
        .drop_nulls(["us", *FEATURES])
        .filter(pl.col("us") > 0)
        .group_by(work=pl.concat_str(classes, separator="/"))
        .agg(steps=pl.len(), median_us=pl.col("us").median())
        .filter(pl.col("steps") >= FEWEST_STEPS)
        .sort("work")
    )
    return [SummaryPace(**row) for row in rows.to_dicts()]


def message_json(message: Message) -> str:
    """Return a message as JSON, for a column of a table."""
    return json_of(message).decode()


def message_from(text: str) -> Message:
    """Return the message that ``message_json`` encoded."""
    message: Message = _value(msgspec.json.decode(text))
    return message


def _value(decoded: Any) -> Any:
    if not isinstance(decoded, dict):
        return decoded
    if decoded["is"] == "message":
        return Message(
            decoded["template"],
            {name: _value(argument) for name, argument in decoded.get("arguments", {}).items()},
        )
    return msgspec.convert(decoded, Value)


ERROR_FRAC = 0.01
"""Maximum relative error of a percentile of a merged sketch, compared with the exact value."""


def sketch_of(metric: str, values_ms: Iterable[float]) -> SummarySketch | None:
    """Return the sketch of a latency; None without values.

    Args:
        metric: Name of the latency.
        values_ms: Values in milliseconds; a value below 0, which two clocks may cause, counts as 0.
    """
    values = [max(0.0, value) for value in values_ms]
    if not values:
        return None
    ascending, mapping, bins = sorted(values), LogarithmicMapping(ERROR_FRAC), []
    begin = bisect_right(ascending, mapping.min_possible)
    while begin < len(ascending):
        key = mapping.key(ascending[begin])
        end = bisect_right(ascending, key, begin, key=mapping.key)
        bins.append((key, end - begin))
        begin = end
    return SummarySketch(
        metric=metric,
        keys=[key for key, _ in bins],
        counts=[float(count) for _, count in bins],
        zeros=float(len(values) - sum(count for _, count in bins)),
        sum_ms=sum(values),
        max_ms=ascending[-1],
    )


def _loaded(stored: SummarySketch) -> BaseDDSketch:
    positive = DenseStore()
    for key, count in zip(stored.keys, stored.counts, strict=True):
        positive.add(key, count)
    sketch = BaseDDSketch(LogarithmicMapping(ERROR_FRAC), positive, DenseStore(), stored.zeros)
    sketch._sum = stored.sum_ms  # noqa: SLF001  # the library reads sketches only from protobuf
    return sketch


def merged_latency(sketches: Sequence[SummarySketch]) -> FleetLatency | None:
    """Return the distribution of one latency over all engines; None without values."""
    merged = DDSketch(ERROR_FRAC)
    for stored in sketches:
        merged.merge(_loaded(stored))
    if not merged.count:
        return None
    p50, p90, p99 = (float(merged.get_quantile_value(part) or 0.0) for part in (0.5, 0.9, 0.99))
    return FleetLatency(
        metric=sketches[0].metric,
        count=round(merged.count),
        mean_ms=merged.sum / merged.count,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=max(stored.max_ms for stored in sketches),
        error_frac=ERROR_FRAC,
    )


def percentile_ms(sketches: Sequence[SummarySketch], metric: str, part: float) -> float | None:
    """Return a percentile of one engine's latency; None if the engine has no values."""
    stored = next((sketch for sketch in sketches if sketch.metric == metric), None)
    value = None if stored is None else _loaded(stored).get_quantile_value(part)
    return None if value is None else float(value)
