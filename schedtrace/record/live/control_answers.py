"""Answers of engines and workers to clients that connect to their sockets."""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedtrace.model.live import (
    AnyAnswer,
    AnyAsk,
    AskAttach,
    AskDetach,
    AskMeasure,
    AskQueue,
    AskSnapshot,
    AskStacks,
    AskStatus,
    AskTimes,
    Done,
    Measured,
    QueueNow,
    Refused,
    Snapshot,
    SquattedError,
    Stacks,
    Status,
)
from schedtrace.model.printable import error_text
from schedtrace.model.trace import Exit
from schedtrace.model.trace_facts import Stalled
from schedtrace.record.allocation import free_blocks, held_blocks
from schedtrace.record.header import data_parallel_rank
from schedtrace.record.hooks import Method
from schedtrace.record.live.attachment import Attachment
from schedtrace.record.live.between_steps import BetweenSteps
from schedtrace.record.live.class_swap import RefusedError
from schedtrace.record.live.control_socket import ControlSocket
from schedtrace.record.live.flight_recorder import WAIT_S, FlightRecorder
from schedtrace.record.live.queue_copy import queue_now
from schedtrace.record.live.stall_causes import paused, stacks_here
from schedtrace.record.live.watchdog import HELD_UP, explains, make_watchdog
from schedtrace.record.log import logger
from schedtrace.record.metrics.measuring import EngineFacts
from schedtrace.record.plugin import ENGINE_LOOP, LOOPS
from schedtrace.record.processes import front_end_ended
from schedtrace.record.queues import Queues, num_in_input_queue, policy
from schedtrace.record.switches import (
    KEEP,
    METRICS,
    SWITCH,
    NotUnderstoodError,
    environment_value,
    is_switched_off,
)
from schedtrace.record.vllms_own import vllm_version
from schedtrace.record.worker_hooks import unwrap_worker, wrap_worker
from schedtrace.version import __version__

if TYPE_CHECKING:
    from schedtrace.record.metrics.engine_meter import EngineMeter

_forever = ExitStack()
"""Socket of a process that began to listen on request; it closes when the process ends."""
_listens = False
"""Whether this process has such a socket."""
_in_loop: dict[int, "_Engine"] = {}
"""Engines whose loop runs in this process, each with one watchdog, by the id of vLLM's ``EngineCore``."""
_made_once = threading.Lock()


def listen_from_now_on() -> None:
    """Start listening in an engine or worker whose loop began without schedtrace.

    This may take a long time, so a separate thread calls it (``engine/unprepared.py``). If several clients
    attach at the same time, each calls it.
    """
    global _listens  # noqa: PLW0603  # of the process, as its main thread is
    with _made_once:
        if _listens:
            return
        if is_switched_off():
            logger.warning("schedtrace: process {} was started with {}=off", os.getpid(), SWITCH)
            return
        main = threading.main_thread().ident or 0
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code.co_name not in LOOPS:
            frame = frame.f_back
        if frame is None:
            logger.warning("schedtrace: process {} is in no loop of an engine or worker of vLLM", os.getpid())
            return
        loop = frame.f_locals["self"]
        if frame.f_code.co_name != ENGINE_LOOP:
            listening = _listening(partial(worker_answer, loop))
        elif (engine := _in_loop.get(id(loop))) is None:
            listening = _Engine(loop, main).answering()
        else:  # no socket could be made when the loop began: another user owned the folder, for example
            listening = _listening(engine.answer)
        _listens = _forever.enter_context(listening)


def engine_loop(original: Method, core: Any, *args: object, **kwargs: object) -> Any:
    """Run an engine's loop, and answer clients while it runs."""
    engine = _Engine(core, threading.get_ident())
    with engine.answering():
        try:
            return original(core, *args, **kwargs)
        except BaseException as error:
            engine.ends(type(error).__name__)
            raise


def worker_loop(original: Method, worker: Any, *args: object, **kwargs: object) -> Any:
    """Run a worker's loop, and answer clients while it runs."""
    with _listening(partial(worker_answer, worker)):
        return original(worker, *args, **kwargs)


@contextmanager
def _listening(answer: Callable[[AnyAsk], AnyAnswer]) -> Iterator[bool]:
    """Answer clients in a context; yield whether this process has a socket for them."""
    listener = None
    try:
        listener = ControlSocket(answer)
    except SquattedError as error:
        logger.warning("schedtrace: nobody can attach to process {}: {}", os.getpid(), error)
    except Exception as error:
        logger.trace("schedtrace: nobody can attach to process {}: {!r}", os.getpid(), error)
    try:
        yield listener is not None
    finally:
        if listener is not None:
            listener.close()


