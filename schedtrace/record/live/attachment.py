"""Recordings of a running engine: a client's, which may end by itself, brief ones, and those for metrics.

Each exchanges the scheduler's class for the traced class between two steps, and later back (``ClassSwap``);
only one can be active at a time. Slow work is done before, on another thread: the marked copy of
``schedule()``, the header, the file. The engine's thread only notes the requests present and assigns the
class. After the swap back, nothing of schedtrace is on the scheduler or its engine.

Metrics are computed from the lines of the current recording or, if there is none, by a recording without
lines.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from schedtrace.model.live import LONGEST_S
from schedtrace.model.printable import error_text
from schedtrace.model.trace import Exit
from schedtrace.model.trace_bounds import PLAIN, bounds, memory_bounds
from schedtrace.record.disguise import RECORDERS, plain_class, set_class
from schedtrace.record.engine_hooks import unwrap_engine, wrap_engine
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.control_socket import time_in_workers
from schedtrace.record.live.queue_copy import copy_queues
from schedtrace.record.log import logger
from schedtrace.record.metrics.measuring import Meter
from schedtrace.record.recorder import Recorder
from schedtrace.record.settings import Settings, hashes_ids, hides_ids, line_format
from schedtrace.record.switches import NotUnderstoodError
from schedtrace.record.traced import is_traced, prepared_recorder, traced_class
from schedtrace.record.vllms_own import put_on
from schedtrace.record.worker_hooks import unwrap_worker, wrap_worker
from schedtrace.record.written_ids import WrittenIds

_SWAPS: "set[ClassSwap]" = set()
"""Swaps of this process that have not been undone; a process may have several engines."""


class RefusedError(Exception):
    """Error: the request cannot be met, for the reason that the text gives to the user."""


class BegunRecording(NamedTuple):
    """A recording that has begun."""

    path: Path
    """Trace of the recording."""
    present: int
    """Number of requests present."""
    held_us: float
    """Microseconds for which the engine was held up."""


class EndedRecording(NamedTuple):
    """A recording that has ended."""

    path: Path
    """Trace of the recording."""
    held_us: float
    """Microseconds for which the engine was held up."""
    stopped: str | None
    """Reason why the recording had ended before, or is incomplete; None if it is complete."""


class ClassSwap:
    """Scheduler of one engine, prepared to be traced for a while: ``begin``, ``undo``, ``close``.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
        chosen: Settings of the recording.

    Raises:
        RefusedError: If the scheduler cannot be recorded.
    """

    def __init__(self, engine: Any, between_steps: BetweenSteps, chosen: Settings) -> None:
        self._engine, self._between_steps = engine, between_steps
        scheduler = engine.scheduler
        plain: Any = type(scheduler)  # hashable, as every class
        self._plain = plain
        try:
            _SWAPS.add(self)
            _require_class_method(scheduler)
            self._traced = traced_class(plain)
            wrap_engine()
            wrap_worker()
            time_in_workers(on=True)
            self.recorder = prepared_recorder(scheduler, self._traced, chosen, attached=True)
        except Exception as error:
            self._unwrap()
            msg = f"it cannot be recorded: {error_text(error)}"
            raise RefusedError(msg) from error

    def begin(self, timeout_s: float) -> BegunRecording:
        """Give the scheduler the traced class between two steps.

        Raises:
            RefusedError: If the scheduler did not get the class; the swap is then closed.
        """
        scheduler, plain, recorder = self._engine.scheduler, self._plain, self.recorder
        held_us, present = 0.0, 0

        def begin() -> None:
            nonlocal held_us, present
            began_ns = time.perf_counter_ns()
            in_flight = bool(getattr(self._engine, "batch_queue", None))
            copied = copy_queues(scheduler, in_flight=in_flight)
            present = len(copied.running) + recorder.num_waiting(scheduler)
            recorder.note_present(copied)
            if type(scheduler) is not plain:
                msg = f"its scheduler is a {type(scheduler).__name__} now, and was a {plain.__name__}"
                raise RefusedError(msg)
            try:
                RECORDERS.store(scheduler, recorder)
                set_class(scheduler, self._traced)  # the last that can fail
                held_us = (time.perf_counter_ns() - began_ns) / 1000
            except BaseException:
                set_class(scheduler, plain)
                raise

        try:
            self._between_steps.do(begin, timeout_s)
        except Exception as error:
            self.close()
            msg = f"it was not attached to: {error}"
            raise RefusedError(msg) from error
        return BegunRecording(recorder.writer.path, present, held_us)

    def undo(self, timeout_s: float) -> float:
        """Give the scheduler its own class back between two steps; return the microseconds for this.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        scheduler, held_us = self._engine.scheduler, 0.0

        def undo() -> None:
            nonlocal held_us
            began_ns = time.perf_counter_ns()
            self.recorder.active = False
            if type(scheduler) is self._traced:  # else it has given itself another class
                set_class(scheduler, plain_class(self._traced))
            held_us = (time.perf_counter_ns() - began_ns) / 1000

        try:
            self._between_steps.do(undo, timeout_s)
        except Exception as error:
            msg = f"it was not detached: {error}"
            raise RefusedError(msg) from error
        return held_us

    def close(self) -> None:
        """Close the trace, and remove everything that was added to the process."""
        scheduler = self._engine.scheduler
        self.recorder.close()
        if not is_traced(type(scheduler)):
            RECORDERS.drop(scheduler)
            self._unwrap()

    def _unwrap(self) -> None:
        """Remove the hooks unless another engine of this process needs them."""
        _SWAPS.discard(self)
        if not _SWAPS:
            unwrap_engine(self._engine)
            unwrap_worker()
            time_in_workers(on=False)


