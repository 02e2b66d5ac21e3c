"""Sums of costs, fitted to rows of recorded steps: one sum, or the larger of two.

The fits withstand outliers, leave out costs that cannot be separated, and state the error of those that few
steps show.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.timeline.step_time import FEWEST_STEPS, resolved

WEIGHT_ROUNDS = 30
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
"""Two sums, or one more column, are taken if their error is less by this part of it, and by this much: they
have more to fit noise with."""
CAPPED = 0.3
"""Largest logarithm of measured by fitted time that counts as a step's error."""
MOST_CORRELATED = 0.95
"""Largest correlation of neighbouring steps' residuals that counts; 39 steps then weigh as much as one."""
LEAST_DEVIATIONS = 1.645
"""Standard errors by which a cost must differ from another one to count as shown."""
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
    covariance: dict[str, dict[str, float]] = {}
    """Covariance of the factors' errors; empty: not known."""
    alike: list[str] = []
    """Columns that share one cost, because the steps do not show the second column's own."""

    def us(self, values: dict[str, float]) -> float:
        """Return the microseconds that a step with these columns takes."""
        return self.base_us + sum(factor * values[name] for name, factor in self.factors.items())

    def doublings_outside(self, values: dict[str, float]) -> float:
        """Return the doublings from the recorded range to a step, in the farthest column; 0 inside it.

        A step that deviates from a relation that hides a cost is outside, too; its distance is that from the
        column's maximum to the maximum plus the deviation.
        """
        return max(self.outside_by_column(values).values(), default=0.0)

    def outside_by_column(self, values: dict[str, float]) -> dict[str, float]:
        """Return the doublings from the recorded range to a step, for each column that leaves it."""
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

        It is that of the step's time beyond the time at the edge of the range, which resampled fits know
        well. If a column hardly varied, its factor has a large error, even where the factor is zero because
        no cost is negative.
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
        """Return the recorded values nearest to a step's."""
        return {name: min(max(values[name], least), most) for name, (least, most) in self.ranges.items()}

    def leaned_us(self, values: dict[str, float], deviations: float, error_log: float = 0.0) -> float:
        """Return the time of a step outside the range if the fit is off by so many standard errors.

        A larger step never takes less than one at the edge of the range, and a smaller one never more.

        Args:
            values: Columns of the step.
            deviations: Number of standard errors by which the step takes longer than the fit says.
            error_log: Standard error of the logarithm of its time, besides that of the factors.
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

    Non-negative least squares (SciPy's ``nnls``) of errors relative to the fitted time, repeated with Huber's
    weights. Relative to the *measured* time they would favour fast steps, and the total would come out low.

    Args:
        rows: Rows, in order; those with a null, or with a time of 0, are left out.
        measured: The column of times, in microseconds.
        columns: Columns; of inseparable ones, the first is kept.
        fewest: Minimum number of rows.
        alike: Two columns that share one cost if the rows show no cost of the second, and could not show it
            if it were that of the first.
        like: Fit that decides whether they share it; None: the rows do.
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
    """Estimates of the factors without the bound at zero: they may be negative."""
    covariance: dict[str, dict[str, float]]


def _fitted_costs(times: Any, values: dict[str, Any]) -> _Costs:
    """Fit times to columns that are no sums of each other.

    The covariance is that of weighted least squares, for residuals of which each resembles the last: as if
    there were fewer steps, by the correlation of neighbours. Costs may be negative in it; a cost that is zero
    for want of a negative one would otherwise appear to be certain.
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
    squares = float(residuals @ residuals)
    neighbours = float(residuals[1:] @ residuals[:-1]) / squares if squares else 0.0
    lag1 = min(max(neighbours, 0.0), MOST_CORRELATED)
    variance = squares / max(1, len(times) - len(scale)) * (1 + lag1) / (1 - lag1)
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
    """Return whether the steps show no cost of the second column, and could not show that of the first."""
    if not costs.factors.get(first):
        return False
    if second not in costs.factors:
        return True
    error = LEAST_DEVIATIONS * math.sqrt(costs.covariance[second][second])
    estimate = max(costs.estimates[second], 0.0)
    return estimate - error <= 0 and estimate + error >= costs.factors[first]


def _with_second(costs: _Costs, first: str, second: str) -> _Costs:
    """Return costs in which a second column has the cost of the first, and its error."""
    covariance = {name: row | {second: row[first]} for name, row in costs.covariance.items()}
    return costs._replace(
        factors=costs.factors | {second: costs.factors[first]},
        covariance=covariance | {second: dict(covariance[first])},
    )


def _apart(values: dict[str, Any], rows: int) -> tuple[list[str], list[Unresolved]]:
    """Return the columns that are not a sum of a constant and earlier columns, and the rest with that sum."""
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
    def fitted_steps(self) -> int:
        """Number of steps in the fit."""
        return sum(part.steps for part in self.parts)

    @property
    def columns(self) -> list[str]:
        """Names of all columns that it was fitted to."""
        return [*dict.fromkeys(name for part in self.parts for name in part.ranges)]

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

    def outside_by_column(self, values: dict[str, float]) -> dict[str, float]:
        """Return these doublings for each column (``Linear.outside_by_column``)."""
        return self._slower(values).outside_by_column(values)

    def leaned_us(self, values: dict[str, float], deviations: float, error_log: float) -> float:
        """Return the time of a step if the part that sets it is off (``Linear.leaned_us``)."""
        return self._slower(values).leaned_us(values, deviations, error_log)

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
    alike: tuple[str, str] | None = None,
) -> Larger | None:
    """Fit a column of times as one sum, and as the larger of two; None with too few rows.

    The assignment of steps to the two sums is found iteratively (a max-affine fit): fit both sums, assign
    each step to the larger one, and repeat until no step changes sides. The first split is by the steps'
    tokens. The larger of two must fit clearly better than one sum, except where all decodes had the same
    batch. There, a single sum would take what a device spends on every batch, because it reads its weights
    once per step, for the cost of requests.

    Args:
        rows: As for ``fit_linear``, with the columns ``batch_tokens`` and ``prefill_tokens``.
        measured: The column of times, in microseconds.
        of_one: Columns of the one sum.
        of_two: Columns of the two.
        like: Take its form and begin with its split instead of a search.
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
    """Return whether a fit with more to fit noise with has less error by more than that gives it."""
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
    """Return the mean error, half of steps with prefill and half of steps without, which differ little."""
    log = (pl.col(measured) / larger.expr()).log().abs().clip(upper_bound=CAPPED)
    halves = rows.group_by(pl.col("prefill_tokens") > 0).agg(log.mean().alias("log"))
    return float(halves["log"].sum()) / halves.height
