"""Sums of costs, fitted to rows of recorded steps: one sum, or the larger of two.

The fits are robust to outliers, leave out costs that cannot be separated, and state the error of costs that
only few steps determine.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.timeline.step_time import FEWEST_STEPS, correlation_time, resolved

WEIGHT_ROUNDS = 30
HUBER = 1.5
"""Number of standard deviations beyond which residuals count linearly instead of squared."""
TO_STANDARD_DEVIATION = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of normal residuals."""
APART_FRAC = 0.01
"""Minimum share of a column's variance that earlier columns must leave unexplained for the column to be
fitted."""
SLACK_FRAC = 0.05
"""Share of a column's range by which a step may exceed that range, or deviate from a relation between
columns."""
RESOLVED_FRAC = 1e-6
"""Assumed relative precision of a column that never changes."""
ROUNDS_OF_TWO = 8
"""Maximum number of rounds; each assigns every step to one of two sums and fits both again."""
FEWEST_OF_A_SUM = 8
"""Minimum number of steps to which one of two sums is fitted; a long prompt among short ones makes few large
steps."""
BETTER_FRAC, BETTER_LOG = 0.05, 0.001
"""Relative and absolute reduction of the error that two sums, or one more column, must reach, because they
can also fit noise."""
CAPPED = 0.3
"""Maximum value of a step's error, which is the absolute logarithm of measured / fitted time."""
LEAST_DEVIATIONS = 1.645
"""Minimum difference of two costs, in standard errors, that counts as shown."""
SPLITS = tuple(part / 10 for part in range(1, 10))
"""Starting points of the search for a split, as shares of the distance from the smallest to the largest step
on a log scale."""


class Unresolved(msgspec.Struct, frozen=True):
    """Column whose own cost is not visible: it is about ``constant`` plus ``factors`` times other columns."""

    column: str
    constant: float
    factors: dict[str, float]
    deviation: float
    """Largest deviation of a recorded step from this relation."""


class Linear(msgspec.Struct, frozen=True):
    """Sum of ``base_us`` and a cost per unit of each column; no cost is negative."""

    base_us: float
    factors: dict[str, float]
    unresolved: list[Unresolved]
    ranges: dict[str, tuple[float, float]]
    """Minimum and maximum of each column in the recorded steps."""
    steps: int
    covariance: dict[str, dict[str, float]] = {}
    """Covariance of the factors' errors; empty if unknown."""
    alike: list[str] = []
    """Columns that share one cost, because the steps do not show a separate cost of the second column."""

    def us(self, values: dict[str, float]) -> float:
        """Return the time in microseconds of a step with these columns."""
        return self.base_us + sum(factor * values[name] for name, factor in self.factors.items())

    def doublings_outside(self, values: dict[str, float]) -> float:
        """Return how many doublings a step is outside the recorded range in its farthest column; 0 inside.

        A step is also outside if it deviates from a relation that hides a cost (``unresolved``); its distance
        is then measured from the column's maximum to that maximum plus the deviation.
        """
        return max(self.outside_by_column(values).values(), default=0.0)

    def outside_by_column(self, values: dict[str, float]) -> dict[str, float]:
        """Return how many doublings a step is outside the recorded range, for each column that is outside."""
        outside: dict[str, float] = {}
        for name, (least, most) in self.ranges.items():
            slack, value = SLACK_FRAC * (most - least), values[name]
            if not least - slack <= value <= most + slack:
                outside[name] = abs(_doublings(most if value > most else least, value))
        for hidden in self.unresolved:
            usual = hidden.constant + sum(factor * values[name] for name, factor in hidden.factors.items())
            least, most = self.ranges[hidden.column]
            slack = max(SLACK_FRAC * (most - least), RESOLVED_FRAC * max(abs(least), abs(most)))
            off = abs(values[hidden.column] - usual) - hidden.deviation
            if off > slack:
                doublings = _doublings(most, most + off)
                outside[hidden.column] = max(outside.get(hidden.column, 0.0), doublings)
        return outside

    def error_us(self, values: dict[str, float]) -> float:
        """Return the standard error that the factors add to the time of a step outside the range.

        Only the part beyond the time at the edge of the range counts, because resampled fits determine the
        time at the edge well. If a column hardly varied, its factor has a large error, even if the factor is
        zero because no cost may be negative.
        """
        edge = self._edge(values)
        off = {name: values[name] - edge[name] for name in self.covariance}
        variance = sum(
            off[name] * off[second] * shared
            for name, row in self.covariance.items()
            for second, shared in row.items()
        )
        return math.sqrt(max(variance, 0.0))

    def _edge(self, values: dict[str, float]) -> dict[str, float]:
        """Return the recorded values that are nearest to a step's values."""
        return {name: min(max(values[name], least), most) for name, (least, most) in self.ranges.items()}

    def leaned_us(self, values: dict[str, float], deviations: float, error_log: float = 0.0) -> float:
        """Return the time of a step outside the range if the fit is off by ``deviations`` standard errors.

        A larger step never takes less time than a step at the edge of the range, and a smaller one never
        more.

        Args:
            values: Columns of the step.
            deviations: Number of standard errors by which the step takes longer than the fit predicts.
            error_log: Standard error of the logarithm of the step's time, in addition to the error of the
                factors.
        """
        us = self.us(values)
        own_log = math.log1p(self.error_us(values) / us) if us else 0.0
        leaned_us = us * math.exp(deviations * math.hypot(error_log, own_log))
        edge = self._edge(values)
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
    rows: pl.DataFrame,
    measured: str,
    columns: tuple[str, ...],
    fewest: int = FEWEST_STEPS,
    *,
    alike: tuple[str, str] | None = None,
    like: Linear | None = None,
) -> Linear | None:
    """Fit a column of times to other columns; None with fewer than ``fewest`` rows.

    The fit minimizes errors relative to the fitted time by non-negative least squares (SciPy's ``nnls``),
    repeated with Huber's weights. Errors relative to the *measured* time would favour fast steps and make the
    total too low.

    Args:
        rows: Rows in order; rows with a null or with a time of 0 are left out.
        measured: The column of times, in microseconds.
        columns: Columns to fit to; of inseparable columns, the first is kept.
        fewest: Minimum number of rows.
        alike: Two columns that share one cost if the rows show no cost of the second, and would not show it
            even if it were as large as the first's.
        like: Fit that determines whether these two share a cost; None to decide by the rows.
    """
    used = rows.select(measured, *columns).drop_nulls().filter(pl.col(measured) > 0)
    if used.height < fewest:
        return None
    times = used[measured].to_numpy().astype(float)
    values = {name: used[name].to_numpy().astype(float) for name in columns}
    independent, unresolved = _apart(values, used.height)
    costs = _fitted_costs(times, {name: values[name] for name in independent})
    shares = alike is not None and (
        _hides_second(costs, *alike) if like is None else bool(like.alike) and alike[0] in independent
    )
    if alike is not None and shares:
        first, second = alike
        together = {first: values[first] + values[second]}
        rest = {name: values[name] for name in independent if name not in alike}
        costs = _with_second(_fitted_costs(times, together | rest), first, second)
    return Linear(
        base_us=costs.base_us,
        factors=costs.factors,
        unresolved=unresolved,
        ranges={name: (float(of.min()), float(of.max())) for name, of in values.items()},
        steps=used.height,
        covariance=costs.covariance,
        alike=list(alike or ()) if shares else [],
    )


