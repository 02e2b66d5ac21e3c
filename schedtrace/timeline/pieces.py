"""Pieces of requests' lives, and the pieces of waiting requests.

A piece records the moment from which a request was in a state; ``request_states.py`` puts the pieces
together. A piece has no end, because it lasts until the request's next piece begins. Therefore the pieces of
a request can neither overlap nor leave a gap.

After a step, every request in the queue has been refused, by the skip that passed over it or otherwise by the
exit that ended the loop. Its wait has that cause from the step's start to the start of the next step.
"""

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.timeline.frames import EngineFrames

PIECE_SCHEMA = {
    "request_id": pl.String,
    "place": pl.Int64,
    "rank": pl.Int8,
    "since_us": pl.Int64,
    "state": pl.String,
    "cause": pl.String,
    "begin_step": pl.Int64,
    "end_step": pl.Int64,
    "tokens": pl.Int64,
}
"""Columns of a table of pieces. ``place`` is the place, among the engine's steps, of the step that began the
piece (-1 if none did), and ``rank`` its order among the pieces of that step. With several steps in flight,
these give the order of events, which ``since_us``, the beginning in microseconds, may not. ``begin_step`` to
``end_step`` are the steps of the piece, null if no step knew of the request; ``tokens`` counts the tokens of
the request in these steps.
"""

OTHER = pl.lit(str(Cause.OTHER))
ARRIVES, WAITS, COMPUTES, DECODES, TOLD = range(5)
"""Values of ``rank``: a step first refuses or skips a request, or admits it; its output makes it decode. A
list of the requests present comes after everything else of the step before.
"""


def pieces(frame: pl.DataFrame, **columns: pl.Expr) -> pl.DataFrame:
    """Return a table of pieces: columns by name; missing ones are null, and ``tokens`` 0."""
    missing = {name: pl.lit(None) for name in ("cause", "begin_step", "end_step")} | {"tokens": pl.lit(0)}
    values = missing | columns
    own = {name: values.get(name, pl.col(name)).cast(dtype) for name, dtype in PIECE_SCHEMA.items()}
    return frame.select(**own)


def placed(steps: pl.DataFrame) -> pl.DataFrame:
    """Return ``step`` (sorted), ``place`` (its index), ``start_us`` and ``output_us`` of each step."""
    return steps.select("step", "start_us", "output_us").with_row_index("place").cast({"place": pl.Int64})


def place_of(rows: pl.DataFrame, steps: pl.DataFrame, column: str, name: str) -> pl.DataFrame:
    """Add the index of the first step numbered ``column`` or higher; the number of steps if there is none."""
    numbers = steps["step"]
    return rows.with_columns(pl.Series(name, numbers.search_sorted(rows[column], side="left")).cast(pl.Int64))


def cause_runs(
    spans: pl.DataFrame, usual: pl.Series, named: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """Return one row per span and run of steps with the same cause, in their order.

    Args:
        spans: ``request_id``, and ``first`` and ``end``: the places of the first step of the span and of the
            first after it. Other columns are kept.
        usual: Cause of each step, for requests that it does not name.
        named: ``step``, ``request_id``, ``cause``: requests that a step names.
        steps: ``placed(frames.steps)``.

    Returns:
        The columns of ``spans`` with ``place`` and ``last``, the places of the run's steps, and ``cause``.
    """
    spans = spans.filter(pl.col("end") > pl.col("first")).with_row_index("span")
    if spans.is_empty():
        columns = {"place": pl.Int64, "cause": pl.String, "last": pl.Int64}
        return spans.drop("span").with_columns(
            pl.lit(None, dtype).alias(name) for name, dtype in columns.items()
        )
    ends = (
        usual.alias("cause").to_frame().with_row_index("place").with_columns(pl.col("place").cast(pl.Int64))
    )
    changes = pl.concat([_step_changes(spans, ends), _name_changes(spans, ends, named, steps)]).sort(
        "span", "place", "weight"
    )
    changes = changes.unique(["span", "place"], keep="last", maintain_order=True)
    kind = ["span", "cause"]
    changed = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in kind)
    return (
        changes.filter(changed)
        .with_columns(last=pl.col("place").shift(-1).over("span").fill_null(pl.col("end")) - 1)
        .drop("span", "weight")
    )


