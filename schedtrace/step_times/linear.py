"""Times as a sum of costs, or as the larger of two: that of computing, and that of reading memory.

Fitted against outliers, without costs that cannot be told apart.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import polars as pl

from schedtrace.timeline.step_time import FEWEST_STEPS, resolved

ROUNDS = 30
HUBER = 1.5
"""Number of standard deviations beyond which residuals count linearly, not squared."""
TO_STANDARD_DEVIATION = 1.4826
"""Standard deviation as a multiple of the median absolute deviation, for normal residuals."""
APART_FRAC = 0.01
"""Share of a column's variance that other columns must leave unexplained for it to be fitted."""
SLACK_FRAC = 0.05
"""Share of a column's range by which a step may leave it, or its relation to other columns."""
RESOLVED_FRAC = 1e-6
"""Precision of a fit for a column that never changes."""
ROUNDS_OF_TWO = 8
"""Rounds of assigning each step to one of two sums, and fitting these."""
FEWEST_OF_A_SUM = 8
"""Fewest steps to which one of two sums is fitted; a long prompt among short ones makes few large steps."""
BETTER_FRAC, BETTER_LOG = 0.05, 0.001
"""Two sums are taken if their error is less than one sum's by this part of it, and by this much: they have
more to fit noise with."""
CAPPED = 0.3
"""Largest logarithm of measured by fitted time that counts as a step's error."""
SPLITS = tuple(part / 10 for part in range(1, 10))
"""Starting points of the search, as shares of the way from the smallest to the largest step on a log
scale.
"""


class Unresolved(msgspec.Struct, frozen=True):
    """A column whose own cost the steps do not show: it was about ``constant`` plus ``factors`` of others."""

    column: str
    constant: float
    factors: dict[str, float]
    deviation: float
    """Largest distance of a recorded step from that sum."""


class Linear(msgspec.Struct, frozen=True):
    """Sum of ``base_us`` and a cost for each unit of a column, none negative; microseconds."""

    base_us: float
    factors: dict[str, float]
    unresolved: list[Unresolved]
    ranges: dict[str, tuple[float, float]]
    """Minimum and maximum of each column in the recorded steps."""
    steps: int

    def us(self, values: dict[str, float]) -> float:
        """Return the microseconds that a step with these columns takes."""
        return self.base_us + sum(factor * values[name] for name, factor in self.factors.items())

    def doublings_outside(self, values: dict[str, float]) -> float:
        """Return the doublings from the recorded range to a step, in the farthest column; 0 inside it.

        A step that breaks a relation which hides a cost is outside, too: by the error of the relation,
        against the column's most.
        """
        farthest = 0.0
        for name, (least, most) in self.ranges.items():
            slack, value = SLACK_FRAC * (most - least), values[name]
            if not least - slack <= value <= most + slack:
                farthest = max(farthest, abs(_doublings(most if value > most else least, value)))
        for hidden in self.unresolved:
            usual = hidden.constant + sum(factor * values[name] for name, factor in hidden.factors.items())
            least, most = self.ranges[hidden.column]
            slack = max(SLACK_FRAC * (most - least), RESOLVED_FRAC * max(abs(least), abs(most)))
            off = abs(values[hidden.column] - usual) - hidden.deviation
            if off > slack:
                farthest = max(farthest, _doublings(most, most + off))
        return farthest

    def leaned_us(self, values: dict[str, float], off_log: float) -> float:
        """Return the time of a step outside the range if the fit is off by this much.

        A larger step never takes less than one at the edge of the range, and a smaller one never more.

        Args:
            values: Columns of the step.
            off_log: Logarithm of the true time against the fit's.
        """
        leaned_us = self.us(values) * math.exp(off_log)
        edge = {name: min(max(values[name], least), most) for name, (least, most) in self.ranges.items()}
        if any(values[name] > value for name, value in edge.items()):
            return max(leaned_us, self.us(edge))
        if any(values[name] < value for name, value in edge.items()):
            return min(leaned_us, self.us(edge))
        return leaned_us


