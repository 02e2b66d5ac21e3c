"""Traced subclass of the scheduler class that vLLM chose, with hooks before its methods in the MRO.

Every hook calls the original with exactly the arguments that it received, and notifies the recorder before
and after. The recorder catches its own errors, so no hook can change what the scheduler does.
"""

import os
import types
from collections.abc import Mapping
from functools import cache
from typing import Any

from schedtrace.model.printable import error_text
from schedtrace.record import switches
from schedtrace.record.assemble import Assembler
from schedtrace.record.clocks import RecordingClock, read_anchor
from schedtrace.record.disguise import PLAIN, RECORDERS, disguises
from schedtrace.record.header import make_header
from schedtrace.record.log import logger
from schedtrace.record.marks.marking import Instrumented, instrument
from schedtrace.record.metrics.counting_recorder import CountingRecorder, StepCounter, can_count
from schedtrace.record.recorder import Recorder
from schedtrace.record.run_folders import remove_old_runs
from schedtrace.record.settings import Settings, from_environment
from schedtrace.record.writer import Writer

recorder_by_id = RECORDERS.by_id


def is_traced(base: type) -> bool:
    """Return whether a class is a traced class."""
    return hasattr(base, "_schedtrace_instrumented")


def hooks_for(base: type) -> list[type]:
    """Return the hooks for the methods that a scheduler class has; not every release has all of them.

    The hooks derive from the class that gives schedulers a ``__dict__`` (vLLM's ``SchedulerInterface``). A
    running scheduler can therefore become a traced one, and plain again, by assignment of its ``__class__``,
    for which CPython requires equal layouts (``compatible_for_assignment`` in ``Objects/typeobject.c``).
    """
    root: type = base
    while "__dict__" not in vars(root) and root.__base__ is not None:
        root = root.__base__
    always, *optional = _hooks(root)
    hooks = [hook for hook in optional if hasattr(base, _METHODS[hook.__name__])]
    return [always, *hooks, *disguises(base, root)]


_METHODS = {
    "PreemptionHook": "_preempt_request",
    "FreeHook": "_free_request",
    "TransfersHook": "_update_from_kv_xfer_finished",
    "PauseHook": "set_pause_state",
    "ResetHook": "reset_prefix_cache",
}
"""Method of vLLM that each hook overrides."""


