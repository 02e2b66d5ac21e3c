"""vLLM's ``EngineCore`` in this process, with schedtrace's executor and KV cache.

Ranks of a mixture-of-experts model are ``DPEngineCoreProc`` objects, which run in lock-step. Ranks of a dense
model are independent ``EngineCoreProc`` objects. No processes, sockets or process groups are created;
schedtrace provides the queues and a stand-in for the group.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from vllm.config import ParallelConfig, SchedulerConfig
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheConfig

from schedtrace.record.disguise import RECORDERS
from schedtrace.record.engine_hooks import record_passes
from schedtrace.simulate import releases


def make_core(
    config: Any, executor: Callable[[Any], Any], scheduler_class: type, groups: list[Any]
) -> core.EngineCore:
    """Return an engine core as vLLM builds it, except for the changes of ``built_here``.

    ``config`` sets the size of the KV cache, which vLLM otherwise determines by profiling.

    Args:
        config: ``VllmConfig`` with ``num_gpu_blocks`` set.
        executor: Function that creates the executor from the configuration.
        scheduler_class: Class that ``get_scheduler_cls`` would return.
        groups: vLLM's ``KVCacheGroupSpec`` objects.
    """

    class Core(core.EngineCore):  # type: ignore[misc]  # vLLM is untyped here
        def _initialize_kv_caches(self, vllm_config: Any) -> Any:
            if not hasattr(SchedulerConfig, "get_scheduler_cls"):  # to vLLM 0.11
                vllm_config.scheduler_config.scheduler_cls = scheduler_class
            return sized_cache(vllm_config, groups)

        def step_fn(self) -> Any:
            """Run a step and return its result; before vLLM 0.11, only cores in processes have this."""
            return self.step() if self.batch_queue is None else self.step_with_batch_queue()

        if not hasattr(core.EngineCore, "post_step"):  # vLLM 0.10.0

            def post_step(self, _executed: bool) -> None:
                """Do nothing after a step: ``EngineCore`` of vLLM 0.10.0 has no such method."""

    with built_here(scheduler_class):
        return Core(config, executor, log_stats=True)


def sized_cache(config: Any, groups: list[Any]) -> Any:
    """Return a KV cache of ``num_gpu_blocks`` blocks, in the form that ``_initialize_kv_caches`` returns."""
    cache = releases.kv_cache_config(config, groups)
    returned = inspect.signature(core.EngineCore._initialize_kv_caches).return_annotation  # noqa: SLF001  # vLLM has no public one
    return cache if returned is KVCacheConfig else (cache.num_blocks, 0, cache)  # to vLLM 0.14 at least


@contextmanager
def built_here(scheduler_class: type) -> Iterator[None]:
    """Make vLLM build engine cores with this scheduler class, in a context.

    In the context, vLLM freezes neither the garbage collector nor its environment variables, because the
    process does other work later.
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


def make_rank_core(
    config: Any, executor: Any, scheduler_class: type, groups: list[Any], around: Any, *, lockstep: bool
) -> Any:
    """Return the core of a rank.

    Args:
        config: ``VllmConfig`` of the rank.
        executor: Function that creates the executor from the configuration.
        scheduler_class: Class that ``get_scheduler_cls`` would return.
        groups: vLLM's ``KVCacheGroupSpec`` objects.
        around: The ``ranks.Rank`` whose core this is.
        lockstep: Whether the rank steps together with other ranks; ``around`` then also serves as vLLM's
        process group.
    """
    with built_here(scheduler_class):
        core = (_Lockstep if lockstep else _Independent)(config, executor, groups, around)
    record_passes(_Recorded)  # now plugins are loaded, which may have done so for all
    if (recorder := RECORDERS.look_up(core.scheduler)) is not None:
        recorder.facts.engine_is(core)
    return core


class _Rank:
    """Changes that both kinds of rank cores share: their construction, and where time passes."""

    def __init__(self, config: Any, executor: Any, groups: list[Any], around: Any) -> None:
        self._around, self._groups = around, groups
        self.engine_index = around.number
        self.input_queue, self.output_queue = around.inputs, around.outputs
        self.engines_running = False
        self.shutdown_state = core.EngineShutdownState.RUNNING
        self.has_coordinator = self.publish_dp_lb_stats = True
        self.last_counts = (0, 0)
        self.process_input_queue_block = True
        self.enable_fault_tolerance = self.reject_new_requests = False
        core.EngineCore.__init__(self, config, executor, log_stats=True, include_finished_set=True)

    def _initialize_kv_caches(self, vllm_config: Any) -> Any:
        return sized_cache(vllm_config, self._groups)

    def _process_input_queue(self) -> None:
        self._around.loop_begins()
        super()._process_input_queue()  # type: ignore[misc]  # of vLLM's class

    def _process_engine_step(self) -> Any:
        executed = super()._process_engine_step()  # type: ignore[misc]  # likewise
        self._around.stepped(executed=executed)
        return executed


class _Independent(_Rank, core.EngineCoreProc):  # type: ignore[misc]  # vLLM is untyped here
    pass


class _Recorded(_Rank, core.DPEngineCoreProc):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(self, config: Any, executor: Any, groups: list[Any], around: Any) -> None:
        parallel = config.parallel_config
        self.dp_rank, self.dp_size, self.dp_group = around.number, parallel.data_parallel_size, around
        self.prefill_schedule_interval = config.scheduler_config.prefill_schedule_interval
        self.dp_sync_interval = parallel.dp_sync_interval
        self.step_counter = self.current_wave = 0
        self.pending_pause = self.ignore_start_dp_wave = False
        self.eep_scaling_state = None
        super().__init__(config, executor, groups, around)


class _Lockstep(_Recorded):
    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> Any:
        """Gather counts for ``schedtrace.balance`` as well; every rank calls this method once per loop."""
        unfinished = super()._has_global_unfinished_reqs(local_unfinished)
        if (observe := getattr(self.scheduler, "observe_ranks", None)) is not None:
            observe(self.dp_group.gather(len(self.scheduler.running), self._around.gathering_us))
        return unfinished


@contextmanager
def reduced_here() -> Iterator[None]:
    """Route vLLM's all-reduces of the ranks' states through ``Rank.gather`` while the block runs."""

    def sync(dp_group: Any, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        states = dp_group.gather((has_unfinished, pending_pause))
        unfinished, pending = (set(flags) for flags in zip(*states, strict=True))
        return True in unfinished or len(pending) > 1, pending == {True}

    def has_unfinished_dp(dp_group: Any, has_unfinished: bool) -> bool:
        return any(dp_group.gather(has_unfinished))

    with (
        patch.object(ParallelConfig, "sync_dp_state", staticmethod(sync), create=True),
        patch.object(ParallelConfig, "has_unfinished_dp", staticmethod(has_unfinished_dp)),
    ):
        yield
