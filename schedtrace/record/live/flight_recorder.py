"""Flight recorder: keeps the last parts of a trace in memory, and writes them on request or after an event.

The writer's thread, which has the lines, does all writing; clients wait for this thread.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from schedtrace.model import safe_files
from schedtrace.model.manifest import part_name
from schedtrace.model.printable import json_of
from schedtrace.model.trace import End, Header
from schedtrace.record.log import logger
from schedtrace.record.run_folders import write_manifest_if_missing
from schedtrace.record.settings import Rules
from schedtrace.record.trace_files import Begins, PartedTrace


class Ring:
    """Store of a trace's parts in memory.

    Args:
        run_dir: Run folder that would be used if the trace were written to disk.
        rank: Data-parallel rank of the engine.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = run_dir / part_name(rank)
        self._rank = rank
        self._parts: dict[int, list[bytes]] = {0: []}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Number of bytes in memory."""
        return sum(map(len, self._all().values()))

    def _all(self) -> dict[int, bytes]:
        with self._lock:
            return {number: b"".join(frames) for number, frames in self._parts.items()}

    def begin(self, number: int) -> None:
        """Begin the part with this number; the next frames belong to it."""
        with self._lock:
            self._parts[number] = []

    def append(self, frame: bytes) -> None:
        """Append a frame to the part that was begun last."""
        with self._lock:
            self._parts[max(self._parts)].append(frame)

    def lost(self) -> Begins | None:
        """Return None, because no other process can change the memory."""
        return None

    def remove(self, number: int) -> None:
        """Remove a part from the memory."""
        with self._lock:
            self._parts.pop(number, None)

    def close(self) -> None:
        """Keep the frames in memory for a later copy."""

    def write_to(self, run_dir: Path, end: bytes, header: Header) -> Path:
        """Write a run folder with all parts; if that fails, leave nothing behind.

        Args:
            run_dir: Run folder; if it already has a trace of this engine, a number is added to its name.
            end: Frame to append after the parts.
            header: Header of the trace, for the manifest.

        Returns:
            Path of the trace.

        Raises:
            OSError: If the parts cannot be written.
        """
        trace, again = run_dir / part_name(self._rank), 1
        while any(trace.parent.glob(trace.name)):
            again += 1
            trace = run_dir.with_name(f"{run_dir.name}-{again}") / trace.name
        safe_files.make_folder(trace.parent)
        written: list[Path] = []
        try:
            parts = self._all()
            for number, content in parts.items():
                path = trace.with_name(part_name(self._rank, number))
                safe_files.create_new(path, content + end if number == max(parts) else content)
                written.append(path)
            write_manifest_if_missing(trace.parent, header)
        except BaseException:
            with suppress(OSError):
                for path in written:
                    path.unlink()
                trace.parent.rmdir()  # unless another engine has written there
            raise
        return trace


class Asked(Future[Path]):
    """Snapshot that a client has requested and waits for."""

    def result(self, timeout: float | None = None) -> Path:
        """Return the path of the trace.

        Raises:
            RuntimeError: If the trace is not written yet, or the recording has ended.
            OSError: If the trace cannot be written.
        """
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():
                return super().result()
            msg = f"not written within {timeout:g} s: the disk is slow; vLLM's log says when it is"
            raise RuntimeError(msg) from None


EVERY_S = 300.0
"""Minimum seconds between two automatic snapshots."""
MOST = 10
"""Maximum number of automatic snapshots, so that a permanently slow server does not fill the disk."""
ASK = "schedtrace snapshot writes one"
WAIT_S = 30.0
"""Seconds to wait for the writer's thread, which may be busy or have a slow disk."""


