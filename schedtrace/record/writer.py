"""Takes captures off the scheduler's thread, turns them into lines and puts them on disk.

A step is written as soon as its output is back, or after half a second without (an ``output`` line then
completes it), so what was recorded a second ago is in the operating system's hands whatever happens.
"""

import contextlib
import errno
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec
from loguru import logger

from schedtrace.model.printable import json_of, shortened
from schedtrace.model.safe_files import FILE_MODE
from schedtrace.model.trace import AnyLine, Arrival, End, Events, Finish, Header, Notice
from schedtrace.model.trace_facts import Control
from schedtrace.record.arrival_facts import Prefixes
from schedtrace.record.assemble import Assembler
from schedtrace.record.capture import NOBODY, Came, Capture, Dropped, DummyPass, Synced
from schedtrace.record.cpu_times import CpuTimes
from schedtrace.record.settings import Settings, create, write_manifest_if_missing

_T = TypeVar("_T")

DRAIN_EVERY_S = 0.2
WRITE_LATEST_NS = 500_000_000
"""A step without output is written after this long; with ``DRAIN_EVERY_S`` it stays under one second."""

WRITE_AFTER_ROWS = 1000
"""Steps and their requests put together before they are written."""

SHARE_AFTER = 16
"""Deltas put together in one go, some 15 us each: handing the interpreter over costs the engine more."""

MOST_SAID = 20
"""Notices that are repeated where the file has to be begun anew."""

MAX_PENDING = 50_000
"""Captures held at most: a disk that stands still costs steps, counted, and not the engine's memory."""


