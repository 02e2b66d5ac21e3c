"""States of an engine at every moment: its work, and when it was idle, starved, or far too slow.

With asynchronous scheduling, an engine does several things at a time. In that case the device takes
precedence, because host work that overlaps with device work costs nothing.

An engine is starved while the threads that make a step are ready to run but have no processor. Once a second,
a trace records how long each thread ran and how long it waited for a processor (``cpu`` lines). A wait alone
costs nothing: vLLM's engine and workers poll for each other's messages, so one of them polls while the other
works. The lost time is the time in which the thread whose turn it was did not run: the worker's thread while
the device executed a batch, the engine's between two batches. It never exceeds the time that the thread
waited.

A span of time is far too slow if steps with similar work took far less time (``slow_spans``).
"""

import math
from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

import polars as pl

from schedtrace.timeline.frames import NOT_RECORDED, EngineFrames
from schedtrace.timeline.spans import LENGTH_US, level, overlap_us, time_within
from schedtrace.timeline.step_time import FEATURES, FEWEST_STEPS, fit_step_time, median, nearly_predicted

DEVICE = "device"
"""State of the engine in which the worker's thread should run; in all other busy states, the engine's thread
should."""
BUSY = (DEVICE, "schedule", "update", "dummy", "host_gap")
STATES = (NOT_RECORDED, *BUSY, "idle")
"""States of the engine, in order of precedence."""
LEAST_FRAC = 0.2
"""Minimum lost share of the busy time for a period to be starved: the work then takes a quarter longer."""
MOST_OF_IT = 0.5
"""Minimum share of a step that must lie in starved periods for the step to count as starved."""
FEWEST = 30
"""Minimum number of unstarved steps for a model of step times to leave out the starved ones; at least half of
all steps must also be unstarved."""


SCHEMA = {
    "engine_rank": pl.Int64,
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "state": pl.String,
}

THREADS = {
    "role": pl.String,
    "pid": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "ran_us": pl.Int64,
    "waited_us": pl.Int64,
    "lost_us": pl.Int64,
}
STARVED = {"begin_us": pl.Int64, "end_us": pl.Int64, "device_frac": pl.Float64, "host_frac": pl.Float64}


def make_engine_states(frames: EngineFrames, requests: pl.DataFrame) -> pl.DataFrame:
    """Return one row per period in which the engine was in one state, from the first step to the trace's end.

    Columns, in order of time: ``engine_rank``, ``trial`` (of the step before), ``begin_us``, ``end_us``,
    ``state``:

    * ``device``: a worker executed a batch. If the trace lacks the worker's clock, this is the time from the
      moment at which the batch could begin (``schedule()`` had returned, the previous output was back) to its
      output,
    * ``schedule`` and ``update``: vLLM's ``schedule()`` and ``update_from_output()`` ran,
    * ``dummy``: a dummy batch ran, only because other data-parallel ranks have work. A trace records how long
      dummy batches took but not when, so they are placed right before the step that reports them,
    * ``host_gap``: requests were in the scheduler, and none of the above ran,
    * ``idle``: no request was in the scheduler,
    * ``not_recorded``: steps or parts of the trace are missing.
    """
    began = frames.steps.select(pl.col("start_us").min()).item()
    if began is None:
        return pl.DataFrame(schema=SCHEMA)
    unknown = _spans(frames.gaps, NOT_RECORDED, pl.col("from_us"), pl.col("to_us"))
    in_scheduler = requests.filter(pl.col("state") != "front_end").group_by("request_id")
    lives = in_scheduler.agg(pl.col("begin_us").min(), pl.col("end_us").max())
    present = _spans(lives, "host_gap", pl.col("begin_us"), pl.col("end_us"))  # where no work covers it
    doing = (
        pl.concat([unknown, *_work(frames), present])
        .filter(LENGTH_US > 0)
        .with_columns(pl.col("begin_us", "end_us").clip(began, frames.end_us))
    )
    counts = level(doing, **{kind: (pl.col("kind") == kind).cast(pl.Int64) for kind in STATES[:-1]})
    state = pl.lit("idle")
    for kind in reversed(STATES[:-1]):
        state = pl.when(pl.col(kind) > 0).then(pl.lit(kind)).otherwise(state)
    spans = (
        counts.select(begin_us="at", end_us=pl.col("until").fill_null(frames.end_us), state=state)
        .filter(LENGTH_US > 0)
        .group_by(pl.col("state").rle_id().alias("run"), maintain_order=True)
        .agg(pl.col("begin_us", "state").first(), pl.col("end_us").last())
    )
    trials = frames.steps[["start_us", "trial"]].sort("start_us")
    return (
        spans.sort("begin_us")
        .join_asof(trials, left_on="begin_us", right_on="start_us")
        .select(pl.lit(frames.rank, pl.Int64).alias("engine_rank"), "trial", "begin_us", "end_us", "state")
    )


