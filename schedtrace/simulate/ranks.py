"""N data-parallel ranks in virtual time, in one process: vLLM's own loops take turns.

Each rank's loop runs in a thread until it would wait: for a batch, for the other ranks, for a message. Then
the rank goes on whose time comes first. Nothing sleeps, and only one runs at any moment.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, Self

from schedtrace.simulate.clock import NEVER, VirtualClock
from schedtrace.simulate.core import reduced_here
from schedtrace.simulate.lockstep import Device, Group
from schedtrace.simulate.routing import ROUTERS, FrontEnd
from schedtrace.simulate.simulated_rank import Rank
from schedtrace.simulate.simulation import MOST_IDLE_STEPS, NoProgressError, VirtualEngines
from schedtrace.step_times.batch import StepTimes
from schedtrace.step_times.constants import Constants


class Ranks(VirtualEngines):
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
        super().__init__()
        self.clock, self.lockstep = clock, lockstep
        stages = options.get("pipeline_parallel_size", 1)
        together = (Device(data_parallel_size, stages), Group(data_parallel_size)) if lockstep else None
        if lockstep:
            options = {"experts": 2, "data_parallel_size": data_parallel_size} | options
        self.ranks: Sequence[Rank] = [
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

    def _when(self, us: float, arrives: Callable[[], None]) -> None:
        """At once if that is over: a rank that asks for it is about to read its input queue."""
        if us <= self.clock.now_us:
            arrives()
        else:
            self.at(us, arrives)

    def _enter(self, us: float, request: Any, rank: int | None) -> None:
        tokens = request.num_prompt_tokens + request.max_tokens
        self.ranks[self.front_end.add(request, tokens, rank)].prepared(us, request)

    def abort(self, request_id: str) -> None:
        """As ``VirtualEngines.abort``."""
        rank = self.front_end.rank_of.get(request_id)
        if rank is not None:
            self.ranks[rank].abort(request_id)
            self.front_end.done(request_id)

    def reset_prefix_cache(self) -> None:
        """As ``VirtualEngines.reset_prefix_cache``."""
        for rank in self.ranks:
            rank.reset_prefix_cache()

    def run(self, until_us: float = NEVER) -> None:
        """As ``VirtualEngines.run``."""
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
                if not self._expected(until_us):
                    self._require_progress(rank)
        stuck = [rank.number for rank in self.ranks if rank.wake_us == NEVER and not rank.is_idle]
        if until_us == NEVER and stuck:
            msg = f"ranks {stuck} wait for others, which are idle"
            raise RuntimeError(msg)
        self.clock.now_us = max(self.clock.now_us, *(rank.reached_us for rank in self.ranks))

    def close(self) -> None:
        """As ``VirtualEngines.close``; ends the ranks' loops, too."""
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
