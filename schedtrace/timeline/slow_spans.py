"""Spans of time that are far too long for the work of their step, and times of a slower device.

What of a step is too long is told from other steps with about as much work; for a slowdown, in which all
steps are longer by one factor, from the steps outside of it.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import polars as pl

from schedtrace.timeline.frames import Frames
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.starvation import unstarved
from schedtrace.timeline.step_time import FEATURES, FEWEST_STEPS, fit_step_time, median, nearly_predicted

FAR = 2.0
"""Twice as long as the same work takes elsewhere: models of step times are off by less."""
FAR_HOST = 5.0
"""Host times vary more, and most are short: such a one is also longer than a usual step."""
ABOUT = 0.8
"""A step with four fifths of another one's work has about as much."""
FEWEST_LIKE = 3
"""Steps with at least as much work, or with as many requests, of which the median is the usual time."""
NEAR = 20_000
"""A slow step is compared with so many steps around it: with all of a million, an analysis took minutes."""
MOST_FRAC = 0.25
"""What more than a quarter of the steps show is no interruption but how the load is."""
SLOWER = 1.25
"""A quarter longer: less comes and goes on a device that others use, too."""
ERRORS = 3.0
"""And by three times what the model leaves unexplained in nine of ten steps outside."""
TYPICAL = 0.9
FEWEST_INSIDE = 20
"""Steps with no more work of any kind than some step outside: beyond, no model was seen to hold."""
CLEARLY = 0.8
"""So many of them took longer than nine of ten outside, for what the model expects."""
ROUNDS = 3
"""The rates outside are known once it is known what is inside, and the other way round."""

SCHEMA = {
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "step": pl.Int64,
    "part": pl.String,
    "factor": pl.Float64,
}


