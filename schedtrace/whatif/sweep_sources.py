"""What a sweep replays: the load of a run on its engine, or any load on a model's shape and a GPU."""

from schedtrace.errors import InputError
from schedtrace.read.run import Run
from schedtrace.step_times.fitted import Fitted
from schedtrace.whatif.prediction import recorded
from schedtrace.whatif.sweep_engines import RecordedEngine
from schedtrace.whatif.sweep_play import Work
from schedtrace.workloads.recorded import loads_of
from schedtrace.workloads.workload import Workload


def recorded_loads(run: Run) -> list[Workload]:
    """The load of each trial of a run of one engine, for another engine.

    Raises:
        InputError: it has several engines, or no requests.
    """
    if len(run.traces) != 1:
        msg = f"{run.path}: {len(run.traces)} engines; a replay takes one: name its trace file"
        raise InputError(msg)
    return loads_of(run.traces[0], manifest=run.manifest)


def recorded_work(run: Run, times: Fitted | None = None) -> Work:
    """A run's load on the engine that recorded it.

    Args:
        run: Of one engine.
        times: How long steps take; None: fitted to the run.

    Raises:
        InputError: it has several engines, no requests, or too few steps to fit step times to.
    """
    base = recorded(run, times)
    engine = RecordedEngine(base.timeline.header, base.times)
    warmups = len(base.loads) - len(base.timeline.trials())
    return Work(base.loads, engine, base.keep_prefix_cache, warmups)
