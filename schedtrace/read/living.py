"""Requests alive at the end of what has been read of a growing trace, and which of them wait."""

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import polars as pl

from schedtrace.model.trace import Arrival, Finish, Preemption, Present
from schedtrace.read.columns import structs_of
from schedtrace.read.lines import LONGEST_LINE, NOTICE, UNREADABLE, decode_line
from schedtrace.read.tables import STRETCH_SCHEMA, readable_struct

CAME, LOST, RUNS = -3, -2, -1
"""Step numbers before the first step, for requests that were present before a window: when they arrived, were
preempted and were admitted.
"""


@dataclass(frozen=True, slots=True)
class Live:
    """Request that has arrived and not left."""

    entry: Any
    """Its ``Arrival`` as read, or its ``Present`` if it was present when the trace began."""
    waits_since_us: int | None
    """Time at which it entered the waiting queue, as far as recorded; None if it runs."""
    preempted: int = 0
    """Number of preemptions."""
    lost_tokens: int = 0
    """Largest number of tokens that a preemption discarded."""
    there_us: int | None = None
    """Time at which the trace began with the request; None if it arrived later."""


class LiveRequests:
    """Tracker of living requests from step to step."""

    def __init__(self) -> None:
        self.alive: dict[str, Live] = {}
        """Lives by request id, in the order of arrival."""

    def step(
        self, start_us: int, arrived: Iterable[Any], finished: Iterable[Any], preempted: Iterable[Any]
    ) -> None:
        """Note which requests a step's line says arrived, finished, or were preempted."""
        self.events(arrived, finished)
        for preemption in preempted:
            if (live := self.alive.get(preemption.request_id)) is not None:
                lost = max(live.lost_tokens, preemption.lost_tokens)
                self.alive[preemption.request_id] = replace(
                    live, waits_since_us=start_us, preempted=live.preempted + 1, lost_tokens=lost
                )

    def events(self, arrived: Iterable[Any], finished: Iterable[Any]) -> None:
        """Note arrivals and departures."""
        for arrival in arrived:
            if not arrival.streaming_update:
                self.alive[arrival.request_id] = Live(arrival, arrival.queued_us)
        for request in finished:
            self.alive.pop(request.request_id, None)

    def were_there(self, at_us: int, present: Iterable[Any]) -> None:
        """Note the requests that were present when the trace began."""
        for request in present:
            since = None if request.state == "running" else at_us
            if request.state == "waiting" and request.queued_us is not None:
                since = request.queued_us
            preempted = request.num_preemptions or int(request.state == "preempted")
            self.alive[request.request_id] = Live(request, since, preempted, request.lost_tokens, at_us)

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """Note that these requests run."""
        for name in request_ids:
            live = self.alive.get(name)
            if live is not None and live.waits_since_us is not None:
                self.alive[name] = replace(live, waits_since_us=None)

    def snapshot(self) -> list[Live]:
        """Copy the requests alive now."""
        return list(self.alive.values())


def earlier(lives: list[Live]) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return arrivals, stretches and preemptions that lead to these lives before a window's first step.

    Only requests that arrived are included; ``still_there`` returns those that were present when the trace
    began.

    The added steps have negative numbers and schedule nothing. They contain only what matters later: which
    requests ran, which waited, and how much a preemption discarded. A request that waits after a preemption
    arrives as an update, because the arrival of a new request would count as a second wait.
    """
    lives = [live for live in lives if live.there_us is None]
    queued_again = [live for live in lives if live.preempted and live.waits_since_us is not None]
    in_order = [live for live in lives if not live.preempted or live.waits_since_us is None]
    records = [live.entry for live in in_order]
    records += [msgspec.structs.replace(live.entry, streaming_update=True) for live in queued_again]
    arrivals = structs_of(records, Arrival).select(
        pl.lit(CAME, pl.Int64).alias("step"), pl.lit(None, pl.Int64).alias("trial"), pl.all()
    )
    rows = [
        (RUNS, RUNS, None, live.entry.request_id, 0, 0, "resumed" if live.preempted else "new", 0, 0)
        for live in in_order
        if live.waits_since_us is None
    ]
    stretches = pl.DataFrame(rows, schema=STRETCH_SCHEMA, orient="row")
    again = [*queued_again, *(live for live in in_order if live.preempted)]
    lost = [Preemption(live.entry.request_id, live.lost_tokens) for live in again]
    preempted = structs_of(lost, Preemption).select(
        pl.lit(LOST, pl.Int64).alias("step"),
        pl.lit(None, pl.Int64).alias("trial"),
        pl.lit(None, pl.Int64).alias("start_us"),
        pl.all(),
    )
    return arrivals, stretches, preempted


def arrivals_of(lives: list[Live]) -> list[Arrival]:
    """Return the arrivals of the waiting requests, in the trace's format."""
    waiting = [live.entry for live in lives if live.there_us is None and live.waits_since_us is not None]
    return [msgspec.convert(record, Arrival, from_attributes=True) for record in waiting]