def _work(frames: EngineFrames) -> list[pl.DataFrame]:
    """Return the periods of each ``kind`` of the engine's work: ``begin_us`` and ``end_us``."""
    steps, done = frames.steps, pl.col("start_us") + pl.col("schedule_us")
    return [
        device_spans(steps).select("begin_us", "end_us", kind=pl.lit(DEVICE)),
        _spans(steps, "schedule", pl.col("start_us"), done),
        _spans(steps, "update", pl.col("output_us"), pl.col("output_us") + pl.col("update_us")),
        _spans(steps, "dummy", pl.col("start_us") - pl.col("dummy_us"), pl.col("start_us")),
    ]


def device_spans(steps: pl.DataFrame) -> pl.DataFrame:
    """Return ``step``, ``begin_us`` and ``end_us`` of each batch on the device; batches may overlap."""
    done = pl.col("start_us") + pl.col("schedule_us")
    before = pl.col("output_us").cum_max().shift(1).fill_null(0)
    executed = pl.col("start_us") + pl.col("execute_after_us")
    begin = pl.coalesce(executed, pl.max_horizontal(done, before))
    end = pl.coalesce(executed + pl.col("execute_us"), "output_us")
    spans = steps.with_columns(begin_us=begin.cast(pl.Int64), end_us=end.cast(pl.Int64))
    return spans.filter((pl.col("total_requests") > 0) & (LENGTH_US > 0))[["step", "begin_us", "end_us"]]


def _spans(frame: pl.DataFrame, kind: str, begin: pl.Expr, end: pl.Expr) -> pl.DataFrame:
    """Return ``begin_us``, ``end_us`` and this ``kind`` for each row; an unknown end is null."""
    return frame.select(begin_us=begin.cast(pl.Int64), end_us=end.cast(pl.Int64), kind=pl.lit(kind))


def with_engine_time(states: pl.DataFrame, engine: pl.DataFrame) -> pl.DataFrame:
    """Add the engine's time in each row of ``request_states``: ``device_us``, ``host_us`` and ``idle_us``.

    ``host_us`` is the time of the busy states other than ``device``. None of the three columns contains time
    before the first step or time that is ``not_recorded``.
    """
    kinds = {"device_us": ["device"], "idle_us": ["idle"], "host_us": [*set(BUSY) - {"device"}]}
    spent = time_within(states, engine, {name: pl.col("state").is_in(of) for name, of in kinds.items()})
    return states.with_columns(spent)


class _Turn(NamedTuple):
    """Times of a thread between two ``cpu`` lines."""

    begin_us: int
    end_us: int
    ran_us: int
    waited_us: int


def thread_times(frames: EngineFrames, engine: pl.DataFrame) -> pl.DataFrame:
    """Return one row per thread and interval between two ``cpu`` lines, with the columns ``THREADS``.

    Threads are those of the engine and its workers. ``lost_us`` is a lower bound on the time for which the
    thread waited for a processor while it had work to do.
    """
    cpu = frames.cpu
    if not cpu.is_empty():
        cpu = cpu.filter(pl.col("role") != "front_end").sort("at_us")
    if cpu.is_empty():
        return pl.DataFrame(schema=THREADS)
    turns = [
        (rows["role"][0], rows["pid"][0], turn)
        for rows in cpu.partition_by("role", "pid", "tid", maintain_order=True)
        for turn in _turns(rows[["at_us", "ran_us", "waited_us"]].rows())
    ]
    rows = pl.DataFrame(
        [(role, pid, *turn) for role, pid, turn in turns], schema=list(THREADS.items())[:-1], orient="row"
    )
    busy = engine.filter(pl.col("state").is_in(BUSY))
    worked = rows.filter((pl.col("role") == "worker") & (pl.col("ran_us") > 0)).height > 0
    own = pl.when(pl.col("role") == "worker").then("device").otherwise("host" if worked else "all")
    device = pl.col("state") == DEVICE
    mine = time_within(rows, busy, {"device": device, "host": ~device, "all": pl.lit(value=True)})
    missed = rows.hstack(mine).select((own - pl.col("ran_us")).clip(0).alias("us"))["us"]
    return rows.with_columns(lost_us=pl.min_horizontal("waited_us", missed))


