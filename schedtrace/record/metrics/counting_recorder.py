"""Recorder for metrics alone: it only counts, and examines no request that merely decodes.

It serves those of vLLM's own schedulers whose exits are marked and that have no KV or encoder-cache
connector. Their requests are in the running list or in the queue, and lose computed tokens only to
preemptions and refused drafts. All other schedulers are recorded as for a trace, and the lines are added up.

A trace needs the requests of every step with their tokens. Totals need only a few of them: those that
the step admitted, running requests that got no tokens, and those that have not finished their prefill. In a
steady decode there are none, whatever the number of running requests.
"""

from collections.abc import Sequence
from typing import Any

from schedtrace.model.trace import Arrival, Events, Finish, Preemption
from schedtrace.record.assemble import Assembler
from schedtrace.record.capture import NOBODY, Capture, DummyPass, Result, SideEvents, Synced, resumed_ids
from schedtrace.record.facts import SchedulerFacts
from schedtrace.record.live.queue_copy import PresentRequests, QueueCopy, present_entry
from schedtrace.record.marks.exits import Noted, ended_loops
from schedtrace.record.metrics.tally import CountedStep
from schedtrace.record.queues import can_read_queues, know_queues
from schedtrace.record.recorder import MOST_IN_FLIGHT, Recorder
from schedtrace.record.vllms_own import is_own_class
from schedtrace.record.worker_hooks import execution_of
from schedtrace.record.writer import Writer


class StepCounts(Capture):
    """Capture of a ``schedule()`` call without its requests."""

    __slots__ = ("admitted", "decode", "idle", "ran", "recomputed", "requests", "tokens")
    ids = ()

    requests: int
    """Number of requests that the step scheduled."""
    tokens: int
    """Number of tokens that the step scheduled."""
    decode: int
    """Number of scheduled tokens that are neither prefill nor recomputed."""
    recomputed: int
    admitted: Sequence[str]
    """Requests that the step took from the queue."""
    idle: Sequence[str]
    """Running requests that got no tokens."""
    ran: Sequence[str]
    """Requests that the step scheduled but did not admit; set only after dropped steps."""

    def __init__(self, step: int, start_ns: int, end_ns: int, side_events: SideEvents) -> None:
        # All in one function: on the path of a step, each further call costs as much as the assignments.
        self.step, self.start_ns, self.end_ns, self.side_events = step, start_ns, end_ns, side_events
        self.inferred = self.rows = self.events = self.happened = self.result = None
        self.preempted = self.admitted = self.idle = self.ran = ()
        self.recomputed = 0


class SteadyStep(Capture):
    """Capture of a ``schedule()`` call with the same decision and requests as the call before it.

    Only its times and its output differ from the step before; nothing happened between the two steps.
    """

    __slots__ = ()
    side_events = NOBODY
    preempted = ()
    ids = ()
    rows = None

    def __init__(self, step: int, start_ns: int, end_ns: int) -> None:
        self.step, self.start_ns, self.end_ns = step, start_ns, end_ns
        self.result = None