def _doublings(before: float, after: float) -> float:
    """Return how many times a count has doubled.

    Negative counts, which only a broken trace contains, are treated as 0.
    """
    return math.log2((1 + max(after, 0.0)) / (1 + max(before, 0.0)))


def fit_linear(
    rows: pl.DataFrame, measured: str, columns: tuple[str, ...], fewest: int = FEWEST_STEPS
) -> Linear | None:
    """Fit a column of times to other columns; None with fewer than ``fewest`` rows.

    Non-negative least squares (SciPy's ``nnls``) of errors relative to the fitted time, repeated with Huber's
    weights. Relative to the *measured* time they would favour fast steps, and the total would come out low.

    Args:
        rows: Those with a null, or with a time of 0, are left out.
        measured: The column of times, in microseconds.
        columns: In the order in which they are kept where they cannot be told apart.
        fewest: Rows.
    """
    import numpy as np  # noqa: PLC0415  # a replay with constants needs neither it nor SciPy
    from scipy.optimize import nnls  # noqa: PLC0415  # likewise

    used = rows.select(measured, *columns).drop_nulls().filter(pl.col(measured) > 0)
    if used.height < fewest:
        return None
    times = used[measured].to_numpy().astype(float)
    values = {name: used[name].to_numpy().astype(float) for name in columns}
    independent, unresolved = _apart(values, used.height)
    work = np.column_stack([np.ones(used.height), *(values[name] for name in independent)])
    scale = np.abs(work).max(axis=0)  # a broken trace has negative counts, too
    work /= scale
    fitted = np.full(used.height, np.median(times))
    costs = np.zeros(len(scale))
    for _ in range(ROUNDS):
        error = np.abs(times / fitted - 1)
        spread = TO_STANDARD_DEVIATION * np.median(error)
        weight = np.sqrt(np.minimum(1, HUBER * spread / np.maximum(error, 1e-12)) if spread else 1.0) / fitted
        before, (costs, _) = costs, nnls(work * np.reshape(weight, (-1, 1)), times * weight)
        fitted = np.maximum(work @ costs, times.min() / 2)
        if np.allclose(costs, before, rtol=1e-6):
            break
    base, *factors = (float(cost) for cost in resolved(costs) / scale)
    return Linear(
        base_us=base,
        factors=dict(zip(independent, factors, strict=True)),
        unresolved=unresolved,
        ranges={name: (float(of.min()), float(of.max())) for name, of in values.items()},
        steps=used.height,
    )


def _apart(values: dict[str, Any], rows: int) -> tuple[list[str], list[Unresolved]]:
    """Return the columns that are no sum of a constant and earlier columns, and the rest with that sum."""
    import numpy as np  # noqa: PLC0415  # as above

    independent: list[str] = []
    unresolved = []
    for name, column in values.items():
        before = np.column_stack([np.ones(rows), *(values[earlier] for earlier in independent)])
        scale = np.abs(before).max(axis=0)
        costs = resolved(np.linalg.lstsq(before / scale, column, rcond=None)[0]) / scale
        off = column - before @ costs
        varies = column - column.mean()
        if varies @ varies and off @ off > APART_FRAC * (varies @ varies):
            independent.append(name)
            continue
        constant, *factors = (float(cost) for cost in costs)
        by_column = dict(zip(independent, factors, strict=True))
        unresolved.append(Unresolved(name, constant, by_column, float(np.abs(off).max())))
    return independent, unresolved


class Larger(msgspec.Struct, frozen=True):
    """Largest of its parts: one sum of costs, or two of which the slower one sets the time."""

    parts: list[Linear]

    @property
    def steps(self) -> int:
        """Number of steps in the fit."""
        return sum(part.steps for part in self.parts)

    @property
    def unresolved(self) -> list[Unresolved]:
        """Columns whose own cost no part shows."""
        return [hidden for part in self.parts for hidden in part.unresolved]

    def us(self, values: dict[str, float]) -> float:
        """Return the microseconds that a step with these columns takes."""
        return max(part.us(values) for part in self.parts)

    def doublings_outside(self, values: dict[str, float]) -> float:
        """Return the doublings by which a step leaves the record of the part that sets its time."""
        return self._slower(values).doublings_outside(values)

    def leaned_us(self, values: dict[str, float], off_log: float) -> float:
        """Return the time of a step if the part that sets it is off (``Linear.leaned_us``)."""
        return self._slower(values).leaned_us(values, off_log)

    def _slower(self, values: dict[str, float]) -> Linear:
        return max(self.parts, key=lambda part: part.us(values))

    def expr(self) -> pl.Expr:
        """Return the microseconds that rows with these columns take."""
        return pl.max_horizontal(
            pl.sum_horizontal(
                pl.lit(part.base_us), *(factor * pl.col(name) for name, factor in part.factors.items())
            )
            for part in self.parts
        )


