"""Routing of requests to data-parallel ranks: routers, and vLLM's front end and coordinator around them.

The front end routes requests, starts waves and publishes counts. Messages take no time here. Counts are
published as vLLM's coordinator does it: at most every 100 ms, and of ranks in lock-step those of the last
step that all have ended.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from schedtrace.simulate.clock import NEVER, VirtualClock

Counts = tuple[int, int, float]
"""Load of a rank: waiting requests, running requests, share of its KV cache in use."""


class Router:
    """Chooses the rank with the fewest requests that are not done; of equal ones the first.

    Args:
        ranks: How many.
    """

    def __init__(self, ranks: int) -> None:
        self._sums = [0] * ranks
        self._of: dict[str, tuple[int, int]] = {}

    def choose_rank(self, request_id: str, tokens: int, rank: int | None = None) -> int:
        """Return the rank, from 0, that a request goes to.

        Args:
            request_id: Of the request.
            tokens: Of its prompt, and those that it may generate.
            rank: The one that it names.
        """
        chosen = self._next() if rank is None else rank
        self._of[request_id] = chosen, self._weight(tokens)
        self._sums[chosen] += self._weight(tokens)
        return chosen

    def done(self, request_id: str) -> None:
        """Note that a request has finished or was aborted."""
        rank, weight = self._of.pop(request_id)
        self._sums[rank] -= weight

    def published(self, counts: Sequence[Counts]) -> None:
        """Ignore the counts that vLLM's coordinator publishes with a delay: no sum here is stale."""

    def _next(self) -> int:
        return self._sums.index(min(self._sums))

    def _weight(self, tokens: int) -> int:  # noqa: ARG002  # of a request of so many tokens
        return 1


class LeastTokens(Router):
    """The rank whose requests have the fewest tokens together (prompts, and what they may generate)."""

    def _weight(self, tokens: int) -> int:
        return tokens


class RoundRobin(Router):
    """Router that takes one rank after the other."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._turns = cycle(range(ranks))

    def _next(self) -> int:
        return next(self._turns)


class Vllm(Router):
    """vLLM's own ``DPLBAsyncMPClient`` without its sockets; the counts that it goes by are stale."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._client = SimpleNamespace(
            reqs_in_flight={},
            streaming_reqs=set(),
            engine_inflight=Counter(),
            core_engines=list(range(ranks)),
            lb_engines=[[0, 0, 0.0] for _ in range(ranks)],
            eng_start_index=0,
            client_count=1,
            client_index=0,
        )

    def choose_rank(self, request_id: str, tokens: int, rank: int | None = None) -> int:  # noqa: ARG002  # of the protocol
        """Choose a rank as vLLM does."""
        request = SimpleNamespace(
            request_id=request_id, data_parallel_rank=rank, pooling_params=None, resumable=False
        )
        return int(DPLBAsyncMPClient.get_core_engine_for_request(self._client, request))

    def done(self, request_id: str) -> None:
        """Tell the client that a request is done."""
        outputs = SimpleNamespace(finished_requests={request_id})
        with suppress(StopIteration):  # it never waits
            DPLBAsyncMPClient.process_engine_outputs(self._client, outputs).send(None)

    def published(self, counts: Sequence[Counts]) -> None:
        """Give the client the counts."""
        self._client.lb_engines = [list(pair) for pair in counts]


ROUTERS: dict[str, Callable[[int], Router]] = {
    "vllm": Vllm,
    "round-robin": RoundRobin,
    "least-running": Router,
    "least-tokens": LeastTokens,
}
"""Routers by the name that an option gives them; each is made for a number of ranks."""


PUBLISH_EVERY_US = 100_000.0
"""``min_stats_update_interval_ms`` of ``DPCoordinatorProc``."""


class VirtualFrontEnd:
    """Front end of all ranks.

    Args:
        send: Puts a message into the input queue of a rank.
        ranks: How many.
        router: Chooses ranks.
        lockstep: Whether ranks begin and end waves together.
        clock: Of the ranks.
    """

    def __init__(
        self,
        send: Callable[[int, Any, Any], None],
        ranks: int,
        router: Router,
        *,
        lockstep: bool,
        clock: VirtualClock,
    ) -> None:
        self._send, self._ranks, self._router, self._lockstep = send, ranks, router, lockstep
        self._clock = clock
        self.wave = 0
        self.running = False
        """Whether the ranks are in a wave, as far as messages have said."""
        self.rank_of: dict[str, int] = {}
        """Rank of each request that is not done."""
        self._counts: list[Counts] = [(0, 0, 0.0)] * ranks
        self._of_last_step: list[Counts] | None = None
        self._step = (0, 0)
        self._changed = False
        self._published_us = -PUBLISH_EVERY_US
        self.publishes_us = NEVER
        """Time at which ``publish`` is due."""

    def add(self, request: Any, tokens: int, rank: int | None) -> int:
        """Send a request to a rank, chosen if None is given; returns it."""
        request_id = request.request_id
        chosen = self._router.choose_rank(request_id, tokens, rank)
        self.rank_of[request_id] = chosen
        self._send(chosen, EngineCoreRequestType.ADD, (request, self.wave))
        if self._lockstep and not self.running:
            self._start_wave(self.wave, chosen)
        return chosen

    def done(self, request_id: str) -> None:
        """Note that a request has its last token, or that its client went away."""
        if self.rank_of.pop(request_id, None) is not None:
            self._router.done(request_id)

    def message(self, rank: int, outputs: Any) -> None:
        """Take a rank's message to the coordinator: the end or begin of a wave, or its counts."""
        if (stats := outputs.scheduler_stats) is not None:
            self._count(rank, stats)
        if (wave := outputs.wave_complete) is not None:
            if self.wave <= wave:
                self.wave, self.running = wave + 1, False
        elif (wave := outputs.start_wave) is not None and (
            wave > self.wave or (wave == self.wave and not self.running)
        ):
            self.wave, self.running = wave, True
            self._start_wave(wave, rank)

    def _start_wave(self, wave: int, exclude: int) -> None:
        for rank in range(self._ranks):
            self._send(rank, EngineCoreRequestType.START_DP_WAVE, (wave, exclude))

    def _count(self, rank: int, stats: Any) -> None:
        step = (getattr(stats, "current_wave", 0), getattr(stats, "step_counter", 0))
        if self._lockstep and step > self._step:
            if self._changed:
                self._of_last_step = list(self._counts)
            self._step = step
        usage = getattr(stats, "kv_cache_usage", 0.0)
        self._counts[rank] = stats.num_waiting_reqs, stats.num_running_reqs, usage
        self._changed = True
        self._publish_later()

    def publish(self) -> None:
        """Tell the front end what the ranks have."""
        self.publishes_us, self._published_us = NEVER, self._clock.now_us
        counts, self._of_last_step = self._of_last_step, None
        self._router.published(counts or self._counts)
        if counts is None:
            self._changed = False
        else:  # what came since is published next
            self._publish_later()

    def _publish_later(self) -> None:
        if self.publishes_us == NEVER:
            self.publishes_us = max(self._clock.now_us, self._published_us + PUBLISH_EVERY_US)
