"""Candidates of the search for what slow steps have in common: splits, pairs of splits, and slopes.

A score test ranks the candidates: it projects the work out of both a candidate and the errors of the
work-only model, and measures how strongly the two correlate. Candidates that score far above the best score
in shuffled errors are then fitted (``excess.py``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.sparse import block_diag, coo_array, csr_array

from schedtrace.diagnose.excess_features import CORRELATE, Feature, Term
from schedtrace.diagnose.excess_work import Array, WorkFit, fit_lad

LOWEST = 0.02
"""Quantile of a feature at which its slope starts."""
LATER = (0.25, 0.5, 0.75)
"""Further quantiles of a feature at which a slope may start: host work that runs in parallel to the forward
pass costs nothing until it takes longer than the pass."""
FEWEST_OF_SLOPE = 3
"""Minimum number of distinct values of a feature that can show a slope."""
UNGRADED = ("request", "first_use", "first_size", "period")
"""Features without a slope: flags, and positions."""
FEWEST_SIDE = 5
"""Minimum number of steps on either side of a split."""
MOST_CUTS = 24
"""Maximum number of cuts of a feature in the first pass; the second pass refines the best cut between its
neighbours."""
BESIDE = ("trait", "lora", "encoder", "grammars", "compiling")
"""Features that count what adds work, on the host or on the device, in parallel to the forward pass."""
NO_SLOPE = np.zeros(0)
"""Starts of slopes for a feature without slopes."""
LEAST_NEW = 0.01
"""Minimum share of a candidate that must be independent of the work."""
MOST_NEAR = 150
"""Approximate maximum number of cuts of a feature in the second pass."""
SHUFFLES = 60
"""Number of random orders of the blocks from which the scores that chance reaches are estimated."""
FAR = 4.5
"""Number of standard deviations by which a score must exceed the mean of the best scores in shuffled errors.
Chance exceeds this in about 1 of 570 searches, by the distribution of a maximum (E. J. Gumbel, 1958)."""
FAR_PAIR = 1.3
"""Minimum score of a pair, as a multiple of the minimum score of a single condition; it is larger because
there are many more pairs."""
MOST_STARTS = 20
"""Maximum number of a feature's values that are tried as the start of a slope."""
SIZES_OF_BATCH = ("batch", "decode_tokens", "running")
"""Features that count a batch's requests or tokens. Their jump may grow beyond the cut: without a CUDA graph,
each further request may cost more."""
FIRST = 10
"""Maximum number of leading splits that the search extends to pairs; it fits twice as many candidates."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """Conditions that go with an excess, and the size of their effect."""

    terms: tuple[Term, ...]
    """Conditions that hold together: one or two for a split; one for a slope, which starts at its ``cut``."""
    slope: bool
    """Whether the time grows with the feature instead of jumping at a cut."""
    effect: float
    """Added time: a share of the usual time or, if ``additive``, microseconds; for a slope, microseconds per
    unit of the feature."""
    additive: bool
    """Whether ``effect`` is in microseconds."""
    explained: float
    """Share of the held-out error that the effect removes."""
    also: tuple["Explanation", ...] = field(default=(), repr=False)
    """Explanations that explain equally much."""
    misplaced: int = 0
    """Number of steps on the wrong side of the split, judged at half of the effect; 0 for a slope."""
    errors: Array = field(default_factory=lambda: np.zeros(0), repr=False)
    """Remaining relative error, summed over each block of steps."""
    multiplies: Array | None = field(default=None, repr=False)
    """Time of each step's work in microseconds, of which a jump adds a share; None if it adds a constant
    time."""
    growth: float = 0.0
    """Share of the jump by which the effect of a split grows per unit of the feature beyond the cut."""

    @property
    def weakest_role(self) -> int:
        """Largest role of the features: ``CORRELATE`` if any feature is one."""
        return max(term.feature.role for term in self.terms)

    @property
    def feature_families(self) -> frozenset[str]:
        """Families of the features."""
        return frozenset(term.feature.family_name for term in self.terms)

    @property
    def added_units(self) -> Array:
        """Each step's added time in units of ``effect``; for a split, 0.0 where the terms do not hold."""
        beyond = np.clip(self.terms[0].feature.values - self.terms[0].cut, 0, None)
        if self.slope:
            return beyond
        return np.prod([term.mask for term in self.terms], axis=0) * (1 + self.growth * beyond)

    def added_time(self, usual: Array) -> Array:
        """Return the time that the effect adds to each step, up to a factor.

        Args:
            usual: Usual time of each step's work in microseconds.
        """
        if self.multiplies is not None:
            return self.added_units * self.multiplies
        return self.added_units if self.additive else self.added_units * usual


