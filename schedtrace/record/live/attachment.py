"""Recordings of a running engine: a client's recording, brief ones, and one for metrics alone.

Only one recording can be active at a time, because each exchanges the scheduler's class (``class_swap.py``).
A client's recording ends the others; while it lasts, metrics are computed from its lines.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedtrace.model.live import LONGEST_S, Attached, Detached
from schedtrace.model.trace import Exit
from schedtrace.model.trace_bounds import PLAIN, bounds, memory_bounds
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.class_swap import AGAIN_S, MOST_WAITED_S, Alarm, ClassSwap, RefusedError
from schedtrace.record.log import logger
from schedtrace.record.metrics.measuring import Meter
from schedtrace.record.recorder import Recorder
from schedtrace.record.settings import Settings, hashes_ids, hides_ids, line_format
from schedtrace.record.switches import NotUnderstoodError
from schedtrace.record.written_ids import WrittenIds

BRIEFLY_WAITED_S = 5.0
"""Maximum seconds to wait for the end of a step, when a brief recording begins and when it ends."""
LENGTH_S = 0.3
"""Length of a brief recording in seconds; enough, because an engine that schedules nothing calls
``schedule()`` every millisecond.
"""
BRIEF_BOUNDS = memory_bounds("60s")


class Recording:
    """Recording of one engine; its alarm ends it unless something else has ended it.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
        lock: Lock that the caller of any method must hold.
        released: Function to call when the engine is no longer recorded.
    """

    def __init__(
        self, engine: Any, between_steps: BetweenSteps, lock: threading.Lock, released: Callable[[], None]
    ) -> None:
        self._engine, self._between_steps, self._released = engine, between_steps, released
        self.swap: ClassSwap | None = None
        """Class swap of the recording, until it is completely undone; None without a recording."""
        self.alarm = Alarm(lock, self.end_by_itself)

    def end_recording(self, timeout_s: float) -> float:
        """End the recording if there is one; return the microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        if self.swap is None:
            return 0.0
        held_us = self.swap.undo(timeout_s)
        self.alarm.cancel()
        self.swap = None
        self._released()
        return held_us

    def end_by_itself(self) -> None:
        """End the recording because its time is over."""
        self.end_recording(MOST_WAITED_S)


class BriefRecording(Recording):
    """Brief recording in memory, which finds the exits of an engine that is not being recorded.

    The recording has normally ended when ``exits_of_a_step`` returns. If the engine does not release the
    recording in time, the recording becomes inactive, and its alarm ends it later.
    """

    def exits_of_a_step(self) -> list[Exit]:
        """Record in memory for a moment; return the exits of the latest ``schedule()`` call.

        Raises:
            RefusedError: If the engine cannot be recorded, or does not reach the end of its step.
        """
        chosen = Settings(Path(), trial_ids=False, hash_ids=hides_ids(), bounds=BRIEF_BOUNDS, in_memory=True)
        self.swap = swap = ClassSwap(self._engine, self._between_steps, chosen)
        try:
            swap.begin(BRIEFLY_WAITED_S)
        except RefusedError:
            self.swap = None
            raise
        time.sleep(LENGTH_S)
        try:
            self.end_recording(BRIEFLY_WAITED_S)
        except RefusedError:
            swap.recorder.active = False
            self.alarm.set(AGAIN_S)
        return list(swap.recorder.writer.latest_exits)


