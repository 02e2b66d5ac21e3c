"""Load on an engine in virtual time, recorded as a run."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.errors import NeverEndsError, UsageError, reason_of
from schedtrace.model import safe_files
from schedtrace.model.manifest import Manifest, write_manifest
from schedtrace.model.trace_bounds import PLAIN
from schedtrace.model.what_if import OF_RANKS
from schedtrace.record.settings import RUN_DIR, TRACE, TRIAL_IDS
from schedtrace.record.switches import SWITCH
from schedtrace.record.traced import traced_class
from schedtrace.simulate.clock import VirtualClock
from schedtrace.simulate.player import FeedByStep, Played, Player
from schedtrace.simulate.ranks import Ranks
from schedtrace.simulate.simulation import NoProgressError, Simulation, VirtualEngines
from schedtrace.step_times.batch import StepTimes
from schedtrace.workloads.workload import LoadRequest, Workload

BETWEEN_TRIALS_US = 1000.0


def play_loads(
    loads: Iterable[Workload],
    options: Mapping[str, Any],
    times: StepTimes,
    folder: Path,
    *,
    by_step: bool = False,
    keep_prefix_cache: bool = False,
    trial_ids: bool = False,
    manifest: Manifest | None = None,
) -> Played:
    """Send the requests of each load (trial) in turn, and record what happens.

    Args:
        loads: Loads; each begins when the previous one is finished.
        options: Options of ``Engine``, or of ``Ranks`` if ``data_parallel_size`` exceeds 1. With a
            ``router``, every request goes to the rank that the router chooses, not to the one that it names.
        times: Step times.
        folder: Run folder to write.
        by_step: Whether requests enter, and clients disconnect, before the same step as in the recording,
            instead of at their times.
        keep_prefix_cache: Whether to keep the prefix cache between the loads.
        trial_ids: Whether the requests' ids contain their trials, as in ``schedtrace run``; ids of other
            loads are changed.
        manifest: Manifest of the run; None to rely on the trace's header.

    Raises:
        UsageError: If vLLM does not accept the options.
        NeverEndsError: If the load never ends with these options.
    """
    played, began_s = Played(folder), time.perf_counter()
    if manifest is not None:
        safe_files.make_folder(folder)
        write_manifest(folder, manifest)
    with _recording_to(folder, trial_ids=trial_ids), VirtualClock() as clock:
        try:
            engine = _engine(clock, times, options)
        except (ValueError, TypeError) as error:
            msg = f"vLLM refuses this configuration: {reason_of(error)}"
            raise UsageError(msg) from error
        try:
            for number, load in enumerate(loads):
                if number and not keep_prefix_cache:
                    engine.reset_prefix_cache()
                began = clock.now_us + (BETWEEN_TRIALS_US if number else 0.0)
                named = (
                    load if load.source == "recorded" or not trial_ids else _with_trial_ids(load, number + 1)
                )
                player = Player(engine, named, began, played, routed="router" in options)
                if by_step:
                    FeedByStep(engine, player).play()
                else:
                    player.play()
        except NoProgressError as error:
            msg = f"with these settings the load never ends: {error}"
            raise NeverEndsError(msg) from error
        finally:
            engine.close()
        played.steps, played.virtual_s = engine.steps, clock.now_us / 1e6
    played.wall_s = time.perf_counter() - began_s
    return played


def _engine(clock: VirtualClock, times: StepTimes, options: Mapping[str, Any]) -> VirtualEngines:
    """Create an engine, or ``data_parallel_size`` ranks."""
    if options.get("data_parallel_size", 1) > 1:
        return Ranks(clock, traced_class, times=times, **options)
    of_ranks = {"data_parallel_size", "lockstep", *OF_RANKS}
    alone = {name: value for name, value in options.items() if name not in of_ranks}
    return Simulation(clock, traced_class, times=times, **alone)


def _with_trial_ids(load: Workload, trial: int) -> Workload:
    """Return the load with ids that contain its trial."""

    def read() -> Iterator[LoadRequest]:
        names: dict[str, str] = {}
        for number, request in enumerate(load):
            name = f"t{trial}-{number}"
            if load.later_turns:
                names[request.request_id] = name
            after = None if request.after is None else names[request.after]
            yield msgspec.structs.replace(request, request_id=name, after=after)

    return replace(load, read=read)


@contextmanager
def _recording_to(folder: Path, *, trial_ids: bool) -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith(SWITCH)}
    for name in before:
        del os.environ[name]
    os.environ.update({RUN_DIR: str(folder), TRIAL_IDS: str(int(trial_ids)), TRACE: PLAIN})
    try:
        yield
    finally:
        for name in (RUN_DIR, TRIAL_IDS, TRACE):
            os.environ.pop(name, None)
        os.environ.update(before)
