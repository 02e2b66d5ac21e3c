"""A load on an engine in virtual time, recorded as a run."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

from schedtrace.errors import NeverEndsError, UsageError
from schedtrace.model import private
from schedtrace.model.manifest import Manifest, write_manifest
from schedtrace.record.settings import HASH_IDS, LINES, RUN_DIR, TRIAL_IDS
from schedtrace.record.traced import traced_class
from schedtrace.simulate.clock import VirtualClock
from schedtrace.simulate.simulation import NoProgressError, Simulation
from schedtrace.step_times.model import StepTimes
from schedtrace.workloads.request import LoadRequest
from schedtrace.workloads.tokens import token_ids
from schedtrace.workloads.workload import Workload

BETWEEN_TRIALS_US = 1000.0


@dataclass
class Played:
    """What came of a load, besides its trace."""

    folder: Path
    refused: list[str] = field(default_factory=list)
    """Requests that vLLM's front end would not accept: their prompt fills ``max_model_len``."""
    steps: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0


def play(
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
    """Have the requests of each load arrive, one load (a trial) after the other, and record what happens.

    Args:
        loads: Each begins once the engine is done with the one before.
        options: Of ``Engine``.
        times: How long steps take.
        folder: The run folder to be written.
        by_step: Requests enter, and clients go away, before the step before which they did when the load was
            recorded, instead of at their times.
        keep_prefix_cache: Do not empty it between the loads.
        trial_ids: The requests' ids tell their trials, as those of ``schedtrace run`` do; those of other
            loads are made so.
        manifest: Of the run; None: what a trace's header tells.

    Raises:
        UsageError: vLLM does not accept the options.
        NeverEndsError: The load never ends with them.
    """
    played, began_s = Played(folder), time.perf_counter()
    if manifest is not None:
        private.make_folder(folder)
        write_manifest(folder, manifest)
    with _recording_to(folder, trial_ids=trial_ids), VirtualClock() as clock:
        try:
            engine = Simulation(clock, traced_class, times=times, **options)
        except (ValueError, TypeError) as error:
            msg = f"vLLM refuses this configuration: {_reason(error)}"
            raise UsageError(msg) from error
        try:
            for number, load in enumerate(loads):
                if number and not keep_prefix_cache:
                    engine.scheduler.reset_prefix_cache()
                began = clock.now_us + (BETWEEN_TRIALS_US if number else 0.0)
                named = load if load.source == "recorded" or not trial_ids else _of_trial(load, number + 1)
                _Player(engine, named, began, played, by_step=by_step).play()
        except NoProgressError as error:
            msg = f"with these settings the load never ends: {error}"
            raise NeverEndsError(msg) from error
        finally:
            engine.close()
        played.steps, played.virtual_s = engine.steps, clock.now_us / 1e6
    played.wall_s = time.perf_counter() - began_s
    return played


def _of_trial(load: Workload, trial: int) -> Workload:
    """The load with ids that tell its trial."""

    def read() -> Iterator[LoadRequest]:
        for number, request in enumerate(load):
            yield msgspec.structs.replace(request, request_id=f"t{trial}-{number}")

    return replace(load, read=read)


class _Player:
    """One load on an engine."""

    def __init__(
        self, engine: Simulation, load: Workload, began_us: float, played: Played, *, by_step: bool
    ) -> None:
        self._engine, self._load, self._began_us, self._played = engine, load, began_us, played
        self._by_step = by_step
        engine.finished = self._forget
        self._acceptance: dict[str, float] = {}
        self._owed: dict[str, float] = {}
        self._loras: dict[str, int] = {}
        engine.model_runner.accepted = self._accepted

    def play(self) -> None:
        """To the end of the load."""
        if self._by_step:
            self._play_by_step()
            return
        for request in self._load:  # one ahead: a stream may be long
            reaches = self._began_us + request.arrived_us + request.front_end_us
            self._engine.run(until_us=reaches)
            self._enter(request, reaches)
            if request.abort_us is not None:
                leaves = self._began_us + request.abort_us
                self._engine.at(leaves, partial(self._engine.abort, request.request_id))
        self._engine.run()

    def _play_by_step(self) -> None:
        """Requests enter before the step before which they did; the engine never waits for one."""
        engine, first = self._engine, self._engine.steps
        coming = deque(self._load)
        leaving = sorted((request.abort_step, request.request_id) for request in coming if request.abort_step)
        leaves = deque(leaving)
        while coming or engine.busy:
            step = engine.steps - first
            if not engine.busy:
                step = max(step, coming[0].queued_step or 0)
            while coming and (coming[0].queued_step or 0) <= step:
                self._enter(coming.popleft(), engine.clock.now_us)
            while leaves and leaves[0][0] <= step:
                engine.abort(leaves.popleft()[1])
            engine.step()
            engine.require_progress(expected=bool(coming or leaves))

    def _enter(self, request: LoadRequest, at_us: float) -> None:
        engine = self._engine
        if request.prompt_tokens >= engine.scheduler.max_model_len:
            self._played.refused.append(request.request_id)
            return
        options: dict[str, Any] = {}
        if request.lora is not None:
            number = self._loras.setdefault(request.lora, len(self._loras) + 1)
            options["lora_request"] = LoRARequest(request.lora, number, request.lora)
        if request.draft_acceptance is not None:
            self._acceptance[request.request_id] = request.draft_acceptance
        engine.arrive(
            at_us,
            request.request_id,
            token_ids(request, self._load.prefix_block),
            request.max_tokens or request.output_tokens,
            front_end_us=at_us - self._began_us - request.arrived_us,  # equal priorities go by arrival
            stop_at=request.output_tokens,
            priority=request.priority,
            **options,
        )

    def _forget(self, request_id: str) -> None:
        for of_requests in (self._engine.requests, self._acceptance, self._owed):
            of_requests.pop(request_id, None)

    def _accepted(self, request_id: str, drafts: int) -> int:
        """As many of a request's drafts as keep the share that were right when it was recorded."""
        share = self._acceptance.get(request_id, 1.0)
        owed = self._owed.get(request_id, 0.0) + share * drafts
        taken = min(drafts, int(owed))
        self._owed[request_id] = owed - taken
        return taken


@contextmanager
def _recording_to(folder: Path, *, trial_ids: bool) -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in (RUN_DIR, TRIAL_IDS, HASH_IDS, LINES)}
    os.environ.update({RUN_DIR: str(folder), TRIAL_IDS: str(int(trial_ids))})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _reason(error: Exception) -> str:
    """The last line of what vLLM says that is not about pydantic."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Value error")]
    return (told or lines or [repr(error)])[0].removeprefix("Value error, ").split(" [type=")[0]
