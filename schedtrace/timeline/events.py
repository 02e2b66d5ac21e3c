"""Interruptions: times in which an engine did not do for its requests what it does in a usual step.

Each has a beginning, an end and a cost: the time of all requests that were open meanwhile. A pause is one,
and so are what the engine's thread did instead of a step, and the part of a step that its work does not
explain.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import polars as pl

from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.slowdown import slowdown
from schedtrace.timeline.spans import time_within, until
from schedtrace.timeline.step_time import FEATURES, FEWEST_STEPS, fit_step_time, nearly_predicted
from schedtrace.timeline.timeline import Timeline

FAR = 2.0
"""Twice as long as the same work takes elsewhere: models of step times are off by less."""
FAR_HOST = 5.0
"""Host times vary more, and most are short: such a one is also longer than a usual step."""
ABOUT = 0.8
"""A step with four fifths of another one's work has about as much."""
FEWEST_LIKE = 3
"""Steps with at least as much work, or with as many requests, of which the median is the usual time."""
MOST_FRAC = 0.25
"""What more than a quarter of the steps show is no interruption but how the load is."""
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
FIRST, PERIODIC, EPISODE, SCATTERED = "first_steps", "periodic", "episode", "scattered"
SLOWER = "slower"
KINDS = (PAUSED, ASLEEP, CALLED, NO_CALL, FIRST, PERIODIC, EPISODE, SCATTERED, SLOWER)
SCHEMA = {
    "kind": pl.String,
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "step": pl.Int64,
    "part": pl.String,
    "factor": pl.Float64,
    "detail": pl.String,
    "period_steps": pl.Float64,
    "period_us": pl.Float64,
}


def events(timeline: Timeline) -> pl.DataFrame:
    """One row per interruption, in order of time; none overlaps another.

    Columns:

    * ``kind``: ``paused`` (the scheduler was, all of it or for new requests), ``asleep``, ``called`` (the
      engine's thread did what it was asked for: a call of the workers, an adapter, a reset), ``no_call`` (no
      call of ``schedule()``, and the trace does not show why); slow steps: ``first_steps`` of a trial,
      ``periodic``, ``episode`` (in a row), ``scattered``, and ``slower``: the steps of a time in which the
      device took longer for the same work (``slowdown.py``),
    * ``trial``, ``begin_us``, ``end_us``: of a slow step, the part of it that is too long,
    * ``step``: the slow one, else the first one afterwards,
    * ``part``: where the time went: ``device``, ``schedule``, ``update`` or ``host_gap``,
    * ``factor``: how many times as long as usual that part took,
    * ``detail``: of ``paused`` its state, of ``called`` what was called,
    * ``period_steps`` or ``period_us``: of ``periodic``.
    """
    none = pl.DataFrame(schema=SCHEMA)
    if timeline.steps.is_empty() or not timeline.busy_us:
        return none
    slow, slower = _slow([]), _slow([])
    if timeline.steps.height >= FEWEST_STEPS:
        known = _known(timeline)
        slower = _in_slowdown(known)
        rest = known.filter(~pl.col("step").is_in(slower["step"].implode()))
        slow = pl.concat([_of_host(timeline), _of_device(rest)]).sort("begin_us")
    asked = _asked(timeline)
    slow = _without(slow, asked)
    if slow["step"].n_unique() > MOST_FRAC * timeline.steps.height:
        slow = slow.clear()
    slower = _without(slower, pl.concat([asked, slow], how="diagonal"))
    found = pl.concat(
        [asked, *_by_position(timeline, slow), slower.with_columns(kind=pl.lit(SLOWER))],
        how="diagonal_relaxed",
    )
    found = pl.concat(
        [none, found.cast({name: SCHEMA[name] for name in found.columns if name in SCHEMA})], how="diagonal"
    ).select(*SCHEMA)
    cost = LENGTH_US.sum().over("kind", "part") >= LEAST_FRAC * timeline.busy_us
    return found.filter(cost | pl.col("kind").is_in([PAUSED, ASLEEP])).sort("begin_us")


