"""Search for what slow steps have in common: a split, two splits together, or a slope, fitted with the work.

``time = work + effect``, by least absolute deviations of relative errors, so that a cliff that most steps lie
beyond is not taken for work. Candidates are ranked by a score test (how far the errors of the model of the
work alone lean towards them, once the work is taken out of both); the best ones are fitted and judged on
blocks of steps that were not fitted. An explanation has to beat what the same search finds in shuffled
errors, by far, and to hold in both halves of the blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from schedtrace.timeline.excess import BESIDE, WORK, Array, Feature, independent

MOST_ROWS = 5_000
"""Steps of a search; of more, evenly spaced blocks are looked at."""
FEWEST_ROWS = 40
FEWEST_SIDE = 5
"""Fewest steps on either side of a split."""
BLOCK = 25
"""Steps of a block, half of which are fitted and the others predicted; fewer of a short trace."""
FEWEST_BLOCKS = 24
MOST_CUTS = 24
"""Cuts of a feature that are tried at first; the best one is then looked for between its neighbours."""
SHUFFLES = 60
FAR = 6.0
"""Standard deviations above the mean of what shuffled errors reach: chance reaches it in about one of 2,800
searches, by the distribution of a maximum (E. J. Gumbel, 1958)."""
BOUND = 3.0
"""Errors beyond so many typical ones count no more than this."""
FIRST = 10
"""Candidates, each of another feature, that are fitted, and whose halves are joined with others."""
AS_GOOD = 0.93
"""Share of what the best candidate explains, from which another is as good."""
BETTER = 0.10
"""Share of the best single split's remaining error that a second condition must take away."""
LEAST_CHANGE = 0.03
"""Least relative change of the part's time: models of step times are not more exact."""
LEAST_APART = 0.3
"""Share of slow steps beyond half of the effect, less that of the other steps."""
MOST_EXPLANATIONS = 3
LEAST_NEW = 0.03
"""Least share of a candidate that the work does not imply."""


@dataclass(frozen=True, eq=False)
class Term:
    """A condition on a feature."""

    feature: Feature
    cut: float
    above: bool = True

    def holds(self, values: Array) -> Array:
        """Return 1.0 where it holds, else 0.0."""
        return ((values > self.cut) == self.above).astype(float)


@dataclass(frozen=True, eq=False)
class Explanation:
    """What goes with an excess, and how large that is."""

    terms: tuple[Term, ...]
    """One or two conditions that hold together; of a slope one, whose ``cut`` is where it begins."""
    slope: bool
    effect: float
    """Relative to the expected time or, if ``additive``, in microseconds; of a slope by the feature's unit."""
    additive: bool
    explained: float
    """Share of the errors on steps that were not fitted that goes away."""
    also: tuple["Explanation", ...] = field(default=(), repr=False)
    """What explains as much."""

    @property
    def rank(self) -> int:
        """The largest rank of its features."""
        return max(term.feature.rank for term in self.terms)

    @property
    def families(self) -> frozenset[str]:
        """Families of its features."""
        return frozenset(term.feature.family for term in self.terms)

    def measure(self, values: Sequence[Array]) -> Array:
        """Return by how many units of ``effect`` each step is longer.

        Args:
            values: Of the terms' features, for any steps.
        """
        if self.slope:
            return np.clip(values[0] - self.terms[0].cut, 0, None)
        product = np.ones(len(values[0]))
        for term, column in zip(self.terms, values, strict=True):
            product = product * term.holds(column)
        return product


class _Candidates(NamedTuple):
    """Columns that are tried, one for each explanation."""

    columns: Array
    about: list[Explanation]
    """Explanations without an effect."""


@dataclass(frozen=True, eq=False)
class _Fit:
    """Model of the work on the steps of a search, in relative terms."""

    times: Array
    work: Array
    usual: Array
    """Time that the work takes by a first fit, which relative errors are of."""
    basis: Array
    """Orthonormal columns that span the work."""
    errors: Array
    """Bounded errors without what the work implies."""
    scale: float
    """Typical relative error."""
    blocks: Array


