"""The engine that a sweep starts from: a recorded one, or a model on a GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schedtrace.errors import UsageError
from schedtrace.model.trace import Header
from schedtrace.step_times.gpus import Gpu
from schedtrace.step_times.memory import kv_cache_blocks
from schedtrace.step_times.model import StepTimes
from schedtrace.step_times.roofline import Roofline
from schedtrace.step_times.shape import Shape

BLOCKS = "num_gpu_blocks_override"
LARGE_BYTES, VERY_LARGE_BYTES = 70 * 2**30, 160 * 2**30


@dataclass(frozen=True)
class RecordedEngine:
    """The engine of a trace."""

    header: Header
    times: StepTimes

    @property
    def step_times(self) -> str:
        """Where step times come from, in a sentence."""
        return self.times.description

    def configured(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], StepTimes]:
        """Options of ``simulate.replay.play``, and how long steps take.

        Raises:
            UsageError: a change that a replay cannot make.
        """
        from schedtrace.simulate.recorded_engine import engine_options  # noqa: PLC0415  # imports vLLM

        return engine_options(self.header, changes), self.times

    def base(self, names: Iterable[str]) -> dict[str, Any]:
        """Values of settings before any change; None where vLLM's default applies."""
        options, _ = self.configured({})
        return {name: options.get("num_blocks" if name == BLOCKS else name) for name in names}

    def require_known(self, names: Iterable[str]) -> None:
        """Check names of settings.

        Raises:
            UsageError: not an argument of vLLM, or one that a replay cannot change.
        """
        from schedtrace.simulate.recorded_engine import parsed  # noqa: PLC0415  # imports vLLM

        parsed([f"{name}=0" for name in names])


@dataclass(frozen=True)
class ModelledEngine:
    """A model's shape on GPUs, with vLLM's defaults for an API server on such a GPU.

    Args:
        shape: The model's.
        gpu: One of them.
        max_model_len: Where it is not varied.
        times: How long steps take; None: the roofline of shape and GPUs.
    """

    shape: Shape
    gpu: Gpu
    max_model_len: int
    times: StepTimes | None = None

    OWN = frozenset({"tensor_parallel_size", "gpu_memory_utilization", "kv_cache_dtype"})
    """Settings that act by way of memory and step times only: vLLM's scheduler does not see them."""

    @property
    def step_times(self) -> str:
        """As ``RecordedEngine.step_times``."""
        return (self.times or Roofline(self.shape, self.gpu)).description

    def configured(self, changes: Mapping[str, Any]) -> tuple[dict[str, Any], StepTimes]:
        """As ``RecordedEngine.configured``; KV cache blocks follow from the memory unless they are given."""
        options = {**self._defaults(), **changes}
        gpus = options.pop("tensor_parallel_size")
        share = options.pop("gpu_memory_utilization")
        kv_dtype = options.pop("kv_cache_dtype")
        kv_dtype = None if kv_dtype == "auto" else kv_dtype
        blocks = options.pop(BLOCKS, None)
        options["num_blocks"] = blocks or kv_cache_blocks(
            self.shape,
            self.gpu,
            gpus,
            gpu_memory_utilization=share,
            kv_dtype=kv_dtype,
            **{name: options[name] for name in ("block_size", "max_num_batched_tokens", "max_num_seqs")},
        )
        needed = -(-options["max_model_len"] // options["block_size"])
        if options["num_blocks"] < needed:
            msg = (
                f"vLLM would not start: a request of max_model_len {options['max_model_len']:,} needs "
                f"{needed:,} KV cache blocks, and there are {options['num_blocks']:,}"
            )
            raise UsageError(msg)
        return options, self.times or Roofline(self.shape, self.gpu, gpus, kv_dtype)

    def base(self, names: Iterable[str]) -> dict[str, Any]:
        """As ``RecordedEngine.base``; None also for the KV cache blocks, which follow from other settings."""
        defaults = self._defaults()
        return {name: defaults.get(name) for name in names}

    def require_known(self, names: Iterable[str]) -> None:
        """As ``RecordedEngine.require_known``."""
        from schedtrace.simulate.recorded_engine import parsed  # noqa: PLC0415  # imports vLLM

        parsed([f"{name}=0" for name in names if name not in self.OWN])

    def _defaults(self) -> dict[str, Any]:
        """Of ``EngineArgs.get_batch_defaults`` in vLLM 0.32, for ``OPENAI_API_SERVER``."""
        a100 = self.gpu.name.lower().startswith("a100")
        very_large = self.gpu.memory_bytes >= VERY_LARGE_BYTES
        large = very_large or (self.gpu.memory_bytes >= LARGE_BYTES and not a100)
        return {
            "max_num_batched_tokens": 16_384 if very_large else 8192 if large else 2048,
            "max_num_seqs": 1024 if large else 256,
            "max_model_len": self.max_model_len,
            "block_size": 16,
            "enable_prefix_caching": True,
            "async_scheduling": True,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.92,
            "kv_cache_dtype": "auto",
        }


Engine = RecordedEngine | ModelledEngine
