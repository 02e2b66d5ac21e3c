"""Recordings of a running engine: a client's recording, brief ones, and one for metrics alone.

Only one recording can be active at a time, because each exchanges the scheduler's class (``class_swap.py``).
A client's recording ends the others; until it ends, metrics are computed from its lines.
"""

import threading
from pathlib import Path
from typing import Any

from schedtrace.model.live import LONGEST_S, Attached, Detached
from schedtrace.model.trace import Exit
from schedtrace.model.trace_bounds import PLAIN
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.brief_recording import BRIEFLY_WAITED_S, BriefRecording
from schedtrace.record.live.class_swap import MOST_WAITED_S, RefusedError
from schedtrace.record.live.client_recording import ClientRecording, client_settings
from schedtrace.record.live.metrics_recording import MetricsRecording
from schedtrace.record.metrics.measuring import Meter
from schedtrace.record.recorder import Recorder
from schedtrace.record.settings import hides_ids
from schedtrace.record.written_ids import WrittenIds


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
        """Seconds until the client's recording ends by itself; None if it has no such limit."""
        return self._client.remaining_s

    @property
    def stop_reason(self) -> str | None:
        """Reason why the scheduler's recording ended although nobody ended it."""
        recorder = self.recorder
        return None if recorder is None or recorder.active else recorder.writer.incomplete_reason

    @property
    def ids(self) -> WrittenIds:
        """Written form of request ids: the recorder's or, without one, the form in the server's settings."""
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
            self._refuse_if_recorded()
            if self._client.swap is not None:
                self._client.end_swap(self._client.swap)  # it has given up
            self._brief.give_way(MOST_WAITED_S)
            chosen = client_settings(run_dir, hash_ids=hash_ids, trace=trace)
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
            self._brief.give_way(BRIEFLY_WAITED_S)
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

    def _refuse_if_recorded(self) -> None:
        """Raise RefusedError if a trace is being written, or kept in memory."""
        if (path := self.trace_path) is None:
            return
        if RECORDERS[self._engine.scheduler].writer.flight is not None:
            msg = "it keeps its last seconds in memory: schedtrace snapshot writes them"
            raise RefusedError(msg)
        msg = f"it is recorded already, to {path}"
        raise RefusedError(msg)
