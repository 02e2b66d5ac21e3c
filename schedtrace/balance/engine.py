"""Policy in vLLM's engine: the class that it builds on, and the place where ranks gather counts.

Ranks in lock-step call ``DPEngineCoreProc._has_global_unfinished_reqs`` once in every loop of a running wave,
on the thread that schedules. vLLM itself relies on their equal number of calls. So the counts are gathered
right after it, over vLLM's own group of ranks (``dp_group``: gloo, without a GPU).
"""

import types
from functools import cache
from typing import Any

from loguru import logger

from schedtrace.balance.scheduler import balanced
from schedtrace.record.hooks import Method, wrap

SCHEDULER_CLS = "schedtrace.balance.BalanceScheduler"
"""Value of ``--scheduler-cls``."""


class BalanceScheduler:
    """Stand-in for the class that ``--scheduler-cls`` names; it builds on vLLM's own choice.

    Whether scheduling is asynchronous is known when the configuration is complete. Then this chooses between
    ``AsyncScheduler`` and ``Scheduler``, as vLLM does without ``--scheduler-cls``.
    """

    def __new__(cls, *, vllm_config: Any, **kwargs: object) -> Any:
        """Return the scheduler; vLLM gives all arguments by name."""
        built: Any = cls.scheduler_class_for(vllm_config.scheduler_config)
        return built(vllm_config=vllm_config, **kwargs)

    @staticmethod
    def scheduler_class_for(config: Any) -> type:
        """Return the class that is built with this ``SchedulerConfig``; the recorder's plugin asks for it."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        return _in_engine(AsyncScheduler if config.async_scheduling else Scheduler)


class _InEngine:
    """A balanced scheduler that makes its engine gather the counts.

    Raises:
        ValueError: A diffusion model needs a class of its own, whose place this one would take.
    """

    counts_gathered: bool
    """Whether the engine gathers the counts; equal on all ranks, which have the same configuration."""

    def __init__(self, *, vllm_config: Any, **kwargs: object) -> None:
        if getattr(vllm_config, "diffusion_config", None) is not None:
            msg = "balance scheduling does not support diffusion models: leave out --scheduler-cls"
            raise ValueError(msg)
        super().__init__(vllm_config=vllm_config, **kwargs)  # type: ignore[call-arg]  # vLLM's scheduler
        why_not = _no_ranks(vllm_config.parallel_config)
        self.counts_gathered = why_not is None
        if why_not:
            logger.warning("schedtrace: balance scheduling has no effect: {}", why_not)
        else:
            gather_in_every_loop()


@cache
def _in_engine(base: type) -> type:
    name = f"Balance{base.__name__}"
    return types.new_class(
        name, (_InEngine, balanced(base)), exec_body=lambda namespace: namespace.update(__module__=__name__)
    )


def _no_ranks(parallel: Any) -> str | None:
    """Return why this engine has no ranks to gather counts from; None if it has."""
    if parallel.data_parallel_size == 1:  # vLLM 0.14 and newer also says so to each rank of a dense model
        return "this engine runs in lock-step with no other rank"
    if getattr(parallel, "enable_elastic_ep", False):
        return "with elastic expert parallelism ranks come and go, which it does not support"
    return None


def gather_in_every_loop() -> None:
    """Make this process's engine pass every rank's number of running requests to its scheduler in each loop.

    A second call does nothing.
    """
    from vllm.v1.engine.core import DPEngineCoreProc

    wrap(DPEngineCoreProc, "_has_global_unfinished_reqs", _gathers)


def _gathers(original: Method, engine: Any, *args: object, **kwargs: object) -> Any:
    unfinished = original(engine, *args, **kwargs)
    scheduler = engine.scheduler
    if getattr(scheduler, "counts_gathered", False):
        scheduler.observe_ranks(_gathered(len(scheduler.running), engine.dp_group))
    return unfinished


def _gathered(own: int, group: Any) -> list[int]:
    """Return the numbers of all ranks of ``group``, in rank order; every rank has to call this.

    Raises:
        RuntimeError: If a rank is gone; vLLM's own collectives of the group raise the same.
    """
    import torch

    counts = torch.zeros(group.size(), dtype=torch.int32)
    counts[group.rank()] = own
    torch.distributed.all_reduce(counts, group=group)
    gathered: list[int] = counts.tolist()
    return gathered
