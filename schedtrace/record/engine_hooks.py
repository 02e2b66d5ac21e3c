"""Hooks into the engine outside the scheduler: input thread, dummy batches, grammars, shutdown.

Every wrapper calls the original with the same arguments and raises no errors of its own. ``Inputs`` stores
what other threads do with requests: the input thread and the threads that compile grammars write to it, and
the scheduler's thread reads it. Each access is a single operation on a dict or a list, which is atomic in
Python.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from schedtrace.model.printable import shortened
from schedtrace.model.trace_facts import ControlKind, Grammar
from schedtrace.record.capture import DummyPass, Synced
from schedtrace.record.disguise import RECORDERS, Beside
from schedtrace.record.hooks import Method, unwrap, wrap
from schedtrace.record.vllms_own import put_on

MOST_KEPT = 10_000
"""Maximum number of requests in each table of ``Inputs`` that the scheduler has not looked up; a full table
is emptied. Also the maximum number of compiled grammars that wait for a step."""


class Inputs:
    """Times of one engine's requests, in nanoseconds of the monotonic clock until they are read.

    Args:
        since_anchor: Function that converts nanoseconds to the trace's microseconds.
    """

    def __init__(self, since_anchor: Any) -> None:
        self._us = since_anchor
        self._received: dict[str, tuple[int, int, int | None]] = {}
        self._aborts: dict[str, int] = {}
        self._submitted: dict[str, int] = {}
        self.compiled: deque[Grammar] = deque(maxlen=MOST_KEPT)
        """Grammars compiled since the last call of ``grammars``."""

    def note_prepared(self, request: Any, began_ns: int) -> None:
        """Record that the input thread has made a ``Request`` from a client's message."""
        rank = getattr(request, "data_parallel_rank", None)
        _keep(self._received, request.request_id, (began_ns, time.monotonic_ns(), rank))

    def abort_received(self, request_ids: Any) -> None:
        """Record that a client aborted requests; only the first abort of each counts."""
        now = time.monotonic_ns()
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        elif not isinstance(request_ids, list | tuple | set):
            return  # to go through an iterator would leave nothing to vLLM
        for request_id in request_ids:
            if request_id not in self._aborts:
                _keep(self._aborts, request_id, now)

    def grammar_submitted(self, request: Any) -> None:
        """Record that a structured request's grammar is about to be compiled, on any thread."""
        _keep(self._submitted, request.request_id, time.monotonic_ns())

    def grammar_compiled(self, request: Any, began_ns: int, *, failed: bool) -> None:
        """Record that a thread has compiled a grammar."""
        submitted = self._submitted.pop(request.request_id, None)
        self.compiled.append(
            Grammar(
                request_id=request.request_id,
                submitted_us=None if submitted is None else self._us(submitted),
                started_us=self._us(began_ns),
                compiled_us=self._us(time.monotonic_ns()),
                failed=failed,
            )
        )

    def input_times(self, request_id: str) -> dict[str, int | None]:
        """Return the fields of an ``Arrival``; empty if the request did not pass through the input thread."""
        if not self._received or (times := self._received.pop(request_id, None)) is None:
            return {}
        received_ns, queued_ns, rank = times
        return {
            "received_us": self._us(received_ns),
            "input_queue_us": self._us(queued_ns),
            "pinned_rank": rank,
        }

    def abort_us(self, request_id: str) -> int | None:
        """Return the time at which the abort of a finished request was received; None if there is none."""
        taken = self._aborts.pop(request_id, None) if self._aborts else None
        return None if taken is None else self._us(taken)

    def grammars(self) -> list[Grammar]:
        """Return the grammars compiled since the last call."""
        taken: list[Grammar] = []
        while self.compiled:
            taken.append(self.compiled.popleft())
        return taken


def _keep(times: dict[str, Any], request_id: str, value: Any) -> None:
    if len(times) >= MOST_KEPT:
        times.clear()
    times[request_id] = value


INPUTS: Beside[Inputs] = Beside()
"""Times of requests (``Inputs``) for each ``StructuredOutputManager`` whose grammars are recorded."""
_CONTROL_METHODS: tuple[ControlKind, ...] = ("sleep", "wake_up", "collective_rpc", "add_lora")
"""Methods of ``EngineCore`` through which an operator controls the engine."""
_PASSES_A_SYNC = 32
"""Number of passes between two syncs in vLLM 0.10 to 0.29, before this was a setting."""


def _methods() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the methods to wrap: class, name, and wrapper."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
    from vllm.v1.structured_output import StructuredOutputManager

    return [
        (EngineCore, "execute_dummy_batch", _dummy_batch),
        (DPEngineCoreProc, "_has_global_unfinished_reqs", _sync),
        (EngineCore, "shutdown", _shutdown),
        (EngineCore, "preprocess_add_request", _prepare),
        (EngineCore, "abort_requests", _abort),
        *((EngineCore, kind, around) for kind, around in _CONTROLS.items()),
        (StructuredOutputManager, "grammar_init", _grammar_init),
        (StructuredOutputManager, "_create_grammar", _create_grammar),
        (StructuredOutputManager, "_async_create_grammar", _create_grammar),  # its name before vLLM 0.13
    ]


def wrap_engine() -> None:
    """Install the wrappers for the engine of this process."""
    for owner, name, around in _methods():
        wrap(owner, name, around)


def unwrap_engine(engine: Any) -> None:
    """Remove the wrappers and everything that they set on this engine."""
    for owner, name, around in _methods():
        unwrap(owner, name, around)
    aborts: Any = getattr(engine, "aborts_queue", None)
    manager = getattr(engine, "structured_output_manager", None)
    INPUTS.drop(manager)
    with contextlib.suppress(AttributeError):
        del aborts.put_nowait


