"""Scene of a run for trace viewers: processes with tracks of slices, counters, and arrows.

Both viewers' formats are written from it. Times are microseconds on the clock of the run's first trace.

A table of spans has the columns ``begin_us`` and ``end_us`` (in microseconds of the trace's clock) and
``name``, and further columns for facts. Viewers get Unix time in nanoseconds, as in torch's profiles.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from schedtrace.model.printable import encodable
from schedtrace.model.trace import Header
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.frames import NOT_RECORDED, missing_steps, offset
from schedtrace.timeline.per_step import per_step
from schedtrace.timeline.timeline import Timeline, make_timeline

QUARTER_NS = 7_889_238_000_000_000
"""Nanoseconds in a quarter of a mean Gregorian year, as ``std::chrono::months(3)``."""


class TraceClock(NamedTuple):
    """Conversion of a run's times, in microseconds of its first trace's clock, to Unix time."""

    wall_ns: int
    """Reading of ``CLOCK_REALTIME``, in nanoseconds, when the trace's time is 0; 0 for a foreign log, whose
    time zone is unknown."""
    monotonic_ns: int | None
    """Reading of ``CLOCK_MONOTONIC``, in nanoseconds, when the trace's time is 0; None if not recorded, or
    for a simulation's virtual time."""

    def ns(self, us: int) -> int:
        """Return the Unix time in nanoseconds, at least 0."""
        return max(0, self.wall_ns + 1000 * us)

    @property
    def torch_base_ns(self) -> int:
        """Origin (``baseTimeNanoseconds``) of a torch profile that was recorded at the same time.

        Kineto counts from a multiple of three months since 1970 (its class ``ChromeTraceBaseTime``), so that
        microseconds fit into a JSON number and profiles agree.
        """
        return self.wall_ns // QUARTER_NS * QUARTER_NS


def clock_of(header: Header) -> TraceClock:
    """Return the clock from the anchors of a trace's header."""
    monotonic_us = header.monotonic_anchor_us
    return TraceClock(1000 * header.wall_anchor_us, None if monotonic_us is None else 1000 * monotonic_us)


def step_spans(timeline: Timeline) -> pl.DataFrame:
    """Return a row per step, named by its number and the reason why requests waited, and a row per gap."""
    cause = pl.concat_str(pl.lit(": "), "cause").fill_null("")
    name = pl.concat_str(pl.lit("step "), pl.col("step").cast(pl.String), cause)
    missing = timeline.gaps.select(
        name=pl.lit("not recorded"),
        begin_us="from_us",
        end_us="to_us",
        first_missing_step="first_step",
        missing_steps=(pl.col("last_step") - pl.col("first_step") + 1).clip(0),
    )
    steps = per_step(timeline).with_columns(name=name)
    if missing.is_empty():
        return _whole(steps)
    return _whole(pl.concat([steps, missing], how="diagonal_relaxed").sort("begin_us", maintain_order=True))


def engine_spans(timeline: Timeline, trace: Trace) -> pl.DataFrame:
    """Return the work of vLLM's ``EngineCore`` thread, in order of time.

    This work is ``schedule()`` and ``update_from_output()`` of each step and, on a rank in lock-step, its
    dummy batches and the all-reduces in which ranks agree to continue.
    """
    steps = timeline.steps
    passes = ("wave", "step_counter")
    spans = pl.concat(
        [
            _spans(steps, "schedule()", pl.col("start_us"), pl.col("schedule_us"), "step"),
            _spans(steps, "update_from_output()", pl.col("output_us"), pl.col("update_us"), "step"),
            _spans(trace.dummies, "dummy batch", pl.col("began_us"), pl.col("took_us"), *passes),
            _spans(trace.syncs, "ranks agree", pl.col("began_us"), pl.col("took_us"), *passes, "wave_ended"),
        ],
        how="diagonal_relaxed",
    ).sort("begin_us", maintain_order=True)
    # A thread does one thing at a time, but times are rounded to microseconds. In a simulation's virtual time
    # a dummy batch may last beyond the all-reduce after it: that is no rounding, and gets a track of its own.
    after = pl.col("begin_us").shift(-1)
    return spans.with_columns(end_us=pl.when(pl.col("end_us") - after == 1).then(after).otherwise("end_us"))