class _Costs(NamedTuple):
    """Costs of a fit with the errors of their factors."""

    base_us: float
    factors: dict[str, float]
    estimates: dict[str, float]
    """Estimates of the factors without the bound at zero, so they may be negative."""
    covariance: dict[str, dict[str, float]]


def _fitted_costs(times: Any, values: dict[str, Any]) -> _Costs:
    """Fit times to columns, none of which is a sum of the others.

    The covariance is that of weighted least squares. Because neighbouring residuals are correlated, it is
    computed as if there were fewer steps. It allows negative costs; a cost that the bound keeps at zero would
    otherwise appear to be certain.
    """
    import numpy as np  # noqa: PLC0415  # a replay with constants needs neither it nor SciPy
    from scipy.optimize import nnls  # noqa: PLC0415  # likewise

    work = np.column_stack([np.ones(len(times)), *values.values()])
    scale = np.abs(work).max(axis=0)  # a broken trace has negative counts, too
    work /= scale
    fitted = np.full(len(times), np.median(times))
    costs = np.zeros(len(scale))
    for _ in range(WEIGHT_ROUNDS):
        error = np.abs(times / fitted - 1)
        spread = TO_STANDARD_DEVIATION * np.median(error)
        weight = np.sqrt(np.minimum(1, HUBER * spread / np.maximum(error, 1e-12)) if spread else 1.0) / fitted
        before, (costs, _) = costs, nnls(work * np.reshape(weight, (-1, 1)), times * weight)
        fitted = np.maximum(work @ costs, times.min() / 2)
        if np.allclose(costs, before, rtol=1e-6):
            break
    base, *factors = (float(cost) for cost in resolved(costs) / scale)
    weighted = work * np.reshape(weight, (-1, 1))
    inverse = np.linalg.pinv(weighted.T @ weighted)
    free = inverse @ (weighted.T @ (times * weight))
    residuals = times * weight - weighted @ free
    variance = float(residuals @ residuals) / max(1, len(times) - len(scale)) * correlation_time(residuals)
    covariance = variance * inverse / np.outer(scale, scale)
    return _Costs(
        base,
        dict(zip(values, factors, strict=True)),
        dict(zip(values, (free / scale)[1:].tolist(), strict=True)),
        {
            name: dict(zip(values, row, strict=True))
            for name, row in zip(values, covariance[1:, 1:].tolist(), strict=True)
        },
    )


