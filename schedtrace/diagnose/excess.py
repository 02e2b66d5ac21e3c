"""Common traits of slow steps, by part of a step, and the share of their excess that nothing explains.

Slow steps may come in phases: stretches of time in which most steps are slow, which may return with a period.
The phases come from the excess itself, so they tell when steps are slow and not why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import polars as pl

from schedtrace.diagnose.excess_candidates import Explanation, Term
from schedtrace.diagnose.excess_features import (
    BETWEEN,
    CAUSE,
    EXECUTION,
    HOST_PARTS,
    LEAST_ERROR,
    SCHEDULE,
    UPDATE,
    Array,
    Feature,
    exposed_us,
    features,
    fit_work,
    judged_steps,
    part_times,
    presence,
    typical_error,
    work_columns,
)
from schedtrace.diagnose.excess_search import (
    FEWEST_ROWS,
    sampled_rows,
    search,
    split,
)
from schedtrace.model.report import StepExcess
from schedtrace.timeline.events import DEVICE, EPISODE, FIRST, NO_CALL, PERIODIC, SCATTERED
from schedtrace.timeline.timeline import Timeline, made_once

LEAST_FRAC = 0.01
"""Least share of the busy time that a part must take, or an explanation must cost."""
LEAST_FACTOR, LEAST_HOST_FACTOR = {EXECUTION: 1.03}, 1.2
"""Least factor by which a part's time grows: host work varies far more than device work."""
SLOW_ERRORS = 4.0
"""Number of typical model errors beyond which a step is slow."""
SEVERAL = 2
"""Fewest phases of slow steps for which a range of steps is not an explanation."""
EVENT_PARTS = {EXECUTION: DEVICE, SCHEDULE: "schedule", UPDATE: "update", BETWEEN: "host_gap"}
"""Part of an interruption for each part of a step."""
MOST_SUSPECTS = 3
"""Most requests whose presence is a feature: the requests with the slowest steps."""
FEWEST_OF_REQUEST = 20
"""Fewest steps with a suspected request, and without it."""
FEWEST_BESIDE = 5
"""Fewest steps before a suspected request starts, and after it ends."""
FEWEST_MARKED, FEWEST_MARKED_TIMES = 10, 5
"""Fewest slow steps that share a fact, and fewest separate times at which it holds and a step is slow."""
LEAST_MARKED, MOST_MARKED, HALF = 0.95, 0.3, 0.5
"""Least share of the slow steps that have the fact, most of all steps, and least of the times at which it
holds that have a slow step.
"""
ABOUT_AS_FEW = 1.1
"""Factor up to which facts mark about as few steps; the first of them is named."""
WINDOW = 20
"""Steps compared on either side of a request's start and end."""


MOST_BETWEEN = 5
"""Most examined steps from one slow step of a phase to the next."""
FEWEST_OF_PHASE = 10
"""Fewest slow steps in a phase."""
LEAST_SLOW_FRAC = 0.5
"""Least share of slow steps in a phase."""
FEWEST_RETURNS = 4
"""Fewest phases that show a period."""
LATE_FRAC = 0.1
"""Share of the period by which a phase may be early or late."""


class StepPhase(NamedTuple):
    """Stretch of time in which most steps are slow."""

    first_step: int
    last_step: int
    begin_us: int
    end_us: int


def slow_phases(steps: pl.DataFrame, slow: Array) -> list[StepPhase]:
    """Return the phases of slow steps in order of time."""
    places = np.flatnonzero(slow)
    runs = np.split(places, np.flatnonzero(np.diff(places) > MOST_BETWEEN) + 1)
    dense = [
        run
        for run in runs
        if len(run) >= FEWEST_OF_PHASE and len(run) >= LEAST_SLOW_FRAC * (run[-1] - run[0] + 1)
    ]
    numbers, begins = steps["step"], steps["start_us"]
    ends = steps.select(pl.max_horizontal("start_us", "end_us", "output_us")).to_series()
    return [
        StepPhase(int(numbers[at]), int(numbers[to]), int(begins[at]), int(ends[to]))
        for at, to in ((int(run[0]), int(run[-1])) for run in dense)
    ]


