"""What ranks in lock-step do together: forward passes and all-reduces, in virtual time."""

from concurrent.futures import Future
from typing import Any, Protocol

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from schedtrace.record.execution import NAME, machine
from schedtrace.simulate import releases
from schedtrace.simulate.executor import DUMMY, SimulatedExecutor

NEVER = float("inf")


class Waits(Protocol):
    """A rank's place in virtual time."""

    number: int

    @property
    def now_us(self) -> float:
        """Its own time."""
        ...

    def wait(self, us: float) -> None:
        """Return at that moment; others go on meanwhile."""
        ...

    def wake(self, us: float) -> None:
        """End a wait at that moment (called by others)."""
        ...


class Meeting:
    """Where every rank comes once: it is over when the last one is there.

    Args:
        ranks: How many come.
    """

    def __init__(self, ranks: int) -> None:
        self._missing = ranks
        self.there: list[Waits] = []
        self.values: dict[int, Any] = {}
        """What each rank brought."""
        self.latest_us = 0.0
        """When the last one came."""

    def join(self, rank: Waits, value: Any) -> bool:
        """Come, with a value; returns whether everybody is there."""
        self.there.append(rank)
        self.values[rank.number] = value
        self.latest_us = max(self.latest_us, rank.now_us)
        self._missing -= 1
        return self._missing == 0

    @property
    def complete(self) -> bool:
        """Whether everybody is there."""
        return self._missing == 0


class Group:
    """The ranks' collectives: what each brings, all get, when the last one has come.

    Args:
        ranks: How many.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._meeting = Meeting(ranks)

    def gather(self, rank: Waits, value: Any, us: float = 0.0) -> list[Any]:
        """Every rank's value, in the order of ranks, ``us`` after the last one has come."""
        meeting = self._meeting
        if meeting.join(rank, value):
            self._meeting = Meeting(self._ranks)
            for other in meeting.there:
                other.wake(meeting.latest_us)
        while not meeting.complete:
            rank.wait(NEVER)
        rank.wait(meeting.latest_us + us)
        return [meeting.values[number] for number in range(self._ranks)]


class Member:
    """A rank's handle of the group: vLLM's process group."""

    def __init__(self, group: Group, rank: Waits) -> None:
        self._group, self._rank = group, rank

    def gather(self, value: Any, us: float = 0.0) -> list[Any]:
        """As ``Group.gather``."""
        return self._group.gather(self._rank, value, us)


class Forward(Meeting):
    """One pass through the model on all ranks: experts are shared, so none is done before the slowest."""

    began_us = 0.0
    ended_us = NEVER
    longest_us = 0.0


class Device:
    """The devices of all ranks, which take their passes together.

    Args:
        ranks: How many.
        stages: Of a pipeline; each takes an equal part of a pass.
    """

    def __init__(self, ranks: int, stages: int) -> None:
        self._ranks = ranks
        self._free = [0.0] * stages
        self._passes: dict[int, Forward] = {}
        self._next = [0] * ranks

    def dispatch(self, rank: Waits, device_us: float) -> Forward:
        """A rank's next pass; it begins once every rank has dispatched it, and lasts as the longest."""
        number = self._next[rank.number]
        self._next[rank.number] += 1
        forward = self._passes.setdefault(number, Forward(self._ranks))
        forward.longest_us = max(forward.longest_us, device_us)
        if forward.join(rank, device_us):
            del self._passes[number]
            self._run(forward)
            for other in forward.there:
                other.wake(forward.ended_us)
        return forward

    def _run(self, forward: Forward) -> None:
        ready = forward.latest_us
        for stage, free in enumerate(self._free):
            begins = max(ready, free)
            if stage == 0:
                forward.began_us = begins
            ready = self._free[stage] = begins + forward.longest_us / len(self._free)
        forward.ended_us = ready


class LockstepExecutor(SimulatedExecutor):
    """The device of one rank, which computes with those of the others.

    Args:
        rank: Whose it is.
        device: Of all ranks.
        options: As ``SimulatedExecutor``.
    """

    def __init__(self, *args: Any, rank: Waits, device: Device, **options: Any) -> None:
        self._rank, self._device = rank, device
        super().__init__(*args, **options)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Dispatch a batch; its tokens are there once all ranks are through with theirs."""
        batch, sampled = self._model_runner.execute(scheduler_output)
        output: Any = EMPTY_MODEL_RUNNER_OUTPUT
        forward = None
        if sampled:
            self._proposed = self._model_runner.proposed(sampled)
            output = releases.model_output(sampled, self._proposed if self._model_runner.drafts else None)
            forward = self._device.dispatch(self._rank, self._times.device_us(batch))
        self._last = _Joint(self._rank, forward, output)
        return self._last if non_block else self._last.result()

    def execute_dummy_batch(self) -> None:
        """A batch of one token, with the others' batches."""
        _Joint(self._rank, self._device.dispatch(self._rank, self._times.device_us(DUMMY)), None).result()


class _Joint(Future[Any]):
    """An output that is there when a pass is over on all ranks."""

    def __init__(self, rank: Waits, forward: Forward | None, output: Any) -> None:
        super().__init__()
        self._rank, self._forward, self._output = rank, forward, output

    def done(self) -> bool:
        return self._forward is None or self._rank.now_us >= self._forward.ended_us

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002  # vLLM gives none
        forward = self._forward
        if forward is None:
            return self._output
        while not forward.complete:
            self._rank.wait(NEVER)
        self._rank.wait(forward.ended_us)
        if self._output is not None:
            setattr(
                self._output,
                NAME,
                (machine(), round(1000 * forward.began_us), round(1000 * forward.ended_us)),
            )
        return self._output
