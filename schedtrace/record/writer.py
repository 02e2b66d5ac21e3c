"""Thread that turns captures from the scheduler's thread into lines and writes them to disk.

A step is written as soon as its output is back, or after half a second without output (an ``output`` line
then completes it). Everything recorded more than a second ago has therefore been passed to the operating
system.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec

from schedtrace.model.printable import error_text, json_of
from schedtrace.model.trace import (
    AnyLine,
    Arrival,
    End,
    Events,
    Exit,
    Finish,
    Header,
    Notice,
    one_by_one,
)
from schedtrace.model.trace_facts import Control, KvSend, Stalled
from schedtrace.record.assemble import Assembler
from schedtrace.record.capture import NOBODY, Capture, Dropped, DummyPass, SideEvents, Synced
from schedtrace.record.clocks import RecordingClock
from schedtrace.record.facts import Prefixes
from schedtrace.record.live.flight_recorder import FlightRecorder, Ring
from schedtrace.record.live.queue_copy import PresentRequests
from schedtrace.record.log import logger
from schedtrace.record.metrics.measuring import Measuring
from schedtrace.record.processes import CpuTimes
from schedtrace.record.run_folders import write_manifest_if_missing
from schedtrace.record.settings import Settings
from schedtrace.record.trace_files import Begins, NoTrace, PartedTrace, PartFiles, PlainFile, TraceOutput

_T = TypeVar("_T")

DRAIN_EVERY_S = 0.2
WRITE_LATEST_NS = 500_000_000
"""Nanoseconds after which a step without output is written; together with ``DRAIN_EVERY_S`` less than a
second."""

WRITE_AFTER_ROWS = 1000
"""Number of rows (steps and their requests) that are assembled before they are written."""

SHARE_AFTER = 16
"""Number of deltas that are assembled at once, each in about 15 us; more frequent thread switches would cost
the engine more."""

MOST_REPEATED = 20
"""Maximum number of notices that are repeated at the beginning of another file."""

CLOSE_S = 10
"""Seconds to wait for the thread to write the remaining lines."""

MAX_PENDING = 50_000
"""Maximum number of captures in memory; if the disk hangs, further steps are dropped and counted."""


class Writer:
    """Trace of one engine, and the thread that writes it.

    Args:
        chosen: Settings of the recording.
        header: First line of the trace.
        clock: Clock of the trace.
        assembler: Class of the assembler of lines.

    Raises:
        OSError: If the run folder or the file cannot be created.
    """

    def __init__(
        self, chosen: Settings, header: Header, clock: RecordingClock, assembler: type[Assembler] = Assembler
    ) -> None:
        self.working = True
        self._stopped: tuple[str, int, int] | None = None
        """Reason why recording stopped by itself, the time, and the next step's number."""
        self.arrived: deque[Arrival] = deque()
        self.finished: deque[Finish] = deque()
        self._dummies: deque[DummyPass] = deque()
        self._synced: deque[Synced] = deque()
        self._controls: deque[Control] = deque()
        self._kv_sends: deque[KvSend] = deque()
        self._beside: dict[type, deque[Any]] = {
            DummyPass: self._dummies, Synced: self._synced, Control: self._controls, KvSend: self._kv_sends
        }  # fmt: skip
        self._side_events: tuple[deque[Any], ...] = (self.arrived, self.finished, *self._beside.values())
        """Queues in the order of ``SideEvents``."""
        self._lost_beside = False
        self.prefixes = Prefixes(header.block_size, wanted=chosen.keeps_lines)
        self.clock = clock
        self.hash_ids = chosen.hash_ids
        self.engine_rank = header.engine_rank
        self._assembler = assembler(
            clock,
            trial_ids=chosen.trial_ids,
            hash_ids=chosen.hash_ids,
            full_lines=chosen.lines == "full",
            long_prefill_threshold=header.scheduler_config.get("long_prefill_token_threshold") or 0,
            prefixes=self.prefixes,
            drafts=bool(header.settings.get("scheduler.num_spec_tokens")),
        )
        self._pending: deque[Capture | Dropped | PresentRequests] = deque()
        self._dropping: deque[Dropped] = deque(maxlen=1)
        """Summary of the steps dropped since the last kept step; whoever reads this queue empties it."""
        self._early: list[Capture] = []
        self._notices: deque[str | Notice] = deque()
        self.keeps_lines = chosen.keeps_lines
        self._cpu_times = CpuTimes() if header.clock != "virtual" and chosen.keeps_lines else None
        self._steps = 0
        self._dropped = 0
        self._last_events_ns = clock.anchor_ns
        self._closing = threading.Event()
        self.measuring = Measuring(self._assembler)
        self._output, self.flight = _output(chosen, header)
        self.path = self._output.path
        self._header = header
        self._begun_anew = False
        self._notices_so_far: list[str] = []
        """Texts of the notices so far, which are repeated in each new file of this trace."""
        try:
            self._write([header])
            if self.flight is None and self.keeps_lines:
                write_manifest_if_missing(self.path.parent, header)
        except BaseException:
            with contextlib.suppress(OSError):
                self._output.discard()
                if self.keeps_lines:
                    self.path.parent.rmdir()  # unless others write there
            raise
        _writers.add(self)
        self._thread = threading.Thread(target=self._run, name="schedtrace-writer", daemon=True)
        self._thread.start()

    @property
    def latest_exits(self) -> list[Exit]:
        """Exits of the latest assembled step, which is about 0.2 s old."""
        return one_by_one(self._assembler.latest_exits.exits)

    def put_present(self, were: PresentRequests) -> None:
        """Pass the requests present to the writer before the first step (on the engine's thread)."""
        self._pending.append(were)

    def put_step(self, capture: Capture) -> bool:
        """Pass one step to the writer (on the engine's thread); return False if the step is dropped."""
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
            self.prefixes.drop_prompt(arrival.request_id)
        self._dropping.append(latest)
        return False

    def put_beside(self, entry: DummyPass | Synced | Control | KvSend) -> None:
        """Pass events between the steps to the writer (on the engine's thread)."""
        queue = self._beside[type(entry)]
        if len(queue) < MAX_PENDING:
            queue.append(entry)
        elif not self._lost_beside:
            self._lost_beside = True
            what = "dummy batches, all-reduces of the ranks, pauses or sent KV blocks"
            self.notice(f"the disk is too slow: {what} are missing")

    def take_events(self) -> SideEvents:
        """Take all events between steps (``SideEvents``) since the last call."""
        return SideEvents(*map(_drain, self._side_events)) if any(self._side_events) else NOBODY

    def give_back(self, side_events: SideEvents) -> None:
        """Return events to the queues if they were taken for a step that was not made."""
        for queue, taken in zip(self._side_events, side_events, strict=True):
            queue.extendleft(reversed(taken))

    def describe(self, error: BaseException) -> str:
        """Describe an error; if ids are hidden, name only its kind, because its text may contain an id."""
        return type(error).__name__ if self.hash_ids else error_text(error)

    def notice(self, message: str) -> None:
        """Write a notice into the trace."""
        self._notices.append(message)

    def put_stall(self, seen: Stalled) -> None:
        """Write a stall.

        Args:
            seen: Stall, with times in microseconds of the monotonic clock.
        """
        anchor_us = self.clock.anchor_ns // 1000
        until_us = None if seen.until_us is None else seen.until_us - anchor_us
        seen = msgspec.structs.replace(seen, since_us=seen.since_us - anchor_us, until_us=until_us)
        gone_on = "the engine goes on: " if until_us is not None else ""
        self._notices.append(
            Notice(at_us=self.clock.elapsed_us(), message=gone_on + seen.sentence, stalled=seen)
        )

    def stops(self, why: str) -> None:
        """Record that recording stops by itself; only the first reason counts."""
        if self._stopped is None:
            self._stopped = why, time.monotonic_ns(), self._assembler.next_step

    @property
    def incomplete_reason(self) -> str | None:
        """Sentence on why the trace is incomplete and what it lacks; None if it is complete."""
        if self._stopped is not None:
            why, at_ns, step = self._stopped
            ago = f"{(time.monotonic_ns() - at_ns) / 1e9:,.0f} s ago"
            return f"its recording stopped {ago}: {why}; the steps from about {step:,} on are missing"
        if self._dropped:
            return f"the disk was too slow: {self._dropped:,} of {self._steps:,} steps are missing"
        return None

    def close(self) -> None:
        """Write all lines and the end line; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=CLOSE_S)
        if self._thread.is_alive():
            self.stops(f"the disk has not taken its last lines within {CLOSE_S:g} s")
        if not self.working or self._thread.is_alive():
            return
        try:
            self._work(last=True)
            self._write([End(at_us=self.clock.elapsed_us(), steps=self._steps, dropped_steps=self._dropped)])
            self._output.close()
        except Exception as error:
            self._give_up(error)
        self.working = False

    def abandon(self) -> None:
        """Abandon the file in a forked child, because it belongs to the parent."""
        self.working = False
        self._closing = threading.Event()
        self._closing.set()
        for queue in (*self._side_events, self._pending):
            queue.clear()

    def _run(self) -> None:
        try:
            while not self._closing.wait(DRAIN_EVERY_S):
                self._work(last=False)
                if self.flight is not None:
                    self.flight.write_snapshots(self._end)
        except BaseException as error:  # this thread may not end without a word
            self._give_up(error)
        finally:
            if self.flight is not None:
                self.flight.close()

    def _work(self, *, last: bool) -> None:
        """Write one round: outputs of early lines, then steps that are ready, then events of idle time."""
        self.measuring.begin_round()
        self._begin_if_needed()
        count = len(self._pending)
        lines: list[AnyLine | dict[str, Any]] = [*self._new_notices()] if self._notices else []
        # The engine's thread may set a result any time: look at each once.
        early = [(capture, capture.result) for capture in self._early]
        self._early = [capture for capture, result in early if result is None]
        lines += [self._assembler.output(capture, result) for capture, result in early if result is not None]
        if self._cpu_times is not None:
            lines += self._cpu_times.line(self.clock.elapsed_us(), self._steps)
        size = shared = 0
        for _ in range(count):
            capture = self._pending[0]
            if not isinstance(capture, Capture):
                self._pending.popleft()
                lines.append(
                    self._assembler.dropped(capture)
                    if isinstance(capture, Dropped)
                    else self._assembler.present_line(capture)
                )
                continue
            result = capture.result  # as above
            waited_ns = time.monotonic_ns() - capture.end_ns
            if result is None and not last and waited_ns < WRITE_LATEST_NS:
                break
            if result is None:
                self._early.append(capture)
            self._pending.popleft()
            self.measuring.assembled = capture
            line = self._assembler.step_line(capture, result)
            lines.append(line)
            size += 1 if isinstance(line, dict) else len(capture.ids)
            if size > WRITE_AFTER_ROWS:
                self._write(lines)
                self._begin_if_needed()
                lines, size = [], 0
            shared += 1 if isinstance(line, dict) else SHARE_AFTER
            if shared >= SHARE_AFTER:  # let the engine's thread have the interpreter
                time.sleep(0)
                shared = 0
        if self._pending or not (self._dropping or any(self._side_events)):
            self._last_events_ns = time.monotonic_ns()
        elif last or time.monotonic_ns() - self._last_events_ns >= WRITE_LATEST_NS:
            lines += self._idle_events()
        self._write(lines)
        now_us, complete = self.clock.elapsed_us(), not (self._pending or any(self._side_events))
        self.measuring.end_round(now_us, self.clock.since_anchor, complete=complete)

    def _new_notices(self) -> list[Notice]:
        """Return the notices since the last call; keep those about the recorder for later files' headers."""
        lines = []
        for noted in _drain(self._notices):
            if isinstance(noted, Notice):
                lines.append(noted)
                continue
            lines.append(Notice(at_us=self.clock.elapsed_us(), message=noted))
            self._notices_so_far = [*self._notices_so_far[1 - MOST_REPEATED :], noted]
        return lines

    def _idle_events(self) -> list[AnyLine]:
        """Return lines of the events that have waited half a second without a step to belong to."""
        lines: list[AnyLine] = [self._assembler.dropped(dropped) for dropped in _drain(self._dropping)]
        if any(self._side_events):
            lines.append(self._assembler.events_line(self.take_events(), self.clock.elapsed_us()))
        return lines

    def _write(self, lines: Sequence[AnyLine | dict[str, Any]]) -> None:
        """Pass the lines to the flight recorder, and write them if there is a trace.

        Raises:
            OSError: If they cannot be written.
        """
        if lines and self.flight is not None:
            self.flight.observe(lines)
        if lines and self.keeps_lines:
            self._output.write(b"".join(json_of(line) + b"\n" for line in lines))

    def _begin_if_needed(self) -> None:
        """Begin a file if the previous one is full or lost, with a header and the requests present.

        The next step is written in full.

        Raises:
            OSError: If no other file can be created.
        """
        why: Begins | None = self._output.new_file_reason()
        if why is None:
            return
        first, at_us, present = self._assembler.begin_anew()
        if why != "due":
            message = f"the file was {why} while it was recorded: it begins at step {first:,}"
            if not self._begun_anew:
                logger.warning("schedtrace: {}: {}", self.path, message)
            self._begun_anew = True
            self._notices_so_far = [*self._notices_so_far[1 - MOST_REPEATED :], message]
        self._header = msgspec.structs.replace(self._header, first_step=first)
        header = msgspec.structs.replace(self._header, notices=[*self._header.notices, *self._notices_so_far])
        self._write([header, Events(at_us=at_us, trial=self._assembler.trial, present=present)])

    def _end(self) -> End:
        """Write the notices so far, and return the end line of a trace."""
        self._write(self._new_notices())
        return End(
            at_us=self.clock.elapsed_us(),
            steps=self._assembler.next_step,
            dropped_steps=self._dropped,
        )

    def _give_up(self, error: BaseException) -> None:
        self.stops(self.describe(error))
        self.working = False
        logger.warning(
            "schedtrace: recording to {} stopped: {}; serving continues", self.path, self.describe(error)
        )
        with contextlib.suppress(Exception):  # the disk is full or gone: the log line above has said so
            self._write(
                [Notice(at_us=self.clock.elapsed_us(), message=f"recording stopped: {self.describe(error)}")]
            )
        with contextlib.suppress(Exception):
            self._output.close()
        self._pending.clear()


_writers: WeakSet[Writer] = WeakSet()


def _disown() -> None:
    for writer in list(_writers):
        writer.abandon()


os.register_at_fork(after_in_child=_disown)


def _output(chosen: Settings, header: Header) -> tuple[TraceOutput, FlightRecorder | None]:
    """Return the destination of lines, and the flight recorder if they stay in memory; raise OSError."""
    run_dir, rank = chosen.run_dir, header.engine_rank
    if not chosen.keeps_lines:
        return NoTrace(), None
    if chosen.bounds is None:
        return PlainFile(run_dir, rank), None
    if not chosen.in_memory:
        return PartedTrace(PartFiles(run_dir, rank), chosen.bounds), None
    ring = Ring(run_dir, rank)
    parts = PartedTrace(ring, chosen.bounds)
    return parts, FlightRecorder(run_dir, ring, parts, header, chosen.snapshot_on)


def _drain(queue: deque[_T]) -> list[_T]:
    """Take all entries of a queue; other threads may append or take at the same time."""
    taken = []
    while queue:
        try:
            taken.append(queue.popleft())
        except IndexError:
            break
    return taken
