"""Choice of the part of a long load to replay: one that shows the waits of the verdict's finding.

A replay begins with an empty engine, so the part begins when few requests (if possible, none) were present.
If the unchanged replay of the part is not close to the recording, no answer is given (``require_baseline``).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.diagnose.offered_load import came_at_once
from schedtrace.diagnose.rules import KINDS, interruption
from schedtrace.diagnose.verdict import leading
from schedtrace.errors import InputError
from schedtrace.model.report import Finding
from schedtrace.model.what_if import Baseline, LoadPart
from schedtrace.timeline.frames import offset
from schedtrace.timeline.spans import until
from schedtrace.timeline.timeline import Timeline
from schedtrace.timeline.window import Window, windowed
from schedtrace.whatif.prediction import Predictor, RecordedLoad
from schedtrace.workloads.workload import LoadRequest, Workload, make_workload

STEP_US, REQUEST_US = 350.0, 25.0
"""Microseconds that a replay takes per step, and per request in a step (for 16 to 256 running requests)."""
MOST_S = 3.0
"""Maximum seconds of one replay; a menu has 20 to 40 replays."""
FEWEST = 50
"""Minimum number of requests of a part; fewer show nothing."""


def replay_s(timelines: list[Timeline]) -> float:
    """Return a rough estimate of the seconds that one replay of the whole load takes."""
    return sum(float(_cost_us(timeline.steps).sum() or 0.0) for timeline in timelines) / 1e6


HOLDS_FRAC = 0.5
"""Minimum ratio of a finding's share of the requests' time in a part to its share in the whole load, with
which the part shows the finding."""
CANDIDATES = 1000
"""Maximum number of requests, evenly spaced, that may begin a part; each takes a pass over the load."""


def part_of(base: RecordedLoad, findings: Sequence[Finding] = (), *, most_s: float = MOST_S) -> RecordedLoad:
    """Return as many of the trials, or else of one trial's requests, as can be replayed in ``most_s``.

    If requests came at their own times, the part is chosen so that it shows the leading root cause. If
    clients wait for answers or send all requests at once, the part is the load's beginning.

    Args:
        base: The recorded load.
        findings: Ranked findings of its run.
        most_s: Maximum seconds of one replay.

    Returns:
        ``base`` itself if it is short enough; otherwise a load whose ``part`` describes it. Step times are
        those of the whole load.

    Raises:
        InputError: If no part shows the verdict's finding.
    """
    if base.part is not None or replay_s(base.timelines) <= most_s:
        return base
    time = _Time(base.timelines)
    lead = next((root for root in leading([*findings]) if time.spans(root)), None)
    loads, timelines = _trials(base, most_s)
    lengths_us = (
        timeline.end_us - int(timeline.steps["start_us"][0])
        for timeline in timelines
        if timeline.steps.height
    )
    begin_us, end_us = time.first_us, time.first_us + max(lengths_us, default=0)
    run = base.run
    if len(loads) == 1 and replay_s(timelines) > most_s:
        chosen = _choose(loads[0], timelines, most_s, time, lead)
        if chosen.requests < loads[0].requests:
            begin_us, end_us = chosen.begin_us, chosen.end_us
            loads = [_cut(loads[0], chosen)]
            timelines = [_until_answered(timeline, loads[0], chosen) for timeline in timelines]
            run = replace(run, manifest=None)  # its figures are of whole trials
    part = LoadPart(
        requests=sum(load.requests for load in loads),
        whole_requests=base.requests,
        begin_s=begin_us / 1e6,
        end_s=end_us / 1e6,
    )
    absent = [root for root in findings if not time.holds(root, begin_us, end_us)]
    if lead is not None and lead in absent:
        msg = (
            f"a replay of a few seconds holds {part.requests:,} of the {part.whole_requests:,} requests, "
            "which did not wait for the verdict's limit: it stays as it is"
        )
        raise InputError(msg)
    missing = frozenset((root.code, root.cause) for root in absent)
    return replace(base, run=run, loads=loads, timelines=timelines, part=part, absent=missing)


class _Time:
    """Times of the findings of a run, on the clock of its first engine."""

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self._timelines = timelines
        self.later_us = [offset(timeline.header, timelines[0].header).us for timeline in timelines]
        starts = timelines[0].steps["start_us"]
        self.first_us = int(starts[0]) if starts.len() else 0

    def spans(self, finding: Finding) -> list[pl.DataFrame]:
        """Return each engine's spans of time that a finding is about; empty if no such spans are recorded."""
        charges = KINDS[finding.code].charges
        if charges:
            wanted = pl.col("charge").is_in([*map(str, charges)])
            return [timeline.charges.filter(wanted) for timeline in self._timelines]
        if finding.code == interruption.RULE.code:
            kind = finding.cause or ""
            return [interruption.spans_of_kind(timeline, kind) for timeline in self._timelines]
        return []

    def shares(self, spans: list[pl.DataFrame], begins_us: list[int], ends_us: list[int]) -> list[float]:
        """Return the share of the requests' time between these moments that lies in the spans."""
        inside = self._between(spans, begins_us, ends_us)
        whole = self._between([timeline.request_states for timeline in self._timelines], begins_us, ends_us)
        return [part / all_of_it if all_of_it else 0.0 for part, all_of_it in zip(inside, whole, strict=True)]

    def holds(self, finding: Finding, begin_us: int, end_us: int) -> bool:
        """Return whether these moments enclose enough of a finding to show it (``HOLDS_FRAC``)."""
        spans = self.spans(finding)
        if not spans:
            return True
        last_us = max(
            timeline.end_us + later for timeline, later in zip(self._timelines, self.later_us, strict=True)
        )
        here, whole = self.shares(spans, [begin_us, self.first_us], [end_us, last_us])
        return here >= HOLDS_FRAC * whole

    def _between(self, rows: list[pl.DataFrame], begins_us: list[int], ends_us: list[int]) -> list[float]:
        sums = [0.0] * len(begins_us)
        for engine_rows, later in zip(rows, self.later_us, strict=True):
            begin, end = (
                until(engine_rows, [us - later for us in moments]) for moments in (begins_us, ends_us)
            )
            sums = [total + after - before for total, before, after in zip(sums, begin, end, strict=True)]
        return sums