class ClientRecording(Recording):
    """Recording that a client begins, and that the client or the alarm ends.

    It is in one of four states: absent; active; inactive but still to be ended, because it has given up or
    the engine has not released it; ended by itself, with a result that is kept until the client asks for it.
    """

    result: Detached | None = None
    """Result of a recording that ended by itself, until a client asks for it."""
    _end_s: float | None = None
    """Monotonic time at which the latest recording ends by itself."""

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the recording ends by itself; None without a recording, or without such a limit."""
        end_s = self._end_s
        return None if self.swap is None or end_s is None else max(0.0, end_s - time.monotonic())

    def begin(self, chosen: Settings, for_s: float | None, meter: Meter | None) -> Attached:
        """Record from the next step on.

        Args:
            chosen: Settings of the recording.
            for_s: Seconds after which the recording ends by itself.
            meter: Receiver of the recording's totals.

        Raises:
            RefusedError: If the engine cannot be recorded.
        """
        self._end_s = None
        try:
            self.swap = ClassSwap(self._engine, self._between_steps, chosen)
            self.swap.recorder.writer.measuring.meter = meter
            begun = self.swap.begin(MOST_WAITED_S)
        except RefusedError:
            self.swap = None
            self._released()
            raise
        self.result = None
        if for_s is not None:
            self._end_s = time.monotonic() + for_s
            self.alarm.set(for_s)
        rank = self.swap.recorder.writer.engine_rank
        logger.info("schedtrace: attached to engine {}: {}", rank, begun.path)
        return begun

    def end_for_client(self) -> Detached | None:
        """End the recording, or return the result of one that ended by itself; None if neither exists.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        ended, self.result = self.result, None
        if ended is not None or self.swap is None:
            return ended
        rank = self.swap.recorder.writer.engine_rank
        ended = self._end_swap(self.swap)
        logger.info("schedtrace: detached from engine {}: {}", rank, ended.path)
        return ended

    def end_by_itself(self) -> None:
        """End the recording because its time is over, and keep the result for the client."""
        if self.swap is not None:
            self.result = self._end_swap(self.swap)
            logger.info("schedtrace: detached by itself: {}", self.result.path)

    def _end_swap(self, swap: ClassSwap) -> Detached:
        held_us = self.end_recording(MOST_WAITED_S)
        writer = swap.recorder.writer
        return Detached(path=str(writer.path), held_us=held_us, stopped=writer.incomplete_reason)


