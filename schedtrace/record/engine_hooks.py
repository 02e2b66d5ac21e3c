"""What the scheduler does not see of its engine: the input thread, dummy batches, grammars, the end.

Every wrapper calls the original with the very arguments it got, and keeps its own errors to itself.
"""

import contextlib
import time
from typing import Any

from schedtrace.model.printable import shortened
from schedtrace.model.trace_facts import ControlKind
from schedtrace.record.capture import DummyPass, Synced
from schedtrace.record.hooks import Method, wrap

INPUTS = "_schedtrace_inputs"
"""Attribute of a ``StructuredOutputManager`` whose grammars are recorded."""
_PASSES_A_SYNC = 32
"""Before it was a setting, vLLM 0.10 to 0.29."""


def wrap_engine() -> None:
    """Install them; the engine is that of this process."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore
    from vllm.v1.structured_output import StructuredOutputManager

    wrap(EngineCore, "execute_dummy_batch", _dummy_batch)
    wrap(DPEngineCoreProc, "_has_global_unfinished_reqs", _sync)
    wrap(EngineCore, "shutdown", _shutdown)
    wrap(EngineCore, "preprocess_add_request", _prepare)
    wrap(EngineCore, "abort_requests", _abort)
    wrap(EngineCore, "sleep", _sleep)
    wrap(EngineCore, "wake_up", _wake_up)
    wrap(EngineCore, "collective_rpc", _collective_rpc)
    wrap(EngineCore, "add_lora", _add_lora)
    wrap(StructuredOutputManager, "grammar_init", _grammar_init)
    wrap(StructuredOutputManager, "_create_grammar", _create_grammar)
    wrap(StructuredOutputManager, "_async_create_grammar", _create_grammar)  # its name before vLLM 0.13


def record_passes(core: type) -> None:
    """Note dummy batches and syncs of a class of engine cores, where vLLM's are not (in a simulation)."""
    wrap(core, "execute_dummy_batch", _dummy_batch)
    wrap(core, "_has_global_unfinished_reqs", _sync)


def _recorder(engine: Any) -> Any:
    return getattr(getattr(engine, "scheduler", None), "_schedtrace_recorder", None)


def _shutdown(original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """The engine stops its workers first, and may be killed meanwhile: close the trace before that."""
    recorder = _recorder(engine)
    if recorder is not None:
        recorder.close()
    return original(engine, *args, **kwargs)


def _dummy_batch(original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """A batch that a data-parallel rank runs only to keep the others company."""
    began_ns = time.monotonic_ns()
    try:
        return original(engine, *args, **kwargs)
    finally:
        if (recorder := _recorder(engine)) is not None:
            recorder.facts.engine_is(engine)
            wave, counter = getattr(engine, "current_wave", None), getattr(engine, "step_counter", None)
            recorder.dummy_batch(DummyPass(began_ns, time.monotonic_ns(), wave, counter))


def _sync(original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """The end of a pass; in some, the ranks agree whether to go on, and wait for each other to do so."""
    began_ns, counter = time.monotonic_ns(), getattr(engine, "step_counter", None)
    go_on = original(engine, *args, **kwargs)
    recorder = _recorder(engine)
    if recorder is not None and counter is not None and _synced(engine, counter + 1):
        with contextlib.suppress(Exception):
            recorder.ranks_synced(
                Synced(began_ns, time.monotonic_ns(), engine.current_wave, counter, bool(go_on))
            )
    return go_on


def _synced(engine: Any, passes: int) -> bool:
    """Whether the ranks agree after so many passes of a wave (``_has_global_unfinished_reqs``)."""
    interval = getattr(engine, "dp_sync_interval", None)  # vLLM 0.30 and newer
    return passes % _PASSES_A_SYNC == 0 if interval is None else passes == 1 or passes % interval == 0


def _prepare(original: Method, engine: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """The input thread makes a ``Request`` of what a client sent."""
    recorder = _recorder(engine)
    if recorder is None or not recorder.active:
        return original(engine, request, *args, **kwargs)
    began_ns = time.monotonic_ns()
    prepared = original(engine, request, *args, **kwargs)
    with contextlib.suppress(Exception):
        recorder.facts.inputs.prepared(request, began_ns)
        recorder.facts.engine_is(engine)
        _listen_to_aborts(engine, recorder.facts.inputs)
    return prepared


def _abort(original: Method, engine: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Clients gave up; vLLM before 0.13 has no queue that its input thread puts this into."""
    recorder = _recorder(engine)
    if recorder is not None:
        with contextlib.suppress(Exception):
            recorder.facts.inputs.abort_received(request_ids)
    return original(engine, request_ids, *args, **kwargs)


def _controlled(
    kind: ControlKind, detail: str | None, original: Method, engine: Any, *args: Any, **kwargs: Any
) -> Any:
    """What an operator asks of the engine, which steps on when it is done."""
    began_ns, failed = time.monotonic_ns(), True
    try:
        done = original(engine, *args, **kwargs)
        failed = False
    finally:
        if (recorder := _recorder(engine)) is not None:
            recorder.control(engine.scheduler, kind, began_ns, failed=failed, detail=detail)
    return done


def _sleep(original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
    return _controlled("sleep", None, original, engine, *args, **kwargs)


def _wake_up(original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
    return _controlled("wake_up", None, original, engine, *args, **kwargs)


def _collective_rpc(original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """A weight update comes as one; a function of a user's own has no name worth writing."""
    method = args[0] if args else kwargs.get("method")
    detail = shortened(method) if isinstance(method, str) else None
    return _controlled("collective_rpc", detail, original, engine, *args, **kwargs)


def _add_lora(original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
    return _controlled("add_lora", None, original, engine, *args, **kwargs)


def _listen_to_aborts(engine: Any, inputs: Any) -> None:
    """The input thread puts aborts into a queue: note when, for this engine's queue alone."""
    aborts = getattr(engine, "aborts_queue", None)
    if aborts is None or "put_nowait" in vars(aborts):
        return
    put = aborts.put_nowait

    def put_nowait(request_ids: Any) -> None:
        with contextlib.suppress(Exception):
            inputs.abort_received(request_ids)
        put(request_ids)

    aborts.put_nowait = put_nowait


def _grammar_init(original: Method, manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = getattr(manager, INPUTS, None)
    if inputs is not None and getattr(request, "structured_output_request", None) is not None:
        with contextlib.suppress(Exception):
            inputs.grammar_submitted(request)
    return original(manager, request, *args, **kwargs)


def _create_grammar(original: Method, manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs in a thread of vLLM's pool, or on the input thread."""
    inputs = getattr(manager, INPUTS, None)
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
