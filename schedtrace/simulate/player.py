"""Puts the requests of a load on an engine in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from schedtrace.errors import UsageError
from schedtrace.simulate.ranks import Ranks
from schedtrace.simulate.simulation import Simulation
from schedtrace.workloads.closed_loop import ClosedLoop
from schedtrace.workloads.request import LoadRequest
from schedtrace.workloads.tokens import token_ids
from schedtrace.workloads.workload import Workload


@dataclass
class Played:
    """What came of a load, besides its trace."""

    folder: Path
    refused: list[str] = field(default_factory=list)
    """Requests that vLLM's front end would not accept: their prompt fills ``max_model_len``."""
    steps: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0


class Player:
    """One load on an engine, or on data-parallel ranks.

    Args:
        engine: Idle.
        load: The requests.
        began_us: When the load begins.
        played: Gets those that are refused.
        routed: Ranks are chosen anew, whichever the requests name.
    """

    def __init__(
        self, engine: Simulation | Ranks, load: Workload, began_us: float, played: Played, *, routed: bool
    ) -> None:
        self._engine, self._began_us, self._played, self._routed = engine, began_us, played, routed
        self.load = load
        engine.finished = self._forget
        self._open: set[str] = set()
        self._answered: Callable[[], None] = lambda: None
        self._acceptance: dict[str, float] = {}
        self._owed: dict[str, float] = {}
        self._loras: dict[str, int] = {}
        for model_runner in engine.model_runners:
            model_runner.accepted = self._accepted

    def play(self) -> None:
        """To the end of the load: each request at its time or, in a closed loop, after an answer."""
        if self.load.closed is not None:
            self._play_closed(self.load.closed)
            return
        for request in self.load:  # one ahead: a stream may be long
            sent = self._began_us + request.arrived_us
            self._engine.run(until_us=sent + request.front_end_us)
            self._send(request, sent)
        self._engine.run()

    def _play_closed(self, loop: ClosedLoop) -> None:
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
        """Have the client send a request then and, if it did so when it was recorded, go away later."""
        if not self.enter(request, sent_us + request.front_end_us, sent_us):
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

    def enter(self, request: LoadRequest, at_us: float, sent_us: float | None = None) -> bool:
        """Have a request reach the engine then; at once, if that is now.

        Args:
            request: To be added.
            at_us: When it is in the input queue.
            sent_us: When the client sent it; None: as recorded.

        Returns:
            Whether vLLM's front end accepts it.
        """
        engine = self._engine
        sent_us = self._began_us + request.arrived_us if sent_us is None else sent_us
        if request.prompt_tokens >= engine.max_model_len:
            self._played.refused.append(request.request_id)
            return False
        options: dict[str, Any] = {}
        if request.lora is not None:
            number = self._loras.setdefault(request.lora, len(self._loras) + 1)
            options["lora_request"] = LoRARequest(request.lora, number, request.lora)
        if request.draft_acceptance is not None:
            self._acceptance[request.request_id] = request.draft_acceptance
        if isinstance(engine, Ranks) and not self._routed:
            options["rank"] = _rank(request, len(engine.ranks))
        engine.arrive(
            at_us,
            request.request_id,
            token_ids(request, self.load.prefix_block),
            request.max_tokens or request.output_tokens,
            front_end_us=at_us - sent_us,  # equal priorities go by arrival
            stop_at=request.output_tokens,
            priority=request.priority,
            **options,
        )
        return True

    def _forget(self, request_id: str) -> None:
        self._ended(request_id)
        self._engine.forget(request_id)
        for of_requests in (self._acceptance, self._owed):
            of_requests.pop(request_id, None)

    def _accepted(self, request_id: str, drafts: int) -> int:
        """As many of a request's drafts as keep the share that were right when it was recorded."""
        share = self._acceptance.get(request_id, 1.0)
        owed = self._owed.get(request_id, 0.0) + share * drafts
        taken = min(drafts, int(owed))
        self._owed[request_id] = owed - taken
        return taken


def _rank(request: LoadRequest, ranks: int) -> int | None:
    rank = request.data_parallel_rank
    if rank is not None and rank >= ranks:
        msg = f"{request.request_id}: data_parallel_rank {rank}, and there are {ranks} (ranks count from 0)"
        raise UsageError(msg)
    return rank