def execution_spans(timeline: Timeline) -> pl.DataFrame:
    """Return the execution of each step by the worker that answers; empty if its clock is not recorded."""
    began = pl.col("start_us") + pl.col("execute_after_us")
    tokens = ("decode_tokens", "prefill_tokens")
    return _spans(timeline.steps, "execute", began, pl.col("execute_us"), "step", *tokens).sort("begin_us")


def request_spans(timeline: Timeline) -> pl.DataFrame:
    """Return ``timeline.request_states`` in order of arrival, named by state and cause."""
    state = pl.col("state").replace({"front_end": "front end", NOT_RECORDED: "not recorded"})
    cause = pl.concat_str(pl.lit(": "), "cause").fill_null("")
    return (
        timeline.request_states.with_columns(came_us=pl.col("begin_us").min().over("request_id"))
        .sort("came_us", "request_id", "begin_us", maintain_order=True)
        .with_columns(name=pl.concat_str(state, cause))
        .drop("came_us", "engine_rank", "state")
    )


def in_lanes(spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the spans in as few tables without overlaps as possible, and in at least one.

    With asynchronous scheduling, steps overlap each other; on a single track, viewers would nest them.
    """
    free_us: list[int] = []
    lanes: list[int] = []
    for begin_us, end_us in spans.select("begin_us", "end_us").iter_rows():
        lane = next((lane for lane, us in enumerate(free_us) if us <= begin_us), len(free_us))
        free_us[lane : lane + 1] = [end_us]
        lanes.append(lane)
    of_lane = pl.Series(lanes, dtype=pl.Int64)
    for lane in range(max(1, len(free_us))):
        yield spans.filter(of_lane == lane)


def _spans(frame: pl.DataFrame, name: str, begin: pl.Expr, took: pl.Expr, *facts: str) -> pl.DataFrame:
    return _whole(frame.select(*facts, name=pl.lit(name), begin_us=begin, end_us=begin + took))


def _whole(spans: pl.DataFrame) -> pl.DataFrame:
    """Keep the spans that have both times: a foreign log or a damaged line may lack one of them."""
    return spans.filter(pl.col("end_us") >= pl.col("begin_us"))


REQUESTS = "requests"
"""Name of the group with a track per request."""
COUNTERS = {
    "token budget": {
        "decode": "decode_tokens",
        "prefill": "prefill_tokens",
        "recompute": "recompute_tokens",
        "unused": "unused_tokens",
    },
    "queue": {"running": "running", "waiting": "waiting"},
    "KV cache": {"blocks used": "kv_used"},
}
"""Counters, each with its series and their columns in ``per_step``."""

Facts = Mapping[str, int | str]


class Slice(NamedTuple):
    """Span of time on a track."""

    begin_us: int
    end_us: int
    name: str
    facts: Facts


@dataclass
class Track:
    """Slices that neither overlap nor nest."""

    number: int
    """Number of the track within its process, from 1, in the order in which tracks are listed."""
    name: str
    group: str | None
    spans: pl.DataFrame
    first: int = 0
    """First row of ``spans`` that belongs to this track: requests share one table, because there may be many.
    """
    count: int | None = None
    """Number of the track's rows; None for all rows."""

    def slices(self) -> Iterator[Slice]:
        """Yield the slices in order of time."""
        for row in self.spans.slice(self.first, self.count).iter_rows(named=True):
            begin_us, end_us, name = row.pop("begin_us"), row.pop("end_us"), row.pop("name")
            row.pop("request_id", None)  # the track's name
            yield Slice(begin_us, end_us, name, _known(row))


class Preempted(NamedTuple):
    """Preemption, in which a request lost its KV blocks at the beginning of a step."""

    us: int
    victim: int
    """Number of the preempted request's track."""
    preempter: int | None
    """Number of the track of the request that got the blocks; None if unknown, or the preempted request
    itself."""
    facts: Facts


@dataclass
class ProcessTracks:
    """Tracks of an engine."""

    number: int
    """Number, counted from 1. A process id could collide with that of a profile in the same viewer."""
    name: str
    labels: list[str]
    tracks: list[Track]
    counters: dict[str, pl.DataFrame]
    """Rows by counter: ``us``, and the values from that time on; null if not recorded."""
    preemptions: list[Preempted]


def process_tracks(run: Run) -> Iterator[ProcessTracks]:
    """Yield the tracks of each engine of a run, including the warm-up."""
    for number, trace in enumerate(run.traces, 1):
        timeline = make_timeline(trace, run.manifest, whole=True)
        offset_us = offset(trace.header, run.traces[0].header).us
        tracks = _tracks(timeline, trace, offset_us)
        of_request = {track.name: track.number for track in tracks if track.group == REQUESTS}
        labels = [f"model {trace.header.model}", f"host {trace.header.host}", f"clock {trace.header.clock}"]
        labels += [f"pid {trace.header.pid}"] if trace.header.pid else []
        if not timeline.gaps.is_empty():
            labels.append(f"incomplete: {missing_steps(timeline):,} steps missing")
        yield ProcessTracks(
            number=number,
            name=encodable(f"{run.label}, rank {trace.header.engine_rank}"),
            labels=labels,
            tracks=tracks,
            counters=_counters(timeline, offset_us),
            preemptions=list(_preemptions(timeline, of_request, offset_us)),
        )


def _tracks(timeline: Timeline, trace: Trace, offset_us: int) -> list[Track]:
    """Return tracks: steps, the engine's thread, the worker, then requests in order of arrival."""
    tracks: list[Track] = []
    for name, spans in (
        ("steps", step_spans(timeline)),
        ("engine", engine_spans(timeline, trace)),
        ("execution", execution_spans(timeline)),
    ):
        for lane, part in enumerate(in_lanes(_later(spans, offset_us)), 1):
            of_lane = name if lane == 1 else f"{name} {lane}"
            tracks.append(Track(len(tracks) + 1, of_lane, None, part))
    requests = _later(request_spans(timeline), offset_us)
    first = 0
    for request_id, count in requests.group_by("request_id", maintain_order=True).len().iter_rows():
        tracks.append(Track(len(tracks) + 1, request_id, REQUESTS, requests, first, count))
        first += count
    return tracks


def _later(spans: pl.DataFrame, us: int) -> pl.DataFrame:
    return spans.with_columns(pl.col("begin_us", "end_us") + us)


def _counters(timeline: Timeline, offset_us: int) -> dict[str, pl.DataFrame]:
    """Return the counters' values from each step's beginning on; 0 while the engine has no request."""
    steps = per_step(timeline, offset_us).rename({"begin_us": "us"}).drop_nulls("us")
    zeros = [pl.lit(0).alias(name) for name in (*COUNTERS["token budget"].values(), "running", "waiting")]
    idle = timeline.engine_states.filter(pl.col("state") == "idle")
    idle = idle.select(*zeros, us=pl.col("begin_us") + offset_us)
    rows = pl.concat([steps, idle], how="diagonal_relaxed").sort("us", maintain_order=True)
    return {
        name: rows.select("us", **series).filter(~pl.all_horizontal(pl.col(*series).is_null()))
        for name, series in COUNTERS.items()
    }


def _preemptions(timeline: Timeline, of_request: Mapping[str, int], offset_us: int) -> Iterator[Preempted]:
    facts = ("step", "lost_tokens", "for_request_id", "blocks_needed", "blocks_freed", "policy")
    for row in timeline.preemptions.select("request_id", "start_us", *facts).iter_rows(named=True):
        request_id, us = row.pop("request_id"), row.pop("start_us")
        victim = of_request.get(request_id)
        if us is None or victim is None:  # a damaged line, and nothing else of this request
            continue
        preempter = of_request.get(row["for_request_id"])
        yield Preempted(us + offset_us, victim, None if preempter == victim else preempter, _known(row))


def _known(row: Mapping[str, int | str | None]) -> Facts:
    """Return the facts of a row, without those that the record lacks."""
    return {
        name: value if isinstance(value, str) else int(value)
        for name, value in row.items()
        if value is not None
    }