def returning_phases(steps: pl.DataFrame, phases: list[StepPhase]) -> tuple[float, Array] | None:
    """Return the period of the phases and each step's position in it, in seconds; None if they do not return.

    The distances in the first half of the phases predict each phase of the second half. A phase during which
    the trace begins shows no beginning. Steps before the first and after the last phase get the last position
    of a period: phases that begin or cease to return mark no steps there.
    """
    begins = np.array([phase.begin_us for phase in phases if phase.begin_us > steps["start_us"][0]], float)
    if len(begins) < FEWEST_RETURNS:
        return None
    distances = np.diff(begins)
    usual = float(np.median(distances[: (len(distances) + 1) // 2]))
    if np.abs(distances - usual).max() > LATE_FRAC * usual:
        return None
    numbers = np.arange(len(begins))
    period = float(begins[-1] - begins[0]) / (len(begins) - 1)
    starts = steps["start_us"].to_numpy()
    position = np.mod(starts - (begins - period * numbers).min(), period)
    outside = (starts < phases[0].begin_us) | (starts > phases[-1].end_us)
    return period / 1e6, np.where(outside, period, position) / 1e6


@dataclass(frozen=True, eq=False)
class Effect:
    """Explanation with its figures for the examined steps."""

    explanation: Explanation
    excess_us: Array
    """Time that it adds to each examined step."""
    inside: Array
    """Whether each step meets the conditions; for a slope, whether it adds time."""
    longer: Array
    """Whether each step exceeds its work by more than half of the usual effect."""
    factor: float
    """Median ratio of a step's time to its time without the effect, over the steps inside."""
    added_us: float
    """Time that it adds to all steps, estimated from the examined ones."""
    cost_us: float
    """Time that it costs the engine in all steps: host work costs nothing while the device is busy."""
    felt_us: float
    """``cost_us`` multiplied in each step by the number of requests that ran."""


@dataclass(frozen=True, eq=False)
class Unmarked:
    """Excess of slow steps that no recorded feature marks, and that is not an interruption.

    If there are several phases, a range of steps counts as unmarked, too, because it shows when steps are
    slow, not why.
    """

    excess_us: Array
    """Excess of each examined step; 0 in the remaining steps."""
    phases: list[StepPhase]
    """Phases of the steps with such an excess."""
    cost_us: float
    """Time that it costs the engine in all steps, as in ``Effect``."""
    felt_us: float
    """``cost_us`` multiplied in each step by the number of requests that ran."""


@dataclass(frozen=True, eq=False)
class PartExcess:
    """Excess of one part of an engine's steps."""

    part: str
    """``execution``, ``schedule``, ``update`` or ``between``."""
    steps: pl.DataFrame = field(repr=False)
    """Steps that were examined, one row each."""
    all_steps: int
    """Number of steps that have this part."""
    expected_us: Array
    """Time that the model predicts for the work of each examined step."""
    times_us: Array
    """Time of the part of each examined step."""
    effects: list[Effect]
    error_frac: float
    """Typical relative error of the model, with all effects included."""
    slow_steps: int
    """Number of examined steps that take far longer than their work explains."""
    excess_us: float
    """Excess of the slow steps, scaled to all steps."""
    unexplained_us: float
    """Excess of the slow steps that no effect explains, scaled to all steps."""
    compared: list[str]
    """Kinds of the features that the search compared."""
    unmarked: Unmarked

    @property
    def is_sample(self) -> bool:
        """Whether the examined steps are a sample."""
        return self.steps.height < self.all_steps


@made_once
def part_excesses(timeline: Timeline) -> list[PartExcess]:
    """Return the excess of each part of the steps that costs time, with its explanations."""
    steps = judged_steps(timeline)
    if steps.height < FEWEST_ROWS or not timeline.busy_us:
        return []
    parts = []
    for part, times in part_times(timeline, steps).items():
        timed_rows = np.flatnonzero(np.isfinite(times) & (times > 0))
        if len(timed_rows) < FEWEST_ROWS:
            continue
        examined = timed_rows[sampled_rows(len(timed_rows))]
        sample_times, sample = times[examined], steps[examined]
        exposed = exposed_us(timeline, sample, part, sample_times)
        scale = len(timed_rows) / len(examined)
        if part in HOST_PARTS and exposed.sum() * scale < LEAST_FRAC * timeline.busy_us:
            continue
        excess = part_excess(timeline, part, sample, sample_times, exposed, len(timed_rows))
        least_us = LEAST_FRAC * timeline.busy_us
        least = LEAST_FACTOR.get(part, LEAST_HOST_FACTOR)
        effects = [
            effect for effect in excess.effects if effect.cost_us >= least_us and effect.factor >= least
        ]
        parts.append(replace(excess, effects=effects))
    return parts


def step_excesses(timeline: Timeline) -> list[StepExcess]:
    """Return the excess of slow steps by part, as the report lists it."""
    return [
        StepExcess(
            engine_rank=timeline.rank,
            part=excess.part,
            steps=excess.steps.height,
            slow_steps=excess.slow_steps,
            excess_ms=excess.excess_us / 1e3,
            unexplained_frac=excess.unexplained_us / excess.excess_us,
            model_error_frac=excess.error_frac,
        )
        for excess in part_excesses(timeline)
        if excess.excess_us > LEAST_FRAC * timeline.busy_us
    ]


def part_excess(
    timeline: Timeline, part: str, steps: pl.DataFrame, times: Array, exposed: Array, count: int
) -> PartExcess:
    """Return the excess of one part of the steps, with its explanations.

    Args:
        timeline: Timeline of the engine.
        part: Name of the part.
        steps: Steps to examine.
        times: Time of the part of each step, in microseconds.
        exposed: Part of each time that the engine loses, in microseconds (``exposed_us``).
        count: Number of steps that have this part.
    """
    fit = fit_work(times, work_columns(part, steps))
    recorded = []
    if np.abs(fit.relative_excess).max() > SLOW_ERRORS * LEAST_ERROR:  # else the work predicts every time
        suspects = _suspects(timeline, steps, fit.errors, times) if part == EXECUTION else []
        recorded = features(timeline, steps, suspects)
        is_slow = fit.relative_excess > SLOW_ERRORS * typical_error(fit.relative_excess)
        if (returning := returning_phases(steps, slow_phases(steps, is_slow))) is not None:
            recorded.append(Feature("period", returning[1], f"{returning[0]:.3g}"))
    explanations = search(fit, recorded) if recorded else []
    measures = [
        explanation.effect_units([term.feature.values for term in explanation.terms])
        for explanation in explanations
    ]
    shapes = [
        measure if explanation.multiplies is None else measure * explanation.multiplies
        for explanation, measure in zip(explanations, measures, strict=True)
    ]
    additive = [explanation.additive or explanation.multiplies is not None for explanation in explanations]
    expected, added, error = split(fit, shapes, additive)
    scale = count / len(times)
    effects = [
        _effect(steps, times, explanation, measure, added[:, at], times - expected, exposed, scale)
        for at, (explanation, measure) in enumerate(zip(explanations, measures, strict=True))
    ]
    excess = times - expected
    slow = (excess > SLOW_ERRORS * error * np.maximum(expected, 0)) & (excess > 0)
    explained = np.minimum(excess, np.clip(added, 0, None).sum(axis=1))
    reasons = [not is_clock_range(explanation) for explanation in explanations]
    explained_why = np.minimum(excess, np.clip(added[:, reasons], 0, None).sum(axis=1))
    kinds = (FIRST, PERIODIC, EPISODE, SCATTERED, NO_CALL)  # ``interruption`` reports these steps
    events = timeline.events.filter(pl.col("kind").is_in(kinds), pl.col("part") == EVENT_PARTS[part])
    candidates = slow & ~steps["step"].is_in(events["step"].drop_nulls().implode()).to_numpy()
    left = _still_slow(times, excess - explained_why, error, candidates)
    phases = slow_phases(steps, left > 0)
    if len(phases) < SEVERAL:
        left = _still_slow(times, excess - explained, error, candidates)
    return PartExcess(
        part=part,
        steps=steps,
        all_steps=count,
        expected_us=expected,
        times_us=times,
        effects=effects,
        error_frac=error,
        slow_steps=int(slow.sum()),
        excess_us=float(excess[slow].sum()) * scale,
        unexplained_us=float((excess - explained)[slow].sum()) * scale,
        compared=list(dict.fromkeys(feature.kind for feature in recorded)),
        unmarked=Unmarked(left, phases, *_costs(steps, left, exposed, scale)),
    )


def _still_slow(times: Array, left: Array, error: float, candidates: Array) -> Array:
    """Return the unexplained excess of the candidates that remain slow without their explained part."""
    return np.where(candidates & (left > SLOW_ERRORS * error * (times - left)), left, 0.0)


def _costs(steps: pl.DataFrame, added: Array, exposed: Array, scale: float) -> tuple[float, float]:
    """Return the cost of added time to the engine, and the same cost multiplied by the requests that ran."""
    cost = np.minimum(np.clip(added, 0, None), exposed)
    running = steps.select(pl.max_horizontal("total_requests", "num_running_before").fill_null(0))
    return float(cost.sum()) * scale, float((cost * running.to_series().to_numpy()).sum()) * scale


def is_clock_range(explanation: Explanation) -> bool:
    """Return whether the clock alone marks the steps: it tells when they are slow, not why."""
    return not explanation.slope and all(term.feature.kind == "clock" for term in explanation.terms)


def _effect(
    steps: pl.DataFrame,
    times: Array,
    explanation: Explanation,
    measure: Array,
    added: Array,
    excess: Array,
    exposed: Array,
    scale: float,
) -> Effect:
    inside = measure > 0
    half = float(np.median(added[inside])) / 2 if inside.any() else 0.0
    cost_us, felt_us = _costs(steps, added, exposed, scale)
    return Effect(
        explanation=explanation,
        excess_us=added,
        inside=inside,
        longer=excess > half,
        factor=float(np.median((times / np.maximum(times - added, 1.0))[inside])) if inside.any() else 1.0,
        added_us=float(np.clip(added, 0, None).sum()) * scale,
        cost_us=cost_us,
        felt_us=felt_us,
    )


def _suspects(timeline: Timeline, steps: pl.DataFrame, errors: Array, times: Array) -> list[str]:
    """Return the requests whose presence explains most of the errors and whose steps turn slow with it.

    The score of a request is the number of steps with it, times the number of steps without it, times the
    squared difference of the mean errors.
    """
    order = np.argsort(steps["step"].to_numpy(), kind="stable")
    numbers, sums = steps["step"].to_numpy()[order], np.concatenate([[0.0], np.cumsum(errors[order])])
    many, total = len(numbers), float(sums[-1])
    upto = pl.LazyFrame({"at": numbers, "sum": sums[1:], "number": np.arange(1, many + 1)}).set_sorted("at")
    parts = (
        timeline.stretches.select("request_id", "step", "last_step")
        .with_columns(before=pl.col("step") - 1)
        .sort("before")
        .join_asof(upto, left_on="before", right_on="at", coalesce=False)
        .select("request_id", "last_step", sum_before="sum", number_before="number")
        .sort("last_step")
        .join_asof(upto, left_on="last_step", right_on="at")
        .select(
            "request_id",
            *(
                pl.col(name).fill_null(0) - pl.col(f"{name}_before").fill_null(0)
                for name in ("sum", "number")
            ),
        )
        .group_by("request_id")
        .agg(pl.col("sum").sum(), pl.col("number").sum())
    )
    inside, outside = pl.col("sum") / pl.col("number"), (total - pl.col("sum")) / (many - pl.col("number"))
    ranked = (
        parts.filter(pl.col("number").is_between(FEWEST_OF_REQUEST, many - FEWEST_OF_REQUEST))
        .filter(inside > outside)
        .with_columns(score=pl.col("number") * (many - pl.col("number")) * (inside - outside) ** 2)
        .sort("score", "request_id", descending=[True, False])
        .head(MOST_SUSPECTS)
        .collect()["request_id"]
        .to_list()
    )
    present = {feature.detail: feature for feature in presence(timeline, steps, ranked)}
    # A model of the work that took much of the excess for work hides in the errors what the times show.
    return [
        name
        for name in ranked
        if name in present and any(_comes_and_goes(present[name], values) for values in (errors, times))
    ]


def _comes_and_goes(feature: Feature, errors: Array) -> bool:
    """Return whether steps turn slow when the request starts and fast when it ends.

    A machine that is slow for a while does not follow the start and end of a request.

    Args:
        feature: Presence of the request in each step.
        errors: Error of the model of the work for each step, or the step's time.
    """
    inside = feature.values > 0
    places = np.flatnonzero(inside)
    first, last = int(places[0]), int(places[-1])
    sides = (
        (errors[max(0, first - WINDOW) : first], errors[inside][:WINDOW]),
        (errors[last + 1 : last + 1 + WINDOW], errors[inside][-WINDOW:]),
    )
    distance = float(np.median(errors[inside]) - np.median(errors[~inside]))
    return distance > 0 and all(
        len(outside) >= FEWEST_BESIDE and np.median(within) - np.median(outside) >= distance / 2
        for outside, within in sides
    )


def explained_steps(timeline: Timeline) -> pl.Series:
    """Return the numbers of the steps that an effect makes slow."""
    steps = [
        excess.steps["step"].filter(pl.Series(effect.inside)) for excess, effect in every_effect(timeline)
    ]
    return pl.concat(steps).unique() if steps else pl.Series("step", [], pl.Int64)


def every_effect(timeline: Timeline) -> Sequence[tuple[PartExcess, Effect]]:
    """Return all effects with the excess of their part, the most costly first."""
    effects = [(excess, effect) for excess in part_excesses(timeline) for effect in excess.effects]
    return sorted(effects, key=lambda pair: -pair[1].felt_us)


@dataclass(frozen=True, eq=False)
class SharedMark:
    """Recorded fact that slow steps share, and that few other steps have."""

    term: Term
    inside: int
    """Number of these slow steps that have it."""
    all_frac: float
    """Share of all steps that have it."""


def shared_mark(timeline: Timeline, numbers: pl.Series) -> SharedMark | None:
    """Return the fact that nearly all of these slow steps have, if it is no coincidence; None otherwise.

    Steps may have it and not be slow: it is what makes steps slow at times. The search for effects looks for
    facts that make nearly every step slow.

    Args:
        timeline: Timeline of the engine.
        numbers: Numbers of the slow steps.
    """
    steps = judged_steps(timeline)
    slow = steps["step"].is_in(numbers.implode())
    if slow.sum() < FEWEST_MARKED:
        return None
    places = np.union1d(sampled_rows(steps.height), np.flatnonzero(slow))
    sample, is_slow = steps[places], slow.to_numpy()[places]
    weights = np.where(is_slow, 1.0, (~slow).sum() / max((~is_slow).sum(), 1))
    marks = []
    for feature in features(timeline, sample, []):
        has = feature.values > 0
        inside, share = int(has[is_slow].sum()), float(weights[has].sum() / weights.sum())
        begins = np.flatnonzero(np.diff(has, prepend=False) & has)
        slow_in = np.add.reduceat(has & is_slow, begins) > 0 if len(begins) else np.zeros(0, bool)
        if (
            feature.role == CAUSE
            and inside >= LEAST_MARKED * is_slow.sum()
            and share <= MOST_MARKED
            and slow_in.sum() >= FEWEST_MARKED_TIMES
            and slow_in.mean() >= HALF
        ):
            marks.append(SharedMark(Term(feature, 0.0), inside, share))
    least = min((mark.all_frac for mark in marks), default=0.0)
    return next((mark for mark in marks if mark.all_frac <= ABOUT_AS_FEW * least), None)
