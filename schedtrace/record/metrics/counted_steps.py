"""Steps of an engine that nobody traces: what its totals need of each, and nothing about each request.

A trace needs the requests of every step with their tokens. Totals need only the requests whose place has
changed: those that the step admitted, those of the running list to which it gave nothing, and those that have
not finished their prefill. In a steady decode there are none, whatever the number of running requests.
"""

from collections.abc import Sequence
from typing import Any

from schedtrace.model.trace import Arrival, Events, Finish, Preemption
from schedtrace.record.assemble import Assembler
from schedtrace.record.capture import NOBODY, Capture, Result, SideEvents
from schedtrace.record.live.queue_copy import PresentRequests, present_entry
from schedtrace.record.metrics.tally import CountedStep, Tally


class StepCounts(Capture):
    """Capture of a ``schedule()`` call without its requests."""

    __slots__ = ("admitted", "decode", "idle", "ran", "recomputed", "requests", "tokens")

    requests: int
    """Number of requests that the step scheduled."""
    tokens: int
    """Tokens of all these requests."""
    decode: int
    """Tokens among these that are neither prefill nor recomputed."""
    recomputed: int
    admitted: Sequence[str]
    """Requests that the step took from the queue."""
    idle: Sequence[str]
    """Running requests to which it gave no tokens."""
    ran: Sequence[str]
    """Requests that it scheduled and did not admit, if the steps before it were dropped."""

    def __init__(self, step: int, start_ns: int, end_ns: int, side_events: SideEvents) -> None:
        # All in one function: on the path of a step, each further call costs as much as the assignments.
        self.step, self.start_ns, self.end_ns, self.side_events = step, start_ns, end_ns, side_events
        self.inferred = self.rows = self.events = self.happened = self.result = None
        self.preempted = self.admitted = self.idle = self.ran = ()
        self.recomputed = 0


class SteadyStep(Capture):
    """Capture of a ``schedule()`` call that decided what the call before it did, for the same requests.

    Everything but its times and its output is that of the step before; nothing has happened between them.
    """

    __slots__ = ()
    side_events = NOBODY
    preempted = ()
    rows = None

    def __init__(self, step: int, start_ns: int, end_ns: int) -> None:
        self.step, self.start_ns, self.end_ns = step, start_ns, end_ns
        self.result = None


class StepCounter(Assembler):
    """Assembler that adds steps to totals, makes no lines and keeps no lives of requests."""

    _idle: frozenset[str] = frozenset()
    """Running requests to which the latest step gave nothing."""
    _latest: CountedStep
    """Latest step that was no steady one."""

    def step_line(self, capture: Capture, result: Result | None) -> dict[str, Any]:
        """Add a step to the totals; return an empty delta, because no line is written."""
        self.progress.advance_to(capture.step, self._us(capture.end_ns))
        if isinstance(capture, StepCounts):
            step = self._latest = self._counted(capture)
            if self.tally is not None:
                self._add_counts(self.tally, step, capture)
        elif self.tally is not None:
            self.tally.note_step(self._repeated(capture), admitted=())
        if result is not None:
            self.output(capture, result)
        return {}

    def _counted(self, capture: StepCounts) -> CountedStep:
        side_events, remaining = capture.side_events, capture.token_budget - capture.tokens
        exits, _ = self._exits.exits_and_caps(capture, remaining)
        step = CountedStep(
            step=capture.step,
            start_us=self._us(capture.start_ns),
            schedule_us=(capture.end_ns - capture.start_ns) // 1000,
            token_budget=capture.token_budget,
            remaining_budget=remaining,
            total_requests=capture.requests,
            num_waiting_after=capture.waiting_after,
            decode_tokens=capture.decode,
            recomputed_tokens=capture.recomputed,
            exits=exits,
            preempted=[preemption for preemption, _ in capture.preempted],
            arrived=list(side_events.arrived),
            finished=list(side_events.finished),
            dummy_us=sum(dummy.ended_ns - dummy.began_ns for dummy in side_events.dummies) // 1000,
        )
        self._write_preemptors(step.preempted)
        self.write_ids(step.arrived, step.finished, step.preempted)
        return step

    def _repeated(self, capture: Capture) -> CountedStep:
        """Return the latest step with the times of a steady one after it."""
        return self._latest._replace(
            step=capture.step,
            start_us=self._us(capture.start_ns),
            schedule_us=(capture.end_ns - capture.start_ns) // 1000,
            preempted=(),
            arrived=(),
            finished=(),
            dummy_us=0,
        )

    def output(self, capture: Capture, result: Result) -> dict[str, Any]:
        """Add the times of an output that came back late; return an empty line, as for a step."""
        if self.tally is not None:
            self.tally.note_output(self._output_times(capture, result))
        return {}

    def _add_counts(self, tally: Tally, step: CountedStep, capture: StepCounts) -> None:
        """Add a step to the totals, with the requests whose place changed."""
        ids = self._ids
        if capture.ran:
            tally.resume_with(ids.written_ids(capture.ran))
        idle = frozenset(capture.idle)
        left = [(ids[name], name) for name in capture.idle if name not in self._idle]
        admitted = ids.written_ids(capture.admitted)
        tally.note_step(step, admitted=admitted, left=left, scheduled=self._idle - idle)
        self._idle = idle

    def present_line(self, present_requests: PresentRequests, wall_anchor_us: int) -> Events:
        """Begin the totals with the requests present when recording began."""
        at_us = self._us(present_requests.queues.at_ns)
        entries = [
            present_entry(seen, present_requests.salt, self._anchor_ns, wall_anchor_us)
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
