"""Excess time of steps beyond their work, by part of a step, and search for what slow steps have in common.

Each part is examined in turn: its times, the model of its work, the features to compare, the search, and the
cost of the explanations. The rest of the excess is unexplained.

An explanation is a split, a pair of splits, or a slope. It is fitted together with the work by the model
``time = work + effect``, with least absolute deviations of relative errors; such a fit does not mistake a
jump for work, even if most steps lie beyond the jump. The search fits the candidates that score far above
chance (``excess_candidates.py``) and judges them on held-out blocks of steps: an explanation must hold in
both halves of the blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from schedtrace.diagnose.excess_candidates import Explanation, proposals, refined
from schedtrace.diagnose.excess_features import (
    CORRELATE,
    KINDS,
    WORK,
    Feature,
    StepPhase,
    Term,
    compared_features,
    slow_phases,
)
from schedtrace.diagnose.excess_work import (
    BETWEEN,
    EXECUTION,
    FEWEST_ROWS,
    LEAST_FRAC,
    SCHEDULE,
    SLOW_ERRORS,
    UPDATE,
    Array,
    ExaminedPart,
    WorkFit,
    examined_parts,
    fit_lad,
    fit_work,
    independent,
    typical_error,
)
from schedtrace.model.report import StepExcess
from schedtrace.timeline.events import DEVICE, EPISODE, FIRST, NO_CALL, PERIODIC, SCATTERED
from schedtrace.timeline.timeline import Timeline, made_once

LEAST_FACTOR, LEAST_HOST_FACTOR = {EXECUTION: 1.03}, 1.2
"""Minimum factor by which an effect lengthens a part's time: by part of a step, and for host work, which
varies far more."""
SEVERAL = 2
"""Minimum number of phases of slow steps at which a range of steps no longer counts as an explanation."""
EVENT_PARTS = {EXECUTION: DEVICE, SCHEDULE: "schedule", UPDATE: "update", BETWEEN: "host_gap"}
"""Name in the table of interruptions for each part of a step."""


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
    """Time that the effect costs the engine in all steps; host work is free while the device is busy."""
    felt_us: float
    """``cost_us``, multiplied in each step by the number of requests that ran."""


@dataclass(frozen=True, eq=False)
class Unmarked:
    """Excess of the slow steps that neither a recorded feature nor an interruption explains.

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
    """Return the excess of each examined part of the steps, with the effects that are large enough."""
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
    """Return the excess of one part of the steps, with the effects of all its explanations."""
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
    """Return the unexplained excess of candidates that are slow even without the explained one; else 0."""
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


AS_GOOD = 0.9
"""Minimum share of the best candidate's explained error at which another candidate ties with it."""
SURELY = 1.6
"""Standard errors by which the better of two candidates must lead; otherwise the two tie."""
RESOLVED = 1e-3
"""Smallest difference in relative error per block that a fit resolves."""
BETTER = 0.02
"""Minimum share of the errors that a second condition must remove in addition to the first."""
LEAST_CHANGE, LEAST_CHANGE_OF_WORK = 0.03, 0.1
"""Minimum relative change of a part's time, for most features and for those of ``WORK``; models of step times
cannot resolve smaller changes."""
HALF = 0.5
"""Share of an effect that separates slow steps from the rest."""
MISPLACED = 2
"""Number of steps on the wrong side of a split that noise can explain."""
MISPLACED_FRAC = 0.1
"""Maximum share of steps on the wrong side of a split whose effect grows."""
NEAR, NEAR_FRAC = 8, 0.1
"""Minimum number of steps on either side of a cut that must show the jump, as a count and as a share of the
smaller side."""
LEAST_APART = 0.3
"""Minimum difference, between the steps inside and outside a split, in the share of steps that exceed half of
the effect."""
CLEAR_ERROR, LEAST_CLEARLY_APART = 0.25, 0.6
"""Maximum typical error, in units of the effect, at which noise hardly blurs a split; and the value that
replaces ``LEAST_APART`` then."""
MOST_EXPLANATIONS, LEAST_SECOND = 3, 0.1
"""Maximum number of explanations of a part, and minimum share of the remaining errors that each further one
removes."""


