"""Model of step times, fitted to the trace itself, from which the costs of findings are estimated.

``busy = base + a * prefill tokens + b * decode tokens + c * context tokens``, with coefficients that cannot
be negative, fitted to the steps (if there are more than 10,000, to an even sample) with a loss that limits
the weight of outliers (``soft_l1``: ``sqrt(1 + residual ** 2)``, about linear for large residuals).
"""

import math
from dataclasses import dataclass
from typing import Any

import polars as pl

FEATURES = ("prefill_tokens", "decode_tokens", "context_tokens")
FEWEST_STEPS = 20
"""Minimum number of steps for a fit: four coefficients need several steps each."""
MOST_STEPS = 10_000
"""Maximum number of steps for a fit; if there are more, only every second (or third, ...) is used."""
ROUNDS = 300
BENDS = 30
"""Number of token counts at which the cost of a decode token may rise."""
RIDGE = 1e-8
"""Weight per step of a ridge term, which divides a cost evenly between features that the steps cannot
distinguish.
"""
DIGITS = 6
"""Number of digits, relative to the largest part of a time, that a fit resolves; further digits are
arithmetic noise."""


@dataclass(frozen=True)
class StepTime:
    """Fitted model of step times, in microseconds."""

    base_us: float
    per_prefill_token_us: float
    per_decode_token_us: float
    per_context_token_us: float
    """Microseconds per token of context: tokens that the step's requests had computed before the step."""
    steps: int
    """Number of steps in the fit."""
    error_frac: float
    """Median of ``abs(fitted - measured) / measured`` over the fitted steps."""
    most_base_us: float
    """Largest base in microseconds that fits the steps about as well; far above ``base_us`` if all steps did
    the same work."""
    least_base_us: float = 0.0
    """Smallest base in microseconds that fits the steps about as well."""
    most_decode_base_us: float = 0.0
    """Largest base in microseconds that fits the steps that only decode; their whole time if all had the same
    batch. A prefill hides this base on a device that reads its weights while it computes.
    """

    def predicted(self) -> pl.Expr:
        """Return the predicted microseconds for each row of a frame with the columns ``FEATURES``."""
        return (
            self.base_us
            + self.per_prefill_token_us * pl.col("prefill_tokens")
            + self.per_decode_token_us * pl.col("decode_tokens")
            + self.per_context_token_us * pl.col("context_tokens")
        )


def fit_step_time(steps: pl.DataFrame) -> StepTime | None:
    """Fit the model; return None if too few steps have an output.

    Args:
        steps: Steps with ``busy_us`` and the columns ``FEATURES``; only rows with ``busy_us`` > 0 and with
            tokens are used.
    """
    import numpy as np  # noqa: PLC0415  # most runs need no model

    used = _timed(steps)
    if used is None:
        return None
    measured, work = used["busy_us"].to_numpy().astype(float), _work(used)
    scale = np.maximum(work.max(axis=0), 1.0)
    spread = float(np.median(np.abs(measured - np.median(measured)))) or 1.0
    rows = np.column_stack([work / scale, measured])
    costs, weight = np.zeros(len(scale)), np.ones(used.height)
    for _ in range(ROUNDS):  # iteratively reweighted least squares, whose minimum is that of soft_l1
        before, costs = costs, _non_negative(rows * weight[:, None], 1.0)
        weight = (1 + ((rows[:, :-1] @ costs - measured) / spread) ** 2) ** -0.25
        if np.allclose(costs, before, rtol=0, atol=0.1**DIGITS / 100 * costs.max()):
            break
    factors = resolved(costs) / scale
    error = float(np.median(np.abs(work @ factors - measured) / measured))
    weighted = rows * (weight / spread)[:, None]
    decodes = (rows[:, 1] == 0) & (rows[:, 2] > 0)
    enough = decodes.sum() >= FEWEST_STEPS
    base, prefill, decode, context = (float(factor) for factor in factors)
    least, most = _base_bounds(weighted, measured)
    return StepTime(
        base,
        prefill,
        decode,
        context,
        steps=used.height,
        error_frac=round(error, 4),
        most_base_us=max(base, most),
        least_base_us=min(base, least),
        most_decode_base_us=_base_bounds(weighted[decodes], measured[decodes])[1] if enough else 0.0,
    )


