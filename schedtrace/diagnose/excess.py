"""Excess of the steps over their work, by part of a step, and its explanations.

Each part is examined in turn: its times, the model of its work, the features to compare, the search, and the
cost of the explanations found. The rest of the excess is unexplained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from schedtrace.diagnose.excess_candidates import Explanation, Term
from schedtrace.diagnose.excess_features import CAUSE, StepPhase, compared_features, features, slow_phases
from schedtrace.diagnose.excess_search import search, split
from schedtrace.diagnose.excess_work import (
    BETWEEN,
    EXECUTION,
    LEAST_FRAC,
    SCHEDULE,
    SLOW_ERRORS,
    UPDATE,
    Array,
    ExaminedPart,
    examined_parts,
    judged_steps,
    sampled_rows,
)
from schedtrace.model.report import StepExcess
from schedtrace.timeline.events import DEVICE, EPISODE, FIRST, NO_CALL, PERIODIC, SCATTERED
from schedtrace.timeline.timeline import Timeline, made_once

LEAST_FACTOR, LEAST_HOST_FACTOR = {EXECUTION: 1.03}, 1.2
"""Minimum factors by which a part's time grows: host work varies far more than device work."""
SEVERAL = 2
"""Minimum number of phases of slow steps for which a range of steps is not an explanation."""
EVENT_PARTS = {EXECUTION: DEVICE, SCHEDULE: "schedule", UPDATE: "update", BETWEEN: "host_gap"}
"""Part of an interruption for each part of a step."""
FEWEST_MARKED, FEWEST_MARKED_TIMES = 10, 5
"""Minimum number of slow steps that share a fact, and of separate times at which the fact holds and a step is
slow."""
LEAST_MARKED, MOST_MARKED, HALF = 0.95, 0.3, 0.5
"""Minimum share of the slow steps that have the fact, maximum share of all steps that have it, and minimum
share of the times at which it holds that have a slow step."""
ABOUT_AS_FEW = 1.1
"""Factor up to which two facts mark about as few steps, so that the first of them is named."""


@dataclass(frozen=True, eq=False)
class Effect:
    """Explanation with its figures for the examined steps."""

    explanation: Explanation
    excess_us: Array
    """Time that the effect adds to each examined step."""
    inside: Array
    """Whether each step meets the conditions; for a slope, whether the slope adds time."""
    longer: Array
    """Whether each step exceeds its work by more than half of the usual effect."""
    factor: float
    """Median ratio of a step's time to its time without the effect, over the steps that meet the conditions.
    """
    added_us: float
    """Time that the effect adds to all steps, estimated from the examined ones."""
    cost_us: float
    """Time that it costs the engine in all steps: host work costs nothing while the device is busy."""
    felt_us: float
    """``cost_us``, multiplied in each step by the number of requests that ran."""


@dataclass(frozen=True, eq=False)
class Unmarked:
    """Excess of slow steps that no recorded feature marks, without interruptions.

    If there are several phases, a range of steps also counts as unmarked, because it shows when steps are
    slow, not why.
    """

    excess_us: Array
    """Excess of each examined step; 0 in the remaining steps."""
    phases: list[StepPhase]
    """Phases of the steps with such an excess."""
    cost_us: float
    """Time that this excess costs the engine in all steps, as in ``Effect``."""
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
    parts = []
    for part in examined_parts(timeline):
        excess = part_excess(timeline, part)
        least_us = LEAST_FRAC * timeline.busy_us
        least = LEAST_FACTOR.get(part.name, LEAST_HOST_FACTOR)
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


def part_excess(timeline: Timeline, part: ExaminedPart) -> PartExcess:
    """Return the excess of one part of the steps, with its explanations."""
    compared = compared_features(timeline, part)
    explanations = search(part.fit, compared) if compared else []
    expected, added, error = split(part.fit, explanations)
    steps, times = part.steps, part.times_us
    excess = times - expected
    slow = (excess > SLOW_ERRORS * error * np.maximum(expected, 0)) & (excess > 0)
    explained = np.minimum(excess, np.clip(added, 0, None).sum(axis=1))
    reasons = [not is_clock_range(explanation) for explanation in explanations]
    explained_why = np.minimum(excess, np.clip(added[:, reasons], 0, None).sum(axis=1))
    kinds = (FIRST, PERIODIC, EPISODE, SCATTERED, NO_CALL)  # ``interruption`` reports these steps
    events = timeline.events.filter(pl.col("kind").is_in(kinds), pl.col("part") == EVENT_PARTS[part.name])
    candidates = slow & ~steps["step"].is_in(events["step"].drop_nulls().implode()).to_numpy()
    left = _still_slow(times, excess - explained_why, error, candidates)
    phases = slow_phases(steps, left > 0)
    if len(phases) < SEVERAL:
        left = _still_slow(times, excess - explained, error, candidates)
    return PartExcess(
        part=part.name,
        steps=steps,
        all_steps=part.all_steps,
        expected_us=expected,
        times_us=times,
        effects=[
            _effect(part, explanation, added[:, at], excess) for at, explanation in enumerate(explanations)
        ],
        error_frac=error,
        slow_steps=int(slow.sum()),
        excess_us=float(excess[slow].sum()) * part.scale,
        unexplained_us=float((excess - explained)[slow].sum()) * part.scale,
        compared=list(dict.fromkeys(feature.kind for feature in compared)),
        unmarked=Unmarked(left, phases, *_costs(part, left)),
    )


def _still_slow(times: Array, left: Array, error: float, candidates: Array) -> Array:
    """Return the unexplained excess of the candidates that remain slow without their explained part."""
    return np.where(candidates & (left > SLOW_ERRORS * error * (times - left)), left, 0.0)


def _costs(part: ExaminedPart, added: Array) -> tuple[float, float]:
    """Return what added time costs the engine, and the same cost multiplied by the requests that ran."""
    cost = np.minimum(np.clip(added, 0, None), part.exposed_us)
    running = part.steps.select(pl.max_horizontal("total_requests", "num_running_before").fill_null(0))
    felt = cost * running.to_series().to_numpy()
    return float(cost.sum()) * part.scale, float(felt.sum()) * part.scale


def is_clock_range(explanation: Explanation) -> bool:
    """Return whether only the clock marks the steps, which shows when they are slow, not why."""
    return not explanation.slope and all(term.feature.kind == "clock" for term in explanation.terms)


def _effect(part: ExaminedPart, explanation: Explanation, added: Array, excess: Array) -> Effect:
    inside = explanation.added_units > 0
    half = float(np.median(added[inside])) / 2 if inside.any() else 0.0
    cost_us, felt_us = _costs(part, added)
    factors = part.times_us / np.maximum(part.times_us - added, 1.0)
    return Effect(
        explanation=explanation,
        excess_us=added,
        inside=inside,
        longer=excess > half,
        factor=float(np.median(factors[inside])) if inside.any() else 1.0,
        added_us=float(np.clip(added, 0, None).sum()) * part.scale,
        cost_us=cost_us,
        felt_us=felt_us,
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
    """Number of slow steps that have the fact."""
    all_frac: float
    """Share of all steps that have the fact."""


def shared_mark(timeline: Timeline, numbers: pl.Series) -> SharedMark | None:
    """Return the fact that nearly all of these slow steps have, if it is no coincidence; None otherwise.

    Steps may have the fact without being slow, because it makes steps slow only at times. The search for
    effects, in contrast, looks for facts that make nearly every step slow.

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
