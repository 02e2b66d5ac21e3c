"""Interruptions: times in which an engine did not do for its requests what it does in a usual step.

Each has a beginning, an end and a cost: the time of all requests that were open meanwhile. A pause is one,
and so are what the engine's thread did instead of a step, and the part of a step that its work does not
explain.
"""

from bisect import bisect_left
from itertools import pairwise

import polars as pl

from schedtrace.timeline.engine_states import engine_busy_us, engine_states
from schedtrace.timeline.frames import Frames, computed_once
from schedtrace.timeline.request_states import QUEUED, request_states
from schedtrace.timeline.slow_spans import MOST_FRAC, slow_spans
from schedtrace.timeline.slow_spans import SCHEMA as OF_SPANS
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us, until
from schedtrace.timeline.starvation import lost_spans, starved
from schedtrace.timeline.step_time import median

LEAST_FRAC = 0.002
"""Of the engine's time: what all of one kind have to take to be kept."""
MOST_FIRST = 50
"""Steps at the beginning of a trial among which slow ones are its first."""
FEWEST_PERIODIC = 3
SHORTEST_PERIOD = 4
"""Steps: of a shorter period nearly every distance is a multiple."""
REGULAR_FRAC = 0.8
"""So many of the distances are a multiple of the period."""
LATE_FRAC = 0.1
"""Of the period: so early or late is on time."""
FEWEST_EPISODE = 3
"""Slow steps in a row, or nearly."""

PAUSED, ASLEEP, CALLED, NO_CALL = "paused", "asleep", "called", "no_call"
HUNG, STALLED = "hung", "stalled"
FIRST, PERIODIC, EPISODE, SCATTERED = "first_steps", "periodic", "episode", "scattered"
SLOWER, STARVED = "slower", "starved"
ALWAYS = (PAUSED, ASLEEP, HUNG, STALLED)
"""Kept however little they took."""
DEVICE = "device"
"""The part of an interruption that kept no engine's thread."""
KINDS = (
    *(PAUSED, ASLEEP, CALLED, HUNG, STALLED, NO_CALL),
    *(FIRST, PERIODIC, EPISODE, SCATTERED, SLOWER, STARVED),
)
HUNG_US = 1_000_000
"""``schedule()`` takes milliseconds: what took it a second and more is a hang, and no slow step."""
NOT_RETURNED = "schedule() has not returned"
"""Beginning of the watchdog's sentence about such a call (``record/live/stall_causes.py``)."""
HUNG_FACTOR = 5.0
"""Times as long as a usual call."""
ELSEWHERE = {"worker": DEVICE, "ranks": DEVICE, "connector": "schedule", "engine": "schedule"}
"""Kinds of the watchdog's stalls in which no step is made, and the part of a step in which it is held up."""
SCHEMA = {
    "kind": pl.String,
    **OF_SPANS,
    "detail": pl.String,
    "open": pl.Boolean,
    "period_steps": pl.Float64,
    "period_us": pl.Float64,
}


@computed_once
def events(frames: Frames) -> pl.DataFrame:
    """Return one row per interruption, in order of time; only ``starved`` may overlap slow steps, by half.

    Columns:

    * ``kind``: ``paused`` (the scheduler was, all of it or for new requests), ``asleep``, ``called`` (the
      engine's thread did what it was asked for: a call of the workers, an adapter, a reset), ``hung`` (one
      call of ``schedule()`` took a second or more, or has not returned when the trace ends), ``stalled`` (the
      watchdog saw that the engine made no step, for another reason), ``no_call`` (no
      call of ``schedule()``, and the trace does not show why); slow steps: ``first_steps`` of a trial,
      ``periodic``, ``episode`` (in a row), ``scattered``, and ``slower``: the steps of a time in which the
      device took longer for the same work (``slow_spans.py``); ``starved``: what the engine and its workers
      lost for want of a processor, which nothing else explains as well (``starvation.py``),
    * ``trial``, ``begin_us``, ``end_us``: of a slow step, the part of it that is too long,
    * ``step``: the slow one; of ``stalled``, and of ``hung`` without an end, the one before; else the next,
    * ``part``: where the time went: ``device``, ``schedule``, ``update`` or ``host_gap``,
    * ``factor``: how many times as long as usual that part took,
    * ``detail``: of ``paused`` its state, of ``called`` what was called, of ``stalled`` and ``hung`` the
      watchdog's sentence; ``open``: it lasted until the trace's end,
    * ``period_steps`` or ``period_us``: of ``periodic``.
    """
    none = pl.DataFrame(schema=SCHEMA)
    if not engine_busy_us(frames):
        return pl.concat([none, _stalled(frames)], how="diagonal_relaxed").select(*SCHEMA)
    slow, slower = slow_spans(frames)
    asked = _asked(frames)
    hung = _without(_hung(frames), asked)
    asked = pl.concat([asked, hung], how="diagonal_relaxed")
    asked = pl.concat([asked, _without(_stalled(frames), asked)], how="diagonal_relaxed")
    starving = lost_spans(frames).with_columns(kind=pl.lit(STARVED))
    starving = starving.filter(overlap_us(starving, merged(asked)) < 0.5 * LENGTH_US)
    slow = _without(_outside(slow, frames), asked)
    if slow["step"].n_unique() > MOST_FRAC * frames.steps.height:
        slow = slow.clear()
    slower = _without(_outside(slower, frames), pl.concat([asked, slow], how="diagonal"))
    slower = slower.with_columns(kind=pl.lit(SLOWER))
    found = pl.concat([none, asked, *_by_position(frames, slow), slower, starving], how="diagonal_relaxed")
    cost = LENGTH_US.sum().over("kind", "part") >= LEAST_FRAC * engine_busy_us(frames)
    return found.select(*SCHEMA).filter(cost | pl.col("kind").is_in(ALWAYS)).sort("begin_us")


