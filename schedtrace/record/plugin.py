"""The ``vllm.general_plugins`` entry point: vLLM's own choice of scheduler class, wrapped.

vLLM loads general plugins first thing in every process, before ``EngineCore`` asks
``SchedulerConfig.get_scheduler_cls()`` for the class. Wrapping that answer keeps ``scheduler_cls`` unset, so
async scheduling, diffusion schedulers and a user's ``--scheduler-cls`` stay what vLLM made of them, and no
custom-class warning appears.

To 0.11.0 ``EngineCore`` reads the class from the configuration, right after it has sized the KV cache: there
the traced class takes its place.
"""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

from loguru import logger

from schedtrace.record import settings

_MARK = "_schedtrace_wrapped"


def register() -> None:
    """Install the wrappers; does nothing unless recording is asked for, and never raises.

    vLLM calls this once per process, possibly more often: installing twice changes nothing.
    """
    if not settings.enabled():
        return
    try:
        settings.claim_run_dir()
        _wrap_scheduler_choice()
        _wrap_engine()
    except Exception as error:
        logger.warning("schedtrace: not recording, this vLLM could not be hooked into: {!r}", error)


def _wrap_scheduler_choice() -> None:
    from vllm.config import SchedulerConfig

    choose = getattr(SchedulerConfig, "get_scheduler_cls", None)
    if choose is None:
        _wrap_configured_class()
        return
    if hasattr(choose, _MARK):
        return

    @functools.wraps(choose)
    def get_scheduler_cls(self: Any) -> Any:
        return _traced(choose(self))

    setattr(get_scheduler_cls, _MARK, True)
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def _wrap_configured_class() -> None:
    """To vLLM 0.11.0: ``scheduler_cls`` is a class, or where to find one."""
    from vllm.v1.engine.core import EngineCore

    initialize = EngineCore._initialize_kv_caches
    if hasattr(initialize, _MARK):
        return

    @functools.wraps(initialize)
    def wrapped(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = initialize(self, vllm_config, *args, **kwargs)
        try:
            config = vllm_config.scheduler_config
            given = config.scheduler_cls
            config.scheduler_cls = _traced(pkgutil.resolve_name(given) if isinstance(given, str) else given)
        except Exception as error:
            logger.warning("schedtrace: not recording, no scheduler class could be found: {!r}", error)
        return sizes

    setattr(wrapped, _MARK, True)
    EngineCore._initialize_kv_caches = wrapped


def _traced(chosen: Any) -> Any:
    """The class that records; what ``--scheduler-cls`` leads to records by itself."""
    from schedtrace.record.traced import traced_or_plain, traced_scheduler

    return chosen if chosen is traced_scheduler else traced_or_plain(chosen)


def _wrap_engine() -> None:
    """Two things the scheduler does not see: a data-parallel rank's dummy batches, and the engine's end.

    The engine stops its workers before it tells the scheduler, and may be killed while it waits for them:
    close the trace first.
    """
    from vllm.v1.engine.core import EngineCore

    _call_before(EngineCore, "execute_dummy_batch", lambda recorder: recorder.dummy_batch())
    _call_before(EngineCore, "shutdown", lambda recorder: recorder.close())


def _call_before(owner: Any, name: str, tell: Callable[[Any], None]) -> None:
    """Have the engine's recorder told before ``owner.name`` runs."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = getattr(getattr(self, "scheduler", None), "_schedtrace_recorder", None)
        if recorder is not None:
            tell(recorder)
        return original(self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
