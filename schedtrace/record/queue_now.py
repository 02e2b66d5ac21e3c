"""Who waits and who runs in an engine now: copied between two of its steps, put into words beside it."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from schedtrace.model.causes import Cause
from schedtrace.model.queue import EngineQueue, QueueEntry
from schedtrace.model.trace import Exit
from schedtrace.record import queues
from schedtrace.record.between_steps import BetweenSteps, NotReachedError
from schedtrace.record.block_holders import free_blocks, held_blocks, usable_blocks
from schedtrace.record.header import engine_rank
from schedtrace.record.present_requests import Seen, Snapshot, snapshot
from schedtrace.record.step_lines import WrittenIds

MOST_WAITED_S = 5.0
"""For the end of the step that runs; then it is read meanwhile."""


def queue_now(
    engine: Any, between_steps: BetweenSteps, exits: Sequence[Exit], ids: WrittenIds
) -> EngineQueue:
    """The queues of an engine.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: The way to its thread.
        exits: Of its latest call of ``schedule()``; empty: not known.
        ids: Request ids as they are to be written.
    """
    scheduler, manager = engine.scheduler, engine.scheduler.kv_cache_manager
    queues.know_queues()
    copied: list[tuple[Snapshot, Counter[str], int | None]] = []
    held_us = 0.0

    def copy() -> None:
        nonlocal held_us
        began_ns = time.perf_counter_ns()
        in_flight = bool(getattr(engine, "batch_queue", None))
        found = snapshot(scheduler, in_flight=in_flight)
        copied.append((found, held_blocks(manager), free_blocks(manager)))
        held_us = (time.perf_counter_ns() - began_ns) / 1000

    reached = True
    try:
        between_steps.do(copy, MOST_WAITED_S)
    except NotReachedError:
        reached = False
        copy()  # on this thread: each list is copied in one go
    [(found, held, free)] = copied
    now = time.time()
    entries = [(one, _entry(one, now, held, ids)) for one in found.seen()]
    _refusals(entries, exits)
    pause = queues.pause_name(scheduler)
    return EngineQueue(
        rank=engine_rank(engine.vllm_config.parallel_config),
        pid=os.getpid(),
        model=str(engine.vllm_config.model_config.model),
        unix_s=now,
        held_us=held_us,
        between_steps=reached,
        policy=queues.policy(scheduler),
        seats=queues.seats(scheduler),
        token_budget=int(scheduler.max_num_scheduled_tokens),
        blocks_usable=usable_blocks(manager),
        blocks_free=free,
        pause=None if pause == "UNPAUSED" else pause,  # type: ignore[arg-type]  # one of vLLM's three words
        running=[entry for one, entry in entries if one.state == "running"],
        waiting=[entry for one, entry in entries if one.state != "running"],
        exits=list(exits),
    )


def _entry(seen: Seen, now: float, held: Counter[str], ids: WrittenIds) -> QueueEntry:
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


def _refusals(entries: Iterable[tuple[Seen, QueueEntry]], exits: Sequence[Exit]) -> None:
    """Why each got nothing (as in ``timeline/waiting.py``): the exit that names it, else the loop's end."""
    named: dict[tuple[str, str | None], str] = {(one.loop, one.request_id): one.cause for one in exits}
    ends = [one.cause for one in exits if one.loop == "waiting" and one.kind != "continue"]
    end = next((cause for cause in ends if cause != Cause.QUEUE_EMPTY), None)  # which explains no wait
    for seen, entry in entries:
        loop = "running" if seen.state == "running" else "waiting"
        entry.refused_for = named.get((loop, entry.request_id), end if loop == "waiting" else None)
