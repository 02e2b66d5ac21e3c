"""Traces and run folders made by hand, so that a test's trace reads like a table.

Times are microseconds of the trace's clock. Request ids are single letters wherever several stand in one
string: ``new="ab"``. What a test does not name has a value that no rule objects to.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.model.causes import Cause
from schedtrace.model.manifest import Manifest, RunWorkload, TrialResult, write_manifest
from schedtrace.model.message import NOTHING
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.trace import AnyLine, Arrival, End, Exit, Finish, Header, ScheduledRequest, Step

BUDGET = 1000
SEATS = 8
BLOCK_SIZE = 10
KV_BLOCKS = 100
STEP_EVERY_US = 10_000

Raw = AnyLine | bytes


def header(**fields: Any) -> Header:
    given = {
        "schema_version": 1,
        "schedtrace_version": "0.1.0",
        "vllm_version": "0.32.0",
        "python_version": "3.12.0",
        "host": "box",
        "device": "cpu",
        "pid": 1,
        "engine_rank": 0,
        "wall_anchor_us": 1_700_000_000_000_000,
        "scheduler_class": "vllm.v1.core.sched.scheduler.Scheduler",
        "model": "tiny",
        "max_model_len": 2048,
        "token_budget": BUDGET,
        "max_num_running_reqs": SEATS,
        "block_size": BLOCK_SIZE,
        "kv_blocks_total": KV_BLOCKS,
        "enable_prefix_caching": True,
        "scheduler_config": {"max_num_seqs": SEATS, "enable_chunked_prefill": True, "policy": "fcfs"},
    }
    return Header(**{**given, **fields})


def step(
    number: int,
    *,
    start: int | None = None,
    took: int = 100,
    back: int | None = 1000,
    got: dict[str, int] | None = None,
    new: Iterable[str] = "",
    resumed: Iterable[str] = "",
    budget: int = BUDGET,
    running: int | None = None,
    waiting: int = 0,
    ended: Cause | Exit | None = Cause.QUEUE_EMPTY,
    **fields: Any,
) -> Step:
    """One ``schedule()`` call.

    Args:
        number: The step's number; unless told, it starts 10 ms after the one before.
        start: When ``schedule()`` began.
        took: How long it took.
        back: When its output came back, after ``start``; None: not yet.
        got: Request to tokens.
        new: Those of them that are scheduled for the first time.
        resumed: Those of them that come back after a preemption.
        budget: The step's token budget.
        running: Requests running after the step; as many as got tokens unless told.
        waiting: Requests waiting after the step.
        ended: The exit of the loop over the waiting queue.
        fields: Anything else of ``model.trace.Step``.
    """
    got = got or {}
    start = STEP_EVERY_US * number if start is None else start
    phases = dict.fromkeys(new, "new") | dict.fromkeys(resumed, "resumed")
    left = budget - sum(got.values())
    running = len(got) if running is None else running
    if isinstance(ended, Cause):
        ended = Exit("waiting", "break", ended, budget_left=left)
    given = {
        "step": number,
        "start_us": start,
        "schedule_us": took,
        "output_us": None if back is None else start + back,
        "token_budget": budget,
        "remaining_budget": left,
        "total_requests": len(got),
        "max_num_running_reqs": SEATS,
        "num_running_before": running,
        "num_running_after": running,
        "num_waiting_before": waiting,
        "num_waiting_after": waiting,
        "kv_blocks_total": KV_BLOCKS,
        "kv_blocks_free_after": KV_BLOCKS,
        "num_new": sum(phase == "new" for phase in phases.values()),
        "num_resumed": sum(phase == "resumed" for phase in phases.values()),
        "num_continued": len(got) - len(phases),
        "requests": [ScheduledRequest(name, 0, n, phases.get(name, "running")) for name, n in got.items()],
        "exits": [] if ended is None else [ended],
    }
    return Step(**{**given, **fields})


def arrival(request_id: str, came: int | None, queued: int | None = None, **fields: Any) -> Arrival:
    """A request that came to the front end, and 10 us later to the scheduler unless told."""
    queued = (came or 0) + 10 if queued is None else queued
    return Arrival(request_id, came, queued, **{"prompt_tokens": 100, **fields})


def finish(request_id: str, status: str = "LENGTH_CAPPED", **fields: Any) -> Finish:
    given = {"finished_us": 0, "prompt_tokens": 100, "output_tokens": 10}
    return Finish(request_id, status, **{**given, **fields})


def manifest(**fields: Any) -> Manifest:
    given = {"schedtrace_version": "0.1.0", "status": "finished", "started_at": "2026-01-01T00:00:00Z"}
    return Manifest(**{**given, **fields})


def workload(**fields: Any) -> RunWorkload:
    given = {"dataset": "random", "num_prompts": 4, "input_tokens": 400, "output_tokens": 40}
    return RunWorkload(**{**given, "input_len": 100, "output_len": 10, **fields})


def result(trial: int, elapsed_s: float, **fields: Any) -> TrialResult:
    given = {"num_requests": 4, "input_tokens": 400, "output_tokens": 40}
    return TrialResult(trial=trial, elapsed_s=elapsed_s, **{**given, **fields})


def finding(code: str = "kv-bound", **fields: Any) -> Finding:
    """A finding with this code; it has no title, share, gain or advice unless told."""
    given: dict[str, Any] = {
        "severity": "warning",
        "cause": None,
        "via": "recorded",
        "engine_rank": 0,
        "count": 1,
        "trials": [],
        "steps": [],
        "tokens": 0,
        "message": NOTHING,
        "evidence": Evidence(),
    }
    return Finding(code=code, **{**given, **fields})


def encoded(line: Raw) -> bytes:
    return line if isinstance(line, bytes) else msgspec.json.encode(line)


def write_trace(path: Path, *lines: Raw, closed: bool = True, tail: bytes = b"") -> Path:
    """Write lines (bytes stand as they are), the end line unless not ``closed``, then ``tail``."""
    if closed:
        steps = sum(isinstance(line, Step) for line in lines)
        lines = (*lines, End(at_us=10_000_000, steps=steps))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encoded(line) + b"\n" for line in lines) + tail)
    return path


def run_folder(folder: Path, *lines: AnyLine, about: Manifest | None = None, **fields: Any) -> Path:
    """A run folder with one engine, whose header has ``fields``; a second call may add another rank."""
    head = header(**fields)
    write_trace(folder / f"engine-{head.engine_rank}.jsonl", head, *lines)
    if about is not None:
        write_manifest(folder, about)
    return folder
