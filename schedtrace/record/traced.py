"""A traced subclass of whatever scheduler class vLLM chose.

Every method calls the original first to last with the very arguments it got, and tells the recorder before
and after. The recorder swallows its own errors, so nothing here can change what the scheduler does.
"""

import os
import types
from functools import cache
from typing import Any

from loguru import logger

from schedtrace.record import settings
from schedtrace.record.clocks import read_anchor
from schedtrace.record.exits import Noted
from schedtrace.record.header import make_header
from schedtrace.record.instrument import Instrumented, instrument
from schedtrace.record.recorder import Recorder
from schedtrace.record.writer import Writer


def open_recorder(scheduler: Any) -> Recorder | None:
    """A recorder for a scheduler just built; None, with one warning, where that is impossible."""
    try:
        chosen = settings.from_environment()
        anchor = read_anchor()
        header = make_header(scheduler, chosen, anchor)
        writer = Writer(chosen, header, anchor.ns)
        recorder = Recorder(scheduler, writer, full_lines=chosen.lines == "full")
    except Exception as error:
        logger.warning("schedtrace: not recording: {!r}", error)
        return None
    logger.info("schedtrace: recording engine {} to {}", header.engine_rank, writer.path)
    return recorder


class _Hook:
    _schedtrace_recorder: Recorder | None = None


class _Traced(_Hook):
    """Hooks on the methods that every release of vLLM's V1 scheduler has."""

    _schedtrace_events: list[Noted] | None = None
    """What the marks have noted in the call of ``schedule()`` that runs; None outside such a call."""
    _schedtrace_queued: bool = True
    """Whether somebody may be waiting in the call that runs."""
    _schedtrace_instrumented: Instrumented = Instrumented((), ())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._schedtrace_recorder = open_recorder(self)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._schedtrace_recorder
        if recorder is None or not recorder.active or recorder.in_schedule:  # a call within one is part of it
            return super().schedule(*args, **kwargs)  # type: ignore[misc]  # the base is vLLM's scheduler
        recorder.schedule_begins(self, args[0] if args else kwargs.get("throttle_prefills"))
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]  # likewise
        except BaseException as error:
            recorder.schedule_raised(self, error)
            raise
        recorder.schedule_ended(self, output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._schedtrace_recorder
        if recorder is None or not recorder.active:
            return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]  # of the class that it is put before
        back = recorder.clock()
        left = recorder.left
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]  # of the class that it is put before
        recorder.output_came_back(scheduler_output, args[0] if args else None, back, left, outputs)
        return outputs

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._schedtrace_recorder
        if recorder is not None:
            recorder.request_arrives(self, request)
        return super().add_request(request, *args, **kwargs)  # type: ignore[misc]  # of the class that it is put before

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._schedtrace_recorder
        if recorder is not None:
            recorder.close()
        return super().shutdown(*args, **kwargs)  # type: ignore[misc]  # of the class that it is put before


class _TracedPreemption(_Hook):
    """Hook on ``_preempt_request`` (vLLM 0.12 and newer)."""

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._schedtrace_recorder is not None:
            self._schedtrace_recorder.request_preempted(self, request)
        result = super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]  # of the class that it is put before
        if self._schedtrace_recorder is not None:
            self._schedtrace_recorder.request_was_preempted()
        return result


class _TracedFree(_Hook):
    """Hook on ``_free_request``: every way out of the scheduler leads through it."""

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._schedtrace_recorder is not None:
            self._schedtrace_recorder.request_freed(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]  # of the class that it is put before


class _TracedTransfers(_Hook):
    """Hook on ``_update_from_kv_xfer_finished``: the workers' word on KV loads."""

    def _update_from_kv_xfer_finished(self, told: Any, *args: Any, **kwargs: Any) -> Any:
        if self._schedtrace_recorder is not None:
            self._schedtrace_recorder.kv_loads_ended(self, told)
        return super()._update_from_kv_xfer_finished(told, *args, **kwargs)  # type: ignore[misc]  # of the class that it is put before


