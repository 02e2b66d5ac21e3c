"""Model of the work of one part of the steps, fitted by least absolute deviations.

A fit of absolute deviations does not mistake a jump for work, even if most steps lie beyond it.
"""

import math
from dataclasses import dataclass

import numpy as np

from schedtrace.timeline.excess import Array

CONVERGED = 1e-6
"""Relative change of the sum of errors at which a fit ends."""
BLOCK = 25
"""Steps in a block, fewer in a short trace; a model fitted to half of the blocks predicts the other half."""
FEWEST_BLOCKS = 24
"""Fewest blocks into which a search divides its steps."""
LEAST_ERROR = 0.002
"""Least typical error: smaller relative errors are within what a model of the work can resolve."""
BOUND = 3.0
"""Largest error that counts, in typical errors; larger errors are clipped to it."""


@dataclass(frozen=True, eq=False)
class WorkFit:
    """Model of the work on the steps of a search, relative to their usual times."""

    times_us: Array
    """Time of the part of each step, in step order, in microseconds and above 0."""
    columns: Array
    """Columns of the part's work (``timeline.excess.work_columns``)."""
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
    """Excess over the work in typical errors, clipped to ``BOUND``, with the work projected out."""
    blocks: Array
    """Number of each step's block."""


def fit_lad(matrix: Array, target: Array, rounds: int = 12) -> Array:
    """Fit by least absolute deviations, with iteratively reweighted least squares.

    It stops after ``rounds``, or as soon as a round changes the sum of errors by less than ``CONVERGED``.
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
    """Return the typical size of relative errors: the standard deviation that their median suggests."""
    return max(1.4826 * float(np.median(np.abs(errors))), LEAST_ERROR)


def fit_work(times_us: Array, work: Array) -> WorkFit:
    """Fit the model of the work.

    Args:
        times_us: Time of one part of each step, in step order, in microseconds and above 0.
        work: Columns of the part's work (``timeline.excess.work_columns``).
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
