"""State of every request at every moment, with the cause of the state.

The states of a request partition its life, from its arrival at the front end (or the beginning of the trace,
for a request already present) until it left the scheduler or the trace ended. Every figure about where
requests' time went comes from this table.
"""

import polars as pl

from schedtrace.timeline.frames import (
    EngineFrames,
    cut_by_gaps,
)
from schedtrace.timeline.pieces import (
    NEXT_STEP,
    arrival_pieces,
    placed,
    present_pieces,
    running_pieces,
    waiting_pieces,
)

QUEUED = ("waiting", "preempted", "set_aside")
"""States of a request that is in the waiting queue."""


def make_request_states(frames: EngineFrames, waits: pl.DataFrame, departures: pl.DataFrame) -> pl.DataFrame:
    """Return one row per series of steps in which a request was in one state for one cause.

    Columns, sorted by ``request_id`` and ``begin_us``:

    * ``engine_rank``, ``request_id``, ``trial``,
    * ``begin_us``, ``end_us``: microseconds of the trace's clock. The rows of a request follow each other
      without gap or overlap; a row without length is there only if its steps scheduled tokens,
    * ``state``: ``front_end``; ``waiting``; ``prefill`` until the first token is back; ``decode``;
      ``preempted``, in the waiting queue again; ``recompute``, from its resumption to the next token;
      ``set_aside``, removed from the running list by a scheduler that is not vLLM's, with its blocks kept;
      ``stalled``, running without getting tokens; ``not_recorded``, in a gap of the trace,
    * ``cause``: for ``waiting``, ``preempted``, ``set_aside`` and ``stalled``, a ``Cause`` or ``next_step``;
      else null,
    * ``begin_step``, ``end_step``: the first and the last of the steps that refused or scheduled the request;
      null if no step had it,
    * ``tokens``: the tokens scheduled for the request in these steps.
    """
    ends = _ends(frames, departures)
    steps = placed(frames.steps)
    pieces_of_all = pl.concat(
        [
            present_pieces(frames, steps),
            arrival_pieces(frames),
            waiting_pieces(frames, steps, waits),
            running_pieces(frames, steps, ends),
        ]
    )
    later_first = pl.col("since_us").reverse().cum_min().reverse().over("request_id")
    rows = (
        pieces_of_all.join(ends, on="request_id", how="left", maintain_order="left")
        .sort("request_id", "place", "rank", "begin_step", maintain_order=True)
        # With steps in flight the output of one may come back when a later one has already decided.
        .with_columns(begin_us=pl.min_horizontal(later_first, "end_us"))
        .with_columns(end_us=pl.col("begin_us").shift(-1).over("request_id").fill_null(pl.col("end_us")))
        .drop_nulls(["begin_us", "end_us"])  # a damaged line may lack the time
        .filter((pl.col("end_us") > pl.col("begin_us")) | (pl.col("tokens") > 0))
    )
    kind = ["request_id", "state", "cause"]
    changed = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in kind)
    states = (
        rows.with_columns(row=changed.cum_sum())
        .group_by("row", maintain_order=True)
        .agg(
            pl.col(*kind, "begin_us").first(),
            pl.col("end_us").last(),
            pl.col("begin_step").min(),
            pl.col("end_step").max(),
            pl.col("tokens").sum(),
        )
    )
    of_stretches = frames.stretches.select("request_id", "trial").unique("request_id").collect()
    by_request = [frame[["request_id", "trial"]] for frame in (frames.present, frames.arrivals)]
    trials = pl.concat([*by_request, of_stretches]).unique("request_id", keep="first", maintain_order=True)
    return (
        cut_by_gaps(states, frames.gaps)
        .join(trials, on="request_id", how="left", maintain_order="left")
        .select(
            pl.lit(frames.rank, pl.Int64).alias("engine_rank"),
            *("request_id", "trial", "begin_us", "end_us", "state", "cause"),
            *("begin_step", "end_step", "tokens"),
        )
    )


def _ends(frames: EngineFrames, departures: pl.DataFrame) -> pl.DataFrame:
    """Return ``request_id`` and ``end_us`` of every request: when it left or was last recorded."""
    ended = frames.finishes.group_by("request_id").agg(pl.col("finished_us").max())
    ids = pl.concat(
        [
            frames.present["request_id"],
            frames.arrivals["request_id"],
            frames.finishes["request_id"],
            frames.stretches.select("request_id").unique().collect()["request_id"],
        ]
    )
    left, moments = ids.unique().to_frame().join(ended, on="request_id", how="left"), ["finished_us"]
    if not departures.is_empty():
        gone_in_gaps = departures[["request_id", "gone_us"]]
        left, moments = left.join(gone_in_gaps, on="request_id", how="left"), ["finished_us", "gone_us"]
    return left.select("request_id", end_us=pl.coalesce(*moments, pl.lit(frames.end_us)))


def refused_states(states: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``request_states`` in which a step had refused the waiting request."""
    return states.filter(pl.col("state").is_in(QUEUED) & (pl.col("cause") != NEXT_STEP))


def waiting_since(
    frames: EngineFrames, states: pl.DataFrame, moment_us: int, request_ids: pl.Series
) -> pl.DataFrame:
    """Return ``request_id`` and ``since_us``: when requests last entered the waiting queue before a moment.

    The time is null for a request that was in the queue when the trace began, unless it is recorded.

    Args:
        frames: Frames of one engine.
        states: ``request_states`` of the engine.
        moment_us: Moment in microseconds; later states are ignored.
        request_ids: The requests.
    """
    queued = pl.col("state").is_in(QUEUED)
    states = states.filter(
        (pl.col("begin_us") < moment_us) & pl.col("request_id").is_in(pl.lit(request_ids).implode())
    )
    enters = queued & ~queued.shift(1).over("request_id").fill_null(value=False)
    entered = states.filter(enters).group_by("request_id").agg(since_us=pl.col("begin_us").last())
    there = frames.present.select(
        "request_id", "at_us", queued_us=pl.when(pl.col("state") == "waiting").then("queued_us")
    )
    was_in_it = pl.col("since_us") == pl.col("at_us")
    return entered.join(there, on="request_id", how="left", maintain_order="left").select(
        "request_id", since_us=pl.when(was_in_it).then("queued_us").otherwise("since_us")
    )


def make_queue_times(frames: EngineFrames, states: pl.DataFrame) -> pl.DataFrame:
    """Return one row per request that was first scheduled in this trace, with its queue time.

    Columns: ``request_id``, ``trial``, ``priority``, ``queued_us``, ``step`` (which first admitted it) and
    ``queue_us``.
    """
    admitted = (
        states.filter(pl.col("tokens") > 0)
        .group_by("request_id")
        .agg(pl.col("begin_us").first(), step=pl.col("begin_step").first())
    )
    columns = ("request_id", "trial", "priority", "queued_us")
    waited = frames.present.filter((pl.col("state") == "waiting") & pl.col("queued_us").is_not_null())
    return (
        pl.concat([waited.select(columns), frames.first_arrivals.select(columns)])
        .join(admitted, on="request_id", maintain_order="left")
        .with_columns(queue_us=(pl.col("begin_us") - pl.col("queued_us")).clip(0))
        .drop("begin_us")
    )
