"""Takes captures off the scheduler's thread, turns them into lines and puts them on disk.

A step is written as soon as its output is back, or after half a second without (an ``output`` line then
completes it), so what was recorded a second ago is in the operating system's hands whatever happens.
"""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from loguru import logger

from schedtrace.model.ids import shortened
from schedtrace.model.printable import json_of
from schedtrace.model.trace import AnyLine, Arrival, End, Events, Finish, Header, Notice
from schedtrace.record.arrival_facts import Prefixes
from schedtrace.record.assemble import Assembler
from schedtrace.record.capture import NOBODY, Came, Capture, DummyPass, Synced
from schedtrace.record.cpu_times import CpuTimes
from schedtrace.record.run_folder import create, write_manifest_if_missing
from schedtrace.record.settings import Settings

_T = TypeVar("_T")

DRAIN_EVERY_S = 0.2
WRITE_LATEST_NS = 500_000_000
"""A step without output is written after this long; with ``DRAIN_EVERY_S`` it stays under one second."""

WRITE_AFTER_ROWS = 1000
"""Steps and their requests put together before they are written."""

SHARE_AFTER = 16
"""Deltas put together in one go, some 15 us each: handing the interpreter over costs the engine more."""

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
        self._lost_passes = False
        self.prefixes = Prefixes()
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
        self._pending: deque[Capture] = deque()
        self._early: list[Capture] = []
        self._notices: deque[str] = deque()
        self._cpu_times = None if header.clock == "virtual" else CpuTimes()
        self._steps = 0
        self._dropped = 0
        self._last_events_ns = anchor_ns
        self._closing = threading.Event()
        self.path, self._file = create(chosen.run_dir, f"engine-{header.engine_rank}.jsonl")
        self._links = os.fstat(self._file).st_nlink
        write_manifest_if_missing(self.path.parent, header)
        self._write([header])
        self._thread = threading.Thread(target=self._run, name="schedtrace-writer", daemon=True)
        self._thread.start()

    def put(self, capture: Capture) -> bool:
        """Hand over one step (engine's thread); False: it is dropped, and the next one must stand alone."""
        self._steps += 1
        if len(self._pending) < MAX_PENDING:
            self._pending.append(capture)
            return True
        self._dropped += 1
        return False

    def _put_pass(self, queue: deque[_T], entry: _T) -> None:
        if len(queue) < MAX_PENDING:
            queue.append(entry)
        elif not self._lost_passes:
            self._lost_passes = True
            self.notice("the disk is too slow: dummy batches and all-reduces of the ranks are missing")

    def _anything(self) -> bool:
        return bool(self.arrived or self.finished or self._dummies or self._synced)

    def take_events(self) -> Came:
        """Everything that came and went since the last call."""
        if not self._anything():
            return NOBODY
        return Came(_drain(self.arrived), _drain(self.finished), _drain(self._dummies), _drain(self._synced))

    def give_back(self, came: Came) -> None:
        """Events that were taken for a step that there will not be."""
        self.arrived.extendleft(reversed(came.arrived))
        self.finished.extendleft(reversed(came.finished))
        self._dummies.extendleft(reversed(came.dummies))
        self._synced.extendleft(reversed(came.synced))

    def put_dummy(self, dummy: DummyPass) -> None:
        """Hand over a dummy batch (engine's thread)."""
        self._put_pass(self._dummies, dummy)

    def put_sync(self, sync: Synced) -> None:
        """Hand over an all-reduce among the ranks (engine's thread)."""
        self._put_pass(self._synced, sync)

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

    def _run(self) -> None:
        try:
            while not self._closing.wait(DRAIN_EVERY_S):
                self._work(last=False)
        except BaseException as error:  # this thread may not end without a word
            self._give_up(error)

    def _work(self, *, last: bool) -> None:
        """One round: outputs of early lines, then steps that are ready, then idle-time events."""
        count = len(self._pending)
        lines: list[AnyLine | dict[str, Any]] = []
        lines += [Notice(at_us=self._now_us(), message=message) for message in _drain(self._notices)]
        lines += self._late_outputs()
        if self._cpu_times is not None:
            lines += self._cpu_times.line(self._now_us())
        size = shared = 0
        for _ in range(count):
            capture = self._pending[0]
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
        if self._pending or not self._anything():
            self._last_events_ns = now
            return []
        if not last and now - self._last_events_ns < WRITE_LATEST_NS:
            return []
        came = self.take_events()
        arrived, finished = self._assembler.events(came)
        self._assembler.write_ids(arrived, finished)
        return [
            Events(
                at_us=self._now_us(),
                trial=self._assembler.trial,
                arrived=arrived,
                finished=finished,
                **self._assembler.passes(came),
            )
        ]

    def _write(self, lines: Sequence[AnyLine | dict[str, Any]]) -> None:
        """Whole lines only: what a full disk cut off is taken back by truncating.

        Raises:
            OSError: the lines cannot be written, or nobody could read them since the file was removed.
        """
        if not lines:
            return
        if os.fstat(self._file).st_nlink < self._links:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was written", str(self.path))
        data = memoryview(b"".join(json_of(line) + b"\n" for line in lines))
        start = os.lseek(self._file, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, start)
            raise

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


def _drain(queue: deque[_T]) -> list[_T]:
    """Take all there is; safe against another thread that appends or takes."""
    taken = []
    while queue:
        try:
            taken.append(queue.popleft())
        except IndexError:
            break
    return taken