def still_there(lives: list[Live]) -> pl.DataFrame:
    """Return the current state of the requests that were present first (``columns.present_in``)."""
    there = [live for live in lives if live.there_us is not None]
    times = [live.there_us if live.waits_since_us is None else live.waits_since_us for live in there]
    return structs_of([_now(live) for live in there], Present).select(
        pl.Series("at_us", times, pl.Int64), pl.lit(None, pl.Int64).alias("trial"), pl.all()
    )


def present_of(lives: list[Live]) -> list[Present]:
    """Return the living requests as ``Present`` entries of the trace's format."""
    return [_now(live) for live in lives if live.there_us is not None]


def entries_in(present: pl.DataFrame) -> list[Present]:
    """Return the rows of ``columns.present_in`` as entries of the trace's format."""
    return [Present(**row) for row in present.drop("at_us", "trial").to_dicts()]


def _now(live: Live) -> Present:
    """Return the present state of a request that was there; its tokens since then are not counted."""
    was: Present = msgspec.convert(live.entry, Present, from_attributes=True)
    runs = live.waits_since_us is None
    return msgspec.structs.replace(
        was,
        state="running" if runs else "preempted" if live.preempted else "waiting",
        computed_tokens=was.prompt_tokens + was.output_tokens if runs else 0,
        lost_tokens=live.lost_tokens,
        num_preemptions=live.preempted,
    )


BLOCK = 2**23
FULL = b'{"type":"step"'
TELLING = (b'"present":[', b'"arrived":[', b'"finished":[', b'"preempted":[', b'"added":[')
"""Field names to search in raw lines; inside an id, their quotes would be escaped."""


def _named_in_lines() -> type[msgspec.Struct]:
    """Return the decoded parts of a line that name arrived, departed, preempted or scheduled requests."""
    named: Any = msgspec.defstruct("Named", [("request_id", str)], gc=False)
    changes: Any = msgspec.defstruct("Changes", [("added", list[named], [])], gc=False)
    fields: list[Any] = [
        ("start_us", int, 0),
        ("at_us", int, 0),
        ("requests", list[named], []),
        ("changes", changes | None, None),
    ]
    kinds: dict[str, type[msgspec.Struct]] = {
        "present": Present,
        "arrived": Arrival,
        "finished": Finish,
        "preempted": Preemption,
    }
    for name, kind in kinds.items():
        entry: Any = readable_struct(kind)
        fields.append((name, list[entry], []))
    return msgspec.defstruct("NamedRequests", fields, kw_only=True, gc=False)


_decode = msgspec.json.Decoder(_named_in_lines()).decode


def skim(file: int, at: int, size: int, keep_us: int, lives: LiveRequests) -> tuple[int, list[str]]:
    """Return the position from which to read a trace, with the living requests and notices up to there.

    The position is that of the last full line at least ``keep_us`` before the last line, or the beginning of
    the trace.

    Args:
        file: Its descriptor.
        at: Where its second line begins.
        size: Up to where to read.
        keep_us: Microseconds.
        lives: Gets who came and went before that place.
    """
    full: deque[tuple[int, int]] = deque()
    events: deque[tuple[int, Any]] = deque()
    notices, begun, begin = [], b"", at
    while at + len(begun) < size and (
        block := os.pread(file, min(BLOCK, size - at - len(begun)), at + len(begun))
    ):
        *lines, begun = (begun + block).split(b"\n")
        if len(begun) > LONGEST_LINE:  # no line of a trace
            lines, begun = [*lines, begun], b""
        for line in lines:
            if line.startswith(NOTICE):
                notice = decode_line(line)
                notices += [(at, notice.message)] if getattr(notice, "stalled", notice) is None else []
            elif any(key in line for key in TELLING) or line.startswith(FULL):
                _take(line, at, full, events)
            at += len(line) + 1
        while len(full) > 1 and full[1][1] <= full[-1][1] - keep_us:
            full.popleft()
            begin = full[0][0]
        while events and events[0][0] < begin:
            read = events.popleft()[1]
            lives.were_there(read.at_us, read.present)
            lives.step(read.start_us, read.arrived, read.finished, read.preempted)
            admitted = read.changes.added if read.changes else []
            lives.scheduled([row.request_id for row in (*read.requests, *admitted)])
    return begin, [text for place, text in notices if place < begin]


def _take(line: bytes, at: int, full: deque[tuple[int, int]], events: deque[tuple[int, Any]]) -> None:
    try:
        read: Any = _decode(line)
    except UNREADABLE:
        return
    if line.startswith(FULL):
        full.append((at, read.start_us))
    events.append((at, read))
