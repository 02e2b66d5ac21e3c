"""vLLM's ``EngineCore`` in this process, with an executor and a KV cache of ours."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from vllm.config import SchedulerConfig
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheConfig


def make_core(
    config: Any, executor: Callable[[Any], Any], scheduler_class: type, groups: list[Any]
) -> core.EngineCore:
    """An engine core as vLLM builds it, but for what ``built_here`` changes.

    The KV cache is as large as ``config`` says, instead of what profiling finds.

    Args:
        config: ``VllmConfig`` with ``num_gpu_blocks`` set.
        executor: Makes the executor, from the configuration.
        scheduler_class: What ``get_scheduler_cls`` would return.
        groups: vLLM's ``KVCacheGroupSpec`` objects.
    """

    class Core(core.EngineCore):  # type: ignore[misc]  # vLLM is untyped here
        def _initialize_kv_caches(self, vllm_config: Any) -> Any:
            if not hasattr(SchedulerConfig, "get_scheduler_cls"):  # to vLLM 0.11
                vllm_config.scheduler_config.scheduler_cls = scheduler_class
            return sized_cache(vllm_config, groups)

        if not hasattr(core.EngineCore, "post_step"):  # vLLM 0.10.0
            step_fn = core.EngineCore.step

            def post_step(self, _executed: bool) -> None:
                """There is nothing to do."""

    with built_here(scheduler_class):
        return Core(config, executor, log_stats=True)


def sized_cache(config: Any, groups: list[Any]) -> Any:
    """A KV cache of ``num_gpu_blocks`` blocks, as ``_initialize_kv_caches`` returns it."""
    blocks = config.cache_config.num_gpu_blocks
    cache = KVCacheConfig(blocks, [], groups)
    returned = inspect.signature(core.EngineCore._initialize_kv_caches).return_annotation  # noqa: SLF001
    return cache if returned is KVCacheConfig else (blocks, 0, cache)  # the latter to vLLM 0.14 at least


@contextmanager
def built_here(scheduler_class: type) -> Iterator[None]:
    """Build engine cores with this scheduler class.

    Neither the garbage collector nor vLLM's environment variables are frozen for the rest of the process,
    which goes on to other things.
    """
    chosen: Any = nullcontext()
    if hasattr(SchedulerConfig, "get_scheduler_cls"):
        chosen = patch.object(SchedulerConfig, "get_scheduler_cls", lambda _: scheduler_class)
    with (
        chosen,
        patch.object(core, "freeze_gc_heap", lambda: None, create=True),
        patch.object(core, "enable_envs_cache", lambda: None, create=True),
    ):
        yield
