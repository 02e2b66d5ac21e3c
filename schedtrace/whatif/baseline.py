"""Whether the replay of a load as recorded comes near to what was recorded; if not, it answers nothing."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import polars as pl

from schedtrace.diagnose.offered_load import came_at_once
from schedtrace.timeline.timeline import Timeline
from schedtrace.timeline.window import Window, windowed
from schedtrace.whatif.prediction import Predictor, Recorded
from schedtrace.workloads.workload import LoadRequest, Workload, make_workload

STEP_US, REQUEST_US = 350.0, 25.0
"""What a step of a replay costs, and each request in it, with 16 to 256 running (docs/what-if.md)."""
MOST_S = 3.0
"""Of one replay: a menu has 20 to 40."""
FEWEST = 50
"""Requests of a part: fewer show nothing."""


def replay_s(timelines: list[Timeline]) -> float:
    """How long one replay of all of it takes, roughly, in seconds."""
    return sum(float(_cost_us(timeline.steps).sum() or 0.0) for timeline in timelines) / 1e6


def first_part(base: Recorded, most_s: float = MOST_S) -> Recorded:
    """As many of the trials, or else of the requests of the first one, as can be replayed in this time.

    Args:
        base: The recorded load.
        most_s: Seconds of one replay.

    Returns:
        ``base`` itself where that is short enough. Otherwise ``whole_requests`` says of how many it is a
        part. Step times are those of the whole.
    """
    if replay_s(base.timelines) <= most_s:
        return base
    loads, timelines = _trials(base, most_s)
    if len(loads) == 1 and replay_s(timelines) > most_s:
        number = _requests(loads[0], timelines, most_s)
        if number < loads[0].requests:
            loads = [_first(loads[0], number)]
            names = {request.request_id for request in loads[0]}
            timelines = [_of_requests(timeline, names) for timeline in timelines]
            base = replace(base, run=replace(base.run, manifest=None))  # its figures are of whole trials
    requests = base.whole_requests or sum(load.requests for load in base.loads)
    return replace(base, loads=loads, timelines=timelines, whole_requests=requests)


def _trials(base: Recorded, most_s: float) -> tuple[list[Workload], list[Timeline]]:
    """The first trials, at least one; all where the prefix cache was kept between them."""
    trials = sorted(
        {trial for timeline in base.timelines for trial in timeline.trials() if trial is not None}
    )
    if len(trials) != len(base.loads):  # one load without trials, or the warm-up is replayed, too
        return base.loads, base.timelines
    for number in range(len(trials), 0, -1):
        timelines = [_of_trials(timeline, trials[:number]) for timeline in base.timelines]
        if replay_s(timelines) <= most_s or number == 1:
            break
    return base.loads[:number], timelines


def _requests(load: Workload, timelines: list[Timeline], most_s: float) -> int:
    """How many of the first requests were answered when steps had cost so much."""
    answered = 0
    for timeline in timelines:
        costs_us = timeline.steps.select("start_us", cost_us=_cost_us(timeline.steps).cum_sum())
        last = costs_us.filter(pl.col("cost_us") <= most_s * 1e6 / len(timelines))["start_us"].max()
        answered += timeline.finishes.filter(pl.col("finished_us") <= (last or 0)).height
    return min(load.requests, max(FEWEST, answered))


def _first(load: Workload, number: int) -> Workload:
    def read() -> Iterator[LoadRequest]:
        return islice(load.read(), number)

    cut = make_workload(load.name, load.source, read)
    return replace(
        load,
        read=read,
        requests=cut.requests,
        prompt_tokens=cut.prompt_tokens,
        output_tokens=cut.output_tokens,
        last_arrival_us=cut.last_arrival_us,
    )


def _of_requests(timeline: Timeline, names: set[str]) -> Timeline:
    """What happened until these requests were answered."""
    own = pl.col("request_id").is_in(names)
    cut = _until(timeline, timeline.finishes.filter(own)["finished_us"].max())
    cut.arrivals, cut.finishes = cut.arrivals.filter(own), cut.finishes.filter(own)
    return cut


def _of_trials(timeline: Timeline, trials: list[int]) -> Timeline:
    of_trials = timeline.steps.filter(pl.col("trial").is_in(trials))
    cut = _until(timeline, of_trials.select(pl.max_horizontal("end_us", "output_us").max()).item())
    cut.is_window = False  # of trials as they were
    return cut


def _until(timeline: Timeline, end_us: Any) -> Timeline:
    """Cut at a moment; none: this engine had nothing of it."""
    return windowed(timeline, Window(end_us=(end_us or timeline.begin_us) + 1))


def _cost_us(steps: pl.DataFrame) -> pl.Series:
    return STEP_US + REQUEST_US * steps["total_requests"].fill_null(0)


ANSWERS_WITHIN = 0.10
"""A replay that was asked for answers from here on; advice that was not asked for has to come nearer."""


def usual_figure(base: Recorded) -> str:
    """What suits a load: the mean latency of an open one, the time until all are done of any other.

    One of ``figures.METRICS``.
    """
    paced = any(load.closed is not None for load in base.loads)
    return "makespan" if paced or all(map(came_at_once, base.timelines)) else "E2E mean"


def require_baseline(base: Recorded) -> None:
    """See that a replay can answer what becomes of this load; nothing is asked of step times from elsewhere.

    Args:
        base: The recorded load; of a long one its first part is replayed.

    Raises:
        InputError: the replay of the load as recorded is too far from what was recorded.
        UsageError: it never ends.
    """
    if base.times.rows is None:
        return
    part = first_part(base)
    with Predictor(part) as predictor:
        predictor.require_reproduced(usual_figure(part), ANSWERS_WITHIN)
