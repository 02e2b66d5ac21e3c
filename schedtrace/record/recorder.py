"""Recorder of a scheduler; it passes captures to the writer and never raises an error."""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from schedtrace.model.trace import Arrival, Finish, Preemption
from schedtrace.model.trace_facts import Control, ControlKind, KvSend, KvSendEvent
from schedtrace.record.allocation import blocks_of
from schedtrace.record.capture import (
    Capture,
    DummyPass,
    Happened,
    Result,
    SteadySteps,
    Synced,
    only_samples,
    tokens_got,
)
from schedtrace.record.facts import SchedulerFacts
from schedtrace.record.inference import Departures, InferredExits
from schedtrace.record.live.queue_copy import PresentRequests, QueueCopy
from schedtrace.record.log import logger
from schedtrace.record.marks.exits import Noted, ended_loops, latest_preemption
from schedtrace.record.queues import Queues, policy
from schedtrace.record.vllms_own import is_own, is_own_class
from schedtrace.record.worker_hooks import execution_of
from schedtrace.record.writer import Writer

MOST_IN_FLIGHT = 1000
"""Maximum number of steps that wait for their output, so that lost outputs do not fill the memory."""


class Recorder:
    """Recording of one engine; all methods run on the scheduler's thread."""

    def __init__(self, scheduler: Any, traced: type, writer: Writer, *, full_lines: bool = False) -> None:
        self.active = True
        self.clock: Callable[[], int] = time.monotonic_ns
        self.writer = writer
        self.facts = SchedulerFacts(scheduler, writer.clock.since_anchor)
        self._inference = InferredExits(scheduler)
        self._expects_inference = not traced._schedtrace_instrumented.classes  # type: ignore[attr-defined]  # of a class that records
        self._warned: set[str] = set()
        pool = self._block_pool = getattr(scheduler.kv_cache_manager, "block_pool", None)
        self._free_blocks: Callable[[], int | None] = lambda: None  # not known
        if pool is not None and is_own(pool):
            self._free_blocks = pool.get_num_free_blocks
        self._departures = None if is_own_class(traced) else Departures()
        self._queues = Queues(scheduler)
        self.count_waiting, self._num_not_ready = self._queues.count_waiting, self._queues.num_not_ready
        self._steady = SteadySteps(never=full_lines)
        self._only_samples = only_samples(scheduler)
        self._steps = 0
        self._call = Capture()
        """Capture of the current or latest call."""
        self.events: list[Noted] | None = None
        """Events that the marks recorded in the current ``schedule()`` call; None outside such a call."""
        self.queued = True
        """Whether a request may be waiting in the current call."""
        self.left = 0
        """Number of requests so far that were finished, aborted, preempted or set aside."""
        self._in_flight: dict[int, tuple[Capture, int]] = {}
        """Step, and the value of ``left`` when it was scheduled, by the identity of its ``SchedulerOutput``.
        """
        self._preempted: list[tuple[Preemption, int]] = []
        self._free_before_preemption: int | None = None
        self._events: list[Noted] = []
        """Events of the latest step."""
        self._ended_waiting = False
        """Whether the events of the latest step include the end of the waiting loop."""

    def latest_call(self) -> Capture:
        """Return the capture of the current or latest call."""
        return self._call

    def note_present(self, queue_copy: QueueCopy) -> None:
        """Store the requests that were present when recording began, before the first step."""
        self.writer.put_present(PresentRequests(queue_copy, self.facts.salt))

    def schedule_begins(self, scheduler: Any, throttled: Any = None) -> None:
        """Record the state before the call, and whether the call has to hold back new prefills."""
        try:
            call = self._call = Capture()
            call.inferred = call.happened = call.result = None
            call.preempted = call.state = call.ids = ()
            call.throttled = throttled
            call.num_running_before = running = len(scheduler.running)
            call.num_waiting_before = waiting = self.count_waiting(scheduler)
            call.kv_blocks_free_before = self._free_blocks()
            call.side_events = self.writer.take_events()
            call.step = self._steps
            self._steps += 1
            if self._expects_inference:
                self._inference.begin(scheduler, running, waiting)
            self.queued = waiting > 0
            self.events = []
            call.start_ns = self.clock()
        except Exception as error:
            self._fail("before schedule()", error)

    def schedule_ended(self, scheduler: Any, output: Any) -> None:
        """Record what the call decided; the state is read at once, because it changes later."""
        end_ns = self.clock()
        try:
            events, self.events = self.events, None
            if events is None:
                return
            capture = self._call
            capture.end_ns = end_ns
            rows, full = self._steady.changed_rows(output, end_ns)
            capture.rows, capture.full = rows, full
            repeated = events == self._events
            if not repeated:
                self._events, self._ended_waiting = events, "waiting" in ended_loops(events)
            capture.events = None if repeated and rows is None else events
            capture.token_budget = scheduler.max_num_scheduled_tokens
            capture.max_num_running_reqs = scheduler.max_num_running_reqs
            capture.num_running_after = len(scheduler.running)
            capture.num_waiting_after = self.count_waiting(scheduler)
            capture.num_not_ready_after = self._num_not_ready(scheduler)
            capture.kv_blocks_total = getattr(self._block_pool, "num_gpu_blocks", None)
            capture.kv_blocks_free_after = self._free_blocks()
            try:
                self.facts.note_call(capture, scheduler, output, events)
            except Exception as error:
                self._facts_failed(error)
            if self._departures is not None:
                self._note_departures(self._departures, scheduler, capture)
            if self._preempted:
                capture.preempted, self._preempted = self._preempted, []
            if not self._ended_waiting:
                self._infer(scheduler, output, capture, events)
            if not self.writer.put_step(capture):
                self._steady.start_over()
            self._in_flight[id(output)] = (capture, self.left)
            if len(self._in_flight) > MOST_IN_FLIGHT:
                del self._in_flight[next(iter(self._in_flight))]
            self.active = self.active and self.writer.working
        except Exception as error:
            self._fail("after schedule()", error)

    def _note_departures(self, departures: Departures, scheduler: Any, capture: Capture) -> None:
        """Note requests that have stopped running in a way that vLLM's own schedulers do not use."""
        try:
            aside, gone = departures.unexplained(scheduler)
            for request in gone:
                self._note_finish(request, "UNKNOWN")
            if aside:
                self.left += len(aside)
                capture.happened = capture.happened or Happened()
                capture.happened.set_aside = aside
        except Exception as error:
            self._facts_failed(error)

    def _facts_failed(self, error: Exception) -> None:
        """Report once that a fact other than a decision could not be read; decisions are still recorded."""
        self._warn_once("facts beside the decisions may be missing", error)

    def _infer(self, scheduler: Any, output: Any, capture: Capture, events: list[Noted]) -> None:
        """Infer from the state how the call ended, because no mark recorded it, and watch later calls."""
        if not self._expects_inference:
            self._expects_inference = True
            where = f"step {capture.step} ended at no known place of schedule()"
            self.writer.notice(f"{where}: the exits of such steps are inferred")
        inferred = self._inference.infer_exits(
            scheduler,
            capture.token_budget - output.total_num_scheduled_tokens,
            output.num_scheduled_tokens,
            sum(preemption.in_schedule for preemption, _ in capture.preempted),
        )
        ended = ended_loops(events)
        capture.inferred = [line for line in inferred if line.loop not in ended]

    def schedule_raised(self, raised: BaseException) -> None:
        """Forget a call that raised an error; arrivals and departures before it go to the next call."""
        try:
            events, self.events = self.events, None
            self._inference.release()
            self._preempted.clear()
            self._steady.start_over()
            if events is not None:
                self.writer.give_back(self._call.side_events)
                self.writer.notice(f"step {self._call.step} is missing: {self.writer.describe(raised)}")
        except Exception as error:
            self._fail("after schedule()", error)

    def output_came_back(self, output: Any, sampled: Any, back_ns: int, left: int, outputs: Any) -> None:
        """Record a step's output, which is matched by identity because several steps may be in flight.

        Args:
            output: The step's ``SchedulerOutput``.
            sampled: vLLM's ``ModelRunnerOutput``, if it was passed by position.
            back_ns: Monotonic time at which the output came back, in nanoseconds.
            left: Value of ``self.left`` at that time.
            outputs: Return value of ``update_from_output``.
        """
        try:
            done_ns = self.clock()
            capture, left_before = self._in_flight.pop(id(output), (None, 0))
            if capture is not None:
                # Otherwise the outputs themselves must be read.
                sure = self._only_samples and left == left_before
                got = tokens_got(output, sampled if sure else None, outputs)
                invalid = getattr(output, "num_invalid_spec_tokens", None)
                capture.result = Result(back_ns, done_ns, got, execution_of(sampled), invalid)
        except Exception as error:
            self._fail("in update_from_output()", error)

    def request_arrives(self, scheduler: Any, request: Any) -> None:
        """Record a request before it enters the queue."""
        if not self.active:
            return
        try:
            lora = getattr(request, "lora_request", None)
            update = request.request_id in scheduler.requests
            now_us = self.writer.clock.since_anchor(self.clock())
            facts: dict[str, Any] = {}
            try:
                if not update:
                    self.writer.prefixes.keep_prompt(request)
                facts = self.facts.arrival_fields(request)
            except Exception as error:
                self._facts_failed(error)
            arrival = Arrival(
                request_id=request.request_id,
                arrived_us=self.writer.clock.from_wall_clock(request.arrival_time, now_us),
                queued_us=now_us,
                prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                priority=request.priority,
                lora=None if lora is None else lora.lora_name,
                streaming_update=update,
                **facts,
            )
            self.writer.measuring.keep_trace_context(request)
            self.writer.arrived.append(arrival)
        except Exception as error:
            self._fail("in add_request()", error)

    def request_preempted(self, scheduler: Any, request: Any) -> None:
        """Record a request before its preemption resets its counters, and the request that needs blocks.

        The mark before the preemption names the latter. Without marks, it is the local variable ``request``
        in the frame of ``schedule()``, in all releases.
        """
        if not self.active:
            return
        self.left += 1
        try:
            self.queued = True
            events = self.events
            count = getattr(request, "num_preemptions", None)
            preemption = Preemption(
                request_id=request.request_id,
                lost_tokens=request.num_computed_tokens,
                num_preemptions=None if count is None else count + 1,
                in_schedule=events is not None,
                policy=policy(scheduler),
            )
            if events:
                if (latest := latest_preemption(events)) is not None:
                    preemption.for_request_id = latest.request_id
                    preemption.blocks_needed = None if latest.refusal is None else latest.refusal.needed
            elif events is not None and (caller := sys._getframe(2)).f_code.co_name == "schedule":
                wants = caller.f_locals.get("request")
                preemption.for_request_id = getattr(wants, "request_id", None)
            self._preempted.append((preemption, request.num_tokens))
            if self._departures is not None:
                self._departures.explain(request.request_id)
            self._free_before_preemption = self._free_blocks()
        except Exception as error:
            self._fail("in _preempt_request()", error)

    def request_was_preempted(self) -> None:
        """Record how many blocks the preemption freed."""
        if not self.active:
            return
        try:
            free = self._free_blocks()
            if free is not None and self._free_before_preemption is not None and self._preempted:
                self._preempted[-1][0].blocks_freed = free - self._free_before_preemption
        except Exception as error:
            self._fail("after _preempt_request()", error)

    def request_freed(self, request: Any) -> None:
        """Record a request that leaves, finished or aborted."""
        if not self.active:
            return
        self.left += 1
        try:
            self._queues.freed(request.request_id)
            if self._departures is not None:
                self._departures.explain(request.request_id)
            self._note_finish(request, request.status.name.removeprefix("FINISHED_"))
        except Exception as error:
            self._fail("in _free_request()", error)

    def request_was_freed(self, scheduler: Any, request: Any) -> None:
        """Record the KV blocks that a finished request keeps because a connector sends them."""
        if not self.active or not self.facts.kv_loads.used:
            return
        try:
            if request.request_id in scheduler.requests:
                self._note_send(scheduler, request.request_id, "begun")
        except Exception as error:
            self._facts_failed(error)

    def _note_send(self, scheduler: Any, request_id: str, event: KvSendEvent) -> None:
        at_us = self.writer.clock.since_anchor(self.clock())
        blocks = blocks_of(scheduler.kv_cache_manager, request_id) or None
        self.writer.put_beside(KvSend(request_id, event, at_us, blocks))

    def _note_finish(self, request: Any, status: str) -> None:
        finish = Finish(
            request_id=request.request_id,
            status=status,
            finished_us=self.writer.clock.since_anchor(self.clock()),
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            num_preemptions=getattr(request, "num_preemptions", None),
            in_schedule=self.events is not None,
        )
        try:
            self.facts.add_finish_facts(finish)
        except Exception as error:
            self._facts_failed(error)
        self.writer.finished.append(finish)

    def kv_loads_ended(self, scheduler: Any, output: Any) -> None:
        """Record the KV loads and sends that have ended according to a ``KVConnectorOutput``."""
        if not self.active:
            return
        try:
            now_us = self.writer.clock.since_anchor(self.clock())
            self.facts.kv_loads.note_ended(scheduler, getattr(output, "finished_recving", None), now_us)
            sent = getattr(output, "finished_sending", None)
            for request_id in sent if isinstance(sent, set | frozenset | list | tuple) else ():
                self._note_send(scheduler, request_id, "ended")
        except Exception as error:
            self._facts_failed(error)

    def before_reset(self, scheduler: Any) -> dict[str, int | None]:
        """Return the state that a reset of the prefix cache may change, as fields of ``Control``."""
        try:
            return {"running": len(scheduler.running), "prefix_keys": self.facts.prefix_keys}
        except Exception as error:
            self._facts_failed(error)
            return {}

    def control(
        self,
        scheduler: Any,
        kind: ControlKind,
        began_ns: int,
        *,
        failed: bool = False,
        detail: str | None = None,
        before: Mapping[str, int | None] | None = None,
    ) -> None:
        """Record a control call to the engine, after the call has ended.

        Args:
            scheduler: The recorded scheduler.
            kind: Kind of the call.
            began_ns: Monotonic time at which the call began, in nanoseconds.
            failed: Whether the call raised an error or was refused.
            detail: Value of ``Control.detail``.
            before: State before the call (``before_reset``); if None, the running requests are counted now.
        """
        if not self.active:
            return
        try:
            at_us = self.writer.clock.since_anchor(began_ns)
            took_us = (self.clock() - began_ns) // 1000
            state = before or {"running": len(scheduler.running)}
            self.writer.put_beside(Control(kind, at_us, took_us, detail, failed=failed, **state))
        except Exception as error:
            self._facts_failed(error)

    def class_changed(self, kind: type) -> None:
        """Stop recording: the scheduler has assigned itself another class, which has no hooks."""
        if self.active:
            self.active = False
            with contextlib.suppress(Exception):
                why = f"the scheduler has given itself the class {kind.__qualname__}"
                self.writer.stops(why)
                self._inference.release()
                self._warn(f"recording stopped: {why}")

    def mark_failed(self, error: Exception) -> None:
        """Report once that a mark in ``schedule()`` could not record everything; recording continues."""
        self._warn_once("exits may lack details: a mark in schedule() failed", error)

    def beside(self, entry: DummyPass | Synced) -> None:
        """Record what a data-parallel rank did for other ranks outside its own steps."""
        if self.active:
            self.writer.put_beside(entry)

    def close(self) -> None:
        """Write the remaining lines and the end line; a second call does nothing."""
        self.active = False
        self.writer.close()

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._warn(f"{what}: {self.writer.describe(error)}")

    def _warn(self, message: str) -> None:
        """Log a warning and write it into the trace."""
        logger.warning("schedtrace: {}", message)
        self.writer.notice(message)

    def _fail(self, where: str, error: Exception) -> None:
        """Stop recording, and report it once in the log and in the trace; the engine continues."""
        self.events = None
        self._in_flight.clear()
        with contextlib.suppress(Exception):
            self._inference.release()
        if self.active:
            self.active = False
            self.writer.stops(f"{where}, {self.writer.describe(error)}")
            self._warn(f"recording stopped {where}: {self.writer.describe(error)}")
