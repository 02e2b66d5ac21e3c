"""What a sweep replays: the load of a run on its engine, or any load on a model's shape and a GPU."""

from schedtrace.read.run import Run
from schedtrace.step_times.fitted import Fitted
from schedtrace.whatif.prediction import recorded
from schedtrace.whatif.sweep_engines import RecordedEngine
from schedtrace.whatif.sweep_play import Work
from schedtrace.workloads.recorded_ranks import loads_of_run, without_ranks
from schedtrace.workloads.workload import Workload


def recorded_loads(run: Run) -> list[Workload]:
    """The load of each trial of a run, for another engine: its requests name no rank.

    Raises:
        InputError: it has no requests.
    """
    return [without_ranks(load) for load in loads_of_run(run.traces, manifest=run.manifest)]


def recorded_work(run: Run, times: Fitted | None = None) -> Work:
    """A run's load on the engine that recorded it.

    Args:
        run: Of one engine, or of data-parallel ranks.
        times: How long steps take; None: fitted to the run.

    Raises:
        InputError: it has no requests, or too few steps to fit step times to.
    """
    base = recorded(run, times)
    engine = RecordedEngine(base.header, base.times, len(base.timelines))
    warmups = len(base.loads) - base.trials
    return Work(base.loads, engine, base.keep_prefix_cache, warmups)
