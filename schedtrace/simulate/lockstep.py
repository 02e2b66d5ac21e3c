"""Joint work of ranks in lock-step: forward passes and all-reduces, in virtual time.

On GPUs, the collectives of the experts tie the forward passes of the ranks together. No rank begins to
compute before all ranks have launched their batches, and no rank is done before the slowest. The k-th batch
of a rank is computed together with the k-th batch of every other rank, dummy batches included, because each
engine loop of vLLM runs one batch per pass.
"""

import hashlib
import platform
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroupGloo, ReduceOp, TCPStore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from schedtrace.errors import UsageError
from schedtrace.record.clocks import clock_id
from schedtrace.simulate.clock import NEVER
from schedtrace.simulate.executor import DUMMY, EngineClock, ModelRunner, Pipeline, Ran, SimulatedExecutor
from schedtrace.step_times.batch import Batch, StepTimes


class LockstepRank(Protocol):
    """Interface of a rank in lock-step (``ranks.Rank``) that the other ranks use."""

    number: int

    @property
    def now_us(self) -> float:
        """Time of the rank in microseconds."""
        ...

    def wait(self, us: float) -> None:
        """Wait until ``us``; other threads can run during the wait."""
        ...

    def wake(self, us: float) -> None:
        """End the rank's wait at ``us``; other ranks call this method."""
        ...


class Meeting:
    """Rendezvous of all ranks, which is complete when the last rank has joined.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._missing = ranks
        self.there: list[LockstepRank] = []
        self.values: dict[int, Any] = {}
        """Value of each rank that has joined."""
        self.latest_us = 0.0
        """Time at which the last rank joined, in microseconds."""

    def join(self, rank: LockstepRank, value: Any) -> bool:
        """Join with a value; return whether all ranks have joined."""
        self.there.append(rank)
        self.values[rank.number] = value
        self.latest_us = max(self.latest_us, rank.now_us)
        self._missing -= 1
        return self._missing == 0

    @property
    def complete(self) -> bool:
        """Whether all ranks have joined."""
        return self._missing == 0


class RankGroup:
    """Collectives of the ranks: when the last rank has joined, each rank gets all values.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._meeting = Meeting(ranks)

    def gather_values(self, rank: LockstepRank, value: Any, us: float) -> list[Any]:
        """Return all ranks' values in order, ``us`` microseconds after the last rank has joined."""
        meeting = self._meeting
        if meeting.join(rank, value):
            self._meeting = Meeting(self._ranks)
            for member in meeting.there:
                member.wake(meeting.latest_us)
        while not meeting.complete:
            rank.wait(NEVER)
        rank.wait(meeting.latest_us + us)
        return [meeting.values[number] for number in range(self._ranks)]


class Forward(Meeting):
    """Forward pass of all ranks; because they share experts, no rank is done before the slowest one."""

    ran = Ran(0.0, NEVER)
    longest_us = 0.0


class Device:
    """Devices of all ranks, which run their passes together.

    Args:
        ranks: Number of ranks.
        stages: Number of pipeline stages; each takes an equal part of a pass.
    """

    def __init__(self, ranks: int, stages: int) -> None:
        self._ranks = ranks
        self._pipeline = Pipeline(stages)
        self._passes: dict[int, Forward] = {}
        self._next = [0] * ranks

    def dispatch(self, rank: LockstepRank, device_us: float) -> Forward:
        """Return a rank's next pass; it begins when all have launched theirs, and ends for all at once."""
        number = self._next[rank.number]
        self._next[rank.number] += 1
        forward = self._passes.setdefault(number, Forward(self._ranks))
        forward.longest_us = max(forward.longest_us, device_us)
        if forward.join(rank, device_us):
            del self._passes[number]
            forward.ran = self._pipeline.run(forward.latest_us, forward.longest_us)
            for member in forward.there:
                member.wake(forward.ran.ended_us)
        return forward


class LockstepExecutor(SimulatedExecutor):
    """Device of one rank, which computes together with the other ranks' devices.

    Args:
        vllm_config: Configuration of vLLM.
        rank: Rank of this device.
        device: Devices of all ranks.
        clock: Virtual clock of the ranks.
        times: Step times.
        model_runner: Model runner that makes up the tokens.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        rank: LockstepRank,
        device: Device,
        clock: EngineClock,
        times: StepTimes,
        model_runner: ModelRunner,
    ) -> None:
        self._rank, self._device = rank, device
        super().__init__(vllm_config, clock=clock, times=times, model_runner=model_runner)

    def execute_dummy_batch(self) -> None:
        """Run a batch of one token together with the other ranks' batches."""
        self._launched(self._rank.now_us, DUMMY, None).result()

    def _launched(self, now_us: float, batch: Batch, output: Any) -> Future[Any]:  # noqa: ARG002  # as its base class
        """Return the output of a batch that is done when all ranks are done with their batches."""
        return _Joint(self._rank, self._device.dispatch(self._rank, self._times.device_us(batch)), output)

    def _empty(self, now_us: float) -> Future[Any]:  # noqa: ARG002  # likewise
        """Return an output that is available at once, because an empty batch needs no pass of all ranks."""
        done: Future[Any] = Future()
        done.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
        return done


class _Joint(Future[Any]):
    """Output that becomes available when a pass is over on all ranks."""

    def __init__(self, rank: LockstepRank, forward: Forward, output: Any) -> None:
        super().__init__()
        self._rank, self._forward, self._output = rank, forward, output

    def done(self) -> bool:
        return self._rank.now_us >= self._forward.ran.ended_us

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002  # vLLM gives none
        while not self._forward.complete:
            self._rank.wait(NEVER)
        self._rank.wait(self._forward.ran.ended_us)
        if self._output is not None:
            self._forward.ran.put_on_output(self._output)
        return self._output


class CommonPasses:
    """Connection of a rank's device with the devices of all other ranks.

    The ranks communicate in a separate process group and thread, because a device computes while the engine's
    thread waits in vLLM's all-reduces.

    Args:
        parallel: ``ParallelConfig`` of a rank in lock-step. The constructor returns once all ranks have
            joined.
        clock: Clock of the machine.
        stages: Number of pipeline stages; each takes an equal part of a pass.

    Raises:
        UsageError: If the ranks are not on one machine.
    """

    def __init__(self, parallel: Any, clock: EngineClock, stages: int) -> None:
        self._clock = clock
        self._pipeline = Pipeline(stages)
        self._group = _group(parallel)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="schedtrace-device")
        name = (clock_id() or platform.node()).encode()
        number = float(int.from_bytes(hashlib.blake2b(name, digest_size=6).digest()))
        if self._largest(number, -number) != [number, -number]:
            msg = "the simulated executor has ranks in lock-step on one machine only"
            raise UsageError(msg)

    def dispatch(self, device_us: float) -> "Future[Ran]":
        """Launch this rank's next batch; the result is available once all ranks have launched theirs.

        Args:
            device_us: Time that the batch would take alone, in microseconds.
        """
        ready_us = self._clock.now_us
        return self._thread.submit(lambda: self._pipeline.run(*self._largest(ready_us, device_us)))

    def close(self) -> None:
        """End the communication; drop the batches that other ranks no longer launch."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _largest(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX
        self._group.allreduce([tensor], options).wait()
        return [float(value) for value in tensor]


def _group(parallel: Any) -> ProcessGroupGloo:
    """Return a second process group of the ranks, because vLLM's is in use by the engine's thread."""
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