def _step_changes(spans: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Return for each span the places where the usual cause changes."""
    changed = pl.col("cause").ne_missing(pl.col("cause").shift(1)).fill_null(value=True)
    run = ends.select(run=changed.cum_sum().cast(pl.Int64))["run"]
    begins = ends.with_columns(run=run).unique("run", keep="first", maintain_order=True)
    return (
        spans.with_columns(first_run=run.gather(spans["first"]), last_run=run.gather(spans["end"] - 1))
        .with_columns(run=pl.int_ranges("first_run", pl.col("last_run") + 1))
        .explode("run")
        .join(begins, on="run", how="left", maintain_order="left")
        .select(*spans.columns, place=pl.max_horizontal("first", "place"), cause="cause", weight=_weight(0))
    )


def _name_changes(
    spans: pl.DataFrame, ends: pl.DataFrame, named: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """Return the places of steps that name a request, and of the step after each, which may not."""
    latest = named.drop_nulls().unique(["step", "request_id"], keep="last", maintain_order=True)
    own = (
        place_of(latest, steps, "step", "place")
        .join(spans, on="request_id", maintain_order="left")
        .filter((pl.col("first") <= pl.col("place")) & (pl.col("place") < pl.col("end")))
        .select(*spans.columns, "place", "cause", weight=_weight(2))
    )
    after = (
        own.with_columns(pl.col("place") + 1)
        .filter(pl.col("place") < pl.col("end"))
        .drop("cause", "weight")
        .join(ends, on="place", how="left", maintain_order="left")
        .select(*spans.columns, "place", "cause", weight=_weight(1))
    )
    return pl.concat([own, after])


def _weight(value: int) -> pl.Expr:
    """Return the weight of a change; the heaviest change at a place counts."""
    return pl.lit(value, pl.Int8)


def waiting_pieces(frames: EngineFrames, steps: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Return a piece for each run of steps in which a request waited for the same cause.

    Args:
        frames: One engine's.
        steps: ``placed(frames.steps)``.
        waits: ``queue_waits.waits``.
    """
    queued = waits.select("request_id", "since_step", "left_step", "preempted", "set_aside")
    queued = place_of(place_of(queued, steps, "since_step", "first"), steps, "left_step", "end")
    named = frames.exits.filter(_skips()).select("step", "request_id", "cause")
    runs = cause_runs(queued, loop_ends(frames), named, steps)
    number = steps["step"]
    return pieces(
        runs.with_columns(
            since_us=steps["start_us"].gather(runs["place"]),
            begin_step=number.gather(runs["place"]),
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


def waits_for(frames: EngineFrames) -> tuple[str | None, dict[str, str]]:
    """Return the cause of requests in the queue after the last step, and the requests with a different cause.

    The first is None if there is no step.
    """
    if frames.steps.is_empty():
        return None, {}
    named = frames.exits.filter(_skips() & (pl.col("step") == frames.steps["step"][-1]))
    causes = named.select("request_id", "cause").drop_nulls().iter_rows()
    return str(loop_ends(frames)[-1]), dict(causes)


def _skips() -> pl.Expr:
    """Select the exits that pass over a request and continue with the next one."""
    return (pl.col("loop") == "waiting") & (pl.col("kind") == "continue")


def loop_ends(frames: EngineFrames) -> pl.Series:
    """Return the cause for which requests wait in each step, unless a skip names them."""
    # An empty queue cannot be why a request in it waits.
    unexplained = pl.col("waiting_cause") == str(Cause.QUEUE_EMPTY)
    cause = pl.when(unexplained).then(OTHER).otherwise(pl.col("waiting_cause"))
    return frames.steps.select(cause.fill_null(OTHER).alias("cause"))["cause"]