class _TracedPause(_Hook):
    """Hook on ``set_pause_state`` (vLLM 0.17 and newer): pause, resume, sleep and wake-up lead through it."""

    def set_pause_state(self, pause_state: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._schedtrace_recorder
        if recorder is not None:
            state = getattr(pause_state, "name", None)
            recorder.control(self, "pause_state", recorder.clock(), detail=state)
        return super().set_pause_state(pause_state, *args, **kwargs)  # type: ignore[misc]  # of the class that it is put before


class _TracedReset(_Hook):
    """Hook on ``reset_prefix_cache``: it may preempt everything that runs."""

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._schedtrace_recorder
        if recorder is None or not recorder.active:
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]  # of the class that it is put before
        began_ns, before = recorder.clock(), recorder.before_reset(self)
        done = None
        try:
            done = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]  # of the class that it is put before
        finally:
            recorder.control(self, "reset_prefix_cache", began_ns, failed=done is not True, **before)
        return done


_HOOKS: dict[type, str] = {
    _TracedPreemption: "_preempt_request",
    _TracedFree: "_free_request",
    _TracedTransfers: "_update_from_kv_xfer_finished",
    _TracedPause: "set_pause_state",
    _TracedReset: "reset_prefix_cache",
}
"""The method that each of them is for: not every release, or class, has it."""


@cache
def traced_class(base: type) -> type:
    """A subclass of ``base`` that records; ``base`` itself if it records already.

    Args:
        base: A scheduler class with vLLM's ``SchedulerInterface``.
    """
    if not isinstance(base, type):
        msg = f"{base!r} is no class; one made by a function cannot be recorded"
        raise TypeError(msg)
    if issubclass(base, _Traced):
        return base
    hooks = [_Traced, *(hook for hook, method in _HOOKS.items() if hasattr(base, method))]
    instrumented = instrument(base)
    try:
        return _subclass(base, hooks, instrumented)
    except Exception as error:  # a class with rules of its own for its subclasses
        refused = f"{base.__module__}.{base.__qualname__}: {error!r}"
        return _subclass(base, hooks, Instrumented((), (*instrumented.refused, refused)))


def traced_or_plain(chosen: Any) -> Any:
    """The traced subclass of what vLLM chose; where that cannot be made, ``chosen`` itself and a warning."""
    try:
        return traced_class(chosen)
    except Exception as error:
        logger.warning("schedtrace: not recording, {} could not be wrapped: {!r}", chosen, error)
        return chosen


def _subclass(base: type, hooks: list[type], instrumented: Instrumented) -> type:
    """The traced class; each marked copy of ``schedule()`` comes right before its original in the MRO."""
    own = [] if any(base is made.__base__ for made in instrumented.classes) else [base]

    def body(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = __name__
        namespace["__doc__"] = f"{base.__module__}.{base.__qualname__}, recorded by schedtrace."
        namespace["_schedtrace_instrumented"] = instrumented

    bases = (*hooks, *own, *instrumented.classes)
    return types.new_class(f"Traced{base.__name__}", bases, exec_body=body)


def traced_scheduler(**kwargs: Any) -> Any:
    """For ``--scheduler-cls schedtrace.record.traced.traced_scheduler``, where plugins are disabled.

    Chooses between vLLM's ``AsyncScheduler`` and ``Scheduler`` as vLLM does without ``--scheduler-cls``
    (``SchedulerConfig.get_scheduler_cls``), and records to ``SCHEDTRACE_DIR`` (``logs`` if unset). With the
    plugin path the user's own class is kept; with this one it cannot be, since the option is taken.
    """
    if not settings.enabled():
        os.environ[settings.DIR] = "logs"
        logger.info("schedtrace: SCHEDTRACE_DIR is not set, recording to logs/")
    return traced_or_plain(_chosen_without_option(kwargs["vllm_config"].scheduler_config))(**kwargs)


def _chosen_without_option(config: Any) -> Any:
    """The class that vLLM would have chosen; to 0.11.0 the option itself says which."""
    if not hasattr(config, "get_scheduler_cls"):
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        return AsyncScheduler if config.async_scheduling else Scheduler
    given, config.scheduler_cls = config.scheduler_cls, None
    try:
        return config.get_scheduler_cls()
    finally:
        config.scheduler_cls = given