class _Engine:
    """Process of an engine, as its clients see it.

    Args:
        core: vLLM's ``EngineCore``.
        thread: Thread that runs the engine's loop.
    """

    def __init__(self, core: Any, thread: int) -> None:
        self._core = core
        self._between_steps = BetweenSteps(core)
        self._attachment = Attachment(core, self._between_steps)
        attached = self._attachment
        causes = partial(attached.exits_now, glance=explains())
        self._watchdog = make_watchdog(
            core, thread, causes, self._snapshot_at, ids=lambda: attached.ids, note=self._note_stall
        )
        self._metrics: EngineMeter | None = None
        self._measures = False
        """Whether metrics are on."""

    @contextmanager
    def answering(self) -> Iterator[bool]:
        """Answer clients while the engine's loop runs under its watchdog; yield whether there is a socket."""
        _in_loop[id(self._core)] = self
        if environment_value(METRICS):
            threading.Thread(
                target=self._measure_from_the_start, name="schedtrace-begin", daemon=True
            ).start()
        try:
            with _listening(self.answer) as listens:
                yield listens
        finally:
            del _in_loop[id(self._core)]
            if self._watchdog is not None:
                self._watchdog.close()
            if self._metrics is not None:
                self._metrics.close()

    def ends(self, why: str) -> None:
        """Record that an exception ends the engine's loop; ``SystemExit`` is vLLM's way to shut down."""
        with suppress(Exception):
            if self._flight is not None:
                self._flight.snapshot_event(f"engine ended {why}", always=True)

    def answer(self, ask: AnyAsk) -> AnyAnswer:
        """Return the answer to a question.

        Raises:
            RefusedError: If the engine cannot be attached to or detached from.
        """
        answer: AnyAnswer
        match ask:
            case AskStatus():
                answer = self._status()
            case AskAttach():
                self._refuse_if_held_up()
                answer = self._attachment.start_recording(
                    Path(ask.run_dir), ask.for_s, hash_ids=ask.hash_ids, trace=ask.trace
                )
            case AskDetach():
                answer = self._attachment.stop_recording()
            case AskMeasure():
                answer = self._measure(ask.address)
            case AskQueue():
                answer = self._queue(glance=ask.glance)
            case AskSnapshot():
                answer = self._snapshot(Path(ask.run_dir))
            case _:
                answer = Refused(why="an engine is not asked this")
        return answer

    @property
    def _flight(self) -> FlightRecorder | None:
        recorder = self._attachment.recorder
        return None if recorder is None else recorder.writer.flight

    def _snapshot_at(self, reason: str) -> str:
        flight = self._flight
        return "" if flight is None else flight.snapshot_event(f"stall {reason}")

    def _note_stall(self, seen: Stalled) -> None:
        """Write a stall into the current trace."""
        recorder = self._attachment.recorder
        if recorder is not None and recorder.active:
            recorder.writer.put_stall(seen)

    def _facts(self) -> EngineFacts:
        """Return the facts that metrics contain in addition to steps."""
        watchdog, progress_s = self._watchdog, None
        stall = None if watchdog is None else watchdog.stall
        if watchdog is not None and watchdog.progress_age_s is not None:
            progress_s = time.time() - watchdog.progress_age_s
        return EngineFacts(
            stall_kind=None if stall is None else stall.kind,
            progress_unix_s=progress_s,
            kv_blocks=_blocks_by_holder(self._core.scheduler),
        )

    def _refuse_if_held_up(self) -> None:
        """Raise RefusedError at once if the watchdog has found that no step will end soon."""
        watchdog = self._watchdog
        stall = None if watchdog is None else watchdog.stall
        if watchdog is not None and stall is not None and stall.kind in HELD_UP:
            since = f"no step has made progress for {watchdog.stalled_s:,.0f} s"
            msg = f"it was not attached to: {since}: {stall.sentence}"
            raise RefusedError(msg)

    def _queue(self, *, glance: bool) -> QueueNow:
        def current_exits(*, wait: bool) -> list[Exit]:
            with suppress(Exception):  # then nobody knows
                has_requests = bool(self._core.scheduler.requests)
                return self._attachment.exits_now(glance=wait and glance and has_requests)
            return []

        return QueueNow(queue=queue_now(self._core, self._between_steps, current_exits, self._attachment.ids))

    def _measure_from_the_start(self) -> None:
        """Switch metrics on if the environment says so; never raise."""
        try:
            answer = self._measure(environment_value(METRICS))
            if answer.where is not None:
                logger.info("schedtrace: metrics of this engine appear on {}", answer.where)
        except Exception as error:
            logger.warning("schedtrace: no metrics: {}", error_text(error))

    def _measure(self, wanted: str) -> Measured:
        """Switch metrics on or off.

        Raises:
            RefusedError: If the text is not an address, the port is taken, or the engine cannot be recorded.
        """
        from schedtrace.record.metrics.engine_meter import EngineMeter, metrics_address
        from schedtrace.record.metrics.serving import engine_labels
        from schedtrace.record.otel.export import choice

        try:
            chosen = choice(wanted)
            asked = metrics_address(chosen.address)
            if asked is None and not chosen.otlp and chosen.sampling is None:
                held_us = self._attachment.attach_meter(None)
                self._measures = False
                if self._metrics is not None:
                    self._metrics.close()
                return Measured(where=None, held_us=held_us)
            self._refuse_if_held_up()
            core = self._core
            rank = data_parallel_rank(core.vllm_config.parallel_config)
            if self._metrics is None:
                self._metrics = EngineMeter(
                    engine_labels(core.vllm_config, rank),
                    by_priority=policy(core.scheduler) == "priority",
                    facts=self._facts,
                    health=lambda: self._status().health,
                )
            self._metrics.send_otlp(chosen)
            if asked is not None:
                self._metrics.serve(asked, rank)
            held_us = self._attachment.attach_meter(self._metrics)
        except (NotUnderstoodError, OSError, ImportError) as error:
            raise RefusedError(str(error)) from error
        self._measures = True
        return Measured(where=self._metrics.published_on, held_us=held_us)

    def _snapshot(self, folder: Path) -> AnyAnswer:
        flight, trace = self._flight, self._attachment.trace_path
        if (stopped := self._attachment.stop_reason) is not None:
            return Refused(why=stopped)
        if trace is None:
            later = "schedtrace attach records from now on, without a restart"
            return Refused(why=f"it keeps nothing in memory: start the server with {KEEP}=120s, or {later}")
        if flight is None:
            return Refused(why=f"it keeps nothing in memory, but is recorded to {trace}")
        try:
            return Snapshot(path=str(flight.request_snapshot(folder).result(WAIT_S)))
        except OSError as error:
            why = f"{folder}: cannot be written ({error.strerror}); what is in memory stays there"
            return Refused(why=why)

    def _status(self) -> Status:
        core, attachment, watchdog = self._core, self._attachment, self._watchdog
        stall = None if watchdog is None else watchdog.stall
        trace, flight = attachment.trace_path, self._flight
        inputs = getattr(getattr(core, "addresses", None), "inputs", None) or []
        gone = front_end_ended([str(address) for address in inputs])
        return Status(
            role="engine",
            pid=os.getpid(),
            engine_pid=os.getpid(),
            rank=data_parallel_rank(core.vllm_config.parallel_config),
            schedtrace_version=__version__,
            vllm_version=vllm_version(),
            model=str(core.vllm_config.model_config.model),
            running=len(core.scheduler.running),
            waiting=Queues(core.scheduler).num_waiting_seen_from_outside(core.scheduler),
            recording=None if trace is None else str(trace),
            keeps=None if trace is None or flight is None else flight.keeps,
            attached=attachment.attached,
            stopped=attachment.stop_reason,
            left_s=attachment.left_s,
            stalled_s=None if watchdog is None else watchdog.stalled_s,
            stall=None if stall is None else stall.sentence,
            orphaned=None
            if gone is None
            else f"its front end, process {gone}, has ended: no request reaches the engine",
            starved=None if watchdog is None else watchdog.starvation,
            paused=paused(core),
            input_requests=num_in_input_queue(core),
            measured=self._metrics.published_on if self._measures and self._metrics is not None else None,
        )


