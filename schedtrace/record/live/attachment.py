"""Recordings of a running engine: a client's, which may end by itself, brief ones, and those for metrics.

All exchange the scheduler's class (``class_swap.py``); only one can be active at a time. Metrics are made of
the lines of whatever recording there is; without any, of a recording that keeps no lines.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedtrace.model.live import LONGEST_S
from schedtrace.model.trace import Exit
from schedtrace.model.trace_bounds import PLAIN, bounds, memory_bounds
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.class_swap import BegunRecording, ClassSwap, EndedRecording, RefusedError
from schedtrace.record.log import logger
from schedtrace.record.metrics.measuring import Meter
from schedtrace.record.recorder import Recorder
from schedtrace.record.settings import NotUnderstoodError, Settings, hashes_ids, hides_ids, line_format
from schedtrace.record.step_lines import WrittenIds

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
        return None if self._glance is not None else RECORDERS.get(self._engine.scheduler)

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
        recorder = RECORDERS.get(self._engine.scheduler)
        return WrittenIds(hash_ids=hides_ids() if recorder is None else recorder.writer.hash_ids)

    def attach(
        self, run_dir: Path, for_s: float | None, *, hash_ids: bool, trace: str = PLAIN
    ) -> BegunRecording:
        """Record from the next step on.

        Args:
            run_dir: Run folder.
            for_s: Seconds after which to detach.
            hash_ids: Whether to write request ids as hashes; the server's settings may also require this.
            trace: How much of the trace to keep.

        Raises:
            RefusedError: If the scheduler is already recorded, or cannot be recorded.
        """
        if for_s is not None and not 0 <= for_s <= LONGEST_S:
            msg = f"{for_s:g} s is no time to record for: at most {LONGEST_S:g} s"
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

    def detach(self) -> EndedRecording:
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

    def measure(self, meter: Meter | None) -> float:
        """Have every recording's totals go to this receiver; record for it alone if there is none.

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
        recorder = RECORDERS.get(self._engine.scheduler)
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
        recorder = RECORDERS.get(self._engine.scheduler)
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
