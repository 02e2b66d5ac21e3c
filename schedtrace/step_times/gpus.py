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
    source: str


MIB = 2**20
GPUS = {
    "a100": Gpu(
        "A100 SXM 80GB",
        bf16_flops=312e12,
        fp8_flops=312e12,
        memory_bytes_per_s=2.039e12,
        memory_bytes=81_920 * MIB,
        link_bytes_per_s=300e9,
        source="NVIDIA A100 Tensor Core GPU data sheet",
    ),
    "h100": Gpu(
        "H100 SXM",
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory_bytes_per_s=3.35e12,
        memory_bytes=81_559 * MIB,
        link_bytes_per_s=450e9,
        source="NVIDIA H100 Tensor Core GPU data sheet",
    ),
    "h200": Gpu(
        "H200 SXM",
        bf16_flops=989e12,
        fp8_flops=1979e12,
        memory_bytes_per_s=4.8e12,
        memory_bytes=143_771 * MIB,
        link_bytes_per_s=450e9,
        source="NVIDIA H200 Tensor Core GPU data sheet",
    ),
    "b200": Gpu(
        "B200 SXM",
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes_per_s=8e12,
        memory_bytes=183_359 * MIB,
        link_bytes_per_s=900e9,
        source="NVIDIA DGX B200 data sheet, an eighth of it",
    ),
}


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
