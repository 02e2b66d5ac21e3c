"""Every moment of every request, with the interruptions cut out: an event comes before a limit.

A request that waited for a seat while the scheduler was paused waited for the end of the pause. What is cut
out is what ``charges`` and the split of the requests' time take for interrupted.
"""

import polars as pl

from schedtrace.timeline.charges import INTERRUPTED
from schedtrace.timeline.events import DEVICE, STARVED
from schedtrace.timeline.frames import Frames
from schedtrace.timeline.queue_waits import NEVER
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED
from schedtrace.timeline.spans import LENGTH_US, merged


def interrupted_states(
    frames: Frames, states: pl.DataFrame, events: pl.DataFrame, host_spans: pl.DataFrame
) -> pl.DataFrame:
    """Return the rows of ``request_states``, cut at the edges of interruptions.

    Within one the ``state`` is ``interrupted`` and the ``cause`` the event's kind; ``of_state`` has the state
    that goes on, which is null elsewhere. ``begin_step`` and ``end_step`` are those of the steps that began
    in the piece; ``tokens`` is null in pieces of a row that was cut.

    Args:
        frames: One engine's.
        states: Its ``request_states``.
        events: Its interruptions.
        host_spans: Of these.
    """
    interruptions = merged(events)
    if interruptions.is_empty() or states.is_empty():
        return states.with_columns(of_state=pl.lit(None, pl.String))
    starved_device = (pl.col("kind") == STARVED) & (pl.col("part") == DEVICE)
    lost_device = interruptions.filter(starved_device).select("begin_us", "end_us")
    kinds = interruptions.select("begin_us", "kind")
    on_host = _with_kinds(host_spans, kinds)
    still = _with_kinds(pl.concat([host_spans, lost_device]), kinds)
    waits = pl.col("state").is_in([*QUEUED, "stalled"]) & pl.col("cause").ne_missing(pl.lit(NEXT_STEP))
    way = pl.col("state") == "front_end"
    received = frames.first_arrivals.select("request_id", "received_us")
    ways = states.filter(way).join(received, on="request_id", how="left", maintain_order="left")
    # From when its process has a request, the engine's thread is what keeps it.
    received_us = pl.min_horizontal(pl.coalesce("received_us", "end_us"), "end_us")
    at_engine = pl.max_horizontal("begin_us", received_us)
    outside = ways.with_columns(end_us=at_engine, of_state=pl.lit(None, pl.String)).drop("received_us")
    inside = ways.with_columns(begin_us=at_engine).drop("received_us").filter(LENGTH_US > 0)
    return pl.concat(
        [
            outside.filter((LENGTH_US > 0) | (pl.col("tokens") > 0)),
            _cut(frames, inside, on_host),
            _cut(frames, states.filter(waits & ~way), interruptions),
            _cut(frames, states.filter(~waits & ~way), still),
        ],
        how="diagonal_relaxed",
    ).sort("request_id", "begin_us", "end_us", maintain_order=True)


def _with_kinds(spans: pl.DataFrame, kinds: pl.DataFrame) -> pl.DataFrame:
    """Return spans in order of time, each with the kind of the interruption that it is a part of."""
    return merged(spans.sort("begin_us").join_asof(kinds, on="begin_us", check_sortedness=False))


def _cut(frames: Frames, rows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """The rows, of which what lies in one of these spans is a row of its own."""
    columns = rows.columns
    rows = rows.with_row_index("row")
    first = spans["end_us"].search_sorted(rows["begin_us"], side="right")
    after = spans["begin_us"].search_sorted(rows["end_us"], side="left")
    touched = rows.with_columns(
        row_begin="begin_us", row_end="end_us", span=pl.int_ranges(first, after, dtype=pl.Int64)
    ).filter(pl.col("span").list.len() > 0)
    each = touched.explode("span")
    of_span = spans[each["span"]]
    inside = each.with_columns(
        of_state="state",
        state=pl.lit(INTERRUPTED),
        cause=of_span["kind"],
        begin_us=pl.max_horizontal("begin_us", of_span["begin_us"]),
        end_us=pl.min_horizontal("end_us", of_span["end_us"]),
    ).filter(LENGTH_US > 0)
    inside, touched = inside.drop("span"), touched.drop("span")
    edges = inside.group_by("row", maintain_order=True).agg(ends="begin_us", begins="end_us")
    outside = (
        touched.join(edges, on="row", maintain_order="left")
        .with_columns(begin_us=pl.concat_list("begin_us", "begins"), end_us=pl.concat_list("ends", "end_us"))
        .explode("begin_us", "end_us")
        .filter(LENGTH_US > 0)
    )
    pieces = pl.concat([outside, inside], how="diagonal_relaxed").with_columns(tokens=pl.lit(None, pl.Int64))
    whole = rows.join(edges, on="row", how="anti", maintain_order="left")
    return pl.concat([whole, _with_steps(frames, pieces)], how="diagonal_relaxed").select(
        *columns, pl.col("of_state").cast(pl.String)
    )


def _with_steps(frames: Frames, pieces: pl.DataFrame) -> pl.DataFrame:
    """Pieces of rows, of whose steps each has those that began in it."""
    steps = frames.steps.drop_nulls("start_us").sort("start_us")
    starts, numbers = steps["start_us"], steps["step"].cast(pl.Int64)
    first = starts.search_sorted(pieces["begin_us"], side="left").cast(pl.Int64)
    last = starts.search_sorted(pieces["end_us"], side="left").cast(pl.Int64) - 1
    begun = numbers.extend_constant(NEVER, 1).gather(first)
    ended = numbers.extend_constant(NEVER, 1).gather(last.clip(0))
    # The steps at a row's two ends are its own, whenever they began.
    begin = pl.when(pl.col("begin_us") == pl.col("row_begin")).then("begin_step").otherwise(begun)
    end = pl.when(pl.col("end_us") == pl.col("row_end")).then("end_step").otherwise(ended)
    with_steps = pieces.with_columns(
        begin_step=pl.max_horizontal(begin, pl.col("begin_step")),
        end_step=pl.min_horizontal(end, pl.col("end_step")),
    )
    none = pl.col("begin_step") > pl.col("end_step")
    return with_steps.with_columns(
        pl.when(~none).then(name).alias(name) for name in ("begin_step", "end_step")
    )
