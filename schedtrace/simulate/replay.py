"""Replay of loads on engines in virtual time, recorded as a run.

``Player`` sends requests at their recorded times. ``FeedByStep`` sends them at their recorded steps: an
independent engine counts its ``schedule()`` calls, and ranks in lock-step count their common passes, by wave
and step counter.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from vllm.lora.request import LoRARequest

from schedtrace.errors import NeverEndsError, UsageError, reason_of
from schedtrace.model import safe_files
from schedtrace.model.manifest import Manifest, write_manifest
from schedtrace.model.trace_bounds import PLAIN
from schedtrace.model.what_if import OF_RANKS
from schedtrace.record.settings import TRACE, TRIAL_IDS
from schedtrace.record.switches import RUN_DIR, SWITCH
from schedtrace.record.traced import traced_class
from schedtrace.simulate.clock import VirtualClock
from schedtrace.simulate.driver import RequestOptions
from schedtrace.simulate.ranks import Ranks
from schedtrace.simulate.simulation import NoProgressError, Simulation, TimedEngine, VirtualEngines
from schedtrace.step_times.batch import StepTimes
from schedtrace.workloads.clients import Clients
from schedtrace.workloads.workload import LoadRequest, Pass, Workload, token_ids


@dataclass
class Played:
    """Result of playing a load, in addition to its trace."""

    folder: Path
    refused: list[str] = field(default_factory=list)
    """Requests that vLLM's front end would refuse because their prompt fills ``max_model_len``."""
    steps: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0


class Player:
    """Player of a load on an engine, or on data-parallel ranks.

    Args:
        engine: Idle engine.
        load: The requests.
        began_us: Time at which the load begins, in microseconds.
        played: Result object, to which refused requests are added.
        routed: Whether to choose a new rank for every request, even if the request names one.
    """

    def __init__(
        self, engine: VirtualEngines, load: Workload, began_us: float, played: Played, *, routed: bool
    ) -> None:
        self._engine, self._began_us, self._played, self._routed = engine, began_us, played, routed
        self.load = load
        engine.finished = self._forget
        self._open: set[str] = set()
        self._answered: Callable[[], None] = lambda: None
        self._next_turns: dict[str, LoadRequest] = {}
        """Next request of a conversation, by the id of the request whose answer it waits for."""
        self._acceptance: dict[str, float] = {}
        self._owed: dict[str, float] = {}
        self._loras: dict[str, int] = {}
        for rank in engine.ranks:
            rank.model_runner.accepted = self._accepted

    def play(self) -> None:
        """Play the load to its end: requests are sent at their times or, if clients wait, after an answer."""
        clients = self.load.replayed_clients
        if clients is not None:
            (self._play_rounds if clients.pattern == "barrier" else self._play_closed)(clients)
            return
        if self.load.later_turns:
            self._next_turns = {request.after: request for request in self.load if request.after is not None}
        for request in self.load:  # one ahead: a stream may be long
            if request.after is not None:
                continue
            sent = self._began_us + request.arrived_us
            self._engine.run(until_us=sent + request.front_end_us)
            self._send(request, sent)
        self._engine.run()

    def _play_rounds(self, clients: Clients) -> None:
        """Send each round after the last answer of the previous round."""
        coming, thinks = iter(self.load), iter(clients.think_us)
        began_us = self._began_us
        while requests := [*islice(coming, clients.clients)]:
            for request in requests:
                self._send(request, began_us + request.arrived_us - requests[0].arrived_us)
            self._engine.run()
            began_us = self._engine.clock.now_us + next(thinks, 0.0)

    def _play_closed(self, loop: Clients) -> None:
        coming, thinks = iter(self.load), iter(loop.think_us)

        def send_next() -> None:
            for request in coming:  # the client of one that is refused sends another one
                if self._send(request, self._engine.clock.now_us + next(thinks, 0.0)):
                    return

        self._answered = send_next
        for request in islice(coming, loop.clients):
            if not self._send(request, self._began_us + request.arrived_us):
                send_next()
        self._engine.run()

    def _send(self, request: LoadRequest, sent_us: float) -> bool:
        """Send a request at a time; abort it later if its client aborted it in the recording."""
        if not self.send_request(request, sent_us + request.front_end_us, sent_us):
            self._send_next_turn(request.request_id, sent_us)
            return False
        self._open.add(request.request_id)
        if request.abort_us is not None:
            leaves = sent_us + request.abort_us - request.arrived_us
            self._engine.at(leaves, partial(self._abort, request.request_id))
        return True

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        self._ended(request_id)

    def _ended(self, request_id: str) -> None:
        if request_id in self._open:
            self._open.discard(request_id)
            self._answered()
            self._send_next_turn(request_id, self._engine.clock.now_us)

    def _send_next_turn(self, request_id: str, answered_us: float) -> None:
        """Send the request that waits for the answer to ``request_id``, if there is any."""
        request = self._next_turns.pop(request_id, None)
        if request is not None:
            self._send(request, max(self._began_us + request.arrived_us, answered_us + request.delay_us))

    def send_request(self, request: LoadRequest, at_us: float, sent_us: float | None = None) -> bool:
        """Make a request reach the engine at ``at_us``, or at once if this time has come.

        Args:
            request: Request to add.
            at_us: Time at which the request reaches the input queue, in microseconds.
            sent_us: Time at which the client sent the request, in microseconds; None for the recorded time.

        Returns:
            Whether vLLM's front end accepts it.
        """
        engine = self._engine
        sent_us = self._began_us + request.arrived_us if sent_us is None else sent_us
        if request.prompt_tokens >= engine.max_model_len:
            self._played.refused.append(request.request_id)
            return False
        options: RequestOptions = {"stop_at": request.output_tokens, "priority": request.priority}
        if request.lora is not None:
            number = self._loras.setdefault(request.lora, len(self._loras) + 1)
            options["lora_request"] = LoRARequest(request.lora, number, request.lora)
        if request.draft_acceptance is not None:
            self._acceptance[request.request_id] = request.draft_acceptance
        engine.arrive(
            at_us,
            request.request_id,
            token_ids(request, self.load.prefix_block),
            request.max_tokens or request.output_tokens,
            rank=None if self._routed else _rank(request, len(engine.ranks)),
            front_end_us=at_us - sent_us,  # equal priorities go by arrival
            **options,
        )
        return True

    def _forget(self, request_id: str) -> None:
        self._ended(request_id)
        self._engine.drop_request(request_id)
        for of_requests in (self._acceptance, self._owed):
            of_requests.pop(request_id, None)

    def _accepted(self, request_id: str, drafts: int) -> int:
        """Return how many of a request's drafts to accept, so that the recorded rate is met over time."""
        share = self._acceptance.get(request_id, 1.0)
        owed = self._owed.get(request_id, 0.0) + share * drafts
        taken = min(drafts, int(owed))
        self._owed[request_id] = owed - taken
        return taken


