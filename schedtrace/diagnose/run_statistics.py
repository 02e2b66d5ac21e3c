"""Statistics of a run and its trials: latency by class, caches, drafts, outcomes and sums over engines.

``EngineSums`` keeps the counts and tables of one engine, and ``statistics`` combines those of all engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import polars as pl

from schedtrace.diagnose.serving_metrics import (
    FINISHED,
    Over,
    Throughput,
    counted_s,
    counted_spans,
    distribution,
    grouped_by_value,
    inter_token,
    over,
    percentiles,
    request_latencies,
    sampled_tokens,
    single,
    throughput,
)
from schedtrace.diagnose.waits import mean
from schedtrace.model.manifest import ENDED_EARLY, Manifest, TrialResult
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.report import StripCell, TrialReport
from schedtrace.model.say import say
from schedtrace.model.statistics import (
    ClassLatency,
    DraftUse,
    Durations,
    EngineFigures,
    Outcomes,
    PrefixCacheUse,
    Statistics,
)
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_ranks import RecordedRanks, kv_used_frac
from schedtrace.timeline.frames import offset
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import Timeline

STRIP_CELLS = 60


def trial_reports(
    timeline: Timeline, manifest: Manifest | None, *, engines: int = 1, queued: bool = True
) -> list[TrialReport]:
    """Return one report per trial of one engine, in the order of the trials.

    Args:
        timeline: Timeline of the engine.
        manifest: Manifest with the front end's figures, which refer to all ``engines`` together.
        engines: Number of engines in the run; with several engines, the throughput is computed from each
            engine's trace and then combined by ``over_all_engines``.
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
    """Relate the throughput of each engine to the time of all engines, so that the throughputs add up.

    Args:
        reports: Reports of all engines.
        counted: ``counted_s`` of all engines.
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
    """Return one report per trial for all engines of a run, with requests and steps on one clock.

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
    """Return the report of one trial for these engines together.

    Args:
        timelines: Timelines of the engines.
        trial: Trial; None for a trace without trials.
        result: Measurements of the front end; None if there are none.
        seconds: Time in seconds over which throughput is computed if ``result`` is None; None if there is no
            such time.
        queued: As for ``trial_reports``.
    """
    first = timelines[0]
    finishes = _together([timeline.trial_rows(timeline.finishes, trial) for timeline in timelines])
    steps_of_each = []
    for timeline in timelines:
        later_us = offset(timeline.header, first.header).us
        rows = timeline.trial_rows(timeline.steps, trial)
        on_clock = pl.col("start_us", "output_us") + later_us
        steps_of_each.append(rows.with_columns(on_clock) if later_us else rows)
    steps = _together(steps_of_each)
    working = steps.filter(pl.col("total_requests") > 0)
    begins = trial is not None or all(timeline.begins for timeline in timelines)
    begin = working.row(0, named=True) if working.height and begins else None
    done = finishes.filter(pl.col("status").is_in(FINISHED))
    latencies = _together([timeline.trial_rows(request_latencies(timeline), trial) for timeline in timelines])
    lives, back, new = Fact.LIVES in first.facts, steps["output_us"].drop_nulls(), working["num_new"]
    preemptions, queued_ms = None, None
    if len(timelines) == 1 and Fact.PREEMPTIONS in first.facts:
        preemptions = first.trial_rows(first.preemptions, trial).filter(pl.col("in_schedule")).height
    if queued:
        queues = _together([timeline.trial_rows(timeline.queue_times, trial) for timeline in timelines])
        queued_ms = percentiles(queues, pl.col("queue_us") / 1e3)
    report = TrialReport(
        trial=trial,
        engine_rank=first.rank,
        complete=True,
        steps=steps.height,
        duration_s=(max(back.to_list()) - min(steps["start_us"].to_list())) / 1e6 if back.len() else None,
        first_step_requests=None if begin is None else begin["total_requests"],
        first_step_tokens=None if begin is None else begin["used_tokens"],
        new_per_step=None if new.null_count() else new.filter(new > 0).to_list(),
        budget_use_frac=mean(working, pl.col("use_frac")),
        budget_use_waiting_frac=mean(working.filter(pl.col("num_waiting_after") > 0), pl.col("use_frac")),
        preemptions=preemptions,
        requests_finished=done.height if lives else None,
        requests_aborted=finishes.height - done.height if lives else None,
        requests_per_s=None,
        total_tokens_per_s=None,
        output_tokens_per_s=None,
        throughput_from=None,
        throughput_over=None,
        throughput_s=None,
        queue_ms=queued_ms,
        ttft_ms=percentiles(latencies, pl.col("ttft_us") / 1e3),
        tpot_ms=percentiles(latencies, pl.col("tpot_us") / 1e3),
        e2e_ms=percentiles(latencies, pl.col("e2e_us") / 1e3),
        iteration_ms=percentiles(steps, pl.col("elapsed_us") / 1e3)
        if "elapsed_us" in steps.columns
        else None,
        kv_cache_usage_max_frac=steps.select(pl.col("kv_cache_usage_frac").max()).item()
        if "kv_cache_usage_frac" in steps.columns
        else None,
    )
    if result is not None and result.elapsed_s > 0:
        work = result.num_requests, result.input_tokens, result.output_tokens
        _add_throughput(report, "front_end", "trial", work, result.elapsed_s)
    elif lives and seconds and report.duration_s is not None:
        work = done.height, int(done["prompt_tokens"].sum()), sampled_tokens(steps, done)
        if any(work):
            _add_throughput(report, "trace", over(first), work, seconds)
    return report


