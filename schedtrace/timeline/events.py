"""Interruptions: periods in which an engine did not do the work of a usual step for its requests.

Each interruption has a beginning, an end and a cost: the total time that requests spent in it. Examples
are a pause, work of the engine's thread other than steps, and the part of a step that its work does not
explain.

An event takes precedence over a limit: a request that waited for a seat while the scheduler was paused really
waited for the end of the pause. ``interrupted_states`` marks the part of the requests' time that ``charges``
and the time split treat as interrupted.
"""

from bisect import bisect_left
from itertools import pairwise

import polars as pl

from schedtrace.timeline.engine_states import MOST_FRAC, SLOW_SCHEMA, lost_spans, slow_spans
from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.queue_waits import NEVER
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us, until
from schedtrace.timeline.step_time import median

LEAST_FRAC = 0.002
"""Minimum share of the engine's time that all interruptions of a kind must take together to be reported."""
MOST_FIRST = 50
"""Number of steps at the beginning of a trial among which slow steps are ``first_steps``."""
FEWEST_PERIODIC = 3
SHORTEST_PERIOD = 4
"""Minimum number of steps in a period; nearly any distance is about a multiple of a shorter period."""
REGULAR_FRAC = 0.8
"""Minimum share of the distances that must be multiples of the period."""
LATE_FRAC = 0.1
"""Maximum share of the period by which a slow step may be early or late."""
FEWEST_EPISODE = 3
"""Minimum number of consecutive, or nearly consecutive, slow steps in an episode."""

PAUSED, ASLEEP, CALLED, NO_CALL = "paused", "asleep", "called", "no_call"
HUNG, STALLED = "hung", "stalled"
FIRST, PERIODIC, EPISODE, SCATTERED = "first_steps", "periodic", "episode", "scattered"
STARVED = "starved"
INTERRUPTED = "interrupted"
"""State of a request, and charge of its wait, while an interruption lasts."""
ALWAYS = (PAUSED, ASLEEP, HUNG, STALLED)
"""Kinds of interruptions that are reported even if they are short."""
DEVICE = "device"
"""Value of ``part`` for an interruption that did not occupy the engine's thread."""
KINDS = (
    *(PAUSED, ASLEEP, CALLED, HUNG, STALLED, NO_CALL),
    *(FIRST, PERIODIC, EPISODE, SCATTERED, STARVED),
)
HUNG_US = 1_000_000
"""Microseconds above which a call of ``schedule()`` counts as hanging, not as a slow step; it usually takes
milliseconds."""
NOT_RETURNED = "schedule() has not returned"
"""Beginning of the watchdog's sentence about a call that has not returned (``record/live/stall_causes.py``).
"""
HUNG_FACTOR = 5.0
"""Minimum factor by which a hanging call is longer than a usual one."""
ELSEWHERE = {"worker": DEVICE, "ranks": DEVICE, "connector": "schedule", "engine": "schedule"}
"""Part of a step that a stall holds up, by the watchdog's word for the stall; during these stalls, no step
runs."""
SCHEMA = {
    "kind": pl.String,
    **SLOW_SCHEMA,
    "detail": pl.String,
    "open": pl.Boolean,
    "period_steps": pl.Float64,
    "period_us": pl.Float64,
}


