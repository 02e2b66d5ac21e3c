"""Times of each part of the steps, and the model of the time that their work takes.

The search for what slow steps have in common (``diagnose/excess.py``) examines the time beyond this
model. The model is fitted by least absolute deviations: such a fit does not mistake a jump for work, even if
most steps lie beyond it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from schedtrace.timeline.events import ASLEEP, CALLED, HUNG, PAUSED, STALLED
from schedtrace.timeline.spans import merged, overlap_us, time_within
from schedtrace.timeline.timeline import Timeline

Array = Any
"""NumPy array with a number or a flag for each step."""

EXECUTION, SCHEDULE, UPDATE, BETWEEN = "execution", "schedule", "update", "between"
"""Parts of a step: execution on the device, ``schedule()``, ``update_from_output()``, and the time before
the step.
"""
MOST_ROWS = 5_000
"""Maximum number of steps that a search examines; it samples evenly spaced blocks of a longer trace."""
FEWEST_ROWS = 60
"""Minimum number of steps that a search examines."""
MOST_BENDS, STEPS_OF_BEND = 10, 12
"""Maximum number of bends in the cost of prefill tokens, and minimum number of steps per bend."""
CONVERGED = 1e-6
"""Maximum relative change of the sum of errors at which a fit ends."""
LEAST_FRAC = 0.01
"""Minimum share of the busy time that a part of the host's work must take, or an explanation must cost."""
BLOCK = 25
"""Number of steps in a block, fewer in a short trace; a model fitted to half of the blocks predicts the other
half."""
FEWEST_BLOCKS = 24
"""Minimum number of blocks into which a search divides its steps."""
LEAST_ERROR = 0.002
"""Minimum typical error, because smaller relative errors are below what a model of the work can resolve."""
BOUND = 3.0
"""Maximum error, as a multiple of the typical error; larger errors are clipped to it."""
SLOW_ERRORS = 4.0
"""Number of typical model errors beyond which a step is slow."""


def judged_steps(timeline: Timeline) -> pl.DataFrame:
    """Return the steps to examine, in order of time, without starved and interrupted steps.

    Starved processors, pauses, sleep, calls to the workers, stalls and hangs have causes of their own. The
    columns ``gap_us`` and ``idle_us`` contain the host's time between steps, and the idle time, since the
    start of the previous step.
    """
    steps = timeline.steps.filter(~pl.col("step").is_in(timeline.starved_steps.implode())).sort("start_us")
    events = timeline.events.filter(pl.col("kind").is_in([PAUSED, ASLEEP, CALLED, HUNG, STALLED]))
    spans = steps.select(
        begin_us=pl.coalesce(pl.col("start_us").shift(1), "start_us"),
        end_us=pl.max_horizontal("start_us", pl.coalesce("output_us", "end_us")),
    )
    follows = (pl.col("step").diff() == 1) & pl.col("trial").eq_missing(pl.col("trial").shift(1))
    before = spans.with_columns(end_us=steps["start_us"])
    states = {"gap_us": pl.col("state") == "host_gap", "idle_us": pl.col("state") == "idle"}
    between = time_within(before, timeline.engine_states, states)
    steps = steps.with_columns(between[*states], follows=follows.fill_null(value=False))
    return steps.filter(overlap_us(spans, merged(events)) == 0)


def numbers(column: pl.Series) -> Array:
    """Return a column's numbers or flags; 0 where it is null."""
    return np.nan_to_num(column.cast(pl.Float64).to_numpy())