@dataclass(frozen=True, eq=False)
class Candidates:
    """Splits and slopes, each of which stands for a column with a value for each step.

    The columns of thousands of cuts are never stored: sums over a column are made up of the sums over the
    steps between neighbouring cuts of a feature.
    """

    pieces: csr_array
    """Matrix of pieces (rows) and steps (columns): the steps between two cuts, with a 1 for each, or the
    values of a slope."""
    holds: csr_array
    """Matrix of candidates (rows) and pieces (columns), with a 1 for each piece in a candidate's column."""
    about: list[Explanation]
    """Explanations without an effect, one for each candidate."""

    def sums(self, columns: Array) -> Array:
        """Return the products of the candidates' columns (rows) with ``columns``."""
        return np.asarray(self.holds @ (self.pieces @ columns))

    def norms(self) -> Array:
        """Return the squared length of each candidate's column."""
        return np.asarray(self.holds @ self.pieces.power(2).sum(axis=1))

    def at(self, places: Array) -> "Candidates":
        """Return the candidates at these places."""
        return replace(self, holds=self.holds[places], about=[self.about[place] for place in places])


def proposals(fit: WorkFit, features: Sequence[Feature]) -> list[Explanation]:
    """Return the candidates that score far above chance, with their best cuts: single ones, then pairs."""
    singles = _single_candidates(fit, features)
    if not singles.about:
        return []
    scores = _scores(fit, singles, fit.errors)
    chance = _chance(fit, singles)
    if np.abs(scores).max() < chance / 2:
        return []
    leaders = {
        at: refined(fit, singles.about[at])
        for at in _leaders(singles, scores, chance / 2)
        if abs(scores[at]) >= chance or not singles.about[at].slope
    }
    splits = [
        replace(leader.terms[0], above=bool(scores[at] > 0))
        for at, leader in leaders.items()
        if not leader.slope
    ]
    return [
        *(leader for at, leader in leaders.items() if abs(scores[at]) >= chance),
        *(growing for leader in leaders.values() if (growing := _growing(fit, leader)) is not None),
        *_pairs(fit, singles, splits[:FIRST], FAR_PAIR * chance),
    ]


def _single_candidates(fit: WorkFit, features: Sequence[Feature]) -> Candidates:
    """Return every split and slope of each feature."""
    cuts, starts = [], []
    for feature in features:
        values, distinct = feature.values, np.unique(feature.values)
        low, most = np.quantile(values, LOWEST), values.max()
        if feature.kind in UNGRADED or len(distinct) < FEWEST_OF_SLOPE or most <= low:
            starts.append(NO_SLOPE)
        else:  # only what adds to a step's work starts late; for the work itself, the model bends
            later = np.quantile(values, LATER, method="nearest") if feature.kind in BESIDE else NO_SLOPE
            starts.append(np.unique([low, *later[later < most]]))
        if len(distinct) > MOST_CUTS + 1:
            distinct = np.unique(np.quantile(values, np.linspace(0, 1, MOST_CUTS + 2), method="nearest"))
        cuts.append(np.zeros(0) if feature.kind == "length" else (distinct[1:] + distinct[:-1]) / 2)
    candidates = _candidates(fit, features, cuts, starts)
    norms = candidates.norms()
    slopes = np.array([explanation.slope for explanation in candidates.about], bool)
    enough = (norms >= FEWEST_SIDE) & (len(fit.times) - norms >= FEWEST_SIDE) | slopes
    return candidates.at(np.flatnonzero(enough))


