"""Check whether the unchanged replay of a load comes near the recording; otherwise, it answers nothing."""

from schedtrace.diagnose.offered_load import came_at_once
from schedtrace.model.what_if import Baseline
from schedtrace.whatif.part import part_of
from schedtrace.whatif.prediction import Predictor, RecordedLoad


def usual_figure(base: RecordedLoad) -> str:
    """Return the figure for a load: the mean latency of an open load, else the time until all are finished.

    One of ``figures.METRICS``.
    """
    paced = any(load.replayed_clients is not None for load in base.loads)
    return "makespan" if paced or all(map(came_at_once, base.timelines)) else "E2E mean"


def require_baseline(base: RecordedLoad) -> Baseline:
    """Return how near a replay comes to the recording; step times from another source are not judged.

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
