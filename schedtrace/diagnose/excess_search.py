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

from schedtrace.timeline.excess import BESIDE, KINDS, WORK, Array, Feature, independent

MOST_ROWS = 5_000
"""Steps of a search; of more, evenly spaced blocks are looked at."""
FEWEST_ROWS = 60
FEWEST_OF_SLOPE = 3
"""Fewest different values that a time can grow with."""
FEWEST_SIDE = 5
"""Fewest steps on either side of a split."""
BLOCK = 25
"""Steps of a block, half of which are fitted and the others predicted; fewer of a short trace."""
FEWEST_BLOCKS = 24
MOST_CUTS = 24
"""Cuts of a feature that are tried at first; the best one is then looked for between its neighbours."""
MOST_NEAR = 150
"""Cuts of a feature that are tried then."""
SHUFFLES = 60
FAR = 4.5
"""Standard deviations above the mean of what shuffled errors reach: chance reaches it in about one of 570
searches, by the distribution of a maximum (E. J. Gumbel, 1958)."""
FAR_PAIR = 1.3
"""Multiple of that score from which a pair of conditions, of which there are many more, is looked at."""
BOUND = 3.0
"""Errors beyond so many typical ones count no more than this."""
FIRST = 10
"""Candidates, each of another feature, that are fitted, and whose halves are joined with others."""
AS_GOOD = 0.9
"""Share of what the best candidate explains, from which another may be as good."""
SURELY = 1.6
"""Standard errors by which one has to predict better than another to be no tie."""
RESOLVED = 1e-3
"""Relative error of a block that a fit resolves."""
BETTER = 0.02
"""Share of the errors that a second condition must take away."""
LEAST_CHANGE, LEAST_CHANGE_OF_WORK = 0.03, 0.1
"""Least relative change of the part's time: models of step times are not more exact, those of the work's own
tokens less so."""
HALF = 0.5
"""Part of an effect that parts a slow step from the others."""
MISPLACED = 2
"""Steps on the wrong side of a split that may be noise."""
NEAR, NEAR_FRAC = 8, 0.1
"""Steps on either side of a cut in which the jump has to be seen, and their share of the smaller side."""
LEAST_APART = 0.3
"""Share of slow steps beyond half of the effect, less that of the other steps."""
MOST_EXPLANATIONS, LEAST_SECOND = 3, 0.1
"""Explanations of a part, and least share of the errors that are left which a further one takes away."""
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
    """Relative to a usual time or, if ``additive``, in microseconds; of a slope by the feature's unit."""
    additive: bool
    explained: float
    """Share of the errors on steps that were not fitted that goes away."""
    also: tuple["Explanation", ...] = field(default=(), repr=False)
    """What explains as much."""
    misplaced: int = 0
    """Steps on the slow side that are not longer by half of the effect, and others that are; 0 of a slope."""
    errors: Array = field(default_factory=lambda: np.zeros(0), repr=False)
    """Relative errors that are left, added up over each block of steps."""

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
        if best is None or (explanations and best.explained < LEAST_SECOND):
            break
        explanations.append(best)
        measure = best.measure([term.feature.values for term in best.terms])
        added = independent(np.column_stack([added, measure * (1 if best.additive else fit.usual)]))
        features = [feature for feature in features if feature.family not in best.families]
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
    sizes = [float(np.abs(column).max()) or 1.0 for column in columns]
    columns = [column / size for column, size in zip(columns, sizes, strict=True)]
    matrix = np.column_stack([fit.work, *columns])
    costs = _lad(matrix, fit.times, 60)
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
    costs = np.zeros(matrix.shape[1])
    for _ in range(rounds):
        weighted = matrix * weight[:, None]
        square = weighted.T @ matrix
        square += np.diag(1e-9 * np.diag(square) + 1e-300)
        costs = np.linalg.solve(square, weighted.T @ target)
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
        if feature.kind not in ("request", "first_use") and len(np.unique(values)) >= FEWEST_OF_SLOPE:
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
    """Return how far the errors lean towards each candidate: about a squared standard score with a sign."""
    matrix = candidates.columns
    inside = fit.basis.T @ matrix
    norm = (matrix**2).sum(axis=0)
    rest = norm - (inside**2).sum(axis=0)
    lean = matrix.T @ errors
    new = rest > LEAST_NEW * norm
    rest = np.where(new, rest, 1.0)
    power = np.mean(errors**2, axis=0) if errors.ndim > 1 else float(np.mean(errors**2))
    scores = np.sign(lean) * lean**2 / (rest[:, None] if errors.ndim > 1 else rest) / np.maximum(power, 1e-12)
    return np.where(new[:, None] if errors.ndim > 1 else new, scores, 0.0)