def _add_throughput(
    report: TrialReport,
    source: Literal["front_end", "trace"],
    period: Over,
    work: tuple[int, int, int],
    seconds: float,
) -> None:
    """Add the rates of finished requests, prompt tokens and output tokens (``work``) to a report."""
    report.throughput_from, report.throughput_over, report.throughput_s = source, period, seconds
    rates = throughput(*work, seconds)
    report.requests_per_s, report.total_tokens_per_s, report.output_tokens_per_s = rates


def _together(frames: list[pl.DataFrame]) -> pl.DataFrame:
    return frames[0] if len(frames) == 1 else pl.concat(frames, how="diagonal_relaxed")


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


MANY_FRAC = 0.05
"""Minimum share of requests without a first token at which a note says that TTFT leaves them out."""


@dataclass(frozen=True)
class EngineSums:
    """Sums over one engine."""

    rank: int
    facts: frozenset[Fact]
    counts: dict[str, int | None]
    """Fields of ``PrefixCacheUse``, ``DraftUse`` and ``Outcomes``, and sums for ``EngineFigures``. None: not
    recorded."""
    requests: pl.DataFrame | None
    """Rows, one per request: ``priority``, ``lora``, ``queue_us``, ``own_us`` and ``queued_us`` (its
    time in the engine and in the queue), ``has_token`` (whether it had a first token, even if before the
    trace), ``done``, ``ttft_us``, ``tpot_us`` and ``e2e_us``. None: lives of requests are not recorded."""
    device: pl.DataFrame
    """Times of steps on the device: each value ``us`` once, with its ``weight``."""
    apart: pl.DataFrame
    """Times from the start of a step to the start of the next one, in the form of ``device``."""
    inter_token: pl.DataFrame | None
    """Times between two consecutive outputs of a request, in the form of ``device``; None: not recorded."""
    kv_used: tuple[float, int] | None
    """Mean share of KV blocks in use after the steps, and the number of steps that record it."""
    spans: pl.DataFrame
    """Result of ``counted_spans``."""


def engine_sums(timeline: Timeline) -> EngineSums:
    """Return the sums over one engine."""
    steps, facts = timeline.steps, timeline.facts
    lives = Fact.LIVES in facts
    worked = pl.col("total_requests") > 0
    busy = (pl.col("num_running_after") > 0) | (pl.col("num_waiting_after") > 0)
    following = pl.col("start_us").shift(-1).over("trial") - pl.col("start_us")
    before_gap = (pl.col("step") + 1).is_in(timeline.gaps["first_step"].implode())
    following = pl.when(~before_gap).then(following)
    kv_used = steps.select(kv_used_frac()).to_series().drop_nulls()
    return EngineSums(
        rank=timeline.rank,
        facts=facts,
        counts=_outcomes(timeline) | _work(timeline) | _prefix(timeline),
        requests=_requests(timeline) if lives else None,
        device=grouped_by_value(single(steps, pl.when(worked).then("busy_us"))),
        apart=grouped_by_value(single(steps, pl.when(worked & busy).then(following))),
        inter_token=inter_token(timeline) if {Fact.REQUESTS, Fact.LIVES, Fact.TIMES} <= facts else None,
        kv_used=(float(kv_used.mean()), len(kv_used)) if len(kv_used) else None,  # type: ignore[arg-type]  # floats
        spans=counted_spans(timeline),
    )


