"""Routing of requests to data-parallel ranks: routers, and vLLM's front end and coordinator around them.

The front end routes requests, starts waves and publishes counts. Messages take no time. Counts are published
as vLLM's coordinator publishes them: at most every 100 ms and, for ranks in lock-step, for the last step that
all ranks have ended.
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
"""Load of a rank: waiting requests, running requests, used share of the KV cache."""


class Router:
    """Router that chooses the rank with the fewest unfinished requests; among equals, the first.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._sums = [0] * ranks
        self._of: dict[str, tuple[int, int]] = {}

    def choose_rank(self, request_id: str, tokens: int, rank: int | None) -> int:
        """Return the rank (from 0) for a request.

        Args:
            request_id: Id of the request.
            tokens: Prompt tokens plus the output limit.
            rank: Rank that the request names; None if it names none.
        """
        chosen = self._next() if rank is None else rank
        self._of[request_id] = chosen, self._weight(tokens)
        self._sums[chosen] += self._weight(tokens)
        return chosen

    def done(self, request_id: str) -> None:
        """Count a request as finished or aborted."""
        rank, weight = self._of.pop(request_id)
        self._sums[rank] -= weight

    def published(self, counts: Sequence[Counts]) -> None:
        """Ignore the delayed counts that vLLM's coordinator publishes; this router's sums are current."""

    def _next(self) -> int:
        return self._sums.index(min(self._sums))

    def _weight(self, tokens: int) -> int:  # noqa: ARG002  # of a request of so many tokens
        return 1


class LeastTokens(Router):
    """Router that chooses the rank whose requests have the fewest tokens (prompts and output limits)."""

    def _weight(self, tokens: int) -> int:
        return tokens


class RoundRobin(Router):
    """Router that takes the ranks in turn."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._turns = cycle(range(ranks))

    def _next(self) -> int:
        return next(self._turns)


class Vllm(Router):
    """Router that asks vLLM's own ``DPLBAsyncMPClient``, without sockets; the client's counts are delayed."""

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

    def choose_rank(self, request_id: str, tokens: int, rank: int | None) -> int:  # noqa: ARG002  # of the protocol
        """Choose a rank as vLLM does."""
        request = SimpleNamespace(
            request_id=request_id, data_parallel_rank=rank, pooling_params=None, resumable=False
        )
        return int(DPLBAsyncMPClient.get_core_engine_for_request(self._client, request))

    def done(self, request_id: str) -> None:
        """Tell the client that a request is finished."""
        outputs = SimpleNamespace(finished_requests={request_id})
        with suppress(StopIteration):  # it never waits
            DPLBAsyncMPClient.process_engine_outputs(self._client, outputs).send(None)

    def published(self, counts: Sequence[Counts]) -> None:
        """Pass the counts to the client."""
        self._client.lb_engines = [list(pair) for pair in counts]


ROUTERS: dict[str, Callable[[int], Router]] = {
    "vllm": Vllm,
    "round-robin": RoundRobin,
    "least-running": Router,
    "least-tokens": LeastTokens,
}
"""Router by option value; each is created for a number of ranks."""


PUBLISH_EVERY_US = 100_000.0
"""Value of ``min_stats_update_interval_ms`` of ``DPCoordinatorProc``, in microseconds."""


class VirtualFrontEnd:
    """Front end of all ranks.

    Args:
        send: Function that puts a message into the input queue of a rank.
        ranks: Number of ranks.
        router: Router that chooses ranks.
        lockstep: Whether ranks begin and end waves together.
        clock: Clock of the ranks.
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
        """Whether the ranks are in a wave, according to their messages."""
        self.rank_of: dict[str, int] = {}
        """Rank of each unfinished request."""
        self._counts: list[Counts] = [(0, 0, 0.0)] * ranks
        self._of_last_step: list[Counts] | None = None
        self._step = (0, 0)
        self._changed = False
        self._published_us = -PUBLISH_EVERY_US
        self.publishes_us = NEVER
        """Time at which ``publish`` is due, in microseconds."""

    def add(self, request: Any, tokens: int, rank: int | None) -> int:
        """Send a request to ``rank``, or to one that the router chooses if it is None; return the rank."""
        request_id = request.request_id
        chosen = self._router.choose_rank(request_id, tokens, rank)
        self.rank_of[request_id] = chosen
        self._send(chosen, EngineCoreRequestType.ADD, (request, self.wave))
        if self._lockstep and not self.running:
            self._start_wave(self.wave, chosen)
        return chosen

    def done(self, request_id: str) -> None:
        """Count a request as done: its last token is back, or its client disconnected."""
        if self.rank_of.pop(request_id, None) is not None:
            self._router.done(request_id)

    def message(self, rank: int, outputs: Any) -> None:
        """Handle a rank's message to the coordinator: the end or the beginning of a wave, or its counts."""
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
        """Publish the ranks' counts to the front end."""
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
