"""What a GPU can do at best, from its vendor's data sheet."""

import re
from dataclasses import dataclass

from schedtrace.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """One GPU. Rates are a second's, of dense matrices; data sheets state twice that for sparse ones."""

    name: str
    bf16_flops: float
    fp8_flops: float
    """That of BF16 where the GPU has no FP8: weights in FP8 are converted as they are read."""
    memory_bytes_per_s: float
    memory_bytes: int
    """What the driver reports as total: vLLM takes its share of that."""
    link_bytes_per_s: float
    """NVLink, in one direction: half of what a data sheet states for both."""


MIB = 2**20
GPUS = {
    "a100": Gpu("A100 SXM 80GB", 312e12, 312e12, 2.039e12, 81_920 * MIB, 300e9),
    "h100": Gpu("H100 SXM", 989e12, 1979e12, 3.35e12, 81_559 * MIB, 450e9),
    "h200": Gpu("H200 SXM", 989e12, 1979e12, 4.8e12, 143_771 * MIB, 450e9),
    "b200": Gpu("B200 SXM", 2250e12, 4500e12, 8e12, 183_359 * MIB, 900e9),
}
"""By NVIDIA's data sheets of the Tensor Core GPUs A100, H100 and H200; an eighth of that of the DGX B200."""


SAID_BESIDE = frozenset({"", "nvidia", "sxm", "sxm4", "sxm5", "sxm6", "80gb", "hbm2e", "hbm3", "hbm3e"})
"""Words of a name that make no difference between the GPUs of the table."""


def gpu(name: str) -> Gpu:
    """The GPU of this name, however it is spelled: ``h100``, ``H100-SXM``, ``NVIDIA H100 80GB HBM3``.

    Raises:
        UsageError: it is not in the table; an H100 with another board (PCIe, NVL) is another GPU.
    """
    words = set(re.split(r"[\s_-]+", name.lower())) - SAID_BESIDE
    found = GPUS.get(words.pop()) if len(words) == 1 else None
    if found is None:
        msg = f"unknown GPU '{name}': known are {', '.join(GPUS)}"
        raise UsageError(msg)
    return found


class GpuPlatform:
    """Stands in for vLLM's ``current_platform`` in ``EngineArgs.get_batch_defaults``."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def get_device_name(self) -> str:
        """As in the table: "A100 SXM 80GB" makes a difference to vLLM."""
        return self._gpu.name

    def get_device_total_memory(self) -> int:
        """Bytes."""
        return int(self._gpu.memory_bytes)

    def is_cpu(self, *_: object) -> bool:
        """No."""
        return False

    is_tpu = is_device_capability = is_cpu
