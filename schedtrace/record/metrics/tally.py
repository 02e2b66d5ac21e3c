"""Running totals of an engine: the sums over its trace's lines, updated on the writer's thread.

The totals equal the sums of the tables that ``analyze`` makes from the same trace (``timeline/``) and have
the same meaning: a request waits from the start of the step that refuses it to the start of the next step.
The cause is that of the skip that names the request or, if none does, of the exit that ended the loop. The
requests of the queue are not examined one by one: for each cause, the number of requests that wait because of
it is multiplied by the time between two steps. For a request that arrives or leaves between two steps, this
time is corrected.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.model.trace import Arrival, Events, Exit, Finish, Output, Preemption, Present, Step
from schedtrace.model.trace_facts import SetAside

NEXT_STEP = "next_step"
"""Cause of waiting for the first step that can see the request, because no step has refused it yet."""
OTHER = str(Cause.OTHER)
MOST_OUTPUTS = 4096
"""Maximum number of latest steps whose output times are kept, in case a request stops getting tokens."""
MOST_SPANS = 256
"""Maximum number of latest periods of work that are kept, to tell idle time from work without requests."""
PriorityClass = Literal["urgent", "default", "background"]


def priority_class(priority: int) -> PriorityClass:
    """Return the class of a priority; lower numbers are served first, and 0 is vLLM's default."""
    return "urgent" if priority < 0 else "background" if priority else "default"


class Levels:
    """Time spent under each label, in microseconds: the number of entries under it, integrated over time."""

    def __init__(self) -> None:
        self.us: Counter[str] = Counter()
        self.count: Counter[str] = Counter()
        self.clock_us = 0

    def advance_to(self, us: int) -> None:
        """Add the time since the last call, up to a moment."""
        passed_us = us - self.clock_us
        for label, count in self.count.items():
            self.us[label] += count * passed_us
        self.clock_us = us

    def enter(self, label: str, at_us: int) -> None:
        """Count one more under a label from a moment on, which may be before or after the clock's time."""
        self.count[label] += 1
        self.us[label] += self.clock_us - at_us

    def leave(self, label: str, at_us: int) -> None:
        """Count one less under a label from a moment on, which may be before or after the clock's time."""
        self.count[label] -= 1
        self.us[label] -= self.clock_us - at_us


class StepCauses(NamedTuple):
    """Causes that kept a step from giving requests tokens."""

    waiting: str
    """Cause of the exit that best shows why the waiting queue was not emptied, or ``queue_empty``."""
    skipped: Mapping[str, str]
    """Cause of the skip of each request that the loop over the waiting queue skipped by name."""
    running: str
    """Cause for running requests that no exit of the step names."""
    named: Mapping[str, str]
    """Cause for each request that a refusal of either loop names."""
    refusals: Mapping[str, int]
    """Number of refusals by cause."""

    @property
    def queue_cause(self) -> str:
        """Cause of waiting for requests in the queue that no skip names; never ``queue_empty``."""
        return OTHER if self.waiting == Cause.QUEUE_EMPTY else self.waiting


def step_causes(exits: Iterable[Exit], *, waiting: int) -> StepCauses:
    """Return the causes that a step's exits state.

    Args:
        exits: Exits of the step's line.
        waiting: Number of requests in the queue after the step.
    """
    refusals: Counter[str] = Counter()
    skipped: dict[str, str] = {}
    named: dict[str, str] = {}
    often: Counter[tuple[str, str | None]] = Counter()
    ended: Exit | None = None
    skips: dict[tuple[str, str | None], Exit] = {}
    running_skip = running_end = None
    for exit_ in exits:
        refuses = exit_.cause not in NOT_A_REFUSAL and (exit_.loop == "running" or waiting > 0)
        ids = [exit_.request_id, *(skip.request_id for skip in exit_.also)]
        number = exit_.count * len(ids)
        if refuses:
            refusals[exit_.cause] += number
            named.update((request_id, exit_.cause) for request_id in ids if request_id is not None)
        if exit_.loop == "waiting" and exit_.kind == "continue":
            skipped.update((request_id, exit_.cause) for request_id in ids if request_id is not None)
            place = (exit_.cause, exit_.location)
            often[place] += number
            skips.setdefault(place, exit_)
        elif exit_.loop == "waiting" and (ended is None or refuses or not _refuses(ended, waiting)):
            ended = exit_
        elif exit_.loop == "running" and refuses and exit_.kind == "continue" and exit_.request_id is None:
            running_skip = exit_.cause
        elif exit_.loop == "running" and refuses and exit_.kind != "continue":
            running_end = exit_.cause
    return StepCauses(
        waiting=_waiting_cause(ended, skips, often, waiting),
        skipped=skipped,
        running=running_skip or running_end or OTHER,
        named=named,
        refusals=refusals,
    )