def fit_larger(
    rows: pl.DataFrame,
    measured: str,
    of_one: tuple[str, ...],
    of_two: tuple[tuple[str, ...], tuple[str, ...]],
    like: Larger | None = None,
) -> Larger | None:
    """Fit a column of times as one sum, and as the larger of two; None with too few rows.

    Which step belongs to which sum is found by turns: fit both, give each step to the sum that is larger for
    it, until none changes (a max-affine fit). It begins with steps split by how many tokens they have.
    The larger of two has to be clearly better; not so where all decodes had the same batch: one sum takes
    for the cost of a request what a device that reads its weights once a step spends on any batch.

    Args:
        rows: As ``fit_linear``; with columns ``batch_tokens`` and ``prefill_tokens``.
        measured: The column of times, in microseconds.
        of_one: Columns of the one sum.
        of_two: Columns of the two.
        like: Take its form and begin with its split instead of a search.
    """
    used = rows.drop_nulls((measured, *of_one, *of_two[0], *of_two[1])).filter(pl.col(measured) > 0)
    whole = fit_linear(used, measured, of_one)
    if whole is None:
        return None
    single = Larger([whole])
    if like is None:
        tokens = pl.col("batch_tokens")
        least, most = used.select(tokens.min().alias("least"), tokens.max().alias("most")).row(0)
        begins = [tokens > least * (most / least) ** part for part in SPLITS]
    else:
        begins = [_second_is_larger(like)] if len(like.parts) > 1 else []
    candidates = [
        larger for begin in begins if (larger := _by_turns(used, measured, of_two, begin)) is not None
    ]
    if not candidates:
        return single
    best = min(candidates, key=lambda larger: _error(used, measured, larger))
    if like is not None:
        return best
    error, error_of_two = _error(used, measured, single), _error(used, measured, best)
    shared = pl.col(of_two[0][0])
    if used.filter(shared > 0).select(shared.n_unique()).item() == 1:
        return best if error_of_two <= error + BETTER_LOG else single
    return best if error - error_of_two > max(BETTER_FRAC * error, BETTER_LOG) else single


def _by_turns(
    rows: pl.DataFrame, measured: str, two: Sequence[tuple[str, ...]], second: pl.Expr
) -> Larger | None:
    side = rows.select(second.alias("second"))["second"]
    for _ in range(ROUNDS_OF_TWO):
        if not FEWEST_OF_A_SUM <= side.sum() <= rows.height - FEWEST_OF_A_SUM:
            return None
        parts = [
            fit_linear(rows.filter(half), measured, columns, FEWEST_OF_A_SUM)
            for half, columns in zip((~side, side), two, strict=True)
        ]
        if parts[0] is None or parts[1] is None:
            return None
        larger = Larger([part for part in parts if part is not None])
        before, side = side, rows.select(_second_is_larger(larger).alias("second"))["second"]
        if (side == before).all():
            break
    return larger


def _second_is_larger(larger: Larger) -> pl.Expr:
    first, second = (Larger([part]).expr() for part in larger.parts)
    return second > first


def _error(rows: pl.DataFrame, measured: str, larger: Larger) -> float:
    """Return the mean error, half of steps with prefill and half of steps without, which differ little."""
    log = (pl.col(measured) / larger.expr()).log().abs().clip(upper_bound=CAPPED)
    halves = rows.group_by(pl.col("prefill_tokens") > 0).agg(log.mean().alias("log"))
    return float(halves["log"].sum()) / halves.height
