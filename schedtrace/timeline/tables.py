"""The tables of one engine, made in order: each of the frames and of the tables before it.

``Timeline`` (``timeline/timeline.py``) goes on from here with the tables that not every command needs.
"""

from dataclasses import dataclass

import polars as pl

from schedtrace.timeline.engine_states import make_engine_states, make_starved, thread_times
from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.queue_waits import make_waits
from schedtrace.timeline.request_states import make_request_states
from schedtrace.timeline.unrecorded import make_gone


@dataclass(frozen=True)
class EngineTables:
    """Tables that all else is made of. Those of a window are cut out of those of the whole trace."""

    gone: pl.DataFrame
    """Requests that left in a gap of the trace (``timeline/unrecorded.py``)."""
    waits: pl.DataFrame
    """Stays of requests in the waiting queue (``timeline/queue_waits.py``)."""
    request_states: pl.DataFrame
    """Every moment of every request (``timeline/request_states.py``)."""
    engine_states: pl.DataFrame
    """Every moment of the engine (``timeline/engine_states.py``)."""
    thread_times: pl.DataFrame
    """Times that threads ran, and waited for a processor (``timeline/engine_states.py``)."""
    starved: pl.DataFrame
    """Times in which the engine lost much of its busy time for want of processors."""


def make_tables(frames: EngineFrames) -> EngineTables:
    """Make the tables of one engine, each once, and hand it on to those that are made of it."""
    departures = make_gone(frames)
    queue = make_waits(frames, departures)
    requests = make_request_states(frames, queue, departures)
    engine = make_engine_states(frames, requests)
    threads = thread_times(frames, engine)
    return EngineTables(
        gone=departures,
        waits=queue,
        request_states=requests,
        engine_states=engine,
        thread_times=threads,
        starved=make_starved(threads, engine),
    )
