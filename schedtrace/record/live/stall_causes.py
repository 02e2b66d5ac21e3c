"""Causes of an engine's stall: a kind, a sentence and the holders, read from another thread.

Values may come from different moments, and a container may change meanwhile, so only copies are iterated. The
engine is not asked anything, so a hung engine can be described too.
"""

import faulthandler
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Any, Literal, NamedTuple

from schedtrace.model.causes import CONNECTOR_CAUSES, Cause, is_refusal, reason_text
from schedtrace.model.kv_need import KvNeed
from schedtrace.model.numbers import counted
from schedtrace.model.trace import Exit
from schedtrace.record import queues
from schedtrace.record.allocation import blocks_without_null, free_blocks, held_blocks
from schedtrace.record.header import cache_groups
from schedtrace.record.written_ids import WrittenIds

At = Literal["idle", "request", "schedule", "output", "ranks", "between", "other"]
"""Activity of the engine's thread. ``idle``: sleeps on its input queue. ``request``: does what a client asked
for. ``schedule``: is within ``schedule()``. ``output``: waits for the executor, or runs its code.
``ranks``: waits for other data-parallel ranks. ``between``: lets other threads go first after a step without
tokens."""

MOST_OF_NAME = 100
"""Maximum number of characters of a thread's name."""
_THREAD = re.compile(r"(?i)(thread 0x([0-9a-f]+))(?s: \[.{,15}\])?(?= \(most recent call first\):)")
"""Pattern of the heading of a thread's stack; since Python 3.14 it has the first 15 characters of the name in
brackets."""
_RANKS = {"_has_global_unfinished_reqs", "sync_dp_state", "has_unfinished_dp", "sync_kv_cache_memory_size"}
_EXECUTE = {"execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids"}
_EXECUTOR_FILES = ("v1/executor/", "v1/worker/")
_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120  # compared with the names in frames
_OURS = str(Path(__file__).parents[2])
_CONNECTOR_FILES = ("kv_transfer", "kv_connector", "ec_transfer", "ec_connector")


class ThreadPlace(NamedTuple):
    """Place of a thread at one moment, by the names of functions and files on its stack."""

    at: At
    within: str
    """Innermost function of vLLM, such as ``vllm/v1/executor/multiproc_executor.py:367 get_response``."""
    connector: bool
    """Whether a KV connector's code is on the stack."""


def thread_place(thread_id: int) -> ThreadPlace | None:
    """Return the place of a thread in this process; None if the thread has ended."""
    frame = sys._current_frames().get(thread_id)
    return None if frame is None else frame_place(frame)


def frame_place(frame: FrameType) -> ThreadPlace:
    """Return the place of the thread whose innermost frame is given."""
    stack: list[tuple[str, int, str]] = []
    walked: FrameType | None = frame
    while walked is not None:
        stack.append((walked.f_code.co_filename, walked.f_lineno, walked.f_code.co_name))
        walked = walked.f_back
    vllm_file = getattr(sys.modules.get("vllm"), "__file__", None) or "/vllm/__init__.py"
    root = str(vllm_file).removesuffix("__init__.py")
    file, line, function = next((entry for entry in stack if entry[0].startswith(root)), stack[0])
    if "schedule" in (names := [name for _, _, name in stack]):  # maybe of a scheduler that is not vLLM's
        below = stack[: names.index("schedule") + 1]
        for entry in below:  # to the first that is neither Python's nor schedtrace's own
            of_python = entry[0].startswith(("<", _LIBRARY)) and "-packages" not in entry[0]
            if not of_python and not entry[0].startswith(_OURS):
                break
        file, line, function = entry
    shown = f"vllm/{file.removeprefix(root)}" if file.startswith(root) else file.rpartition("/")[2]
    files = [name.removeprefix(root) for name, _, _ in stack]
    connector = any(part in name for name in files for part in _CONNECTOR_FILES)
    return ThreadPlace(_at(names, files), f"{shown}:{line} {function}", connector)


