"""Records an engine that runs, and lets it go again: its scheduler gets another class between two steps.

All that takes long is done before, beside the engine: the marked copy of ``schedule()``, the header, the
file. What is left for the engine's thread is to note who is there and to assign the class. Afterwards nothing
of schedtrace is on the scheduler or its engine.
"""

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from schedtrace.model.live import LONGEST_S
from schedtrace.model.printable import described
from schedtrace.model.trace import Exit
from schedtrace.model.trace_bounds import PLAIN, bounds, memory_bounds
from schedtrace.record.between_steps import BetweenSteps
from schedtrace.record.control_socket import time_in_workers
from schedtrace.record.disguise import RECORDERS, plain_class, set_class
from schedtrace.record.engine_hooks import unwrap_engine, wrap_engine
from schedtrace.record.log import logger
from schedtrace.record.queue_copy import copy_queues
from schedtrace.record.recorder import Recorder
from schedtrace.record.settings import NotUnderstoodError, Settings, hashes_ids, hides_ids, lines
from schedtrace.record.step_lines import WrittenIds
from schedtrace.record.traced import prepared_recorder, records, traced_class
from schedtrace.record.vllms_own import put_on
from schedtrace.record.worker_hooks import unwrap_worker, wrap_worker

MOST_WAITED_S = 30.0
"""For the end of the step that runs: a prefill of a long prompt on a slow device may take seconds."""

AGAIN_S = 3.0
"""Until a recording whose time is over is tried to be ended again, after an engine did not let it go."""

GLANCE_WAITED_S = 5.0
"""For the end of a step, at both ends of a glance."""
GLANCE_S = 0.3
"""An engine that schedules nothing calls ``schedule()`` about once a millisecond."""
GLANCE = memory_bounds("60s")

_ATTACHED: "set[Attachment]" = set()
"""Of this process, where a caller may have several engines."""


class RefusedError(Exception):
    """What was asked for cannot be done; the text says why, for a person."""


class Ended(NamedTuple):
    """An attached recording that has ended."""

    path: Path
    held_us: float
    """Time for which the engine was held up."""
    stopped: str | None
    """Why it had ended before, or is not whole; None: it is."""


