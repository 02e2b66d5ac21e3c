"""Phases of slow steps: stretches of time in which most steps are slow, and the period at which they return.

The phases come from the excess itself, so they tell when steps are slow and not why.
"""

from typing import NamedTuple

import numpy as np
import polars as pl

from schedtrace.timeline.excess import Array

MOST_BETWEEN = 5
"""Most examined steps from one slow step of a phase to the next."""
FEWEST_OF_PHASE = 10
"""Fewest slow steps in a phase."""
LEAST_SLOW_FRAC = 0.5
"""Least share of slow steps in a phase."""
FEWEST_RETURNS = 4
"""Fewest phases that show a period."""
LATE_FRAC = 0.1
"""Share of the period by which a phase may be early or late."""


class StepPhase(NamedTuple):
    """Stretch of time in which most steps are slow."""

    first_step: int
    last_step: int
    begin_us: int
    end_us: int


def slow_phases(steps: pl.DataFrame, slow: Array) -> list[StepPhase]:
    """Return the phases of slow steps in order of time.

    Args:
        steps: Examined steps in order of time.
        slow: Whether each step is slow.
    """
    places = np.flatnonzero(slow)
    runs = np.split(places, np.flatnonzero(np.diff(places) > MOST_BETWEEN) + 1)
    dense = [
        run
        for run in runs
        if len(run) >= FEWEST_OF_PHASE and len(run) >= LEAST_SLOW_FRAC * (run[-1] - run[0] + 1)
    ]
    numbers, begins = steps["step"], steps["start_us"]
    ends = steps.select(pl.max_horizontal("start_us", "end_us", "output_us")).to_series()
    return [
        StepPhase(int(numbers[at]), int(numbers[to]), int(begins[at]), int(ends[to]))
        for at, to in ((int(run[0]), int(run[-1])) for run in dense)
    ]


def returning_phases(steps: pl.DataFrame, phases: list[StepPhase]) -> tuple[float, Array] | None:
    """Return the period of the phases and each step's position in it, in seconds; None if they do not return.

    The distances in the first half of the phases predict each phase of the second half. A phase during which
    the trace begins shows no beginning. Steps before the first and after the last phase get the last position
    of a period: phases that begin or cease to return mark no steps there.

    Args:
        steps: Examined steps in order of time.
        phases: Their ``slow_phases``.
    """
    begins = np.array([phase.begin_us for phase in phases if phase.begin_us > steps["start_us"][0]], float)
    if len(begins) < FEWEST_RETURNS:
        return None
    distances = np.diff(begins)
    usual = float(np.median(distances[: (len(distances) + 1) // 2]))
    if np.abs(distances - usual).max() > LATE_FRAC * usual:
        return None
    numbers = np.arange(len(begins))
    period = float(begins[-1] - begins[0]) / (len(begins) - 1)
    starts = steps["start_us"].to_numpy()
    position = np.mod(starts - (begins - period * numbers).min(), period)
    outside = (starts < phases[0].begin_us) | (starts > phases[-1].end_us)
    return period / 1e6, np.where(outside, period, position) / 1e6
