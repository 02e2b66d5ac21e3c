"""Recordings of running engines: begin, end and snapshot them, and switch metrics; names of their folders."""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from schedtrace.engine.running_engines import (
    STATUS_S,
    NoAnswerError,
    RunningEngine,
    find_engines,
    reached,
)
from schedtrace.errors import EngineError, RecordingError, UsageError, engine_error
from schedtrace.model.live import (
    AskAttach,
    AskDetach,
    AskMeasure,
    AskSnapshot,
    Attached,
    Detached,
    Measured,
    Snapshot,
)
from schedtrace.model.printable import encodable, shortened
from schedtrace.model.trace_bounds import DEFAULT

MILLISECOND_US = 1000
LONGEST_MODEL = 200
"""Maximum number of characters of a model's name that are shown."""


@dataclass(frozen=True)
class AttachedEngines:
    """Engines that are being recorded; all engines of a server record into one folder."""

    answers: list[tuple[RunningEngine, Attached]]

    @property
    def folders(self) -> list[Path]:
        """Run folders of the engines."""
        return list(dict.fromkeys(Path(attached.path).parent for _, attached in self.answers))

    def result_lines(self) -> Iterator[str]:
        """Yield lines for the user about the result."""
        for engine, attached in self.answers:
            there = "1 request was" if attached.present == 1 else f"{attached.present:,} requests were"
            held = f"{attached.held_us / MILLISECOND_US:.1f} ms"
            model = shortened(engine.status.model, LONGEST_MODEL)
            yield f"attached to {engine.display_name}, {model}: {there} there, held up for {held}"
        for folder in self.folders:
            yield f"recording to {folder}"

    def next_command(self, *, ended: bool) -> str:
        """Return the command that the user should type next."""
        if ended:
            return f"schedtrace analyze {' '.join(map(str, self.folders))}"
        pids = [engine.status.pid for engine, _ in self.answers]
        return f"schedtrace detach {'all' if len(pids) > 1 else pids[0]}"


def attach_to(
    target: str | None, parent: Path, for_s: float | None, *, hash_ids: bool, trace: str | None = None
) -> AttachedEngines:
    """Attach to all selected engines or, if any refuses, to none.

    Args:
        target: Target as for ``running_engines.find_engines``.
        parent: Parent of the run folders.
        for_s: Seconds after which the engines detach by themselves.
        hash_ids: Whether to write request ids as hashes.
        trace: Bounds of the trace, in the syntax of ``model.trace_bounds``.

    Raises:
        EngineError: If an engine refuses, or does not answer.
        InputError: If there is no engine.
        UsageError: If it is not clear which engines are meant.
    """
    answers: list[tuple[RunningEngine, Attached]] = []
    pending: RunningEngine | None = None
    try:
        for pending, folder in _with_folders(reached(target), parent):
            question = AskAttach(run_dir=str(folder), for_s=for_s, hash_ids=hash_ids, trace=trace or DEFAULT)
            answers.append((pending, pending.answer_to(question, Attached)))
    except BaseException as error:  # a person's Ctrl-C as well
        refuses = isinstance(error, EngineError) and not isinstance(error, NoAnswerError)
        recorded = _undone(answers, None if refuses else pending)
        if recorded and isinstance(error, EngineError):
            msg = "; ".join(
                [str(error), *(f"{engine.display_name} may still be recorded" for engine in recorded)]
            )
            raise EngineError(msg) from error
        raise
    return AttachedEngines(answers)


def _undone(
    answers: list[tuple[RunningEngine, Attached]], pending: RunningEngine | None
) -> list[RunningEngine]:
    """Detach from all of these engines; return the engines that may not have detached.

    Args:
        answers: Answers of engines that record.
        pending: Engine whose answer is unknown. It will read the command once it listens again, so its answer
            is awaited only for ``STATUS_S``. If it was recorded before, that recording continues.
    """
    engines: list[tuple[RunningEngine, float | None]] = [(engine, None) for engine, _ in answers]
    if (
        pending is not None
        and pending not in [engine for engine, _ in answers]
        and not pending.status.attached
    ):
        engines.append((pending, STATUS_S))
    recorded = []
    for engine, timeout_s in engines:
        try:
            engine.answer_to(AskDetach(), Detached, timeout_s)
        except EngineError as error:
            if engine is not pending or isinstance(error, NoAnswerError):
                recorded.append(engine)
    return recorded


