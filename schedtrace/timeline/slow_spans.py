"""Spans of time that are far too long for the work of their step, compared with steps of similar work."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import polars as pl

from schedtrace.timeline.engine_states import unstarved
from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.step_time import FEATURES, FEWEST_STEPS, fit_step_time, median, nearly_predicted

FAR = 2.0
"""Least factor by which a slow step exceeds steps with the same work; models of step times err by less."""
FAR_HOST = 5.0
"""The same factor for host times, which vary more; a slow one must also exceed a usual step."""
ABOUT = 0.8
"""Least share of a step's work that another step must have for their work to count as similar."""
FEWEST_LIKE = 3
"""Fewest steps with as much work, or as many requests, for which the median is the usual time."""
NEAR = 20_000
"""Number of neighbouring steps with which a slow step is compared; with a million, an analysis took
minutes.
"""
MOST_FRAC = 0.25
"""Share of slow steps above which they count as a property of the load, not as interruptions."""
SCHEMA = {
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "step": pl.Int64,
    "part": pl.String,
    "factor": pl.Float64,
}


def slow_spans(frames: EngineFrames, engine: pl.DataFrame, starving: pl.Series) -> pl.DataFrame:
    """Return the parts of single steps that are too long, in order of time; none if there are too few steps.

    Args:
        frames: Frames of one engine.
        engine: ``engine_states`` of the engine.
        starving: ``starved_steps``.
    """
    if frames.steps.height < FEWEST_STEPS:
        return _slow([])
    slow = [_slow_on_host(frames, engine), _slow_on_device(_timed_steps(frames, starving))]
    return pl.concat(slow).sort("begin_us")


def _usual_us(frames: EngineFrames) -> float:
    """Return the median step time, in microseconds."""
    return median(frames.steps.filter(pl.col("total_requests") > 0)["busy_us"])


def _slow_on_host(frames: EngineFrames, engine: pl.DataFrame) -> pl.DataFrame:
    """Return the times without device work that are far longer than usual times of their kind."""
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
    if long.is_empty():
        return _slow([])
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
        """Return the median time of the steps with at least this many requests; 0 if there are few."""
        first = by_crowd["there"].search_sorted(there)
        like = by_crowd[state][first:]
        return median(like) if like.len() > FEWEST_LIKE else 0.0

    rows = []
    above_usual = pl.col("us") >= FAR_HOST * pl.col("state").replace_strict(usual, return_dtype=pl.Float64)
    for span in spans.filter(above_usual).to_dicts():
        state = span["state"]
        expected = usual[state]
        if state != "host_gap":
            expected = max(expected, with_as_many(state, span["there"]))
        if span["us"] >= FAR_HOST * expected and span["us"] - expected >= least:
            begin = span["begin_us"] + int(expected)
            factor = span["us"] / max(expected, 1.0)
            rows.append(
                {
                    "trial": span["trial"],
                    "begin_us": begin,
                    "end_us": span["end_us"],
                    "step": span["step"],
                    "part": state,
                    "factor": factor,
                }
            )
    return _slow(rows)


def _timed_steps(frames: EngineFrames, starving: pl.Series) -> pl.DataFrame:
    """Return the steps whose ``device_us`` is known, with ``device_end_us``, the end of their device work."""
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


def _slow_on_device(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the parts of steps that took far longer on the device than steps with as much work or more."""
    modelled = _expected(steps)
    if modelled is None:
        return _slow([])
    import numpy as np  # noqa: PLC0415  # a filter for each slow step would take half a minute

    steps = modelled.with_row_index("place")
    far = steps.filter(pl.col("device_us") >= FAR * pl.col("expected_us"))
    if far.is_empty() or far.height > MOST_FRAC * steps.height:
        return _slow([])
    compared = ("step", "device_us", "expected_us", "used_tokens", *FEATURES)
    columns = {name: steps[name].to_numpy() for name in compared}
    rows = []
    for step in far.to_dicts():
        first = max(0, min(step["place"] - NEAR // 2, steps.height - NEAR))
        near = {name: values[first : first + NEAR] for name, values in columns.items()}
        device, is_other = near["device_us"], near["step"] != step["step"]
        costly = is_other & (near["expected_us"] >= ABOUT * step["expected_us"])
        larger = np.logical_and.reduce([is_other, *(near[name] >= ABOUT * step[name] for name in FEATURES)])
        like = max(
            float(np.median(device[alike])) if alike.sum() >= FEWEST_LIKE else 0.0
            for alike in (costly, larger)
        )
        if not like:  # a step takes no longer than smaller ones with its tokens together
            used = near["used_tokens"]
            smaller = is_other & (used >= 1) & (used <= step["used_tokens"])
            like = step["used_tokens"] * float((device[smaller] / used[smaller]).min(initial=np.inf))
            like = 0.0 if math.isinf(like) else like
        expected = max(step["expected_us"], like)
        if step["device_us"] >= FAR * expected:
            rows.append(
                {
                    "trial": step["trial"],
                    "begin_us": step["device_end_us"] - int(step["device_us"] - expected),
                    "end_us": step["device_end_us"],
                    "step": step["step"],
                    "part": "device",
                    "factor": step["device_us"] / expected,
                }
            )
    return _slow(rows)


def _expected(steps: pl.DataFrame) -> pl.DataFrame | None:
    """Add ``expected_us`` to the steps, from a model of steps that are not slow; None if these are too few.

    One slow step may determine the cost of a token if few other steps have as many tokens. So a model of
    relative errors, in which a slow step weighs little, first selects the steps to leave out.
    """
    timed = steps.with_columns(busy_us="device_us")
    rough = nearly_predicted(timed, timed)
    model = None if rough is None else fit_step_time(timed.filter(pl.col("device_us") < FAR * rough))
    return None if model is None else steps.with_columns(expected_us=model.predicted())


def _slow(rows: Sequence[dict[str, object]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA)
