"""Figures of each trial."""

from collections.abc import Mapping, Sequence

import polars as pl

from schedtrace.diagnose.latencies import FINISHED, percentiles, request_latencies
from schedtrace.diagnose.throughput import (
    Throughput,
    counted_s,
    counted_spans,
    over,
    sampled_tokens,
    throughput,
)
from schedtrace.model.manifest import ENDED_EARLY, Manifest, TrialResult
from schedtrace.model.report import StripCell, TrialReport
from schedtrace.model.statistics import Percentiles
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.frames import offset
from schedtrace.timeline.timeline import Timeline

STRIP_CELLS = 60


def trial_reports(
    timeline: Timeline, manifest: Manifest | None, *, engines: int = 1, queued: bool = True
) -> list[TrialReport]:
    """Return one report per trial of one engine, in the order of the trials.

    Args:
        timeline: Timeline of the engine.
        manifest: Manifest with the front end's figures, which refer to all ``engines`` together.
        engines: Number of engines in the run; with several, the throughput comes from each engine's trace and
            is then combined by ``over_all_engines``.
        queued: Whether to report queue times, for which the states of all requests are built.
    """
    seconds = counted_s([counted_spans(timeline)])
    measured = _by_trial(manifest)
    ended_early = manifest is not None and manifest.status in ENDED_EARLY
    reports = []
    for trial in timeline.trials():
        result = measured.get(trial or 0)
        measured_by = result if engines == 1 else None
        report = _report([timeline], trial, measured_by, seconds.get(trial), queued=queued)
        report.complete = trial is None or not ended_early or result is not None
        if ended_early and engines == 1 and result is not None and report.requests_finished is not None:
            report.complete = report.requests_finished >= result.num_requests  # fewer if the disk was full
        reports.append(report)
    return reports


def _by_trial(manifest: Manifest | None) -> dict[int, TrialResult]:
    """Return the front end's measurements by trial."""
    return {result.trial: result for result in manifest.trials} if manifest else {}


def over_all_engines(reports: Sequence[TrialReport], counted: Mapping[int | None, float]) -> None:
    """Set the throughput of each engine over the time of all engines, so that the throughputs add up.

    Args:
        reports: Reports of all engines.
        counted: ``throughput.counted_s`` of all engines.
    """
    for report in reports:
        whole = counted.get(report.trial)
        if report.throughput_s is None or not whole:
            continue
        for name in Throughput._fields:
            setattr(report, name, getattr(report, name) * report.throughput_s / whole)
        report.throughput_s = whole


def pooled_reports(
    timelines: Sequence[Timeline], manifest: Manifest | None, *, queued: bool = True
) -> list[TrialReport]:
    """Return one report per trial of all engines of a run together: their requests and steps on one clock.

    Latencies and throughput are those of all requests; preemptions are not counted.

    Args:
        timelines: Timelines of the engines, in the order of ranks.
        manifest: Manifest of the run.
        queued: As for ``trial_reports``.
    """
    if len(timelines) == 1:
        return trial_reports(timelines[0], manifest, queued=queued)
    measured, seconds = _by_trial(manifest), counted_s(counted_spans(timeline) for timeline in timelines)
    trials = {trial for timeline in timelines for trial in timeline.trials()}
    return [
        _report(timelines, trial, measured.get(trial or 0), seconds.get(trial), queued=queued)
        for trial in sorted(trials, key=lambda trial: trial or 0)
    ]