MOST_WAITED_S = 30.0
"""Maximum seconds to wait for the end of a step; a long prefill may take several on a slow device."""

AGAIN_S = 3.0
"""Seconds before another attempt to end a recording that the engine did not release."""

GLANCE_WAITED_S = 5.0
"""Maximum seconds to wait for the end of a step, at both ends of a brief recording."""
GLANCE_S = 0.3
"""Length of a brief recording in seconds; an engine that schedules nothing calls ``schedule()`` every
millisecond.
"""
GLANCE = memory_bounds("60s")


def _require_class_method(scheduler: Any) -> None:
    """Raise TypeError if calls of ``schedule()`` do not reach the scheduler's class."""
    if put_on(scheduler, "schedule") is not None and "schedule" in vars(scheduler):
        msg = "schedule() is set on the object, not on its class: set SCHEDTRACE_DIR when the server starts"
        raise TypeError(msg)


class Alarm:
    """Timer that can be set again.

    Args:
        lock: Lock to hold while ``ring`` runs.
        ring: Function to call when the time is over, unless the alarm was set again or cancelled.
    """

    def __init__(self, lock: threading.Lock, ring: Callable[[], None]) -> None:
        self._lock, self._ring = lock, ring
        self.timer: threading.Timer | None = None

    def set(self, seconds: float) -> None:
        """Set the alarm to ring after this many seconds."""
        self.timer = threading.Timer(seconds, self._run)
        self.timer.daemon = True
        self.timer.start()

    def cancel(self) -> None:
        """Cancel the alarm."""
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()

    def _run(self) -> None:
        with self._lock:  # who asks meanwhile waits for what there is to say
            if self.timer is threading.current_thread():  # else another has ended it, and may have begun one
                self._ring()


