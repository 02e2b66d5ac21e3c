"""Replay of a fleet's load through another router or on another number of engines.

The engines become independent data-parallel ranks of one replay, each with vLLM's own scheduler. In the
baseline, every request goes to the same engine as in the recording.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.errors import InputError, UsageError
from schedtrace.fleet.inputs import FleetInputs, staged
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.model.what_if import Replays
from schedtrace.read.lines import ReadOptions
from schedtrace.read.run import Run, Traces, read_run
from schedtrace.read.trace import Trace
from schedtrace.step_times.fitted import fit
from schedtrace.timeline.frames import offset
from schedtrace.timeline.timeline import make_timeline
from schedtrace.whatif.part import part_of, usual_figure
from schedtrace.whatif.prediction import Predictor, RecordedLoad
from schedtrace.workloads.recorded_load import loads_of_run
from schedtrace.workloads.workload import LoadRequest, Workload

MOST_BYTES = 500_000_000
"""Maximum size of the traces of one replay, because all of them are in memory at once."""
MOST_S = 6.0
"""Maximum estimated seconds of one replay; of a longer load, only the first part is replayed."""
RESAMPLES = 4
"""Number of fits to resampled steps; fewer than for a single run, because a fleet's replays are long."""


def fleet_load(inputs: FleetInputs, *, most_s: float = MOST_S) -> tuple[RecordedLoad, list[Message]]:
    """Return a fleet's load as that of data-parallel ranks, with notes on what a replay leaves out.

    Args:
        inputs: Engines of one model, device and role.
        most_s: Maximum estimated seconds of one replay.

    Raises:
        InputError: If a trace cannot be read, the traces are too large, or the engines are not of one kind.
        UsageError: If there is only one engine, or the engines are data-parallel ranks in lock-step.
    """
    size = sum(file.size for source in inputs.engines for file in source.files)
    if size > MOST_BYTES:
        msg = (
            f"{size / 1e6:,.0f} MB of traces: a replay keeps all of them in memory, at most "
            f"{MOST_BYTES / 1e6:,.0f} MB; name fewer engines, or parts of their traces"
        )
        raise InputError(msg)
    with ExitStack() as stack:
        named = []
        for source in inputs.engines:  # files of remote runs are local until the stack is closed
            trace = stack.enter_context(staged(source, source.parts))
            named.append(read_run(trace.path, ReadOptions(cache=False)))
        runs = [*{_identity(run.traces[0]): run for run in reversed(named)}.values()][::-1]
        headers = [run.traces[0].header for run in runs]
        _require_one_kind(headers)
        [(usual, count)] = Counter(map(_limits, headers)).most_common(1)
        notes = []
        if different := len(headers) - count:
            words = "{different:n engine} with other limits are replayed with those of the rest."
            notes.append(say(words, different=different))
        if copies := len(named) - len(runs):
            notes.append(say("Left out as copies: {copies:n recording}.", copies=copies))
        base = _recorded(sorted(runs, key=lambda run: _limits(run.traces[0].header) != usual))
        part = part_of(base, most_s=most_s)
    return replace(part, loads=[_with_own_ids(load) for load in part.loads]), notes


def fleet_replay(
    base: RecordedLoad,
    changes: Mapping[str, Any],
    notes: Sequence[Message] = (),
    *,
    resamples: int = RESAMPLES,
) -> Replays:
    """Return the document of two replays: with the recorded assignment, and with the changes.

    Args:
        base: Load of the fleet.
        changes: ``data_parallel_size``, the number of engines, and ``router``.
        notes: Notes on the load.
        resamples: As for ``prediction.predict``.

    Raises:
        InputError: If the replay of the recorded assignment is too far from the recording.
        UsageError: If vLLM does not accept the changes, or the load never ends.
    """
    with Predictor(base, resamples=resamples) as predictor:
        baseline = predictor.require_reproduced(usual_figure(base))
        baseline.part = base.part
        document = predictor.document([predictor.predict(changes)], baseline)
    document.settings = {"data_parallel_size": len(base.timelines), "router": "as recorded"}
    document.notes += notes
    return document


def _identity(trace: Trace) -> object:
    """Return a key that is equal for copies of a recording and differs between engines."""
    return msgspec.json.encode(trace.header), trace.steps.height, trace.arrivals.hash_rows().sum()


def _require_one_kind(headers: Sequence[Header]) -> None:
    role = "kv_transfer_config.kv_role"
    kinds = {(header.model, header.device, header.settings.get(role)) for header in headers}
    if len(kinds) > 1:
        msg = f"engines of {len(kinds)} kinds (model, device, role): a replay needs those of a single kind"
        raise InputError(msg)
    if len(headers) == 1:
        msg = "one engine is no fleet: schedtrace replay RUN replays it"
        raise UsageError(msg)
    if any((header.data_parallel_size or 1) > 1 for header in headers):
        msg = "these are data-parallel ranks in lock-step: schedtrace replay RUN replays them"
        raise UsageError(msg)


def _limits(header: Header) -> tuple[int | None, ...]:
    return header.token_budget, header.max_num_running_reqs, header.kv_blocks_total, header.max_model_len


def _recorded(engines: Sequence[Run]) -> RecordedLoad:
    """Return the load of the engines, each as a rank; see ``prediction.recorded_load``."""
    traces, timelines = [], []
    for rank, engine in enumerate(engines):
        header = msgspec.structs.replace(engine.traces[0].header, engine_rank=rank)
        if header.clock == "virtual":  # simulated engines have no common clock and begin together
            header = msgspec.structs.replace(header, wall_anchor_us=0, clock_id=None)
        traces.append(replace(engine.traces[0], header=header))
        timelines.append(make_timeline(traces[-1], engine.manifest, front_end=engine.front_end))
    for timeline in timelines:
        timeline.offset_us = offset(timeline.header, timelines[0].header).us
    run = Run(Path("fleet"), None, Traces(traces), len(traces))
    return RecordedLoad(run, timelines, loads_of_run(traces), fit(timelines, [f"{len(traces)} engines"]))


def _with_own_ids(load: Workload) -> Workload:
    """Return the load with a unique id for every request, because engines may use the same ids."""

    def requests_with_own_ids() -> Iterator[LoadRequest]:
        for number, request in enumerate(load.read()):
            yield msgspec.structs.replace(request, request_id=f"f{number}")

    return replace(load, read=requests_with_own_ids)