def _base_bounds(rows: Any, measured: Any) -> tuple[float, float]:
    """Return the smallest and largest base for which the other costs can still explain the steps.

    A base is possible if the steps' distance from the model stays within two standard errors.

    Args:
        rows: Weighted columns of the features, the base first, and of the time.
        measured: Measured times in microseconds.
    """
    import numpy as np  # noqa: PLC0415  # as above
    from scipy.optimize import nnls  # noqa: PLC0415  # as above

    same: Any = np.linalg.qr(rows, mode="r")
    costs, distance = nnls(same[:, :-1], same[:, -1])
    independent = len(measured) / correlation_time(rows[:, -1] - rows[:, :-1] @ costs)
    bound = distance**2 + max(4 * distance**2 / independent, RIDGE * len(measured))
    largest, ends = float(measured.max()), []
    for end in (0.0, largest):
        explains, beyond = float(costs[0]), end
        while abs(beyond - explains) > 0.1 ** (2 * DIGITS) * largest:
            base = (explains + beyond) / 2
            fits = nnls(same[:, 1:-1], same[:, -1] - base * same[:, 0])[1] ** 2 <= bound
            explains, beyond = (base, beyond) if fits else (explains, base)
        ends.append(float(resolved(np.array([explains]))[0]))
    return ends[0], ends[1]


def correlation_time(residuals: Any) -> float:
    """Return how many neighbouring residuals tell as much as one independent residual; 1 if none are related.

    This is the sum of the autocorrelations over all distances, up to the first pair of distances whose sum is
    not positive (Geyer, Statistical Science 7(4), 1992). If the pace drifts, a fit to many steps is as
    uncertain as a fit to a few.
    """
    import numpy as np  # noqa: PLC0415  # as above

    count = len(residuals)
    if not np.any(residuals):
        return 1.0
    spectrum = np.fft.rfft(residuals, 2 * count)
    shared = np.fft.irfft(spectrum * np.conj(spectrum))[: count - count % 2]
    pairs = (shared[::2] + shared[1::2]) / shared[0]
    ends = pairs <= 0
    positive = pairs[: int(np.argmax(ends))] if ends.any() else pairs
    return max(1.0, 2 * float(positive.sum()) - 1)


@dataclass(frozen=True)
class BentTime:
    """Time of a step that only decodes, on a device whose cost per token rises, in microseconds."""

    base_us: float
    per_token_us: float
    bend: float
    """Number of tokens above which each token costs more."""
    per_token_beyond_us: float
    """Additional cost of each token above ``bend``."""
    per_context_token_us: float
    error_frac: float
    """Median of ``abs(fitted - measured) / measured``."""

    def predicted(self, tokens: pl.Expr) -> pl.Expr:
        """Return the predicted microseconds for each row's ``context_tokens`` and the given tokens."""
        beyond_us = self.per_token_beyond_us * (tokens - self.bend).clip(0)
        context_us = self.per_context_token_us * pl.col("context_tokens")
        return self.base_us + self.per_token_us * tokens + beyond_us + context_us


def fit_bent_time(steps: pl.DataFrame) -> BentTime | None:
    """Fit the time of steps without prefill; None if steps are too few, or the cost never rises."""
    import numpy as np  # noqa: PLC0415  # as above
    from scipy.optimize import nnls  # noqa: PLC0415  # as above

    names = ("decode_tokens", "context_tokens", "busy_us")
    used = steps.drop_nulls(names)
    if used.height < FEWEST_STEPS:
        return None
    tokens, context, busy = (used[name].to_numpy().astype(float) for name in names)
    fits = []
    for bend in np.linspace(tokens.min(), tokens.max(), BENDS + 2)[1:-1]:
        work = np.column_stack([np.ones(len(tokens)), tokens, np.clip(tokens - bend, 0, None), context])
        size = np.maximum(work.max(axis=0), 1.0)
        costs, distance = nnls(work / size / busy[:, None], np.ones(len(busy)))
        fits.append((distance, float(bend), resolved(costs) / size, work))
    _, bend, costs, work = min(fits, key=lambda fit: fit[0])
    base_us, token_us, beyond_us, context_us = (float(cost) for cost in costs)
    error = float(np.median(np.abs(work @ costs - busy) / busy))
    return BentTime(base_us, token_us, bend, beyond_us, context_us, error) if beyond_us else None


