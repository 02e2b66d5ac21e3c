"""vLLM's engine core in virtual time: requests arrive at their times, and steps take modelled times.

``EngineCore``'s own ``step`` functions run, with an executor that computes nothing. Nothing sleeps.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol, Unpack

from schedtrace.balance import balanced
from schedtrace.record.engine_hooks import INPUTS
from schedtrace.simulate.clock import NEVER, VirtualClock, timed
from schedtrace.simulate.core import make_core
from schedtrace.simulate.driver import Engine, RequestOptions
from schedtrace.simulate.executor import SimulatedExecutor
from schedtrace.step_times.batch import StepTimes
from schedtrace.step_times.constants import Constants

YIELD_US = 1000
"""Microseconds that ``EngineCore`` sleeps after a step without tokens while it has requests left."""
MOST_IDLE_STEPS = 2000
"""Number of consecutive steps without tokens after which, if no arrival is expected, the simulation assumes
that requests will never finish."""


class NoProgressError(RuntimeError):
    """Error: requests are left that will never finish."""


class TimedEngine(Engine):
    """Engine whose scheduler takes time on a virtual clock.

    Args:
        clock: Clock, which must be entered before the engine is created.
        wrap: As for ``Engine``.
        times: Step times.
        balance_ranks: Whether the engine admits requests together with other ranks (``schedtrace.balance``).
        options: As for ``Engine``.
    """

    number = 0
    """Data-parallel rank."""
    core: Any
    """Engine core: vLLM's ``EngineCore`` or a subclass of it."""

    def __init__(
        self,
        clock: VirtualClock,
        wrap: Callable[[type], type] | None,
        times: StepTimes,
        *,
        balance_ranks: bool = False,
        **options: Any,
    ) -> None:
        self.clock, self._times = clock, times

        def timed_class(plain: type) -> type:
            chosen = balanced(plain) if balance_ranks else plain
            of_time = timed(chosen, clock, times, lambda output: self.model_runner.execute(output)[0])
            return wrap(of_time) if wrap else of_time

        super().__init__(timed_class, **options)

    @property
    def steps(self) -> int:
        """Number of ``schedule()`` calls so far."""
        return int(self.scheduler.schedtrace_steps)

    @property
    def recorded_inputs(self) -> Any:
        """Recorder's facts about the input thread; None if the engine is not recorded."""
        return INPUTS.look_up(self.scheduler.structured_output_manager)

    def prepared(self, us: float, request: Any) -> None:
        """Tell the recorder that the input thread has made a request from a client's message."""
        if (inputs := self.recorded_inputs) is not None:
            with self.clock.at(us):
                inputs.note_prepared(request, self.clock.monotonic_ns())


class Feed(Protocol):
    """Source that lets in requests by step instead of by the clock."""

    @property
    def expected(self) -> bool:
        """Whether any request is still to arrive or to be aborted."""
        ...

    def let_in(self, engine: TimedEngine) -> None:
        """Let in requests; called before an engine takes requests that have arrived."""
        ...


class VirtualEngines(ABC):
    """Engines that play a load: a single engine (``Simulation``), or data-parallel ranks (``Ranks``)."""

    clock: VirtualClock
    ranks: Sequence[TimedEngine]
    """The engines; only the object itself if it is a single engine."""
    lockstep = False
    """Whether the ranks step together."""

    def __init__(self) -> None:
        self.finished: Callable[[str], Any] = lambda _: None
        """Function called with the id of a request whose last token is back; in a closed loop, its client
        then sends the next request."""
        self.feed: Feed | None = None
        self._coming: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = count()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request."""
        return int(self.ranks[0].scheduler.max_model_len)

    @property
    def steps(self) -> int:
        """Number of ``schedule()`` calls of all ranks so far."""
        return sum(rank.steps for rank in self.ranks)

    def at(self, us: float, action: Callable[[], Any]) -> None:
        """Run an action at ``us``; a single engine runs it before its first step from that time on."""
        heapq.heappush(self._coming, (us, next(self._order), action))

    def arrive(
        self,
        us: float,
        request_id: str,
        prompt: int | list[int] = 10,
        max_tokens: int = 4,
        *,
        rank: int | None = None,
        front_end_us: float = 0.0,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Make a request reach an engine's input queue at ``us``.

        A request whose prompt fills ``max_model_len`` is dropped, because vLLM's front end refuses it.

        Args:
            us: Time in microseconds.
            request_id: Any string.
            prompt: Tokens of the prompt, or their number.
            max_tokens: Maximum number of output tokens.
            rank: Data-parallel rank; None to let the router choose.
            front_end_us: Microseconds from the moment at which the client sent the request until ``us``.
            options: Options of ``Engine.make_request``; the arrival time follows from ``us`` and
                ``front_end_us``.
        """
        options["arrival_time"] = (us - front_end_us) / 1e6

        def arrives() -> None:
            request = self.ranks[0].make_request(request_id, prompt, max_tokens, **options)
            if request.num_prompt_tokens < self.max_model_len:
                self._enter(us, request, rank)

        self._when(us, arrives)

    def _when(self, us: float, arrives: Callable[[], None]) -> None:
        """Make a request arrive at ``us``."""
        self.at(us, arrives)

    def drop_request(self, request_id: str) -> None:
        """Drop the data of a finished request."""
        for rank in self.ranks:
            rank.requests.pop(request_id, None)

    def finish(self) -> None:
        """Run until every request is finished, then close the engines.

        Raises:
            NoProgressError: If requests are left that will never finish.
        """
        self.run()
        self.close()

    def _expected(self, until_us: float) -> bool:
        """Return whether any request may still arrive or be aborted."""
        return bool(self._coming) or until_us < NEVER or (self.feed is not None and self.feed.expected)

    @abstractmethod
    def _enter(self, us: float, request: Any, rank: int | None) -> None:
        """Give an engine a request that arrived at ``us``."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Abort a request, as if its client disconnected now; do nothing if it is finished."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache of all ranks; all running requests are preempted."""

    @abstractmethod
    def run(self, until_us: float = NEVER) -> None:
        """Run the engines until nothing is left to do, or until a time.

        Raises:
            NoProgressError: If requests are left that will never finish.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the engines and their traces, even if requests are left."""


