"""Copies of a scheduler's requests between two steps, for the start of a recording and ``schedtrace queue``.

Values that change with every step are copied on the engine's thread; constant values of a request are read
when the line or the answer is made.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from schedtrace.model.causes import Cause
from schedtrace.model.live import MOST_ENTRIES, EngineQueue, QueueEntry
from schedtrace.model.trace import Exit, Present, PresentState
from schedtrace.record import facts, queues
from schedtrace.record.allocation import blocks_without_null, free_blocks, held_blocks
from schedtrace.record.clocks import RecordingClock
from schedtrace.record.header import data_parallel_rank
from schedtrace.record.live.between_steps import BetweenSteps, NotReachedError
from schedtrace.record.written_ids import Salt, WrittenIds


class CopiedRequest(NamedTuple):
    """Copied state of a request between two steps."""

    request: Any
    """Request of vLLM, released as soon as its line is made."""
    status: str
    """Name of the request's ``RequestStatus``."""
    state: PresentState
    computed_tokens: int
    output_tokens: int
    num_preemptions: int | None
    events: tuple[Any, ...]
    """Events (``EngineCoreEvent``) of vLLM since the request's latest output; empty if statistics are off."""
    in_flight: bool
    """Whether a step with this request may be in flight."""


class QueueCopy(NamedTuple):
    """Copy of a scheduler's requests between two steps."""

    at_ns: int
    """Monotonic time of the copy in nanoseconds."""
    requests: list[Any]
    statuses: list[Any]
    """Status of each request, in the order of ``requests``, like the lists below."""
    computed_tokens: list[int]
    output_tokens: list[int]
    num_preemptions: list[int | None]
    events: list[list[Any]]
    """Events of each request, in vLLM's own lists, which may grow."""
    running: list[Any]
    waiting: queues.Waiting
    in_flight: bool

    def ordered_requests(self) -> list[CopiedRequest]:
        """Return all requests, running ones first, in the scheduler's order if it is known."""
        place = {id(request): number for number, request in enumerate(self.requests)}
        order = (*self.running, *queues.queued_requests(self.waiting), *self.requests)
        copied: list[CopiedRequest] = []
        for number in dict.fromkeys(place[id(request)] for request in order if id(request) in place):
            status, events = self.statuses[number].name, self.events[number]
            if status.startswith("FINISHED"):
                continue
            outputs, preemptions = self.output_tokens[number], self.num_preemptions[number]
            runs = status == "RUNNING"
            before = status == "PREEMPTED" or bool(preemptions) or outputs > 0
            copied.append(
                CopiedRequest(
                    self.requests[number],
                    status,
                    "running" if runs else "preempted" if before else "waiting",
                    self.computed_tokens[number],
                    outputs,
                    preemptions,
                    tuple(event for event in events if event.timestamp * 1e9 <= self.at_ns),
                    runs and self.in_flight,
                )
            )
        return copied


class PresentRequests(NamedTuple):
    """Requests that were present when recording began."""

    queues: QueueCopy
    salt: Salt
    """Salt of the trace's hashes."""


_status, _events = attrgetter("status"), attrgetter("events")
_computed, _outputs = attrgetter("num_computed_tokens"), attrgetter("_output_token_ids")
_preemptions = attrgetter("num_preemptions")


def copy_queues(scheduler: Any, *, in_flight: bool) -> QueueCopy:
    """Return a copy, made as quickly as possible, of everything that the next step may change.

    The copy consists of a list per attribute, because a tuple per request would trigger the garbage
    collector.

    Args:
        scheduler: Scheduler between two steps; the caller is on its thread.
        in_flight: Whether the output of any step is not back yet.
    """
    requests = list(scheduler.requests.values())
    try:
        preemptions: list[int | None] = list(map(_preemptions, requests))
    except AttributeError:  # before vLLM 0.11.2 they were not counted
        preemptions = [None] * len(requests)
    return QueueCopy(
        time.monotonic_ns(),
        requests,
        list(map(_status, requests)),
        list(map(_computed, requests)),
        list(map(len, map(_outputs, requests))),
        preemptions,
        list(map(_events, requests)),
        list(scheduler.running),
        queues.waiting_now(scheduler),
        in_flight,
    )


def present_entry(seen: CopiedRequest, salt: Salt, clock: RecordingClock) -> Present:
    """Return the entry of a request that was present, without its prefix.

    Args:
        seen: Copy of the request.
        salt: Salt of the trace's hashes.
        clock: Clock of the trace.
    """
    request = seen.request
    lora = getattr(request, "lora_request", None)
    # The first event of each kind; vLLM's times are monotonic seconds.
    anchor_us = clock.anchor_ns // 1000
    times = {event.type.name: int(event.timestamp * 1e6) - anchor_us for event in reversed(seen.events)}
    fields = facts.requested(request)
    if (sibling := facts.sibling(request.request_id, salt)) is not None:
        fields["sibling_index"], fields["parent"] = sibling
    return Present(
        request_id=request.request_id,
        state=seen.state,
        arrived_us=int(request.arrival_time * 1e6) - clock.wall_us,
        prompt_tokens=request.num_prompt_tokens,
        queued_us=times.get("QUEUED"),
        scheduled_us=times.get("SCHEDULED") if not seen.num_preemptions else None,
        computed_tokens=seen.computed_tokens,
        output_tokens=seen.output_tokens,
        num_preemptions=seen.num_preemptions,
        max_tokens=request.max_tokens,
        priority=request.priority,
        lora=None if lora is None else lora.lora_name,
        **fields,
    )


