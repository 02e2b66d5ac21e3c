"""Execution of plans: one (``schedtrace run``), or two in alternation (``schedtrace diff --run``).

The traces themselves show whether a recording is complete, because a full disk may prevent any other message.
An engine that shuts down properly ends each trace with an ``end`` line. A trace without this line is cut off,
unless it contains the end of every request; in that case, the engine was killed during its shutdown.
"""

import contextlib
import json
import os
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from schedtrace.engine import run_spec
from schedtrace.engine.plan import Plan
from schedtrace.engine.prompts import DEFAULT_RANDOM_OUTPUT_LEN
from schedtrace.engine.supervise import EngineProcess, log_lines
from schedtrace.errors import EngineError, InputError, RecordingError, SchedtraceError, UsageError
from schedtrace.model.manifest import (
    Manifest,
    RunWorkload,
    Status,
    TrialResult,
    files_of,
    is_in_parts,
    traces_in,
)


class Observer(Protocol):
    """Observer that shows the progress of a run."""

    def phase(self, plan: Plan, name: str) -> None:
        """Report a phase of start-up or shutdown."""

    def progress(self, plan: Plan, trial: int, finished: int, total: int) -> None:
        """Report the number of finished requests of a trial (trial 0 is the warm-up)."""

    def trial_done(self, plan: Plan, result: TrialResult) -> None:
        """Report that a trial is over."""


def execute_plans(plans: list[Plan], observer: Observer, *, interleave: bool = True) -> None:
    """Execute the runs; with ``interleave``, alternate their trials, so that the machine's drift affects all.

    Raises:
        SchedtraceError: If an engine did not start or died, or its trace is incomplete; what was recorded is
            kept.
        KeyboardInterrupt: After the engines were shut down properly.
    """
    for group in [plans] if interleave else [[plan] for plan in plans]:
        _execute_group(group, observer)


def _execute_group(plans: list[Plan], observer: Observer) -> None:
    engines: list[tuple[Plan, EngineProcess]] = []
    try:
        for plan in plans:
            plan.save_manifest("starting")
            engine = EngineProcess(plan.spec, plan.folder)
            engines.append((plan, engine))
            _await_ready(plan, engine, observer)
            plan.save_manifest("running")
        for trial in range(max(plan.spec.trials for plan in plans) + 1):
            for plan, engine in engines:
                if trial <= plan.spec.trials and (trial or plan.spec.warmup):
                    _run_trial(plan, engine, trial, observer)
        for plan, engine in engines:
            observer.phase(plan, "shutting down")
            engine.send_command(run_spec.StopCommand())
            for _ in engine.read_events():
                pass
            _require_whole([(plan, engine)])
            plan.save_manifest("finished")
    except KeyboardInterrupt:
        _stop_all(engines, "interrupted", observer)
        raise
    except SchedtraceError as error:
        _stop_all(engines, "failed", observer, str(error))
        _remove_unused(plans, error)
        if isinstance(error, RecordingError):
            _require_whole(engines)  # a trace that is cut is more to tell than a manifest that is
        raise


def _require_whole(engines: list[tuple[Plan, EngineProcess]]) -> None:
    for plan, engine in engines:
        require_whole(plan.traces, plan.manifest, engine.log_path)