def cost_us(frames: Frames, found: pl.DataFrame) -> int:
    """The time of the requests that these interruptions kept from what they would have got, added up.

    While a paused scheduler still steps, that is the time of those who wait.
    """
    paused = found.filter(pl.col("kind") == PAUSED)
    still = pl.concat([found.filter(pl.col("kind") != PAUSED), standstills(frames, paused)], how="diagonal")
    states = request_states(frames)
    begin, end = (until(states, still[name].to_list()) for name in ("begin_us", "end_us"))
    waits = states.filter(pl.col("state").is_in(QUEUED))
    queued_us = overlap_us(waits, merged(paused)) - overlap_us(waits, merged(standstills(frames, paused)))
    return round(sum(end) - sum(begin)) + int(queued_us.sum())


def standstills(frames: Frames, found: pl.DataFrame) -> pl.DataFrame:
    """``begin_us`` and ``end_us`` of the parts of interruptions in which the engine did not step at all."""
    still = engine_states(frames).filter(pl.col("state").is_in(["host_gap", "schedule", "update"]))
    first = still["end_us"].search_sorted(found["begin_us"], side="right")
    after = still["begin_us"].search_sorted(found["end_us"], side="left")
    within = (
        found.select("begin_us", "end_us", row=pl.int_ranges(first, after, dtype=pl.Int64))
        .explode("row")
        .drop_nulls("row")
    )
    states = still[within["row"]]
    return within.select(
        begin_us=pl.max_horizontal("begin_us", states["begin_us"]),
        end_us=pl.min_horizontal("end_us", states["end_us"]),
    )


def kept(frames: Frames, spans: pl.DataFrame) -> list[str]:
    """The requests that were open in one of these spans, those that lost most time first."""
    states = request_states(frames)
    lost = overlap_us(states, merged(spans))
    each = states.select("request_id").with_columns(us=lost).group_by("request_id").agg(pl.col("us").sum())
    return (
        each.filter(pl.col("us") > 0)
        .sort("us", "request_id", descending=[True, False])["request_id"]
        .to_list()
    )


@computed_once
def host_spans(frames: Frames) -> pl.DataFrame:
    """``begin_us`` and ``end_us`` of times in which an interruption kept the engine's thread from steps."""
    return merged(standstills(frames, events(frames).filter(pl.col("part") != DEVICE)))


def interrupted_us(frames: Frames, rows: pl.DataFrame) -> pl.Series:
    """How much of each row's time that was; rows have ``begin_us`` and ``end_us``."""
    return overlap_us(rows, host_spans(frames))


def starved_us(frames: Frames, rows: pl.DataFrame) -> pl.Series:
    """Return how much of each row's time a worker waited for a processor while it had the batch."""
    interruptions = events(frames)
    return overlap_us(rows, merged(interruptions.filter(kind=STARVED, part="device")))


def _asked(frames: Frames) -> pl.DataFrame:
    """Interruptions that somebody asked for, by what was recorded of it."""
    controls = frames.controls
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
    found = merged(spans.with_columns(pl.col("begin_us", "end_us").clip(first, last)))
    steps = frames.steps.select("start_us", "trial", "step").sort("start_us")
    return found.join_asof(
        steps, left_on="end_us", right_on="start_us", strategy="forward", check_sortedness=False
    ).select("kind", "trial", "begin_us", "end_us", "step", "detail", "open", part=pl.lit("host_gap"))