class _Chosen(NamedTuple):
    """Consecutive requests of a load."""

    first: int
    requests: int
    begin_us: int
    """Arrival of the first request on the first engine's clock; if it is the load's first, the beginning of
    the load's steps."""
    end_us: int
    """Time up to which the load can be replayed within the allowed time."""


def _choose(
    load: Workload, timelines: Sequence[Timeline], most_s: float, time: _Time, lead: Finding | None
) -> _Chosen:
    """Return the section of the load with the leading root cause and the fewest requests at its beginning."""
    import numpy as np  # noqa: PLC0415  # as everywhere

    began = load.began_us or 0
    arrived, answered = (
        np.array([math.inf if us is None else us + began for us in column])
        for column in zip(*((request.arrived_us, request.answered_us) for request in load), strict=True)
    )
    costs = pl.concat(
        timeline.steps.select(us=pl.col("start_us") + later, cost=_cost_us(timeline.steps))
        for timeline, later in zip(timelines, time.later_us, strict=True)
    ).sort("us")
    starts, spent = costs["us"].to_numpy(), costs["cost"].cum_sum().to_numpy()
    paced = load.replayed_clients is not None or all(map(came_at_once, timelines))
    last = 0 if paced or lead is None else max(0, load.requests - FEWEST)
    firsts = np.unique(np.linspace(0, last, min(CANDIDATES, last + 1)).astype(int))
    places = np.where(firsts > 0, np.searchsorted(starts, arrived[firsts]), 0)
    before = np.where(places > 0, spent[places - 1], 0.0)
    ends = starts[np.clip(np.searchsorted(spent, before + 1e6 * most_s, side="right") - 1, 0, None)]
    begins_us = [int(arrived[first]) if first else time.first_us for first in firsts]
    ends_us = [int(end) for end in ends]
    candidates = [
        _Chosen(
            int(first),
            min(load.requests - int(first), max(FEWEST, int((answered[first:] <= end_us).sum()))),
            begin_us,
            end_us,
        )
        for first, begin_us, end_us in zip(firsts, begins_us, ends_us, strict=True)
    ]
    if len(candidates) == 1 or lead is None:
        return candidates[0]
    spans = time.spans(lead)
    last_us = int(starts[-1])
    [whole] = time.shares(spans, [time.first_us], [last_us])
    shares = time.shares(spans, begins_us, ends_us)
    there = [int((answered[:first] > arrived[first]).sum()) for first in firsts]
    return min(
        zip(candidates, shares, there, strict=True),
        key=lambda candidate: (candidate[1] < HOLDS_FRAC * whole, candidate[2], candidate[0].first),
    )[0]


