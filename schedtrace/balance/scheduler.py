"""vLLM's own scheduler classes with a single addition: a gate that can hold back admissions.

``schedule()`` itself is unchanged. While the gate is closed, it is called with only as many seats as are
occupied, so its waiting loop ends as if no seat were free. vLLM 0.10 to 0.33 reads the number of seats only
in this loop and, up to 0.30, in an assertion that no more requests run than there are seats.

Ranks in lock-step call ``DPEngineCoreProc._has_global_unfinished_reqs`` once in every engine loop of a
running wave, on the thread that schedules. vLLM itself relies on an equal number of calls on all ranks. The
counts are therefore gathered right after this call, over vLLM's own group of ranks (``dp_group``: gloo,
without a GPU).
"""

import types
from collections.abc import Sequence
from functools import cache
from typing import Any

from loguru import logger

from schedtrace.record.hooks import Method, wrap


def closed(own: int, ranks: Sequence[int], max_num_seqs: int) -> bool:
    """Return whether a rank may admit no request, neither a new nor a preempted one.

    While any rank runs ``max_num_seqs - 1`` requests or more, only a rank that runs no request may admit one.
    Every rank that has requests can therefore run at least one, so the ranks cannot deadlock.

    Args:
        own: Number of requests that run on this rank now.
        ranks: Number of running requests of each rank, including this one, as last gathered. With fewer than
            two ranks, the gate is open.
        max_num_seqs: Seats of each rank.
    """
    return own > 0 and len(ranks) > 1 and max(ranks) >= max_num_seqs - 1


class _Gate:
    """Gate that ``balanced`` adds to a scheduler class."""

    held_back_by_ranks = False
    """Whether the gate was closed in the latest ``schedule()`` although a seat was free; the recorder reads
    it."""
    _ranks: tuple[int, ...] = ()

    def observe_ranks(self, running: Sequence[int]) -> None:
        """Store how many requests run on each rank, this rank included, as gathered after a step."""
        self._ranks = tuple(running)

    def schedule(self, *args: object, **kwargs: object) -> Any:
        """Call vLLM's own ``schedule()``, without a free seat while the gate is closed."""
        scheduler: Any = self
        name = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
        seats: int = getattr(scheduler, name)
        own = len(scheduler.running)
        taken = own + getattr(scheduler, "num_waiting_for_streaming_input", 0)
        self.held_back_by_ranks = taken < seats and closed(own, self._ranks, seats)
        if not self.held_back_by_ranks:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]  # the base is vLLM's scheduler
        setattr(scheduler, name, own)
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]  # likewise
        finally:
            setattr(scheduler, name, seats)


@cache
def balanced(base: type) -> type:
    """Return a subclass of ``base`` that admits only while its gate is open, or ``base`` if it has a gate.

    After every step, an engine (``BalanceScheduler``) or a simulation has to call ``observe_ranks`` of the
    scheduler with the numbers of running requests of all ranks. Before the first call, and with a single
    rank, the scheduler decides as ``base`` does.

    Args:
        base: A class of vLLM's V1 scheduler (``Scheduler``, ``AsyncScheduler`` or a subclass).
    """
    if issubclass(base, _Gate):
        return base

    about = f"{base.__module__}.{base.__qualname__} behind the gate of balance scheduling."
    return types.new_class(
        f"Balanced{base.__name__}",
        (_Gate, base),
        exec_body=lambda namespace: namespace.update(__module__=__name__, __doc__=about),
    )


SCHEDULER_CLS = "schedtrace.balance.BalanceScheduler"
"""Value of ``--scheduler-cls`` that selects balance scheduling."""


class BalanceScheduler:
    """Stand-in for ``--scheduler-cls``; it adds the gate to the class that vLLM itself would choose.

    Whether scheduling is asynchronous is known only when the configuration is complete. At that point, this
    class chooses between ``AsyncScheduler`` and ``Scheduler``, as vLLM does without ``--scheduler-cls``.
    """

    def __new__(cls, *, vllm_config: Any, **kwargs: object) -> Any:
        """Return the scheduler; vLLM passes all arguments by name."""
        built: Any = cls.scheduler_class_for(vllm_config.scheduler_config)
        return built(vllm_config=vllm_config, **kwargs)

    @staticmethod
    def scheduler_class_for(config: Any) -> type:
        """Return the class to build for a ``SchedulerConfig``; the recorder also calls this method."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        return _in_engine(AsyncScheduler if config.async_scheduling else Scheduler)


class _InEngine:
    """Balanced scheduler that makes its engine gather the numbers of running requests.

    Raises:
        ValueError: If the model is a diffusion model, which needs a different scheduler class.
    """

    counts_gathered: bool
    """Whether the engine gathers the counts; equal on all ranks, which have the same configuration."""

    def __init__(self, *, vllm_config: Any, **kwargs: object) -> None:
        if getattr(vllm_config, "diffusion_config", None) is not None:
            msg = "balance scheduling does not support diffusion models: leave out --scheduler-cls"
            raise ValueError(msg)
        super().__init__(vllm_config=vllm_config, **kwargs)  # type: ignore[call-arg]  # vLLM's scheduler
        parallel, why_not = vllm_config.parallel_config, None
        if parallel.data_parallel_size == 1:  # vLLM 0.14 and newer also says so to each rank of a dense model
            why_not = "this engine runs in lock-step with no other rank"
        elif getattr(parallel, "enable_elastic_ep", False):
            why_not = "with elastic expert parallelism ranks come and go, which it does not support"
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


def gather_in_every_loop() -> None:
    """Make this process's engine gather every rank's number of running requests in each loop.

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
    """Return ``own`` of every rank of ``group``, in rank order; every rank has to call this function.

    Raises:
        RuntimeError: If a rank is gone; vLLM's own collectives in this group raise the same error.
    """
    import torch

    counts = torch.zeros(group.size(), dtype=torch.int32)
    counts[group.rank()] = own
    torch.distributed.all_reduce(counts, group=group)
    gathered: list[int] = counts.tolist()
    return gathered