def cost_us(timeline: Timeline, found: pl.DataFrame) -> int:
    """The time of the requests that these interruptions kept from what they would have got, added up.

    While a paused scheduler still steps, that is the time of those who wait.
    """
    paused = found.filter(pl.col("kind") == PAUSED)
    still = pl.concat([found.filter(pl.col("kind") != PAUSED), standstills(timeline, paused)], how="diagonal")
    states = timeline.request_states
    begin, end = (until(states, still[name].to_list()) for name in ("begin_us", "end_us"))
    waits = states.filter(pl.col("state").is_in(QUEUED))
    queued = sum(
        _within(waits, spans) * sign for spans, sign in ((paused, 1), (standstills(timeline, paused), -1))
    )
    return round(sum(end) - sum(begin)) + queued


def _within(rows: pl.DataFrame, spans: pl.DataFrame) -> int:
    if spans.is_empty() or rows.is_empty():
        return 0
    return int(time_within(rows, merged(spans), {"us": pl.lit(value=True)})["us"].sum())


def standstills(timeline: Timeline, found: pl.DataFrame) -> pl.DataFrame:
    """``begin_us`` and ``end_us`` of the parts of interruptions in which the engine did not step at all."""
    still = timeline.engine_states.filter(pl.col("state").is_in(["host_gap", "schedule", "update"]))
    cut = [
        still.filter((pl.col("begin_us") < end) & (pl.col("end_us") > begin)).select(
            pl.col("begin_us", "end_us").clip(begin, end)
        )
        for begin, end in found.select("begin_us", "end_us").iter_rows()
    ]
    return pl.concat(cut) if cut else still.select("begin_us", "end_us").clear()


def kept(timeline: Timeline, spans: pl.DataFrame) -> list[str]:
    """The requests that were open in one of these spans, those that lost most time first."""
    states = timeline.request_states
    lost = time_within(states, merged(spans), {"us": pl.lit(value=True)})["us"]
    each = states.select("request_id").with_columns(us=lost).group_by("request_id").agg(pl.col("us").sum())
    return (
        each.filter(pl.col("us") > 0)
        .sort("us", "request_id", descending=[True, False])["request_id"]
        .to_list()
    )


def host_spans(timeline: Timeline) -> pl.DataFrame:
    """``begin_us`` and ``end_us`` of times in which an interruption kept the engine's thread from steps."""
    found = timeline.events.filter(pl.col("part") != "device")
    return merged(standstills(timeline, found)) if found.height else found.select("begin_us", "end_us")


def interrupted_us(timeline: Timeline, rows: pl.DataFrame) -> pl.Series:
    """How much of each row's time that was; rows have ``begin_us`` and ``end_us``."""
    spans = host_spans(timeline)
    if spans.is_empty():
        return pl.Series([0] * rows.height, dtype=pl.Int64)
    return time_within(rows, spans, {"us": pl.lit(value=True)})["us"]


def merged(spans: pl.DataFrame) -> pl.DataFrame:
    """``begin_us`` and ``end_us`` of spans in order, each cut where the one before still lasts."""
    before = pl.col("end_us").cum_max().shift(1).fill_null(pl.col("begin_us").min())
    cut = spans.select("begin_us", "end_us").sort("begin_us", "end_us")
    return cut.with_columns(begin_us=pl.max_horizontal("begin_us", before)).filter(LENGTH_US > 0)


def _usual_us(timeline: Timeline) -> float:
    """How long a usual step takes."""
    return _median(timeline.steps.filter(pl.col("total_requests") > 0)["busy_us"])