def _refuses(exit_: Exit, waiting: int) -> bool:
    return waiting > 0 and exit_.cause not in NOT_A_REFUSAL


def _waiting_cause(
    ended: Exit | None,
    skips: Mapping[tuple[str, str | None], Exit],
    often: Mapping[tuple[str, str | None], int],
    waiting: int,
) -> str:
    """Return the cause of the exit that best shows why the queue was not emptied.

    A refusal comes before an end that refused no request, an end before a skip, and the most frequent skip
    before other skips.
    """
    refusing = {place: exit_ for place, exit_ in skips.items() if _refuses(exit_, waiting)}
    if ended is not None and (_refuses(ended, waiting) or not refusing):
        return ended.cause
    if candidates := refusing or skips:
        return max(candidates, key=lambda place: often[place])[0]
    return OTHER if waiting > 0 else str(Cause.QUEUE_EMPTY)


class BusyTime:
    """Time in which an engine works or has requests, and the part of it in which the device works.

    Idle time is the time in which the scheduler has no request and no work is under way: from the departure
    of the last request to the next arrival.
    """

    def __init__(self) -> None:
        self.began_us: int | None = None
        """Start of the first step."""
        self.device_us = 0
        self._idle_us = 0
        self._device_end_us = 0
        self._empty_since_us: int | None = 0
        """Time at which the last request left; None while any request is present."""
        self._spans: deque[tuple[int, int]] = deque(maxlen=MOST_SPANS)

    def note_empty(self, at_us: int) -> None:
        """Record that no request is left."""
        self._empty_since_us = at_us

    def note_first(self, at_us: int) -> None:
        """Record that a request arrived when there was none."""
        self._idle_us += self._empty_us(at_us)
        self._empty_since_us = None

    def note_work(self, begin_us: int, end_us: int) -> None:
        """Record a period in which the engine worked."""
        self._spans.append((begin_us, end_us))

    def note_device(self, begin_us: int, end_us: int) -> None:
        """Record a period in which the device worked; periods must begin in order."""
        self.device_us += max(0, end_us - max(begin_us, self._device_end_us))
        self._device_end_us = max(self._device_end_us, end_us)
        self._spans.append((begin_us, end_us))

    def skip(self, us: int) -> None:
        """Leave out time that is not recorded."""
        if self.began_us is not None:
            self.began_us += us

    def idle_us(self, now_us: int) -> int:
        """Return the idle time up to now."""
        return self._idle_us + self._empty_us(now_us)

    def host_us(self, now_us: int) -> int:
        """Return the time up to now that is neither idle time nor the device's."""
        elapsed_us = 0 if self.began_us is None else now_us - self.began_us
        return elapsed_us - self.idle_us(now_us) - self.device_us

    def _empty_us(self, until_us: int) -> int:
        """Return the time without requests or work since the last request left."""
        if self._empty_since_us is None or self.began_us is None:
            return 0
        at_us, idle_us = max(self._empty_since_us, self.began_us), 0
        for begin_us, end_us in sorted(span for span in self._spans if span[1] > at_us):
            idle_us += max(0, min(begin_us, until_us) - at_us)
            at_us = max(at_us, end_us)
        return idle_us + max(0, until_us - at_us)


class CountedStep(NamedTuple):
    """Step that is counted but not written, with the fields of ``Step`` that totals need."""

    step: int
    start_us: int
    schedule_us: int
    token_budget: int
    remaining_budget: int
    total_requests: int
    num_waiting_after: int
    decode_tokens: int
    recomputed_tokens: int
    exits: Sequence[Exit]
    preempted: Sequence[Preemption]
    arrived: Sequence[Arrival]
    finished: Sequence[Finish]
    dummy_us: int
    set_aside: Sequence[SetAside] = ()


@dataclass(slots=True)
class _Unscheduled:
    """Running request that got no tokens in the latest step."""

    raw_id: str
    """Id of the request in vLLM."""
    last_step: int
    """Last step that scheduled the request; -1 if no step of the trace did."""
    counted_us: int = 0
    """Part of the time since the latest step that the totals already contain."""