def _at(functions: list[str], files: list[str]) -> At:
    """Return the kind of place that a stack shows, given its functions, innermost first, and their files."""
    names = set(functions)
    asks_a_future = "result" in names and bool(names & {"step", "step_with_batch_queue"})
    executes = (
        asks_a_future or bool(names & _EXECUTE) or any(file.startswith(_EXECUTOR_FILES) for file in files)
    )
    places: dict[At, bool] = {
        "ranks": bool(names & _RANKS),
        "request": "_handle_client_request" in names,
        "idle": "_process_input_queue" in names,
        "schedule": "schedule" in names,
        "output": executes,
        "between": functions[0] == "_process_engine_step",
    }
    return next((at for at, is_there in places.items() if is_there), "other")


def stacks_here() -> str:
    """Return the stacks of this process's threads by name, the main one first, except schedtrace's own."""
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)  # takes no lock, and reads no source
        file.seek(0)
        text = file.read().decode(errors="replace")
    names = {thread.ident: " ".join(thread.name.split())[:MOST_OF_NAME] for thread in threading.enumerate()}
    named = _THREAD.sub(lambda match: f"{match[1]} {names.get(int(match[2], 16), '')}", text)
    threads = named.strip().split("\n\n")  # the newest first
    return "\n".join(lines for lines in reversed(threads) if " schedtrace-" not in lines.splitlines()[0])


Kind = Literal["scheduler", "worker", "ranks", "connector", "engine", "paused", "livelock"]
MOST_NAMED = 8
_ELSEWHERE: dict[At, tuple[Kind, str]] = {
    "output": (
        "worker",
        "the worker does not answer: a batch is in flight ({running} running); the engine waits in {within}",
    ),
    "ranks": (
        "ranks",
        "another rank does not answer: the engine waits for the other data-parallel ranks in {within}",
    ),
    "idle": ("engine", "the engine's thread waits for input in {within}, and makes no step"),
    "request": ("engine", "the engine does what a client asked for, in {within}"),
    "schedule": ("engine", "schedule() has not returned{call}: the engine is in {within}"),
    "between": ("engine", "the engine's thread is in {within}"),
    "other": ("engine", "the engine's thread is in {within}"),
}
"""Kind and sentence for each place, outside of connectors, at which the engine's thread may be held up."""
_REMOTE = "WAITING_FOR_REMOTE_KVS"


class StallCause(NamedTuple):
    """Cause of an engine's stall, as far as it can be determined."""

    kind: Kind
    sentence: str
    """Sentence without a full stop."""


def is_paused(engine: Any) -> bool:
    """Return whether the scheduler is paused so that nothing can run, or its workers sleep."""
    pause = queues.pause_name(engine.scheduler)
    return (
        _is_asleep(engine)
        or pause == "PAUSED_ALL"
        or (pause == "PAUSED_NEW" and not engine.scheduler.running)
    )


def stall_cause(
    engine: Any,
    places: Sequence[ThreadPlace],
    *,
    steps: bool,
    exits: Sequence[Exit],
    ids: WrittenIds,
    calls: int | None,
    call_s: float | None,
) -> StallCause:
    """Return the cause of a stall.

    Args:
        engine: vLLM's ``EngineCore``.
        places: Places of the engine's thread at each check since the last progress, in order of time.
        steps: Whether ``schedule()`` is called repeatedly.
        exits: Exits of a call during the stall that scheduled nothing; empty if unknown.
        ids: Written form of request ids.
        calls: Number of ``schedule()`` calls since the last progress; None if unknown.
        call_s: Seconds since the latest call began; None if unknown.
    """
    latest = places[-1] if places else None
    pause = paused(engine) if is_paused(engine) else None
    if pause is not None and (steps or latest is None or latest.at in {"idle", "between", "other"}):
        return StallCause("paused", pause)
    if steps:
        return _refused(engine, exits, ids, calls)
    if latest is None:
        return StallCause("engine", "the engine's thread is gone")
    if latest.connector:
        return StallCause("connector", f"a connector does not return from {latest.within}")
    kind, sentence = _ELSEWHERE[latest.at]
    running = counted(len(engine.scheduler.running), "request")
    call = "" if call_s is None else f" for {call_s:.0f} s"
    return StallCause(kind, sentence.format(running=running, within=latest.within, call=call))


