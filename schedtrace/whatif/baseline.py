"""Whether the replay of a load as recorded comes near to what was recorded; if not, it answers nothing."""

from schedtrace.diagnose.offered_load import came_at_once
from schedtrace.model.what_if import Baseline
from schedtrace.whatif.part import part_of
from schedtrace.whatif.prediction import Predictor, RecordedLoad


def usual_figure(base: RecordedLoad) -> str:
    """Return what suits a load: the mean latency of an open one, the time until all are done of any other.

    One of ``figures.METRICS``.
    """
    paced = any(load.closed is not None for load in base.loads)
    return "makespan" if paced or all(map(came_at_once, base.timelines)) else "E2E mean"


def require_baseline(base: RecordedLoad) -> Baseline:
    """Return how near a replay comes to this load as recorded; step times from elsewhere are not judged.

    Args:
        base: The recorded load; of a long one a part is replayed.

    Raises:
        InputError: the replay of the load as recorded is too far from what was recorded.
        UsageError: it never ends.
    """
    if base.times.rows is None:
        return Baseline()
    part = part_of(base)
    with Predictor(part) as predictor:
        baseline = predictor.require_reproduced(usual_figure(part))
    baseline.part = part.part
    return baseline
