"""Candidates of the search for what slow steps have in common, and their scores.

A score test ranks them: it projects the work out of both a candidate and the errors of the work-only model,
and measures how strongly they correlate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.sparse import block_diag, coo_array, csr_array

from schedtrace.diagnose.excess_features import Array, Feature, WorkFit

LOWEST = 0.02
"""Quantile of a feature at which its slope starts."""
LATER = (0.25, 0.5, 0.75)
"""Quantiles of a feature at which a slope may start, too: host work that runs beside the forward pass costs
nothing until it takes longer."""
FEWEST_OF_SLOPE = 3
"""Fewest distinct values of a feature that can show a slope."""
UNGRADED = ("request", "first_use", "first_size", "period")
"""Features without a slope: flags, and positions."""
FEWEST_SIDE = 5
"""Fewest steps on either side of a split."""
MOST_CUTS = 24
"""Most cuts of a feature in the first pass; the second pass refines the best cut between its neighbours."""
BESIDE = ("trait", "lora", "encoder", "grammars", "compiling")
"""Features that count what adds work of the host, or on the device, beside the forward pass."""
NO_SLOPE = np.zeros(0)
"""Starts of a feature that gets no slope."""
LEAST_NEW = 0.01
"""Least share of a candidate that is independent of the work."""


@dataclass(frozen=True, eq=False)
class Term:
    """A condition on a feature."""

    feature: Feature
    cut: float
    above: bool = True

    def mask(self, values: Array) -> Array:
        """Return 1.0 where a value meets the condition, else 0.0."""
        return ((values > self.cut) == self.above).astype(float)


@dataclass(frozen=True, eq=False)
class Explanation:
    """Conditions that go with an excess, and the size of their effect."""

    terms: tuple[Term, ...]
    """Conditions that hold together: one or two for a split; for a slope one, whose ``cut`` is its start."""
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
    """Explanations that explain as much."""
    misplaced: int = 0
    """Number of steps on the wrong side of the split, judged at half of the effect; 0 for a slope."""
    errors: Array = field(default_factory=lambda: np.zeros(0), repr=False)
    """Remaining relative error, summed over each block of steps."""
    multiplies: Array | None = field(default=None, repr=False)
    """Time of each step's work in microseconds, of which a jump adds a share; None: it adds a time."""

    @property
    def weakest_role(self) -> int:
        """Largest role of the features: ``CORRELATE`` if any feature is one."""
        return max(term.feature.role for term in self.terms)

    @property
    def feature_families(self) -> frozenset[str]:
        """Families of the features."""
        return frozenset(term.feature.family_name for term in self.terms)

    def effect_units(self, values: Sequence[Array]) -> Array:
        """Return each step's added time in units of ``effect``.

        Args:
            values: Values of each term's feature, for any steps.
        """
        if self.slope:
            return np.clip(values[0] - self.terms[0].cut, 0, None)
        product = np.ones(len(values[0]))
        for term, column in zip(self.terms, values, strict=True):
            product = product * term.mask(column)
        return product

    def effect_column(self, usual: Array) -> Array:
        """Return what the effect adds to each step's time, but for a factor.

        Args:
            usual: Usual time of each step's work in microseconds.
        """
        measure = self.effect_units([term.feature.values for term in self.terms])
        if self.multiplies is not None:
            return measure * self.multiplies
        return measure if self.additive else measure * usual


@dataclass(frozen=True, eq=False)
class Candidates:
    """Splits and slopes; each stands for a column with a value for each step.

    The columns of thousands of cuts are not made. Sums over them are added up from the sums over the steps
    between two neighbouring cuts of a feature.
    """

    pieces: csr_array
    """Rows: the steps between two cuts, with a 1 for each, or the values of a slope. Columns: steps."""
    holds: csr_array
    """Rows: candidates, with a 1 for each piece that their column consists of. Columns: pieces."""
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


def _cuts(values: Array) -> Array:
    distinct = np.unique(values)
    if len(distinct) > MOST_CUTS + 1:
        distinct = np.unique(np.quantile(values, np.linspace(0, 1, MOST_CUTS + 2), method="nearest"))
    return (distinct[1:] + distinct[:-1]) / 2


def single_candidates(fit: WorkFit, features: Sequence[Feature]) -> Candidates:
    """Return every split and slope of each feature."""
    cuts = [np.zeros(0) if feature.kind == "length" else _cuts(feature.values) for feature in features]
    candidates = make_candidates(fit, features, cuts, [_slope_starts(feature) for feature in features])
    norms = candidates.norms()
    slopes = np.array([explanation.slope for explanation in candidates.about], bool)
    enough = (norms >= FEWEST_SIDE) & (len(fit.times) - norms >= FEWEST_SIDE) | slopes
    return candidates.at(np.flatnonzero(enough))


def _slope_starts(feature: Feature) -> Array:
    """Return the values of a feature at which its slopes start; empty: it has none.

    Only what adds to a step's work starts late: the model of the work itself bends.
    """
    values = feature.values
    low, most = np.quantile(values, LOWEST), values.max()
    if feature.kind in UNGRADED or len(np.unique(values)) < FEWEST_OF_SLOPE or most <= low:
        return NO_SLOPE
    later = np.quantile(values, LATER, method="nearest") if may_start_late(feature) else NO_SLOPE
    return np.unique([low, *later[later < most]])


def may_start_late(feature: Feature) -> bool:
    """Return whether a feature counts what adds host work to a step beside the forward pass."""
    return feature.kind in BESIDE


def make_candidates(
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


def candidate_scores(fit: WorkFit, candidates: Candidates, errors: Array) -> Array:
    """Return each candidate's correlation with errors, about a squared standard score with its sign.

    Args:
        fit: Model of the work.
        candidates: Candidates to score.
        errors: Errors of the steps; or a column for each of several errors.
    """
    inside, lean = candidates.sums(fit.basis), candidates.sums(errors)
    return _standardized(candidates.norms(), inside, lean, np.mean(errors**2, axis=0))


def joint_scores(fit: WorkFit, splits: Candidates, held: Array, above: bool = True) -> tuple[Array, Array]:
    """Return, for each split, the number of steps that also meet a condition, and the combination's score.

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
    """Return squared standard scores with the sign of ``lean``; 0 for a column that the work spans.

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