def paused(engine: Any) -> str | None:
    """Return a sentence stating that the engine was paused or put to sleep; None if it was not."""
    if _is_asleep(engine):
        return "the engine is asleep: requests wait for /wake_up"
    pause = queues.pause_name(engine.scheduler)
    if pause == "UNPAUSED":
        return None
    return f"the scheduler is paused ({pause}): requests wait until somebody resumes it"


def _is_asleep(engine: Any) -> bool:
    return getattr(getattr(engine, "model_executor", None), "is_sleeping", False) is True


def _refused(engine: Any, exits: Sequence[Exit], ids: WrittenIds, calls: int | None) -> StallCause:
    scheduler = engine.scheduler
    connecting = [exit_ for exit_ in exits if exit_.cause in CONNECTOR_CAUSES]
    if connecting:
        cause = connecting[0].cause
        who = [
            exit_.request_id for exit_ in connecting if exit_.cause == cause and exit_.request_id is not None
        ]
        why = _reason(scheduler, connecting[0])
        return StallCause("connector", f"a connector does not answer: {why}: {_named(who, len(who))}")
    decisive = _decisive(exits)
    if decisive is None:
        parked = [request.request_id for request in _waiting(scheduler) if request.status.name == _REMOTE]
        if parked and not scheduler.running:
            waiting = _named((ids[name] for name in parked), len(parked))
            return StallCause(
                "connector", f"a connector does not answer: KV blocks of {waiting} have not arrived"
            )
        often = "" if calls is None else f" {counted(calls, 'time')}"
        return StallCause(
            "scheduler",
            f"the scheduler was called{often} and scheduled nothing; {_seen_from_outside(engine, ids)}",
        )
    about = "" if decisive.request_id is None else f" (request {decisive.request_id})"
    return StallCause(
        "scheduler", f"the scheduler refuses: {_reason(scheduler, decisive)}{about}{_need(engine, decisive)}"
    )


def _seen_from_outside(engine: Any, ids: WrittenIds) -> str:
    """Return what is certain about the next request even without a recording."""
    first = usable = needed = None
    with suppress(Exception):  # a user's scheduler, or another release's cache groups
        first, usable = queues.head(engine.scheduler), blocks_without_null(engine.scheduler.kv_cache_manager)
        needed = None if first is None else _whole(engine, first.request_id)
    if first is None or needed is None or usable is None or needed <= usable:
        return "the limit that refused requests is not known"
    who = f"the next request, {ids[first.request_id]},"
    return f"{who} needs {counted(needed, 'KV block')} and the cache has {usable:,}: it can never run"


def _decisive(exits: Iterable[Exit]) -> Exit | None:
    """Return the refusal of a running request, else the waiting loop's end, else the most frequent skip."""
    refusals = [exit_ for exit_ in exits if is_refusal(exit_.cause, exit_.detail)]
    running = [exit_ for exit_ in refusals if exit_.loop == "running"]
    ended = [exit_ for exit_ in refusals if exit_.loop == "waiting" and exit_.kind != "continue"]
    if running or ended:
        return (running or ended)[0]
    skipped = Counter(exit_.cause for exit_ in refusals)
    most = skipped.most_common(1)
    return next((exit_ for exit_ in refusals if exit_.cause == most[0][0]), None) if most else None