class Attachment:
    """Recordings of one engine that begin and end while it runs.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
    """

    def __init__(self, engine: Any, between_steps: BetweenSteps) -> None:
        self._engine = engine
        self._between_steps = between_steps
        self._lock = threading.Lock()
        self._recording: ClassSwap | None = None
        """Recording that a client began, even if it has given up since."""
        self._glance: ClassSwap | None = None
        """Recording of ``exits_now``, which no client sees."""
        self._metrics: ClassSwap | None = None
        """Recording for the meter alone."""
        self._makes_spans = False
        """Whether the recording for metrics alone makes lines, for spans."""
        self._meter: Meter | None = None
        """Receiver of the totals of every recording; None if metrics are off."""
        self._end_s: float | None = None
        """Monotonic time at which the recording ends by itself."""
        self._alarm = Alarm(self._lock, self._end_by_itself)
        self._ended: EndedRecording | None = None
        """Result of a recording that ended by itself, until a client asks for it."""

    @property
    def recorder(self) -> Recorder | None:
        """Recorder of the scheduler, active or not, whoever began it; None during a brief recording."""
        return None if self._glance is not None else RECORDERS.look_up(self._engine.scheduler)

    @property
    def trace_path(self) -> Path | None:
        """Path of the trace being written, by this attachment or since the engine's start."""
        recorder = self.recorder
        if recorder is None or not recorder.active or not recorder.writer.keeps_lines:
            return None
        return recorder.writer.path

    @property
    def attached(self) -> bool:
        """Whether the scheduler is recorded for a client."""
        return self._recording is not None

    @property
    def left_s(self) -> float | None:
        """Seconds until the recording ends by itself; None if it does not."""
        end_s = self._end_s
        return None if end_s is None else max(0.0, end_s - time.monotonic())

    @property
    def stop_reason(self) -> str | None:
        """Reason why the scheduler's recording ended without a request to end it."""
        recorder = self.recorder
        return None if recorder is None or recorder.active else recorder.writer.incomplete_reason

    @property
    def ids(self) -> WrittenIds:
        """Written form of request ids: the recorder's or, without one, the form in the server's settings."""
        recorder = RECORDERS.look_up(self._engine.scheduler)
        return WrittenIds(hash_ids=hides_ids() if recorder is None else recorder.writer.hash_ids)

    def start_recording(
        self, run_dir: Path, for_s: float | None, *, hash_ids: bool, trace: str = PLAIN
    ) -> BegunRecording:
        """Record from the next step on.

        Args:
            run_dir: Run folder.
            for_s: Seconds after which to detach.
            hash_ids: Whether to write request ids as hashes; the server's settings may also require this.
            trace: Bounds of the trace, as in ``SCHEDTRACE_TRACE``.

        Raises:
            RefusedError: If the scheduler is already recorded, or cannot be recorded.
        """
        if for_s is not None and not 0 <= for_s <= LONGEST_S:
            msg = f"{for_s:g} s is not a time for a recording: at most {LONGEST_S:g} s"
            raise RefusedError(msg)
        with self._lock:
            self._refuse_if_recorded()
            if self._recording is not None or self._glance is not None:
                self._end(MOST_WAITED_S)  # it has given up, or a glance has not ended yet
            chosen = _chosen(run_dir, hash_ids=hash_ids, trace=trace)
            self._end_metrics()
            try:
                self._recording = ClassSwap(self._engine, self._between_steps, chosen)
                self._recording.recorder.writer.measuring.meter = self._meter
                begun = self._recording.begin(MOST_WAITED_S)
            except RefusedError:
                self._recording = None
                self._resume_metrics()
                raise
            rank, self._ended = self._recording.recorder.writer.engine_rank, None
            if for_s is not None:
                self._end_s = time.monotonic() + for_s
                self._alarm.set(for_s)
        logger.info("schedtrace: attached to engine {}: {}", rank, begun.path)
        return begun

    def stop_recording(self) -> EndedRecording:
        """Stop recording.

        Raises:
            RefusedError: If nothing is attached, or the engine does not reach the end of its step.
        """
        with self._lock:
            ended, self._ended = self._ended, None
            if ended is not None:
                return ended
            if self._recording is None:
                path = self.trace_path
                why = f"; it has been recorded since it began, to {path}" if path else ""
                msg = f"nothing is attached to it{why}"
                raise RefusedError(msg)
            rank = self._recording.recorder.writer.engine_rank
            ended = self._end(MOST_WAITED_S)
        logger.info("schedtrace: detached from engine {}: {}", rank, ended.path)
        return ended

    def attach_meter(self, meter: Meter | None) -> float:
        """Send every recording's totals to this receiver; if nothing is recorded, record for it alone.

        Args:
            meter: The receiver; None to switch metrics off.

        Returns:
            Microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine cannot be recorded, or does not reach the end of its step.
        """
        with self._lock:
            if meter is None:
                held_us = self._end_metrics()
                self._meter = None
                if (recorder := self.recorder) is not None:
                    recorder.writer.measuring.meter = None
                return held_us
            if self._glance is not None:
                self._end(GLANCE_WAITED_S)
            held_us = self._begin_metrics(meter)
            self._meter = meter
        return held_us

    def _begin_metrics(self, meter: Meter) -> float:
        """Record for the receiver, unless a recording is active that can; return the hold-up in us."""
        recorder = RECORDERS.look_up(self._engine.scheduler)
        makes_spans = meter.histories is not None
        suits = self._metrics is None or (meter is self._meter and makes_spans == self._makes_spans)
        if recorder is not None and recorder.active and suits:
            recorder.writer.measuring.meter = meter
            return 0.0
        self._end_metrics()  # it has given up, counts for another receiver, or with or without lines
        self._makes_spans = makes_spans
        chosen = Settings(
            Path(), trial_ids=False, hash_ids=hides_ids(), keeps_lines=False, makes_spans=makes_spans
        )
        swap = ClassSwap(self._engine, self._between_steps, chosen)
        swap.recorder.writer.measuring.meter = meter
        held_us = swap.begin(MOST_WAITED_S).held_us
        self._metrics = swap
        return held_us

    def _end_metrics(self) -> float:
        """End a recording for metrics alone; return the microseconds for which the engine was held up."""
        swap = self._metrics
        if swap is None:
            return 0.0
        held_us = swap.undo(MOST_WAITED_S)
        self._metrics = None
        swap.close()
        return held_us

    def _resume_metrics(self) -> None:
        """Record for the meter alone again."""
        if self._meter is None:
            return
        try:
            self._begin_metrics(self._meter)
        except RefusedError as error:
            logger.warning("schedtrace: metrics stand still: {}", error)

    def exits_now(self, *, glance: bool = True) -> list[Exit]:
        """Return the exits of the latest ``schedule()`` call; empty if they cannot be determined.

        If the engine is not recorded, attach to it for a moment, with a trace that stays in memory. The
        causes thus come from vLLM's own conditions and not from another judgement of the scheduler's state.

        Args:
            glance: Whether to attach for a moment if nothing is recorded; this waits for the end of a step.

        Raises:
            RefusedError: If the engine cannot be recorded, or does not reach the end of its step.
        """
        recorder = RECORDERS.look_up(self._engine.scheduler)
        if recorder is not None and recorder.active:
            return list(recorder.writer.latest_exits)
        if not glance:
            return []
        with self._lock:
            if (self._recording, self._glance, self._metrics) != (None, None, None):
                return []  # it has given up, or has not ended
            recorder = self._glance_for(GLANCE_S)
        return list(recorder.writer.latest_exits)

    def _glance_for(self, seconds: float) -> Recorder:
        """Record in memory for a moment; if the engine does not release the recording, end it later."""
        chosen = Settings(Path(), trial_ids=False, hash_ids=hides_ids(), bounds=GLANCE, in_memory=True)
        self._glance = glance = ClassSwap(self._engine, self._between_steps, chosen)
        try:
            glance.begin(GLANCE_WAITED_S)
        except RefusedError:
            self._glance = None
            raise
        time.sleep(seconds)
        try:
            self._end(GLANCE_WAITED_S)
        except RefusedError:
            glance.recorder.active = False
            self._alarm.set(AGAIN_S)
        return glance.recorder

    def _refuse_if_recorded(self) -> None:
        """Raise RefusedError if a trace is being written, or kept in memory."""
        if (path := self.trace_path) is None:
            return
        if RECORDERS[self._engine.scheduler].writer.flight is not None:
            msg = "it keeps its last seconds in memory: schedtrace snapshot writes them"
            raise RefusedError(msg)
        msg = f"it is recorded already, to {path}"
        raise RefusedError(msg)

    def _end(self, timeout_s: float) -> EndedRecording:
        """End the client's or the brief recording; raise RefusedError if the engine does not release it."""
        swap = self._recording or self._glance
        assert swap is not None  # noqa: S101  # callers have seen to that
        held_us = swap.undo(timeout_s)
        self._recording, self._end_s = None, None
        self._alarm.cancel()
        swap.close()
        self._glance = None
        self._resume_metrics()
        return EndedRecording(swap.recorder.writer.path, held_us, swap.recorder.writer.incomplete_reason)

    def _end_by_itself(self) -> None:
        """End the recording whose time is over; try again later if the engine does not release it."""
        glance = self._glance
        try:
            ended = self._end(MOST_WAITED_S)
        except RefusedError:
            self._alarm.set(AGAIN_S)
            return
        if glance is None:
            self._ended = ended
            logger.info("schedtrace: detached by itself: {}", ended.path)


def _chosen(run_dir: Path, *, hash_ids: bool, trace: str) -> Settings:
    """Return the settings of a client's recording; raise RefusedError if the server's are invalid."""
    try:
        return Settings(
            run_dir,
            trial_ids=False,
            hash_ids=hashes_ids() or hash_ids,
            lines=line_format(),
            bounds=bounds(trace),
        )
    except NotUnderstoodError as error:
        msg = f"its server was started with {error}"
        raise RefusedError(msg) from None