def make_events(
    frames: EngineFrames, engine: pl.DataFrame, busy_us: int, starved: pl.DataFrame, starving: pl.Series
) -> pl.DataFrame:
    """Return one row per interruption, in order of time.

    Interruptions do not overlap, except that up to half of a slow step may lie in ``starved`` periods.

    Columns:

    * ``kind``: ``paused`` (the scheduler was paused, entirely or for new requests), ``asleep``, ``called``
      (the engine's thread handled a call: to the workers, for an adapter, a reset), ``hung`` (one call of
      ``schedule()`` took a second or more, or had not returned when the trace ended), ``stalled`` (the
      watchdog saw that the engine made no step, for another reason), ``no_call`` (no call of ``schedule()``,
      and the trace does not show why); slow steps: ``first_steps`` of a trial, ``periodic``, ``episode`` (in
      a row) and ``scattered``; ``starved``: time that the engine and its workers lost for lack of a
      processor, unless another event explains it (``engine_states.py``),
    * ``trial``, ``begin_us``, ``end_us``: for a slow step, the times of the part that is too long,
    * ``step``: the slow step; for ``stalled``, and for ``hung`` without an end, the step before; else the
      next step,
    * ``part``: the part of the step that took the time: ``device``, ``schedule``, ``update`` or ``host_gap``,
    * ``factor``: how many times as long as usual that part took,
    * ``detail``: for ``paused`` the pause state, for ``called`` the call, for ``stalled`` and ``hung`` the
      watchdog's sentence; ``open``: it lasted until the trace's end,
    * ``period_steps`` or ``period_us``: for ``periodic``.
    """
    if not busy_us:
        return _table([_stalled(frames)])
    slow = slow_spans(frames, engine, starving)
    asked = _asked(frames)
    asked = _table([asked, _without(_hung(frames), asked)])
    asked = _table([asked, _without(_stalled(frames), asked)])
    lost = pl.DataFrame(schema=SCHEMA)
    if not starved.is_empty():
        lost = lost_spans(frames, engine, starved).with_columns(kind=pl.lit(STARVED))
        lost = lost.filter(
            overlap_us(lost, merged(asked)) < 0.5 * LENGTH_US
        )  # mostly outside of what was asked
        if not slow.is_empty():  # of the slow spans those that lie mostly outside of starved periods
            slow = slow.filter(overlap_us(slow, starved) < 0.5 * LENGTH_US)
    slow = _without(slow, asked)
    # Before these steps every request was a session that waited for its client.
    sessions_only = (pl.col("num_running_after") == 0) & (
        pl.col("num_waiting_after") == pl.col("sessions_paused")
    )
    after_sessions = pl.lit(frames.steps.filter(sessions_only.shift(1))["step"]).implode()
    slow = slow.filter((pl.col("part") != "host_gap") | ~pl.col("step").is_in(after_sessions))
    if slow["step"].n_unique() > MOST_FRAC * frames.steps.height:
        slow = slow.clear()
    interruptions = _table([asked, *_by_position(frames, slow), lost])
    if interruptions.is_empty():
        return interruptions
    cost = LENGTH_US.sum().over("kind", "part") >= LEAST_FRAC * busy_us
    return interruptions.filter(cost | pl.col("kind").is_in(ALWAYS)).sort("begin_us")