class Attachment:
    """One engine's recording that comes and goes.

    Args:
        engine: vLLM's ``EngineCore``.
        between_steps: The way to its thread.
    """

    def __init__(self, engine: Any, between_steps: BetweenSteps) -> None:
        self._engine = engine
        self._between_steps = between_steps
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._traced: type | None = None
        """The class that the scheduler has meanwhile."""
        self._ended: Ended | None = None
        """What the last recording that ended by itself has to say, until somebody asks."""
        self._end_s: float | None = None
        self._timer: threading.Timer | None = None
        self._glances = False
        """What records is of ``latest_exits``, and nobody else's business."""

    @property
    def recorder(self) -> Recorder | None:
        """The scheduler's, active or not, whoever began it; None while only a glance records."""
        return None if self._glances else RECORDERS.get(self._engine.scheduler)

    @property
    def trace(self) -> Path | None:
        """What is written now, by this attachment or since the engine's start."""
        recorder = self.recorder
        return recorder.writer.path if recorder is not None and recorder.active else None

    @property
    def attached(self) -> bool:
        """Whether this is what records."""
        return self._recorder is not None and not self._glances

    @property
    def left_s(self) -> float | None:
        """Until it ends by itself."""
        end_s = self._end_s
        return None if end_s is None else max(0.0, end_s - time.monotonic())

    def attach(
        self, run_dir: Path, for_s: float | None, *, hash_ids: bool, trace: str = PLAIN
    ) -> tuple[Path, int, float]:
        """Record from the next step on.

        Args:
            run_dir: The run folder.
            for_s: Detach after so many seconds.
            hash_ids: Write request ids as hashes, which the server may ask for as well.
            trace: How much is kept.

        Returns:
            The trace, how many requests were there, and for how many microseconds the engine was held up.

        Raises:
            RefusedError: it is recorded already, or cannot be.
        """
        if for_s is not None and not 0 <= for_s <= LONGEST_S:
            msg = f"{for_s:g} s is no time to record for: at most {LONGEST_S:g} s"
            raise RefusedError(msg)
        with self._lock:
            if (path := self.trace) is not None:
                if RECORDERS[self._engine.scheduler].writer.flight is not None:
                    msg = "it keeps its last seconds in memory: schedtrace snapshot writes them"
                    raise RefusedError(msg)
                msg = f"it is recorded already, to {path}"
                raise RefusedError(msg)
            if self._recorder is not None:  # it has given up, or a glance has not ended yet
                self._end(MOST_WAITED_S)
            try:
                chosen = Settings(
                    run_dir,
                    trial_ids=False,
                    hash_ids=hashes_ids() or hash_ids,
                    lines=lines(),
                    bounds=bounds(trace),
                )
            except NotUnderstoodError as error:
                msg = f"its server was started with {error}"
                raise RefusedError(msg) from None
            held, recorder, present = self._begin(chosen, MOST_WAITED_S)
            self._ended = None
            if for_s is not None:
                self._end_s = time.monotonic() + for_s
                self._end_after(for_s)
        logger.info(
            "schedtrace: attached to engine {}: {}", recorder.writer.engine_rank, recorder.writer.path
        )
        return recorder.writer.path, present, held

    def _begin(self, chosen: Settings, most_s: float) -> tuple[float, Recorder, int]:
        scheduler = self._engine.scheduler
        plain: Any = type(scheduler)  # hashable, as every class
        try:
            _ATTACHED.add(self)
            _require_class_method(scheduler)
            traced = traced_class(plain)
            wrap_engine()
            wrap_worker()
            time_in_workers(on=True)
            recorder = prepared_recorder(scheduler, traced, chosen, attached=True)
        except Exception as error:
            self._unwrap()
            msg = f"it cannot be recorded: {described(error)}"
            raise RefusedError(msg) from error
        held_us, present = 0.0, 0

        def begin() -> None:
            nonlocal held_us, present
            began_ns = time.perf_counter_ns()
            in_flight = bool(getattr(self._engine, "batch_queue", None))
            found = copy_queues(scheduler, in_flight=in_flight)
            present = len(found.running) + recorder.num_waiting(scheduler)
            recorder.note_present(found)
            if type(scheduler) is not plain:
                msg = f"its scheduler is a {type(scheduler).__name__} now, and was a {plain.__name__}"
                raise RefusedError(msg)
            try:
                RECORDERS.put(scheduler, recorder)
                set_class(scheduler, traced)  # the last that can fail
                held_us = (time.perf_counter_ns() - began_ns) / 1000
            except BaseException:
                set_class(scheduler, plain)
                raise

        self._recorder, self._traced, self._glances = recorder, traced, chosen.in_memory
        try:
            self._between_steps.do(begin, most_s)
        except Exception as error:
            self._release()
            msg = f"it was not attached to: {error}"
            raise RefusedError(msg) from error
        return held_us, recorder, present

    @property
    def stopped(self) -> str | None:
        """Why the scheduler's recording ended though nobody has ended it."""
        recorder = self.recorder
        return None if recorder is None or recorder.active else recorder.writer.stopped

    def detach(self) -> Ended:
        """Record no more.

        Raises:
            RefusedError: nothing is attached, or the engine does not come to the end of its step.
        """
        with self._lock:
            ended, self._ended = self._ended, None
            if ended is not None:
                return ended
            if self._recorder is None or self._glances:
                path = self.trace
                why = f"; it has been recorded since it began, to {path}" if path else ""
                msg = f"nothing is attached to it{why}"
                raise RefusedError(msg)
            recorder = self._recorder
            ended = self._end(MOST_WAITED_S)
        logger.info("schedtrace: detached from engine {}: {}", recorder.writer.engine_rank, ended.path)
        return ended

    @property
    def ids(self) -> WrittenIds:
        """Request ids as the recorder writes them; where there is none, as the server asks for."""
        recorder = RECORDERS.get(self._engine.scheduler)
        return WrittenIds(hash_ids=hides_ids() if recorder is None else recorder.writer.hash_ids)

    def latest_exits(self, *, glance: bool = True) -> list[Exit]:
        """Why the latest call of ``schedule()`` scheduled no more; empty: it cannot be known.

        An engine that nobody records is attached to for a moment, with a trace that stays in memory: so the
        causes come from vLLM's own conditions, and need no second opinion about the scheduler's state.

        Args:
            glance: Attach for a moment where nobody records, which waits for the end of a step.

        Raises:
            RefusedError: it cannot be recorded, or is within one step.
        """
        recorder = RECORDERS.get(self._engine.scheduler)
        if recorder is not None and recorder.active:
            return list(recorder.writer.latest_exits)
        if not glance:
            return []
        with self._lock:
            if self._recorder is not None:  # it has given up, and is not detached yet
                return []
            chosen = Settings(Path(), trial_ids=False, hash_ids=hides_ids(), bounds=GLANCE, in_memory=True)
            _, recorder, _ = self._begin(chosen, GLANCE_WAITED_S)
            time.sleep(GLANCE_S)
            try:
                self._end(GLANCE_WAITED_S)
            except RefusedError:
                recorder.active = False
                self._end_after(AGAIN_S)
        return list(recorder.writer.latest_exits)

    def _end(self, most_s: float) -> Ended:
        recorder, traced, scheduler = self._recorder, self._traced, self._engine.scheduler
        assert recorder is not None  # noqa: S101  # who calls has seen to that
        held_us = 0.0

        def end() -> None:
            nonlocal held_us
            began_ns = time.perf_counter_ns()
            recorder.active = False
            if type(scheduler) is traced:  # else it has given itself another class
                set_class(scheduler, plain_class(traced))
            held_us = (time.perf_counter_ns() - began_ns) / 1000

        try:
            self._between_steps.do(end, most_s)
        except Exception as error:
            msg = f"it was not detached: {error}"
            raise RefusedError(msg) from error
        self._release()
        return Ended(recorder.writer.path, held_us, recorder.writer.stopped)

    def _release(self) -> None:
        """Close the trace, and take all away that was put in."""
        recorder, scheduler = self._recorder, self._engine.scheduler
        self._recorder, self._traced, self._end_s = None, None, None
        timer, self._timer = self._timer, None
        if timer is not None and timer is not threading.current_thread():
            timer.cancel()
        if recorder is not None:
            recorder.close()
        if not records(type(scheduler)):
            RECORDERS.drop(scheduler)
            self._unwrap()
        self._glances = False

    def _unwrap(self) -> None:
        """Unless another engine of this process is attached to."""
        _ATTACHED.discard(self)
        if not _ATTACHED:
            unwrap_engine(self._engine)
            unwrap_worker()
            time_in_workers(on=False)

    def _end_after(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._time_is_over)
        self._timer.daemon = True
        self._timer.start()

    def _time_is_over(self) -> None:
        with self._lock:  # who asks meanwhile waits for what there is to say
            if self._timer is not threading.current_thread():  # another has ended it, and may have begun one
                return
            glances = self._glances
            try:
                ended = self._end(MOST_WAITED_S)
            except RefusedError:
                self._end_after(AGAIN_S)
                return
            if not glances:
                self._ended = ended
                logger.info("schedtrace: detached by itself: {}", ended.path)


def _require_class_method(scheduler: Any) -> None:
    """Raise TypeError where calls of ``schedule()`` do not come to the scheduler's class."""
    if put_on(scheduler, "schedule") is not None and "schedule" in vars(scheduler):
        msg = "schedule() was put on the scheduler itself, past its class: set SCHEDTRACE_DIR at its start"
        raise TypeError(msg)