class MetricsRecording:
    """Recording of one engine for metrics alone, in which a recorder only counts, and writes nothing.

    Metrics are in one of three states: off, without a receiver; counted by another recording, which has the
    receiver; counted by a recording for metrics alone, which ends before a client's recording begins and
    resumes after it.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
    """

    def __init__(self, engine: Any, between_steps: BetweenSteps) -> None:
        self._engine, self._between_steps = engine, between_steps
        self.meter: Meter | None = None
        """Receiver of the totals of every recording; None if metrics are off."""
        self.swap: ClassSwap | None = None
        """Class swap of the recording for metrics alone; None without such a recording."""
        self._makes_spans = False
        """Whether that recording makes lines, which spans need."""

    def switch_on(self, meter: Meter) -> float:
        """Send the totals to a receiver; return the microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine cannot be recorded, or does not reach the end of its step.
        """
        held_us = self._begin(meter)
        self.meter = meter
        return held_us

    def switch_off(self) -> float:
        """Stop counting; return the microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        held_us = self.pause_metering()
        self.meter = None
        if (recorder := RECORDERS.look_up(self._engine.scheduler)) is not None:
            recorder.writer.measuring.meter = None
        return held_us

    def pause_metering(self) -> float:
        """End the recording for metrics alone; return the microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine does not reach the end of its step.
        """
        held_us = 0.0 if self.swap is None else self.swap.undo(MOST_WAITED_S)
        self.swap = None
        return held_us

    def resume_metering(self) -> None:
        """Count again after another recording has ended; never raise an error."""
        if self.meter is None:
            return
        try:
            self._begin(self.meter)
        except RefusedError as error:
            logger.warning("schedtrace: metrics stand still: {}", error)

    def _begin(self, meter: Meter) -> float:
        """Record for the receiver unless an active recording serves it; return the delay in microseconds."""
        recorder = RECORDERS.look_up(self._engine.scheduler)
        makes_spans = meter.histories is not None
        suits = self.swap is None or (meter is self.meter and makes_spans == self._makes_spans)
        if recorder is not None and recorder.active and suits:
            recorder.writer.measuring.meter = meter
            return 0.0
        self.pause_metering()  # it has given up, counts for another receiver, or with or without lines
        self._makes_spans = makes_spans
        chosen = Settings(
            Path(), trial_ids=False, hash_ids=hides_ids(), keeps_lines=False, makes_spans=makes_spans
        )
        swap = ClassSwap(self._engine, self._between_steps, chosen)
        swap.recorder.writer.measuring.meter = meter
        held_us = swap.begin(MOST_WAITED_S).held_us
        self.swap = swap
        return held_us


class Attachment:
    """Recordings of one engine that begin and end while the engine runs.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: Access to the engine's thread.
    """

    def __init__(self, engine: Any, between_steps: BetweenSteps) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        """Lock that is held while a recording begins or ends."""
        self._metrics = MetricsRecording(engine, between_steps)
        self._client = ClientRecording(engine, between_steps, self._lock, self._metrics.resume_metering)
        self._brief = BriefRecording(engine, between_steps, self._lock, self._metrics.resume_metering)

    @property
    def recorder(self) -> Recorder | None:
        """Recorder of the scheduler, even if it is inactive; None during a brief recording."""
        return None if self._brief.swap is not None else RECORDERS.look_up(self._engine.scheduler)

    @property
    def trace_path(self) -> Path | None:
        """Path of the trace being written, whether by an attachment or since the engine's start."""
        recorder = self.recorder
        if recorder is None or not recorder.active or not recorder.writer.keeps_lines:
            return None
        return recorder.writer.path

    @property
    def attached(self) -> bool:
        """Whether the scheduler is recorded for a client."""
        return self._client.swap is not None

    @property
    def left_s(self) -> float | None:
        """Seconds until the client's recording ends by itself; None if there is none, or no such limit."""
        return self._client.remaining_s

    @property
    def stop_reason(self) -> str | None:
        """Reason why the scheduler's recording ended although nobody ended it."""
        recorder = self.recorder
        return None if recorder is None or recorder.active else recorder.writer.incomplete_reason

    @property
    def ids(self) -> WrittenIds:
        """Written form of request ids: that of the recorder or, without one, of the server's settings."""
        recorder = RECORDERS.look_up(self._engine.scheduler)
        return WrittenIds(hash_ids=hides_ids() if recorder is None else recorder.writer.hash_ids)

    def start_recording(
        self, run_dir: Path, for_s: float | None, *, hash_ids: bool, trace: str = PLAIN
    ) -> Attached:
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
            if (path := self.trace_path) is not None:
                msg = f"it is recorded already, to {path}"
                if RECORDERS[self._engine.scheduler].writer.flight is not None:
                    msg = "it keeps its last seconds in memory: schedtrace snapshot writes them"
                raise RefusedError(msg)
            self._client.end_recording(MOST_WAITED_S)  # it has given up
            self._brief.end_recording(MOST_WAITED_S)
            try:
                chosen = Settings(
                    run_dir,
                    trial_ids=False,
                    hash_ids=hashes_ids() or hash_ids,
                    lines=line_format(),
                    bounds=bounds(trace),
                )
            except NotUnderstoodError as error:
                msg = f"its server was started with {error}"
                raise RefusedError(msg) from None
            self._metrics.pause_metering()
            return self._client.begin(chosen, for_s, self._metrics.meter)

    def stop_recording(self) -> Detached:
        """Stop the recording of a client.

        Raises:
            RefusedError: If nothing is attached, or the engine does not reach the end of its step.
        """
        with self._lock:
            ended = self._client.end_for_client()
            if ended is None:
                path = self.trace_path
                why = f"; it has been recorded since it began, to {path}" if path else ""
                msg = f"nothing is attached to it{why}"
                raise RefusedError(msg)
            return ended

    def attach_meter(self, meter: Meter | None) -> float:
        """Send every recording's totals to this receiver; without a recording, begin one for it.

        Args:
            meter: The receiver; None to switch metrics off.

        Returns:
            Microseconds for which the engine was held up.

        Raises:
            RefusedError: If the engine cannot be recorded, or does not reach the end of its step.
        """
        with self._lock:
            if meter is None:
                return self._metrics.switch_off()
            self._brief.end_recording(BRIEFLY_WAITED_S)
            return self._metrics.switch_on(meter)

    def exits_now(self, *, glance: bool = True) -> list[Exit]:
        """Return the exits of the latest ``schedule()`` call; empty if they cannot be determined.

        If the engine is not recorded, attach to it for a moment, with a trace that stays in memory. The
        causes therefore come from vLLM's own conditions, not from an inference.

        Args:
            glance: Whether to attach for a moment if nothing is recorded, which requires waiting for the end
                of a step.

        Raises:
            RefusedError: If the engine cannot be recorded, or does not reach the end of its step.
        """
        recorder = RECORDERS.look_up(self._engine.scheduler)
        if recorder is not None and recorder.active:
            return list(recorder.writer.latest_exits)
        if not glance:
            return []
        with self._lock:
            if any(recording.swap is not None for recording in (self._client, self._brief, self._metrics)):
                return []  # it has given up, or has not ended
            return self._brief.exits_of_a_step()
