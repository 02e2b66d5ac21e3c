"""Recording from the engine's start, with the scheduler class that vLLM itself chooses.

vLLM loads general plugins before ``EngineCore`` asks ``SchedulerConfig.get_scheduler_cls()`` for the class.
Wrapping that method leaves ``scheduler_cls`` unset. Async scheduling, diffusion schedulers and a user's
``--scheduler-cls`` therefore work as vLLM intends, and no warning about a custom class appears.

Up to 0.11.0, ``EngineCore`` reads the class from the configuration right after it has sized the KV cache. At
that point, the traced class replaces it.
"""

import inspect
import pkgutil
from typing import Any

from schedtrace.model.printable import error_text
from schedtrace.record import settings
from schedtrace.record.engine_hooks import wrap_engine
from schedtrace.record.front_end_hooks import wrap_front_end
from schedtrace.record.hooks import Method, wrap
from schedtrace.record.log import logger
from schedtrace.record.switches import NotUnderstoodError, keeps_in_memory
from schedtrace.record.worker_hooks import wrap_worker


def record_from_the_start() -> None:
    """Install the wrappers; never raise an error."""
    try:
        settings.from_environment()
        _wrap_scheduler_choice()
    except NotUnderstoodError as error:
        logger.warning("schedtrace: not recording: {}", error)
        return
    except Exception as error:
        logger.warning("schedtrace: not recording, this vLLM could not be hooked into: {!r}", error)
        return
    front_end = () if keeps_in_memory() else (wrap_front_end,)
    for install in (wrap_engine, wrap_worker, *front_end):
        try:
            install()
        except Exception as error:  # the trace goes without these facts
            logger.warning("schedtrace: {} does not fit this vLLM: {!r}", install.__name__, error)


def _wrap_scheduler_choice() -> None:
    from vllm.config import SchedulerConfig

    if not hasattr(SchedulerConfig, "get_scheduler_cls"):
        _wrap_configured_class()
        return

    def get_scheduler_cls(original: Method, config: Any) -> Any:
        return _traced(original(config), config)

    wrap(SchedulerConfig, "get_scheduler_cls", get_scheduler_cls)


def _wrap_configured_class() -> None:
    """Wrap the configured class in vLLM up to 0.11.0: ``scheduler_cls`` is a class or its import path."""
    from vllm.v1.engine.core import EngineCore

    def initialize(original: Method, engine: Any, vllm_config: Any, *args: object, **kwargs: object) -> Any:
        sizes = original(engine, vllm_config, *args, **kwargs)
        try:
            config = vllm_config.scheduler_config
            configured = config.scheduler_cls
            chosen = pkgutil.resolve_name(configured) if isinstance(configured, str) else configured
            config.scheduler_cls = _traced(chosen, config)
        except Exception as error:
            logger.warning("schedtrace: not recording, no scheduler class could be found: {!r}", error)
        return sizes

    wrap(EngineCore, "_initialize_kv_caches", initialize)


def _traced(chosen: Any, config: Any) -> Any:
    """Return a class that records; a class from ``--scheduler-cls`` may already do so.

    Args:
        chosen: Class that vLLM would build; for balance scheduling, ``BalanceScheduler`` picks a class by
            the configuration.
        config: vLLM's ``SchedulerConfig``.
    """
    try:
        from schedtrace.record.traced import traced_or_plain, traced_scheduler

        chooses = inspect.getattr_static(chosen, "scheduler_class_for", None) is not None
        built = chosen.scheduler_class_for(config) if chooses else chosen
        return chosen if chosen is traced_scheduler else traced_or_plain(built)
    except Exception as error:
        logger.warning("schedtrace: not recording: {}", error_text(error))
        return chosen