class StepCounter(Assembler):
    """Assembler that only adds steps to totals; it makes no lines and does not follow requests."""

    _idle: frozenset[str] = frozenset()
    """Running requests that got no tokens in the latest step."""
    _latest: CountedStep
    """Latest step that was not steady."""

    def step_line(self, capture: Capture, result: Result | None) -> dict[str, Any]:
        """Add a step to the totals; return an empty delta, because no line is written."""
        self.next_step, self.latest_us = capture.step + 1, self._us(capture.end_ns)
        if isinstance(capture, StepCounts):
            step = self._latest = self._counted(capture)
            if self.tally is not None:
                ids = self._ids
                if capture.ran:
                    self.tally.resume_with(ids.written_ids(capture.ran))
                # The requests that changed places between the queue and the running list.
                idle = frozenset(capture.idle)
                self.tally.note_step(
                    step,
                    admitted=ids.written_ids(capture.admitted),
                    left=[(ids[name], name) for name in capture.idle if name not in self._idle],
                    scheduled=self._idle - idle,
                )
                self._idle = idle
        elif self.tally is not None:  # the latest step, with the times of a steady one after it
            steady = self._latest._replace(
                step=capture.step,
                start_us=self._us(capture.start_ns),
                schedule_us=(capture.end_ns - capture.start_ns) // 1000,
                preempted=(),
                arrived=(),
                finished=(),
                dummy_us=0,
            )
            self.tally.note_step(steady, admitted=())
        if result is not None:
            self.output(capture, result)
        return {}

    def _counted(self, capture: StepCounts) -> CountedStep:
        side_events, remaining = capture.side_events, capture.token_budget - capture.tokens
        exits, _ = self.latest_exits.exits_and_caps(capture, remaining)
        step = CountedStep(
            step=capture.step,
            start_us=self._us(capture.start_ns),
            schedule_us=(capture.end_ns - capture.start_ns) // 1000,
            token_budget=capture.token_budget,
            remaining_budget=remaining,
            total_requests=capture.requests,
            num_waiting_after=capture.num_waiting_after,
            decode_tokens=capture.decode,
            recomputed_tokens=capture.recomputed,
            exits=exits,
            preempted=[preemption for preemption, _ in capture.preempted],
            arrived=list(side_events.arrived),
            finished=list(side_events.finished),
            dummy_us=sum(dummy.ended_ns - dummy.began_ns for dummy in side_events.dummies) // 1000,
        )
        self.write_ids(step.arrived, step.finished, step.preempted)
        return step

    def output(self, capture: Capture, result: Result) -> dict[str, Any]:
        """Add the times of an output that came back late; return an empty line, as ``step_line`` does."""
        if self.tally is not None:
            self.tally.note_output(self._output(capture, result))
        return {}

    def present_line(self, present_requests: PresentRequests) -> Events:
        """Begin the totals with the requests that were present when recording began."""
        at_us = self._us(present_requests.queues.at_ns)
        entries = [
            present_entry(seen, present_requests.salt, self._clock)
            for seen in present_requests.queues.ordered_requests()
        ]
        self._idle = frozenset(entry.request_id for entry in entries if entry.state == "running")
        raw_ids = [entry.request_id for entry in entries]
        self._ids.replace_ids(entries)
        if self.tally is not None:
            self.tally.begin_with(at_us, zip(raw_ids, entries, strict=True))
        return Events(at_us=at_us)

    def _arrive(self, arrived: Sequence[Arrival]) -> None:
        pass

    def _leave(self, finished: Sequence[Finish]) -> None:
        pass

    def _preempted(self, preempted: Sequence[tuple[Preemption, int]]) -> None:
        pass


NEVER = -1
"""Value that differs from every number of running requests."""


def can_count(scheduler: Any, traced: type) -> bool:
    """Return whether this recorder's totals are exact for a scheduler with this traced class."""
    know_queues()
    connectors = (getattr(scheduler, name, None) for name in ("connector", "ec_connector"))
    marked: Any = getattr(traced, "_schedtrace_instrumented", None)
    return (
        is_own_class(traced)
        and can_read_queues(scheduler)
        and bool(marked and marked.classes)
        and not any(connector is not None for connector in connectors)
    )


class NoFacts(SchedulerFacts):
    """Replacement for the recorder of facts that totals do not need; it also discards the times of inputs."""

    def arrival_fields(self, request: Any) -> dict[str, Any]:
        """Return no fields."""
        self.inputs.input_times(request.request_id)
        return {}

    def add_finish_facts(self, finish: Finish) -> None:
        """Forget the time of an abort; add no facts."""
        self.inputs.abort_us(finish.request_id)

    def head_refused(self, scheduler: Any, request: Any, arguments: Any) -> None:
        """Record no facts about a refused head."""


