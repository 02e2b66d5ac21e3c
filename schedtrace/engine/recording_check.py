"""Check whether a run's recording is complete, from its traces: a full disk may prevent any other message.

An engine that was shut down in order has ended each trace with an ``end`` line. A trace without one is cut
off, unless it contains the end of every request: then the engine was only killed during its shutdown.
"""

import json
import os
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from schedtrace.engine.supervise import log_lines
from schedtrace.errors import InputError, RecordingError
from schedtrace.model.manifest import Manifest, files_of, is_in_parts, traces_in

if TYPE_CHECKING:
    from schedtrace.read.trace import Trace

_FULL_BELOW_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_STOPPED = re.compile(r"schedtrace: recording to (?P<path>.+) stopped: (?P<why>.+); serving goes on")
_DISK_FULL = ("No space left on device", "Disk quota exceeded")


def begun_traces(folder: Path) -> list[Path]:
    """Return the traces that have begun: the engine writes the first line before it is ready."""
    return [path for path in traces_in(folder) if any(file.stat().st_size for file in files_of(path))]


def require_recording(traces: list[Path], manifest: Manifest, log: Path) -> None:
    """Check between trials whether a recording has stopped, as far as that is visible then.

    Raises:
        RecordingError: If it has stopped; the text states what was recorded, what is missing and what to do.
    """
    for path in traces:
        if not _is_there(path) or _why(path, log):
            raise _stopped(path, manifest, log)
        _require_begin(path)


def require_whole(traces: list[Path], manifest: Manifest, log: Path) -> None:
    """Check after an orderly shutdown that every trace is complete and has every step.

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


def _is_there(path: Path) -> bool:
    return any(file.exists() for file in files_of(path))


def _require_begin(path: Path) -> None:
    """Raise RecordingError for a plain trace that its recorder had to begin anew."""
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
    """Return whether every trial ran, no step before the last is missing, and all requests have ended."""
    finished: Counter[int] = Counter()
    for trace in map(_trace, traces):
        if trace is None or trace.problems.missing_steps or trace.notices[len(trace.header.notices) :]:
            return False
        finished.update(trace.finishes["trial"].drop_nulls().to_list())
    ran = manifest.trials
    every = all(finished[trial.trial] >= trial.num_requests for trial in ran)
    return len(ran) >= (manifest.trials_asked or 1) and every


def _stopped(path: Path, manifest: Manifest, log: Path) -> RecordingError:
    if not _is_there(path):
        gone = path if path.parent.exists() else path.parent
        ran = len(manifest.trials)
        lost = f"; {_trials(1, ran)} ran and left no record" if ran else ""
        return RecordingError(f"{gone} was removed while the run wrote to it{lost}: run it again")
    step, trial = _last_step(path)
    return RecordingError(
        f"recording to {path} stopped: {_reason(path, log)}; {_how_far(step, trial, manifest)}",
        f"make room or choose another disk with --output, and run again; {_see(path)}",
    )


def _see(path: Path) -> str:
    return f"to see what was recorded: schedtrace analyze {path.parent}"


def _how_far(step: int | None, trial: int | None, manifest: Manifest) -> str:
    """Return a sentence on how much was recorded, and what is missing."""
    asked = manifest.trials_asked or 1
    if step is None:
        return f"no step was recorded; missing: {_trials(1, asked)}"
    if not trial:
        return f"recorded: steps 0 to {step}, of the warm-up; missing: {_trials(1, asked)}"
    rest = f" and {_trials(trial + 1, asked)}" if trial < asked else ""
    recorded = f"steps 0 to {step}, up to trial {trial} of {asked}"
    return f"recorded: {recorded}; missing: the rest of trial {trial}{rest}"


def _trials(first: int, last: int) -> str:
    return f"trial {first}" if first == last else f"trials {first} to {last}"


def _last_step(path: Path) -> tuple[int | None, int | None]:
    """Return number and trial of the last readable step."""
    trace = _trace(path)
    if trace is None or trace.steps.is_empty():
        return None, None
    step, trial = trace.steps.select("step", "trial").row(-1)
    return step, trial


def _trace(path: Path) -> "Trace | None":
    """Return the trace as far as it is readable; None if nothing is."""
    from schedtrace.read.lines import ReadOptions
    from schedtrace.read.trace import read_trace

    try:
        return read_trace(path, ReadOptions(cache=False))
    except (InputError, OSError):
        return None


def _reason(path: Path, log: Path) -> str:
    """Return the reason, from the writer's message in vLLM's log or in the trace, or from the disk."""
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
    """Return the last line if it is complete."""
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