def _hides_second(costs: _Costs, first: str, second: str) -> bool:
    """Return whether, by the rows, the second column may cost either nothing or as much as the first."""
    if not costs.factors.get(first):
        return False
    if second not in costs.factors:
        return True
    error = LEAST_DEVIATIONS * math.sqrt(costs.covariance[second][second])
    estimate = max(costs.estimates[second], 0.0)
    return estimate - error <= 0 and estimate + error >= costs.factors[first]


def _with_second(costs: _Costs, first: str, second: str) -> _Costs:
    """Return the costs with a second column that has the cost and the error of the first."""
    covariance = {name: row | {second: row[first]} for name, row in costs.covariance.items()}
    return costs._replace(
        factors=costs.factors | {second: costs.factors[first]},
        covariance=covariance | {second: dict(covariance[first])},
    )


def _apart(values: dict[str, Any], rows: int) -> tuple[list[str], list[Unresolved]]:
    """Return the columns that are not sums of a constant and earlier columns, and sums for the others."""
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
    """Maximum of its parts: either one sum of costs, or two sums, the larger of which is a step's time."""

    parts: list[Linear]

    @property
    def fitted_steps(self) -> int:
        """Number of steps in the fit."""
        return sum(part.steps for part in self.parts)

    @property
    def columns(self) -> list[str]:
        """Names of all columns in the fit."""
        return [*dict.fromkeys(name for part in self.parts for name in part.ranges)]

    @property
    def unresolved(self) -> list[Unresolved]:
        """Columns whose own cost no part of the fit shows."""
        return [hidden for part in self.parts for hidden in part.unresolved]

    def us(self, values: dict[str, float]) -> float:
        """Return the time in microseconds of a step with these columns."""
        return max(part.us(values) for part in self.parts)

    def doublings_outside(self, values: dict[str, float]) -> float:
        """Return how many doublings a step is outside the range of the part that determines its time."""
        return self._slower(values).doublings_outside(values)

    def outside_by_column(self, values: dict[str, float]) -> dict[str, float]:
        """Return ``Linear.outside_by_column`` of the part that determines the step's time."""
        return self._slower(values).outside_by_column(values)

    def leaned_us(self, values: dict[str, float], deviations: float, error_log: float) -> float:
        """Return ``Linear.leaned_us`` of the part that determines the step's time."""
        return self._slower(values).leaned_us(values, deviations, error_log)

    def _slower(self, values: dict[str, float]) -> Linear:
        return max(self.parts, key=lambda part: part.us(values))

    def expr(self) -> pl.Expr:
        """Return an expression for the time in microseconds of rows with these columns."""
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
    alike: tuple[str, str] | None = None,
) -> Larger | None:
    """Fit a column of times both as one sum and as the larger of two; None with too few rows.

    The assignment of steps to the two sums is found iteratively (a max-affine fit): fit both sums, assign
    each step to the larger one, and repeat until no step changes sides. The first split is by the steps'
    tokens. Two sums must fit clearly better than one, unless all decodes had the same batch. In that case,
    one sum would attribute the constant time of a batch, in which the device reads the weights, to the
    requests.

    Args:
        rows: As for ``fit_linear``, with the columns ``batch_tokens`` and ``prefill_tokens``.
        measured: The column of times, in microseconds.
        of_one: Columns of the one sum.
        of_two: Columns of each of the two sums.
        like: Fit whose form to use and whose split to begin with, instead of a search.
        alike: Two columns of the one sum, as for ``fit_linear``.
    """
    used = rows.drop_nulls((measured, *of_one, *of_two[0], *of_two[1])).filter(pl.col(measured) > 0)
    whole = fit_linear(used, measured, of_one, alike=alike, like=like.parts[0] if like else None)
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
    best = min(candidates, key=lambda larger: mean_log_error(used, measured, larger))
    if like is not None:
        return best
    error, error_of_two = mean_log_error(used, measured, single), mean_log_error(used, measured, best)
    shared = pl.col(of_two[0][0])
    if not whole.alike and used.filter(shared > 0).select(shared.n_unique()).item() == 1:
        return best if error_of_two <= error + BETTER_LOG else single
    return best if is_clearly_less(error_of_two, error) else single


def is_clearly_less(error: float, than: float) -> bool:
    """Return whether a more flexible fit reduces the error by more than its flexibility alone would."""
    return than - error > max(BETTER_FRAC * than, BETTER_LOG)


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


def mean_log_error(rows: pl.DataFrame, measured: str, larger: Larger) -> float:
    """Return the mean of two mean errors: that of steps with prefill and that of steps without."""
    log = (pl.col(measured) / larger.expr()).log().abs().clip(upper_bound=CAPPED)
    halves = rows.group_by(pl.col("prefill_tokens") > 0).agg(log.mean().alias("log"))
    return float(halves["log"].sum()) / halves.height
