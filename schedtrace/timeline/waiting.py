"""Requests' lives while they are in the waiting queue.

After a step everybody in the queue was refused by something: by the skip that passed over it or, for all
others, by the exit that ended the loop. Each waits for that from the step's start to the start of the next.
"""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.pieces import WAITS, pieces, place_of
from schedtrace.timeline.refusals import OTHER, cause_runs
from schedtrace.timeline.timeline import Timeline


def waiting_pieces(timeline: Timeline, steps: pl.DataFrame) -> pl.DataFrame:
    """A piece for each run of steps in which a request waited for the same cause.

    Args:
        timeline: One engine's.
        steps: ``placed(timeline.steps)``.
    """
    waits = timeline.waits.select("request_id", "since_step", "left_step", "preempted", "set_aside")
    waits = place_of(place_of(waits, steps, "since_step", "first"), steps, "left_step", "left")
    named = timeline.exits.filter(_skips()).select("step", "request_id", "cause")
    runs = cause_runs(waits, loop_ends(timeline), named, steps)
    number = steps["step"]
    return pieces(
        runs.with_columns(
            us=steps["start_us"].gather(runs["at"]),
            begin_step=number.gather(runs["at"]),
            end_step=number.gather(runs["last"]),
        ),
        rank=pl.lit(WAITS),
        state=pl.when("preempted")
        .then(pl.lit("preempted"))
        .when("set_aside")
        .then(pl.lit("set_aside"))
        .otherwise(pl.lit("waiting")),
        **{name: pl.col(name) for name in ("cause", "begin_step", "end_step")},
    )


def waits_for(timeline: Timeline) -> tuple[str | None, dict[str, str]]:
    """What those wait for who are in the queue after the last step, and requests that wait for another cause.

    None: there is no step.
    """
    if timeline.steps.is_empty():
        return None, {}
    named = timeline.exits.filter(_skips() & (pl.col("step") == timeline.steps["step"][-1]))
    causes = named.select("request_id", "cause").drop_nulls().iter_rows()
    return str(loop_ends(timeline)[-1]), dict(causes)


def _skips() -> pl.Expr:
    """Exits that pass over a request and go on with the next."""
    return (pl.col("loop") == "waiting") & (pl.col("kind") == "continue")


def loop_ends(timeline: Timeline) -> pl.Series:
    """Of each step, what those wait for whom no skip names."""
    # An empty queue cannot be why somebody who is in it waits.
    unexplained = pl.col("waiting_cause") == str(Cause.QUEUE_EMPTY)
    cause = pl.when(unexplained).then(OTHER).otherwise(pl.col("waiting_cause"))
    return timeline.steps.select(cause.fill_null(OTHER).alias("cause"))["cause"]