MOST_WAITED_S = 5.0
"""Seconds to wait for the end of a step; after that, the queues are read during the step."""


class Exits(Protocol):
    """Function that returns the exits of an engine's latest ``schedule()`` call; empty if unknown."""

    def __call__(self, *, wait: bool) -> Sequence[Exit]:
        """Return the exits; ``wait`` states whether to wait for the end of a step."""


def queue_now(engine: Any, between_steps: BetweenSteps, exits: Exits, ids: WrittenIds) -> EngineQueue:
    """Return the queues of an engine.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
        exits: Function that returns the exits, called before the copy. If they are unknown, it is called
            again after the copy, unless the engine is held up within a step. If they are known then, a
            second copy is made, to show the state after these exits.
        ids: Written form of request ids.
    """
    scheduler, manager = engine.scheduler, engine.scheduler.kv_cache_manager
    queues.know_queues()
    copied: list[tuple[QueueCopy, Counter[str], int | None]] = []
    held_us = 0.0

    def copy_queue() -> None:
        nonlocal held_us
        began_ns = time.perf_counter_ns()
        in_flight = bool(getattr(engine, "batch_queue", None))
        copy_ = copy_queues(scheduler, in_flight=in_flight)
        copied[:] = [(copy_, held_blocks(manager), free_blocks(manager))]
        held_us += (time.perf_counter_ns() - began_ns) / 1000

    latest, reached = exits(wait=False), True
    try:
        between_steps.do(copy_queue, MOST_WAITED_S)
        if not latest and (latest := exits(wait=True)):
            between_steps.do(copy_queue, MOST_WAITED_S)
    except NotReachedError:
        reached = False
        copy_queue()  # on this thread: each list is copied in one go
    [(copy_, held, free)] = copied
    now = time.time()
    ordered = copy_.ordered_requests()
    running = [request for request in ordered if request.state == "running"]
    waiting = [request for request in ordered if request.state != "running"]
    entries = [
        (request, _entry(request, now, held, ids))
        for request in (*running[:MOST_ENTRIES], *waiting[:MOST_ENTRIES])
    ]
    _refusals(entries, latest)
    pause = queues.pause_name(scheduler)
    return EngineQueue(
        rank=data_parallel_rank(engine.vllm_config.parallel_config),
        pid=os.getpid(),
        model=str(engine.vllm_config.model_config.model),
        unix_s=now,
        held_us=held_us,
        between_steps=reached,
        policy=queues.policy(scheduler),
        seats=queues.max_running_requests(scheduler),
        token_budget=int(scheduler.max_num_scheduled_tokens),
        blocks_usable=blocks_without_null(manager),
        blocks_free=free,
        pause=None if pause == "UNPAUSED" else pause,  # type: ignore[arg-type]  # one of vLLM's three words
        running=[entry for request, entry in entries if request.state == "running"],
        waiting=[entry for request, entry in entries if request.state != "running"],
        input_requests=queues.num_in_input_queue(engine),
        more_running=max(0, len(running) - MOST_ENTRIES),
        more_waiting=max(0, len(waiting) - MOST_ENTRIES),
        exits=list(latest),
    )


def _entry(seen: CopiedRequest, now: float, held: Counter[str], ids: WrittenIds) -> QueueEntry:
    request = seen.request
    lora = getattr(request, "lora_request", None)
    return QueueEntry(
        request_id=ids[request.request_id],
        state=seen.status.lower(),
        age_s=max(0.0, now - request.arrival_time),
        prompt_tokens=request.num_prompt_tokens,
        computed_tokens=seen.computed_tokens,
        output_tokens=seen.output_tokens,
        blocks=held[request.request_id],
        num_preemptions=seen.num_preemptions,
        priority=request.priority,
        lora=None if lora is None else lora.lora_name,
    )


def _refusals(entries: Iterable[tuple[CopiedRequest, QueueEntry]], exits: Sequence[Exit]) -> None:
    """Store why each request got no tokens: the exit that names it or, if it waits, the loop's end."""
    named: dict[tuple[str, str | None], str] = {
        (exit_.loop, exit_.request_id): exit_.cause for exit_ in exits
    }
    ends = [exit_.cause for exit_ in exits if exit_.loop == "waiting" and exit_.kind != "continue"]
    end = next((cause for cause in ends if cause != Cause.QUEUE_EMPTY), None)  # which explains no wait
    for seen, entry in entries:
        loop = "running" if seen.state == "running" else "waiting"
        entry.refused_for = named.get((loop, entry.request_id), end if loop == "waiting" else None)