def _turns(seen: list[tuple[int, int, int]]) -> Iterable[_Turn]:
    """Return the periods of a thread between two ``cpu`` lines, in order.

    Linux counts a wait only when it is over, so waiting time that does not fit into a period belongs to
    earlier periods.
    """
    later, turns = 0, []
    for (begin, ran, waited), (end, ran_then, waited_then) in zip(seen[-2::-1], seen[:0:-1], strict=True):
        ran_us = min(ran_then - ran, end - begin)
        wait = waited_then - waited + later
        waited_us = min(wait, end - begin - ran_us)
        later = wait - waited_us
        turns.append(_Turn(begin, end, ran_us, waited_us))
    return reversed(turns)


def make_starved(threads: pl.DataFrame, engine: pl.DataFrame) -> pl.DataFrame:
    """Return the periods in which the engine lost much of its busy time, with the columns ``STARVED``.

    ``device_frac`` and ``host_frac``: the lost shares of the device's time and of the host's time.
    """
    if threads.is_empty():
        return pl.DataFrame(schema=STARVED)
    lost = threads.group_by("begin_us", "end_us", maintain_order=True).agg(
        worker=pl.col("lost_us").filter(pl.col("role") == "worker").max().fill_null(0),
        engine=pl.col("lost_us").filter(pl.col("role") == "engine").max().fill_null(0),
    )
    worked = threads.filter((pl.col("role") == "worker") & (pl.col("ran_us") > 0)).height > 0
    busy = engine.filter(pl.col("state").is_in(BUSY))
    device = pl.col("state") == DEVICE
    lost = lost.hstack(time_within(lost, busy, {"device": device, "host": ~device}))
    whole = pl.col("device") + pl.col("host")
    by_engine = pl.col("engine") / ("host" if worked else whole)
    return (
        lost.filter((whole > 0) & (pl.col("worker") + pl.col("engine") >= LEAST_FRAC * whole))
        .select(
            "begin_us",
            "end_us",
            device_frac=pl.col("worker") / pl.col("device") if worked else by_engine,
            host_frac=by_engine,
        )
        .with_columns(pl.col("device_frac", "host_frac").fill_nan(0.0).clip(0.0, 1.0))
        .sort("begin_us")
    )


def find_starved_steps(steps: pl.DataFrame, spans: pl.DataFrame) -> pl.Series:
    """Return the steps that lie mostly in starved periods, and whose times are therefore not typical.

    Args:
        steps: Steps of one engine.
        spans: ``starved``.
    """
    if spans.is_empty():
        return pl.Series("step", [], pl.Int64)
    steps = steps.select("step", begin_us="start_us", end_us="output_us").drop_nulls()
    return steps.filter(overlap_us(steps, spans) > MOST_OF_IT * LENGTH_US)["step"]