def _report(
    timelines: Sequence[Timeline],
    trial: int | None,
    result: TrialResult | None,
    seconds: float | None,
    *,
    queued: bool,
) -> TrialReport:
    """Return the report of one trial on these engines together.

    Args:
        timelines: Timelines of the engines.
        trial: Trial; None for a trace without trials.
        result: Measurements of the front end; None if there are none.
        seconds: Seconds that count for throughput without such measurements; None if there are none.
        queued: As for ``trial_reports``.
    """
    first = timelines[0]
    finishes = _together([timeline.trial_rows(timeline.finishes, trial) for timeline in timelines])
    steps = _together(
        [_on_clock_of(first, timeline, timeline.trial_rows(timeline.steps, trial)) for timeline in timelines]
    )
    working = steps.filter(pl.col("total_requests") > 0)
    begins = trial is not None or all(timeline.begins for timeline in timelines)
    begin = working.row(0, named=True) if working.height and begins else None
    done = finishes.filter(pl.col("status").is_in(FINISHED))
    latencies = _together([timeline.trial_rows(request_latencies(timeline), trial) for timeline in timelines])
    lives = Fact.LIVES in first.facts
    report = TrialReport(
        trial=trial,
        engine_rank=first.rank,
        complete=True,
        steps=steps.height,
        duration_s=_duration_s(steps),
        first_step_requests=None if begin is None else begin["total_requests"],
        first_step_tokens=None if begin is None else begin["used_tokens"],
        new_per_step=_new_per_step(working),
        budget_use_frac=_use(working),
        budget_use_waiting_frac=_use(working.filter(pl.col("num_waiting_after") > 0)),
        preemptions=_preemptions(first, trial) if len(timelines) == 1 else None,
        requests_finished=done.height if lives else None,
        requests_aborted=finishes.height - done.height if lives else None,
        requests_per_s=None,
        total_tokens_per_s=None,
        output_tokens_per_s=None,
        throughput_from=None,
        throughput_over=None,
        throughput_s=None,
        queue_ms=_queue_ms(timelines, trial) if queued else None,
        ttft_ms=percentiles(latencies, pl.col("ttft_us") / 1e3),
        tpot_ms=percentiles(latencies, pl.col("tpot_us") / 1e3),
        e2e_ms=percentiles(latencies, pl.col("e2e_us") / 1e3),
        iteration_ms=percentiles(steps, pl.col("elapsed_us") / 1e3)
        if "elapsed_us" in steps.columns
        else None,
        kv_cache_usage_max_frac=_largest(steps, "kv_cache_usage_frac"),
    )
    if result is not None and result.elapsed_s > 0:
        work = result.num_requests, result.input_tokens, result.output_tokens
        report.throughput_from, report.throughput_over = "front_end", "trial"
        report.throughput_s = result.elapsed_s
    else:
        work = done.height, int(done["prompt_tokens"].sum()), sampled_tokens(steps, done)
        if not lives or not any(work) or not seconds or report.duration_s is None:
            return report
        report.throughput_from, report.throughput_over = "trace", over(first)
        report.throughput_s = seconds
    rates = throughput(*work, report.throughput_s)
    report.requests_per_s, report.total_tokens_per_s, report.output_tokens_per_s = rates
    return report


def _queue_ms(timelines: Sequence[Timeline], trial: int | None) -> Percentiles | None:
    queued = _together([timeline.trial_rows(timeline.queue_times, trial) for timeline in timelines])
    return percentiles(queued, pl.col("queue_us") / 1e3)


def _together(frames: list[pl.DataFrame]) -> pl.DataFrame:
    return frames[0] if len(frames) == 1 else pl.concat(frames, how="diagonal_relaxed")


def _on_clock_of(first: Timeline, timeline: Timeline, steps: pl.DataFrame) -> pl.DataFrame:
    later_us = offset(timeline.header, first.header).us
    return steps.with_columns(pl.col("start_us", "output_us") + later_us) if later_us else steps


def _duration_s(steps: pl.DataFrame) -> float | None:
    back = steps["output_us"].drop_nulls().to_list()
    return (max(back) - min(steps["start_us"].to_list())) / 1e6 if back else None


def _largest(steps: pl.DataFrame, column: str) -> float | None:
    """Return the largest value; None if it is not recorded."""
    return steps.select(pl.col(column).max()).item() if column in steps.columns else None


def _new_per_step(working: pl.DataFrame) -> list[int] | None:
    """Return the newly scheduled requests per step; None if they are not recorded for each step."""
    new = working["num_new"]
    return None if new.null_count() else new.filter(new > 0).to_list()


def _use(steps: pl.DataFrame) -> float | None:
    mean = steps.select(pl.col("use_frac").mean()).item()
    return None if mean is None else float(mean)


def _preemptions(timeline: Timeline, trial: int | None) -> int | None:
    if Fact.PREEMPTIONS not in timeline.facts:
        return None
    return timeline.trial_rows(timeline.preemptions, trial).filter(pl.col("in_schedule")).height


def strip(timeline: Timeline) -> list[StripCell]:
    """Return budget use over the run, in at most ``STRIP_CELLS`` equal shares of the steps with tokens."""
    steps = timeline.steps.filter(pl.col("total_requests") > 0)
    if steps["use_frac"].is_null().all():  # no steps, or no budgets
        return []
    cells = min(STRIP_CELLS, steps.height)
    binned = (
        steps.with_row_index("at")
        .group_by((pl.col("at") * cells // steps.height).alias("cell"), maintain_order=True)
        .agg(
            pl.col("use_frac").max().fill_null(0.0).alias("use"),
            (pl.col("num_waiting_after") > 0).mean().alias("waiting"),
        )
    )
    return [StripCell(use, waiting) for use, waiting in binned[["use", "waiting"]].iter_rows()]
