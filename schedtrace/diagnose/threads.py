"""Threads that were ready to run and had no processor, or had one all the time."""

import msgspec
import polars as pl

from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

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
    """The threads that ran at all between the first step and the end, that which waited most first.

    One that the trace saw only once in that time is left out.
    """
    began = timeline.steps.select(pl.col("start_us").min()).item()
    seen = timeline.cpu.filter(pl.col("at_us").is_between(began, timeline.end_us)).sort("at_us")
    span, ran, waited = (
        pl.col(name).last() - pl.col(name).first() for name in ("at_us", "ran_us", "waited_us")
    )
    shares = (
        seen.group_by("role", "pid", "tid", maintain_order=True)
        .agg(span=span, ran=ran, waited=waited)
        .filter((pl.col("span") > 0) & (pl.col("ran") > 0))
        .select(
            "role",
            "pid",
            ran_frac=pl.col("ran") / pl.col("span"),
            waited_frac=pl.col("waited") / (pl.col("ran") + pl.col("waited")),
        )
        .sort("waited_frac", descending=True, maintain_order=True)
    )
    return [ThreadShare(**share) for share in shares.to_dicts()]


def starved(shares: list[ThreadShare]) -> Message:
    """Which threads waited for a processor, the one that waited most first; nothing if none waited long."""
    short = [share for share in shares if share.waited_frac >= STARVED_FRAC]
    if not short:
        return NOTHING
    others = [
        say("{thread} {waited_frac:%}", share, thread=NAMES[share.role]) for share in short[1:MOST_THREADS]
    ]
    return say(
        "Processors were short: {thread} waited for one {waited_frac:%} of the time that it was "
        "ready to run[, {others}].",
        short[0],
        thread=NAMES[short[0].role],
        others=joined(others, ", "),
    )


def saturated(shares: list[ThreadShare]) -> Message:
    """Whether the front end's main thread ran all the time; nothing if not, or not known."""
    ran = max((share.ran_frac for share in shares if share.role == "front_end"), default=0.0)
    if ran < SATURATED_FRAC:
        return NOTHING
    return say("The front end's main thread ran {share:%} of the time.", share=min(1.0, ran))
