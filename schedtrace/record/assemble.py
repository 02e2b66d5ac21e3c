"""Assembly of trace lines from raw captures, on the writer's thread; it also counts a step's tokens."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from schedtrace.model.printable import capped
from schedtrace.model.trace import (
    Arrival,
    ChunkCap,
    Events,
    Exit,
    Finish,
    Output,
    Phase,
    Preemption,
    Present,
    RowChanges,
    Step,
)
from schedtrace.model.trace_facts import DummyBatch, HeadRefusal, RankSync
from schedtrace.record.allocation import refusal_line
from schedtrace.record.capture import (
    NOBODY,
    Capture,
    Dropped,
    DummyPass,
    Result,
    Rows,
    SideEvents,
    State,
    Synced,
    reports_invalid_drafts,
)
from schedtrace.record.clocks import RecordingClock
from schedtrace.record.deltas import Deltas, LatestRows
from schedtrace.record.facts import FIELDS, Prefixes
from schedtrace.record.live.queue_copy import PresentRequests, present_entry
from schedtrace.record.marks.exits import Noted, to_lines
from schedtrace.record.metrics.tally import Tally
from schedtrace.record.otel.histories import Histories
from schedtrace.record.request_lives import RequestLives
from schedtrace.record.written_ids import WrittenIds

_TRIAL = re.compile(r"t(\d{1,9})-")
_LARGEST = 10**18 - 1
"""Largest number in a line, because a client may choose any priority and the reader refuses larger numbers.
"""


class LatestExits:
    """Exits and caps of the latest step; the lists are reused while the events do not change.

    Args:
        ids: Written form of request ids.
        long_prefill_threshold: ``long_prefill_token_threshold`` as configured.
    """

    def __init__(self, ids: WrittenIds, long_prefill_threshold: int) -> None:
        self._ids, self.long_prefill_threshold = ids, long_prefill_threshold
        self._events: list[Noted] = []
        self._remaining = -1
        """Remaining budget to write for exits whose code has no variable with the budget."""
        self._exits: list[Exit] = []
        self._caps: list[ChunkCap] = []
        self.exits: list[Exit] = []
        """Exits of the latest step, including inferred ones."""

    def exits_and_caps(self, capture: Capture, remaining: int) -> tuple[list[Exit], list[ChunkCap]]:
        """Return the exits and caps of the next step.

        Args:
            capture: The step.
            remaining: Token budget left at the end of the step.
        """
        if capture.events is not None or self._remaining != remaining:
            self._events = self._events if capture.events is None else capture.events
            self._exits, self._caps = to_lines(self._events, remaining, self.long_prefill_threshold)
            also = itertools.chain.from_iterable(exit_.also for exit_ in self._exits)
            self._ids.replace_ids(self._exits, also, self._caps)
            self._remaining = remaining
        self.exits = self._exits
        if capture.inferred:
            self._ids.replace_ids(capture.inferred)
            self.exits = self._exits + capture.inferred
        return self.exits, self._caps


class Assembler:
    """Builder of the lines of one engine's trace, in the order of its steps.

    Args:
        clock: Clock of the trace.
        trial_ids: Whether request ids contain the trial.
        hash_ids: Whether request ids are written as hashes.
        full_lines: Whether every step is captured and written in full.
        long_prefill_threshold: ``long_prefill_token_threshold`` as configured.
        prefixes: Hashes of prompts' beginnings.
        drafts: Whether a request may have speculative tokens.
    """

    def __init__(
        self,
        clock: RecordingClock,
        *,
        trial_ids: bool,
        hash_ids: bool,
        full_lines: bool = False,
        long_prefill_threshold: int = 0,
        prefixes: Prefixes,
        drafts: bool,
    ) -> None:
        self._clock = clock
        self._us = clock.since_anchor
        self._trial_ids = trial_ids
        self._full_lines = full_lines
        self._prefixes = prefixes
        self._ids = WrittenIds(hash_ids=hash_ids)
        self._lives = RequestLives(drafts=drafts, invalid=reports_invalid_drafts())
        self._rows = LatestRows()
        self._only_decodes = False
        """Whether all requests of the latest step only decoded: none had tokens to prefill or recompute."""
        self.latest_exits = LatestExits(self._ids, long_prefill_threshold)
        self._state: State = ()
        self._state_fields: dict[str, Any] = {}
        """Facts of the latest step other than its decisions, as fields of a line."""
        self._deltas = Deltas()
        self._after_dropped = False
        self.trial: int | None = None
        """Trial of the latest arrival."""
        self.next_step = 0
        """Number of the step after the latest step."""
        self.latest_us = 0
        """End of the latest call, or time of the latest other event, in microseconds."""
        self.tally: Tally | None = None
        """Totals to which each line is added; None if metrics are off."""
        self.histories: Histories | None = None
        """Histories of requests, made from the lines; None if spans are off."""

    def step_line(self, capture: Capture, result: Result | None) -> Step | dict[str, Any]:
        """Return the line of one ``schedule()`` call, in full or as a delta, with its output if it is back.

        A line is a delta unless a full one is due or ``RowChanges`` cannot express the changes.
        """
        start_us = self._us(capture.start_ns)
        has_events = capture.side_events is not NOBODY or capture.preempted or capture.happened is not None
        event_fields = self._event_fields(capture) if has_events else {}
        changes: RowChanges | None = None
        if capture.rows is None:
            self._rows.steady_steps += 1
        else:
            changes = self._row_changes(capture, capture.rows, start_us)
        capture.ids = self._rows.ids
        if capture.state is not self._state:
            self._state = capture.state
            self._state_fields = dict(zip(FIELDS, capture.state, strict=True))
        self.next_step, self.latest_us = capture.step + 1, self._us(capture.end_ns)
        waits = self._lives.waiting  # vLLM may count other requests
        waiting_tokens = self._lives.waiting_tokens if len(waits) == capture.num_waiting_after else None
        number = len(capture.ids)
        step = Step(
            step=capture.step,
            trial=self.trial,
            start_us=start_us,
            schedule_us=(capture.end_ns - capture.start_ns) // 1000,
            token_budget=capture.token_budget,
            remaining_budget=capture.token_budget,
            total_requests=number,
            max_num_running_reqs=capture.max_num_running_reqs,
            num_running_before=capture.num_running_before,
            num_running_after=capture.num_running_after,
            num_waiting_before=capture.num_waiting_before,
            num_waiting_after=capture.num_waiting_after,
            num_not_ready_after=capture.num_not_ready_after,
            waiting_tokens_after=waiting_tokens,
            kv_blocks_total=capture.kv_blocks_total,
            kv_blocks_free_before=capture.kv_blocks_free_before,
            kv_blocks_free_after=capture.kv_blocks_free_after,
            **self._state_fields,
            **event_fields,
        )
        if capture.rows is None and self._only_decodes:
            step.num_continued = step.decode_tokens = number
            step.remaining_budget -= number
        else:
            self._count(step, capture.rows)
        step.exits, step.caps = self.latest_exits.exits_and_caps(capture, step.remaining_budget)
        if result is not None:  # already back
            output = self._output(capture, result)
            step.output_us, step.update_us = output.output_us, output.update_us
            step.output_tokens = output.output_tokens
            step.execute_after_us, step.execute_us = output.execute_after_us, output.execute_us
        refers_back = self._deltas.latest is not None and not capture.full
        if refers_back and (changes is not None or capture.rows is None):
            line: Step | dict[str, Any] = self._deltas.delta(step, changes)
        else:
            line = self._full_line(step, changes)
        if event_fields:
            self.write_ids(step.arrived, step.finished, step.preempted)
        if self.tally is not None:
            self._add_to_totals(self.tally, step, capture.rows)
        return line

    def _add_to_totals(self, tally: Tally, step: Step, rows: Rows | None) -> None:
        """Add a step to the totals, and to the histories if there are any."""
        if rows is None:
            tally.note_step(step, admitted=())
        else:
            ids, left = self._ids, self._rows.left
            tally.note_step(
                step,
                admitted=[ids[name] for name in self._rows.phases],
                left=[(ids[name], name) for name, _ in left if name in self._lives.by_id],
                scheduled=rows.scheduled,
            )
        if self.histories is not None:
            self.histories.add_step(step, tally.causes, rows, self._rows)

    def count_with(self, tally: Tally | None) -> None:
        """Add all further lines to these totals, which start with the requests present now."""
        self.tally = tally
        if tally is not None:
            there = list(self._present_now())
            tally.begin_with(self.latest_us, there, scheduled=frozenset(self._rows.ids))

    def follow_with(self, histories: Histories | None) -> None:
        """Add all further lines to these histories, which start with requests that arrive from now on."""
        self.histories = histories
        if histories is not None:
            histories.begin_recording(self._clock.wall_us, self._ids.__getitem__)

    def _row_changes(self, capture: Capture, rows: Rows, start_us: int) -> RowChanges | None:
        """Advance to the requests of the next step; return the changes if ``RowChanges`` can express them.

        The cache hits of new requests are recorded, too.
        """
        if self._after_dropped:
            self._after_dropped = False
            for request_id in rows.ids:  # the dropped steps may have admitted them
                self._lives.life_by_id(request_id).unseen = True
                self._lives.note_running(request_id)
            if self.tally is not None:
                self.tally.resume_with(self._ids.written_ids(rows.ids))
        phases: dict[str, Phase] = dict.fromkeys(rows.resumed, "resumed")
        for request_id, computed in rows.new:
            # The V2 model runner gets resumed requests as new ones: tell by whether it ran before.
            phases[request_id] = "new" if self._starts(request_id, computed, start_us) else "resumed"
        for request_id in rows.resumed:
            self._lives.note_running(request_id)
        changes = self._rows.row_changes(rows, phases)
        self._lives.keep_tokens(self._rows.left, rows.scheduled, capture.start_ns)
        if changes is not None:
            self._ids.replace_ids(changes.added)
        return changes

    def _event_fields(self, capture: Capture) -> dict[str, Any]:
        """Return events before and in a call, and facts other than decisions, as fields of a line."""
        fields = {} if capture.side_events is NOBODY else self.side_fields(capture.side_events)
        if capture.preempted:
            self._preempted(capture.preempted)
            fields["preempted"] = [preemption for preemption, _ in capture.preempted]
        if (happened := capture.happened) is not None:
            for aside in happened.set_aside:
                self._lives.note_waiting(aside.request_id, aside.wanted_tokens)
            refusals: list[HeadRefusal] = list(map(refusal_line, happened.refusals))
            for refusal in refusals:
                refusal.holders = self._ids.written_ids(refusal.holders)
                refusal.finished_holders = self._ids.written_ids(refusal.finished_holders)
            facts: dict[str, Any] = {
                "admitted": happened.admitted,
                "refusals": refusals,
                "kv_loads": happened.kv_loads,
                "grammars": happened.grammars,
                "set_aside": happened.set_aside,
            }
            self._ids.replace_ids(*facts.values())
            fields |= facts
        return fields

    def _full_line(self, step: Step, changes: RowChanges | None) -> Step:
        """Return the line of a step with all of its requests, to which later deltas refer."""
        if self._deltas.latest is not None and not self._full_lines:
            step.changes = changes
        self._deltas.set_base(step)
        step.requests = self._rows.requests()
        self._ids.replace_ids(step.requests)
        return step

    def dropped(self, dropped: Dropped) -> Events:
        """Return the line that replaces dropped steps; the next step is written in full."""
        self._deltas = Deltas()
        self._after_dropped = True
        self.next_step, self.latest_us = dropped.last_step + 1, self._us(dropped.end_ns)
        side_events = dropped.side_events
        self._arrive(side_events.arrived)
        for request_id, computed, start_ns in dropped.started:
            self._starts(request_id, computed, self._us(start_ns))
        self._preempted(dropped.preempted)
        self._lives.lose_sight()
        self._leave(side_events.finished)
        self.write_ids(side_events.arrived, side_events.finished)
        line = Events(
            at_us=self._us(dropped.end_ns),
            trial=self.trial,
            arrived=list(side_events.arrived),
            finished=list(side_events.finished),
            **self.pass_fields(side_events),
            dropped_steps=dropped.steps,
            dropped_arrivals=dropped.missing_arrivals,
            dropped_finishes=dropped.missing_finishes,
        )
        if self.tally is not None:
            lost = [self._ids[preemption.request_id] for preemption, _ in dropped.preempted]
            self.tally.note_events(line, preempted=lost)
        if self.histories is not None:
            self.histories.add_events(line)
        return line

    def present_line(self, present_requests: PresentRequests) -> Events:
        """Return the line that lists the requests present when recording began."""
        entries = []
        for seen in present_requests.queues.ordered_requests():
            entry = present_entry(seen, present_requests.salt, self._clock)
            self._prefixes.keep_prompt(seen.request)
            entry.prefix_hashes = self._prefixes.hashes(entry.request_id)
            wanted = entry.prompt_tokens + entry.output_tokens
            self._lives.was_there(entry, wanted_tokens=wanted, in_flight=seen.in_flight)
            self._limit(entry)
            entries.append(msgspec.structs.replace(entry))
        raw_ids = [entry.request_id for entry in entries]
        self._ids.replace_ids(entries)
        at_us = self._us(present_requests.queues.at_ns)
        if self.tally is not None:
            self.tally.begin_with(at_us, zip(raw_ids, entries, strict=True))
        return Events(at_us=at_us, trial=self.trial, present=entries)

    def begin_anew(self) -> tuple[int, int, list[Present]]:
        """Have the next step written in full, because a new file or new totals begin.

        Returns:
            The lowest number that the next step can have, the time up to which everything is written, and
            the requests at that time.
        """
        self._deltas = Deltas()
        present = [entry for _, entry in self._present_now()]
        return self.next_step, self.latest_us, present

    def _present_now(self) -> Iterator[tuple[str, Present]]:
        """Yield vLLM's id and the trace's entry for each request present."""
        for request_id, entry in self._lives.present_requests(self._rows.next()):
            entry.request_id = self._ids[request_id]
            yield request_id, entry

    def output(self, capture: Capture, result: Result) -> Output | dict[str, Any]:
        """Return the line that completes a step whose own line was written before its output came back."""
        line = self._output(capture, result)
        if self.tally is not None:
            self.tally.note_output(line)
        if self.histories is not None:
            self.histories.add_output(line)
        return line

    def _output(self, capture: Capture, result: Result) -> Output:
        """Return the output of a step."""
        back_us = self._us(result.back_ns)
        output = Output(
            step=capture.step,
            output_us=back_us,
            update_us=(result.done_ns - result.back_ns) // 1000,
            output_tokens=self._lives.got_tokens(result, capture.ids, back_us),
        )
        if capture.rows is not None and capture.rows.drafts:
            self._lives.got_drafts(result, capture.rows.drafts)
        if result.execution is not None:
            _, began_ns, ended_ns = result.execution
            output.execute_after_us = (began_ns - capture.start_ns) // 1000
            output.execute_us = (ended_ns - began_ns) // 1000
        return output

    def events_line(self, side_events: SideEvents, at_us: int) -> Events:
        """Return the line of events that do not belong to a step."""
        fields = self.side_fields(side_events)
        self.latest_us = at_us
        line = Events(at_us=at_us, trial=self.trial, **fields)
        self.write_ids(line.arrived, line.finished)
        if self.tally is not None:
            self.tally.note_events(line)
        if self.histories is not None:
            self.histories.add_events(line)
        return line

    def side_fields(self, side_events: SideEvents) -> dict[str, Any]:
        """Return events between two calls as fields of a line; note the requests that arrived and left."""
        self._arrive(side_events.arrived)
        self._leave(side_events.finished)
        return {
            "arrived": list(side_events.arrived),
            "finished": list(side_events.finished),
            **self.pass_fields(side_events),
        }

    def _arrive(self, arrived: Sequence[Arrival]) -> None:
        for arrival in arrived:
            arrival.prefix_hashes = self._prefixes.hashes(arrival.request_id)
            self._lives.note_arrival(arrival)
            if self._trial_ids and (match := _TRIAL.match(str(arrival.request_id))):
                self.trial = int(match[1])

    def _leave(self, finished: Sequence[Finish]) -> None:
        for finish in finished:
            self._lives.note_finish(finish)

    def _preempted(self, preempted: Sequence[tuple[Preemption, int]]) -> None:
        for preemption, num_tokens in preempted:
            life = self._lives.life_by_id(preemption.request_id)
            life.lost_tokens = max(life.lost_tokens, preemption.lost_tokens)
            life.computed_tokens = 0
            if preemption.num_preemptions is not None:
                life.num_preemptions = preemption.num_preemptions
            elif life.num_preemptions is not None:
                life.num_preemptions += 1
            self._lives.note_waiting(preemption.request_id, num_tokens)

    def pass_fields(self, side_events: SideEvents) -> dict[str, Any]:
        """Return passes with other ranks, calls to the engine, and sent KV blocks, as fields of a line."""
        if not any(side_events[2:]):
            return {}
        self._ids.replace_ids(side_events.kv_sends)
        return {
            "kv_sends": list(side_events.kv_sends),
            "controls": list(side_events.controls),
            "dummy_batches": len(side_events.dummies),
            "dummy_us": sum(dummy.ended_ns - dummy.began_ns for dummy in side_events.dummies) // 1000,
            "dummies": [DummyBatch(**self._pass(dummy)) for dummy in side_events.dummies],
            "syncs": [RankSync(**self._pass(sync), wave_ended=not sync.go_on) for sync in side_events.synced],
        }

    def _pass(self, beside: DummyPass | Synced) -> dict[str, Any]:
        return {
            "began_us": self._us(beside.began_ns),
            "took_us": (beside.ended_ns - beside.began_ns) // 1000,
            "wave": beside.wave,
            "step_counter": beside.step_counter,
        }

    def write_ids(
        self, arrived: Sequence[Arrival], finished: Sequence[Finish], preempted: Sequence[Preemption] = ()
    ) -> None:
        """Replace client-chosen ids with their written form; forget the ids of finished requests."""
        for preemption in preempted:
            if preemption.for_request_id is not None:
                preemption.for_request_id = self._ids[preemption.for_request_id]
        gone = [finish.request_id for finish in finished]
        self._ids.replace_ids(arrived, finished, preempted)
        for arrival in arrived:
            self._limit(arrival)
            for name in ("remote_request_id", "transfer_id"):
                if (remote_id := getattr(arrival, name)) is not None:
                    setattr(arrival, name, self._ids[remote_id])
                    self._ids.drop_id(remote_id)
        for request_id in gone:
            self._ids.drop_id(request_id)

    @staticmethod
    def _limit(asked: Arrival | Present) -> None:
        """Limit the adapter's name and the numbers of a request, because a client may choose any values."""
        asked.lora = None if asked.lora is None else capped(asked.lora)
        asked.priority = max(-_LARGEST, min(asked.priority, _LARGEST))
        for name in ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
            if (number := getattr(asked, name)) is not None:
                setattr(asked, name, min(number, _LARGEST))

    def _starts(self, request_id: str, computed: int, start_us: int) -> bool:
        """Record a scheduled request that is new to the workers; return whether it never ran before."""
        life = self._lives.life_by_id(request_id)
        self._lives.note_running(request_id)
        if life.has_run:
            return False
        life.has_run, life.scheduled_us, life.cached = True, start_us, computed
        return True

    def _count(self, step: Step, rows: Rows | None) -> None:
        """Count a step's requests by phase, and its prefill, decode, recomputed, cached and draft tokens."""
        phases = {} if rows is None else self._rows.phases
        computed, scheduled = self._rows.token_counts()
        decoded = 0
        self._only_decodes = True
        for request_id, start, tokens in zip(self._rows.ids, computed, scheduled, strict=True):
            life = self._lives.by_id.get(request_id)
            prompt, lost = (0, 0) if life is None else (life.prompt_tokens, life.lost_tokens)
            if start >= prompt and start >= lost:  # nearly every row: an ordinary decode
                decoded += tokens
                continue
            end = start + tokens
            self._only_decodes = False
            step.prefill_tokens += max(0, min(end, prompt) - start)
            step.recomputed_tokens += max(0, min(end, lost) - start)
            decoded += max(0, end - max(prompt, lost))
        if phases:
            step.num_new = sum(phase == "new" for phase in phases.values())
            step.num_resumed = len(phases) - step.num_new
            step.cached_tokens = sum(
                start for name, start in zip(self._rows.ids, computed, strict=True) if name in phases
            )
        step.decode_tokens = decoded
        step.remaining_budget -= sum(scheduled)
        step.num_continued = step.total_requests - step.num_new - step.num_resumed
        step.draft_tokens = 0 if rows is None else sum(rows.drafts.values())