def fit_line(sizes: pl.Series, times: pl.Series, weights: pl.Series) -> tuple[float, float]:
    """Return base and slope of a line fitted to times at given sizes (above 0) by weighted least squares."""
    import numpy as np  # noqa: PLC0415  # as above

    slope, base = np.polyfit(sizes, times, 1, w=weights)
    largest = float(sizes.max())  # type: ignore[arg-type]  # a column of numbers
    base, rise = resolved(np.array([base, slope * largest]))
    return float(base), float(rise) / largest


def resolved(costs: Any) -> Any:
    """Return the fitted parts of a time, rounded to the digits that a fit resolves (``DIGITS``)."""
    import numpy as np  # noqa: PLC0415  # as above

    largest = float(np.abs(costs).max())
    return np.round(costs, DIGITS - 1 - math.floor(math.log10(largest))) if largest else costs


def nearly_predicted(steps: pl.DataFrame, wanted: pl.DataFrame) -> pl.Series | None:
    """Predict the times of the ``wanted`` steps quickly, from a model of ``steps``.

    The model minimizes relative errors by non-negative least squares (SciPy's ``nnls``), in which a slow
    outlier weighs little. The result is None if too few steps have an output.
    """
    import numpy as np  # noqa: PLC0415  # as above

    used = _timed(steps)
    if used is None:
        return None
    busy, work = used["busy_us"].to_numpy().astype(float), _work(used)
    scale = np.maximum(work.max(axis=0), 1.0)
    rows = np.column_stack([work / scale, busy]) / busy[:, None]
    costs = _non_negative(rows, 1 / float(np.median(busy)))
    return pl.Series(np.maximum(_work(wanted) @ (resolved(costs) / scale), 1.0))


def median(values: pl.Series) -> float:
    """Return the median; 0 if there are no values."""
    return float(values.median() or 0)  # type: ignore[arg-type]  # of numbers


def _timed(steps: pl.DataFrame) -> pl.DataFrame | None:
    """Return the steps for a fit, or an even sample if there are many; None if too few have an output."""
    has_all = pl.all_horizontal(pl.col(name).is_not_null() for name in FEATURES)
    computes = pl.col("prefill_tokens") + pl.col("decode_tokens") > 0
    used = steps.filter((pl.col("busy_us") > 0) & has_all & computes).select("busy_us", *FEATURES)
    if used.height < FEWEST_STEPS:
        return None
    return used if used.height <= MOST_STEPS else used.gather_every(-(-used.height // MOST_STEPS))


def _work(steps: pl.DataFrame) -> Any:
    """Return an array with a row per step: a 1, and the step's ``FEATURES``."""
    import numpy as np  # noqa: PLC0415  # as above

    return np.column_stack([np.ones(steps.height), steps.select(FEATURES).to_numpy().astype(float)])


def _non_negative(rows: Any, size: float) -> Any:
    """Return the non-negative costs that solve the least-squares problem.

    Args:
        rows: Columns of the features, scaled to at most 1, and the column to fit; each row may be multiplied
            by a weight.
        size: Weight of a usual row.
    """
    import numpy as np  # noqa: PLC0415  # as above
    from scipy.optimize import nnls  # noqa: PLC0415  # SciPy takes half a second

    count, columns = rows.shape
    ridge = math.sqrt(RIDGE * count) * size * np.eye(columns - 1, columns)
    same: Any = np.linalg.qr(np.vstack([rows, ridge]), mode="r")  # the same problem in few rows
    return nnls(same[:, :-1], same[:, -1])[0]
