"""Turns raw captures into trace lines, in the writer's thread and away from the scheduler's path."""

import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

from schedtrace.model.trace import (
    Arrival,
    ChunkCap,
    Exit,
    Finish,
    Output,
    Phase,
    Preemption,
    ScheduledRequest,
    Step,
)
from schedtrace.record.capture import Capture, Result
from schedtrace.record.exit_lines import to_lines

_TRIAL = re.compile(r"t(\d+)-")


class _Life:
    """What has to be remembered of a request while it lives."""

    __slots__ = (
        "arrival",
        "cached",
        "first_token_us",
        "last_token_us",
        "lost_tokens",
        "prompt_tokens",
        "scheduled_us",
    )

    def __init__(self, arrival: Arrival | None) -> None:
        self.arrival = arrival
        self.prompt_tokens = 0 if arrival is None else arrival.prompt_tokens
        self.scheduled_us: int | None = None
        self.first_token_us: int | None = None
        self.last_token_us: int | None = None
        self.cached = 0
        self.lost_tokens = 0


class Assembler:
    """Builds the lines of one engine's trace, in the order of its steps.

    Args:
        anchor_ns: Monotonic clock at which the trace's time is 0.
        trial_ids: Whether request ids tell the trial.
        hash_ids: Whether request ids are written as hashes.
        long_prefill_threshold: ``long_prefill_token_threshold`` as configured.
    """

    def __init__(
        self, anchor_ns: int, *, trial_ids: bool, hash_ids: bool, long_prefill_threshold: int = 0
    ) -> None:
        self._anchor_ns = anchor_ns
        self._long_prefill_threshold = long_prefill_threshold
        self.trial: int | None = None
        self._trial_ids = trial_ids
        self._hash_ids = hash_ids
        self._lives: dict[str, _Life] = {}
        self._waiting: dict[str, int] = {}
        self._waiting_tokens = 0

    def step(self, capture: Capture, result: Result | None) -> Step:
        """The line of one ``schedule()`` call, with its output where that is back."""
        output = capture.output
        arrived, finished = self.events(capture.arrived, capture.finished)
        for preemption, num_tokens in capture.preempted:
            life = self._life(preemption.request_id)
            life.lost_tokens = max(life.lost_tokens, preemption.lost_tokens)
            self._wait(preemption.request_id, num_tokens)
        start_us = self._us(capture.start_ns)
        rows = self._rows(output, start_us)
        for row in rows:
            if row.phase != "running":
                self._unwait(row.request_id)
        remaining = capture.token_budget - output.total_num_scheduled_tokens
        exits, caps = to_lines(capture.events, remaining, self._long_prefill_threshold)
        step = Step(
            step=capture.step,
            trial=self.trial,
            start_us=start_us,
            schedule_us=(capture.end_ns - capture.start_ns) // 1000,
            token_budget=capture.token_budget,
            remaining_budget=remaining,
            total_requests=len(rows),
            max_num_running_reqs=capture.max_num_running_reqs,
            num_running_before=capture.running_before,
            num_running_after=capture.running_after,
            num_waiting_before=capture.waiting_before,
            num_waiting_after=capture.waiting_after,
            num_not_ready_after=capture.not_ready_after,
            waiting_tokens_after=(
                self._waiting_tokens if len(self._waiting) == capture.waiting_after else None
            ),
            kv_blocks_total=capture.kv_blocks_total,
            kv_blocks_free_before=capture.free_before,
            kv_blocks_free_after=capture.free_after,
            requests=rows,
            exits=exits + (capture.inferred or []),
            caps=caps,
            preempted=[preemption for preemption, _ in capture.preempted],
            arrived=arrived,
            finished=finished,
            dummy_batches=capture.dummy_batches,
            draft_tokens=sum(map(len, output.scheduled_spec_decode_tokens.values())),
        )
        self._count(step)
        if result is not None:
            step.output_us, step.update_us, step.output_tokens = self._result(result)
        self.hide_ids(step.requests, step.arrived, step.finished, step.preempted)
        if self._hash_ids:
            _hide_mentioned_ids(step)
        return step

    def output(self, capture: Capture, result: Result) -> Output:
        """The line that completes a step whose output came back late."""
        output_us, update_us, output_tokens = self._result(result)
        return Output(
            step=capture.step, output_us=output_us, update_us=update_us, output_tokens=output_tokens
        )

    def events(self, arrived: list[Arrival], finished: list[Finish]) -> tuple[list[Arrival], list[Finish]]:
        """Keep book of who came and went; finished requests get the times of their life."""
        for arrival in arrived:
            if arrival.streaming_update and arrival.request_id in self._lives:
                continue
            self._lives[arrival.request_id] = _Life(arrival)
            self._wait(arrival.request_id, arrival.prompt_tokens)
            if self._trial_ids and (match := _TRIAL.match(arrival.request_id)):
                self.trial = int(match[1])
        for finish in finished:
            self._complete(finish)
        return arrived, finished

    def hide_ids(self, *rows: Sequence[ScheduledRequest | Arrival | Finish | Preemption]) -> None:
        """Replace request ids by their hashes, if asked for."""
        if self._hash_ids:
            for row in itertools.chain(*rows):
                row.request_id = hashed(row.request_id)

    def _complete(self, finish: Finish) -> None:
        self._unwait(finish.request_id)
        life = self._lives.pop(finish.request_id, None)
        if life is None:
            return
        if life.arrival is not None:
            finish.arrived_us = life.arrival.arrived_us
            finish.queued_us = life.arrival.queued_us
        finish.scheduled_us = life.scheduled_us
        finish.first_token_us = life.first_token_us
        finish.last_token_us = life.last_token_us
        finish.cached_tokens = life.cached

    def _rows(self, output: Any, start_us: int) -> list[ScheduledRequest]:
        """One row per scheduled request, in vLLM's order: running, resumed, then new."""
        scheduled = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", None)
        if resumed is None:  # to vLLM 0.11.0
            resumed = set(itertools.compress(cached.req_ids, cached.resumed_from_preemption))
        tokens = map(scheduled.__getitem__, cached.req_ids)
        rows = list(map(ScheduledRequest, cached.req_ids, cached.num_computed_tokens, tokens))
        if resumed:
            for row in rows:
                if row.request_id in resumed:
                    row.phase = "resumed"
        for new in output.scheduled_new_reqs:
            life = self._life(new.req_id)
            # The V2 model runner gets resumed requests as new ones: tell by whether it ran before.
            phase: Phase = "new" if life.scheduled_us is None else "resumed"
            rows.append(ScheduledRequest(new.req_id, new.num_computed_tokens, scheduled[new.req_id], phase))
            if life.scheduled_us is None:
                life.scheduled_us = start_us
                life.cached = new.num_computed_tokens
        if drafts:
            for row in rows:
                row.draft_tokens = len(drafts.get(row.request_id, ()))
        return rows

    def _count(self, step: Step) -> None:
        """Sums over the rows: phases, prefill, decode, recomputed and cached tokens."""
        lives = self._lives
        decoded = 0
        for row in step.requests:
            life = lives.get(row.request_id)
            prompt = 0 if life is None else life.prompt_tokens
            lost = 0 if life is None else life.lost_tokens
            start = row.computed_tokens
            if row.phase != "running":
                step.num_new += row.phase == "new"
                step.num_resumed += row.phase == "resumed"
                step.cached_tokens += start
            if start >= prompt and start >= lost:  # nearly every row: an ordinary decode
                decoded += row.scheduled_tokens
                continue
            end = start + row.scheduled_tokens
            step.prefill_tokens += max(0, min(end, prompt) - start)
            step.recomputed_tokens += max(0, min(end, lost) - start)
            decoded += max(0, end - max(prompt, lost))
        step.decode_tokens = decoded
        step.num_continued = len(step.requests) - step.num_new - step.num_resumed

    def _result(self, result: Result) -> tuple[int, int, int]:
        back_us = self._us(result.back_ns)
        tokens = 0
        by_client = result.outputs or {}
        lives = self._lives
        for outputs in by_client.values():
            for output in outputs.outputs:
                new = len(output.new_token_ids)
                if not new:
                    continue
                tokens += new
                life = lives.get(output.request_id)
                if life is not None:
                    life.last_token_us = back_us
                    if life.first_token_us is None:
                        life.first_token_us = back_us
        return back_us, (result.done_ns - result.back_ns) // 1000, tokens

    def _life(self, request_id: str) -> _Life:
        return self._lives.setdefault(request_id, _Life(None))

    def _wait(self, request_id: str, tokens: int) -> None:
        self._waiting[request_id] = tokens
        self._waiting_tokens += tokens

    def _unwait(self, request_id: str) -> None:
        self._waiting_tokens -= self._waiting.pop(request_id, 0)

    def _us(self, ns: int) -> int:
        return (ns - self._anchor_ns) // 1000


def hashed(request_id: str) -> str:
    """A request id as 12 hex digits of its BLAKE2b hash: equal ids stay equal, and unreadable."""
    return hashlib.blake2b(request_id.encode(), digest_size=6).hexdigest()


def _hide_mentioned_ids(step: Step) -> None:
    for preemption in step.preempted:
        if preemption.for_request_id is not None:
            preemption.for_request_id = hashed(preemption.for_request_id)
    taken: list[Exit | ChunkCap] = [*step.exits, *step.caps]
    for place in taken:
        if place.request_id is not None:
            place.request_id = hashed(place.request_id)