def _reason(scheduler: Any, exit_: Exit) -> str:
    """Return the reason for an exit from the table of causes, with the engine's current figures."""
    if exit_.cause == Cause.OTHER:
        return f"a condition that schedtrace does not know, at {exit_.location}: {exit_.guard or ''}"
    if not (text := reason_text(exit_.cause, exit_.detail, exit_.loop)):
        return f"cause {exit_.cause}"
    active = getattr(scheduler.scheduler_config, "max_num_active_seqs", 0)
    setting = "max_num_active_seqs" if active else "max_num_seqs"
    budget = scheduler.max_num_scheduled_tokens
    return text.format(
        seats=queues.max_running_requests(scheduler), seats_setting=setting, token_budget=budget
    )


def _need(engine: Any, exit_: Exit) -> str:
    """Return a clause about the KV blocks that the refused request needs; empty if they are not the cause."""
    if exit_.cause != Cause.KV_BLOCKS:
        return ""
    manager = engine.scheduler.kv_cache_manager
    needed, usable = exit_.blocks_needed or _whole(engine, exit_.request_id), blocks_without_null(manager)
    if usable is None or needed is None:
        return ""
    need = f"; it needs {counted(needed, 'KV block')}, {free_blocks(manager):,} are free"
    if needed > usable:
        return f"{need} and the cache has {usable:,}: it can never run"
    return need if engine.scheduler.running else f"{need}, and no running request would free any"


def _whole(engine: Any, request_id: str | None) -> int | None:
    """Return the number of blocks for all tokens that a request has so far; None if unknown."""
    scheduler = engine.scheduler
    request = dict.get(scheduler.requests, request_id)
    need = KvNeed(tuple(cache_groups(scheduler)), max_model_len=getattr(scheduler, "max_model_len", None))
    if request is None or not need.is_bounded:
        return None
    return sum(need.sequence(request.num_tokens) or ()) or None


def holders(engine: Any, ids: WrittenIds) -> list[str]:
    """Return lines about seats, queue and KV cache: which requests hold how much, and in which state."""
    scheduler = engine.scheduler
    running = [ids[request.request_id] for request in list(scheduler.running)]
    lines = [
        f"running: {len(running):,} of {queues.max_running_requests(scheduler):,} seats{_after(running)}"
    ]
    if inputs := queues.num_in_input_queue(engine):
        lines.append(
            f"in the engine's input queue: {counted(inputs, 'request')} that its thread has not taken"
        )
    by_status: dict[str, list[str]] = {}
    for request in _waiting(scheduler):
        by_status.setdefault(request.status.name, []).append(ids[request.request_id])
    lines += [f"{_worded(name)}: {len(waiting):,}{_after(waiting)}" for name, waiting in by_status.items()]
    held, usable = held_blocks(scheduler.kv_cache_manager), blocks_without_null(scheduler.kv_cache_manager)
    if usable is None:
        return lines
    free = f"KV blocks: {free_blocks(scheduler.kv_cache_manager):,} of {usable:,} free"
    most = [(name, blocks) for name, blocks in held.most_common(MOST_NAMED) if blocks]
    named = []
    for name, blocks in most:
        request = dict.get(scheduler.requests, name)
        state = "finished" if request is None else _worded(request.status.name)
        named.append(f"{ids[name]} {blocks:,} ({state})")
    unnamed = sum(1 for blocks in held.values() if blocks) - len(named)
    more = f" and {unnamed:,} more" if unnamed > 0 else ""
    return [*lines, f"{free}; held by {', '.join(named)}{more}" if named else free]


def _worded(status: str) -> str:
    """Return a status as words: "waiting for remote kvs" for ``WAITING_FOR_REMOTE_KVS``."""
    return status.lower().replace("_", " ")


def _waiting(scheduler: Any) -> list[Any]:
    return queues.queued_requests(queues.waiting_now(scheduler))


def _after(names: Collection[str]) -> str:
    return f": {_named(names, len(names))}" if names else ""


def _named(names: Iterable[str], number: int) -> str:
    shown = [name for name, _ in zip(names, range(MOST_NAMED), strict=False)]
    return ", ".join(shown) + (f" and {number - len(shown):,} more" if number > len(shown) else "")
