"""Drives vLLM's real scheduler and KV cache manager: only the model's outputs are made up.

The calls come in the order of ``EngineCore``: ``schedule()`` and then ``update_from_output()``, or, with
async scheduling or pipeline parallelism, as many ``schedule()`` calls before each output as vLLM keeps
batches in flight. There is no clock: ``Simulation`` adds one.
"""

from collections import deque
from typing import Any

from schedtrace.simulate import releases
from schedtrace.simulate.assembled_engine import Engine


class Driver(Engine):
    """One scheduler and the hands that work it; see ``Engine`` for how it is made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        """``SchedulerOutput`` and the tokens that will come back for it."""

    def schedule(self, *args: Any) -> Any:
        """One ``schedule()``; returns its ``SchedulerOutput``.

        Every request that ends its prefill or decodes in it will be given one token, and its accepted drafts.
        """
        output = self.scheduler.schedule(*args)
        self.in_flight.append((output, self.model_runner.execute(output)[1]))
        return output

    def update(self) -> dict[int, Any]:
        """The output of the oldest step in flight comes back; returns vLLM's ``EngineCoreOutputs``."""
        output, sampled = self.in_flight.popleft()
        proposed = self.model_runner.proposed(sampled)
        told: dict[int, Any] = self.scheduler.update_from_output(
            output, releases.model_output(sampled, proposed if self.model_runner.drafts else None)
        )
        if proposed:
            releases.tell_drafts(self.scheduler, list(proposed), list(proposed.values()))
        return told

    def step(self, *args: Any) -> Any:
        """One turn of the engine's loop; returns the ``SchedulerOutput``."""
        output = self.schedule(*args)
        if len(self.in_flight) == self.depth:
            self.update()
        return output

    def finish(self, most_steps: int = 3000) -> None:
        """Step until every request is done, then close.

        Raises:
            RuntimeError: requests are left after so many steps.
        """
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        while self.in_flight:
            self.update()
        if self.scheduler.requests:
            msg = f"{len(self.scheduler.requests)} requests are not done after {most_steps} steps"
            raise RuntimeError(msg)
        self.scheduler.shutdown()