def unstarved(frames: EngineFrames, starving: pl.Series, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of steps that were not starved, or all rows if too few would be left.

    Args:
        frames: The engine's trace.
        starving: ``starved_steps``.
        steps: Any rows with a column ``step``.
    """
    if starving.is_empty() or frames.steps.height - starving.len() < max(FEWEST, starving.len()):
        return steps
    return steps.filter(~pl.col("step").is_in(pl.lit(starving).implode()))


def lost_spans(frames: EngineFrames, engine: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the lost part of each row of ``engine_states``, with the columns of ``SLOW_SCHEMA``.

    The trace records only how long a thread waited in each second, not when. Every row in that second
    therefore loses the same share (one for the device, one for the host), placed at its end. In a window,
    ``step`` is null if the step began before the window.

    Args:
        frames: Frames of one engine.
        engine: ``engine_states`` of the engine.
        spans: ``starved``.
    """
    states = engine.filter(pl.col("state").is_in([*BUSY]))
    shares = time_within(states, spans, {"of_device": pl.col("device_frac"), "of_host": pl.col("host_frac")})
    lost = pl.when(pl.col("state") == DEVICE).then("of_device").otherwise("of_host")
    losses = states.hstack(shares).with_columns(lost_us=lost).filter(pl.col("lost_us") > 0)
    starts = frames.steps[["step", "start_us"]].sort("start_us")
    return (
        losses.sort("begin_us")
        .join_asof(starts, left_on="begin_us", right_on="start_us")
        .select(
            "trial",
            begin_us=pl.col("end_us") - pl.col("lost_us"),
            end_us="end_us",
            step="step",
            part=pl.col("state").replace("dummy", "host_gap"),
            factor=LENGTH_US / (LENGTH_US - pl.col("lost_us")).clip(1),
        )
    )


def starved_threads(threads: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Return the threads that lost time in starved periods, in descending order of lost time.

    Columns: ``role``, ``pid``, ``us`` (length of these periods), ``ran_us``, ``waited_us``, ``lost_us``.

    Args:
        threads: ``thread_times``.
        spans: ``starved``.
    """
    return (
        threads.join(spans, on=["begin_us", "end_us"], how="semi")
        .with_columns(us=LENGTH_US)
        .group_by("role", "pid", maintain_order=True)
        .agg(pl.col("us", "ran_us", "waited_us", "lost_us").sum())
        .filter(pl.col("lost_us") > 0)
        .sort("lost_us", descending=True, maintain_order=True)
    )


FAR = 2.0
"""Minimum factor by which a slow step exceeds steps with the same work; models of step times have smaller
errors."""
FAR_HOST = 5.0
"""Minimum factor for host times, which vary more; the excess must also be as long as a usual step."""
ABOUT = 0.8
"""Minimum share of a step's work that another step must have for their work to count as similar."""
FEWEST_AGREEING = 2
"""Minimum number of seemingly slow steps that a model of all steps must explain for them not to be slow."""
FEWEST_LIKE = 3
"""Minimum number of steps with as much work, or as many requests, for their median to be the usual time."""
NEAR = 20_000
"""Number of neighbouring steps with which a slow step is compared; a comparison with a million steps took
minutes."""
MOST_FRAC = 0.25
"""Share of slow steps above which slowness counts as a property of the load, not as interruptions."""
SLOW_SCHEMA = {
    "trial": pl.Int64,
    "begin_us": pl.Int64,
    "end_us": pl.Int64,
    "step": pl.Int64,
    "part": pl.String,
    "factor": pl.Float64,
}


def slow_spans(frames: EngineFrames, engine: pl.DataFrame, starving: pl.Series) -> pl.DataFrame:
    """Return the parts of individual steps that are too long, in order of time; empty for few steps."""
    if frames.steps.height < FEWEST_STEPS:
        return pl.DataFrame(schema=SLOW_SCHEMA)
    slow = [_slow_on_host(frames, engine), slow_on_device(_timed_steps(frames, starving))]
    return pl.concat(slow).sort("begin_us")


def _slow_on_host(frames: EngineFrames, engine: pl.DataFrame) -> pl.DataFrame:
    """Return the periods without device work that are far longer than usual periods of their kind."""
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
    least = median(frames.steps.filter(pl.col("total_requests") > 0)["busy_us"])  # a usual step
    long = engine.with_columns(us=LENGTH_US).filter(pl.col("us") >= least).sort("end_us")
    if long.is_empty():
        return pl.DataFrame(schema=SLOW_SCHEMA)
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
        """Return the median time of the steps with at least this many requests; 0 for few such steps."""
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
    return pl.DataFrame(rows, schema=SLOW_SCHEMA)


def _timed_steps(frames: EngineFrames, starving: pl.Series) -> pl.DataFrame:
    """Return the steps whose ``device_us`` is known.

    ``device_end_us`` is the end of their device work, and ``overlap_us`` the part of it in which the worker
    already had the next step's batch.
    """
    steps = unstarved(frames, starving, frames.steps)
    in_lockstep = "wave" in steps.columns and steps["wave"].count() > 0
    if in_lockstep or (frames.header.pipeline_parallel_size or 1) > 1:
        steps = steps.clear()
    began = pl.col("start_us") + pl.coalesce("execute_after_us", "schedule_us")
    end = pl.min_horizontal("output_us", began + pl.col("execute_us"))
    next_began = pl.when(pl.col("step").shift(-1) == pl.col("step") + 1).then(began.shift(-1))
    return (
        steps.with_columns(
            device_us=pl.col("execution_us"),
            device_end_us=end,
            overlap_us=(end - next_began).fill_null(0).clip(0),
        )
        .filter(
            (pl.col("device_us") > 0)
            & (pl.col("total_requests") > 0)
            & (pl.col("recomputed_tokens").fill_null(0) == 0)
        )
        .drop_nulls(["output_us", *FEATURES])
    )


def slow_on_device(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the excess time of steps that took far longer on the device than steps with similar work.

    Args:
        steps: Steps, or passes of all ranks, with ``trial``, ``step``, ``device_us``, ``device_end_us``,
            ``overlap_us``, ``used_tokens`` and ``FEATURES``.
    """
    modelled = _expected(steps)
    if modelled is None:
        return pl.DataFrame(schema=SLOW_SCHEMA)
    import numpy as np  # noqa: PLC0415  # a filter for each slow step would take half a minute

    steps = _without_late_ends(modelled).with_row_index("place")
    far = steps.filter(pl.col("device_us") >= FAR * pl.col("expected_us"))
    if far.is_empty() or far.height > MOST_FRAC * steps.height:
        return pl.DataFrame(schema=SLOW_SCHEMA)
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
    return pl.DataFrame(rows, schema=SLOW_SCHEMA)


def _expected(steps: pl.DataFrame) -> pl.DataFrame | None:
    """Add ``expected_us``, from a model of the steps that are not slow; return None if these are too few.

    One slow step may determine the cost of a token if few other steps have as many tokens. Therefore, a model
    of relative errors, in which a slow step weighs little, first selects the steps to leave out.
    """
    timed = steps.with_columns(busy_us="device_us")
    rough = nearly_predicted(timed, timed)
    if rough is None:
        return None
    far = timed["device_us"] >= FAR * rough
    if far.sum() >= FEWEST_AGREEING and (of_all := fit_step_time(timed)) is not None:
        # A step that ended too early makes its tokens free in the first model: all with as many look slow.
        both = timed.select("device_us", far=far, rough=rough, of_all=of_all.predicted())
        off = {name: (both["device_us"] / both[name]).log().abs() for name in ("rough", "of_all")}
        agree = (off["of_all"].filter(far) < math.log(FAR)).sum()
        if agree >= FEWEST_AGREEING and off["of_all"].sum() < off["rough"].sum():
            rough = both["of_all"]
    model = fit_step_time(timed.filter(timed["device_us"] < FAR * rough))
    return None if model is None else steps.with_columns(expected_us=model.predicted())


def _without_late_ends(steps: pl.DataFrame) -> pl.DataFrame:
    """Move the time by which a step's end was noticed late from that step to the next step.

    A worker that is preparing the next batch may notice the end of a step late. The step then seems too long,
    and the next step too short by the same time. ``timeline.with_execution_us`` has no model of step times
    and corrects only a part of this.
    """
    follows = pl.col("step").shift(-1) == pl.col("step") + 1  # steps of unknown time are not here
    short_us = (pl.col("expected_us") - pl.col("device_us")).clip(0).shift(-1)
    short_us = pl.when(follows).then(short_us).fill_null(0)
    long_us = (pl.col("device_us") - pl.col("expected_us")).clip(0)
    late_us = pl.min_horizontal(short_us, long_us, "overlap_us").cast(pl.Int64)
    return steps.with_columns(
        pl.col("device_us") - late_us + late_us.shift(1).fill_null(0), pl.col("device_end_us") - late_us
    )
