"""Attaches to engines that run, and lets them go; the run folder is named here, the engines write it."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from schedtrace.engine.running_engines import RunningEngine, chosen, reached
from schedtrace.errors import EngineError
from schedtrace.model.live import AskAttach, AskDetach, AskSnapshot, Attached, Detached, Snapshot
from schedtrace.model.trace_bounds import DEFAULT

LOOK_EVERY_S = 0.2
MILLISECOND_US = 1000


@dataclass(frozen=True)
class AttachedRun:
    """Engines that record into one folder."""

    folder: Path
    engines: dict[int, tuple[RunningEngine, Attached]]
    """By rank."""

    def lines(self) -> Iterator[str]:
        """What happened, for a person."""
        for engine, attached in self.engines.values():
            there = "1 request was" if attached.present == 1 else f"{attached.present:,} requests were"
            held = f"{attached.held_us / MILLISECOND_US:.1f} ms"
            yield f"attached to {engine.name}, {engine.status.model}: {there} there, held up for {held}"
        yield f"recording to {self.folder}"

    def next_command(self, *, ended: bool) -> str:
        """What to do now."""
        pids = {engine.status.pid for engine, _ in self.engines.values()}
        target = "all" if len(pids) > 1 else str(next(iter(pids)))
        return f"schedtrace analyze {self.folder}" if ended else f"schedtrace detach {target}"


def attach_to(
    target: str | None, parent: Path, for_s: float | None, *, hash_ids: bool, trace: str | None = None
) -> AttachedRun:
    """Attach to the engines that a person means; to all of them or, where one refuses, to none.

    Args:
        target: As ``running_engines.chosen`` takes it.
        parent: Of the run folder.
        for_s: They detach by themselves after so many seconds.
        hash_ids: Write request ids as hashes.
        trace: How much is kept, as ``model.trace_bounds`` understands it.

    Raises:
        EngineError: an engine refuses, or does not answer.
        InputError: there is none.
        UsageError: it is not clear which.
    """
    engines = reached(target)
    folder = _folder(parent, engines[0])
    attached: dict[int, tuple[RunningEngine, Attached]] = {}
    question = AskAttach(run_dir=str(folder), for_s=for_s, hash_ids=hash_ids, trace=trace or DEFAULT)
    try:
        for engine in engines:
            answer = engine.ask(question)
            assert isinstance(answer, Attached)  # noqa: S101  # the answer to this question
            attached[engine.status.rank] = (engine, answer)
    except EngineError:
        for engine, _ in attached.values():
            engine.ask(AskDetach())
        raise
    return AttachedRun(Path(next(iter(attached.values()))[1].path).parent, attached)


def _folder(parent: Path, engine: RunningEngine) -> Path:
    model = re.sub(r"[^\w.-]+", "_", Path(engine.status.model).name)[:40]
    return parent.expanduser().absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{engine.status.pid}"


def snapshot_of(target: str | None, parent: Path) -> Path:
    """Have the engines that a person means write what they keep in memory; returns the run folder.

    Args:
        target: As ``running_engines.chosen`` takes it.
        parent: Of the run folder.

    Raises:
        EngineError: one keeps nothing, cannot write it, or does not answer.
        InputError: there is none.
        UsageError: it is not clear which.
    """
    engines = chosen(target)
    folder = _folder(parent, engines[0])
    written = []
    for engine in engines:
        answer = engine.ask(AskSnapshot(run_dir=str(folder)))
        assert isinstance(answer, Snapshot)  # noqa: S101  # the answer to this question
        written.append(Path(answer.path).parent)
    return written[0]


def detach_from(target: str | None) -> Iterator[str]:
    """Detach from the engines that a person means; a line for each that was recorded by an attachment.

    Raises:
        EngineError: one refuses, or does not answer.
        InputError: there is none.
        UsageError: it is not clear which.
    """
    engines = chosen(target)
    attached = [one for one in engines if one.status.attached]
    for engine in attached or engines:
        yield _detached(engine)


def detached_after(run: AttachedRun, for_s: float) -> Iterator[str]:
    """Wait until the engines have detached by themselves; a person's Ctrl-C has them do so at once.

    Raises:
        EngineError: one has ended, or does not answer.
    """
    engines = [engine for engine, _ in run.engines.values()]
    with suppress(KeyboardInterrupt):
        time.sleep(for_s)
    for engine in engines:
        try:
            yield _detached(engine)
        except EngineError as error:
            yield str(error)


def _detached(engine: RunningEngine) -> str:
    answer = engine.ask(AskDetach())
    assert isinstance(answer, Detached)  # noqa: S101  # the answer to this question
    return f"detached from {engine.name}, held up for {answer.held_us / MILLISECOND_US:.2f} ms: {answer.path}"
