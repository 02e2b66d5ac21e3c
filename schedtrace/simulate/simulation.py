"""A driver in virtual time: requests arrive at their times, steps take as long as a device model says.

The loop is ``EngineCore``'s: let in what has arrived, schedule, and wait for the oldest output once as many
batches are in flight as vLLM keeps. Nothing sleeps.
"""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from schedtrace.record.engine_hooks import INPUTS
from schedtrace.simulate.clock import VirtualClock
from schedtrace.simulate.device import Device, StepCost, batch_of
from schedtrace.simulate.driver import Driver

YIELD_US = 1000
"""What ``EngineCore`` sleeps after a step without tokens while requests are left."""
MOST_STEPS = 20_000


class Simulation(Driver):
    """One engine in virtual time; ``clock`` must be entered before it is made, and left after its end.

    Args:
        clock: Several engines may share it.
        wrap: As ``Driver``.
        device: Microseconds of a step; with pipeline parallelism each stage takes an equal part of them.
        schedule_us: How long ``schedule()`` takes.
        gap_us: Host time between an output's update and the next ``schedule()``.
        options: As ``Driver``.
    """

    def __init__(
        self,
        clock: VirtualClock,
        wrap: Callable[[type], type] | None = None,
        *,
        device: Device = StepCost(),  # noqa: B008  # frozen
        schedule_us: float = 0.0,
        gap_us: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(wrap, **options)
        self.clock = clock
        self.finished: Callable[[str], Any] = lambda _: None
        """Called with the id of a request whose last token is back: a closed loop's client sends its next."""
        self._device, self._gap_us = device, gap_us
        self._coming: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = count()
        self._ready: list[float] = []
        self._stages = [0.0] * self.config.parallel_config.pipeline_parallel_size
        """When each stage of the pipeline will be free."""
        inside = self.scheduler._update_after_schedule  # noqa: SLF001  # the last statement of schedule()

        def takes_time(*args: Any) -> None:
            inside(*args)
            clock.advance(schedule_us)

        self.scheduler._update_after_schedule = takes_time  # noqa: SLF001  # likewise

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

    def run(self, until_us: float = float("inf")) -> None:
        """Work as an engine does until nothing is left to do, or until a time.

        Raises:
            RuntimeError: requests are left after ``MOST_STEPS`` steps.
        """
        for _ in range(MOST_STEPS):
            if self.clock.now_us >= until_us:
                return
            if self.scheduler.has_requests():
                self.step()
            elif self.in_flight:
                self.update()
            elif self._coming:
                self.clock.until(min(self._coming[0][0], until_us))
                self._let_in()
            else:
                return
        msg = f"{len(self.scheduler.requests)} requests are not done after {MOST_STEPS} steps"
        raise RuntimeError(msg)

    def step(self, *args: Any) -> Any:
        """One turn of the engine's loop; returns the ``SchedulerOutput``."""
        self._let_in()
        output = super().step(*args)
        if not output.total_num_scheduled_tokens and self.scheduler.has_requests():
            self.clock.advance(YIELD_US)
        return output

    def schedule(self, *args: Any) -> Any:
        """One ``schedule()``, whose batch is handed to the device."""
        output = super().schedule(*args)
        ready = self.clock.now_us
        if output.total_num_scheduled_tokens:
            each_us = self._device(batch_of(output, self.requests)) / len(self._stages)
            for stage, free in enumerate(self._stages):
                ready = self._stages[stage] = max(ready, free) + each_us
        self._ready.append(ready)
        return output

    def update(self) -> dict[int, Any]:
        """Wait for the oldest batch in flight, and hand its output to the scheduler."""
        self.clock.until(self._ready.pop(0))
        told = super().update()
        for outputs in told.values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self.finished(output.request_id)
        self.clock.advance(self._gap_us)
        return told

    def finish(self, most_steps: int = MOST_STEPS) -> None:
        """Run until every request is done, then close."""
        self.run()
        super().finish(most_steps)

    def close(self) -> None:
        """End it with whatever is left, as an engine that is shut down."""
        while self.in_flight:
            self.update()
        self.scheduler.shutdown()

    def _let_in(self) -> None:
        while self._coming and self._coming[0][0] <= self.clock.now_us:
            heapq.heappop(self._coming)[2]()