def _cut(load: Workload, chosen: _Chosen) -> Workload:
    """Return the chosen requests as a load that begins with the first of them."""
    later = next(islice(load.read(), chosen.first, None)).arrived_us if chosen.first else 0.0

    def requests_in_part() -> Iterator[LoadRequest]:
        for request in islice(load.read(), chosen.first, chosen.first + chosen.requests):
            yield msgspec.structs.replace(
                request,
                arrived_us=max(0.0, request.arrived_us - later),
                abort_us=None if request.abort_us is None else request.abort_us - later,
                answered_us=None if request.answered_us is None else request.answered_us - later,
            )

    cut = make_workload(load.name, load.source, requests_in_part)
    return replace(
        load,
        read=requests_in_part,
        requests=cut.requests,
        prompt_tokens=cut.prompt_tokens,
        output_tokens=cut.output_tokens,
        last_arrival_us=cut.last_arrival_us,
        began_us=None if load.began_us is None else load.began_us + round(later),
    )


def _trials(base: RecordedLoad, most_s: float) -> tuple[list[Workload], list[Timeline]]:
    """Return the first trials, at least one; all if there are no trials, or the warm-up is replayed, too."""
    trials = sorted(
        {trial for timeline in base.timelines for trial in timeline.trials() if trial is not None}
    )
    if len(trials) != len(base.loads):  # one load without trials, or the warm-up is replayed, too
        return base.loads, base.timelines
    for number in range(len(trials), 0, -1):
        timelines = []
        for timeline in base.timelines:
            steps = timeline.steps.filter(pl.col("trial").is_in(trials[:number]))
            cut = _until(timeline, steps.select(pl.max_horizontal("end_us", "output_us").max()).item())
            cut.is_window = False  # of trials as they were
            timelines.append(cut)
        if replay_s(timelines) <= most_s or number == 1:
            break
    return base.loads[:number], timelines


def _until_answered(timeline: Timeline, load: Workload, chosen: _Chosen) -> Timeline:
    """Return an engine's timeline up to its last answer to this load, with only this load's requests."""
    # Engines of a fleet may use the same ids.
    names = {request.request_id for request in load if request.data_parallel_rank in (None, timeline.rank)}
    own = pl.col("request_id").is_in(names)
    begin_us = chosen.begin_us if chosen.first else None
    cut = _until(timeline, timeline.finishes.filter(own)["finished_us"].max(), begin_us)
    cut.arrivals, cut.finishes = cut.arrivals.filter(own), cut.finishes.filter(own)
    return cut


def _until(timeline: Timeline, end_us: Any, begin_us: int | None = None) -> Timeline:
    """Cut an engine's timeline.

    Args:
        timeline: An engine of the run.
        end_us: Moment on this engine's clock; None if it had no request of the part.
        begin_us: Moment on the clock of the run's first engine; None for the engine's beginning.
    """
    end_us = timeline.begin_us if end_us is None else end_us
    return windowed(timeline, Window(begin_us=begin_us, end_us=end_us + timeline.offset_us + 1))


def _cost_us(steps: pl.DataFrame) -> pl.Series:
    return STEP_US + REQUEST_US * steps["total_requests"].fill_null(0)


def usual_figure(base: RecordedLoad) -> str:
    """Return the figure that judges a load: the mean latency, or the makespan if the load is not open.

    The figure is one of ``figures.METRICS``.
    """
    paced = any(load.replayed_clients is not None for load in base.loads)
    return "makespan" if paced or all(map(came_at_once, base.timelines)) else "E2E mean"


def require_baseline(base: RecordedLoad) -> Baseline:
    """Return how close a replay comes to the recording; step times from another source are not judged.

    Args:
        base: The recorded load; only a part of a long load is replayed.

    Raises:
        InputError: If the unchanged replay is too far from the recording.
        UsageError: If the replay never ends.
    """
    if base.times.rows is None:
        return Baseline()
    part = part_of(base)
    with Predictor(part) as predictor:
        baseline = predictor.require_reproduced(usual_figure(part))
    baseline.part = part.part
    return baseline