def search(fit: WorkFit, features: Sequence[Feature]) -> list[Explanation]:
    """Return the explanations of the excess over the work, the best first; empty if nothing explains it.

    Args:
        fit: Times of one part of each step, and the model of their work.
        features: Facts about the same steps.
    """
    explanations: list[Explanation] = []
    while len(fit.times) >= FEWEST_ROWS and len(explanations) < MOST_EXPLANATIONS:
        best = _best(fit, features)
        if best is None or (explanations and best.explained < LEAST_SECOND):
            break
        best = best if best.slope else _multiplied(fit, best)
        explanations.append(best)
        added = np.column_stack([fit.columns, best.added_time(fit.usual)])
        fit = fit_work(fit.times_us, independent(added))
        features = [feature for feature in features if feature.family_name not in best.feature_families]
    return explanations


def _multiplied(fit: WorkFit, explanation: Explanation) -> Explanation:
    """Return a jump as a share of the work instead of a constant time, if that predicts better."""
    measure = explanation.added_units
    without = measure == 0
    if explanation.growth or without.sum() < FEWEST_ROWS:
        return explanation
    work = np.maximum(fit.work @ fit_lad(fit.work[without], fit.times[without]), 0.0)
    column = measure * work
    after = _held_out(fit, fit.work, column / (float(column.max()) or 1.0))
    if after.sum() >= explanation.errors.sum():
        return explanation
    return replace(explanation, multiplies=work * fit.usual)


def split(fit: WorkFit, explanations: Sequence[Explanation]) -> tuple[Array, Array, float]:
    """Return the time of the work and the time that each explanation adds, with the typical relative error.

    Both times are in microseconds per step.
    """
    columns = [explanation.added_time(fit.usual) / fit.usual for explanation in explanations]
    sizes = [float(np.abs(column).max()) or 1.0 for column in columns]
    columns = [column / size for column, size in zip(columns, sizes, strict=True)]
    matrix = np.column_stack([fit.work, *columns])
    costs = fit_lad(matrix, fit.times, 60)
    count = fit.work.shape[1]
    base = (fit.work @ costs[:count]) * fit.usual
    added = [column * cost * fit.usual for column, cost in zip(columns, costs[count:], strict=True)]
    error = np.abs(fit.times - matrix @ costs)
    return base, np.column_stack(added) if added else np.zeros((len(fit.times), 0)), typical_error(error)


def _best(fit: WorkFit, features: Sequence[Feature]) -> Explanation | None:
    """Return the explanation to name, with its ties in ``also``; None if nothing explains enough."""
    candidates = proposals(fit, features)
    if not candidates:
        return None
    before = _held_out(fit, fit.work, None)
    judged = [
        fitted
        for candidate in candidates
        if (fitted := _judged(fit, before, candidate)) is not None and fitted.explained > 0
    ]
    single = [fitted for fitted in judged if len(fitted.terms) == 1]
    alone = max(single, key=lambda fitted: fitted.explained, default=None)
    judged = [  # a pair must predict or separate the steps clearly better than the best single condition
        fitted
        for fitted in judged
        if len(fitted.terms) == 1
        or alone is None
        or (
            (_is_better(fitted, alone) or _separates_better(fitted, alone))
            and fitted.explained >= alone.explained + BETTER
        )
    ]
    if not judged:
        return None
    # Among ties, possible causes come first, then fewer conditions, then the larger explained error.
    most = max(judged, key=lambda fitted: fitted.explained)
    good = [
        fitted
        for fitted in judged
        if fitted.explained >= AS_GOOD * most.explained and not _is_better(most, fitted)
    ]
    good = [fitted for fitted in good if not any(_separates_better(rival, fitted) for rival in good)]
    good = [_in_usual_words(fit, before, features, fitted) for fitted in good]
    good.sort(key=_order)
    best, *rest = good
    also: list[Explanation] = []
    is_trait = any(term.feature.kind in ("trait", "lora") for term in best.terms)
    for tie in rest:
        named = [best.feature_families, *(earlier.feature_families for earlier in also)]
        is_new = tie.feature_families not in named and tie.weakest_role < CORRELATE
        if is_new and not (is_trait and _names_request(tie)):
            also.append(tie)
    return _as_range(features, replace(best, also=tuple(also[:3])))


