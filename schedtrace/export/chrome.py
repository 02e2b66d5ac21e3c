"""Traces in the Trace Event Format, in which torch writes its profiles: JSON, compressed by gzip.

Format: "Trace Event Format", Google, 2016. Times are microseconds since ``baseTimeNanoseconds``, as in
torch's profiles, so that one file can contain the events of both.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schedtrace.export.scene import ProcessTracks, TraceClock, clock_of, process_tracks
from schedtrace.model import safe_files
from schedtrace.model.printable import json_of
from schedtrace.read.run import Run
from schedtrace.version import __version__

TIDS = 1000
"""Number that all thread numbers exceed but no process number does, because viewers treat a thread with its
process's number as the main thread."""
LEVEL = 3
"""Compression level of gzip, chosen for speed."""


def write_chrome(run: Run, file: Path) -> int:
    """Write a run; return the number of events: slices, marks and rows of counters."""
    header = run.traces[0].header
    clock, count = clock_of(header), 0
    head: dict[str, Any] = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": clock.torch_base_ns,
        "otherData": {
            "run": run.label,
            "schedtrace_version": __version__,
            "clock": header.clock,
            "realtime_ns": clock.wall_ns,
            "monotonic_ns": clock.monotonic_ns,
            "realtime_uncertainty_us": header.wall_uncertainty_us,
        },
    }
    with safe_files.writable(file) as target, gzip.open(target, "wb", LEVEL) as text:
        text.write(json_of(head)[:-1] + b',"traceEvents":[\n')
        for number, event in enumerate(
            event for process in process_tracks(run) for event in _events(process, clock)
        ):
            text.write((b",\n" if number else b"") + json_of(event))
            count += event["ph"] in "XiC"
        text.write(b"\n]}\n")
    return count


def _events(process: ProcessTracks, clock: TraceClock) -> Iterator[dict[str, Any]]:
    pid = process.number

    def ts(us: int) -> float:
        return (clock.ns(us) - clock.torch_base_ns) / 1000

    def about(what: str, tid: int = 0, **args: str | int) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}

    yield about("process_name", name=process.name)
    yield about("process_labels", labels=", ".join(process.labels))
    yield about("process_sort_index", sort_index=pid)
    for track in process.tracks:
        name = track.name if track.group is None else f"{track.group}: {track.name}"
        yield about("thread_name", TIDS + track.number, name=name)
        yield about("thread_sort_index", TIDS + track.number, sort_index=track.number)
        own = {"ph": "X", "pid": pid, "tid": TIDS + track.number, "cat": track.group or "engine"}
        for span in track.slices():
            took = span.end_us - span.begin_us
            yield {**own, "ts": ts(span.begin_us), "dur": took, "name": span.name, "args": span.facts}
    for name, values in process.counters.items():
        for row in values.iter_rows(named=True):
            us = row.pop("us")
            recorded = {series: value for series, value in row.items() if value is not None}
            yield {"ph": "C", "pid": pid, "tid": 0, "ts": ts(us), "name": name, "args": recorded}
    for number, preempted in enumerate(process.preemptions):
        at = {"pid": pid, "ts": ts(preempted.us), "cat": "preemption"}
        mark = {"ph": "i", "s": "t", "args": preempted.facts}
        victim = {**at, "tid": TIDS + preempted.victim}
        if preempted.preempter is None:
            yield {**victim, **mark, "name": "preempted"}
            continue
        preempter = {**at, "tid": TIDS + preempted.preempter}
        arrow = {"id": (pid << 32) + number, "name": "preemption"}
        # An arrow joins what came last on the two tracks.
        yield {**preempter, **mark, "name": "preempts"}
        yield {**preempter, **arrow, "ph": "s"}
        yield {**victim, **mark, "name": "preempted"}
        yield {**victim, **arrow, "ph": "f", "bp": "e"}