class Writer:
    """One trace file and the thread that fills it.

    Args:
        chosen: Where to and how.
        header: The first line.
        anchor_ns: Monotonic clock at which the trace's time is 0.

    Raises:
        OSError: the run folder or file cannot be made.
    """

    def __init__(self, chosen: Settings, header: Header, anchor_ns: int) -> None:
        self.working = True
        self.arrived: deque[Arrival] = deque()
        self.finished: deque[Finish] = deque()
        self._dummies: deque[DummyPass] = deque()
        self._synced: deque[Synced] = deque()
        self._controls: deque[Control] = deque()
        self._beside: dict[type, deque[Any]] = {
            DummyPass: self._dummies, Synced: self._synced, Control: self._controls
        }  # fmt: skip
        self._came: tuple[deque[Any], ...] = (self.arrived, self.finished, *self._beside.values())
        """In the order of ``Came``."""
        self._lost_beside = False
        self.prefixes = Prefixes(header.block_size)
        self._anchor_ns = anchor_ns
        self._hash_ids = chosen.hash_ids
        self._wall_anchor_us = header.wall_anchor_us
        self._assembler = Assembler(
            anchor_ns,
            trial_ids=chosen.trial_ids,
            hash_ids=chosen.hash_ids,
            full_lines=chosen.lines == "full",
            long_prefill_threshold=header.scheduler_config.get("long_prefill_token_threshold") or 0,
            prefixes=self.prefixes,
            drafts=bool(header.settings.get("scheduler.num_spec_tokens")),
        )
        self._pending: deque[Capture | Dropped] = deque()
        self._dropping: deque[Dropped] = deque(maxlen=1)
        """The steps that are being dropped, until one is not; whoever needs them takes them out."""
        self._early: list[Capture] = []
        self._notices: deque[str] = deque()
        self._cpu_times = None if header.clock == "virtual" else CpuTimes()
        self._steps = 0
        self._dropped = 0
        self._last_events_ns = anchor_ns
        self._closing = threading.Event()
        self.path, self._file = create(chosen.run_dir, f"engine-{header.engine_rank}.jsonl")
        self._links = os.fstat(self._file).st_nlink
        self._size = 0
        """Bytes that the file holds at least, unless somebody else changed it."""
        self._header = header
        self._begun_anew = False
        self._said: list[str] = []
        """Notices so far, for a file that is begun anew."""
        write_manifest_if_missing(self.path.parent, header)
        self._write([header])
        _writers.add(self)
        self._thread = threading.Thread(target=self._run, name="schedtrace-writer", daemon=True)
        self._thread.start()

    def put(self, capture: Capture) -> bool:
        """Hand over one step (engine's thread); False: it is dropped, and the next one must stand alone."""
        self._steps += 1
        if len(self._pending) < MAX_PENDING:
            if self._dropping:
                dropped: list[Dropped] = _drain(self._dropping)
                self._pending.extend(dropped)
            self._pending.append(capture)
            return True
        if not self._dropped:
            logger.warning(
                "schedtrace: the disk of {} is too slow: steps are dropped, the requests that come and go in "
                "them are recorded",
                self.path,
            )
        self._dropped += 1
        latest = next(iter(_drain(self._dropping)), None) or Dropped()
        for arrival in latest.add(capture):
            self.prefixes.forget(arrival.request_id)
        self._dropping.append(latest)
        return False

    def put_beside(self, entry: DummyPass | Synced | Control) -> None:
        """Hand over what happened beside the steps (engine's thread)."""
        queue = self._beside[type(entry)]
        if len(queue) < MAX_PENDING:
            queue.append(entry)
        elif not self._lost_beside:
            self._lost_beside = True
            self.notice("the disk is too slow: dummy batches, all-reduces of the ranks or pauses are missing")

    def _anything(self) -> bool:
        return bool(self.arrived or self.finished or self._dummies or self._synced or self._controls)

    def take_events(self) -> Came:
        """Everything that came and went since the last call."""
        return Came(*map(_drain, self._came)) if self._anything() else NOBODY

    def give_back(self, came: Came) -> None:
        """Events that were taken for a step that there will not be."""
        for queue, taken in zip(self._came, came, strict=True):
            queue.extendleft(reversed(taken))

    def describe(self, error: BaseException) -> str:
        """An error for log and trace; only its kind where ids are hidden, since its text may hold one."""
        return type(error).__name__ if self._hash_ids else shortened(repr(error))

    def notice(self, message: str) -> None:
        """Have a notice written."""
        self._notices.append(message)

    def since_anchor(self, ns: int) -> int:
        """A monotonic time in the trace's microseconds."""
        return (ns - self._anchor_ns) // 1000

    def from_wall_clock(self, unix_s: float) -> int:
        """A Unix time in the trace's microseconds."""
        return int(unix_s * 1e6) - self._wall_anchor_us

    def close(self) -> None:
        """Write everything, then the end line; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=10)
        if not self.working or self._thread.is_alive():
            return
        try:
            self._work(last=True)
            end = End(at_us=self._now_us(), steps=self._steps, dropped_steps=self._dropped)
            self._write([end])
            os.close(self._file)
        except Exception as error:
            self._give_up(error)
        self.working = False

    def disown(self) -> None:
        """In a forked child: the file and its lines are the parent's; nothing is written any more."""
        self.working = False
        self._closing = threading.Event()
        self._closing.set()
        for queue in (*self._came, self._pending):
            queue.clear()

    def _run(self) -> None:
        try:
            while not self._closing.wait(DRAIN_EVERY_S):
                self._work(last=False)
        except BaseException as error:  # this thread may not end without a word
            self._give_up(error)

    def _work(self, *, last: bool) -> None:
        """One round: outputs of early lines, then steps that are ready, then idle-time events."""
        self._keep_whole()
        count = len(self._pending)
        lines: list[AnyLine | dict[str, Any]] = []
        for message in _drain(self._notices):
            lines.append(Notice(at_us=self._now_us(), message=message))
            self._said = [*self._said[1 - MOST_SAID :], message]
        lines += self._late_outputs()
        if self._cpu_times is not None:
            lines += self._cpu_times.line(self._now_us())
        size = shared = 0
        for _ in range(count):
            capture = self._pending[0]
            if isinstance(capture, Dropped):
                self._pending.popleft()
                lines.append(self._assembler.dropped(capture))
                continue
            result = capture.result  # the engine's thread may set it any time: look once
            waited_ns = time.monotonic_ns() - capture.end_ns
            if result is None and not last and waited_ns < WRITE_LATEST_NS:
                break
            if result is None:
                self._early.append(capture)
            self._pending.popleft()
            line = self._assembler.step(capture, result)
            lines.append(line)
            size += 1 if isinstance(line, dict) else len(capture.ids)
            if size > WRITE_AFTER_ROWS:
                self._write(lines)
                self._keep_whole()
                lines, size = [], 0
            shared += 1 if isinstance(line, dict) else SHARE_AFTER
            if shared >= SHARE_AFTER:  # let the engine's thread have the interpreter
                time.sleep(0)
                shared = 0
        lines += self._idle_events(last=last)
        self._write(lines)

    def _late_outputs(self) -> list[AnyLine]:
        done = [capture for capture in self._early if capture.result is not None]
        if done:
            self._early = [capture for capture in self._early if capture.result is None]
        return [self._assembler.output(capture, capture.result) for capture in done if capture.result]

    def _idle_events(self, *, last: bool) -> list[AnyLine]:
        """Arrivals and departures that no step has taken along for half a second."""
        now = time.monotonic_ns()
        if self._pending or not (self._dropping or self._anything()):
            self._last_events_ns = now
            return []
        if not last and now - self._last_events_ns < WRITE_LATEST_NS:
            return []
        lines: list[AnyLine] = [self._assembler.dropped(dropped) for dropped in _drain(self._dropping)]
        if self._anything():
            came = self.take_events()
            arrived, finished = self._assembler.events(came)
            self._assembler.write_ids(arrived, finished)
            lines.append(
                Events(
                    at_us=self._now_us(),
                    trial=self._assembler.trial,
                    arrived=arrived,
                    finished=finished,
                    **self._assembler.passes(came),
                )
            )
        return lines

    def _write(self, lines: Sequence[AnyLine | dict[str, Any]]) -> None:
        """Whole lines only: what a full disk cut off is taken back by truncating.

        Raises:
            OSError: the lines cannot be written.
        """
        if not lines:
            return
        data = memoryview(b"".join(json_of(line) + b"\n" for line in lines))
        start, whole = os.lseek(self._file, 0, os.SEEK_END), len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, start)
            raise
        self._size += whole

    def _keep_whole(self) -> None:
        """Begin the file anew if it was truncated, or lost with nobody's lines in its place.

        A file that was moved is written on where it is now.

        Raises:
            OSError: it was removed, and there is no place for another one; or that cannot be written.
        """
        ours, there = os.fstat(self._file), _status(self.path)
        removed = ours.st_nlink < self._links
        if there is not None and not os.path.samestat(ours, there) and _is_empty(there):
            self._open_anew("replaced")
        elif removed and there is None and self.path.parent.is_dir():
            self._open_anew("removed", os.O_CREAT | os.O_EXCL)
        elif removed:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was written", str(self.path))
        elif stat.S_ISREG(ours.st_mode) and ours.st_size < self._size:
            os.ftruncate(self._file, 0)
            self._begin_anew("truncated")

    def _open_anew(self, what: str, flags: int = 0) -> None:
        """Leave the file that was opened for the one that now has its name."""
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | flags, FILE_MODE)
        os.close(self._file)
        self._file, self._links = file, os.fstat(file).st_nlink
        self._begin_anew(what)

    def _begin_anew(self, what: str) -> None:
        """A header, those who are here, and why; the next step is written in full."""
        first, here = self._assembler.begin_anew()
        at_us = self._now_us()
        message = f"the file was {what} while it was recorded: it begins at step {first:,}"
        if not self._begun_anew:
            logger.warning("schedtrace: {}: {}", self.path, message)
        self._begun_anew, self._size = True, 0
        self._header = msgspec.structs.replace(self._header, first_step=first)
        lines: list[AnyLine] = [self._header, *(Notice(at_us=at_us, message=said) for said in self._said)]
        lines.append(Notice(at_us=at_us, message=message))
        if here:
            lines.append(Events(at_us=at_us, trial=self._assembler.trial, arrived=here))
        self._write(lines)

    def _give_up(self, error: BaseException) -> None:
        self.working = False
        logger.warning(
            "schedtrace: recording to {} stopped: {}; serving goes on", self.path, self.describe(error)
        )
        with contextlib.suppress(Exception):  # the disk is full or gone: the log line above has said so
            self._write([Notice(at_us=self._now_us(), message=f"recording stopped: {self.describe(error)}")])
        self._pending.clear()

    def _now_us(self) -> int:
        return self.since_anchor(time.monotonic_ns())


_writers: WeakSet[Writer] = WeakSet()


def _disown() -> None:
    for one in list(_writers):
        one.disown()


os.register_at_fork(after_in_child=_disown)


def _status(path: Path) -> os.stat_result | None:
    """What stands there; None: nothing, or nobody may look."""
    try:
        return path.lstat()
    except OSError:
        return None


def _is_empty(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and not status.st_size


def _drain(queue: deque[_T]) -> list[_T]:
    """Take all there is; safe against another thread that appends or takes."""
    taken = []
    while queue:
        try:
            taken.append(queue.popleft())
        except IndexError:
            break
    return taken
