"""Which data-parallel rank a request goes to."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.v1.engine.core_client import DPLBAsyncMPClient

Counts = tuple[int, int, float]
"""Of a rank: waiting requests, running requests, share of its KV cache in use."""


class Router(Protocol):
    """Knows what each rank has, and chooses one for each request that names none."""

    def choose(self, request_id: str, tokens: int, rank: int | None = None) -> int:
        """The rank, from 0, that a request goes to.

        Args:
            request_id: Of the request.
            tokens: Of its prompt, and those that it may generate.
            rank: The one that it names.
        """
        ...

    def done(self, request_id: str) -> None:
        """A request is finished or aborted."""
        ...

    def published(self, counts: Sequence[Counts]) -> None:
        """vLLM's coordinator has published what the ranks had some time ago."""
        ...


class _InFlight:
    """Adds up what each rank has that is not done; no sum is stale."""

    def __init__(self, ranks: int) -> None:
        self._sums = [0] * ranks
        self._of: dict[str, tuple[int, int]] = {}

    def choose(self, request_id: str, tokens: int, rank: int | None = None) -> int:
        chosen = self._next() if rank is None else rank
        self._of[request_id] = chosen, self._weight(tokens)
        self._sums[chosen] += self._weight(tokens)
        return chosen

    def done(self, request_id: str) -> None:
        rank, weight = self._of.pop(request_id)
        self._sums[rank] -= weight

    def published(self, counts: Sequence[Counts]) -> None:
        """It knows better."""

    def _next(self) -> int:
        return self._sums.index(min(self._sums))

    def _weight(self, tokens: int) -> int:  # noqa: ARG002  # of a request of so many tokens
        return 1


class LeastRunning(_InFlight):
    """The rank with the fewest requests that are not done; of equal ones the first."""


class LeastTokens(_InFlight):
    """The rank whose requests have the fewest tokens together (prompts, and what they may generate)."""

    def _weight(self, tokens: int) -> int:
        return tokens


class RoundRobin(_InFlight):
    """One rank after the other."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._turns = cycle(range(ranks))

    def _next(self) -> int:
        return next(self._turns)


class Vllm:
    """vLLM's own ``DPLBAsyncMPClient`` without its sockets; the counts that it goes by are stale."""

    def __init__(self, ranks: int) -> None:
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

    def choose(self, request_id: str, tokens: int, rank: int | None = None) -> int:  # noqa: ARG002
        """As vLLM chooses."""
        request = SimpleNamespace(
            request_id=request_id, data_parallel_rank=rank, pooling_params=None, resumable=False
        )
        return int(DPLBAsyncMPClient.get_core_engine_for_request(self._client, request))

    def done(self, request_id: str) -> None:
        """The client hears of it."""
        outputs = SimpleNamespace(finished_requests={request_id})
        with suppress(StopIteration):  # it never waits
            DPLBAsyncMPClient.process_engine_outputs(self._client, outputs).send(None)

    def published(self, counts: Sequence[Counts]) -> None:
        """The client takes them over."""
        self._client.lb_engines = [list(one) for one in counts]


ROUTERS: dict[str, Callable[[int], Any]] = {
    "vllm": Vllm,
    "round-robin": RoundRobin,
    "least-running": LeastRunning,
    "least-tokens": LeastTokens,
}
"""By the name that an option gives it; each is made for a number of ranks."""
