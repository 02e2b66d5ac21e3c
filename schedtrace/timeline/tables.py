"""Tables of one engine, built in order, each from the frames and the tables before it.

``Timeline`` (``timeline/timeline.py``) adds the tables that not every command needs.
"""

from dataclasses import dataclass

import polars as pl

from schedtrace.timeline.engine_states import engine_states, starved, thread_times
from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.queue_waits import waits
from schedtrace.timeline.request_states import request_states
from schedtrace.timeline.unrecorded import gone


@dataclass(frozen=True)
class EngineTables:
    """Tables from which all others are built; those of a window are cut out of those of the whole trace."""

    gone: pl.DataFrame
    """Requests that left in a gap of the trace (``timeline/unrecorded.py``)."""
    waits: pl.DataFrame
    """Stays of requests in the waiting queue (``timeline/queue_waits.py``)."""
    request_states: pl.DataFrame
    """Every moment of every request (``timeline/request_states.py``)."""
    engine_states: pl.DataFrame
    """Every moment of the engine (``timeline/engine_states.py``)."""
    thread_times: pl.DataFrame
    """Periods in which threads ran, and waited for a processor (``timeline/engine_states.py``)."""
    starved: pl.DataFrame
    """Periods in which the engine lost much of its busy time for lack of processors."""


def make_tables(frames: EngineFrames) -> EngineTables:
    """Build the tables of one engine, each from those before it."""
    departures = gone(frames)
    queue = waits(frames, departures)
    requests = request_states(frames, queue, departures)
    engine = engine_states(frames, requests)
    threads = thread_times(frames, engine)
    return EngineTables(
        gone=departures,
        waits=queue,
        request_states=requests,
        engine_states=engine,
        thread_times=threads,
        starved=starved(threads, engine),
    )