def sampled_rows(rows: int) -> Array:
    """Return the places of the rows to examine: all rows, or evenly spaced blocks."""
    if rows <= MOST_ROWS:
        return np.arange(rows)
    blocks = rows // BLOCK
    chosen = np.unique(np.linspace(0, blocks - 1, MOST_ROWS // BLOCK).astype(int))
    return (chosen[:, None] * BLOCK + np.arange(BLOCK)).ravel()


def exposed_us(timeline: Timeline, steps: pl.DataFrame, part: str, times: Array) -> Array:
    """Return the part of each time that the engine loses, in microseconds.

    Host work costs nothing while the device is busy.
    """
    if part in (EXECUTION, BETWEEN):
        return times
    begin, length = ("start_us", "schedule_us") if part == SCHEDULE else ("output_us", "update_us")
    spans = steps.select(begin_us=pl.col(begin).fill_null(0)).with_columns(
        end_us=pl.col("begin_us") + steps[length].fill_null(0)
    )
    hidden = time_within(spans, timeline.engine_states, {"us": pl.col("state") == "device"})["us"]
    return np.clip(times - hidden.to_numpy(), 0, None)


def work_columns(part: str, steps: pl.DataFrame) -> Array:
    """Return the columns of a model of a part's work: constant, linear, and bends in the cost of a token."""

    def column(name: str) -> Array:
        return numbers(steps[name]) if name in steps.columns else none

    none = np.zeros(steps.height)
    columns = [np.ones(steps.height)]
    if part == EXECUTION:
        prefill, decode, context = (column(f"{kind}_tokens") for kind in ("prefill", "decode", "context"))
        columns += [prefill, decode, context, prefill > 0, column("recomputed_tokens")]
        fills = prefill > 0
        columns += [*_bends(decode, 3), *_bends(context, 2)]
        columns += [*_bends_among(prefill, fills), *_bends_among(prefill + decode, fills)]
        columns += [prefill * context]
    else:
        columns += [column("total_requests"), column("num_new")]
        if part == BETWEEN:  # the wait for the next step is shorter after a longer step
            columns.append(np.concatenate([[0.0], (column("output_us") - column("start_us"))[:-1]]))
    matrix = np.column_stack(columns).astype(float)
    matrix /= np.maximum(np.abs(matrix).max(axis=0, initial=0.0), 1e-9)
    return independent(matrix)


def independent(matrix: Array) -> Array:
    """Return the columns that are linearly independent of the earlier ones."""
    places: list[int] = []
    basis = np.empty((len(matrix), 0))
    for at in range(matrix.shape[1]):
        rest = matrix[:, at] - basis @ (basis.T @ matrix[:, at])
        rest = rest - basis @ (basis.T @ rest)
        norm = float(np.linalg.norm(rest))
        if norm > 1e-3 * float(np.linalg.norm(matrix[:, at])) and norm > 0:
            places.append(at)
            basis = np.column_stack([basis, rest / norm])
    return matrix[:, places]


def _bends(values: Array, pieces: int) -> list[Array]:
    """Return columns that let a line bend at equally spaced values."""
    most = float(values.max(initial=0.0))
    return [np.clip(values - most * at / pieces, 0, None) for at in range(1, pieces)]


def _bends_among(values: Array, among: Array) -> list[Array]:
    """Return columns that let a line bend at values that divide the selected steps into groups of equal size.

    The columns are 0 in the remaining steps.
    """
    if not among.any():
        return []
    count = int(min(MOST_BENDS, among.sum() // STEPS_OF_BEND))
    knots = np.unique(np.quantile(values[among], (np.arange(count) + 0.5) / max(count, 1)))
    return [np.where(among, np.clip(values - knot, 0, None), 0.0) for knot in knots]


@dataclass(frozen=True, eq=False)
class WorkFit:
    """Model of the work on the steps of a search, relative to their usual times."""

    times_us: Array
    """Time of the part of each step, in step order, in microseconds and above 0."""
    columns: Array
    """Columns of the part's work (``work_columns``)."""
    times: Array
    """``times_us`` relative to ``usual``."""
    work: Array
    """Columns of the work relative to ``usual``, scaled to at most 1."""
    usual: Array
    """Time in microseconds that a first fit predicts for each step's work."""
    basis: Array
    """Orthonormal columns that span the work."""
    relative_excess: Array
    """Excess over the work, relative to ``usual``."""
    errors: Array
    """``relative_excess`` in units of the typical error, clipped to ``BOUND``, with the work projected out.
    """
    blocks: Array
    """Number of each step's block."""


def fit_lad(matrix: Array, target: Array, rounds: int = 12) -> Array:
    """Fit by least absolute deviations, with iteratively reweighted least squares.

    The fit ends after ``rounds``, or as soon as a round changes the sum of errors by at most ``CONVERGED``.
    """
    weight = np.ones(len(target))
    costs = np.zeros(matrix.shape[1])
    total = math.inf
    for _ in range(rounds):
        weighted = matrix * weight[:, None]
        square = weighted.T @ matrix
        square += np.diag(1e-9 * np.diag(square) + 1e-300)
        costs = np.linalg.solve(square, weighted.T @ target)
        error = np.abs(target - matrix @ costs)
        before, total = total, float(error.sum())
        if abs(before - total) <= CONVERGED * total:
            break
        weight = 1 / np.maximum(error, 0.05 * float(np.median(error)) + 1e-6)
        weight /= weight.mean()
    return costs


def typical_error(errors: Array) -> float:
    """Return the typical size of relative errors: the standard deviation estimated from their median."""
    return max(1.4826 * float(np.median(np.abs(errors))), LEAST_ERROR)


def fit_work(times_us: Array, work: Array) -> WorkFit:
    """Fit the model of the work.

    Args:
        times_us: Time of one part of each step, in step order, in microseconds and above 0.
        work: Columns of the part's work (``work_columns``).
    """
    size = float(np.median(times_us))
    usual = np.maximum(work @ fit_lad(work, times_us / size) * size, 0.1 * size)
    relative, columns = times_us / usual, work / usual[:, None]
    columns = columns / np.maximum(np.abs(columns).max(axis=0), 1e-12)
    errors = relative - columns @ fit_lad(columns, relative)
    basis, _ = np.linalg.qr(columns)
    bounded = np.clip(errors / typical_error(errors), -BOUND, BOUND)
    bounded = bounded - basis @ (basis.T @ bounded)
    block = min(BLOCK, max(2, len(times_us) // FEWEST_BLOCKS))
    blocks = np.arange(len(times_us)) // block
    return WorkFit(times_us, work, relative, columns, usual, basis, errors, bounded, blocks)


@dataclass(frozen=True, eq=False)
class ExaminedPart:
    """Examined steps with one of their parts: its times, and the model of its work."""

    name: str
    """``execution``, ``schedule``, ``update`` or ``between``."""
    steps: pl.DataFrame
    """Steps that are examined, one row each."""
    times_us: Array
    """Time of the part of each step."""
    exposed_us: Array
    """Part of each time that the engine loses."""
    all_steps: int
    """Number of steps that have this part."""
    scale: float
    """Number of steps that each examined step represents."""
    fit: WorkFit
    """Model of the part's work."""


def examined_part(
    name: str, steps: pl.DataFrame, times: Array, exposed: Array, all_steps: int
) -> ExaminedPart:
    """Return a part of these steps with the model of its work."""
    fit = fit_work(times, work_columns(name, steps))
    return ExaminedPart(name, steps, times, exposed, all_steps, all_steps / len(times), fit)


def examined_parts(timeline: Timeline) -> Iterator[ExaminedPart]:
    """Yield the parts of a step that cost time, each with the steps that have it or a sample of these."""
    steps = judged_steps(timeline)
    if steps.height < FEWEST_ROWS or not timeline.busy_us:
        return
    in_lockstep = "wave" in steps.columns and steps["wave"].count() > 0
    is_shared = in_lockstep or (timeline.header.pipeline_parallel_size or 1) > 1
    execution = pl.when(pl.col("total_requests") > 0).then("execution_us")
    parts = steps.select(
        (pl.lit(None, pl.Int64) if is_shared else execution).alias(EXECUTION),
        pl.col("schedule_us").alias(SCHEDULE),
        pl.col("update_us").alias(UPDATE),
        pl.when("follows").then("gap_us").alias(BETWEEN),
    )
    for column in parts:
        # NaN where the time is unknown, or the step lacks the part
        name, times = column.name, column.cast(pl.Float64).to_numpy()
        timed_rows = np.flatnonzero(np.isfinite(times) & (times > 0))
        if len(timed_rows) < FEWEST_ROWS:
            continue
        rows = timed_rows[sampled_rows(len(timed_rows))]
        exposed = exposed_us(timeline, steps[rows], name, times[rows])
        cost_us = exposed.sum() * (len(timed_rows) / len(rows))
        if name == EXECUTION or cost_us >= LEAST_FRAC * timeline.busy_us:
            yield examined_part(name, steps[rows], times[rows], exposed, len(timed_rows))
