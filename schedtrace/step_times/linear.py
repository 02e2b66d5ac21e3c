"""Times as a sum of costs: fitted against outliers, without those that cannot be told apart."""

from typing import Any

import msgspec
import polars as pl

from schedtrace.timeline.step_time import FEWEST_STEPS, resolved

ROUNDS = 30
HUBER = 1.5
"""Residuals beyond so many standard deviations count linearly, not squared."""
TO_STANDARD_DEVIATION = 1.4826
"""Of a median absolute deviation, for normal residuals."""
APART_FRAC = 0.01
"""A column is fitted if the others, and a constant, leave so much of its variance unexplained."""
SLACK_FRAC = 0.05
"""A step may leave a column's recorded range, or its relation to others, by so much of the range."""

RESOLVED_FRAC = 1e-6
"""Of a column that never changes: what a fit tells of it."""


class Unresolved(msgspec.Struct, frozen=True):
    """A column whose own cost the steps do not show: it was about ``constant`` plus ``factors`` of others."""

    column: str
    constant: float
    factors: dict[str, float]
    deviation: float
    """The most that a recorded step was off that."""


class Linear(msgspec.Struct, frozen=True):
    """``base_us`` plus a cost for each unit of a column, none negative. Microseconds."""

    base_us: float
    factors: dict[str, float]
    unresolved: list[Unresolved]
    ranges: dict[str, tuple[float, float]]
    """Least and most of each column in the recorded steps."""
    steps: int

    def us(self, values: dict[str, float]) -> float:
        """What a step with these columns takes."""
        return self.base_us + sum(factor * values[name] for name, factor in self.factors.items())

    def outside(self, values: dict[str, float]) -> bool:
        """Whether a step lies outside what was recorded: a range, or a relation that hides a cost."""
        for name, (least, most) in self.ranges.items():
            slack = SLACK_FRAC * (most - least)
            if not least - slack <= values[name] <= most + slack:
                return True
        for hidden in self.unresolved:
            usual = hidden.constant + sum(factor * values[name] for name, factor in hidden.factors.items())
            least, most = self.ranges[hidden.column]
            slack = max(SLACK_FRAC * (most - least), RESOLVED_FRAC * max(abs(least), abs(most)))
            if abs(values[hidden.column] - usual) > hidden.deviation + slack:
                return True
        return False


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
    kept, unresolved = _apart(values, used.height)
    work = np.column_stack([np.ones(used.height), *(values[name] for name in kept)])
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
        factors=dict(zip(kept, factors, strict=True)),
        unresolved=unresolved,
        ranges={name: (float(of.min()), float(of.max())) for name, of in values.items()},
        steps=used.height,
    )


def _apart(values: dict[str, Any], rows: int) -> tuple[list[str], list[Unresolved]]:
    """The columns that are no sum of a constant and those before them, and the others with that sum."""
    import numpy as np  # noqa: PLC0415  # as above

    kept: list[str] = []
    unresolved = []
    for name, column in values.items():
        before = np.column_stack([np.ones(rows), *(values[other] for other in kept)])
        scale = np.abs(before).max(axis=0)
        costs = resolved(np.linalg.lstsq(before / scale, column, rcond=None)[0]) / scale
        off = column - before @ costs
        varies = column - column.mean()
        if varies @ varies and off @ off > APART_FRAC * (varies @ varies):
            kept.append(name)
            continue
        constant, *factors = (float(cost) for cost in costs)
        known = dict(zip(kept, factors, strict=True))
        unresolved.append(Unresolved(name, constant, known, float(np.abs(off).max())))
    return kept, unresolved
