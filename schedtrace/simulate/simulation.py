"""vLLM's engine core in virtual time: requests arrive at their times, steps take what a device model says.

``EngineCore``'s own ``step`` functions run, with an executor that computes nothing. Nothing sleeps.
"""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from schedtrace.record.engine_hooks import INPUTS
from schedtrace.simulate.clock import VirtualClock, timed
from schedtrace.simulate.core import make_core
from schedtrace.simulate.driver import Engine
from schedtrace.simulate.executor import ModelRunner, SimulatedExecutor
from schedtrace.step_times.constants import Constants
from schedtrace.step_times.model import StepTimes

YIELD_US = 1000
"""What ``EngineCore`` sleeps after a step without tokens while requests are left."""
MOST_IDLE_STEPS = 2000
"""Without a token and with nobody to come: requests that never will be done."""
FOREVER = float("inf")


class NoProgressError(RuntimeError):
    """Requests are left that never will be done."""


class Simulation(Engine):
    """One engine in virtual time; ``clock`` must be entered before it is made, and left after its end.

    Args:
        clock: Several engines may share it.
        wrap: As ``Engine``.
        times: How long the parts of a step take.
        options: As ``Engine``.
    """

    def __init__(
        self,
        clock: VirtualClock,
        wrap: Callable[[type], type] | None = None,
        *,
        times: StepTimes = Constants(),  # noqa: B008  # frozen
        **options: Any,
    ) -> None:
        self.clock = clock
        self.finished: Callable[[str], Any] = lambda _: None
        """Called with the id of a request whose last token is back: a closed loop's client sends its next."""
        self._times = times
        self._updated = False
        """Whether an output came back in the last step."""
        self._gap_us = 0.0
        """What passed after it."""
        self._idle = 0
        """Steps in a row without a token."""
        self._coming: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = count()

        def wrapped(plain: type) -> type:
            of_time = timed(plain, clock, times, lambda output: self.model_runner.batch_of(output))  # noqa: PLW0108  # made later
            return wrap(of_time) if wrap else of_time

        super().__init__(wrapped, **options)

    def _build(self, scheduler_class: type, groups: list[Any]) -> Any:
        def executor(vllm_config: Any) -> SimulatedExecutor:
            return SimulatedExecutor(
                vllm_config, clock=self.clock, times=self._times, model_runner=self.model_runner
            )

        self.core = make_core(self.config, executor, scheduler_class, groups)
        """vLLM's ``EngineCore``."""
        return self.core.scheduler

    @property
    def model_runners(self) -> list[ModelRunner]:
        """The one that it has."""
        return [self.model_runner]

    @property
    def max_model_len(self) -> int:
        """Tokens of a request, at most."""
        return int(self.scheduler.max_model_len)

    @property
    def steps(self) -> int:
        """``schedule()`` calls so far."""
        return int(self.scheduler.schedtrace_steps)

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to do, outputs in flight included."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def at(self, us: float, action: Callable[[], Any]) -> None:
        """Have something happen before the first step that begins then or later."""
        heapq.heappush(self._coming, (us, next(self._number), action))

    def arrive(
        self, us: float, request_id: str, *args: Any, front_end_us: float = 0.0, **options: Any
    ) -> None:
        """Have a request (see ``add``) reach the engine then, ``front_end_us`` after the client sent it.

        One whose prompt fills ``max_model_len`` does not: vLLM's front end refuses it.
        """

        def arrives() -> None:
            inputs = getattr(self.scheduler.structured_output_manager, INPUTS, None)
            request = self.make_request(request_id, *args, arrival_time=(us - front_end_us) / 1e6, **options)
            if request.num_prompt_tokens >= self.scheduler.max_model_len:
                return
            if inputs is not None:
                with self.clock.at(us):
                    inputs.prepared(request, self.clock.monotonic_ns())
            self.enqueue(request)

        self.at(us, arrives)

    def forget(self, request_id: str) -> None:
        """Keep nothing of a request that is done."""
        self.requests.pop(request_id, None)

    def run(self, until_us: float = FOREVER) -> None:
        """Work as an engine does until nothing is left to do, or until a time.

        Raises:
            NoProgressError: requests are left that never will be done.
        """
        while self.clock.now_us < until_us:
            if self.busy:
                self.step()
                self.require_progress(expected=bool(self._coming) or until_us < FOREVER)
            elif self._coming:
                self._sleep(until_us)
            else:
                return

    def require_progress(self, *, expected: bool) -> None:
        """Stop an engine that would step for ever.

        Args:
            expected: Somebody is still to come, or to go.

        Raises:
            NoProgressError: ``MOST_IDLE_STEPS`` steps in a row had no token, and nobody is expected.
        """
        if expected:
            self._idle = 0
        elif self._idle > MOST_IDLE_STEPS:
            left = len(self.scheduler.requests)
            msg = f"{left} requests cannot go on: {self._idle} steps without a token"
            raise NoProgressError(msg)

    def step(self) -> None:
        """One turn of the engine's loop: what has arrived is let in, then ``EngineCore`` steps."""
        if self._updated:  # now it is known how many came meanwhile
            due = sum(us <= self.clock.now_us for us, *_ in self._coming)
            self.clock.advance(self._times.gap_us(due) - self._gap_us)
        self._let_in()
        told, executed = self.core.step_fn()
        self.core.post_step(executed)
        for outputs in (told or {}).values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self.finished(output.request_id)
        self._updated = told is not None
        if self._updated:
            self._gap_us = self._times.gap_us(0)
            self.clock.advance(self._gap_us)
        if not executed and self.scheduler.has_requests():
            self.clock.advance(YIELD_US)
        worked = executed or any(outputs.outputs for outputs in (told or {}).values())
        self._idle = 0 if worked else self._idle + 1

    def finish(self) -> None:
        """Run until every request is done, then close.

        Raises:
            NoProgressError: requests are left that never will be done.
        """
        self.run()
        self.scheduler.shutdown()

    def close(self) -> None:
        """End it with whatever is left, as an engine that is shut down."""
        while self.core.batch_queue:
            future, output, *_ = self.core.batch_queue.pop()
            self.scheduler.update_from_output(output, future.result())
        self.scheduler.shutdown()

    def _sleep(self, until_us: float) -> None:
        """Until something comes to an engine that has nothing to do."""
        comes_us = self._coming[0][0]
        if comes_us > until_us:
            self.clock.until(until_us)
            return
        self.clock.until(comes_us)
        self.clock.advance(self._times.wake_us())
        self._let_in()

    def _let_in(self) -> None:
        while self._coming and self._coming[0][0] <= self.clock.now_us:
            heapq.heappop(self._coming)[2]()
