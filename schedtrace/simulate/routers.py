"""Which data-parallel rank a request goes to."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.v1.engine.core_client import DPLBAsyncMPClient

Counts = tuple[int, int, float]
"""Of a rank: waiting requests, running requests, share of its KV cache in use."""


class Router(Protocol):
    """Chooses a rank for each request that names none."""

    def choose(self, request_id: str, tokens: int) -> int:
        """The rank, from 0.

        Args:
            request_id: Of the request.
            tokens: Of its prompt, and those that it may generate.
        """
        ...

    def assigned(self, request_id: str, tokens: int, rank: int) -> None:
        """A request went to a rank, which was chosen here or elsewhere."""
        ...

    def done(self, request_id: str) -> None:
        """A request is finished or aborted."""
        ...

    def published(self, counts: Sequence[Counts]) -> None:
        """vLLM's coordinator has published what the ranks had some time ago."""
        ...


class _InFlight:
    """Knows what each rank has that is not done; no count is stale."""

    def __init__(self, ranks: int) -> None:
        self._load = [0] * ranks
        self._of: dict[str, tuple[int, int]] = {}

    def _weight(self, tokens: int) -> int:
        raise NotImplementedError

    def choose(self, request_id: str, tokens: int) -> int:  # noqa: ARG002  # a router's
        return self._load.index(min(self._load))

    def assigned(self, request_id: str, tokens: int, rank: int) -> None:
        self._of[request_id] = rank, self._weight(tokens)
        self._load[rank] += self._weight(tokens)

    def done(self, request_id: str) -> None:
        rank, weight = self._of.pop(request_id, (0, 0))
        self._load[rank] -= weight

    def published(self, counts: Sequence[Counts]) -> None:
        """It knows better."""


class LeastRunning(_InFlight):
    """The rank with the fewest requests that are not done; of equal ones the first."""

    def _weight(self, tokens: int) -> int:  # noqa: ARG002
        return 1


class LeastTokens(_InFlight):
    """The rank whose requests have the fewest tokens together (prompts, and what they may generate)."""

    def _weight(self, tokens: int) -> int:
        return tokens


class RoundRobin(_InFlight):
    """One rank after the other."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._ranks, self._turn = ranks, count()

    def choose(self, request_id: str, tokens: int) -> int:  # noqa: ARG002
        return next(self._turn) % self._ranks

    def _weight(self, tokens: int) -> int:  # noqa: ARG002
        return 0


class Vllm:
    """vLLM's own ``DPLBAsyncMPClient``, without its sockets: it chooses by published counts, which are stale."""

    def __init__(self, ranks: int) -> None:
        self._client = SimpleNamespace(
            reqs_in_flight={},
            engine_inflight=Counter(),
            core_engines=list(range(ranks)),
            lb_engines=[[0, 0, 0.0] for _ in range(ranks)],
            eng_start_index=0,
            client_count=1,
            client_index=0,
        )

    def choose(self, request_id: str, tokens: int) -> int:  # noqa: ARG002
        request = SimpleNamespace(request_id=request_id, data_parallel_rank=None, pooling_params=None)
        return int(DPLBAsyncMPClient.get_core_engine_for_request(self._client, request))

    def assigned(self, request_id: str, tokens: int, rank: int) -> None:
        """The client has noted its own choice."""

    def done(self, request_id: str) -> None:
        outputs = SimpleNamespace(finished_requests={request_id})
        with suppress(StopIteration):  # it never waits
            DPLBAsyncMPClient.process_engine_outputs(self._client, outputs).send(None)

    def published(self, counts: Sequence[Counts]) -> None:
        self._client.lb_engines = [list(one) for one in counts]


ROUTERS: dict[str, Callable[[int], Any]] = {
    "vllm": Vllm,
    "round-robin": RoundRobin,
    "least-running": LeastRunning,
    "least-tokens": LeastTokens,
}
"""By the name that an option gives it; each is made for a number of ranks."""
