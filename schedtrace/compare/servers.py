"""Two servers under one load compared by their requests: they have no trials.

Requests that follow each other have much in common: a queue, a batch, a slow phase of the machine. So not
single requests are drawn anew but blocks of them, in order of arrival; of the throughput, blocks of windows.
(Circular block bootstrap: Politis and Romano 1992, after Kuensch 1989.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import expm1, sqrt
from typing import Any, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import norm, t

from schedtrace.compare.significance import ALPHA, CONFIDENCE, POWER, holm
from schedtrace.diagnose.latencies import request_latencies
from schedtrace.diagnose.throughput import counted_spans
from schedtrace.model.report import RunReport
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.timeline import Timeline

Series = NDArray[np.float64]
RESAMPLES = 999
BLOCKS = 5
"""Number of blocks; few, so that each is as long as possible. With shorter blocks, including the length
that Politis and White (2004) compute, equal servers differ, because a queue outlasts the blocks.
"""
FREEDOM = BLOCKS - 2
"""Degrees of freedom of Student's t; with one more, too many differences are found
(``tools/bench/server_rates.py``).
"""
FEWEST_VALUES = 30
MOST_WINDOWS, STEPS_A_WINDOW = 120, 5
STATISTICS: dict[str, Callable[..., Series]] = {
    "output": np.mean,
    "TTFT p50": np.median,
    "TPOT p50": np.median,
    "E2E p50": np.median,
}
"""Compared metrics, with the statistic of their series; no tails, for lack of requests."""
LATENCIES = {"TTFT p50": "ttft_us", "TPOT p50": "tpot_us", "E2E p50": "e2e_us"}
"""Latencies of requests, by their columns."""


@dataclass(frozen=True)
class Served:
    """Values behind a server's figures, in order, by metric."""

    series: dict[str, Series]

    @classmethod
    def from_server_run(cls, report: RunReport, timeline: Timeline) -> Self | None:
        """Return a server's figures; None with trials, several engines, or without requests or times."""
        if not {Fact.LIVES, Fact.TIMES} <= timeline.facts:
            return None
        if report.config["engines"] > 1 or [trial.trial for trial in report.trials] != [None]:
            return None
        latencies = {name: request_latencies(timeline)[column] / 1e3 for name, column in LATENCIES.items()}
        series = {name: values.drop_nulls().to_numpy() for name, values in latencies.items()}
        return cls({"output": _output(timeline), **series})


@dataclass(frozen=True)
class Change:
    """Change of a metric from base to new, as logarithms: ``new / base = exp(change)``."""

    change: float
    error: float
    """Its standard error."""

    @property
    def p(self) -> float:
        """Two-sided p-value, by Student's t."""
        return float(2 * t.sf(abs(self.change) / self.error, FREEDOM))

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the 95 % interval of ``new / base - 1``."""
        width = float(t.isf((1 - CONFIDENCE) / 2, FREEDOM)) * self.error
        return expm1(self.change - width), expm1(self.change + width)

    def detectable_change(self, tests: int) -> float:
        """Return the smallest change that would be detected with a probability of ``POWER``."""
        level = float(t.isf(ALPHA / max(1, tests) / 2, FREEDOM))
        return expm1((level + float(norm.isf(1 - POWER))) * self.error)


def server_changes(base: Served, new: Served) -> dict[str, tuple[Change, float]]:
    """Return each metric's change and Holm-corrected p-value, where both sides have enough values."""
    changes = {}
    for name, statistic in STATISTICS.items():
        before, after = (_estimate(served.series[name], statistic) for served in (base, new))
        if before and after and (before[1] or after[1]):
            changes[name] = Change(after[0] - before[0], sqrt(before[1] ** 2 + after[1] ** 2))
    corrected = holm([change.p for change in changes.values()])
    return {name: (change, p) for (name, change), p in zip(changes.items(), corrected, strict=True)}


def _estimate(values: Series, statistic: Callable[..., Series]) -> tuple[float, float] | None:
    """Return the logarithm of the statistic and its standard error; None if values are too few or all 0."""
    if len(values) < FEWEST_VALUES:
        return None
    length = len(values) // BLOCKS
    starts = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, BLOCKS))
    places = (starts[:, :, None] + np.arange(length)) % len(values)
    figures = statistic(values[places.reshape(RESAMPLES, -1)], axis=1)
    if min(figures.min(), statistic(values)) <= 0:
        return None
    # with so few blocks, resampling underestimates the variance by one block's share
    error = float(np.log(figures).std(ddof=1)) * sqrt(BLOCKS / (BLOCKS - 1))
    return float(np.log(statistic(values))), error


def _output(timeline: Timeline) -> Series:
    """Return output tokens per second in equal windows of the time with requests."""
    spans = counted_spans(timeline).select(
        pl.col("begin_us", "end_us") - timeline.header.wall_anchor_us,
        before_us=LENGTH_US.cum_sum() - LENGTH_US,
    )
    back = timeline.steps.filter(pl.col("output_us").is_not_null() & pl.col("output_tokens").is_not_null())
    if back.is_empty() or spans.is_empty():
        return np.array([])
    into = pl.min_horizontal("output_us", "end_us") - pl.col("begin_us")
    rows = (
        back.select(pl.col("output_us").cast(pl.Int64), "output_tokens")
        .sort("output_us")
        .join_asof(spans, left_on="output_us", right_on="begin_us", coalesce=False)
        .select(at_us=(pl.col("before_us") + into).fill_null(0), tokens="output_tokens")
    )
    lasted_us = int(spans.select(LENGTH_US.sum()).item())
    return in_windows(rows["at_us"].to_numpy(), rows["tokens"].to_numpy(), lasted_us)


def in_windows(at_us: NDArray[Any], tokens: NDArray[Any], lasted_us: int) -> Series:
    """Return tokens per second in equal windows of a time, from steps' times and tokens."""
    windows = min(MOST_WINDOWS, len(at_us) // STEPS_A_WINDOW)
    if not windows:
        return np.array([])
    counts, _ = np.histogram(at_us, bins=windows, range=(0, lasted_us), weights=tokens)
    return counts * windows / (lasted_us / 1e6)