def _as_range(features: Sequence[Feature], explanation: Explanation) -> Explanation:
    """Replace a pair of conditions, one of them on the clock, with a range of the clock for the same steps.

    If these steps are not consecutive, the pair stays unchanged.
    """
    kinds = {term.feature.kind for term in explanation.terms}
    if "clock" not in kinds or kinds == {"clock"}:
        return explanation
    inside = np.flatnonzero(explanation.added_units > 0)
    first, last = int(inside[0]), int(inside[-1])
    if last - first + 1 > len(inside):
        return explanation
    clock = next(feature for feature in features if feature.kind == "clock")
    ends = [
        Term(clock, float(clock.values[at - 1 : at + 1].mean()), above)
        for at, above in ((first, True), (last + 1, False))
        if 0 < at < len(clock.values)
    ]
    return replace(explanation, terms=tuple(ends))


def _names_request(explanation: Explanation) -> bool:
    return any(term.feature.kind in ("request", "length") for term in explanation.terms)


def _order(explanation: Explanation) -> tuple[int, int, bool, bool, int, float]:
    """Return the sort key of ties: possible causes come first, and a request's options before its name."""
    beside = explanation.weakest_role if explanation.weakest_role == CORRELATE else 0
    place = max(list(KINDS).index(term.feature.kind) for term in explanation.terms) if beside else 0
    return (
        explanation.weakest_role,
        len(explanation.terms),
        explanation.slope,
        _names_request(explanation),
        place,
        -explanation.explained,
    )


def _in_usual_words(
    fit: WorkFit, before: Array, features: Sequence[Feature], explanation: Explanation
) -> Explanation:
    """Replace each feature with the first feature of its family that explains as much."""
    for at, term in enumerate(explanation.terms):
        family = [feature for feature in features if feature.family_name == term.feature.family_name]
        place = [feature.identity for feature in family].index(term.feature.identity)
        for feature in family[:place]:
            terms = list(explanation.terms)
            terms[at] = replace(term, feature=feature)
            reworded = replace(explanation, terms=tuple(terms))
            fitted = _judged(fit, before, reworded if explanation.slope else refined(fit, reworded))
            if fitted is not None and not _is_better(explanation, fitted):
                explanation = fitted
                break
    return explanation


def _judged(fit: WorkFit, before: Array, explanation: Explanation) -> Explanation | None:
    """Return the explanation with its effect; None if that is small or blurred, or absent in either half."""
    measure = explanation.added_units
    best: Explanation | None = None
    for additive in (True,) if explanation.slope or explanation.growth else (False, True):
        column = measure / fit.usual if additive else measure
        size = float(np.abs(column).max()) or 1.0
        effects: list[float] = []
        after = _held_out(fit, fit.work, column / size, effects)
        if effects[0] * effects[1] <= 0 or any(after[h::2].sum() >= before[h::2].sum() for h in (0, 1)):
            continue
        matrix = np.column_stack([fit.work, column / size])
        costs = fit_lad(matrix, fit.times)
        effect = float(costs[-1]) / size
        explained = 1 - float(after.sum() / before.sum())
        if best is not None and explained <= best.explained:
            continue
        misplaced = _misplaced(fit, matrix, costs, explanation)
        if misplaced is not None:
            best = replace(
                explanation,
                effect=effect,
                additive=additive,
                explained=explained,
                misplaced=misplaced,
                errors=after,
            )
    if best is None or best.slope:
        return None if best is None or best.effect < 0 else best
    if (best.weakest_role == WORK or best.growth) and not _more_than_a_bend(fit, best, measure):
        return None
    if best.growth and best.misplaced > MISPLACED_FRAC * len(fit.times):
        return None
    if best.effect < 0:
        return _turned(best) if len(best.terms) == 1 else None
    return best


def _more_than_a_bend(fit: WorkFit, explanation: Explanation, measure: Array) -> bool:
    """Return whether a split explains more than a bend in the cost of its work features at the same cuts."""
    bends = [
        np.clip(term.feature.values - term.cut, 0, None) / fit.usual
        for term in explanation.terms
        if term.feature.role == WORK or explanation.growth
    ]
    bends = [bend / max(float(bend.max()), 1e-12) for bend in bends]
    base = independent(np.column_stack([fit.work, *bends]))
    column = measure / fit.usual if explanation.additive else measure
    effects: list[float] = []
    before, after = _held_out(fit, base, None), _held_out(fit, base, column, effects)
    same = all(effect / explanation.effect >= HALF for effect in effects)
    return same and all(after[half::2].sum() < before[half::2].sum() for half in (0, 1))