def _outcomes(timeline: Timeline) -> dict[str, int | None]:
    """Return the fields of ``Outcomes``: the number of requests by their final status."""
    ids = [rows[["request_id"]] for rows in (timeline.present, timeline.first_arrivals)]
    requests = pl.concat(ids).unique()
    last = timeline.finishes.unique("request_id", keep="last")
    left = timeline.tables.gone.join(requests, on="request_id", how="semi")
    well = pl.col("status").is_in(FINISHED)
    itself = (pl.col("in_schedule") & pl.col("abort_us").is_null()).fill_null(value=False)
    finished, aborted, by_scheduler = last.select(
        well.sum(),
        aborted=((pl.col("status") == "ABORTED") & ~itself).sum(),
        by_scheduler=(~well & itself).sum(),
    ).row(0)
    open_ids = requests.join(last, on="request_id", how="anti")
    return {
        "arrived": timeline.first_arrivals.height,
        "finished": finished,
        "aborted": aborted,
        "errored": last.height - finished - aborted,
        "unfinished": open_ids.join(left, on="request_id", how="anti").height,
        "unrecorded": left.height,
        "present": timeline.there_first.height,
        "by_scheduler": by_scheduler,
    }


def _work(timeline: Timeline) -> dict[str, int | None]:
    """Return counts, tokens and times, summed over the engine's steps, request states and finishes."""
    steps, finishes = timeline.steps, timeline.finishes
    done = finishes.filter(pl.col("status").is_in(FINISHED))
    in_queue = pl.col("state").is_in(QUEUED)
    spent = timeline.recorded_states.select(
        running=LENGTH_US.filter(~in_queue & (pl.col("state") != "front_end")).sum(),
        queued=LENGTH_US.filter(in_queue).sum(),
    )
    preemptions = timeline.preemptions.filter("in_schedule").height
    return {
        "drafts": _recorded(finishes, "drafts") or 0,
        "accepted": _recorded(finishes, "drafts_accepted") or 0,
        "invalid": _recorded(finishes, "drafts_invalid"),
        "draft_tokens": int(steps["draft_tokens"].sum()),
        "used_tokens": int(steps["used_tokens"].sum()),
        "steps": steps.height,
        "dummy_batches": _recorded(steps, "dummy_batches"),
        "dummy_us": _recorded(steps, "dummy_us"),
        "preemptions": preemptions if Fact.PREEMPTIONS in timeline.facts else None,
        "requests_finished": done.height,
        "output_tokens": sampled_tokens(steps, done),
        "input_tokens": int(done["prompt_tokens"].sum()),
        "running_us": int(spent["running"][0]),
        "queued_us": int(spent["queued"][0]),
        "busy_us": timeline.busy_us,
    }


def _prefix(timeline: Timeline) -> dict[str, int | None]:
    """Return the counts of ``PrefixCacheUse`` at requests' first scheduling; an empty dict if not recorded.

    ``enabled`` is 1 if prefix caching was on, else 0.
    """
    if not {Fact.CACHE, Fact.REQUESTS, Fact.LIVES} <= timeline.facts:
        return {}
    asked = timeline.started_requests
    new = timeline.admitted.filter(pl.col("phase") == "new")
    prompts = asked.join(new, on="request_id").select(
        prompt=pl.col("prompt_tokens").cast(pl.Int64), hit=pl.col("computed_tokens").cast(pl.Int64)
    )
    names = ["local_tokens", "external_tokens"]
    sources = timeline.lists.get("admitted", pl.LazyFrame(schema=names)).select(names).collect()
    return {
        "enabled": int(bool(timeline.header.enable_prefix_caching)),
        "requests": prompts.height,
        "requests_with_hit": prompts.filter(pl.col("hit") > 0).height,
        "prompt_tokens": int(prompts["prompt"].sum()),
        "hit_tokens": int(prompts["hit"].sum()),
        "local_tokens": _recorded(sources, "local_tokens"),
        "external_tokens": _recorded(sources, "external_tokens"),
    }


def _recorded(frame: pl.DataFrame, column: str) -> int | None:
    """Return the sum of a column; None if no row has a value."""
    if column not in frame.columns or frame[column].null_count() == frame.height:
        return None
    return int(frame[column].sum())


