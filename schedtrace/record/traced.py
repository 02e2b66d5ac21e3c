"""A traced subclass of whatever scheduler class vLLM chose: its methods are those of ``scheduler_hooks``."""

import os
import types
from functools import cache
from typing import Any

from loguru import logger

from schedtrace.record import settings
from schedtrace.record.instrument import Instrumented, instrument
from schedtrace.record.scheduler_hooks import hooks_for, records


@cache
def traced_class(base: type) -> type:
    """A subclass of ``base`` that records; ``base`` itself if it records already.

    Args:
        base: A scheduler class with vLLM's ``SchedulerInterface``.
    """
    if not isinstance(base, type):
        msg = f"{base!r} is no class; one made by a function cannot be recorded"
        raise TypeError(msg)
    if records(base):
        return base
    hooks, instrumented = hooks_for(base), instrument(base)
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
