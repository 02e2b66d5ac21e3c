"""What a viewer of traces shows of a run: processes with tracks of slices, counters, and arrows.

Both formats for viewers are written from it. Times are microseconds on the clock of the run's first trace.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from schedtrace.export.spans import engine_spans, execution_spans, in_lanes, request_spans, step_spans
from schedtrace.model.printable import encodable
from schedtrace.model.trace import Header
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.chart import per_step
from schedtrace.timeline.clocks import offset
from schedtrace.timeline.timeline import Timeline, make_timeline

REQUESTS = "requests"
"""Name of the group that has a track per request."""
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
"""Counters, each with its series and their columns in ``chart.per_step``."""

Facts = Mapping[str, int | str]


class Slice(NamedTuple):
    """A stretch of time on a track."""

    begin_us: int
    end_us: int
    name: str
    facts: Facts


@dataclass
class Track:
    """Slices that neither overlap nor nest."""

    number: int
    """Of its process, from 1, in the order in which tracks stand below each other."""
    name: str
    group: str | None
    spans: pl.DataFrame
    first: int = 0
    """Row of ``spans`` with which this track begins: requests share a table, as they may be many."""
    count: int | None = None
    """Of its rows; None: all."""

    def slices(self) -> Iterator[Slice]:
        """In order of time."""
        for row in self.spans.slice(self.first, self.count).iter_rows(named=True):
            begin_us, end_us, name = row.pop("begin_us"), row.pop("end_us"), row.pop("name")
            row.pop("request_id", None)  # the track's name
            yield Slice(begin_us, end_us, name, _known(row))


class Preempted(NamedTuple):
    """A request lost its KV blocks at the beginning of a step."""

    us: int
    victim: int
    """Number of its track."""
    preempter: int | None
    """Track of the request that they were taken for; None: not known, or the victim itself."""
    facts: Facts


@dataclass
class Process:
    """One engine."""

    number: int
    """From 1. Not the process id: a viewer that shows a profile beside it would mix up the two."""
    name: str
    labels: list[str]
    tracks: list[Track]
    counters: dict[str, pl.DataFrame]
    """Name to ``us`` and the series: values from then on, null where the record does not tell."""
    preemptions: list[Preempted]


def processes(run: Run) -> Iterator[Process]:
    """The engines of a run, one at a time; the warm-up included."""
    for number, trace in enumerate(run.traces, 1):
        yield _process(run, trace, number)


def _process(run: Run, trace: Trace, number: int) -> Process:
    timeline = make_timeline(trace, run.manifest, whole=True)
    offset_us = offset(trace.header, run.traces[0].header).us
    tracks = _tracks(timeline, trace, offset_us)
    of_request = {track.name: track.number for track in tracks if track.group == REQUESTS}
    return Process(
        number=number,
        name=encodable(f"{run.label}, rank {trace.header.engine_rank}"),
        labels=_labels(trace.header),
        tracks=tracks,
        counters=_counters(timeline, offset_us),
        preemptions=list(_preemptions(timeline, of_request, offset_us)),
    )


def _labels(head: Header) -> list[str]:
    own = [f"model {head.model}", f"host {head.host}", f"clock {head.clock}"]
    return [*own, *([f"pid {head.pid}"] if head.pid else [])]


def _tracks(timeline: Timeline, trace: Trace, offset_us: int) -> list[Track]:
    """Steps, the engine's thread, the worker, then a track per request in order of arrival."""
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
    """From the beginning of each step; zero from when the engine had no request."""
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
    """Without what the record does not tell."""
    return {
        name: value if isinstance(value, str) else int(value)
        for name, value in row.items()
        if value is not None
    }