def _candidates(
    fit: WorkFit, features: Sequence[Feature], cuts: Sequence[Array], starts: Sequence[Array]
) -> Candidates:
    """Return the splits of each feature at its cuts, in increasing order, and its slopes from its starts."""
    values, rows, steps = [np.zeros(0)], [np.zeros(0, int)], [np.zeros(0, int)]
    holds = [np.zeros((0, 0))]
    about: list[Explanation] = []
    for feature, at_cuts, at_starts in zip(features, cuts, starts, strict=True):
        if len(at_cuts):
            passed: Array = np.searchsorted(at_cuts, feature.values)  # number of cuts below the value
            beyond = np.flatnonzero(passed)
            values.append(np.ones(len(beyond)))
            rows.append(len(about) + passed[beyond] - 1)
            steps.append(beyond)
            holds.append(np.triu(np.ones((len(at_cuts), len(at_cuts)))))
            about += [Explanation((Term(feature, float(cut)),), False, 0.0, False, 0.0) for cut in at_cuts]
        for low in at_starts:
            measure = np.clip(feature.values - low, 0, None) / (feature.values.max() - low)
            values.append(measure / fit.usual * np.median(fit.usual))
            rows.append(np.full(len(measure), len(about)))
            steps.append(np.arange(len(measure)))
            holds.append(np.ones((1, 1)))
            about.append(Explanation((Term(feature, float(low)),), True, 0.0, True, 0.0))
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(steps)))
    pieces = csr_array(entries, shape=(len(about), len(fit.times)))
    return Candidates(pieces, csr_array(block_diag([coo_array(block) for block in holds])), about)


def _scores(fit: WorkFit, candidates: Candidates, errors: Array) -> Array:
    """Return how strongly each candidate correlates with errors: about a squared standard score, with sign.

    Args:
        fit: Model of the work.
        candidates: Candidates to score.
        errors: Error of each step, or a matrix with one column for each of several sets of errors.
    """
    inside, lean = candidates.sums(fit.basis), candidates.sums(errors)
    return _standardized(candidates.norms(), inside, lean, np.mean(errors**2, axis=0))


def _joint_scores(fit: WorkFit, splits: Candidates, held: Array, above: bool) -> tuple[Array, Array]:
    """Return, for each split, the number of its steps that also meet a condition, and the pair's score.

    Args:
        fit: Model of the work.
        splits: Candidates without a slope.
        held: 1.0 for each step that meets the condition, else 0.0.
        above: Whether a split selects the steps above its cut; otherwise it selects those below.
    """
    columns = held[:, None] * np.column_stack([np.ones(len(held)), fit.basis, fit.errors])
    sums = splits.sums(columns)
    if not above:
        sums = columns.sum(axis=0) - sums
    count, inside, lean = sums[:, 0], sums[:, 1:-1], sums[:, -1]
    return count, _standardized(count, inside, lean, np.mean(fit.errors**2))


def _standardized(norms: Array, inside: Array, lean: Array, power: Array | np.floating) -> Array:
    """Return squared standard scores with the sign of ``lean``; 0 for a column within the span of the work.

    Args:
        norms: Squared length of each column.
        inside: Products of each column with the columns of ``WorkFit.basis``.
        lean: Products of each column with errors.
        power: Mean square of these errors.
    """
    rest = norms - (inside**2).sum(axis=1)
    new = rest > LEAST_NEW * norms
    rest = np.where(new, rest, 1.0)
    if lean.ndim > 1:
        rest, new = rest[:, None], new[:, None]
    return np.where(new, np.sign(lean) * lean**2 / rest / np.maximum(power, 1e-12), 0.0)


def _chance(fit: WorkFit, candidates: Candidates) -> float:
    """Return a score that chance hardly ever reaches: far above the largest scores of shuffled errors."""
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


def _leaders(candidates: Candidates, scores: Array, least: float) -> list[int]:
    """Return the places of the best candidates: one split and one slope per feature and sign of the score.

    If the model of the work has absorbed a jump, its largest errors, of either sign, are elsewhere.
    """
    chosen: dict[tuple[tuple[str, str], bool, bool], int] = {}
    for at in np.argsort(-np.abs(scores)):
        explanation = candidates.about[at]
        if abs(scores[at]) < least or len(chosen) >= 2 * FIRST:
            break
        longer_above = bool(scores[at] > 0)
        chosen.setdefault((explanation.terms[0].feature.identity, explanation.slope, longer_above), int(at))
    return list(chosen.values())