def _requests(timeline: Timeline) -> pl.DataFrame:
    own = LENGTH_US.filter(pl.col("state") != "front_end").sum()
    queued = LENGTH_US.filter(pl.col("state").is_in(QUEUED)).sum()
    spent = timeline.recorded_states.group_by("request_id").agg(own_us=own, queued_us=queued)
    decodes = timeline.request_states.filter(pl.col("state") == "decode")["request_id"].unique()
    had = pl.col("first_token_us").is_not_null() | (pl.col("output_tokens") > 0)
    had |= pl.col("request_id").is_in(pl.lit(decodes).implode())
    latencies = (
        request_latencies(timeline)
        .unique("request_id", keep="last")
        .with_columns(has_token=had.fill_null(value=False))
        .select("request_id", "has_token", "done", "ttft_us", "tpot_us", "e2e_us")
    )
    queue = timeline.queue_times[["request_id", "queue_us"]]
    return (
        timeline.started_requests.select("request_id", "priority", "lora")
        .join(queue, on="request_id", how="left", maintain_order="left")
        .join(spent, on="request_id", how="left", maintain_order="left")
        .join(latencies, on="request_id", how="left", maintain_order="left")
    )


def statistics(engines: Sequence[EngineSums], ranks: RecordedRanks) -> Statistics:
    """Return the statistics of all engines of a run together."""
    requests = [engine.requests for engine in engines if engine.requests is not None]
    lives = len(requests) == len(engines)
    tokens = [engine.inter_token for engine in engines if engine.inter_token is not None]
    sums = _added(engines)
    outcomes = None
    if lives:
        outcomes = Outcomes(**{name: sums[name] for name in Outcomes.__struct_fields__})
        outcomes.present = outcomes.present or msgspec.UNSET
        outcomes.unrecorded = outcomes.unrecorded or msgspec.UNSET
    return Statistics(
        latency=_latency(pl.concat(requests)) if lives else [],
        prefix_cache=_cache_use(sums) if all("requests" in engine.counts for engine in engines) else None,
        drafts=_draft_use(sums),
        outcomes=outcomes,
        durations=Durations(
            device_ms=distribution(pl.concat([engine.device for engine in engines])),
            start_to_start_ms=distribution(pl.concat([engine.apart for engine in engines])),
            inter_token_ms=distribution(pl.concat(tokens)) if len(tokens) == len(engines) else None,
        ),
        engines=_engines(engines, ranks),
    )


def _added(engines: Sequence[EngineSums]) -> dict[str, int]:
    """Return the counts summed over all engines, without counts that no engine records."""
    sums: dict[str, int] = {}
    for engine in engines:
        for name, count in engine.counts.items():
            if count is not None:
                sums[name] = sums.get(name, 0) + count
    return sums


def _latency(requests: pl.DataFrame) -> list[ClassLatency]:
    rows = [_class_latency("all", "", requests)]
    for by in ("priority", "lora"):
        classes = requests.partition_by(by, as_dict=True)
        if len(classes) > 1 or (by == "lora" and requests["lora"].null_count() < requests.height):
            ordered = sorted(classes.items(), key=lambda item: (item[0][0] is not None, item[0][0]))
            rows += [_class_latency(by, "" if key is None else str(key), rows_) for (key,), rows_ in ordered]
    return rows


def _class_latency(by: str, name: str, requests: pl.DataFrame) -> ClassLatency:
    own_us = int(requests["own_us"].sum())
    return ClassLatency(
        by=by,
        name=name,
        requests=requests.height,
        finished=int(requests["done"].sum()),
        without_first_token=int((~requests["has_token"]).sum()),
        waiting_frac=int(requests["queued_us"].sum()) / own_us if own_us else None,
        queue_ms=distribution(single(requests, pl.col("queue_us"))),
        ttft_ms=distribution(single(requests, pl.col("ttft_us"))),
        tpot_ms=distribution(single(requests, pl.col("tpot_us"))),
        e2e_ms=distribution(single(requests, pl.col("e2e_us"))),
    )


def survivors(statistics: Statistics | None) -> Message:
    """Return a note that TTFT leaves out many requests without a first token; nothing if there are few."""
    if statistics is None or not statistics.latency:
        return NOTHING
    whole = statistics.latency[0]
    none, of = whole.without_first_token, whole.requests
    if not none or none < MANY_FRAC * of:
        return NOTHING
    if none == of:
        return say("none of {of:n request} had a first token", of=of)
    return say(
        "TTFT of {had:n} of {of:n request}; {none:n} had no first token", had=of - none, of=of, none=none
    )


