"""What a sweep replays: the load of a run on its engine, or any load on a model's shape and a GPU."""

from schedtrace.read.run import Run
from schedtrace.whatif.prediction import Recorded
from schedtrace.whatif.sweep_engines import RecordedEngine
from schedtrace.whatif.sweep_play import Work
from schedtrace.workloads.recorded_ranks import loads_of_run, without_ranks
from schedtrace.workloads.workload import Workload


def recorded_loads(run: Run, clients: int | None = None) -> list[Workload]:
    """The load of each trial of a run, for another engine: its requests name no rank.

    Args:
        run: Any.
        clients: As ``prediction.recorded``.

    Raises:
        InputError: it has no requests.
    """
    loads = [without_ranks(load) for load in loads_of_run(run.traces, manifest=run.manifest)]
    return loads if clients is None else [load.with_clients(clients) for load in loads]


def recorded_work(base: Recorded) -> Work:
    """A recorded load on its engine."""
    engine = RecordedEngine(base.header, base.times, len(base.timelines))
    warmups = len(base.loads) - base.trials
    return Work(base.loads, engine, base.keep_prefix_cache, warmups)