def _hung(frames: Frames) -> pl.DataFrame:
    """Calls of ``schedule()`` that took so long that nothing else explains where the time went."""
    steps = frames.steps.select("trial", "step", "start_us", "end_us", "schedule_us")
    usual = median(steps["schedule_us"])
    took = pl.col("schedule_us")
    calls = steps.filter((took >= HUNG_US) & (took >= HUNG_FACTOR * usual))
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


def _stalled(frames: Frames) -> pl.DataFrame:
    """Return what the watchdog saw while the engine made no step; not where it stepped and was refused."""
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
    steps = frames.steps.select("start_us", "trial", "step").sort("start_us")
    return (
        stalls.filter(LENGTH_US > 0)
        .sort("begin_us")
        .join_asof(steps, left_on="begin_us", right_on="start_us", check_sortedness=False)
        .drop("start_us")
    )


def _without(slow: pl.DataFrame, asked: pl.DataFrame) -> pl.DataFrame:
    """The slow spans that are mostly outside of what somebody asked for, and not inside of each other."""
    if slow.is_empty():
        return slow
    slow = slow.filter(overlap_us(slow, merged(asked)) < 0.5 * LENGTH_US)
    longest_first = slow.sort(LENGTH_US, descending=True).to_dicts()
    taken: list[dict[str, int]] = []  # in order of time, so that only two neighbours can overlap
    for one in longest_first:
        at = bisect_left(taken, one["begin_us"], key=lambda other: other["begin_us"])
        after, before = taken[at : at + 1], taken[max(0, at - 1) : at]
        if all(one["end_us"] <= other["begin_us"] for other in after) and all(
            one["begin_us"] >= other["end_us"] for other in before
        ):
            taken.insert(at, one)
    return pl.DataFrame(taken, schema=slow.schema)


def _outside(slow: pl.DataFrame, frames: Frames) -> pl.DataFrame:
    """The slow spans that are mostly outside of the times in which processors were short."""
    return slow.filter(overlap_us(slow, starved(frames)) < 0.5 * LENGTH_US)


def _by_position(frames: Frames, slow: pl.DataFrame) -> list[pl.DataFrame]:
    """The slow spans by where they stand among the steps."""
    computing = frames.steps.filter(pl.col("total_requests") > 0)
    place = computing.select("step", place=pl.int_range(pl.len()).over("trial"))
    slow = slow.sort("begin_us").join_asof(
        place.sort("step"), on="step", check_sortedness=False, strategy="nearest"
    )
    slow = slow.with_columns(pl.col("place").fill_null(0))  # no step computed anything
    found = []
    for _, of_trial in slow.group_by("trial", maintain_order=True):
        first = _first(of_trial) if frames.begins else of_trial.clear()
        found.append(first.with_columns(kind=pl.lit(FIRST)))
        rest = of_trial.join(first, on=["begin_us", "end_us"], how="anti", maintain_order="left")
        found += _rest(rest)
    return found


def _first(slow: pl.DataFrame) -> pl.DataFrame:
    """Those of the first steps: so many that at least half of the steps so far were slow."""
    places = slow["place"].to_list()
    most = 0
    for count, place in enumerate(places, 1):
        if place < MOST_FIRST and 2 * count > place:
            most = count
    return slow.head(most)


def _rest(slow: pl.DataFrame) -> list[pl.DataFrame]:
    """Periodic ones, else what is neither; short ones between them are no part of the period."""
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
    """Slow steps that nearly follow each other are an episode."""
    gaps = slow.filter(pl.col("part") == "host_gap").with_columns(kind=pl.lit(NO_CALL))
    steps = slow.filter(pl.col("part") != "host_gap")
    new = (pl.col("place") - pl.col("place").shift(1)).fill_null(0) > FEWEST_EPISODE
    size = pl.len().over(new.cum_sum())
    kind = pl.when(size >= FEWEST_EPISODE).then(pl.lit(EPISODE)).otherwise(pl.lit(SCATTERED))
    return [gaps, steps.with_columns(kind=kind)]


def _period(at: list[int], shortest: float) -> float | None:
    """The distance of which nearly all distances are a multiple; None: there is none."""
    distances = [later - before for before, later in pairwise(at)]
    if len(at) < FEWEST_PERIODIC:
        return None
    period = sorted(distances)[len(distances) // 2]
    if period < shortest:
        return None
    late = max(1.0, LATE_FRAC * period)
    turns = [max(1, round(one / period)) for one in distances]
    on_time = [abs(one - turn * period) <= late for one, turn in zip(distances, turns, strict=True)]
    if sum(on_time) < REGULAR_FRAC * len(on_time) or 2 * len(at) <= sum(turns):
        return None
    return sum(distances) / sum(turns)