def sampled(rows: int) -> Array:
    """Return the places of the steps that are looked at: all, or evenly spaced blocks of them."""
    if rows <= MOST_ROWS:
        return np.arange(rows)
    blocks = rows // BLOCK
    chosen = np.unique(np.linspace(0, blocks - 1, MOST_ROWS // BLOCK).astype(int))
    return (chosen[:, None] * BLOCK + np.arange(BLOCK)).ravel()


def search(times: Array, work: Array, features: Sequence[Feature]) -> list[Explanation]:
    """Return what explains the excess of these times, the best first; empty: nothing does.

    Args:
        times: Of one part of each step, in order, above 0.
        work: Columns of its work (``timeline.excess.work_of``).
        features: Facts about the same steps.
    """
    explanations: list[Explanation] = []
    added = work
    while len(times) >= FEWEST_ROWS and len(explanations) < MOST_EXPLANATIONS:
        fit = _fitted(times, added)
        best = _best(fit, features)
        if best is None:
            break
        explanations.append(best)
        measure = best.measure([term.feature.values for term in best.terms])
        added = independent(np.column_stack([added, measure * (1 if best.additive else fit.usual)]))
    return explanations


def split(
    times: Array, work: Array, measures: Sequence[Array], additive: Sequence[bool]
) -> tuple[Array, Array, float]:
    """Return what the work takes, what each explanation adds, and the typical relative error.

    Args:
        times: As for ``search``.
        work: As for ``search``.
        measures: ``Explanation.measure`` of each explanation.
        additive: Whether its effect is in microseconds.
    """
    fit = _fitted(times, work)
    columns = [
        measure / fit.usual if add else measure for measure, add in zip(measures, additive, strict=True)
    ]
    matrix = np.column_stack([fit.work, *columns])
    costs = _lad(matrix, fit.times)
    count = fit.work.shape[1]
    base = (fit.work @ costs[:count]) * fit.usual
    added = [column * cost * fit.usual for column, cost in zip(columns, costs[count:], strict=True)]
    error = np.abs(fit.times - matrix @ costs)
    return base, np.column_stack(added) if added else np.zeros((len(times), 0)), _typical(error)


def work_errors(times: Array, work: Array) -> Array:
    """Return by how many typical errors each time is longer than its work explains, within bounds."""
    return _fitted(times, work).errors


def _lad(matrix: Array, target: Array, rounds: int = 12) -> Array:
    """Fit by least absolute deviations: iteratively reweighted least squares."""
    weight = np.ones(len(target))
    ridge = 1e-9 * len(target) * np.eye(matrix.shape[1])
    costs = np.zeros(matrix.shape[1])
    for _ in range(rounds):
        weighted = matrix * weight[:, None]
        costs = np.linalg.solve(weighted.T @ matrix + ridge, weighted.T @ target)
        error = np.abs(target - matrix @ costs)
        weight = 1 / np.maximum(error, 0.05 * float(np.median(error)) + 1e-6)
        weight /= weight.mean()
    return costs


def _typical(errors: Array) -> float:
    return max(1.4826 * float(np.median(np.abs(errors))), 0.002)


def _fitted(times: Array, work: Array) -> _Fit:
    size = float(np.median(times))
    usual = np.maximum(work @ _lad(work, times / size) * size, 0.1 * size)
    relative, columns = times / usual, work / usual[:, None]
    columns = columns / np.maximum(np.abs(columns).max(axis=0), 1e-12)
    errors = relative - columns @ _lad(columns, relative)
    scale = _typical(errors)
    basis, _ = np.linalg.qr(columns)
    bounded = np.clip(errors / scale, -BOUND, BOUND)
    bounded = bounded - basis @ (basis.T @ bounded)
    block = min(BLOCK, max(2, len(times) // FEWEST_BLOCKS))
    return _Fit(relative, columns, usual, basis, bounded, scale, np.arange(len(times)) // block)


def _cuts(values: Array) -> Array:
    distinct = np.unique(values)
    if len(distinct) > MOST_CUTS + 1:
        distinct = np.unique(np.quantile(values, np.linspace(0, 1, MOST_CUTS + 2), method="nearest"))
    return (distinct[1:] + distinct[:-1]) / 2


def _singles(fit: _Fit, features: Sequence[Feature]) -> _Candidates:
    """Return every split and slope of a feature."""
    columns: list[Array] = []
    about: list[Explanation] = []
    for feature in features:
        values = feature.values
        for cut in _cuts(values):
            columns.append((values > cut).astype(float))
            about.append(Explanation((Term(feature, float(cut)),), False, 0.0, False, 0.0))
        low, high = np.quantile(values, (0.02, 1.0))
        if feature.kind not in ("request", "first_use") and len(np.unique(values)) > 2:
            columns.append(np.clip(values - low, 0, None) / (high - low) / fit.usual * np.median(fit.usual))
            about.append(Explanation((Term(feature, float(low)),), True, 0.0, True, 0.0))
    if not columns:
        return _Candidates(np.zeros((len(fit.times), 0)), [])
    matrix = np.column_stack(columns)
    sides = [explanation.slope for explanation in about]
    inside = matrix.sum(axis=0)
    enough = (inside >= FEWEST_SIDE) & (len(matrix) - inside >= FEWEST_SIDE) | np.array(sides)
    return _Candidates(matrix[:, enough], [one for one, good in zip(about, enough, strict=True) if good])


def _scores(fit: _Fit, candidates: _Candidates, errors: Array) -> Array:
    """Return how far the errors lean towards each candidate: about a squared standard score, with its sign.

    A split of what is work has to be a jump, not a bend: what a bend there explains is taken out as well.
    """
    matrix = candidates.columns
    inside = fit.basis.T @ matrix
    norm = (matrix**2).sum(axis=0)
    rest = norm - (inside**2).sum(axis=0)
    lean = matrix.T @ errors
    for at, explanation in enumerate(candidates.about):
        term = explanation.terms[0]
        if term.feature.rank == WORK and len(explanation.terms) == 1 and not explanation.slope:
            bend = _bend(fit, term)
            size = float(bend @ bend)
            if size > 1e-9:
                along = float(bend @ matrix[:, at]) / size
                rest[at] -= along**2 * size
                lean[at] -= along * (bend @ errors)
    new = rest > LEAST_NEW * norm
    rest = np.where(new, rest, 1.0)
    power = np.mean(errors**2, axis=0) if errors.ndim > 1 else float(np.mean(errors**2))
    scores = np.sign(lean) * lean**2 / (rest[:, None] if errors.ndim > 1 else rest) / np.maximum(power, 1e-12)
    return np.where(new[:, None] if errors.ndim > 1 else new, scores, 0.0)


def _bend(fit: _Fit, term: Term) -> Array:
    """Return a bend at a cut, without what the work implies."""
    bend = np.clip(term.feature.values - term.cut, 0, None)
    bend = bend / max(float(bend.max()), 1e-9) * (np.median(fit.usual) / fit.usual)
    return bend - fit.basis @ (fit.basis.T @ bend)


def _chance(fit: _Fit, candidates: _Candidates) -> float:
    """Return the score that no candidate reaches by chance: far above the largest ones of shuffled errors."""
    random = np.random.default_rng(0)
    order = [np.flatnonzero(fit.blocks == block) for block in np.unique(fit.blocks)]
    shuffled = np.column_stack(
        [fit.errors[np.concatenate([order[at] for at in random.permutation(len(order))])] for _ in range(SHUFFLES)]
    )
    shuffled = shuffled - fit.basis @ (fit.basis.T @ shuffled)
    most = np.abs(_scores(fit, candidates, shuffled)).max(axis=0, initial=0.0)
    return float(most.mean() + FAR * most.std())


def _best(fit: _Fit, features: Sequence[Feature]) -> Explanation | None:
    """Return the explanation to name, with those that are as good; None: nothing explains enough."""
    singles = _singles(fit, features)
    if not singles.about:
        return None
    scores = _scores(fit, singles, fit.errors)
    chance = _chance(fit, singles)
    if np.abs(scores).max() < chance:
        return None
    leaders = _leaders(singles, scores, chance / 2)
    before = _held_out(fit, fit.work, None)
    judged = [fitted for at in leaders for fitted in _judged(fit, before, _refined(fit, singles.about[at]))]
    judged += [
        fitted
        for pair in _pairs(fit, singles, scores, leaders, chance)
        for fitted in _judged(fit, before, pair)
    ]
    judged = [one for one in judged if one.explained > 0]
    if not judged:
        return None
    alone = max((one.explained for one in judged if len(one.terms) == 1), default=0.0)
    judged = [
        one
        for one in judged
        if len(one.terms) == 1 or 1 - one.explained <= (1 - BETTER) * (1 - alone)
    ]
    return _named(fit, judged)


def _named(fit: _Fit, judged: list[Explanation]) -> Explanation | None:
    """Choose among what explains about as much: a cause, then the simpler, then what explains most."""
    most = max(one.explained for one in judged)
    good = [one for one in judged if one.explained >= AS_GOOD * most]
    good.sort(key=lambda one: (one.rank, len(one.terms), one.slope, -one.explained))
    best, *rest = good
    also: list[Explanation] = []
    for one in rest:
        same = [best.families, *(other.families for other in also)]
        if one.families not in same and one.rank < BESIDE:
            also.append(one)
    return replace(best, also=tuple(also[:3]))


def _leaders(candidates: _Candidates, scores: Array, least: float) -> list[int]:
    """Return the best candidates, a split and a slope of each feature at most."""
    chosen: dict[tuple[tuple[str, str], bool], int] = {}
    for at in np.argsort(-np.abs(scores)):
        explanation = candidates.about[at]
        if abs(scores[at]) < least or len(chosen) >= 2 * FIRST:
            break
        chosen.setdefault((explanation.terms[0].feature.key, explanation.slope), int(at))
    return list(chosen.values())


def _refined(fit: _Fit, explanation: Explanation) -> Explanation:
    """Return the split with the best cut between its neighbours."""
    (term,) = explanation.terms
    distinct = np.unique(term.feature.values)
    if explanation.slope or len(distinct) <= MOST_CUTS + 1:
        return explanation
    middles = (distinct[1:] + distinct[:-1]) / 2
    at = int(np.searchsorted(middles, term.cut))
    reach = max(20, 2 * len(middles) // MOST_CUTS)
    near = middles[max(0, at - reach) : at + reach]
    near = near[:: max(1, len(near) // 200)]
    about = [replace(explanation, terms=(Term(term.feature, float(cut)),)) for cut in near]
    columns = np.column_stack([(term.feature.values > cut).astype(float) for cut in near])
    scores = np.abs(_scores(fit, _Candidates(columns, about), fit.errors))
    return about[int(scores.argmax())] if len(about) and scores.max() > 0 else explanation


def _pairs(
    fit: _Fit, singles: _Candidates, scores: Array, leaders: list[int], chance: float
) -> Iterator[Explanation]:
    """Yield the best pair of conditions that begins with each of the leading splits."""
    splits = [at for at, explanation in enumerate(singles.about) if not explanation.slope]
    columns = singles.columns[:, splits]
    for at in [at for at in leaders if not singles.about[at].slope][:FIRST]:
        first = _refined(fit, singles.about[at]).terms[0]
        first = replace(first, above=bool(scores[at] > 0))
        held = first.holds(first.feature.values)
        for above in (True, False):
            both = held[:, None] * (columns if above else 1 - columns)
            inside = both.sum(axis=0)
            enough = (inside >= FEWEST_SIDE) & (inside <= held.sum() - FEWEST_SIDE)
            if not enough.any():
                continue
            about = [
                Explanation(
                    (first, replace(singles.about[place].terms[0], above=above)), False, 0.0, False, 0.0
                )
                for place, good in zip(splits, enough, strict=True)
                if good
            ]
            joint = _scores(fit, _Candidates(both[:, enough], about), fit.errors)
            best = int(joint.argmax())
            if joint[best] >= chance:
                yield _second_refined(fit, about[best], held)


def _second_refined(fit: _Fit, pair: Explanation, held: Array) -> Explanation:
    first, second = pair.terms
    distinct = np.unique(second.feature.values)
    if len(distinct) <= MOST_CUTS + 1:
        return pair
    middles = (distinct[1:] + distinct[:-1]) / 2
    at = int(np.searchsorted(middles, second.cut))
    reach = max(20, 2 * len(middles) // MOST_CUTS)
    near = middles[max(0, at - reach) : at + reach]
    near = near[:: max(1, len(near) // 100)]
    about = [replace(pair, terms=(first, replace(second, cut=float(cut)))) for cut in near]
    columns = np.column_stack([held * one.terms[1].holds(second.feature.values) for one in about])
    scores = _scores(fit, _Candidates(columns, about), fit.errors)
    return about[int(scores.argmax())]


def _judged(fit: _Fit, before: tuple[float, float], explanation: Explanation) -> Iterator[Explanation]:
    """Yield the explanation with its effect, if it holds in both halves and is large and clear enough."""
    measure = explanation.measure([term.feature.values for term in explanation.terms])
    base = fit.work
    (term, *_) = explanation.terms
    if term.feature.rank == WORK and len(explanation.terms) == 1 and not explanation.slope:
        bend = np.clip(term.feature.values - term.cut, 0, None) / fit.usual
        base = independent(np.column_stack([base, bend / max(float(bend.max()), 1e-12)]))
    if base is not fit.work:
        before = _held_out(fit, base, None)
    whole = sum(_held_out(fit, fit.work, None))
    best: Explanation | None = None
    for additive in (True,) if explanation.slope else (False, True):
        column = measure / fit.usual if additive else measure
        size = float(np.abs(column).max()) or 1.0
        effects: list[float] = []
        after = _held_out(fit, base, column / size, effects)
        if effects[0] * effects[1] <= 0 or any(b >= a for a, b in zip(before, after, strict=True)):
            continue
        matrix = np.column_stack([base, column / size])
        costs = _lad(matrix, fit.times)
        effect = float(costs[-1]) / size
        explained = 1 - sum(after) / whole
        if (best is None or explained > best.explained) and _clear(fit, matrix, costs, measure, explanation.slope):
            best = replace(explanation, effect=effect, additive=additive, explained=explained)
    if best is not None and best.effect < 0 and not best.slope:
        best = _turned(best) if len(best.terms) == 1 else None
    elif best is not None and best.effect < 0:
        best = None
    if best is not None:
        yield best


def _turned(explanation: Explanation) -> Explanation:
    """Return a split whose other side is the slow one."""
    (term,) = explanation.terms
    effect = -explanation.effect
    if not explanation.additive:  # relative to the time of the side that is not slow
        effect = effect / max(1 - effect, 0.01)
    return replace(explanation, terms=(replace(term, above=not term.above),), effect=effect)


def _clear(fit: _Fit, matrix: Array, costs: Array, measure: Array, slope: bool) -> bool:
    """Return whether the effect is large for the part, and parts the steps."""
    added = matrix[:, -1] * costs[-1]
    expected = np.maximum(matrix @ costs - added, 0.05)
    inside = measure > 0
    if slope:
        return float(np.quantile(np.abs(added) / expected, 0.95)) >= 2 * LEAST_CHANGE
    change = float(np.median((np.abs(added) / np.minimum(expected, expected + added).clip(0.05))[inside]))
    if change < LEAST_CHANGE:
        return False
    size = float(np.median(added[inside]))
    left = (fit.times - expected) / size
    return float((left[inside] > 0.5).mean() - (left[~inside] > 0.5).mean()) >= LEAST_APART


def _held_out(
    fit: _Fit, base: Array, column: Array | None, effects: list[float] | None = None
) -> tuple[float, float]:
    """Return the absolute errors on each half of the blocks by a model that was fitted to the other half."""
    matrix = base if column is None else np.column_stack([base, column])
    errors = []
    for half in (0, 1):
        fitted = fit.blocks % 2 != half
        costs = _lad(matrix[fitted], fit.times[fitted], 8)
        if effects is not None:
            effects.append(float(costs[-1]))
        errors.append(float(np.abs(fit.times[~fitted] - matrix[~fitted] @ costs).sum()))
    return errors[0], errors[1]
