"""Threads that were ready to run and had no processor, or had one all the time."""

import msgspec
import polars as pl

from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline


def thread_times(timeline: Timeline) -> pl.DataFrame:
    """One row per thread that the trace has seen twice between its first step and its end.

    Columns: ``role`` (``engine``, ``worker``, ``front_end``), ``pid``, ``tid``, ``span_us`` (from the first
    to the last time it was seen), ``ran_us`` and ``waited_us`` (ready, with no processor free) within it.
    """
    began = timeline.steps.select(pl.col("start_us").min()).item()
    seen = timeline.cpu.filter(pl.col("at_us").is_between(began, timeline.end_us)).sort("at_us")
    grown = [(pl.col(name).last() - pl.col(name).first()).alias(name) for name in ("ran_us", "waited_us")]
    span = (pl.col("at_us").last() - pl.col("at_us").first()).alias("span_us")
    return (
        seen.group_by("role", "pid", "tid", maintain_order=True)
        .agg(span, *grown)
        .filter(pl.col("span_us") > 0)
    )


STARVED_FRAC = 0.10
"""Of the time that a thread was ready: below that, waiting for a processor explains nothing."""
SATURATED_FRAC = 0.90
"""Of the time: a thread that runs this much does nothing else."""
MOST_THREADS = 3
"""Named in a sentence."""
NAMES = {
    "engine": "the engine's thread",
    "worker": "the worker's main thread",
    "front_end": "the front end's main thread",
}


class ThreadShare(msgspec.Struct, kw_only=True):
    """One thread, from the first to the last time that the trace saw it."""

    role: str
    """``engine``, ``worker`` or ``front_end``."""
    pid: int
    ran_frac: float
    """Share of the time that it was on a processor."""
    waited_frac: float
    """Share of the time that it was ready and had none, of all that it was ready."""


def thread_shares(timeline: Timeline) -> list[ThreadShare]:
    """The threads that ran at all, the one that waited the largest share first."""
    rows = [row for row in thread_times(timeline).to_dicts() if row["ran_us"] > 0]
    shares = [
        ThreadShare(
            role=row["role"],
            pid=row["pid"],
            ran_frac=row["ran_us"] / row["span_us"],
            waited_frac=row["waited_us"] / (row["ran_us"] + row["waited_us"]),
        )
        for row in rows
    ]
    return sorted(shares, key=lambda share: -share.waited_frac)


def starved(shares: list[ThreadShare]) -> Message:
    """Which threads waited for a processor, the one that waited most first; nothing if none waited long."""
    short = [share for share in shares if share.waited_frac >= STARVED_FRAC]
    if not short:
        return NOTHING
    others = [
        say("{thread} {share:%}", thread=NAMES[share.role], share=share.waited_frac)
        for share in short[1:MOST_THREADS]
    ]
    return say(
        "Processors were short: {thread} waited for one {share:%} of the time that it was "
        "ready to run{others}.",
        thread=NAMES[short[0].role],
        share=short[0].waited_frac,
        others=say(", {others}", others=joined(others, ", ")) if others else NOTHING,
    )


def saturated(shares: list[ThreadShare]) -> Message:
    """Whether the front end's main thread ran all the time; nothing if not, or not known."""
    ran = max((share.ran_frac for share in shares if share.role == "front_end"), default=0.0)
    if ran < SATURATED_FRAC:
        return NOTHING
    return say("The front end's main thread ran {share:%} of the time.", share=min(1.0, ran))