def _with_folders(engines: Iterable[RunningEngine], parent: Path) -> Iterator[tuple[RunningEngine, Path]]:
    """Yield each engine with its run folder; ranks of a server share a folder, with separate files."""
    folders: dict[tuple[int, int], Path] = {}
    seen: dict[tuple[int, int], int] = {}
    """Number of engines so far, by server and rank, because a process may have several ``LLM`` objects."""
    for engine in engines:
        server = engine.server
        nth = seen[server, engine.status.rank] = seen.get((server, engine.status.rank), 0) + 1
        model = re.sub(r"[^\w.-]+", "_", Path(engine.status.model).name)[:40]
        folder = parent.absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{engine.status.pid}"
        if encodable(str(folder)) != str(folder):
            msg = (
                f"{parent}: its name is not UTF-8, so it cannot be sent to the engine; --output names another"
            )
            raise UsageError(msg)
        yield engine, folders.setdefault((server, nth), folder)


def switch_metrics(target: str | None, address: str) -> Iterator[str]:
    """Switch metrics of the selected engines on or off; yield a line for each engine.

    Args:
        target: Target as for ``running_engines.find_engines``.
        address: Value of ``SCHEDTRACE_METRICS``.

    Raises:
        EngineError: If an engine refuses, or does not answer; all other engines get the command nevertheless.
        InputError: If there is no engine.
        UsageError: If it is not clear which engines are meant.
    """
    errors = []
    for engine in reached(target):
        try:
            answer = engine.answer_to(AskMeasure(address=address), Measured)
        except EngineError as error:
            errors.append(str(error))
            continue
        held = f"{answer.held_us / MILLISECOND_US:.1f} ms"
        where = "off" if answer.where is None else f"on {answer.where}"
        yield f"metrics of {engine.display_name}: {where}, held up for {held}"
    if errors:
        raise engine_error(errors)


def snapshot_of(target: str | None, parent: Path) -> tuple[list[Path], list[str]]:
    """Make the selected engines write their in-memory recordings.

    Args:
        target: Target as for ``running_engines.find_engines``.
        parent: Parent of the run folders.

    Returns: The run folders, and the messages of engines that wrote no snapshot.

    Raises:
        InputError: If there is no engine.
        UsageError: If it is not clear which engines are meant.
    """
    targets = find_engines(target)
    folders: dict[Path, None] = {}
    errors = list(targets.silent.values())
    for engine, folder in _with_folders(targets.engines, parent):
        try:
            answer = engine.answer_to(AskSnapshot(run_dir=str(folder)), Snapshot)
        except EngineError as error:
            errors.append(str(error))
        else:  # the engine takes another where this one is taken
            folders[Path(answer.path).parent] = None
    return list(folders), errors


def detach_from(target: str | None) -> Iterator[str]:
    """Detach from the selected engines; yield a line for each engine that was attached to.

    Raises:
        EngineError: If an engine refuses, or does not answer; all other engines get the command nevertheless.
        RecordingError: If a recording is incomplete.
        InputError: If there is no engine.
        UsageError: If it is not clear which engines are meant.
    """
    engines, silent, *_ = find_engines(target)
    attached = [engine for engine in engines if engine.status.attached]
    yield from _detached(attached or ([] if silent else engines), list(silent.values()))


def detached_after(attached: AttachedEngines, for_s: float) -> Iterator[str]:
    """Wait until the engines have detached by themselves; on Ctrl-C, detach them at once.

    Raises:
        EngineError: As for ``detach_from``.
        RecordingError: As for ``detach_from``.
    """
    with suppress(KeyboardInterrupt):
        time.sleep(for_s)
    yield from _detached([engine for engine, _ in attached.answers], [])


def _detached(engines: Iterable[RunningEngine], errors: list[str]) -> Iterator[str]:
    """Detach from the engines; yield a line for each that detached, then raise the errors."""
    cut = []
    for engine in engines:
        try:
            answer = engine.answer_to(AskDetach(), Detached)
        except EngineError as error:
            errors.append(str(error))
            continue
        held = f"{answer.held_us / MILLISECOND_US:.2f} ms"
        yield f"detached from {engine.display_name}, held up for {held}: {answer.path}"
        if answer.stopped is not None:
            errors.append(f"{engine.display_name}: {answer.stopped}")
            cut.append(str(Path(answer.path).parent))
    if cut:
        see = f"to see what was recorded: schedtrace analyze {' '.join(dict.fromkeys(cut))}"
        first, *further = errors
        raise RecordingError(first, *(f"schedtrace: {reason}" for reason in further), see)
    if errors:
        raise engine_error(errors)