def _of_host(timeline: Timeline) -> pl.DataFrame:
    """Times in which the device had nothing to do and which are far longer than usual ones of their kind."""
    steps = (
        timeline.steps.sort("start_us")
        .with_columns(follows=pl.col("step").diff().fill_null(1) == 1)
        .select(
            "start_us",
            "step",
            "follows",
            schedule="schedule_us",
            update="update_us",
            there=pl.col("num_running_before") + pl.col("num_waiting_before"),
        )
    )
    least = _usual_us(timeline)
    long = timeline.engine_states.with_columns(us=LENGTH_US).filter(pl.col("us") >= least).sort("end_us")
    kinds: tuple[tuple[list[str], Literal["backward", "forward"]], ...] = (
        (["schedule", "update"], "backward"),
        (["host_gap"], "forward"),
    )
    spans = pl.concat(
        long.filter(pl.col("state").is_in(states))
        .join_asof(steps, left_on="end_us", right_on="start_us", strategy=strategy)
        .drop_nulls("there")
        .filter(
            (pl.col("state") != "host_gap") | pl.col("follows")
        )  # else steps in between were not recorded
        for states, strategy in kinds
    )
    gaps = timeline.engine_states.filter(pl.col("state") == "host_gap").select(LENGTH_US.alias("us"))["us"]
    rows = []
    for one in spans.to_dicts():
        state = one["state"]
        usual, like = _median(gaps), gaps
        if state != "host_gap":
            usual = _median(steps[state])
            like = steps.filter(pl.col("there") >= one["there"])[state]
        expected = max(usual, _median(like) if like.len() > FEWEST_LIKE else 0.0)
        if one["us"] >= FAR_HOST * expected and one["us"] - expected >= least:
            begin = one["begin_us"] + int(expected)
            factor = one["us"] / max(expected, 1.0)
            rows.append((one["trial"], begin, one["end_us"], one["step"], state, factor))
    return _slow(rows)


def _known(timeline: Timeline) -> pl.DataFrame:
    """The steps of which ``device_us`` can be told, and ``device_end_us``, when the device was done."""
    steps = timeline.steps
    in_lockstep = "wave" in steps.columns and steps["wave"].count() > 0
    if in_lockstep or (timeline.header.pipeline_parallel_size or 1) > 1:
        steps = steps.clear()
    executed = pl.col("start_us") + pl.col("execute_after_us") + pl.col("execute_us")
    return (
        steps.with_columns(
            device_us=pl.coalesce("execute_us", "busy_us"),
            device_end_us=pl.min_horizontal("output_us", executed),
        )
        .filter(
            (pl.col("device_us") > 0)
            & (pl.col("total_requests") > 0)
            & (pl.col("recomputed_tokens").fill_null(0) == 0)
        )
        .drop_nulls(["output_us", *FEATURES])
    )


def _in_slowdown(known: pl.DataFrame) -> pl.DataFrame:
    """The parts of the steps of a slowdown that are too long, all by one factor."""
    found = slowdown(known)
    if found is None:
        return _slow([])
    steps, factor = found
    return steps.select(
        "trial",
        begin_us=pl.col("device_end_us") - (pl.col("device_us") * (1 - 1 / factor)).round().cast(pl.Int64),
        end_us="device_end_us",
        step="step",
        part=pl.lit("device"),
        factor=pl.lit(factor),
    )


def _of_device(known: pl.DataFrame) -> pl.DataFrame:
    """The parts of steps that took far longer on the device than others with about as much work or more."""
    modelled = _expected(known)
    if modelled is None:
        return _slow([])
    import numpy as np  # noqa: PLC0415  # a filter for each slow step would take half a minute

    known = modelled
    far = known.filter(pl.col("device_us") >= FAR * pl.col("expected_us"))
    if far.is_empty() or far.height > MOST_FRAC * known.height:
        return _slow([])
    step, device, expected_us, used = (
        known[name].to_numpy() for name in ("step", "device_us", "expected_us", "used_tokens")
    )
    work = {name: known[name].to_numpy() for name in FEATURES}
    rows = []
    for one in far.to_dicts():
        others = step != one["step"]
        costly = others & (expected_us >= ABOUT * one["expected_us"])
        larger = np.logical_and.reduce([others, *(work[name] >= ABOUT * one[name] for name in FEATURES)])
        like = max(
            float(np.median(device[alike])) if alike.sum() >= FEWEST_LIKE else 0.0
            for alike in (costly, larger)
        )
        if not like:  # a step takes no longer than smaller ones with its tokens together
            smaller = others & (used >= 1) & (used <= one["used_tokens"])
            like = one["used_tokens"] * float((device[smaller] / used[smaller]).min(initial=np.inf))
            like = 0.0 if math.isinf(like) else like
        expected = max(one["expected_us"], like)
        if one["device_us"] >= FAR * expected:
            end = one["device_end_us"]
            begin = end - int(one["device_us"] - expected)
            rows.append((one["trial"], begin, end, one["step"], "device", one["device_us"] / expected))
    return _slow(rows)


