"""Search for what slow steps have in common: a split, a pair of splits, or a slope, fitted with the work.

The model is ``time = work + effect``, fitted by least absolute deviations of relative errors, which does not
mistake a cliff for work when most steps lie beyond it. A score test ranks the candidates
(``excess_candidates.py``). The search fits the best ones and judges them on held-out blocks of steps. It
accepts an explanation that scores far above the best score in shuffled errors and holds in both halves of
the blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from schedtrace.diagnose.excess_candidates import (
    FEWEST_SIDE,
    LOWEST,
    MOST_CUTS,
    NO_SLOPE,
    Candidates,
    Explanation,
    Term,
    candidate_scores,
    joint_scores,
    make_candidates,
    may_start_late,
    single_candidates,
)
from schedtrace.diagnose.excess_features import (
    BLOCK,
    CORRELATE,
    KINDS,
    WORK,
    Array,
    Feature,
    WorkFit,
    fit_lad,
    fit_work,
    independent,
    typical_error,
)

MOST_ROWS = 5_000
"""Most steps that a search examines; it samples evenly spaced blocks of a longer trace."""
FEWEST_ROWS = 60
"""Fewest steps that a search examines."""
MOST_NEAR = 150
"""Approximate maximum number of cuts of a feature in the second pass."""
SHUFFLES = 60
"""Number of random orders of the blocks that estimate what chance reaches."""
FAR = 4.5
"""Standard deviations above the mean of the best scores in shuffled errors. Chance exceeds this in about 1 of
570 searches, by the distribution of a maximum (E. J. Gumbel, 1958)."""
FAR_PAIR = 1.3
"""Multiple of that score that a pair of conditions must reach, because there are many more pairs."""
MOST_STARTS = 20
"""Most values of a feature at which a slope is tried to start."""
FIRST = 10
"""Number of leading candidates, each on a different feature, that the search fits and extends to pairs."""
AS_GOOD = 0.9
"""Least share of the best candidate's explained error at which another candidate ties with it."""
SURELY = 1.6
"""Standard errors by which the better of two candidates must lead, or they tie."""
RESOLVED = 1e-3
"""Smallest difference in relative error per block that a fit resolves."""
BETTER = 0.02
"""Least share of the errors that a second condition must remove."""
LEAST_CHANGE, LEAST_CHANGE_OF_WORK = 0.03, 0.1
"""Least relative change of the part's time; step-time models are no more accurate than that, and less
accurate in the tokens of the work itself."""
HALF = 0.5
"""Share of an effect that separates slow steps from the rest."""
MISPLACED = 2
"""Number of steps on the wrong side of a split that noise explains."""
NEAR, NEAR_FRAC = 8, 0.1
"""Fewest steps on either side of a cut that must show the jump, and their share of the smaller side."""
LEAST_APART = 0.3
"""Least lead of the slow steps over the rest in the share that exceeds half of the effect."""
CLEAR_ERROR, LEAST_CLEARLY_APART = 0.25, 0.6
"""Typical error, in units of the effect, up to which noise hardly blurs a split; and the least lead then."""
MOST_EXPLANATIONS, LEAST_SECOND = 3, 0.1
"""Most explanations of a part, and least share of the remaining errors that each further one removes."""