def record_passes(core: type) -> None:
    """Record dummy batches and syncs of engine cores of another class than vLLM's, as in a simulation."""
    wrap(core, "execute_dummy_batch", _dummy_batch)
    wrap(core, "_has_global_unfinished_reqs", _sync)


def _recorder(engine: Any) -> Any:
    return RECORDERS.look_up(getattr(engine, "scheduler", None))


def _shutdown(original: Method, engine: Any, *args: object, **kwargs: object) -> Any:
    """Close the trace before the engine stops its workers, because the engine may be killed during that."""
    recorder = _recorder(engine)
    if recorder is not None:
        recorder.close()
    return original(engine, *args, **kwargs)


def _dummy_batch(original: Method, engine: Any, *args: object, **kwargs: object) -> Any:
    """Record a dummy batch, which a data-parallel rank runs only because other ranks have work."""
    began_ns = time.monotonic_ns()
    try:
        return original(engine, *args, **kwargs)
    finally:
        if (recorder := _recorder(engine)) is not None:
            recorder.facts.engine_is(engine)
            wave, counter = getattr(engine, "current_wave", None), getattr(engine, "step_counter", None)
            recorder.beside(DummyPass(began_ns, time.monotonic_ns(), wave, counter))


def _sync(original: Method, engine: Any, *args: object, **kwargs: object) -> Any:
    """Record the end of a pass if ranks synchronize there, to agree whether to continue."""
    began_ns, counter = time.monotonic_ns(), getattr(engine, "step_counter", None)
    go_on = original(engine, *args, **kwargs)
    recorder = _recorder(engine)
    if recorder is not None and counter is not None and _synced(engine, counter + 1):
        with contextlib.suppress(Exception):
            recorder.beside(Synced(began_ns, time.monotonic_ns(), engine.current_wave, counter, bool(go_on)))
    return go_on


def _synced(engine: Any, passes: int) -> bool:
    """Return whether ranks synchronize after this many passes of a wave (``_has_global_unfinished_reqs``)."""
    interval = getattr(engine, "dp_sync_interval", None)  # vLLM 0.30 and newer
    return passes % _PASSES_A_SYNC == 0 if interval is None else passes == 1 or passes % interval == 0


def _prepare(original: Method, engine: Any, request: Any, *args: object, **kwargs: object) -> Any:
    """Record when the input thread makes a ``Request`` from a client's message."""
    recorder = _recorder(engine)
    if recorder is None or not recorder.active:
        return original(engine, request, *args, **kwargs)
    began_ns = time.monotonic_ns()
    prepared = original(engine, request, *args, **kwargs)
    with contextlib.suppress(Exception):
        if recorder.active:  # preparing may take seconds
            recorder.facts.inputs.note_prepared(request, began_ns)
            recorder.facts.engine_is(engine)
            _listen_to_aborts(engine)
    return prepared


def _abort(original: Method, engine: Any, request_ids: Any, *args: object, **kwargs: object) -> Any:
    """Record that clients aborted requests; before vLLM 0.13, there is no queue for aborts."""
    _abort_received(engine, request_ids)
    return original(engine, request_ids, *args, **kwargs)


def _controls(kind: ControlKind) -> Callable[..., Any]:
    """Return a wrapper of a method through which an operator controls the engine."""

    def around(original: Method, engine: Any, *args: object, **kwargs: object) -> Any:
        began_ns, failed = time.monotonic_ns(), True
        try:
            done = original(engine, *args, **kwargs)
            failed = False
        finally:
            if (recorder := _recorder(engine)) is not None:
                method = args[0] if args else kwargs.get("method")
                # The name of an RPC identifies a weight update; a user's function has none.
                rpc = kind == "collective_rpc" and isinstance(method, str)
                detail = shortened(str(method)) if rpc else None
                recorder.control(engine.scheduler, kind, began_ns, failed=failed, detail=detail)
        return done

    return around


_CONTROLS = {kind: _controls(kind) for kind in _CONTROL_METHODS}
"""Wrapper for each method through which an operator controls the engine."""


def _abort_received(engine: Any, request_ids: Any) -> None:
    """Make the current recorder, if any, record an abort."""
    recorder = _recorder(engine)
    if recorder is not None and recorder.active:
        with contextlib.suppress(Exception):
            recorder.facts.inputs.abort_received(request_ids)


def _listen_to_aborts(engine: Any) -> None:
    """Record when the input thread puts aborts into this engine's queue."""
    aborts = getattr(engine, "aborts_queue", None)
    if aborts is None or put_on(aborts, "put_nowait") is not None:
        return
    put = aborts.put_nowait

    def put_nowait(request_ids: Any) -> None:
        _abort_received(engine, request_ids)
        put(request_ids)

    aborts.put_nowait = put_nowait


def _grammar_init(original: Method, manager: Any, request: Any, *args: object, **kwargs: object) -> Any:
    inputs = INPUTS.look_up(manager)
    if inputs is not None and getattr(request, "structured_output_request", None) is not None:
        with contextlib.suppress(Exception):
            inputs.grammar_submitted(request)
    return original(manager, request, *args, **kwargs)


def _create_grammar(original: Method, manager: Any, request: Any, *args: object, **kwargs: object) -> Any:
    """Create a grammar, on a thread of vLLM's pool or the input thread, and record how long this took."""
    inputs = INPUTS.look_up(manager)
    if inputs is None:
        return original(manager, request, *args, **kwargs)
    began_ns, failed = time.monotonic_ns(), True
    try:
        grammar = original(manager, request, *args, **kwargs)
        failed = False
    finally:
        with contextlib.suppress(Exception):
            inputs.grammar_compiled(request, began_ns, failed=failed)
    return grammar