class Tally:
    """Totals of one engine since recording began. Ids are those of the lines.

    Args:
        by_priority: Whether the scheduler's policy is priority.
    """

    def __init__(self, *, by_priority: bool = False) -> None:
        self.waits, self.running, self.aside = Levels(), Levels(), Levels()
        self.classes = Levels() if by_priority else None
        self._levels = [self.waits, self.running, self.aside, *([self.classes] if self.classes else [])]
        self.busy = BusyTime()
        self.stalled_us: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """Scheduled tokens by use: ``prefill``, ``decode``, ``recompute``."""
        self.unused_tokens: Counter[str] = Counter()
        """Tokens of the budget that steps left, by the cause that ended their waiting loop."""
        self.dropped_steps = 0
        self.steps = 0
        self.clock_us = 0
        """Moment up to which the totals are complete."""
        self._next: dict[str, int] = {}
        """Requests that have arrived after the latest step, with their priorities."""
        self._queued: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._aside: set[str] = set()
        self._unscheduled: dict[str, _Unscheduled] = {}
        self._exits: Sequence[Exit] | None = None
        self._is_empty = True
        """Whether the latest step left no request in the queue."""
        self.causes = step_causes((), waiting=0)
        """Causes of the exits of the latest step."""
        self._step_us: int | None = None
        """Start of the latest step; None before the first of a recording."""
        self._outputs: dict[int, int] = {}
        """Times at which the outputs of steps came back, by step."""
        self._latest_output_us = 0
        self._done: dict[int, tuple[int, int]] = {}
        """Steps whose output is not back, with the times at which ``schedule()`` returned and began."""
        self._over_us = 0
        """Time at which the latest step ended: its call has returned, or its output is back."""
        self._lost = False
        """Whether steps before the next one are missing."""
        self._dummy_us = 0
        """Time of dummy batches since the latest step."""

    @property
    def queue_causes(self) -> dict[str, int]:
        """Number of waiting requests by cause."""
        return {cause: count for cause, count in self.waits.count.items() if count}

    @property
    def held_us(self) -> dict[str, int]:
        """Time in which requests held seats or blocks: computing, stalled, or set aside."""
        stalled = sum(self.stalled_us.values())
        return {
            "running": self.running.us["running"] - stalled,
            "stalled": stalled,
            "set_aside": self.aside.us["set_aside"],
        }

    def advance_to(self, us: int) -> None:
        """Add the time up to a moment; all lines from before this moment must have been added."""
        for request_id in self._unscheduled:
            self._add_stall(request_id, us)
        for levels in self._levels:
            levels.advance_to(us)
        self.clock_us = us

    def begin_with(
        self, at_us: int, present: Iterable[tuple[str, Present]], scheduled: Container[str] = ()
    ) -> None:
        """Start with the requests present at a moment, and no others.

        Args:
            at_us: The moment; earlier time is not counted.
            present: These requests, each with vLLM's id.
            scheduled: vLLM's ids of the requests of the latest step.
        """
        self._move_to(at_us)
        for raw_id, entry in present:
            if entry.state != "running":
                self._arrive(entry.request_id, entry.priority, at_us)
                continue
            self._run(entry.request_id, entry.priority, at_us)
            if raw_id not in scheduled:
                self._unscheduled[entry.request_id] = _Unscheduled(raw_id, -1)

    def note_step(
        self,
        step: Step | CountedStep,
        *,
        admitted: Iterable[str],
        left: Iterable[tuple[str, str]] = (),
        scheduled: Container[str] | None = None,
    ) -> None:
        """Add a step.

        Args:
            step: Line of the step, without its requests.
            admitted: Requests that the step took from the queue.
            left: Requests of the previous step that are not in this one: their ids in lines, and vLLM's ids.
            scheduled: vLLM's ids of the step's requests; None if they are the same as in the step before.
        """
        start_us = step.start_us
        if self._lost:
            self._move_to(start_us)
        gone = {finish.request_id for finish in step.finished}
        self.advance_to(start_us)
        if self.busy.began_us is None:
            self.busy.began_us = start_us
        self._come_and_go(step)
        self._lost = False
        self._dummy_us += step.dummy_us
        self.busy.note_work(start_us - self._dummy_us, start_us)
        self._dummy_us = 0
        self._change_places(step, gone, admitted)
        self._note_causes(step)
        self._note_unscheduled(step.step, left, scheduled)
        self.tokens["decode"] += step.decode_tokens
        self.tokens["recompute"] += step.recomputed_tokens
        prefill = step.token_budget - step.remaining_budget - step.decode_tokens - step.recomputed_tokens
        self.tokens["prefill"] += prefill
        self.unused_tokens[self.causes.waiting] += step.remaining_budget
        self._step_us = start_us
        self.steps += 1
        done_us = start_us + step.schedule_us
        self.busy.note_work(start_us, done_us)
        self._over_us = done_us
        if step.total_requests:
            self._done[step.step] = (done_us, start_us)
        if isinstance(step, Step):
            self.note_output(step)

    def note_events(self, events: Events, *, preempted: Iterable[str] = ()) -> None:
        """Add events between two steps, or in place of dropped steps.

        Args:
            events: Line of the events.
            preempted: Requests that dropped steps preempted.
        """
        if events.dropped_steps:
            self.dropped_steps += events.dropped_steps
            if not self._lost:
                self.advance_to(self._over_us)
            self._lost = True
            self._move_to(events.at_us)
            for request_id in preempted:
                if request_id in self._running:
                    self._queue(request_id, self.clock_us)
        self._come_and_go(events)
        self._dummy_us += events.dummy_us

    def resume_with(self, request_ids: Iterable[str]) -> None:
        """Record that these requests run after dropped steps, which may have admitted them."""
        for request_id in request_ids:
            if request_id in self._next or request_id in self._queued:
                priority = self._leave(request_id, self.clock_us)
                self._run(request_id, priority, self.clock_us)

    def _move_to(self, us: int) -> None:
        """Set the clock without adding the time in between, which is not recorded."""
        self.busy.skip(max(0, us - self.clock_us))
        for levels in self._levels:
            levels.clock_us = us
        self.clock_us, self._step_us = us, None

    def _come_and_go(self, line: Step | CountedStep | Events) -> None:
        """Add the arrivals and departures since the last line, in order of time."""
        arrivals = [arrival for arrival in line.arrived if not arrival.streaming_update]
        moments: list[tuple[int, int, Arrival | Finish]]
        moments = [(arrival.queued_us, 0, arrival) for arrival in arrivals]
        moments += [(finish.finished_us, 1, finish) for finish in line.finished]
        for moment_us, _, who in sorted(moments, key=lambda moment: moment[:2]):
            at_us = self.clock_us if self._lost else moment_us  # lost time does not count
            if isinstance(who, Arrival):
                self._arrive(who.request_id, who.priority, at_us)
            else:
                self._leave(who.request_id, at_us)

    def _arrive(self, request_id: str, priority: int, at_us: int) -> None:
        if not self._present():
            self.busy.note_first(at_us)
        self._next[request_id] = priority
        self._enter_queue(NEXT_STEP, priority, at_us)

    def _present(self) -> bool:
        return bool(self._next or self._queued or self._running)

    def _enter_queue(self, cause: str, priority: int, at_us: int) -> None:
        self.waits.enter(cause, at_us)
        if self.classes is not None:
            self.classes.enter(priority_class(priority), at_us)

    def _leave_queue(self, cause: str, priority: int, at_us: int) -> None:
        self.waits.leave(cause, at_us)
        if self.classes is not None:
            self.classes.leave(priority_class(priority), at_us)

    def _leave(self, request_id: str, at_us: int) -> int:
        """Remove a request from wherever it is; return its priority."""
        priority = 0
        if request_id in self._next:
            priority = self._next.pop(request_id)
            self._leave_queue(NEXT_STEP, priority, at_us)
        elif request_id in self._queued:
            priority = self._queued.pop(request_id)
            self._leave_queue(self._cause(request_id), priority, at_us)
            if request_id in self._aside:
                self._aside.discard(request_id)
                self.aside.leave("set_aside", at_us)
        elif request_id in self._running:
            priority = self._running.pop(request_id)
            if request_id in self._unscheduled:
                self._add_stall(request_id, at_us)
                del self._unscheduled[request_id]
            self.running.leave("running", at_us)
        else:
            return priority
        if not self._present():
            self.busy.note_empty(at_us)
        return priority

    def _run(self, request_id: str, priority: int, at_us: int) -> None:
        if not self._present():
            self.busy.note_first(at_us)
        self._running[request_id] = priority
        self.running.enter("running", at_us)

    def _queue(self, request_id: str, at_us: int) -> None:
        """Put a running request back into the queue."""
        priority = self._running.pop(request_id, 0)
        self._unscheduled.pop(request_id, None)
        self.running.leave("running", at_us)
        self._queued[request_id] = priority
        self._enter_queue(self._cause(request_id), priority, at_us)

    def _cause(self, request_id: str) -> str:
        return self.causes.skipped.get(request_id, self.causes.queue_cause)

    def _change_places(self, step: Step | CountedStep, gone: Container[str], admitted: Iterable[str]) -> None:
        """Move requests between the queue and the running list, at the start of the step."""
        at_us = step.start_us
        for request_id, priority in self._next.items():
            self._queued[request_id] = priority
            self.waits.count[NEXT_STEP] -= 1
            self.waits.count[self._cause(request_id)] += 1
        self._next.clear()
        for preemption in step.preempted:
            by_itself = preemption.for_request_id == preemption.request_id
            reason = "itself" if by_itself else "kv_blocks"
            self.preemptions[reason if preemption.in_schedule else "cache_reset"] += 1
            if preemption.request_id in self._running and preemption.request_id not in gone:
                self._queue(preemption.request_id, at_us)
        for aside in step.set_aside:
            if aside.request_id in self._running and aside.request_id not in gone:
                self._queue(aside.request_id, at_us)
                self._aside.add(aside.request_id)
                self.aside.enter("set_aside", at_us)
        for request_id in admitted:
            if request_id in self._queued:
                self._run(request_id, self._leave(request_id, at_us), at_us)

    def _note_causes(self, step: Step | CountedStep) -> None:
        """Apply the causes of this step to the requests that wait after it."""
        is_empty = not step.num_waiting_after
        if step.exits is not self._exits or is_empty != self._is_empty:
            self._exits, self._is_empty = step.exits, is_empty
            self.causes = step_causes(step.exits, waiting=step.num_waiting_after)
        causes = self.causes
        count = Counter(cause for request_id, cause in causes.skipped.items() if request_id in self._queued)
        count[causes.queue_cause] += len(self._queued) - count.total()
        self.waits.count = count
        self.refusals.update(causes.refusals)

    def _note_unscheduled(
        self, number: int, left: Iterable[tuple[str, str]], scheduled: Container[str] | None
    ) -> None:
        for request_id, raw_id in left:
            if request_id in self._running:
                self._unscheduled.setdefault(request_id, _Unscheduled(raw_id, number - 1))
        if scheduled is not None:
            for request_id in [
                name for name, waits in self._unscheduled.items() if waits.raw_id in scheduled
            ]:
                del self._unscheduled[request_id]
        for waits in self._unscheduled.values():
            waits.counted_us = 0

    def _add_stall(self, request_id: str, until_us: int) -> None:
        """Count the time without tokens since the latest step, or since the request's last output."""
        if self._step_us is None:
            return
        waits = self._unscheduled[request_id]
        cause = self.causes.named.get(request_id, self.causes.running)
        back_us = 0 if waits.last_step < 0 else self._outputs.get(waits.last_step)
        if cause == Cause.OUTPUT_IN_FLIGHT or back_us is None:
            return
        stalled_us = max(0, until_us - max(self._step_us, back_us))
        self.stalled_us[cause] += stalled_us - waits.counted_us
        waits.counted_us = stalled_us

    def note_output(self, back: Step | Output) -> None:
        """Add the device time of a step and the time of its update, if its output is back."""
        if back.output_us is None:
            return
        self.busy.note_work(back.output_us, back.output_us + (back.update_us or 0))
        self._outputs[back.step] = back.output_us
        if len(self._outputs) > MOST_OUTPUTS:
            del self._outputs[next(iter(self._outputs))]
        if (times := self._done.pop(back.step, None)) is not None:
            done_us, start_us = times
            could_us, over_us = max(done_us, self._latest_output_us), back.output_us
            if back.execute_after_us is not None:
                could_us = start_us + back.execute_after_us
                over_us = could_us + back.execute_us if back.execute_us is not None else over_us
            self.busy.note_device(could_us, over_us)
        self._latest_output_us = max(self._latest_output_us, back.output_us)
        self._over_us = max(self._over_us, back.output_us)