def sampled_rows(rows: int) -> Array:
    """Return the places of the steps to examine: all of them, or evenly spaced blocks."""
    if rows <= MOST_ROWS:
        return np.arange(rows)
    blocks = rows // BLOCK
    chosen = np.unique(np.linspace(0, blocks - 1, MOST_ROWS // BLOCK).astype(int))
    return (chosen[:, None] * BLOCK + np.arange(BLOCK)).ravel()


def search(fit: WorkFit, features: Sequence[Feature]) -> list[Explanation]:
    """Return the explanations of the excess over the work, the best first; empty: nothing explains it.

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
        added = np.column_stack([fit.columns, best.effect_column(fit.usual)])
        fit = fit_work(fit.times_us, independent(added))
        features = [feature for feature in features if feature.family_name not in best.feature_families]
    return explanations


def _multiplied(fit: WorkFit, explanation: Explanation) -> Explanation:
    """Return a jump as a share of the work that the steps without it show, if that predicts better."""
    measure = explanation.effect_units([term.feature.values for term in explanation.terms])
    without = measure == 0
    if without.sum() < FEWEST_ROWS:
        return explanation
    work = np.maximum(fit.work @ fit_lad(fit.work[without], fit.times[without]), 0.0)
    column = measure * work
    after = _held_out(fit, fit.work, column / (float(column.max()) or 1.0))
    if after.sum() >= explanation.errors.sum():
        return explanation
    return replace(explanation, multiplies=work * fit.usual)


def split(fit: WorkFit, measures: Sequence[Array], additive: Sequence[bool]) -> tuple[Array, Array, float]:
    """Return the time of the work and the time that each explanation adds, with the typical relative error.

    Both times are in microseconds per step.

    Args:
        fit: As for ``search``.
        measures: ``Explanation.effect_units`` of each explanation, times the work of which it is a share.
        additive: Whether each explanation's effect is in microseconds.
    """
    columns = [
        measure / fit.usual if add else measure for measure, add in zip(measures, additive, strict=True)
    ]
    sizes = [float(np.abs(column).max()) or 1.0 for column in columns]
    columns = [column / size for column, size in zip(columns, sizes, strict=True)]
    matrix = np.column_stack([fit.work, *columns])
    costs = fit_lad(matrix, fit.times, 60)
    count = fit.work.shape[1]
    base = (fit.work @ costs[:count]) * fit.usual
    added = [column * cost * fit.usual for column, cost in zip(columns, costs[count:], strict=True)]
    error = np.abs(fit.times - matrix @ costs)
    return base, np.column_stack(added) if added else np.zeros((len(fit.times), 0)), typical_error(error)


def _chance(fit: WorkFit, candidates: Candidates) -> float:
    """Return the score that chance hardly reaches, far above the largest scores of shuffled errors."""
    random = np.random.default_rng(0)
    order = [np.flatnonzero(fit.blocks == block) for block in np.unique(fit.blocks)]
    shuffled = np.column_stack(
        [
            fit.errors[np.concatenate([order[at] for at in random.permutation(len(order))])]
            for _ in range(SHUFFLES)
        ]
    )
    shuffled = shuffled - fit.basis @ (fit.basis.T @ shuffled)
    most = np.abs(candidate_scores(fit, candidates, shuffled)).max(axis=0, initial=0.0)
    return float(most.mean() + FAR * most.std())


def _best(fit: WorkFit, features: Sequence[Feature]) -> Explanation | None:
    """Return the explanation to name, with its ties in ``also``; None: nothing explains enough."""
    singles = single_candidates(fit, features)
    if not singles.about:
        return None
    scores = candidate_scores(fit, singles, fit.errors)
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
    judged = [fitted for fitted in judged if fitted.explained > 0]
    if not judged:
        return None
    single = [fitted for fitted in judged if len(fitted.terms) == 1]
    alone = max(single, key=_explained_frac, default=None)
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
    return _named(fit, before, features, judged) if judged else None


def _named(
    fit: WorkFit, before: Array, features: Sequence[Feature], judged: list[Explanation]
) -> Explanation:
    """Choose among ties: prefer a cause, then fewer conditions, then the larger explained error."""
    most = max(judged, key=_explained_frac)
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
    """Return a pair with the clock as a range of the clock if it holds for consecutive steps.

    The second condition then only marks one end of the range.
    """
    kinds = {term.feature.kind for term in explanation.terms}
    if "clock" not in kinds or kinds == {"clock"}:
        return explanation
    measure = explanation.effect_units([term.feature.values for term in explanation.terms])
    inside = np.flatnonzero(measure > 0)
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


def _explained_frac(explanation: Explanation) -> float:
    return explanation.explained


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
    """Replace each feature by the first of its family that explains as much."""
    for at, term in enumerate(explanation.terms):
        family = [feature for feature in features if feature.family_name == term.feature.family_name]
        place = [feature.identity for feature in family].index(term.feature.identity)
        for feature in family[:place]:
            terms = list(explanation.terms)
            terms[at] = replace(term, feature=feature)
            reworded = replace(explanation, terms=tuple(terms))
            if not explanation.slope:
                reworded = _pair_refined(fit, reworded) if at or len(terms) > 1 else _refined(fit, reworded)
            judged = [
                fitted for fitted in _judged(fit, before, reworded) if not _is_better(explanation, fitted)
            ]
            if judged:
                explanation = judged[0]
                break
    return explanation


def _leaders(candidates: Candidates, scores: Array, least: float) -> list[int]:
    """Return the places of the best candidates: per feature and sign of the score one split and one slope.

    A model of the work that took a jump for work leaves its largest errors, of either sign, elsewhere.
    """
    chosen: dict[tuple[tuple[str, str], bool, bool], int] = {}
    for at in np.argsort(-np.abs(scores)):
        explanation = candidates.about[at]
        if abs(scores[at]) < least or len(chosen) >= 2 * FIRST:
            break
        longer_above = bool(scores[at] > 0)
        chosen.setdefault((explanation.terms[0].feature.identity, explanation.slope, longer_above), int(at))
    return list(chosen.values())


def _refined(fit: WorkFit, explanation: Explanation) -> Explanation:
    """Return the split with the best cut near its own and a score of its sign, or the slope's best start.

    A slope that cannot start late stays as it is.
    """
    (term,) = explanation.terms
    if explanation.slope:
        return _started(fit, explanation) if may_start_late(term.feature) else explanation
    near = _near_cuts(term)
    own, around = (
        candidate_scores(fit, make_candidates(fit, [term.feature], [cuts], [NO_SLOPE]), fit.errors)
        for cuts in (np.array([term.cut]), near)
    )
    signed = np.sign(own[0] or 1.0) * around
    if not len(near) or signed.max() <= 0:
        return explanation
    return replace(explanation, terms=(replace(term, cut=float(near[int(signed.argmax())])),))


def _started(fit: WorkFit, explanation: Explanation) -> Explanation:
    """Return the slope that starts where it fits best."""
    (term,) = explanation.terms
    values = term.feature.values
    starts = np.unique(np.quantile(values[values < values.max()], np.linspace(LOWEST, 1, MOST_STARTS)))

    def absolute_error(start: float) -> float:
        column = np.clip(values - start, 0, None) / fit.usual
        matrix = np.column_stack([fit.work, column / column.max()])
        return float(np.abs(fit.times - matrix @ fit_lad(matrix, fit.times, 8)).sum())

    return replace(explanation, terms=(replace(term, cut=float(min(starts, key=absolute_error))),))


def _pairs(
    fit: WorkFit, singles: Candidates, scores: Array, leaders: list[int], chance: float
) -> Iterator[Explanation]:
    """Yield the best pairs of conditions whose first condition is a leading split."""
    for at in [at for at in leaders if not singles.about[at].slope][:FIRST]:
        first = _refined(fit, singles.about[at]).terms[0]
        first = replace(first, above=bool(scores[at] > 0))
        held = first.mask(first.feature.values)
        own = first.feature
        joined = []  # two different correlates are no pair
        for place, single in enumerate(singles.about):
            added = single.terms[0].feature
            are_correlates = own.identity != added.identity and own.role == added.role == CORRELATE
            if not single.slope and not are_correlates:
                joined.append(place)
        splits = singles.at(np.array(joined, int))
        for above in (True, False):
            inside, joint = joint_scores(fit, splits, held, above)
            enough = (inside >= FEWEST_SIDE) & (inside <= held.sum() - FEWEST_SIDE)
            joint = np.where(enough, joint, 0.0)
            if len(joint) and joint.max() >= FAR_PAIR * chance:
                second = replace(splits.about[int(joint.argmax())].terms[0], above=above)
                yield _pair_refined(fit, Explanation((first, second), False, 0.0, False, 0.0))


def _pair_refined(fit: WorkFit, pair: Explanation) -> Explanation:
    """Return the pair with the best cut of the second condition, then of the first."""
    for at in (1, 0):
        term, partner = pair.terms[at], pair.terms[1 - at]
        held = partner.mask(partner.feature.values)
        cuts = _near_cuts(term)
        if not len(cuts):
            continue
        splits = make_candidates(fit, [term.feature], [cuts], [NO_SLOPE])
        inside, scores = joint_scores(fit, splits, held, term.above)
        scores = np.where((inside >= FEWEST_SIDE) & (inside < held.sum()), scores, 0.0)
        if scores.max() > 0:
            better = replace(term, cut=float(cuts[int(scores.argmax())]))
            pair = replace(pair, terms=(better, partner) if at == 0 else (partner, better))
    return pair


def _near_cuts(term: Term) -> Array:
    """Return the cuts near a term's own; empty: its feature has a single value."""
    distinct = np.unique(term.feature.values)
    middles = (distinct[1:] + distinct[:-1]) / 2
    at = int(np.searchsorted(middles, term.cut))
    reach = max(20, 2 * len(middles) // MOST_CUTS)
    near = middles[max(0, at - reach) : at + reach]
    return near[:: max(1, len(near) // MOST_NEAR)]


def _judged(fit: WorkFit, before: Array, explanation: Explanation) -> Iterator[Explanation]:
    """Yield the explanation with its effect if it holds in both halves and is large and distinct enough."""
    measure = explanation.effect_units([term.feature.values for term in explanation.terms])
    best: Explanation | None = None
    for additive in (True,) if explanation.slope else (False, True):
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
    if (
        best is not None
        and best.weakest_role == WORK
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


def _more_than_a_bend(fit: WorkFit, explanation: Explanation, measure: Array) -> bool:
    """Return whether a split of a work feature explains more than a bend of its cost at the same cuts."""
    bends = [
        np.clip(term.feature.values - term.cut, 0, None) / fit.usual
        for term in explanation.terms
        if term.feature.role == WORK
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

    None: the effect is small for the part, does not separate the steps or does not jump at a cut.
    """
    added = matrix[:, -1] * costs[-1]
    expected = np.maximum(matrix @ costs - added, 0.05)
    if explanation.slope:
        return 0 if float(np.quantile(np.abs(added) / expected, 0.95)) >= 2 * LEAST_CHANGE else None
    inside = matrix[:, -1] > 0
    usual = np.minimum(expected, expected + added).clip(0.05)
    least = LEAST_CHANGE_OF_WORK if explanation.weakest_role == WORK else LEAST_CHANGE
    if float(np.median((np.abs(added) / usual)[inside])) < least:
        return None
    left = (fit.times - expected) / float(np.median(added[inside]))
    longer = left > HALF
    is_clear = typical_error(left - inside) <= CLEAR_ERROR
    if longer[inside].mean() - longer[~inside].mean() < (LEAST_CLEARLY_APART if is_clear else LEAST_APART):
        return None
    if _names_request(explanation) and longer[~inside].sum() > longer[inside].sum():
        return None  # most slow steps do without that request
    jumps = all(_jumps(left, explanation.terms, at) for at in range(len(explanation.terms)))
    return int((longer != inside).sum()) if jumps else None


def _jumps(left: Array, terms: Sequence[Term], at: int) -> bool:
    """Return whether the steps nearest to a cut differ by half of the effect; if not, the cost only bends.

    Args:
        left: Excess over the work, in units of the effect.
        terms: Conditions of the split.
        at: Place of the condition to check; steps that fail the remaining conditions are left out.
    """
    among = np.ones(len(left), bool)
    for place, term in enumerate(terms):
        if place != at:
            among &= term.mask(term.feature.values) > 0
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
    """Return whether a split leaves clearly fewer steps on the wrong side than its rival."""
    return not rival.slope and explanation.misplaced <= rival.misplaced / 2 - MISPLACED
