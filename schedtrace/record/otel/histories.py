"""Histories of requests, updated on the writer's thread, with the same states as in ``analyze``.

A request's history is a list of pieces, each with its beginning, as in ``timeline/pieces.py``, which explains
them with an example. Only certain steps are stored: the step that admits a request, the step that completes
its prompt, and steps that pass over the request. Causes of waiting are not stored by request but once for
each step that changes them; only the history of a request that is exported looks them up. A steady step costs
a few comparisons.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Arrival, Events, Exit, Finish, Output, Step
from schedtrace.model.trace_facts import HeadRefusal
from schedtrace.record.capture import Rows
from schedtrace.record.deltas import LatestRows
from schedtrace.record.metrics.tally import NEXT_STEP, StepCauses

MOST_CONTEXTS = 10_000
"""Maximum number of trace contexts that are kept for requests whose arrival is not assembled yet."""
MOST_REFUSALS = 4096
"""Maximum number of latest steps with changed causes that are kept."""
MOST_NAMES = 200_000
"""Maximum number of requests that these steps name, all together."""
MOST_OUTPUTS = 4096
"""Maximum number of latest steps whose output times are kept: a stall may begin when an output is back."""

ARRIVES, WAITS, COMPUTES, DECODES = range(4)
"""Order of pieces that begin in the same step."""


class Piece(NamedTuple):
    """Beginning of a state in a request's history."""

    step: int
    """Step that begins the piece; -1 for the arrival."""
    rank: int
    since_us: int
    state: str
    cause: str | None = None
    refusal: "StepRefusals | None" = None
    """Step whose exits name the cause."""


class RequestState(NamedTuple):
    """Period of a request in one state because of one cause, in microseconds of the trace's clock."""

    begin_us: int
    end_us: int
    name: str
    cause: str | None
    step: int
    """Step that began the state; -1 if no step did."""
    refusal: "StepRefusals | None"


class StepRefusals(NamedTuple):
    """Exits of a step whose causes differ from those of the step before it."""

    step: int
    start_us: int
    causes: StepCauses
    exits: Sequence[Exit]
    token_budget: int
    max_num_running_reqs: int
    running: int
    """Number of running requests after the step."""
    head: HeadRefusal | None
    """Latest refusal of KV blocks at the head of the queue, with the holders of the blocks."""


@dataclass(eq=False, slots=True)
class _Admission:
    """Admission of a request, until the request is preempted or leaves."""

    computes: str
    """``prefill`` or ``recompute``."""
    missing_tokens: int
    """Number of tokens to compute before the next token comes back."""
    reached_step: int | None = None
    """Step that computed the last of the missing tokens."""
    output_us: int | None = None
    """Time at which the output of ``reached_step`` came back."""
    decodes: bool = False
    """Whether a later step scheduled or preempted the request."""


class _Run(NamedTuple):
    """First of several consecutive steps that schedule a request."""

    admission: _Admission
    step: int
    start_us: int
    decodes: bool
    after_stall: bool = False


@dataclass(eq=False, slots=True)
class _Absence:
    """Steps in which a request got no tokens: in the queue, or running."""

    state: str
    """``waiting``, ``preempted``, ``set_aside`` or ``stalled``."""
    step: int
    start_us: int
    end_step: int | None = None
    """Step that scheduled the request again; None if the request left."""
    end_us: int | None = None
    back_us: int | None = None
    """Time at which the output of the step before came back."""


@dataclass(eq=False, slots=True)
class History:
    """History of one request."""

    arrival: Arrival
    headers: Mapping[str, str]
    """Headers of the trace context that the front end sent with the request."""
    marks: list[Piece | _Absence | _Run] = field(default_factory=list)
    raw_id: str = ""
    """Id in vLLM, set once a step has admitted the request."""
    absence: _Absence | None = None
    admission: _Admission | None = None
    lost_tokens: int = 0
    finish: Finish | None = None
    asked_again: bool = False
    """Whether ``take_ended`` has already seen the request without its last output."""


