"""Settings of a device that is simulated in real time, and the resulting step times of a model.

vLLM passes the settings to the engine's process in its own ``additional_config``, under ``KEY``. A setting of
vLLM reaches every engine process, including a Ray actor's, and appears in vLLM's log, whereas an environment
variable may not.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import msgspec

from schedtrace.errors import UsageError
from schedtrace.step_times.batch import Batch, StepTimes
from schedtrace.step_times.roofline import GPUS, CacheOptions, Gpu, Roofline, gpu, kv_cache_blocks
from schedtrace.step_times.shapes import shape

if TYPE_CHECKING:
    from schedtrace.step_times.fitted import Fitted

MOST = 1.0
"""Maximum standard deviation of the noise; a larger one would no longer be noise."""


class Noisy:
    """Another model's step times (``StepTimes``), with device times multiplied by lognormal noise of mean 1.

    Each call draws a new factor, so two calls for the same batch return different times.

    Args:
        times: Step times of the other model.
        deviation: Standard deviation of the factor's logarithm: 0.03 is about 3 %.
        seed: Seed of the draws.

    Raises:
        UsageError: If ``deviation`` is negative or above ``MOST``.
    """

    def __init__(self, times: StepTimes, deviation: float, seed: int = 0) -> None:
        if not 0 <= deviation <= MOST:
            msg = f"noise of {deviation:g}: it is a share of a step's time, from 0 to {MOST:g}"
            raise UsageError(msg)
        self._times, self._deviation = times, deviation
        self._random = random.Random(seed)  # noqa: S311  # no secret hangs on it
        self._seed = seed

    @property
    def description(self) -> str:
        """Sentences about the step times and about their noise."""
        return (
            f"{self._times.description} Device times scatter lognormally by {self._deviation:.1%} "
            f"(seed {self._seed})."
        )

    def device_us(self, batch: Batch) -> float:
        """Return the time of execution in the worker, with noise, in microseconds."""
        factor = self._random.lognormvariate(-(self._deviation**2) / 2, self._deviation)
        return self._times.device_us(batch) * factor

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the step times; the host's times have no noise."""
        return getattr(self._times, name)


KEY = "schedtrace"


class SimulatedDevice(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Simulated device, or several equal devices; ``gpu`` or ``step_times`` must be set."""

    gpu: str | None = None
    """Name in ``roofline.GPUS``, which determines the memory and, without ``step_times``, a roofline of the
    model."""
    step_times: str | None = None
    """File of a saved fit (``fitted.load_fit``)."""
    noise: Annotated[float, msgspec.Meta(ge=0, le=MOST)] = 0.0
    """Standard deviation of the logarithm of each step's device time."""
    seed: int = 0
    """Random seed of the noise."""
    async_scheduling: bool | None = None
    """Value for vLLM's setting, which its CPU build switches off by default; None for vLLM's choice."""
    device: str | None = None
    """Name of the device in traces; the executor sets it."""

    def gpu_of(self) -> Gpu | None:
        """Return the GPU; None if it is not set.

        Raises:
            UsageError: If the GPU is unknown.
        """
        return None if self.gpu is None else gpu(self.gpu)

    def saved_times(self) -> "Fitted | None":
        """Return the saved step times; None if they are not set.

        Raises:
            InputError: If the file does not exist.
        """
        if self.step_times is None:
            return None
        from schedtrace.step_times.fitted import load_fit  # noqa: PLC0415  # Polars, which a roofline does not need

        return load_fit(Path(self.step_times))

    def name_in_traces(self) -> str:
        """Return the device's name in traces.

        Raises:
            UsageError: If the GPU is unknown, or neither a GPU nor saved step times are set.
            InputError: If the file of step times does not exist.
        """
        fitted = self.saved_times()
        if self.gpu is None and fitted is not None:
            return f"simulated {fitted.fit.source.device.removeprefix('simulated ')}"
        return f"simulated NVIDIA {self._required_gpu().name}"

    def times(self, model: str, tensor_parallel_size: int, kv_dtype: str | None = None) -> StepTimes:
        """Return the step times, from the file or else from a roofline, with the noise.

        Args:
            model: Name or path for ``shapes.shape``.
            tensor_parallel_size: Number of GPUs that share a step.
            kv_dtype: Type of the KV cache; None for the model's type.

        Raises:
            UsageError: If the GPU, model or type is unknown, or neither a GPU nor step times are set.
            InputError: If the file does not exist, or the model's folder cannot be read.
        """
        times: StepTimes | None = self.saved_times()
        if times is None:
            times = Roofline(shape(model), self._required_gpu(), tensor_parallel_size, kv_dtype)
        return Noisy(times, self.noise, self.seed) if self.noise else times

    def memory_blocks(
        self, model: str, *, pipeline_parallel_size: int = 1, **options: Unpack[CacheOptions]
    ) -> int:
        """Return the number of KV cache blocks in the GPU's memory.

        Args:
            model: Name or path for ``shapes.shape``.
            pipeline_parallel_size: Number of parts into which the layers are divided.
            options: Options of ``roofline.kv_cache_blocks``.

        Raises:
            UsageError: If no GPU is set, or the model does not fit.
            InputError: If a model's folder cannot be read.
        """
        device = self.gpu_of()
        if device is None:
            msg = "without a GPU the KV cache's size is unknown: give --gpu or --num-gpu-blocks-override"
            raise UsageError(msg)
        whole = shape(model)
        layers = -(-whole.layers // pipeline_parallel_size)
        # Embeddings count in each stage, though two stages have them.
        largest = replace(whole, layers=layers, dense_layers=min(whole.dense_layers, layers))
        return kv_cache_blocks(largest, device, **options)

    def _required_gpu(self) -> Gpu:
        device = self.gpu_of()
        if device is None:
            msg = f"the simulated executor needs a GPU or saved step times: --gpu {' or '.join(GPUS)}"
            raise UsageError(msg)
        return device


def simulated_device(additional_config: Any) -> SimulatedDevice:
    """Return the device that ``additional_config`` asks for.

    Raises:
        UsageError: If a key or value does not belong to ``SimulatedDevice``.
    """
    settings = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    try:
        return msgspec.convert(settings, SimulatedDevice)
    except msgspec.ValidationError as error:
        msg = f'additional_config["{KEY}"]: {error}'
        raise UsageError(msg) from error