def slow_spans(
    frames: Frames, engine: pl.DataFrame, starving: pl.Series
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the parts of time that are too long: of single steps, and of the steps of a slowdown.

    Columns of both, as in ``events.events``: those of ``SCHEMA``, in order of time. None of too few steps.

    Args:
        frames: One engine's.
        engine: Its ``engine_states``.
        starving: ``starved_steps``.
    """
    if frames.steps.height < FEWEST_STEPS:
        return _slow([]), _slow([])
    known = _known(frames, starving)
    slower = _in_slowdown(known)
    rest = known.filter(~pl.col("step").is_in(slower["step"].implode()))
    return pl.concat([_of_host(frames, engine), _of_device(rest)]).sort("begin_us"), slower


def _usual_us(frames: Frames) -> float:
    """How long a usual step takes."""
    return median(frames.steps.filter(pl.col("total_requests") > 0)["busy_us"])


def _of_host(frames: Frames, engine: pl.DataFrame) -> pl.DataFrame:
    """Times in which the device had nothing to do and which are far longer than usual ones of their kind."""
    steps = (
        frames.steps.sort("start_us")
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
    least = _usual_us(frames)
    long = engine.with_columns(us=LENGTH_US).filter(pl.col("us") >= least).sort("end_us")
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
    gaps = engine.filter(pl.col("state") == "host_gap").select(LENGTH_US.alias("us"))["us"]
    usual = {"host_gap": median(gaps), **{state: median(steps[state]) for state in ("schedule", "update")}}
    by_crowd = steps.drop_nulls("there").sort("there")

    @cache
    def with_as_many(state: str, there: int) -> float:
        """The median of the steps with at least so many requests; 0 if there are few."""
        first = by_crowd["there"].search_sorted(there)
        like = by_crowd[state][first:]
        return median(like) if like.len() > FEWEST_LIKE else 0.0

    rows = []
    above_usual = pl.col("us") >= FAR_HOST * pl.col("state").replace_strict(usual, return_dtype=pl.Float64)
    for one in spans.filter(above_usual).to_dicts():
        state = one["state"]
        expected = usual[state]
        if state != "host_gap":
            expected = max(expected, with_as_many(state, one["there"]))
        if one["us"] >= FAR_HOST * expected and one["us"] - expected >= least:
            begin = one["begin_us"] + int(expected)
            factor = one["us"] / max(expected, 1.0)
            rows.append((one["trial"], begin, one["end_us"], one["step"], state, factor))
    return _slow(rows)


def _known(frames: Frames, starving: pl.Series) -> pl.DataFrame:
    """The steps of which ``device_us`` can be told, and ``device_end_us``, when the device was done."""
    steps = unstarved(frames, starving, frames.steps)
    in_lockstep = "wave" in steps.columns and steps["wave"].count() > 0
    if in_lockstep or (frames.header.pipeline_parallel_size or 1) > 1:
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

    known = modelled.with_row_index("place")
    far = known.filter(pl.col("device_us") >= FAR * pl.col("expected_us"))
    if far.is_empty() or far.height > MOST_FRAC * known.height:
        return _slow([])
    compared = ("step", "device_us", "expected_us", "used_tokens", *FEATURES)
    columns = {name: known[name].to_numpy() for name in compared}
    rows = []
    for one in far.to_dicts():
        first = max(0, min(one["place"] - NEAR // 2, known.height - NEAR))
        near = {name: values[first : first + NEAR] for name, values in columns.items()}
        device, others = near["device_us"], near["step"] != one["step"]
        costly = others & (near["expected_us"] >= ABOUT * one["expected_us"])
        larger = np.logical_and.reduce([others, *(near[name] >= ABOUT * one[name] for name in FEATURES)])
        like = max(
            float(np.median(device[alike])) if alike.sum() >= FEWEST_LIKE else 0.0
            for alike in (costly, larger)
        )
        if not like:  # a step takes no longer than smaller ones with its tokens together
            used = near["used_tokens"]
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


def _slow(rows: Sequence[tuple[object, ...]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def slowdown(steps: pl.DataFrame) -> tuple[pl.DataFrame, float] | None:
    """The steps of the longest such time and how many times as long they took; None: there is none.

    Where it begins and ends is found in the running sum of the errors of a model of all steps, as a change of
    a mean is; that it is one, and the factor, by a model of the steps outside.

    Args:
        steps: In order, with ``device_us`` > 0 and the columns ``FEATURES``.
    """
    inside = pl.Series([False] * steps.height, dtype=pl.Boolean)
    timed = steps.with_columns(busy_us="device_us")
    for _ in range(ROUNDS):
        expected = nearly_predicted(timed.filter(~inside), timed)
        if expected is None:
            return None
        before, inside = inside, _longer_than(timed["busy_us"], expected)
        if (before == inside).all():
            break
    factor = _factor(timed.with_columns(ratio=pl.col("device_us") / expected, inside=inside))
    return None if factor is None else (steps.filter(inside), factor)


def _longer_than(measured: pl.Series, expected: pl.Series) -> pl.Series:
    """Which of the steps stand between the lowest and the highest point of the errors' running sum.

    Above the mean is what the sum rises by (E. S. Page, Continuous Inspection Schemes, Biometrika 1954).
    """
    import numpy as np  # noqa: PLC0415  # most runs need no model

    error = np.log(measured.to_numpy() / expected.to_numpy())
    low, high = np.quantile(error, (0.05, 0.95))
    error = error.clip(low, high)
    total = np.concatenate([[0.0], np.cumsum(error - error.mean())])
    first, last = int(total.argmin()), int(total.argmax())
    place = np.arange(len(error))
    if first > last:  # slow at the beginning or at the end, whichever is more
        first, last = (0, last) if last > len(error) - first else (first, len(error))
    return pl.Series((place >= first) & (place < last))


def _factor(steps: pl.DataFrame) -> float | None:
    """How many times as long the steps inside took as the model of those outside expects; None: as long."""
    outside = steps.filter(~pl.col("inside"))
    most = outside.select(pl.col(FEATURES).max()).row(0)
    known = steps.filter("inside", *(pl.col(name) <= top for name, top in zip(FEATURES, most, strict=True)))
    if known.height < FEWEST_INSIDE:
        return None
    error, high = outside.select(
        (pl.col("ratio") - 1).abs().quantile(TYPICAL).alias("error"),
        pl.col("ratio").quantile(TYPICAL).alias("high"),
    ).row(0)
    factor = float(known["ratio"].median())  # type: ignore[arg-type]  # of numbers
    clearly = (known["ratio"] > high).mean() >= CLEARLY
    return factor if clearly and factor >= max(SLOWER, 1 + ERRORS * error) else None
