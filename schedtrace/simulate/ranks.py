"""Data-parallel ranks in virtual time, in one process: vLLM's own loops run in turns.

Each rank's loop runs in a thread until it would wait for a batch, for the other ranks, or for a message. Then
the rank with the earliest time continues. Nothing sleeps, and only one rank runs at any moment.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from vllm.v1.engine import EngineCoreRequestType

from schedtrace.simulate.clock import NEVER, VirtualClock
from schedtrace.simulate.core import make_rank_core, reduced_here
from schedtrace.simulate.executor import SimulatedExecutor
from schedtrace.simulate.lockstep import Device, LockstepExecutor, RankGroup
from schedtrace.simulate.routing import ROUTERS, VirtualFrontEnd
from schedtrace.simulate.simulation import MOST_IDLE_STEPS, NoProgressError, TimedEngine, VirtualEngines
from schedtrace.step_times.batch import StepTimes
from schedtrace.step_times.constants import Constants


class TurnsStopped(SystemExit):  # vLLM's loop lets it through
    """Exception that ends a function at the point where it has paused."""


class Turns:
    """Function in a separate thread; a call of ``resume`` lets the function run until its own next pause.

    The function and its caller never run at the same time, so they need no locks, and run in the order of the
    calls.

    Args:
        function: Function to run.
        name: Name of the thread.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function = function
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = False
        self._error: BaseException | None = None
        self.ended = False
        """Whether the function has returned or raised."""

    def resume(self) -> None:
        """Let the function run until it pauses or ends.

        Raises:
            BaseException: Any exception that the function raises.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def yield_turn(self) -> None:
        """Return control to the caller until the next ``resume``; the function itself calls this.

        Raises:
            TurnsStopped: If ``end_turns`` is called instead of ``resume``.
        """
        self._back.release()
        self._go.acquire()
        if self._stopping:
            raise TurnsStopped

    def end_turns(self) -> None:
        """End the function at the point where it has paused."""
        if self.ended or self._thread.ident is None:
            return
        self._stopping = True
        self.resume()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._function()
        except TurnsStopped:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by resume
            self._error = error
        self.ended = True
        self._back.release()


class Rank(TimedEngine):
    """Rank that ``Ranks`` runs whenever its time has come.

    Args:
        number: Number of the rank, from 0.
        around: All ranks; their clock shows the time of the running rank.
        times: Step times.
        together: Devices and process group of the ranks in lock-step; None for an independent rank.
        wrap: As for ``TimedEngine``.
        options: As for ``TimedEngine``.
    """

    def __init__(
        self,
        number: int,
        around: "Ranks",
        times: StepTimes,
        together: tuple[Device, RankGroup] | None,
        wrap: Callable[[type], type] | None = None,
        **options: Any,
    ) -> None:
        self.number, self._around, self._together = number, around, together
        self.inputs = _Inputs(self)
        self.outputs = SimpleNamespace(put_nowait=lambda message: around.told(self, *message))
        """Queue of outputs; vLLM's output thread would empty it at once."""
        self.gathering_us = times.gathering_us() or 0.0
        self.wake_us = 0.0
        """Time in microseconds at which the rank continues; infinite if it waits for an event."""
        self.idle_steps = 0
        """Number of consecutive steps without a token."""
        self.reached_us = 0.0
        """Time up to which the rank has run, in microseconds."""
        self._updates = 0
        super().__init__(around.clock, wrap, times, rank=number, **options)
        self._turns = Turns(self.core.run_busy_loop, f"rank-{number}")
        self.stop = self._turns.end_turns

    def _build(self, scheduler_class: type, groups: list[Any]) -> Any:
        arguments: dict[str, Any] = {"clock": self, "times": self._times, "model_runner": self.model_runner}
        executor: Callable[[Any], Any] = partial(SimulatedExecutor, **arguments)
        if self._together is not None:
            executor = partial(LockstepExecutor, rank=self, device=self._together[0], **arguments)
        lockstep = self._together is not None
        self.core = make_rank_core(self.config, executor, scheduler_class, groups, self, lockstep=lockstep)
        return self.core.scheduler

    def gather(self, value: Any, us: float = 0.0) -> list[Any]:
        """Return every rank's value; vLLM uses a rank in lock-step as its process group (``RankGroup``)."""
        assert self._together is not None  # noqa: S101  # nobody else asks
        return self._together[1].gather_values(self, value, us)

    @property
    def now_us(self) -> float:
        """Time of the running rank in microseconds."""
        return self.clock.now_us

    def resume(self) -> None:
        """Run the rank from ``wake_us`` until it waits again."""
        self.clock.now_us = self.reached_us = self.wake_us
        self._turns.resume()

    def wait(self, us: float) -> None:
        """Let other ranks run until a moment; do nothing if the moment has passed."""
        self.reached_us = self.clock.now_us
        self.wake_us = max(us, self.reached_us)
        self._turns.yield_turn()

    until = wait

    def wake(self, us: float) -> None:
        """End the rank's wait at ``us``, unless the wait ends earlier."""
        self.wake_us = max(min(self.wake_us, us), self.reached_us)

    def put_message(self, kind: Any, message: Any) -> None:
        """Put a message into the input queue now."""
        if self.inputs.is_blocking:
            woken = self._times.wake_us() if kind == EngineCoreRequestType.ADD else 0.0
            self.wake(self.clock.now_us + woken)
        self.inputs.put_nowait((kind, message))

    def abort(self, request_id: str) -> None:
        """Abort a request, as if its client had disconnected; the abort goes into two queues, as in vLLM."""
        if self.recorded_inputs is not None:
            self.recorded_inputs.abort_received([request_id])
        self.core.aborts_queue.put_nowait([request_id])
        self.put_message(EngineCoreRequestType.ABORT, [request_id])

    def loop_begins(self) -> None:
        """Advance the clock by the host's time after an update, let other ranks run, then let in requests."""
        updates = self.scheduler.schedtrace_updates
        if updates != self._updates:
            self._updates = updates
            self.wait(self.clock.now_us + self._times.gap_us(0))
            self.clock.advance(self._times.gap_us(len(self.inputs)) - self._times.gap_us(0))
        elif self.clock.now_us > self.reached_us:
            self.wait(self.clock.now_us)
        if self._around.feed is not None:
            self._around.feed.let_in(self)

    def stepped(self, *, executed: bool) -> None:
        """Count consecutive steps without a token."""
        self.idle_steps = 0 if executed or not self.scheduler.requests else self.idle_steps + 1