def _rank(request: LoadRequest, ranks: int) -> int | None:
    rank = None if ranks == 1 else request.data_parallel_rank
    if rank is not None and rank >= ranks:
        msg = f"{request.request_id}: data_parallel_rank {rank}, and there are {ranks} (ranks count from 0)"
        raise UsageError(msg)
    return rank


class _Event(NamedTuple):
    at: Pass
    request_id: str
    request: LoadRequest | None
    """Request that arrives; None if the event is that a request's client disconnects."""


class FeedByStep:
    """Feed that plays a load by step: it lets in requests when a rank reads its input queue.

    Requests enter, and clients disconnect, before the same step as in the recording (for ranks in lock-step,
    before the same pass). No rank stays idle until a request's recorded time.

    Args:
        engine: Idle engine.
        player: Player of the load.
    """

    def __init__(self, engine: VirtualEngines, player: Player) -> None:
        self._engine, self._player = engine, player
        self._coming = [deque(sorted(events, key=lambda event: event.at)) for events in self._events()]
        self._first = [rank.steps for rank in engine.ranks]
        self._began, self._stands_for = (0, 0), (0, 0)
        """Pass of the simulation at which a series of passes began, and the recorded pass that it corresponds
        to."""

    @property
    def expected(self) -> bool:
        """Whether any request is still to arrive or to be aborted."""
        return any(self._coming)

    def play(self) -> None:
        """Play the load to its end.

        Raises:
            NoProgressError: If requests are left that will never finish.
        """
        engine = self._engine
        engine.feed = self
        while self.expected:
            heads = {number: events[0].at for number, events in enumerate(self._coming) if events}
            if engine.lockstep:  # idle together: the next pass with a request takes the place of this
                core, self._stands_for = engine.ranks[0].core, min(heads.values())
                self._began = core.current_wave, core.step_counter
            for rank in engine.ranks:
                at = self._stands_for if engine.lockstep else heads.get(rank.number, (0, 0))
                self._happen(rank, max(at, self._now(rank)))
            engine.run()
        engine.feed = None

    def let_in(self, engine: TimedEngine) -> None:
        """Let in the requests and aborts that are due before the next step of this engine."""
        self._happen(engine, self._now(engine))

    def _happen(self, rank: TimedEngine, at: Pass) -> None:
        events = self._coming[rank.number]
        while events and events[0].at <= at:
            event = events.popleft()
            if event.request is None:
                self._engine.abort(event.request_id)
            else:
                self._player.send_request(event.request, self._engine.clock.now_us)

    def _now(self, rank: TimedEngine) -> Pass:
        if not self._engine.lockstep:
            return 0, rank.steps - self._first[rank.number]
        wave, counter = rank.core.current_wave, rank.core.step_counter
        later = wave - self._began[0]
        ahead = 0 if later else self._stands_for[1] - self._began[1]
        return self._stands_for[0] + later, counter + ahead

    def _events(self) -> list[list[_Event]]:
        """Return the events of each rank, from a single pass over the load; requests keep their order."""
        of_ranks: list[list[_Event]] = [[] for _ in self._engine.ranks]
        for request in self._player.load:
            queued, left = request.queued_pass, request.abort_pass
            if not self._engine.lockstep:
                queued = 0, request.queued_step or 0
                left = (0, request.abort_step) if request.abort_step else None
            events = of_ranks[_rank(request, len(of_ranks)) or 0]
            events.append(_Event(queued or (0, 0), request.request_id, request))
            if left:
                events.append(_Event(left, request.request_id, None))
        return of_ranks


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
        trial_ids: Whether the requests' ids contain their trials, as in ``schedtrace run``; if so, the ids of
            loads that were not recorded are replaced.
        manifest: Manifest of the run; None to write no manifest.

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

    def requests_with_trial_ids() -> Iterator[LoadRequest]:
        names: dict[str, str] = {}
        for number, request in enumerate(load):
            name = f"t{trial}-{number}"
            if load.later_turns:
                names[request.request_id] = name
            after = None if request.after is None else names[request.after]
            yield msgspec.structs.replace(request, request_id=name, after=after)

    return replace(load, read=requests_with_trial_ids)


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
