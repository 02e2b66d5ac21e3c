"""One data-parallel rank in virtual time: vLLM's busy loop, which stops where it would wait."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreRequestType

from schedtrace.simulate.clock import NEVER
from schedtrace.simulate.core import make_rank_core
from schedtrace.simulate.executor import SimulatedExecutor
from schedtrace.simulate.lockstep import Device, Group, LockstepExecutor, Member
from schedtrace.simulate.simulation import TimedEngine
from schedtrace.step_times.batch import StepTimes

if TYPE_CHECKING:
    from schedtrace.simulate.ranks import Ranks


class Stopped(SystemExit):  # vLLM's loop lets it through
    """Raised where the function has stopped, to end it."""


class Turns:
    """A function in a thread of its own, which runs only between ``resume`` and its own ``pause``.

    Never do it and its caller run at the same time, so it needs no locks and its order is that of the calls.

    Args:
        function: What runs.
        name: Of the thread.
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
        """Let it run until it pauses or ends.

        Raises:
            BaseException: what the function raised.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Called by the function: give the turn back, and return when it comes again.

        Raises:
            Stopped: it will not come.
        """
        self._back.release()
        self._go.acquire()
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        """End it where it has paused."""
        if self.ended or self._thread.ident is None:
            return
        self._stopping = True
        self.resume()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._function()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again by resume
            self._error = error
        self.ended = True
        self._back.release()


class Rank(TimedEngine):
    """One rank; ``Ranks`` lets it run when its time has come.

    Args:
        number: From 0.
        around: All of them; its clock shows the time of the one that runs.
        times: How long the parts of a step take.
        together: The devices and the group of ranks in lock-step; None: this rank is on its own.
        wrap: As ``TimedEngine``.
        options: As ``TimedEngine``.
    """

    def __init__(
        self,
        number: int,
        around: "Ranks",
        times: StepTimes,
        together: tuple[Device, Group] | None,
        wrap: Callable[[type], type] | None = None,
        **options: Any,
    ) -> None:
        self.number, self._around, self._together = number, around, together
        self.inputs = _Inputs(self)
        self.outputs = SimpleNamespace(put_nowait=lambda message: around.told(self, *message))
        """The queue that vLLM's output thread empties at once."""
        self.gathering_us = times.gathering_us() or 0.0
        self.wake_us = 0.0
        """When it goes on; infinite: once something happens."""
        self.idle_steps = 0
        """Steps in a row without a token."""
        self.reached_us = 0.0
        """How far it has come."""
        self._updates = 0
        super().__init__(around.clock, wrap, times, rank=number, **options)
        self._turns = Turns(self.core.run_busy_loop, f"rank-{number}")
        self.stop = self._turns.stop

    def _build(self, scheduler_class: type, groups: list[Any]) -> Any:
        made: dict[str, Any] = {"clock": self, "times": self._times, "model_runner": self.model_runner}
        group = None
        executor: Callable[[Any], Any] = partial(SimulatedExecutor, **made)
        if self._together is not None:
            device, everybody = self._together
            group = Member(everybody, self)
            executor = partial(LockstepExecutor, rank=self, device=device, **made)
        self.core = make_rank_core(self.config, executor, scheduler_class, groups, self, group)
        return self.core.scheduler

    @property
    def now_us(self) -> float:
        """The time of the rank that runs."""
        return self.clock.now_us

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a message."""
        return self.inputs.is_blocking

    def resume(self) -> None:
        """Run until it waits for something, from ``wake_us`` on."""
        self.clock.now_us = self.reached_us = self.wake_us
        self._turns.resume()

    def wait(self, us: float) -> None:
        """Let others run until a moment; no time, if it is over."""
        self.reached_us = self.clock.now_us
        self.wake_us = max(us, self.reached_us)
        self._turns.pause()

    until = wait

    def wake(self, us: float) -> None:
        """End a wait."""
        self.wake_us = max(min(self.wake_us, us), self.reached_us)

    def send(self, kind: Any, message: Any) -> None:
        """Put a message into the input queue, now."""
        if self.inputs.is_blocking:
            woken = self._times.wake_us() if kind == EngineCoreRequestType.ADD else 0.0
            self.wake(self.clock.now_us + woken)
        self.inputs.put_nowait((kind, message))

    def abort(self, request_id: str) -> None:
        """The client went away: the input thread puts it into two queues."""
        if self.recorded_inputs is not None:
            self.recorded_inputs.abort_received([request_id])
        self.core.aborts_queue.put_nowait([request_id])
        self.send(EngineCoreRequestType.ABORT, [request_id])

    def loop_begins(self) -> None:
        """The host's time since the last update; then others may have their say."""
        updates = self.scheduler.schedtrace_updates
        if updates != self._updates:
            self._updates = updates
            self.wait(self.clock.now_us + self._times.gap_us(0))
            self.clock.advance(self._times.gap_us(len(self.inputs)) - self._times.gap_us(0))
        elif self.clock.now_us > self.reached_us:
            self.wait(self.clock.now_us)
        self._around.loop_begins(self)

    def stepped(self, *, executed: bool) -> None:
        """Count what comes to nothing."""
        self.idle_steps = 0 if executed or not self.scheduler.requests else self.idle_steps + 1


class _Inputs(deque[Any]):
    """The queue that vLLM's input thread fills: what ``get`` waits for comes in virtual time."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        self.is_blocking = False

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
