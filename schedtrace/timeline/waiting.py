"""Requests' lives while they are in the waiting queue.

After a step everybody in the queue was refused by something: by the skip that passed over it or, for all
others, by the exit that ended the loop. Each waits for that from the step's start to the start of the next.
"""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.frames import Frames
from schedtrace.timeline.spans import WAITS, pieces, place_of

OTHER = pl.lit(str(Cause.OTHER))


def cause_runs(
    spans: pl.DataFrame, usual: pl.Series, named: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """One row per span and run of steps with the same cause, in their order.

    Args:
        spans: ``request_id``, and ``first`` and ``left``: the places of the first step of the span and of the
            first after it. Other columns are kept.
        usual: The cause of each step, for whoever it does not name.
        named: ``step``, ``request_id``, ``cause``: those whom a step names.
        steps: ``placed(frames.steps)``.

    Returns:
        The columns of ``spans`` with ``at`` and ``last``, the places of the run's steps, and ``cause``.
    """
    spans = spans.filter(pl.col("left") > pl.col("first")).with_row_index("span")
    ends = usual.alias("cause").to_frame().with_row_index("at").with_columns(pl.col("at").cast(pl.Int64))
    changes = pl.concat([_of_steps(spans, ends), _of_names(spans, ends, named, steps)]).sort(
        "span", "at", "weight"
    )
    changes = changes.unique(["span", "at"], keep="last", maintain_order=True)
    kind = ["span", "cause"]
    changed = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in kind)
    return (
        changes.filter(changed)
        .with_columns(last=pl.col("at").shift(-1).over("span").fill_null(pl.col("left")) - 1)
        .drop("span", "weight")
    )


def _of_steps(spans: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """For each span the places where the usual cause is another than before."""
    changed = pl.col("cause").ne_missing(pl.col("cause").shift(1)).fill_null(value=True)
    run = ends.select(run=changed.cum_sum().cast(pl.Int64))["run"]
    begins = ends.with_columns(run=run).unique("run", keep="first", maintain_order=True)
    return (
        spans.with_columns(first_run=run.gather(spans["first"]), last_run=run.gather(spans["left"] - 1))
        .with_columns(run=pl.int_ranges("first_run", pl.col("last_run") + 1))
        .explode("run")
        .join(begins, on="run", how="left", maintain_order="left")
        .select(*spans.columns, at=pl.max_horizontal("first", "at"), cause="cause", weight=_weight(0))
    )


def _of_names(
    spans: pl.DataFrame, ends: pl.DataFrame, named: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """Steps that name a request, and the step after each, which may not."""
    latest = named.drop_nulls().unique(["step", "request_id"], keep="last", maintain_order=True)
    own = (
        place_of(latest, steps, "step", "at")
        .join(spans, on="request_id", maintain_order="left")
        .filter((pl.col("first") <= pl.col("at")) & (pl.col("at") < pl.col("left")))
        .select(*spans.columns, "at", "cause", weight=_weight(2))
    )
    after = (
        own.with_columns(pl.col("at") + 1)
        .filter(pl.col("at") < pl.col("left"))
        .drop("cause", "weight")
        .join(ends, on="at", how="left", maintain_order="left")
        .select(*spans.columns, "at", "cause", weight=_weight(1))
    )
    return pl.concat([own, after])


def _weight(value: int) -> pl.Expr:
    """Which of several changes at a place counts: the heaviest."""
    return pl.lit(value, pl.Int8)


def waiting_pieces(frames: Frames, steps: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Return a piece for each run of steps in which a request waited for the same cause.

    Args:
        frames: One engine's.
        steps: ``placed(frames.steps)``.
        waits: ``queue_waits.waits``.
    """
    queued = waits.select("request_id", "since_step", "left_step", "preempted", "set_aside")
    queued = place_of(place_of(queued, steps, "since_step", "first"), steps, "left_step", "left")
    named = frames.exits.filter(_skips()).select("step", "request_id", "cause")
    runs = cause_runs(queued, loop_ends(frames), named, steps)
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


def waits_for(frames: Frames) -> tuple[str | None, dict[str, str]]:
    """What those wait for who are in the queue after the last step, and requests that wait for another cause.

    None: there is no step.
    """
    if frames.steps.is_empty():
        return None, {}
    named = frames.exits.filter(_skips() & (pl.col("step") == frames.steps["step"][-1]))
    causes = named.select("request_id", "cause").drop_nulls().iter_rows()
    return str(loop_ends(frames)[-1]), dict(causes)


def _skips() -> pl.Expr:
    """Exits that pass over a request and go on with the next."""
    return (pl.col("loop") == "waiting") & (pl.col("kind") == "continue")


def loop_ends(frames: Frames) -> pl.Series:
    """Of each step, what those wait for whom no skip names."""
    # An empty queue cannot be why somebody who is in it waits.
    unexplained = pl.col("waiting_cause") == str(Cause.QUEUE_EMPTY)
    cause = pl.when(unexplained).then(OTHER).otherwise(pl.col("waiting_cause"))
    return frames.steps.select(cause.fill_null(OTHER).alias("cause"))["cause"]