def refined(fit: WorkFit, explanation: Explanation) -> Explanation:
    """Move a split's cut to the best one nearby with a score of the same sign, or a slope to its best start.

    A slope that cannot start late stays unchanged. In a pair, the second condition's cut is moved first.
    """
    if len(explanation.terms) > 1:
        return _refined_pair(fit, explanation)
    (term,) = explanation.terms
    if explanation.slope:
        return _started(fit, explanation) if term.feature.kind in BESIDE else explanation
    near = _near_cuts(term)
    own, around = (
        _scores(fit, _candidates(fit, [term.feature], [cuts], [NO_SLOPE]), fit.errors)
        for cuts in (np.array([term.cut]), near)
    )
    signed = np.sign(own[0] or 1.0) * around
    if not len(near) or signed.max() <= 0:
        return explanation
    return replace(explanation, terms=(replace(term, cut=float(near[int(signed.argmax())])),))


def _growing(fit: WorkFit, explanation: Explanation) -> Explanation | None:
    """Return a split by batch size with a jump that grows beyond the cut; None if the jump does not grow.

    Without the growth, a range of the clock may fit better, because the model of the work bends elsewhere.
    """
    (term,) = explanation.terms
    if explanation.slope or term.feature.kind not in SIZES_OF_BATCH or not term.above:
        return None
    columns = np.column_stack([term.mask, term.mask * (term.feature.values - term.cut)]) / fit.usual[:, None]
    sizes = np.abs(columns).max(axis=0)
    jump, slope = fit_lad(np.column_stack([fit.work, columns / sizes]), fit.times)[-2:] / sizes
    return replace(explanation, growth=float(slope / jump)) if jump > 0 < slope else None


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


def _pairs(fit: WorkFit, singles: Candidates, leading: Sequence[Term], least: float) -> Iterator[Explanation]:
    """Yield the best pairs of each leading condition with a second one, if they score at least ``least``."""
    for first in leading:
        held, own = first.mask, first.feature
        joined = []  # two different correlates are no pair
        for place, single in enumerate(singles.about):
            added = single.terms[0].feature
            are_correlates = own.identity != added.identity and own.role == added.role == CORRELATE
            if not single.slope and not are_correlates:
                joined.append(place)
        splits = singles.at(np.array(joined, int))
        for above in (True, False):
            inside, joint = _joint_scores(fit, splits, held, above)
            enough = (inside >= FEWEST_SIDE) & (inside <= held.sum() - FEWEST_SIDE)
            joint = np.where(enough, joint, 0.0)
            if len(joint) and joint.max() >= least:
                second = replace(splits.about[int(joint.argmax())].terms[0], above=above)
                yield _refined_pair(fit, Explanation((first, second), False, 0.0, False, 0.0))


def _refined_pair(fit: WorkFit, pair: Explanation) -> Explanation:
    for at in (1, 0):
        term, partner = pair.terms[at], pair.terms[1 - at]
        held = partner.mask
        cuts = _near_cuts(term)
        if not len(cuts):
            continue
        splits = _candidates(fit, [term.feature], [cuts], [NO_SLOPE])
        inside, scores = _joint_scores(fit, splits, held, term.above)
        scores = np.where((inside >= FEWEST_SIDE) & (inside < held.sum()), scores, 0.0)
        if scores.max() > 0:
            better = replace(term, cut=float(cuts[int(scores.argmax())]))
            pair = replace(pair, terms=(better, partner) if at == 0 else (partner, better))
    return pair


def _near_cuts(term: Term) -> Array:
    """Return the cuts near a term's own; empty if the feature has a single value."""
    distinct = np.unique(term.feature.values)
    middles = (distinct[1:] + distinct[:-1]) / 2
    at = int(np.searchsorted(middles, term.cut))
    reach = max(20, 2 * len(middles) // MOST_CUTS)
    near = middles[max(0, at - reach) : at + reach]
    return near[:: max(1, len(near) // MOST_NEAR)]