def _blocks_by_holder(scheduler: Any) -> dict[str, int]:
    """Return the numbers of KV blocks that are free, and that running, waiting and finished requests hold."""
    with suppress(Exception):  # a cache manager that is not vLLM's
        manager = scheduler.kv_cache_manager
        free, held = free_blocks(manager), held_blocks(manager)
        if free is None:
            return {}
        running = {request.request_id for request in list(scheduler.running)}
        blocks = Counter(free=free, running=0, waiting=0, finished=0)
        for request_id, number in held.items():
            present = dict.__contains__(scheduler.requests, request_id)
            blocks["running" if request_id in running else "waiting" if present else "finished"] += number
        return blocks
    return {}


def worker_answer(worker: Any, ask: AnyAsk) -> AnyAnswer:
    """Return the answer of a worker's process to a question.

    Args:
        worker: vLLM's ``WorkerProc``.
        ask: The question.
    """
    match ask:
        case AskStatus():
            return Status(
                role="worker",
                pid=os.getpid(),
                engine_pid=os.getppid(),
                rank=int(getattr(worker, "rank", 0)),
                schedtrace_version=__version__,
                vllm_version=vllm_version(),
            )
        case AskTimes():
            (wrap_worker if ask.on else unwrap_worker)()
            return Done()
        case AskStacks():
            return Stacks(text=stacks_here())
    return Refused(why="a worker is not asked this")