def _table(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Return the rows of all parts, which may lack columns, as one table of events."""
    rows = [part for part in parts if not part.is_empty()]
    none = pl.DataFrame(schema=SCHEMA)
    return pl.concat([none, *rows], how="diagonal_relaxed").select(*SCHEMA) if rows else none


def cost_us(states: pl.DataFrame, engine: pl.DataFrame, interruptions: pl.DataFrame) -> int:
    """Return the total time, in microseconds, that requests spent in interruptions that held them up.

    While a paused scheduler still runs steps, only the time of waiting requests counts.
    """
    paused = interruptions.filter(pl.col("kind") == PAUSED)
    still = pl.concat(
        [interruptions.filter(pl.col("kind") != PAUSED), standstills(engine, paused)], how="diagonal"
    )
    begin, end = (until(states, still[name].to_list()) for name in ("begin_us", "end_us"))
    waits = states.filter(pl.col("state").is_in(QUEUED))
    queued_us = overlap_us(waits, merged(paused)) - overlap_us(waits, merged(standstills(engine, paused)))
    return round(sum(end) - sum(begin)) + int(queued_us.sum())


def standstills(engine: pl.DataFrame, interruptions: pl.DataFrame) -> pl.DataFrame:
    """Return the parts of interruptions in which the engine ran no step: ``begin_us`` and ``end_us``.

    The time before the engine's first step is such a part.
    """
    if interruptions.is_empty():
        return pl.DataFrame(schema={"begin_us": pl.Int64, "end_us": pl.Int64})
    before = interruptions.select(pl.col("begin_us").min(), pl.col("end_us").max())
    if not engine.is_empty():
        before = before.with_columns(end_us=pl.lit(engine["begin_us"].min()))
    states = engine.filter(pl.col("state").is_in(["host_gap", "schedule", "update"]))
    still = pl.concat(
        [before.filter(LENGTH_US > 0).cast(pl.Int64), states[["begin_us", "end_us"]].cast(pl.Int64)]
    )
    first = still["end_us"].search_sorted(interruptions["begin_us"], side="right")
    after = still["begin_us"].search_sorted(interruptions["end_us"], side="left")
    within = (
        interruptions.select("begin_us", "end_us", row=pl.int_ranges(first, after, dtype=pl.Int64))
        .explode("row")
        .drop_nulls("row")
    )
    states = still[within["row"]]
    return within.select(
        begin_us=pl.max_horizontal("begin_us", states["begin_us"]),
        end_us=pl.min_horizontal("end_us", states["end_us"]),
    )


def _asked(frames: EngineFrames) -> pl.DataFrame:
    """Return the recorded interruptions that a client or operator requested."""
    controls = frames.controls
    if controls.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    first, last = frames.begin_us, frames.end_us
    states = pl.col("control") == "pause_state"
    sleeps = pl.col("control").is_in(["sleep", "wake_up"])
    pauses = controls.filter(states).select(
        "detail",
        kind=pl.lit(PAUSED),
        begin_us="at_us",
        end_us=pl.col("at_us").shift(-1).fill_null(last),
        open=pl.col("at_us").shift(-1).is_null(),
    )
    calls = controls.filter(~states & (pl.col("took_us") > 0)).select(
        pl.coalesce("detail", "control"),
        kind=pl.when(sleeps).then(pl.lit(ASLEEP)).otherwise(pl.lit(CALLED)),
        begin_us="at_us",
        end_us=pl.col("at_us") + pl.col("took_us"),
        open=pl.lit(value=False),
    )
    spans = pl.concat([pauses.filter(pl.col("detail") != "UNPAUSED"), calls])
    interruptions = merged(spans.with_columns(pl.col("begin_us", "end_us").clip(first, last)))
    steps = frames.steps[["start_us", "trial", "step"]].sort("start_us")
    return interruptions.join_asof(
        steps, left_on="end_us", right_on="start_us", strategy="forward", check_sortedness=False
    ).select("kind", "trial", "begin_us", "end_us", "step", "detail", "open", part=pl.lit("host_gap"))


def _hung(frames: EngineFrames) -> pl.DataFrame:
    """Return the calls of ``schedule()`` that took a second or more, and far longer than usual."""
    took = pl.col("schedule_us")
    usual = median(frames.steps["schedule_us"])
    calls = frames.steps.filter((took >= HUNG_US) & (took >= HUNG_FACTOR * usual))
    if calls.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    return calls.select(
        "trial",
        "step",
        "end_us",
        begin_us="start_us",
        kind=pl.lit(HUNG),
        part=pl.lit("schedule"),
        factor=took / max(usual, 1.0),
        open=pl.lit(value=False),
    )


def _stalled(frames: EngineFrames) -> pl.DataFrame:
    """Return the stalls that the watchdog reported, without those during which the engine still ran steps."""
    if frames.stalls.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    last = frames.end_us
    hung = pl.col("sentence").str.starts_with(NOT_RETURNED)
    stalls = frames.stalls.filter(pl.col("kind").is_in(list(ELSEWHERE))).select(
        kind=pl.when(hung).then(pl.lit(HUNG)).otherwise(pl.lit(STALLED)),
        begin_us="since_us",
        end_us=pl.min_horizontal("until_us", pl.lit(last)),
        part=pl.col("kind").replace_strict(ELSEWHERE, return_dtype=pl.String),
        detail="sentence",
        open="open",
    )
    steps = frames.steps[["start_us", "trial", "step"]].sort("start_us")
    return (
        stalls.filter(LENGTH_US > 0)
        .sort("begin_us")
        .join_asof(steps, left_on="begin_us", right_on="start_us", check_sortedness=False)
        .drop("start_us")
    )


def _without(slow: pl.DataFrame, asked: pl.DataFrame) -> pl.DataFrame:
    """Return the slow spans that lie mostly outside of ``asked`` and do not overlap a longer slow span."""
    if slow.is_empty():
        return slow
    slow = slow.filter(overlap_us(slow, merged(asked)) < 0.5 * LENGTH_US)
    longest_first = slow.sort(LENGTH_US, descending=True).to_dicts()
    taken: list[dict[str, int]] = []  # in order of time, so that only two neighbours can overlap
    for span in longest_first:
        at = bisect_left(taken, span["begin_us"], key=lambda earlier_or_later: earlier_or_later["begin_us"])
        after, before = taken[at : at + 1], taken[max(0, at - 1) : at]
        if all(span["end_us"] <= earlier_or_later["begin_us"] for earlier_or_later in after) and all(
            span["begin_us"] >= earlier_or_later["end_us"] for earlier_or_later in before
        ):
            taken.insert(at, span)
    return pl.DataFrame(taken, schema=slow.schema)


def _by_position(frames: EngineFrames, slow: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the slow spans with their kind, determined by their position among the steps."""
    if slow.is_empty():
        return []
    computing = frames.steps.filter(pl.col("total_requests") > 0)
    place = computing.select("step", place=pl.int_range(pl.len()).over("trial"))
    slow = slow.sort("begin_us").join_asof(
        place.sort("step"), on="step", check_sortedness=False, strategy="nearest"
    )
    slow = slow.with_columns(pl.col("place").fill_null(0))  # no step computed anything
    return spans_by_kind(slow, begins=frames.begins)


def spans_by_kind(slow: pl.DataFrame, *, begins: bool) -> list[pl.DataFrame]:
    """Return slow spans with their kind, determined by their position among a trial's steps (``place``).

    Args:
        slow: Slow spans with ``place``, in order of time.
        begins: Whether each trial's first step is recorded.
    """
    by_kind = []
    for _, of_trial in slow.group_by("trial", maintain_order=True):
        first = _first(of_trial) if begins else of_trial.clear()
        by_kind.append(first.with_columns(kind=pl.lit(FIRST)))
        rest = of_trial.join(first, on=["begin_us", "end_us"], how="anti", maintain_order="left")
        by_kind += _rest(rest)
    return by_kind


def _first(slow: pl.DataFrame) -> pl.DataFrame:
    """Return the slow steps at a trial's beginning, up to the last point by which most steps were slow."""
    places = slow["place"].to_list()
    most = 0
    for count, place in enumerate(places, 1):
        if place < MOST_FIRST and 2 * count > place:
            most = count
    return slow.head(most)


def _rest(slow: pl.DataFrame) -> list[pl.DataFrame]:
    """Classify slow spans as periodic, or else by ``_alone``; short spans do not break a period."""
    if slow.is_empty():
        return []
    usual = slow.select((LENGTH_US**2).sum() / LENGTH_US.sum()).item()
    main = slow.filter(usual / 3 <= LENGTH_US)
    for name, unit in (("place", "period_steps"), ("begin_us", "period_us")):
        period = _period(main[name].to_list(), SHORTEST_PERIOD if name == "place" else 1)
        if period is not None:
            main = main.with_columns(pl.lit(period).alias(unit), kind=pl.lit(PERIODIC))
            return [main, *_alone(slow.filter(usual / 3 > LENGTH_US))]
    return _alone(slow)


def _alone(slow: pl.DataFrame) -> list[pl.DataFrame]:
    """Classify gaps as ``no_call``, and slow steps as an episode if they nearly follow each other."""
    gaps = slow.filter(pl.col("part") == "host_gap").with_columns(kind=pl.lit(NO_CALL))
    steps = slow.filter(pl.col("part") != "host_gap")
    new = (pl.col("place") - pl.col("place").shift(1)).fill_null(0) > FEWEST_EPISODE
    size = pl.len().over(new.cum_sum())
    kind = pl.when(size >= FEWEST_EPISODE).then(pl.lit(EPISODE)).otherwise(pl.lit(SCATTERED))
    return [gaps, steps.with_columns(kind=kind)]


def _period(at: list[int], shortest: float) -> float | None:
    """Return the period of which nearly all distances are multiples; None if there is no such period."""
    distances = [later - before for before, later in pairwise(at)]
    if len(at) < FEWEST_PERIODIC:
        return None
    period = sorted(distances)[len(distances) // 2]
    if period < shortest:
        return None
    late = max(1.0, LATE_FRAC * period)
    turns = [max(1, round(distance / period)) for distance in distances]
    on_time = [abs(distance - turn * period) <= late for distance, turn in zip(distances, turns, strict=True)]
    if sum(on_time) < REGULAR_FRAC * len(on_time) or 2 * len(at) <= sum(turns):
        return None
    return sum(distances) / sum(turns)


def make_interrupted_states(
    frames: EngineFrames, states: pl.DataFrame, events: pl.DataFrame, host_spans: pl.DataFrame
) -> pl.DataFrame:
    """Return the rows of ``request_states``, cut at the edges of interruptions.

    Within an interruption, ``state`` is ``interrupted``, ``cause`` is the event's kind, and ``of_state`` is
    the state that continues; elsewhere ``of_state`` is null. ``begin_step`` and ``end_step`` are the first
    and last steps that began in the piece; ``tokens`` is null in pieces of a row that was cut.
    """
    interruptions = merged(events)
    if interruptions.is_empty() or states.is_empty():
        return states.with_columns(of_state=pl.lit(None, pl.String))
    starved_device = (pl.col("kind") == STARVED) & (pl.col("part") == DEVICE)
    lost_device = interruptions.filter(starved_device)[["begin_us", "end_us"]]
    kinds = interruptions[["begin_us", "kind"]]
    on_host = _with_kinds(host_spans, kinds)
    still = _with_kinds(pl.concat([host_spans, lost_device]), kinds)
    waits = pl.col("state").is_in([*QUEUED, "stalled"]) & pl.col("cause").ne_missing(pl.lit(NEXT_STEP))
    on_its_way = pl.col("state") == "front_end"
    received = frames.first_arrivals[["request_id", "received_us"]]
    ways = states.filter(on_its_way).join(received, on="request_id", how="left", maintain_order="left")
    # From when its process has a request, the engine's thread is what keeps it.
    received_us = pl.min_horizontal(pl.coalesce("received_us", "end_us"), "end_us")
    at_engine = pl.max_horizontal("begin_us", received_us)
    outside = ways.with_columns(end_us=at_engine, of_state=pl.lit(None, pl.String)).drop("received_us")
    inside = ways.with_columns(begin_us=at_engine).drop("received_us").filter(LENGTH_US > 0)
    return pl.concat(
        [
            outside.filter((LENGTH_US > 0) | (pl.col("tokens") > 0)),
            _split(frames, inside, on_host),
            _split(frames, states.filter(waits & ~on_its_way), interruptions),
            _split(frames, states.filter(~waits & ~on_its_way), still),
        ],
        how="diagonal_relaxed",
    ).sort("request_id", "begin_us", "end_us", maintain_order=True)


def _with_kinds(spans: pl.DataFrame, kinds: pl.DataFrame) -> pl.DataFrame:
    """Return spans in order of time, each with the kind of its interruption."""
    return merged(spans.sort("begin_us").join_asof(kinds, on="begin_us", check_sortedness=False))


def _split(frames: EngineFrames, rows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, cut at the edges of these spans."""
    columns = rows.columns
    if rows.is_empty() or spans.is_empty():
        return rows.with_columns(of_state=pl.lit(None, pl.String))
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
        .drop("begins", "ends")  # else each piece of a row gets a copy of both lists
        .explode("begin_us", "end_us")
        .filter(LENGTH_US > 0)
    )
    pieces = pl.concat([outside, inside], how="diagonal_relaxed").with_columns(tokens=pl.lit(None, pl.Int64))
    whole = rows.join(edges, on="row", how="anti", maintain_order="left")
    return pl.concat([whole, _with_steps(frames, pieces)], how="diagonal_relaxed").select(
        *columns, pl.col("of_state").cast(pl.String)
    )


def _with_steps(frames: EngineFrames, pieces: pl.DataFrame) -> pl.DataFrame:
    """Add to each piece of a row the steps that began in it."""
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
