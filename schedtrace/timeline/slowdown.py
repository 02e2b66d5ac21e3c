"""A slowdown: a time in which the device took longer for the same work than in the rest of the run."""

import polars as pl

from schedtrace.timeline.step_time import FEATURES, nearly_predicted

SLOWER = 1.25
"""A quarter longer: less comes and goes on a device that others use, too."""
ERRORS = 3.0
"""And by three times what the model leaves unexplained in nine of ten steps outside."""
TYPICAL = 0.9
FEWEST_INSIDE = 20
"""Steps with no more work of any kind than some step outside: beyond, no model was seen to hold."""
CLEARLY = 0.8
"""So many of them took longer than nine of ten outside, for what the model expects."""
ROUNDS = 3
"""The rates outside are known once it is known what is inside, and the other way round."""


def slowdown(steps: pl.DataFrame) -> tuple[pl.DataFrame, float] | None:
    """The steps of the longest such time and how many times as long they took; None: there is none.

    Where it begins and ends is found in the running sum of the errors of a model of all steps, as a change of
    a mean is; that it is one, and the factor, by a model of the steps outside.

    Args:
        steps: In order, with ``device_us`` > 0 and the columns ``FEATURES``.
    """
    inside = pl.Series([False] * steps.height, dtype=pl.Boolean)
    timed = steps.with_columns(busy_us="device_us")
    for _ in range(ROUNDS):
        expected = nearly_predicted(timed.filter(~inside), timed)
        if expected is None:
            return None
        before, inside = inside, _longer_than(timed["busy_us"], expected)
        if (before == inside).all():
            break
    factor = _factor(timed.with_columns(ratio=pl.col("device_us") / expected, inside=inside))
    return None if factor is None else (steps.filter(inside), factor)


def _longer_than(measured: pl.Series, expected: pl.Series) -> pl.Series:
    """Which of the steps stand between the lowest and the highest point of the errors' running sum.

    Above the mean is what the sum rises by (E. S. Page, Continuous Inspection Schemes, Biometrika 1954).
    """
    import numpy as np  # noqa: PLC0415  # most runs need no model

    error = np.log(measured.to_numpy() / expected.to_numpy())
    low, high = np.quantile(error, (0.05, 0.95))
    error = error.clip(low, high)
    total = np.concatenate([[0.0], np.cumsum(error - error.mean())])
    first, last = int(total.argmin()), int(total.argmax())
    place = np.arange(len(error))
    if first > last:  # slow at the beginning or at the end, whichever is more
        first, last = (0, last) if last > len(error) - first else (first, len(error))
    return pl.Series((place >= first) & (place < last))


def _factor(steps: pl.DataFrame) -> float | None:
    """How many times as long the steps inside took as the model of those outside expects; None: as long."""
    outside = steps.filter(~pl.col("inside"))
    most = outside.select(pl.col(FEATURES).max()).row(0)
    known = steps.filter("inside", *(pl.col(name) <= top for name, top in zip(FEATURES, most, strict=True)))
    if known.height < FEWEST_INSIDE:
        return None
    error, high = outside.select(
        (pl.col("ratio") - 1).abs().quantile(TYPICAL).alias("error"),
        pl.col("ratio").quantile(TYPICAL).alias("high"),
    ).row(0)
    factor = float(known["ratio"].median())  # type: ignore[arg-type]  # of numbers
    clearly = (known["ratio"] > high).mean() >= CLEARLY
    return factor if clearly and factor >= max(SLOWER, 1 + ERRORS * error) else None