class Simulation(TimedEngine, VirtualEngines):
    """Engine in virtual time; ``clock`` must be entered before the engine is created, and left at its end.

    Args:
        clock: Clock, which several engines may share.
        wrap: As for ``Engine``.
        times: Step times.
        options: As for ``Engine``.
    """

    def __init__(
        self,
        clock: VirtualClock,
        wrap: Callable[[type], type] | None = None,
        *,
        times: StepTimes = Constants(),  # noqa: B008  # frozen
        **options: Any,
    ) -> None:
        VirtualEngines.__init__(self)
        self.ranks = [self]
        self._updated = False
        """Whether an output came back in the last step."""
        self._gap_us = 0.0
        """Microseconds by which the clock was advanced after the latest output."""
        self._idle = 0
        """Number of consecutive steps without a token."""
        super().__init__(clock, wrap, times, **options)

    def _build(self, scheduler_class: type, groups: list[Any]) -> Any:
        def executor(vllm_config: Any) -> SimulatedExecutor:
            return SimulatedExecutor(
                vllm_config, clock=self.clock, times=self._times, model_runner=self.model_runner
            )

        self.core = make_core(self.config, executor, scheduler_class, groups)
        return self.core.scheduler

    @property
    def busy(self) -> bool:
        """Whether the engine has any work, including outputs in flight."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def run(self, until_us: float = NEVER) -> None:
        """Run the engine; see ``VirtualEngines.run``."""
        while self.clock.now_us < until_us:
            if self.busy:
                self.step()
                if self._expected(until_us):
                    self._idle = 0
                elif self._idle > MOST_IDLE_STEPS:  # no request can run: it would step forever
                    left = len(self.scheduler.requests)
                    msg = f"{left} requests cannot go on: {self._idle} steps without a token"
                    raise NoProgressError(msg)
            elif self._coming:
                comes_us = self._coming[0][0]
                self.clock.until(min(comes_us, until_us))
                if comes_us <= until_us:
                    self.clock.advance(self._times.wake_us())
                    self._let_in()
            else:
                return

    def step(self) -> None:
        """Run the engine's loop once: let in arrived requests, then run a step of ``EngineCore``."""
        if self.feed is not None:
            self.feed.let_in(self)
        if self._updated:  # now it is known how many came meanwhile
            due = sum(us <= self.clock.now_us for us, *_ in self._coming)
            self.clock.advance(self._times.gap_us(due) - self._gap_us)
        self._let_in()
        outputs_by_client, executed = self.core.step_fn()
        self.core.post_step(executed)
        for outputs in (outputs_by_client or {}).values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self.finished(output.request_id)
        self._updated = outputs_by_client is not None
        if self._updated:
            self._gap_us = self._times.gap_us(0)
            self.clock.advance(self._gap_us)
        if not executed and self.scheduler.has_requests():
            self.clock.advance(YIELD_US)
        worked = executed or any(outputs.outputs for outputs in (outputs_by_client or {}).values())
        self._idle = 0 if worked else self._idle + 1

    def close(self) -> None:
        """Shut the engine down; see ``VirtualEngines.close``."""
        while self.core.batch_queue:
            future, output, *_ = self.core.batch_queue.pop()
            self.scheduler.update_from_output(output, future.result())
        self.scheduler.shutdown()

    def _enter(self, us: float, request: Any, rank: int | None) -> None:  # noqa: ARG002  # there is but one
        self.prepared(us, request)
        self.enqueue(request)

    def _let_in(self) -> None:
        while self._coming and self._coming[0][0] <= self.clock.now_us:
            heapq.heappop(self._coming)[2]()
