"""N data-parallel ranks in virtual time, in one process: vLLM's own loops take turns.

Each rank's loop runs in a thread until it would wait: for a batch, for the other ranks, for a message. Then
the rank goes on whose time comes first. Nothing sleeps, and only one runs at any moment.
"""

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Protocol, Self

from schedtrace.simulate.clock import VirtualClock
from schedtrace.simulate.core import reduced_here
from schedtrace.simulate.executor import ModelRunner
from schedtrace.simulate.lockstep import NEVER, Device, Group
from schedtrace.simulate.routing import ROUTERS, FrontEnd
from schedtrace.simulate.simulated_rank import Rank
from schedtrace.simulate.simulation import FOREVER, MOST_IDLE_STEPS, NoProgressError
from schedtrace.step_times.constants import Constants
from schedtrace.step_times.model import StepTimes

OF_RANKS = ("lockstep", "router", "balance_ranks")
"""Options that an engine on its own does not have."""


class Feed(Protocol):
    """Lets requests in by the step, not by the clock."""

    @property
    def expected(self) -> bool:
        """Whether somebody is still to come, or to go."""
        ...

    def let_in(self, rank: Rank) -> None:
        """Called when a rank is about to read its input queue."""
        ...


class Ranks:
    """Data-parallel ranks; ``clock`` must be entered before they are made, and left after their end.

    Args:
        clock: Of all ranks.
        wrap: As ``Engine``.
        data_parallel_size: How many.
        lockstep: As ranks of a mixture of experts: a pass takes as long as the slowest rank's, and who has
            nothing to do runs dummy batches. Else as those of a dense model: each for itself.
        router: A name of ``ROUTERS``: who gets a request that names no rank.
        times: How long the parts of a step take, on every rank.
        options: As ``Engine``, and ``balance_ranks``: whether ranks in lock-step admit requests together.

    Raises:
        ValueError: vLLM does not accept the options.
    """

    def __init__(
        self,
        clock: VirtualClock,
        wrap: Callable[[type], type] | None = None,
        *,
        data_parallel_size: int,
        lockstep: bool,
        router: str = "vllm",
        times: StepTimes = Constants(),  # noqa: B008  # frozen
        **options: Any,
    ) -> None:
        self.clock = clock
        self.finished: Callable[[str], Any] = lambda _: None
        """Called with the id of a request whose last token is back."""
        self.feed: Feed | None = None
        self.lockstep = lockstep
        self._coming: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = count()
        stages = options.get("pipeline_parallel_size", 1)
        together = (Device(data_parallel_size, stages), Group(data_parallel_size)) if lockstep else None
        if lockstep:
            options = {"experts": 2, "data_parallel_size": data_parallel_size} | options
        self.ranks = [
            Rank(number, self, times, together, wrap, **options) for number in range(data_parallel_size)
        ]
        self.front_end = FrontEnd(
            lambda rank, kind, message: self.ranks[rank].send(kind, message),
            data_parallel_size,
            ROUTERS[router](data_parallel_size),
            lockstep=lockstep,
            clock=clock,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model_runners(self) -> list[ModelRunner]:
        """Of each rank."""
        return [rank.model_runner for rank in self.ranks]

    @property
    def max_model_len(self) -> int:
        """Tokens of a request, at most."""
        return int(self.ranks[0].scheduler.max_model_len)

    @property
    def steps(self) -> int:
        """``schedule()`` calls so far, of all ranks."""
        return sum(int(rank.scheduler.schedtrace_steps) for rank in self.ranks)

    def at(self, us: float, action: Callable[[], Any]) -> None:
        """Have something happen then, or at once if that is over."""
        heapq.heappush(self._coming, (us, next(self._number), action))

    def arrive(
        self,
        us: float,
        request_id: str,
        prompt: int | list[int] = 10,
        max_tokens: int = 4,
        *,
        rank: int | None = None,
        front_end_us: float = 0.0,
        **options: Any,
    ) -> None:
        """Have a request (see ``Engine.make_request``) reach a rank then.

        One whose prompt fills ``max_model_len`` does not: vLLM's front end refuses it.

        Args:
            us: When it reaches the rank's input queue.
            request_id: Any string.
            prompt: Its tokens, or how many.
            max_tokens: Output tokens at most.
            rank: Which one; None: the router chooses then.
            front_end_us: The client sent it so long before.
            options: Of ``Engine.make_request``.
        """
        made = partial(self._enter, us, request_id, prompt, max_tokens, rank, front_end_us, options)
        if us <= self.clock.now_us:
            made()
        else:
            self.at(us, made)

    def _enter(
        self,
        us: float,
        request_id: str,
        prompt: int | list[int],
        max_tokens: int,
        rank: int | None,
        front_end_us: float,
        options: dict[str, Any],
    ) -> None:
        maker = self.ranks[0]
        arrival = (us - front_end_us) / 1e6
        request = maker.make_request(request_id, prompt, max_tokens, arrival_time=arrival, **options)
        if request.num_prompt_tokens < self.max_model_len:
            tokens = request.num_prompt_tokens + max_tokens
            self.ranks[self.front_end.add(request, tokens, rank)].prepared(us, request)

    def abort(self, request_id: str) -> None:
        """A client goes away, now; nothing happens if its request is done."""
        rank = self.front_end.rank_of.get(request_id)
        if rank is not None:
            self.ranks[rank].abort(request_id)
            self.front_end.done(request_id)

    def forget(self, request_id: str) -> None:
        """Nothing is kept of a request that is done."""

    def reset_prefix_cache(self) -> None:
        """Empty those of all ranks."""
        for rank in self.ranks:
            rank.reset_prefix_cache()

    def run(self, until_us: float = FOREVER) -> None:
        """Go on until nothing is left to do, or until a time.

        Raises:
            NoProgressError: requests are left that never will be done.
        """
        with reduced_here():
            while True:
                rank = min(self.ranks, key=lambda one: one.wake_us)
                comes_us = self._coming[0][0] if self._coming else NEVER
                next_us = min(rank.wake_us, comes_us)
                if next_us >= until_us:
                    break
                if self.front_end.publishes_us <= next_us:
                    self.clock.now_us = self.front_end.publishes_us
                    self.front_end.publish()
                    continue
                if comes_us <= rank.wake_us:
                    self.clock.now_us = comes_us
                    heapq.heappop(self._coming)[2]()
                    continue
                rank.resume()
                if not self._coming and until_us == FOREVER and not (self.feed and self.feed.expected):
                    self._require_progress(rank)
        stuck = [rank.number for rank in self.ranks if rank.wake_us == NEVER and not rank.is_idle]
        if until_us == FOREVER and stuck:
            msg = f"ranks {stuck} wait for others, which are idle"
            raise RuntimeError(msg)
        self.clock.now_us = max(self.clock.now_us, *(rank.reached_us for rank in self.ranks))

    def finish(self) -> None:
        """Run until every request is done, then close.

        Raises:
            NoProgressError: requests are left that never will be done.
        """
        self.run()
        self.close()

    def close(self) -> None:
        """End the loops and the traces with whatever is left."""
        for rank in self.ranks:
            rank.stop()
            rank.scheduler.shutdown()

    def loop_begins(self, rank: Rank) -> None:
        """A rank is about to read its input queue."""
        if self.feed is not None:
            self.feed.let_in(rank)

    def told(self, rank: Rank, client: int, outputs: Any) -> None:
        """What a core puts into its output queue."""
        if client < 0:
            self.front_end.message(rank.number, outputs)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self.front_end.done(output.request_id)
                self.finished(output.request_id)

    def _require_progress(self, rank: Rank) -> None:
        if rank.idle_steps > MOST_IDLE_STEPS and not any(
            other.scheduler.requests and other.idle_steps <= MOST_IDLE_STEPS for other in self.ranks
        ):
            left = sum(len(other.scheduler.requests) for other in self.ranks)
            msg = f"{left} requests cannot go on: {rank.idle_steps} steps without a token"
            raise NoProgressError(msg)
