"""A recorded load step by step: requests enter, and clients go away, before the step before which they did.

An engine on its own counts its ``schedule()`` calls. Ranks in lock-step count passes, which all of them have
in common: by wave and step counter.
"""

from collections import deque
from typing import NamedTuple

from schedtrace.simulate.player import Player
from schedtrace.simulate.rank import Rank
from schedtrace.simulate.ranks import Ranks
from schedtrace.simulate.simulation import Simulation
from schedtrace.workloads.request import LoadRequest, Pass


def play_by_step(engine: Simulation | Ranks, player: Player) -> None:
    """Play a load to its end; nobody waits for a request.

    Args:
        engine: Idle.
        player: Has the load, and puts its requests on the engine.

    Raises:
        NoProgressError: requests are left that never will be done.
    """
    if isinstance(engine, Ranks):
        _Feed(engine, player).play()
    else:
        _on_one(engine, player)


def _on_one(engine: Simulation, player: Player) -> None:
    first, coming = engine.steps, deque(player.load)
    leaves = deque(
        sorted((request.abort_step, request.request_id) for request in coming if request.abort_step)
    )
    while coming or engine.busy:
        step = engine.steps - first
        if not engine.busy:
            step = max(step, coming[0].queued_step or 0)
        while coming and (coming[0].queued_step or 0) <= step:
            player.enter(coming.popleft(), engine.clock.now_us)
        while leaves and leaves[0][0] <= step:
            engine.abort(leaves.popleft()[1])
        engine.step()
        engine.require_progress(expected=bool(coming or leaves))


class _Event(NamedTuple):
    at: Pass
    request_id: str
    request: LoadRequest | None
    """None: its client goes away."""


class _Feed:
    """What each rank lets in when it reads its input queue."""

    def __init__(self, ranks: Ranks, player: Player) -> None:
        self._ranks, self._player = ranks, player
        self._coming = [deque(sorted(events, key=lambda event: event.at)) for events in self._events()]
        self._first = [_steps(rank) for rank in ranks.ranks]
        self._began, self._stands_for = (0, 0), (0, 0)
        """A pass of the simulation, and that of the record whose place it takes."""

    @property
    def expected(self) -> bool:
        """Whether somebody is still to come, or to go."""
        return any(self._coming)

    def play(self) -> None:
        """To the end."""
        self._ranks.feed = self
        while self.expected:
            heads = {rank.number: events[0].at for rank, events in self._by_rank() if events}
            if self._ranks.lockstep:  # idle together: the next pass with a request takes the place of this
                core, self._stands_for = self._ranks.ranks[0].core, min(heads.values())
                self._began = core.current_wave, core.step_counter
            for rank, _ in self._by_rank():
                at = self._stands_for if self._ranks.lockstep else heads.get(rank.number, (0, 0))
                self._happen(rank, max(at, self._now(rank)))
            self._ranks.run()
        self._ranks.feed = None

    def let_in(self, rank: Rank) -> None:
        """What is due before this rank's next step."""
        self._happen(rank, self._now(rank))

    def _happen(self, rank: Rank, at: Pass) -> None:
        events = self._coming[rank.number]
        while events and events[0].at <= at:
            event = events.popleft()
            if event.request is None:
                self._ranks.abort(event.request_id)
            else:
                self._player.enter(event.request, self._ranks.clock.now_us)

    def _now(self, rank: Rank) -> Pass:
        if not self._ranks.lockstep:
            return 0, _steps(rank) - self._first[rank.number]
        wave, counter = rank.core.current_wave, rank.core.step_counter
        later = wave - self._began[0]
        ahead = 0 if later else self._stands_for[1] - self._began[1]
        return self._stands_for[0] + later, counter + ahead

    def _by_rank(self) -> list[tuple[Rank, deque[_Event]]]:
        return list(zip(self._ranks.ranks, self._coming, strict=True))

    def _events(self) -> list[list[_Event]]:
        """Of each rank, from one pass over the load; those who enter keep their order."""
        of_ranks: list[list[_Event]] = [[] for _ in self._ranks.ranks]
        for request in self._player.load:
            came, left = request.queued_pass, request.abort_pass
            if not self._ranks.lockstep:
                came = 0, request.queued_step or 0
                left = (0, request.abort_step) if request.abort_step else None
            events = of_ranks[request.data_parallel_rank or 0]
            events.append(_Event(came or (0, 0), request.request_id, request))
            if left:
                events.append(_Event(left, request.request_id, None))
        return of_ranks


def _steps(rank: Rank) -> int:
    return int(rank.scheduler.schedtrace_steps)