def subject(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """Return the first argument of a call, however a user's class passes it; None without arguments."""
    return args[0] if args else next(iter(kwargs.values()), None)


@cache
def _hooks(root: type) -> tuple[type, ...]:  # noqa: C901  # a list of classes, none of which is complex
    class Traced(root):  # type: ignore[misc]  # mypy knows no class that is found at run time
        """Hooks on the methods that every release of vLLM's V1 scheduler has."""

        __slots__ = ()
        _schedtrace_instrumented: Instrumented = Instrumented((), ())

        @property
        def _schedtrace_recorder(self) -> Recorder | None:
            """Return the recorder of this scheduler, which is stored in a separate table."""
            return RECORDERS.look_up(self)

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            open_recorder(self)

        def schedule(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if (
                recorder is None or not recorder.active or recorder.events is not None
            ):  # a call within one is part of it
                return super().schedule(*args, **kwargs)
            recorder.schedule_begins(self, args[0] if args else kwargs.get("throttle_prefills"))
            try:
                output = super().schedule(*args, **kwargs)
            except BaseException as error:
                recorder.schedule_raised(error)
                raise
            recorder.schedule_ended(self, output)
            return output

        def update_from_output(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if recorder is None or not recorder.active:
                return super().update_from_output(*args, **kwargs)
            back = recorder.clock()
            left = recorder.left
            outputs = super().update_from_output(*args, **kwargs)
            sampled = args[1] if len(args) > 1 else None
            recorder.output_came_back(subject(args, kwargs), sampled, back, left, outputs)
            return outputs

        def add_request(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if recorder is not None:
                recorder.request_arrives(self, subject(args, kwargs))
            return super().add_request(*args, **kwargs)

        def shutdown(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if recorder is not None:
                recorder.close()
            return super().shutdown(*args, **kwargs)

    class PreemptionHook(root):  # type: ignore[misc]  # likewise
        """Hook on ``_preempt_request`` (vLLM 0.12 and newer)."""

        __slots__ = ()

        def _preempt_request(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if recorder is not None:
                recorder.request_preempted(self, subject(args, kwargs))
            result = super()._preempt_request(*args, **kwargs)
            if recorder is not None:
                recorder.request_was_preempted()
            return result

    class FreeHook(root):  # type: ignore[misc]  # likewise
        """Hook on ``_free_request``, through which every departing request passes."""

        __slots__ = ()

        def _free_request(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if recorder is not None:
                recorder.request_freed(subject(args, kwargs))
            result = super()._free_request(*args, **kwargs)
            if recorder is not None:
                recorder.request_was_freed(self, subject(args, kwargs))
            return result

    class TransfersHook(root):  # type: ignore[misc]  # likewise
        """Hook on ``_update_from_kv_xfer_finished``, in which workers report KV loads."""

        __slots__ = ()

        def _update_from_kv_xfer_finished(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if recorder is not None:
                recorder.kv_loads_ended(self, subject(args, kwargs))
            return super()._update_from_kv_xfer_finished(*args, **kwargs)

    class PauseHook(root):  # type: ignore[misc]  # likewise
        """Hook on ``set_pause_state`` (vLLM 0.17 and newer), which begins and ends every pause and sleep."""

        __slots__ = ()

        def set_pause_state(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if recorder is not None:
                state = getattr(subject(args, kwargs), "name", None)
                recorder.control(self, "pause_state", recorder.clock(), detail=state)
            return super().set_pause_state(*args, **kwargs)

    class ResetHook(root):  # type: ignore[misc]  # likewise
        """Hook on ``reset_prefix_cache``, which may preempt all running requests."""

        __slots__ = ()

        def reset_prefix_cache(self, *args: object, **kwargs: object) -> Any:
            recorder = recorder_by_id(id(self))
            if recorder is None or not recorder.active:
                return super().reset_prefix_cache(*args, **kwargs)
            began_ns, before = recorder.clock(), recorder.before_reset(self)
            done = None
            try:
                done = super().reset_prefix_cache(*args, **kwargs)
            finally:
                recorder.control(self, "reset_prefix_cache", began_ns, failed=done is not True, before=before)
            return done

    return Traced, PreemptionHook, FreeHook, TransfersHook, PauseHook, ResetHook


@cache
def traced_class(base: type) -> type:
    """Return a subclass of ``base`` that records; ``base`` itself if it already records.

    Args:
        base: Scheduler class that implements vLLM's ``SchedulerInterface``.
    """
    if not isinstance(base, type):
        msg = f"{base!r} is no class; one made by a function cannot be recorded"
        raise TypeError(msg)
    if is_traced(base):
        return base
    hooks, instrumented = hooks_for(base), instrument(base)
    try:
        return _subclass(base, hooks, instrumented)
    except Exception as error:  # a class with rules of its own for its subclasses
        refused = f"{base.__module__}.{base.__qualname__}: {error_text(error)}"
        return _subclass(base, hooks, Instrumented((), (*instrumented.refused, refused)))


def traced_or_plain(chosen: Any) -> Any:
    """Return the traced subclass of vLLM's choice; if that fails, warn and return ``chosen`` itself."""
    try:
        return traced_class(chosen)
    except Exception as error:
        name = type.__repr__(chosen if isinstance(chosen, type) else type(chosen))
        logger.warning("schedtrace: not recording, {} could not be wrapped: {}", name, error_text(error))
        return chosen


def _subclass(base: type, hooks: list[type], instrumented: Instrumented) -> type:
    """Return the traced class; each marked copy of ``schedule()`` precedes its original in the MRO."""
    own = [] if any(base is marked.__base__ for marked in instrumented.classes) else [base]

    members = {
        "__module__": __name__,
        "__doc__": f"{base.__module__}.{base.__qualname__}, recorded by schedtrace.",
        "_schedtrace_instrumented": instrumented,
        PLAIN: base,
    }
    bases = (*hooks, *own, *instrumented.classes)
    return types.new_class(
        f"Traced{base.__name__}", bases, exec_body=lambda namespace: namespace.update(members)
    )


def traced_scheduler(*, vllm_config: Any, **kwargs: object) -> Any:
    """Build the scheduler of ``--scheduler-cls schedtrace.record.traced.traced_scheduler``, without plugins.

    The class is ``AsyncScheduler`` or ``Scheduler``, as vLLM would choose without ``--scheduler-cls``
    (``SchedulerConfig.get_scheduler_cls``); it records to ``SCHEDTRACE_DIR`` (``logs`` if unset). Unlike the
    plugin, this function cannot record a user's own class, because it takes that class's place in the option.
    """
    if switches.is_switched_off():
        return _chosen_without_option(vllm_config.scheduler_config)(vllm_config=vllm_config, **kwargs)
    if not switches.enabled():
        os.environ[switches.DIR] = "logs"
        logger.info("schedtrace: SCHEDTRACE_DIR is not set, recording to logs/")
    traced = traced_or_plain(_chosen_without_option(vllm_config.scheduler_config))
    return traced(vllm_config=vllm_config, **kwargs)


def _chosen_without_option(config: Any) -> Any:
    """Return the class that vLLM would have chosen without the option."""
    if not hasattr(config, "get_scheduler_cls"):
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        return AsyncScheduler if config.async_scheduling else Scheduler
    scheduler_cls, config.scheduler_cls = config.scheduler_cls, None
    try:
        return config.get_scheduler_cls()
    finally:
        config.scheduler_cls = scheduler_cls


def open_recorder(scheduler: Any) -> None:
    """Start recording a scheduler that was just created; if that fails, log one warning."""
    try:
        if not switches.enabled():  # a user's scheduler that is attached to has made another one of its class
            return
        recorder = prepared_recorder(scheduler, type(scheduler), from_environment())
        RECORDERS.store(scheduler, recorder)
    except Exception as error:
        logger.warning("schedtrace: not recording: {}", error_text(error))
        return
    writer = recorder.writer
    if os.environ.get(switches.DIR):
        remove_old_runs(writer.path.parent)
    if writer.flight is None:
        logger.info("schedtrace: recording engine {} to {}", writer.engine_rank, writer.path)
    else:
        logger.info(
            "schedtrace: engine {} keeps {} in memory; nothing is written before a snapshot, in {}",
            writer.engine_rank,
            writer.flight.keeps,
            writer.path.parent.parent,
        )


def prepared_recorder(scheduler: Any, traced: type, chosen: Settings, *, attached: bool = False) -> Recorder:
    """Return a recorder with an open file, without changing the scheduler.

    Args:
        scheduler: Scheduler of vLLM.
        traced: Class that records; the scheduler has it or is about to get it.
        chosen: Settings of the recording.
        attached: Whether the scheduler has run before.

    Raises:
        OSError: If the file cannot be created.
        AttributeError: If the scheduler lacks an attribute that every V1 scheduler of vLLM has.
    """
    anchor = read_anchor()
    header = make_header(scheduler, traced, chosen, anchor, attached=attached)
    needs_lines = chosen.keeps_lines or chosen.makes_spans
    counts = not needs_lines and can_count(scheduler, traced)
    clock = RecordingClock(anchor.ns, anchor.wall_us)
    writer = Writer(chosen, header, clock, StepCounter if counts else Assembler)
    try:
        recorder = (
            CountingRecorder(scheduler, traced, writer)
            if counts
            else Recorder(scheduler, traced, writer, full_lines=chosen.lines == "full")
        )
    except Exception:
        writer.close()
        raise
    writer.measuring.begun = recorder.latest_call
    return recorder