class CountingRecorder(Recorder):
    """Recording of one engine for its totals; all methods run on the scheduler's thread."""

    def __init__(self, scheduler: Any, traced: type, writer: Writer) -> None:
        super().__init__(scheduler, traced, writer)
        self.facts = NoFacts(scheduler, writer.clock.since_anchor)
        self._prefilling: set[str] = set()
        """Running requests that may have tokens to prefill or to recompute."""
        self._lost: dict[str, int] = {}
        """Most computed tokens that each preempted request lost in one preemption."""
        self._dropped = False
        """Whether the latest step was dropped."""
        self._news = False
        """Whether anything happened (such as an arrival or a departure) after the latest call."""
        self._side_events = NOBODY
        self._start_ns = 0
        self._repeatable = NEVER
        """Number of running requests in the latest step, if all decoded and nothing has happened since."""
        self._tokens = self._present = 0
        """Number of tokens that the latest step scheduled, and of requests that the scheduler had after it.
        """
        self._lengths = self._queues.lengths(scheduler)

    def note_present(self, queue_copy: QueueCopy) -> None:
        """Store the requests that were present when recording began, before the first step."""
        self._prefilling = {request.request_id for request in queue_copy.running}
        super().note_present(queue_copy)

    def latest_call(self) -> Capture:
        """Return the capture of the current or latest call (on the writer's thread)."""
        if self.events is None:
            return self._call
        return StepCounts(self._steps, self._start_ns, self._start_ns, NOBODY)

    def schedule_begins(self, scheduler: Any, throttled: Any = None) -> None:  # noqa: ARG002  # in no total
        """Record the time, and what has happened since the call before."""
        if self._news or self._expects_inference:
            try:
                self._repeatable = NEVER
                self._news, self._side_events = False, self.writer.take_events()
                if self._expects_inference:  # no mark notes how the call ends
                    self._inference.begin(scheduler, len(scheduler.running), self.count_waiting(scheduler))
            except Exception as error:
                self._fail("before schedule()", error)
        if self.active:
            self._start_ns = self.clock()
            self.events = []

    def schedule_ended(self, scheduler: Any, output: Any) -> None:
        """Count what the call decided; if that repeats the call before, record only its times."""
        end_ns = self.clock()
        try:
            events = self.events
            if events is None:
                return
            running = len(scheduler.running)
            if (
                running == self._repeatable
                and output.total_num_scheduled_tokens == self._tokens
                and len(output.num_scheduled_tokens) == running
                and len(scheduler.requests) == self._present
                and not output.scheduled_new_reqs
                and events == self._events
                and not (self.queued and resumed_ids(output.scheduled_cached_reqs))
            ):
                call: Capture = SteadyStep(self._steps, self._start_ns, end_ns)
                self._steps += 1
                self._call, self.events = call, None
            else:
                call = self._changed_step(scheduler, output, events, end_ns)
            if not self.writer.put_step(call):
                self._dropped, self._repeatable = True, NEVER
            self._in_flight[id(output)] = (call, 0)
            if len(self._in_flight) > MOST_IN_FLIGHT:
                del self._in_flight[next(iter(self._in_flight))]
            if not self.writer.working:
                self.active = False
        except Exception as error:
            self._fail("after schedule()", error)

    def _changed_step(self, scheduler: Any, output: Any, events: list[Noted], end_ns: int) -> StepCounts:
        """Return the capture of a step that differs from the step before it."""
        call = self._call = self._next_call(end_ns)
        self.events = None  # after the call is there for the writer's thread
        if events != self._events or self._dropped:
            self._events, self._ended_waiting = events, "waiting" in ended_loops(events)
            call.events = events
        call.requests = requests = len(output.num_scheduled_tokens)
        call.token_budget = scheduler.max_num_scheduled_tokens
        call.tokens = call.decode = self._tokens = output.total_num_scheduled_tokens
        waiting = 0
        for name, kind, length in self._lengths:
            queue = getattr(scheduler, name)
            if type(queue) is not kind:  # another queue has replaced it
                waiting = self.count_waiting(scheduler)
                break
            waiting += length(queue)
        call.num_waiting_after = waiting
        self.queued = waiting > 0
        running, self._present = len(scheduler.running), len(scheduler.requests)
        if (
            running != requests
            or output.scheduled_new_reqs
            or self._prefilling
            or self._dropped
            or resumed_ids(output.scheduled_cached_reqs)
        ):
            self._note_places(scheduler, output, call)
        self._repeatable = NEVER if running != requests or self._prefilling else running
        self._dropped = False
        if self._preempted:
            call.preempted, self._preempted = self._preempted, []
        if not self._ended_waiting:
            self._infer(scheduler, output, call, events)
        return call

    def schedule_raised(self, raised: BaseException) -> None:
        """Forget a call that raised an error."""
        self._call = self._next_call(self._start_ns)
        self._news = True
        super().schedule_raised(raised)

    def _next_call(self, end_ns: int) -> StepCounts:
        call = StepCounts(self._steps, self._start_ns, end_ns, self._side_events)
        self._steps += 1
        self._side_events = NOBODY
        return call

    def _note_places(self, scheduler: Any, output: Any, call: StepCounts) -> None:
        """Record the requests whose place the step changed; count prefill and decode tokens separately."""
        scheduled = output.num_scheduled_tokens
        new, resumed = output.scheduled_new_reqs, resumed_ids(output.scheduled_cached_reqs)
        if new or resumed:
            call.admitted = [*(request.req_id for request in new), *resumed]
            self._prefilling.update(call.admitted)
        for name in tuple(self._prefilling):  # take tokens that are prefill or recomputed out of the decodes
            tokens = scheduled.get(name)
            if tokens is None:
                continue
            request = scheduler.requests[name]
            end = request.num_computed_tokens
            start, prompt, lost = end - tokens, request.num_prompt_tokens, self._lost.get(name, 0)
            if start >= prompt and start >= lost:
                self._prefilling.discard(name)
                continue
            call.recomputed += max(0, min(end, lost) - start)
            call.decode -= tokens - max(0, end - max(prompt, lost))
        if len(scheduler.running) != call.requests:
            names = [request.request_id for request in scheduler.running]
            call.idle = [name for name in names if name not in scheduled]
        if self._dropped:
            call.ran = [name for name in scheduled if name not in call.admitted]

    def output_came_back(
        self,
        output: Any,
        sampled: Any,
        back_ns: int,
        left: int,  # noqa: ARG002  # in no total
        outputs: Any,  # noqa: ARG002  # in no total
    ) -> None:
        """Record the times of a step's output."""
        try:
            done_ns = self.clock()
            call, _ = self._in_flight.pop(id(output), (None, 0))
            if call is not None:
                call.result = Result(back_ns, done_ns, ([], None), execution_of(sampled))
        except Exception as error:
            self._fail("in update_from_output()", error)

    def request_arrives(self, scheduler: Any, request: Any) -> None:
        """Record a request before it enters the queue."""
        self.queued = self._news = True
        super().request_arrives(scheduler, request)

    def request_preempted(self, scheduler: Any, request: Any) -> None:
        """Record a preempted request before its counters are reset, and the tokens that it loses."""
        super().request_preempted(scheduler, request)
        self._repeatable = NEVER
        if self._preempted:
            victim = self._preempted[-1][0]
            self._prefilling.discard(victim.request_id)
            self._lost[victim.request_id] = max(self._lost.get(victim.request_id, 0), victim.lost_tokens)

    def control(self, *args: Any, **options: Any) -> None:
        """Record a call to the engine other than a request."""
        self._news = True
        super().control(*args, **options)

    def beside(self, entry: DummyPass | Synced) -> None:
        """Record a data-parallel rank's work for other ranks outside its steps."""
        self._news = True
        super().beside(entry)

    def _note_finish(self, request: Any, status: str) -> None:
        self._news = True
        self._prefilling.discard(request.request_id)
        self._lost.pop(request.request_id, None)
        super()._note_finish(request, status)
