"""The engine that a sweep starts from: a recorded one, or a model on a GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schedtrace.model.message import Duration, Message
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.step_times.gpus import Gpu
from schedtrace.step_times.memory import FIT_TO_MEMORY
from schedtrace.step_times.model import StepTimes
from schedtrace.step_times.roofline import Roofline
from schedtrace.step_times.shapes import Shape

BLOCKS = "num_gpu_blocks_override"
ALONE: dict[str, Any] = {"data_parallel_size": 1, "balance_ranks": False}
"""What an engine has that is no rank."""
NOT_KNOWN = say(
    "balance_ranks: what gathering the ranks' counts costs is not known, since no all-reduce of theirs is "
    "recorded; it takes no time here."
)
AS_RECORDED = (
    "balance_ranks: gathering the ranks' counts takes {time} in every loop, the median of their recorded "
    "all-reduces."
)
AUTO = ("kv_cache_dtype", "auto")
"""As if it was not given."""


@dataclass(frozen=True)
class RecordedEngine:
    """The engine of a trace, or several."""

    header: Header
    times: StepTimes
    ranks: int = 1
    """Data-parallel ones."""

    @property
    def step_times(self) -> str:
        """Where step times come from, in a sentence."""
        return self.times.description

    def configured(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], StepTimes]:
        """Options of ``simulate.replay.play``, and how long steps take.

        Raises:
            UsageError: a change that a replay cannot make.
        """
        from schedtrace.simulate.engine_options import engine_options  # noqa: PLC0415  # imports vLLM

        return engine_options(self.header, changes, ranks=self.ranks), self.times

    def base(self, names: Iterable[str]) -> dict[str, Any]:
        """Values of settings before any change; None where vLLM's default applies."""
        options, _ = self.configured({})
        options = {**ALONE, **options}
        return {name: options.get("num_blocks" if name == BLOCKS else name) for name in names}

    def require_known(self, names: Iterable[str]) -> None:
        """Check names of settings.

        Raises:
            UsageError: not an argument of vLLM, or one that a replay cannot change.
        """
        from schedtrace.simulate.engine_options import require_known  # noqa: PLC0415  # imports vLLM

        for name in names:
            require_known(name)


@dataclass(frozen=True)
class ModelledEngine:
    """A model's shape on GPUs, with vLLM's defaults for an API server on such a GPU.

    Args:
        shape: The model's.
        gpu: One of them.
        times: How long steps take; None: the roofline of shape and GPUs.
    """

    shape: Shape
    gpu: Gpu
    times: StepTimes | None = None

    OWN = frozenset({"tensor_parallel_size", "gpu_memory_utilization", "kv_cache_dtype"})
    """Settings that act by way of memory and step times only: vLLM's scheduler does not see them."""

    @property
    def step_times(self) -> str:
        """As ``RecordedEngine.step_times``."""
        return (self.times or Roofline(self.shape, self.gpu)).description

    def configured(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], StepTimes]:
        """As ``RecordedEngine.configured``; KV cache blocks follow from the memory unless they are given.

        Raises:
            UsageError: the model does not fit, or vLLM would not start.
        """
        from schedtrace.simulate.engine_options import shaped_options  # noqa: PLC0415  # imports vLLM

        given = {name: value for name, value in changes.items() if (name, value) != AUTO}
        gpus = given.get("tensor_parallel_size", 1)
        roofline = Roofline(self.shape, self.gpu, gpus, given.get("kv_cache_dtype"))
        return shaped_options(self.shape, self.gpu, given), self.times or roofline

    def base(self, names: Iterable[str]) -> dict[str, Any]:
        """As ``RecordedEngine.base``: every one is vLLM's default."""
        return dict.fromkeys(names)

    def require_known(self, names: Iterable[str]) -> None:
        """As ``RecordedEngine.require_known``."""
        from schedtrace.simulate.engine_options import require_known  # noqa: PLC0415  # imports vLLM

        for name in names:
            if name not in self.OWN:
                require_known(name)


Engine = RecordedEngine | ModelledEngine


def fitted_length(shape: Shape, given: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """``max_model_len`` of a modelled engine if the KV cache decided it; None: as given, or the model's own.

    Args:
        shape: The model's.
        given: vLLM's arguments.
        options: Of ``simulate.replay.play``, made of them.
    """
    length: int = options["max_model_len"]
    left = given.get("max_model_len") in FIT_TO_MEMORY
    return length if left and length < (shape.positions or 0) else None


def gathering_notes(times: StepTimes | None, changes: Iterable[Mapping[str, Any]]) -> list[Message]:
    """What a replay takes the gathering of balance scheduling to cost; empty if no change has it."""
    if not any(of_one.get("balance_ranks") for of_one in changes):
        return []
    took_us = times.gathering_us() if times else None
    if took_us is None:
        return [NOT_KNOWN]
    return [say(AS_RECORDED, time=Duration(took_us))] if took_us else []