class _Inputs(deque[Any]):
    """Input queue of a rank; a blocking ``get`` waits in virtual time."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        self.is_blocking = False
        """Whether the rank is idle and waits for a message."""

    get_nowait = deque.popleft
    put_nowait = deque.append

    def empty(self) -> bool:
        return not self

    def get(self, block: bool = True) -> Any:
        del block  # vLLM asks so when it is idle only
        self.is_blocking = True
        while not self:
            self._rank.wait(NEVER)
        self.is_blocking = False
        return self.popleft()


class Ranks(VirtualEngines):
    """Data-parallel ranks; enter ``clock`` before you create the ranks, and leave it after they have ended.

    Args:
        clock: Clock of all ranks.
        wrap: As for ``Engine``.
        data_parallel_size: Number of ranks.
        lockstep: Whether ranks behave like those of a mixture of experts: a pass takes as long as the slowest
            rank's, and ranks without requests run dummy batches. Otherwise they are independent, as for a
            dense model.
        router: Name in ``ROUTERS``; the router chooses a rank for requests that name none.
        times: Step times, the same on every rank.
        options: As for ``Engine``, and ``balance_ranks``: whether ranks in lock-step admit requests together.

    Raises:
        ValueError: If vLLM does not accept the options.
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
        together = (Device(data_parallel_size, stages), RankGroup(data_parallel_size)) if lockstep else None
        if lockstep:
            options = {"experts": 2, "data_parallel_size": data_parallel_size} | options
        self.ranks: Sequence[Rank] = [
            Rank(number, self, times, together, wrap, **options) for number in range(data_parallel_size)
        ]
        self.front_end = VirtualFrontEnd(
            lambda rank, kind, message: self.ranks[rank].put_message(kind, message),
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
        """Run a due action at once, because the calling rank is about to read its input queue."""
        if us <= self.clock.now_us:
            arrives()
        else:
            self.at(us, arrives)

    def _enter(self, us: float, request: Any, rank: int | None) -> None:
        tokens = request.num_prompt_tokens + request.max_tokens
        self.ranks[self.front_end.add(request, tokens, rank)].prepared(us, request)

    def abort(self, request_id: str) -> None:
        """Abort a request; see ``VirtualEngines.abort``."""
        rank = self.front_end.rank_of.get(request_id)
        if rank is not None:
            self.ranks[rank].abort(request_id)
            self.front_end.done(request_id)

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache; see ``VirtualEngines.reset_prefix_cache``."""
        for rank in self.ranks:
            rank.reset_prefix_cache()

    def run(self, until_us: float = NEVER) -> None:
        """Run the ranks; see ``VirtualEngines.run``."""
        with reduced_here():
            while True:
                rank = min(self.ranks, key=lambda rank: rank.wake_us)
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
        stuck = [rank.number for rank in self.ranks if rank.wake_us == NEVER and not rank.inputs.is_blocking]
        if until_us == NEVER and stuck:
            msg = f"ranks {stuck} wait for others, which are idle"
            raise RuntimeError(msg)
        self.clock.now_us = max(self.clock.now_us, *(rank.reached_us for rank in self.ranks))

    def close(self) -> None:
        """Close the engines (``VirtualEngines.close``) and end the ranks' loops."""
        for rank in self.ranks:
            rank.stop()
            rank.scheduler.shutdown()

    def told(self, rank: Rank, client: int, outputs: Any) -> None:
        """Handle the outputs that a core puts into its output queue."""
        if client < 0:
            self.front_end.message(rank.number, outputs)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self.front_end.done(output.request_id)
                self.finished(output.request_id)

    def _require_progress(self, rank: Rank) -> None:
        if rank.idle_steps > MOST_IDLE_STEPS and not any(
            each.scheduler.requests and each.idle_steps <= MOST_IDLE_STEPS for each in self.ranks
        ):
            left = sum(len(each.scheduler.requests) for each in self.ranks)
            msg = f"{left} requests cannot go on: {rank.idle_steps} steps without a token"
            raise NoProgressError(msg)
