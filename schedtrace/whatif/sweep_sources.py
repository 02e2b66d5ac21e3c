"""What a sweep replays: the load of a run on its engine, or any load on a model's shape and a GPU."""

from dataclasses import replace

from schedtrace.errors import UsageError
from schedtrace.model.message import Number, message
from schedtrace.read.run import Run
from schedtrace.step_times.fitted import fit
from schedtrace.step_times.gpus import Gpu
from schedtrace.step_times.model import StepTimes
from schedtrace.step_times.shape import Shape
from schedtrace.timeline.timeline import make_timeline
from schedtrace.whatif.sweep_engines import ModelledEngine, RecordedEngine
from schedtrace.whatif.sweep_play import Work
from schedtrace.workloads.recorded import loads_of
from schedtrace.workloads.workload import Workload

LENGTHS = 1024
"""``max_model_len`` that nobody gave is a multiple of it."""


def recorded_loads(run: Run) -> list[Workload]:
    """The load of each trial of a run of one engine.

    Raises:
        UsageError: the run has several engines.
        InputError: it has no requests.
    """
    if len(run.traces) > 1:
        first = run.traces[0].path
        msg = f"{run.path}: {len(run.traces)} engines in it; name the trace of one, such as {first}"
        raise UsageError(msg)
    return loads_of(run.traces[0], manifest=run.manifest)


def recorded_work(run: Run, times: StepTimes | None = None) -> Work:
    """A run's load on the engine that recorded it.

    Args:
        run: Of one engine.
        times: How long steps take; None: fitted to the run.

    Raises:
        UsageError: the run has several engines.
        InputError: it has no requests, or too few steps to fit step times to.
    """
    loads, [trace] = recorded_loads(run), run.traces
    if times is None:
        times = fit([make_timeline(trace, run.manifest, front_end=run.front_end)], [run.label])
    return Work(loads, RecordedEngine(trace.header, times), keep_prefix_cache=_keeps(run))


def modelled_work(
    loads: list[Workload], shape: Shape, gpu: Gpu, times: StepTimes | None = None, run: Run | None = None
) -> Work:
    """Loads on a model and a GPU; ``max_model_len`` has room for the longest request unless it is changed.

    Args:
        loads: Trials.
        shape: The model's.
        gpu: One of the GPUs.
        times: How long steps take; None: the roofline of shape and GPUs.
        run: Whose load it is; it tells whether the prefix cache is emptied between trials.
    """
    longest = max(
        request.prompt_tokens + (request.max_tokens or request.output_tokens)
        for load in loads
        for request in load
    )
    room = -(-longest // LENGTHS) * LENGTHS
    note = message(
        "max_model_len is {room}, as the longest request needs, unless it is set.", room=Number(room)
    )
    loads = [replace(load, notes=[*load.notes, note]) for load in loads]
    return Work(
        loads, ModelledEngine(shape, gpu, room, times), keep_prefix_cache=run is not None and _keeps(run)
    )


def _keeps(run: Run) -> bool:
    workload = run.manifest and run.manifest.workload
    return bool(workload and workload.keep_prefix_cache)
