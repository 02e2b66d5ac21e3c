"""The devices of data-parallel ranks in lock-step, in real time: they take every batch together.

On GPUs the collectives of the experts tie the forward passes of the ranks together: none begins to compute
before all have launched theirs, and none is done before the slowest. The k-th batch of a rank belongs to the
k-th of all others, dummy batches included, since each engine loop of vLLM runs one batch a pass.
"""

import hashlib
import platform
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupGloo, ReduceOp, TCPStore

from schedtrace.errors import UsageError
from schedtrace.record.clocks import clock_id
from schedtrace.simulate.executor import Clock


class Ran(NamedTuple):
    """When the ranks' devices computed one pass, in microseconds of the machine's clock."""

    began_us: float
    ended_us: float


class CommonPasses:
    """One rank's place among the devices of all.

    The ranks agree in a process group of their own, in a thread of their own: a device computes while the
    engine's thread waits in vLLM's all-reduces for another rank's.

    Args:
        parallel: vLLM's ``ParallelConfig``, of a rank in lock-step. Returns once all ranks have come.
        clock: The machine's.
        stages: Of a pipeline; each takes an equal part of a pass.

    Raises:
        UsageError: the ranks are not on one machine.
    """

    def __init__(self, parallel: Any, clock: Clock, stages: int) -> None:
        self._clock = clock
        self._free = [0.0] * stages
        self._group = _group(parallel)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="schedtrace-device")
        name = (clock_id() or platform.node()).encode()
        number = float(int.from_bytes(hashlib.blake2b(name, digest_size=6).digest()))
        if self._largest(number, -number) != [number, -number]:
            msg = "the simulated executor has ranks in lock-step on one machine only"
            raise UsageError(msg)

    def dispatch(self, device_us: float) -> "Future[Ran]":
        """Launch this rank's next batch; the answer is there once all ranks have launched theirs.

        Args:
            device_us: What it would take alone.
        """
        return self._thread.submit(self._meet, self._clock.now_us, device_us)

    def close(self) -> None:
        """The engine ends; batches that other ranks do not launch any more are forgotten."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _meet(self, ready_us: float, device_us: float) -> Ran:
        ready_us, longest_us = self._largest(ready_us, device_us)
        began = ready_us
        for stage, free in enumerate(self._free):
            begins = max(ready_us, free)
            began = begins if stage == 0 else began
            ready_us = self._free[stage] = begins + longest_us / len(self._free)
        return Ran(began, ready_us)

    def _largest(self, *values: float) -> list[float]:
        """Of all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX
        self._group.allreduce([tensor], options).wait()
        return [float(value) for value in tensor]


def _group(parallel: Any) -> ProcessGroupGloo:
    """A group of the ranks beside vLLM's, which the engine's thread uses at the same time."""
    rank, size, host = (
        parallel.data_parallel_rank, parallel.data_parallel_size, parallel.data_parallel_master_ip,
    )  # fmt: skip
    if port := getattr(parallel, "_coord_store_port", 0):  # vLLM's own meeting point, while it starts ranks
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    else:
        store = TCPStore(host, parallel.get_next_dp_init_port(), size, is_master=rank == 0)
    timeout = getattr(parallel, "cpu_distributed_timeout", None)
    options = {} if timeout is None else {"timeout": timeout}
    return ProcessGroupGloo(PrefixStore("schedtrace", store), rank, size, **options)