class FlightRecorder:
    """Flight recorder of one engine.

    Args:
        run_dir: Run folder; snapshots are written beside it, named after it and the event.
        ring: Parts in memory.
        parts: Trace that fills the ring.
        header: Header of the trace.
        rules: Rules for automatic snapshots.
    """

    def __init__(self, run_dir: Path, ring: Ring, parts: PartedTrace, header: Header, rules: Rules) -> None:
        self._run_dir, self._ring, self._parts, self._header = run_dir, ring, parts, header
        self._rules = rules
        self._asked: deque[tuple[Path, Asked]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._latest_s = -EVERY_S
        self._taken = 0
        self._refused_after_s = 0.0
        """Value of ``_latest_s`` when the log last reported a suppressed snapshot."""
        self._reason: str | None = None
        """Event that triggers the next snapshot; None if there is none."""
        self._preempted: deque[tuple[int, int]] = deque()

    @property
    def keeps(self) -> str:
        """Description of the memory's contents and bounds."""
        bounds = self._parts.bounds
        size, most = self._ring.size / 2**20, (bounds.max_bytes or 0) / 2**20
        return f"the last {bounds.max_s:g} s, {size:.1f} of at most {most:g} MiB"

    def request_snapshot(self, folder: Path) -> Asked:
        """Request a snapshot, from any thread."""
        future = Asked()
        self._asked.append((folder, future))
        if self._closed:
            self.close()
        return future

    def close(self) -> None:
        """Notify all clients, including later ones, that nothing more will be written."""
        self._closed = True
        with suppress(IndexError):  # emptied by the other thread
            while True:
                _, future = self._asked.popleft()
                future.set_exception(RuntimeError("the recording has ended"))

    def snapshot_event(self, reason: str, *, always: bool = False) -> str:
        """Have the writer's thread write an automatic snapshot, and wait for it; call this on another thread.

        Args:
            reason: Description of the event in a few words.
            always: Whether to write the snapshot regardless of the number of earlier ones.

        Returns:
            Line for vLLM's log with the path of the snapshot, or the reason why there is none.
        """
        folder = self._folder(reason, always=always)
        if isinstance(folder, str):
            return folder
        try:
            return f"what happened before: {self.request_snapshot(folder).result(WAIT_S)}"
        except Exception as error:
            return f"no snapshot: {error}"

    def _folder(self, reason: str, *, always: bool) -> Path | str:
        """Return the folder of the next snapshot, or the reason why a limit suppresses the snapshot."""
        now = time.monotonic()
        with self._lock:
            if not always and self._taken >= MOST:
                return f"no snapshot: {MOST} have been written by themselves; {ASK}"
            if not always and now - self._latest_s < EVERY_S:
                ago = f"the latest was written {now - self._latest_s:.0f} s ago"
                return f"no snapshot: {ago}, and at most one in {EVERY_S / 60:g} minutes is; {ASK}"
            self._latest_s, self._taken = now, self._taken + 1
        words = re.sub(r"[^\w.-]+", "-", reason)[:40].strip("-")
        name = f"{self._run_dir.name}-{time.strftime('%H%M%S')}-{words}"
        return self._run_dir.with_name(name)

    def observe(self, lines: Iterable[Any]) -> None:
        """Check the assembled lines against the rules (on the writer's thread)."""
        if self._rules and self._reason is None:
            for line in lines:
                self._reason = self._reason or self._happened(line)

    def _happened(self, line: Any) -> str | None:
        get: Callable[[str], Any] = (
            line.get if isinstance(line, dict) else lambda name: getattr(line, name, None)
        )
        for finish in get("finished") or ():
            if (broken := self._rules.broken_by(finish)) is not None:
                return broken
        if self._rules.preemptions is not None and (preempted := get("preempted")):
            most, within_s = self._rules.preemptions
            at_us = int(get("start_us"))
            self._preempted.append((at_us, len(preempted)))
            while self._preempted[0][0] < at_us - within_s * 1e6:
                self._preempted.popleft()
            if sum(number for _, number in self._preempted) > most:
                self._preempted.clear()
                return f"preemptions>{most}/{within_s:g}s"
        return None

    def write_snapshots(self, end: Callable[[], End]) -> None:
        """Write requested and triggered snapshots (on the writer's thread, after each round).

        Args:
            end: Function that returns the last line of a trace that ends now.
        """
        reason, self._reason = self._reason, None
        if reason is not None:
            folder = self._folder(reason, always=False)
            if isinstance(folder, Path):
                self.request_snapshot(folder)
            elif self._refused_after_s != self._latest_s:
                self._refused_after_s = self._latest_s  # once for each that was written
                logger.warning("schedtrace: {}: {}", reason, folder)
        while self._asked:
            folder, future = self._asked.popleft()
            try:
                end_line = end()
                self._parts.end_frame()
                end_frame = self._parts.frame(json_of(end_line) + b"\n")
                path = self._ring.write_to(folder, end_frame, self._header)
            except Exception as error:
                logger.warning("schedtrace: no snapshot in {}: {!r}; recording continues", folder, error)
                future.set_exception(error)
            else:
                logger.warning("schedtrace: snapshot of the last seconds in {}", path.parent)
                future.set_result(path)