def _turned(explanation: Explanation) -> Explanation:
    """Return the split with its sides swapped, which makes a negative effect positive."""
    (term,) = explanation.terms
    effect = -explanation.effect
    if not explanation.additive:  # the effect is relative to the time of the faster side
        effect = effect / max(1 - effect, 0.01)
    return replace(explanation, terms=(replace(term, above=not term.above),), effect=effect)


def _misplaced(fit: WorkFit, matrix: Array, costs: Array, explanation: Explanation) -> int | None:
    """Count the steps on the wrong side of a split.

    None if the effect is small for the part, does not separate the steps, or does not jump at a cut.
    """
    added = matrix[:, -1] * costs[-1]
    expected = np.maximum(matrix @ costs - added, 0.05)
    if explanation.slope:
        return 0 if float(np.quantile(np.abs(added) / expected, 0.95)) >= 2 * LEAST_CHANGE else None
    inside = matrix[:, -1] > 0
    grown = np.ones(len(added))
    if explanation.growth:  # the jump is what the steps next to the cut add
        grown = np.maximum(explanation.added_units, 1.0)
        added = added / grown
    usual = np.minimum(expected, expected + added).clip(0.05)
    least = LEAST_CHANGE_OF_WORK if explanation.weakest_role == WORK else LEAST_CHANGE
    if float(np.median((np.abs(added) / usual)[inside])) < least:
        return None
    left = (fit.times - expected) / float(np.median(added[inside]))
    longer = left > HALF * grown
    is_clear = typical_error(left / grown - inside) <= CLEAR_ERROR
    if longer[inside].mean() - longer[~inside].mean() < (LEAST_CLEARLY_APART if is_clear else LEAST_APART):
        return None
    if _names_request(explanation) and longer[~inside].sum() > longer[inside].sum():
        return None  # most slow steps do without that request
    jumps = all(_jumps(left, explanation.terms, at) for at in range(len(explanation.terms)))
    return int((longer != inside).sum()) if jumps else None


def _jumps(left: Array, terms: Sequence[Term], at: int) -> bool:
    """Return whether the steps nearest to a cut differ by half of the effect; otherwise the cost bends.

    Args:
        left: Excess over the work, in units of the effect.
        terms: Conditions of the split.
        at: Place of the condition to check; steps that fail the remaining conditions are left out.
    """
    among = np.ones(len(left), bool)
    for place, term in enumerate(terms):
        if place != at:
            among &= term.mask > 0
    values, errors = terms[at].feature.values[among], left[among]
    below, above = values <= terms[at].cut, values > terms[at].cut
    near = max(NEAR, int(NEAR_FRAC * min(below.sum(), above.sum())))
    lower = errors[below][np.argsort(-values[below], kind="stable")[:near]]
    upper = errors[above][np.argsort(values[above], kind="stable")[:near]]
    return len(lower) > 0 and len(upper) > 0 and abs(float(np.median(upper) - np.median(lower))) >= HALF


def _held_out(fit: WorkFit, base: Array, column: Array | None, effects: list[float] | None = None) -> Array:
    """Return each block's absolute error under a model fitted to the opposite half of the blocks."""
    matrix = base if column is None else np.column_stack([base, column])
    errors = np.zeros(len(fit.times))
    for half in (0, 1):
        fitted = fit.blocks % 2 != half
        costs = fit_lad(matrix[fitted], fit.times[fitted], 8)
        if effects is not None:
            effects.append(float(costs[-1]))
        errors[~fitted] = np.abs(fit.times[~fitted] - matrix[~fitted] @ costs)
    return np.bincount(fit.blocks, errors)


def _is_better(explanation: Explanation, rival: Explanation) -> bool:
    """Return whether an explanation predicts held-out blocks clearly better than its rival."""
    gain = rival.errors - explanation.errors
    if float(gain.mean()) < RESOLVED:
        return False
    return float(gain.sum()) > SURELY * float(np.sqrt((gain**2).sum()))


def _separates_better(explanation: Explanation, rival: Explanation) -> bool:
    """Return whether a split leaves clearly fewer steps on the wrong side than its rival.

    If the rival's effect grows, steps near its start are on either side by chance, so the answer is no.
    """
    return not rival.slope and not rival.growth and explanation.misplaced <= rival.misplaced / 2 - MISPLACED