def _chance(fit: _Fit, candidates: _Candidates) -> float:
    """Return the score that no candidate reaches by chance: far above the largest ones of shuffled errors."""
    random = np.random.default_rng(0)
    order = [np.flatnonzero(fit.blocks == block) for block in np.unique(fit.blocks)]
    shuffled = np.column_stack(
        [
            fit.errors[np.concatenate([order[at] for at in random.permutation(len(order))])]
            for _ in range(SHUFFLES)
        ]
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
    if np.abs(scores).max() < chance / 2:
        return None
    leaders = _leaders(singles, scores, chance / 2)
    before = _held_out(fit, fit.work, None)
    judged = [
        fitted
        for at in leaders
        if abs(scores[at]) >= chance
        for fitted in _judged(fit, before, _refined(fit, singles.about[at]))
    ]
    judged += [
        fitted
        for pair in _pairs(fit, singles, scores, leaders, chance)
        for fitted in _judged(fit, before, pair)
    ]
    judged = [one for one in judged if one.explained > 0]
    if not judged:
        return None
    alone = max((one for one in judged if len(one.terms) == 1), key=lambda one: one.explained, default=None)
    judged = [one for one in judged if len(one.terms) == 1 or alone is None or _is_needed(one, alone)]
    return _named(fit, before, features, judged) if judged else None


def _named(fit: _Fit, before: Array, features: Sequence[Feature], judged: list[Explanation]) -> Explanation:
    """Choose among what explains as much: a cause, then the simpler, then what explains most."""
    most = max(judged, key=lambda one: one.explained)
    good = [one for one in judged if one.explained >= AS_GOOD * most.explained and not _is_better(most, one)]
    good = [one for one in good if not any(_parts_better(other, one) for other in good)]
    good = [_in_usual_words(fit, before, features, one) for one in good]
    good.sort(key=_order)
    best, *rest = good
    also: list[Explanation] = []
    is_trait = any(term.feature.kind in ("trait", "lora") for term in best.terms)
    for one in rest:
        same = [best.families, *(other.families for other in also)]
        if one.families not in same and one.rank < BESIDE and not (is_trait and _names_request(one)):
            also.append(one)
    return replace(best, also=tuple(also[:3]))


def _names_request(explanation: Explanation) -> bool:
    return any(term.feature.kind == "request" for term in explanation.terms)


def _order(explanation: Explanation) -> tuple[int, int, bool, bool, int, float]:
    """Return the order of ties: what can be a cause first, what a request asks for before its name."""
    beside = explanation.rank if explanation.rank == BESIDE else 0
    place = max(list(KINDS).index(term.feature.kind) for term in explanation.terms) if beside else 0
    return (
        explanation.rank,
        len(explanation.terms),
        explanation.slope,
        _names_request(explanation),
        place,
        -explanation.explained,
    )


def _in_usual_words(
    fit: _Fit, before: Array, features: Sequence[Feature], explanation: Explanation
) -> Explanation:
    """Return the same explanation by the first features of their families that explain as much."""
    for at, term in enumerate(explanation.terms):
        earlier = [one for one in features if one.family == term.feature.family]
        for feature in earlier[: [one.key for one in earlier].index(term.feature.key)]:
            terms = list(explanation.terms)
            terms[at] = replace(term, feature=feature)
            other = replace(explanation, terms=tuple(terms))
            if not explanation.slope:
                other = _pair_refined(fit, other) if at or len(terms) > 1 else _refined(fit, other)
            judged = [one for one in _judged(fit, before, other) if not _is_better(explanation, one)]
            if judged:
                explanation = judged[0]
                break
    return explanation


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
    if explanation.slope:
        return explanation
    near = _near_cuts(term)
    about = [replace(explanation, terms=(Term(term.feature, float(cut)),)) for cut in near]
    columns = np.column_stack([(term.feature.values > cut).astype(float) for cut in near])
    scores = np.abs(_scores(fit, _Candidates(columns, about), fit.errors))
    return about[int(scores.argmax())] if about and scores.max() > 0 else explanation


def _pairs(
    fit: _Fit, singles: _Candidates, scores: Array, leaders: list[int], chance: float
) -> Iterator[Explanation]:
    """Yield the best pair of conditions that begins with each of the leading splits."""
    for at in [at for at in leaders if not singles.about[at].slope][:FIRST]:
        first = _refined(fit, singles.about[at]).terms[0]
        first = replace(first, above=bool(scores[at] > 0))
        held = first.holds(first.feature.values)
        splits = [
            place
            for place, single in enumerate(singles.about)
            if not single.slope and _may_join(first.feature, single.terms[0].feature)
        ]
        columns = singles.columns[:, splits]
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
            if joint[best] >= FAR_PAIR * chance:
                yield _pair_refined(fit, about[best])


def _may_join(first: Feature, second: Feature) -> bool:
    """Return whether two features may stand together: of what only goes with slow steps, one is enough."""
    return first.key == second.key or not first.rank == second.rank == BESIDE


def _pair_refined(fit: _Fit, pair: Explanation) -> Explanation:
    """Return the pair with the best cuts of the second condition, and then of the first."""
    for at in (1, 0):
        term, other = pair.terms[at], pair.terms[1 - at]
        held = other.holds(other.feature.values)
        cuts = _near_cuts(term)
        if not len(cuts):
            continue
        columns = np.column_stack(
            [held * replace(term, cut=float(cut)).holds(term.feature.values) for cut in cuts]
        )
        inside = columns.sum(axis=0)
        scores = _scores(fit, _Candidates(columns, [pair] * len(cuts)), fit.errors)
        scores = np.where((inside >= FEWEST_SIDE) & (inside < held.sum()), scores, 0.0)
        if scores.max() > 0:
            better = replace(term, cut=float(cuts[int(scores.argmax())]))
            pair = replace(pair, terms=(better, other) if at == 0 else (other, better))
    return pair


def _near_cuts(term: Term) -> Array:
    """Return the cuts around a term's own; none where all have been tried."""
    distinct = np.unique(term.feature.values)
    middles = (distinct[1:] + distinct[:-1]) / 2
    at = int(np.searchsorted(middles, term.cut))
    reach = max(20, 2 * len(middles) // MOST_CUTS)
    near = middles[max(0, at - reach) : at + reach]
    return near[:: max(1, len(near) // MOST_NEAR)]


def _judged(fit: _Fit, before: Array, explanation: Explanation) -> Iterator[Explanation]:
    """Yield the explanation with its effect, if it holds in both halves and is large and clear enough."""
    measure = explanation.measure([term.feature.values for term in explanation.terms])
    best: Explanation | None = None
    for additive in (True,) if explanation.slope else (False, True):
        column = measure / fit.usual if additive else measure
        size = float(np.abs(column).max()) or 1.0
        effects: list[float] = []
        after = _held_out(fit, fit.work, column / size, effects)
        if effects[0] * effects[1] <= 0 or any(after[h::2].sum() >= before[h::2].sum() for h in (0, 1)):
            continue
        matrix = np.column_stack([fit.work, column / size])
        costs = _lad(matrix, fit.times)
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
    if (
        best is not None
        and best.rank == WORK
        and not best.slope
        and not _more_than_a_bend(fit, best, measure)
    ):
        best = None
    if best is not None and best.effect < 0 and not best.slope:
        best = _turned(best) if len(best.terms) == 1 else None
    elif best is not None and best.effect < 0:
        best = None
    if best is not None:
        yield best


def _more_than_a_bend(fit: _Fit, explanation: Explanation, measure: Array) -> bool:
    """Return whether a split of what is work explains more than a bend at its cuts of what that costs."""
    bends = [
        np.clip(term.feature.values - term.cut, 0, None) / fit.usual
        for term in explanation.terms
        if term.feature.rank == WORK
    ]
    bends = [bend / max(float(bend.max()), 1e-12) for bend in bends]
    base = independent(np.column_stack([fit.work, *bends]))
    column = measure / fit.usual if explanation.additive else measure
    effects: list[float] = []
    before, after = _held_out(fit, base, None), _held_out(fit, base, column, effects)
    same = all(effect / explanation.effect >= HALF for effect in effects)
    return same and all(after[half::2].sum() < before[half::2].sum() for half in (0, 1))


def _turned(explanation: Explanation) -> Explanation:
    """Return a split whose other side is the slow one."""
    (term,) = explanation.terms
    effect = -explanation.effect
    if not explanation.additive:  # relative to the time of the side that is not slow
        effect = effect / max(1 - effect, 0.01)
    return replace(explanation, terms=(replace(term, above=not term.above),), effect=effect)


def _misplaced(fit: _Fit, matrix: Array, costs: Array, explanation: Explanation) -> int | None:
    """Return how many steps are on the wrong side of a split.

    None: the effect is small for the part, does not part the steps or, at a cut, is no jump.
    """
    added = matrix[:, -1] * costs[-1]
    expected = np.maximum(matrix @ costs - added, 0.05)
    if explanation.slope:
        return 0 if float(np.quantile(np.abs(added) / expected, 0.95)) >= 2 * LEAST_CHANGE else None
    inside = matrix[:, -1] > 0
    usual = np.minimum(expected, expected + added).clip(0.05)
    least = LEAST_CHANGE_OF_WORK if explanation.rank == WORK else LEAST_CHANGE
    if float(np.median((np.abs(added) / usual)[inside])) < least:
        return None
    left = (fit.times - expected) / float(np.median(added[inside]))
    longer = left > HALF
    if longer[inside].mean() - longer[~inside].mean() < LEAST_APART:
        return None
    jumps = all(_jumps(left, explanation.terms, at) for at in range(len(explanation.terms)))
    return int((longer != inside).sum()) if jumps else None


def _jumps(left: Array, terms: Sequence[Term], at: int) -> bool:
    """Return whether steps nearest to a cut differ by half of the effect: else what work costs bends there.

    Args:
        left: Excess over the work, in units of the effect.
        terms: Conditions; steps that do not meet the others are left out.
        at: Which of them.
    """
    among = np.ones(len(left), bool)
    for place, term in enumerate(terms):
        if place != at:
            among &= term.holds(term.feature.values) > 0
    values, errors = terms[at].feature.values[among], left[among]
    below, above = values <= terms[at].cut, values > terms[at].cut
    near = max(NEAR, int(NEAR_FRAC * min(below.sum(), above.sum())))
    lower = errors[below][np.argsort(-values[below], kind="stable")[:near]]
    upper = errors[above][np.argsort(values[above], kind="stable")[:near]]
    return len(lower) > 0 and len(upper) > 0 and abs(float(np.median(upper) - np.median(lower))) >= HALF


def _held_out(fit: _Fit, base: Array, column: Array | None, effects: list[float] | None = None) -> Array:
    """Return each block's absolute errors by a model that was fitted to the other half of the blocks."""
    matrix = base if column is None else np.column_stack([base, column])
    errors = np.zeros(len(fit.times))
    for half in (0, 1):
        fitted = fit.blocks % 2 != half
        costs = _lad(matrix[fitted], fit.times[fitted], 8)
        if effects is not None:
            effects.append(float(costs[-1]))
        errors[~fitted] = np.abs(fit.times[~fitted] - matrix[~fitted] @ costs)
    return np.bincount(fit.blocks, errors)


def _is_better(one: Explanation, other: Explanation) -> bool:
    """Return whether an explanation predicts better, over blocks of steps that were not fitted."""
    gain = other.errors - one.errors
    if float(gain.mean()) < RESOLVED:
        return False
    return float(gain.sum()) > SURELY * float(np.sqrt((gain**2).sum()))


def _is_needed(pair: Explanation, alone: Explanation) -> bool:
    """Return whether a second condition explains more than the best single one, or parts the steps better."""
    surely = _is_better(pair, alone) or _parts_better(pair, alone)
    return surely and pair.explained >= alone.explained + BETTER


def _parts_better(one: Explanation, other: Explanation) -> bool:
    """Return whether a split leaves clearly fewer steps on the wrong side."""
    return not other.slope and one.misplaced <= other.misplaced / 2 - MISPLACED
