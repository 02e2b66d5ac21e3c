"""Load of a recorded run of several engines: all requests on one clock, each with its rank."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import polars as pl

from schedtrace.errors import InputError
from schedtrace.model.manifest import Manifest
from schedtrace.model.message import Count, Message
from schedtrace.model.say import say
from schedtrace.read.trace import Trace
from schedtrace.timeline.frames import offset
from schedtrace.timeline.timeline import WARMUP_TRIAL
from schedtrace.workloads.clients import clients_of
from schedtrace.workloads.recorded_load import ONE_OF_SEVERAL, from_trace, loads_of, trials_of
from schedtrace.workloads.workload import LoadRequest, Pass, Workload, make_workload


def loads_of_run(traces: Sequence[Trace], *, manifest: Manifest | None = None) -> list[Workload]:
    """Return the load of each trial of a run, in order and without the warm-up.

    Each request has the rank that it went to and, of ranks in lock-step, the pass before which it came.

    Args:
        traces: Of all its engines, in the order of ranks.
        manifest: Of the run.

    Raises:
        InputError: If no engine has requests, or only those of the warm-up.
    """
    if len(traces) == 1:
        return loads_of(traces[0], manifest=manifest)
    trials = sorted({trial for trace in traces for trial in trials_of(trace)}, key=lambda trial: trial or 0)
    measured = [trial for trial in trials if trial != WARMUP_TRIAL]
    if not measured:
        msg = f"{traces[0].path.parent}: no requests of a trial, so no load"
        raise InputError(msg)
    return [load_of_ranks(traces, trial, manifest=manifest) for trial in measured]


def load_of_ranks(
    traces: Sequence[Trace], trial: int | None, *, manifest: Manifest | None = None
) -> Workload:
    """Return the load of one trial of a run; see ``loads_of_run``."""
    if len(traces) == 1:
        return from_trace(traces[0], trial, manifest=manifest)
    loads = {
        rank: from_trace(trace, trial, manifest=manifest)
        for rank, trace in enumerate(traces)
        if trial in trials_of(trace)
    }
    began = {
        rank: (load.began_us or 0) + offset(traces[rank].header, traces[0].header).us
        for rank, load in loads.items()
    }
    first_us = min(began.values())
    passes = {rank: _passes(traces[rank], trial) for rank in loads}
    first_wave = min((of_rank[0][0] for of_rank in passes.values() if of_rank), default=0)
    requests: list[LoadRequest] = []
    for rank, load in loads.items():
        of = partial(_pass, passes[rank], first_wave)
        later = began[rank] - first_us
        requests += (
            msgspec.structs.replace(
                request,
                data_parallel_rank=rank,
                arrived_us=request.arrived_us + later,
                abort_us=None if request.abort_us is None else request.abort_us + later,
                answered_us=None if request.answered_us is None else request.answered_us + later,
                queued_pass=of(request.queued_step),
                abort_pass=of(request.abort_step) if request.abort_step else None,
            )
            for request in load
        )
    requests.sort(key=lambda request: request.arrived_us + request.front_end_us)
    name = traces[0].path.parent.name
    return make_workload(
        name if trial is None else f"{name}, trial {trial}",
        "recorded",
        partial(iter, requests),
        prefix_block=next(iter(loads.values())).prefix_block,
        notes=_notes(loads.values(), requests),
        began_us=first_us,
        of_server=trial is None,
        clients=clients_of(
            [request.arrived_us for request in requests],
            [request.answered_us for request in requests],
            [request.abort_us is not None for request in requests],
        ),
    )


def without_ranks(load: Workload) -> Workload:
    """Return the load with requests that name no rank."""

    def read() -> Iterator[LoadRequest]:
        for request in load:
            yield msgspec.structs.replace(request, data_parallel_rank=None)

    return replace(load, read=read)


def _passes(trace: Trace, trial: int | None) -> list[Pass]:
    """Return the pass of each ``schedule()`` call; empty without lock-step or if lines are missing."""
    steps = trace.steps.filter(pl.col("trial").eq_missing(trial)).sort("step")
    whole = steps.height and steps["step"][-1] - steps["step"][0] + 1 == steps.height
    if not whole or steps["wave"].null_count() or steps["step_counter"].null_count():
        return []
    return list(steps.select("wave", "step_counter").iter_rows())


def _pass(passes: Sequence[Pass], first_wave: int, step: int | None) -> Pass | None:
    """Return the pass of the load for a step; a time after the last step is one pass later."""
    if not passes or step is None:
        return None
    wave, counter = passes[min(step, len(passes) - 1)]
    return wave - first_wave, counter + (step >= len(passes))


def _notes(loads: Iterable[Workload], requests: Sequence[LoadRequest]) -> Iterator[Message]:
    """Yield the notes of all ranks, with numbers of requests added up."""
    by_template: dict[str, list[Message]] = {}
    for load in loads:
        for note in load.notes:
            by_template.setdefault(note.template, []).append(note)
    by_template.pop(ONE_OF_SEVERAL, None)
    for template, notes in by_template.items():
        arguments = dict(notes[0].arguments)
        counts = [note.arguments.get("requests") for note in notes]
        numbers = [count.count for count in counts if isinstance(count, Count)]
        if numbers:
            arguments["requests"] = Count(sum(numbers), "request")
        yield say(template, **arguments)
    if len({request.data_parallel_rank for request in requests if request.prefix}) > 1:
        yield say(
            "Which prompts on different ranks begin alike is not recorded: routed anew, they share no prefix."
        )