def _remove_unused(plans: list[Plan], error: SchedtraceError) -> None:
    """Remove folders without useful content, so that their names can be used again."""
    for plan in plans:
        if isinstance(error, UsageError) and not traces_in(plan.folder):
            shutil.rmtree(plan.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            plan.folder.rmdir()  # empty only


def _await_ready(plan: Plan, engine: EngineProcess, observer: Observer) -> None:
    for event in engine.read_events():
        if isinstance(event, run_spec.Phase):
            observer.phase(plan, event.name)
        elif isinstance(event, run_spec.Ready):
            _note(plan, event)
            _require_recording(plan, engine)
            observer.phase(plan, "ready")
            return
    msg = f"the engine stopped while it was starting; see {engine.log_path}"
    raise EngineError(msg)


def _require_recording(plan: Plan, engine: EngineProcess) -> None:
    """Raise RecordingError if the scheduler exists but no trace file does."""
    plan.traces = begun_traces(plan.folder)
    if plan.traces:
        return
    if not plan.folder.exists():
        msg = f"{plan.folder} was removed while the engine was starting: run it again"
        raise RecordingError(msg)
    refusals = [line for line in log_lines(engine.log_path) if "schedtrace: not recording" in line]
    why = (
        refusals[-1].partition("schedtrace: ")[2]
        if refusals
        else "if VLLM_PLUGINS is set, it must name schedtrace"
    )
    msg = f"vLLM is up, but its scheduler is not recorded: {why}; see {engine.log_path}"
    raise RecordingError(msg)


def _note(plan: Plan, ready: run_spec.Ready) -> None:
    """Store the started engine's information in the manifest."""
    manifest, run = plan.manifest, plan.spec
    for name in set(manifest.__struct_fields__).intersection(ready.__struct_fields__):
        setattr(manifest, name, getattr(ready, name))
    manifest.workload = RunWorkload(
        dataset=run.dataset,
        num_prompts=ready.num_prompts,
        input_tokens=ready.input_tokens,
        output_tokens=ready.output_tokens,
        input_len=run.input_len if run.dataset == run_spec.RANDOM else None,
        output_len=run.output_len or (DEFAULT_RANDOM_OUTPUT_LEN if run.dataset == run_spec.RANDOM else None),
        range_ratio=run.range_ratio,
        request_rate=run.request_rate,
        own_times=ready.own_times,
        speedup=run.speedup,
        burstiness=run.burstiness,
        prequeue=run.prequeue,
        seed=run.seed,
        warmup_requests=run.warmup,
        keep_prefix_cache=run.keep_prefix_cache,
        notes=plan.notes,
    )


def _run_trial(plan: Plan, engine: EngineProcess, trial: int, observer: Observer) -> None:
    workload = plan.manifest.workload
    total = 0 if workload is None else workload.num_prompts
    if trial == 0:
        total = min(total, plan.spec.warmup)
    observer.progress(plan, trial, 0, total)
    engine.send_command(run_spec.RunTrial(trial))
    for event in engine.read_events():
        if isinstance(event, run_spec.Progress):
            observer.progress(plan, trial, event.finished, total)
        elif isinstance(event, run_spec.TrialDone):
            observer.trial_done(plan, event.result)
            if trial:
                plan.manifest.trials.append(event.result)
            require_recording(plan.traces, plan.manifest, engine.log_path)
            if trial:
                plan.save_manifest("running")
            return
    msg = f"the engine stopped in trial {trial}; see {engine.log_path}"
    raise EngineError(msg)


def _stop_all(
    engines: list[tuple[Plan, EngineProcess]], status: Status, observer: Observer, error: str | None = None
) -> None:
    for plan, engine in engines:
        observer.phase(plan, "shutting down")
        try:
            engine.stop()
        except KeyboardInterrupt:  # asked twice
            engine.kill()
        with contextlib.suppress(RecordingError):  # what went wrong is about to be told
            plan.save_manifest(status, error)


if TYPE_CHECKING:
    from schedtrace.read.trace import Trace

_FULL_BELOW_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_STOPPED = re.compile(r"schedtrace: recording to (?P<path>.+) stopped: (?P<why>.+); serving continues")
_DISK_FULL = ("No space left on device", "Disk quota exceeded")


def begun_traces(folder: Path) -> list[Path]:
    """Return the traces that have begun; an engine writes the first line of its trace before it is ready."""
    return [path for path in traces_in(folder) if any(file.stat().st_size for file in files_of(path))]


def require_recording(traces: list[Path], manifest: Manifest, log: Path) -> None:
    """Check between trials whether a recording has stopped, as far as this is visible at that time.

    Raises:
        RecordingError: If it has stopped; the text states what was recorded, what is missing and what to do.
    """
    for path in traces:
        if not any(file.exists() for file in files_of(path)) or _why(path, log):
            raise _stopped(path, manifest, log)
        _require_begin(path)


def require_whole(traces: list[Path], manifest: Manifest, log: Path) -> None:
    """Check after a proper shutdown that every trace is complete and has every step.

    Raises:
        RecordingError: If a trace is incomplete; the text states what was recorded, what is missing and what
            to do.
    """
    for path in traces:
        _require_begin(path)
        end = _last_line(path)
        if end.get("type") != "end":
            if _why(path, log) is None and _all_finished(traces, manifest):
                continue
            raise _stopped(path, manifest, log)
        if end.get("dropped_steps"):
            msg = f"{path} lacks {end['dropped_steps']} of {end.get('steps')} steps: the disk was too slow"
            raise RecordingError(msg, f"choose a faster disk with --output and run again; {_see(path)}")


def _require_begin(path: Path) -> None:
    """Raise RecordingError if the recorder had to begin a plain trace again."""
    if is_in_parts(path):
        return
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
    except (OSError, ValueError):
        return
    if isinstance(header, dict) and (first := header.get("first_step")):
        msg = f"{path} was truncated, replaced or removed during the run: it begins at step {first}"
        raise RecordingError(msg, f"run it again; {_see(path)}")


def _all_finished(traces: list[Path], manifest: Manifest) -> bool:
    """Return whether every trial ran, all steps are present, and all requests have ended."""
    finished: Counter[int] = Counter()
    for trace in map(_trace, traces):
        if trace is None or trace.problems.missing_steps or trace.notices[len(trace.header.notices) :]:
            return False
        finished.update(trace.finishes["trial"].drop_nulls().to_list())
    ran = manifest.trials
    every = all(finished[trial.trial] >= trial.num_requests for trial in ran)
    return len(ran) >= (manifest.trials_asked or 1) and every


def _stopped(path: Path, manifest: Manifest, log: Path) -> RecordingError:
    if not any(file.exists() for file in files_of(path)):
        gone = path if path.parent.exists() else path.parent
        ran = len(manifest.trials)
        lost = f"; {_trials(1, ran)} ran and left no record" if ran else ""
        return RecordingError(f"{gone} was removed while the run wrote to it{lost}: run it again")
    trace, asked = _trace(path), manifest.trials_asked or 1
    how_far = f"no step was recorded; missing: {_trials(1, asked)}"
    if trace is not None and not trace.steps.is_empty():
        step, trial = trace.steps.select("step", "trial").row(-1)  # the last readable step
        how_far = f"recorded: steps 0 to {step}, of the warm-up; missing: {_trials(1, asked)}"
        if trial:
            rest = f" and {_trials(trial + 1, asked)}" if trial < asked else ""
            recorded = f"steps 0 to {step}, up to trial {trial} of {asked}"
            how_far = f"recorded: {recorded}; missing: the rest of trial {trial}{rest}"
    return RecordingError(
        f"recording to {path} stopped: {_reason(path, log)}; {how_far}",
        f"make room or choose another disk with --output, and run again; {_see(path)}",
    )


def _see(path: Path) -> str:
    return f"to see what was recorded: schedtrace analyze {path.parent}"


def _trials(first: int, last: int) -> str:
    return f"trial {first}" if first == last else f"trials {first} to {last}"


def _trace(path: Path) -> "Trace | None":
    """Return the readable part of a trace; None if nothing is readable."""
    from schedtrace.read.lines import ReadOptions
    from schedtrace.read.trace import read_trace

    try:
        return read_trace(path, ReadOptions(cache=False))
    except (InputError, OSError):
        return None


def _reason(path: Path, log: Path) -> str:
    """Return why a recording stopped, according to vLLM's log, the trace, or the disk."""
    why = _why(path, log)
    if why is None:
        notice = _last_line(path)
        if notice.get("type") == "notice":
            why = str(notice.get("message", "")).removeprefix("recording stopped: ") or None
    free = shutil.disk_usage(path.parent).free
    if any(words in (why or "") for words in _DISK_FULL) or (why is None and free < _FULL_BELOW_BYTES):
        return "the disk is full"
    return why or "the engine ended before the last steps were on disk"


def _why(path: Path, log: Path) -> str | None:
    for line in reversed(log_lines(log)):
        match = _STOPPED.search(line)
        if match and Path(match["path"]).name == path.name:
            return match["why"]
    return None


def _last_line(path: Path) -> dict[str, object]:
    """Return the decoded last line of a trace; empty if it is missing or incomplete."""
    from schedtrace.read.decompress import ZstdFrames  # as _trace: not before it is needed

    try:
        latest = files_of(path)[-1]
        with latest.open("rb") as file:
            if is_in_parts(path):
                *_, tail = ZstdFrames().blocks(iter(partial(file.read, _TAIL_BYTES), b""), 0)
            else:
                file.seek(max(0, latest.stat().st_size - _TAIL_BYTES), os.SEEK_SET)
                tail = file.read()
            line = tail.splitlines()[-1]
        content = json.loads(line)
    except (OSError, IndexError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