def _cache_use(sums: dict[str, int]) -> PrefixCacheUse | None:
    """Return the prefix-cache use at requests' first scheduling; None if caching was off and nothing was hit.

    Hits include tokens that a KV connector brought.
    """
    hits, prompt = sums["hit_tokens"], sums["prompt_tokens"]
    if not hits and not sums["enabled"]:
        return None
    return PrefixCacheUse(
        requests=sums["requests"],
        requests_with_hit=sums["requests_with_hit"],
        prompt_tokens=prompt,
        hit_tokens=hits,
        hit_frac=hits / prompt if prompt else None,
        local_tokens=sums.get("local_tokens"),
        external_tokens=sums.get("external_tokens"),
    )


def _draft_use(sums: dict[str, int]) -> DraftUse | None:
    drafts, accepted, used = sums["drafts"], sums["accepted"], sums["used_tokens"]
    if not drafts:
        return None
    return DraftUse(
        drafts=drafts,
        accepted=accepted,
        invalid=sums.get("invalid"),
        accepted_frac=accepted / drafts,
        wasted_frac=(1 - accepted / drafts) * sums["draft_tokens"] / used if used else None,
    )


def _engines(engines: Sequence[EngineSums], ranks: RecordedRanks) -> list[EngineFigures]:
    seconds = sum(counted_s(engine.spans for engine in engines).values())
    figures = [_figures([engine], engine.rank, seconds) for engine in engines]
    if len(engines) > 1:
        figures.append(_figures(engines, None, seconds))
        if ranks.loads is not None:  # over the time in which any rank had a request: ranks are comparable
            means = {rank: (running, waiting) for rank, running, waiting in ranks.loads.means().iter_rows()}
            for row in figures:
                own = [mean for rank, mean in means.items() if row.engine_rank in {None, rank}]
                row.mean_running = sum(running for running, _ in own)
                row.mean_waiting = sum(waiting for _, waiting in own)
    if ranks.lockstep:  # dummy batches by the common step counter, and waits for other ranks' prefills
        dummies = {rank: (batches, us) for rank, batches, us in ranks.dummies.iter_rows()}
        stalls, stalled = ranks.prefill_stalls, {}
        if stalls is not None:
            each = stalls.stalled.group_by("rank").agg(pl.col("excess_us").sum())
            stalled = {rank: max(0.0, us) for rank, us in each.iter_rows()}
        for row in figures:
            numbers = [rank.rank_number for rank in ranks.each if row.engine_rank in {None, rank.rank_number}]
            row.dummy_batches = sum(dummies[rank][0] for rank in numbers)
            row.dummy_ms = sum(dummies[rank][1] for rank in numbers) / 1e3
            if stalls is not None:
                row.stalled_ms = sum(stalled.get(rank, 0.0) for rank in numbers) / 1e3
    return figures


def _figures(engines: Sequence[EngineSums], rank: int | None, seconds: float) -> EngineFigures:
    """Return the figures of these engines; ``seconds`` is the time over which throughput is computed."""
    lives = all(Fact.LIVES in engine.facts for engine in engines)
    sums = _added(engines)
    rates = throughput(0, sums["input_tokens"], sums["output_tokens"], seconds) if lives and seconds else None
    preempted = all(engine.counts["preemptions"] is not None for engine in engines)
    used = [engine.kv_used for engine in engines if engine.kv_used is not None]
    kv_used_frac = used[0][0] if len(used) == 1 else None  # no rounding
    if len(used) > 1:
        kv_used_frac = sum(mean * steps for mean, steps in used) / sum(steps for _, steps in used)
    return EngineFigures(
        engine_rank=rank,
        steps=sums["steps"],
        requests_finished=sums["requests_finished"] if lives else None,
        output_tokens_per_s=rates.output_tokens_per_s if rates else None,
        total_tokens_per_s=rates.total_tokens_per_s if rates else None,
        preemptions=sums["preemptions"] if preempted else None,
        mean_running=_at_a_time(engines, "running_us") if lives else None,
        mean_waiting=_at_a_time(engines, "queued_us") if lives else None,
        dummy_batches=sums.get("dummy_batches"),
        dummy_ms=sums["dummy_us"] / 1e3 if "dummy_us" in sums else None,
        kv_used_frac=kv_used_frac,
    )


def _at_a_time(engines: Sequence[EngineSums], time: str) -> float | None:
    """Return the mean number of requests at once: each engine's ``time`` over its busy time, summed up."""
    counts = [engine.counts for engine in engines]
    means = [(sums[time] or 0) / busy for sums in counts if (busy := sums["busy_us"])]
    return sum(means) if means else None