class RefusalLog:
    """Causes of the latest steps, and the exits behind them; steps without a change are left out."""

    def __init__(self) -> None:
        self._steps: list[StepRefusals] = []
        self._names = 0
        self._head: HeadRefusal | None = None

    def add_step(self, step: Step, causes: StepCauses) -> None:
        """Add a step if its causes differ from those of the step before it."""
        if step.refusals:
            self._head = step.refusals[-1]
        if self._steps and (causes is self._steps[-1].causes or causes == self._steps[-1].causes):
            return
        self._steps.append(
            StepRefusals(
                *(step.step, step.start_us, causes, step.exits, step.token_budget),
                *(step.max_num_running_reqs, step.num_running_after, self._head),
            )
        )
        self._names += len(causes.named) + len(causes.skipped)
        if len(self._steps) > MOST_REFUSALS or self._names > MOST_NAMES:
            del self._steps[: len(self._steps) // 2]
            self._names = sum(len(entry.causes.named) + len(entry.causes.skipped) for entry in self._steps)

    def within(self, first: int, end: int | None) -> Iterator[tuple[int, StepRefusals | None]]:
        """Yield the first step of a range, and each step in it whose causes differ from the step before.

        Args:
            first: First step.
            end: Step after the last; None for the end of the recording.

        Yields:
            The step, and the entry with its causes; None for an entry that is no longer kept.
        """
        place = bisect_right(self._steps, first, key=lambda entry: entry.step) - 1
        if end is not None and end <= first:
            return
        if place < 0:
            yield first, None
        for entry in self._steps[max(place, 0) :]:
            if end is not None and entry.step >= end:
                return
            yield max(entry.step, first), entry


class Histories:
    """Histories of the requests that arrived since this recording began and have not left."""

    def __init__(self) -> None:
        self.contexts: deque[tuple[str, Mapping[str, str]]] = deque(maxlen=MOST_CONTEXTS)
        """Trace contexts by vLLM's ids; the engine's thread adds them, and the writer's thread takes them."""
        self.wall_anchor_us = 0
        self._written_id: Callable[[str], str] = str
        self.lost = 0
        """Number of requests whose history is incomplete: steps were dropped, a recording ended, or the
        request is a streaming session."""
        self._headers: dict[str, Mapping[str, str]] = {}
        self._present: dict[str, History] = {}
        self._ended: list[History] = []
        self._begin()

    def begin_recording(self, wall_anchor_us: int, written_id: Callable[[str], str]) -> None:
        """Forget the requests of the previous recording.

        Args:
            wall_anchor_us: Unix time in microseconds at which the trace's clock read 0.
            written_id: Function that returns the written form of vLLM's id.
        """
        self.wall_anchor_us, self._written_id = wall_anchor_us, written_id
        self._begin()

    def _begin(self) -> None:
        self.lost += len(self._present) + len(self._ended)
        self._present, self._ended = {}, []
        self._new: list[History] = []
        """Requests that no step has seen yet."""
        self._computing: dict[str, History] = {}
        """Requests that have not reached their next token, by vLLM's ids."""
        self._reached: dict[str, History] = {}
        """Requests that have reached their next token and that no step has scheduled since."""
        self._unscheduled: dict[str, History] = {}
        """Running requests that got no tokens in the latest step."""
        self._awaited: dict[int, list[_Admission]] = {}
        """Admissions by the step whose output contains their next token."""
        self._outputs: dict[int, int] = {}
        self.refusals = RefusalLog()

    def add_step(
        self,
        step: Step,
        causes: StepCauses,
        rows: Rows | None,
        latest: LatestRows,
    ) -> None:
        """Add a step.

        Args:
            step: Line of the step, without its requests.
            causes: Causes of the step's refusals.
            rows: The step's requests; None if it is steady.
            latest: Rows of this step, even if it is steady.
        """
        self._come_and_go(step.arrived, step.finished)
        self.refusals.add_step(step, causes)
        new, self._new = self._new, []
        for history in new:
            self._begin_absence(history, "waiting", step)
        self._put_back(step)
        if rows is not None:
            self._change_places(step, rows, latest)
        self._advance(step, rows)
        if step.output_us is not None:
            self._output(step.step, step.output_us)

    def add_output(self, output: Output) -> None:
        """Add the output of a step whose line was written without it."""
        if output.output_us is not None:
            self._output(output.step, output.output_us)

    def add_events(self, events: Events) -> None:
        """Add events between two steps; dropped steps end all histories."""
        if events.dropped_steps:
            self._begin()
            self._headers.clear()
        else:
            self._come_and_go(events.arrived, events.finished)

    def take_ended(self, *, last: bool) -> list[History]:
        """Return the histories that have ended; a history that lacks an output is returned by the next call.

        Args:
            last: Whether no line will follow.
        """
        ended, self._ended = self._ended, []
        ready = []
        for history in ended:
            admission = history.admission
            # The step that completed the request's prompt may have no output yet.
            is_complete = (
                admission is None or admission.reached_step is None or admission.output_us is not None
            )
            if last or history.asked_again or is_complete:
                ready.append(history)
            else:
                history.asked_again = True
                self._ended.append(history)
        return ready

    def _come_and_go(self, arrived: Sequence[Arrival], finished: Sequence[Finish]) -> None:
        """Add arrivals and departures; an id may leave and arrive again."""
        while self.contexts:
            raw_id, headers = self.contexts.popleft()
            if len(self._headers) < MOST_CONTEXTS:
                self._headers[self._written_id(raw_id)] = headers
        late = [finish for finish in finished if not self._finish(finish)]
        for arrival in arrived:
            headers = self._headers.pop(arrival.request_id, {})
            if arrival.streaming_update:
                self.lost += self._present.pop(arrival.request_id, None) is not None
                continue
            history = self._present[arrival.request_id] = History(arrival, headers)
            arrived_us, queued_us = arrival.arrived_us, arrival.queued_us
            if arrived_us is not None and arrived_us < queued_us:
                history.marks.append(Piece(-1, ARRIVES, arrived_us, "front_end"))
            history.marks.append(Piece(-1, WAITS, queued_us, "waiting", NEXT_STEP))
            self._new.append(history)
        for finish in late:
            self._finish(finish)

    def _finish(self, finish: Finish) -> bool:
        """End the history of a request; return whether the request has one."""
        history = self._present.pop(finish.request_id, None)
        if history is None:
            return False
        history.finish = finish
        self._drop(history)
        self._ended.append(history)
        return True

    def _drop(self, history: History) -> None:
        for requests in (self._computing, self._reached, self._unscheduled):
            requests.pop(history.raw_id, None)

    def _put_back(self, step: Step) -> None:
        """Put requests that a step preempted or set aside back into the queue."""
        lost = [(preemption.request_id, "preempted", preemption.lost_tokens) for preemption in step.preempted]
        lost += [(aside.request_id, "set_aside", 0) for aside in step.set_aside]
        for request_id, state, tokens in lost:
            history = self._present.get(request_id)
            if history is not None and history.admission is not None:
                history.lost_tokens = max(history.lost_tokens, tokens)
                self._end_absence(history, step)
                self._drop(history)
                history.admission.decodes = True
                history.admission = None
                self._begin_absence(history, state, step)

    def _change_places(self, step: Step, rows: Rows, latest: LatestRows) -> None:
        """Admit requests, and record which requests stop or resume getting tokens."""
        if latest.phases:
            computed = dict(zip(latest.ids, latest.token_counts()[0], strict=True))
            for raw_id in latest.phases:
                if (history := self._present.get(self._written_id(raw_id))) is None:
                    continue
                self._end_absence(history, step)
                history.raw_id = raw_id
                lost, prompt = history.lost_tokens, history.arrival.prompt_tokens
                # The last token of an output had been sampled but not computed before the preemption.
                uncomputed = computed[raw_id] < lost and lost >= prompt
                missing = max(prompt, lost) + uncomputed - computed[raw_id]
                phase, decodes = "recompute" if lost else "prefill", missing <= 0
                history.admission = _Admission(phase, missing, decodes=decodes)
                history.marks.append(_Run(history.admission, step.step, step.start_us, decodes=decodes))
                if not decodes:
                    self._computing[raw_id] = history
        for raw_id, _ in latest.left:
            history = self._present.get(self._written_id(raw_id))
            if history is not None and history.absence is None and history.admission is not None:
                self._begin_absence(history, "stalled", step)
                self._unscheduled[raw_id] = history
        for raw_id in [name for name in self._unscheduled if name in rows.scheduled]:
            history = self._unscheduled.pop(raw_id)
            self._end_absence(history, step)
            if (admission := history.admission) is not None:
                decodes = raw_id not in self._computing
                admission.decodes |= decodes
                history.marks.append(_Run(admission, step.step, step.start_us, decodes, after_stall=True))

    def _begin_absence(self, history: History, state: str, step: Step) -> None:
        history.absence = _Absence(state, step.step, step.start_us)
        history.absence.back_us = self._outputs.get(step.step - 1)
        history.marks.append(history.absence)

    def _end_absence(self, history: History, step: Step) -> None:
        absence, history.absence = history.absence, None
        if absence is not None:
            absence.end_step, absence.end_us = step.step, step.start_us
            if absence.back_us is None:
                absence.back_us = self._outputs.get(absence.step - 1)

    def _advance(self, step: Step, rows: Rows | None) -> None:
        """Record the requests that compute, or have computed, their next token in this step."""
        for raw_id, history in list(self._reached.items()):
            if raw_id in self._unscheduled or (rows is not None and raw_id not in rows.scheduled):
                continue
            del self._reached[raw_id]
            if (admission := history.admission) is not None and not admission.decodes:
                admission.decodes = True
                history.marks.append(_Run(admission, step.step, step.start_us, decodes=True))
        for raw_id, history in list(self._computing.items()):
            if (admission := history.admission) is None or raw_id in self._unscheduled:
                continue
            admission.missing_tokens -= 1 if rows is None else rows.scheduled.get(raw_id, 0)
            if admission.missing_tokens <= 0:
                del self._computing[raw_id]
                admission.reached_step = step.step
                self._awaited.setdefault(step.step, []).append(admission)
                self._reached[raw_id] = history

    def _output(self, step: int, output_us: int) -> None:
        self._outputs[step] = output_us
        if len(self._outputs) > MOST_OUTPUTS:
            del self._outputs[next(iter(self._outputs))]
        for admission in self._awaited.pop(step, ()):
            admission.output_us = output_us

    def states(self, history: History) -> list[RequestState]:
        """Return the states of a request that has left, in order, without gaps or overlaps."""
        finish = history.finish
        end_us = 0 if finish is None else finish.finished_us
        pieces = sorted(self._pieces(history, end_us), key=lambda piece: piece[:2])
        states: list[RequestState] = []
        begin_us = end_us
        for piece in reversed(pieces):
            # With steps in flight the output of one may come back when a later one has already decided.
            since_us = min(piece.since_us, begin_us)
            if since_us < begin_us:
                state = RequestState(since_us, begin_us, piece.state, piece.cause, piece.step, piece.refusal)
                if states and states[-1][2:4] == state[2:4]:
                    state = state._replace(end_us=states.pop().end_us)
                states.append(state)
            begin_us = since_us
        return states[::-1]

    def _pieces(self, history: History, end_us: int) -> Iterator[Piece]:
        admissions: dict[int, _Admission] = {}
        for mark in history.marks:
            if isinstance(mark, Piece):
                yield mark
            elif isinstance(mark, _Run):
                admission = admissions[id(mark.admission)] = mark.admission
                if mark.decodes:
                    since_us = mark.start_us if admission.output_us is None else admission.output_us
                    since_us = max(since_us, mark.start_us) if mark.after_stall else since_us
                    yield Piece(mark.step, DECODES, since_us, "decode")
                else:
                    yield Piece(mark.step, COMPUTES, mark.start_us, admission.computes)
            elif mark.state == "stalled":
                yield from self._stalls(mark, history.arrival.request_id, end_us)
            else:
                for step, entry in self.refusals.within(mark.step, mark.end_step):
                    since_us = mark.start_us if entry is None or step == mark.step else entry.start_us
                    causes = None if entry is None else entry.causes
                    cause = causes and causes.skipped.get(history.arrival.request_id, causes.queue_cause)
                    yield Piece(step, WAITS, since_us, mark.state, cause, entry)
        for admission in admissions.values():
            if admission.reached_step is not None and admission.output_us is not None and admission.decodes:
                yield Piece(admission.reached_step, DECODES, admission.output_us, "decode")

    def _stalls(self, absence: _Absence, request_id: str, end_us: int) -> Iterator[Piece]:
        """Yield the pieces in which a running request has no output in flight and gets no tokens."""
        back_us = absence.back_us
        if back_us is None:
            back_us = self._outputs.get(absence.step - 1, 0)
        runs = list(self.refusals.within(absence.step, absence.end_step))
        over_us = end_us if absence.end_us is None else min(absence.end_us, end_us)
        for place, (step, entry) in enumerate(runs):
            following = runs[place + 1][1] if place + 1 < len(runs) else None
            until_us = over_us if following is None else min(following.start_us, over_us)
            begins_us = absence.start_us if entry is None or step == absence.step else entry.start_us
            since_us = max(begins_us, back_us)
            cause = entry and entry.causes.named.get(request_id, entry.causes.running)
            if cause != Cause.OUTPUT_IN_FLIGHT and since_us < until_us:
                yield Piece(step, WAITS, since_us, "stalled", cause, entry)