def _expected(known: pl.DataFrame) -> pl.DataFrame | None:
    """The steps with ``expected_us``, by a model of those that are not slow; None: there are too few.

    One slow step may decide what a token costs, if few others have as many. So a model of relative errors, in
    which a slow step weighs little, says first which ones are left out.
    """
    timed = known.with_columns(busy_us="device_us")
    rough = nearly_predicted(timed, timed)
    model = None if rough is None else fit_step_time(timed.filter(pl.col("device_us") < FAR * rough))
    return None if model is None else known.with_columns(expected_us=model.predicted())


def _median(values: pl.Series) -> float:
    return float(values.median() or 0)  # type: ignore[arg-type]  # of numbers


def _slow(rows: Sequence[tuple[object, ...]]) -> pl.DataFrame:
    names = ("trial", "begin_us", "end_us", "step", "part", "factor")
    return pl.DataFrame(rows, schema={name: SCHEMA[name] for name in names}, orient="row")


def _asked(timeline: Timeline) -> pl.DataFrame:
    """Interruptions that somebody asked for, by what was recorded of it."""
    controls = timeline.controls
    first, last = int(timeline.steps["start_us"][0]), timeline.end_us
    pauses = controls.filter(pl.col("control") == "pause_state").with_columns(
        end_us=pl.col("at_us").shift(-1).fill_null(last)
    )
    spans = [
        pauses.filter(pl.col("detail") != "UNPAUSED").select(
            "end_us", "detail", kind=pl.lit(PAUSED), begin_us="at_us"
        )
    ]
    others = controls.filter((pl.col("control") != "pause_state") & (pl.col("took_us") > 0)).with_columns(
        end_us=pl.col("at_us") + pl.col("took_us"), begin_us="at_us"
    )
    spans.append(
        others.select(
            "end_us",
            detail=pl.coalesce("detail", "control"),
            kind=pl.when(pl.col("control").is_in(["sleep", "wake_up"]))
            .then(pl.lit(ASLEEP))
            .otherwise(pl.lit(CALLED)),
            begin_us="begin_us",
        )
    )
    found = (
        pl.concat(spans)
        .with_columns(pl.col("begin_us", "end_us").clip(first, last))
        .sort("begin_us", "end_us")
        .with_columns(after=pl.col("end_us").cum_max().shift(1).fill_null(first))
        .with_columns(begin_us=pl.max_horizontal("begin_us", "after"))
        .filter(LENGTH_US > 0)
    )
    steps = timeline.steps.select("start_us", "trial", "step").sort("start_us")
    return found.join_asof(
        steps, left_on="end_us", right_on="start_us", strategy="forward", check_sortedness=False
    ).select("kind", "trial", "begin_us", "end_us", "step", "detail", part=pl.lit("host_gap"))


def _without(slow: pl.DataFrame, asked: pl.DataFrame) -> pl.DataFrame:
    """The slow spans that are mostly outside of what somebody asked for, and not inside of each other."""
    if slow.is_empty():
        return slow
    if asked.height:
        inside = time_within(slow, merged(asked), {"us": pl.lit(value=True)})["us"]
        slow = slow.filter(pl.Series(inside) < 0.5 * slow.select(LENGTH_US.alias("us"))["us"])
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


def _by_position(timeline: Timeline, slow: pl.DataFrame) -> list[pl.DataFrame]:
    """The slow spans by where they stand among the steps."""
    computing = timeline.steps.filter(pl.col("total_requests") > 0)
    place = computing.select("step", place=pl.int_range(pl.len()).over("trial"))
    slow = (
        slow.sort("begin_us").join_asof(
            place.sort("step"), on="step", check_sortedness=False, strategy="nearest"
        )
        if slow.height
        else slow.with_columns(place=pl.lit(0))
    )
    found = []
    for _, of_trial in slow.group_by("trial", maintain_order=True):
        first = _first(of_trial)
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
