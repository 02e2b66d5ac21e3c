"""Peak performance of a GPU, from its vendor's data sheet, and the use of its memory.

A model takes so much of it, and KV cache blocks take the rest. All figures are of one GPU out of
``tensor_parallel_size``; those of memory are estimates: ``docs/simulation.md``.
"""

import re
from dataclasses import dataclass
from typing import TypedDict

from schedtrace.errors import UsageError
from schedtrace.step_times.shapes import DTYPE_BYTES, Shape


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU; rates per second, for dense matrices (half of those for sparse ones)."""

    name: str
    bf16_flops: float
    fp8_flops: float
    """Rate of FP8; of BF16 where the GPU has no FP8: such weights are converted as they are read."""
    memory_bytes_per_s: float
    memory_bytes: int
    """Total memory as the driver reports it: vLLM takes its share of that."""
    link_bytes_per_s: float
    """NVLink, in one direction: half of what a data sheet states for both."""


MIB = 2**20
GPUS = {
    "a100": Gpu("A100 SXM 80GB", 312e12, 312e12, 2.039e12, 81_920 * MIB, 300e9),
    "h100": Gpu("H100 SXM", 989e12, 1979e12, 3.35e12, 81_559 * MIB, 450e9),
    "h200": Gpu("H200 SXM", 989e12, 1979e12, 4.8e12, 143_771 * MIB, 450e9),
    "b200": Gpu("B200 SXM", 2250e12, 4500e12, 8e12, 183_359 * MIB, 900e9),
}
"""GPUs by name, from NVIDIA's data sheets of A100, H100 and H200; B200 is an eighth of the DGX B200."""


SAID_BESIDE = frozenset({"", "nvidia", "sxm", "sxm4", "sxm5", "sxm6", "80gb", "hbm2e", "hbm3", "hbm3e"})
"""Words in a name that do not distinguish the GPUs of the table."""


def gpu(name: str) -> Gpu:
    """Return the GPU of this name, however spelled: ``h100``, ``H100-SXM``, ``NVIDIA H100 80GB HBM3``.

    Raises:
        UsageError: If it is not in the table; an H100 with another board (PCIe, NVL) is another GPU.
    """
    words = set(re.split(r"[\s_-]+", name.lower())) - SAID_BESIDE
    match = GPUS.get(words.pop()) if len(words) == 1 else None
    if match is None:
        msg = f"unknown GPU '{name}': known are {', '.join(GPUS)}"
        raise UsageError(msg)
    return match


class GpuPlatform:
    """Stand-in for vLLM's ``current_platform`` in ``EngineArgs.get_batch_defaults``."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def get_device_name(self) -> str:
        """Return the name as in the table: "A100 SXM 80GB" makes a difference to vLLM."""
        return self._gpu.name

    def get_device_total_memory(self) -> int:
        """Return its memory, in bytes."""
        return int(self._gpu.memory_bytes)

    def is_cpu(self, *_: object) -> bool:
        """Return False: it is a GPU."""
        return False

    is_tpu = is_device_capability = is_cpu


OUTSIDE_BYTES = 2**30
"""Assumed bytes for CUDA context, NCCL's buffers and CUDA graphs, which no tensor accounts for."""
LIVE_HIDDEN, LIVE_INTERMEDIATE = 4, 2
"""Assumed activations of a layer that are alive at once, in widths of the model and of its MLP."""
LOGITS_BYTES = 4
"""Bytes of a logit, from which vLLM samples in float32."""
OF_MEMORY = {"gpu_memory_utilization", "kv_cache_memory_bytes", "cache_dtype", "kv_cache_dtype"}
"""Settings that change the number of KV cache blocks through a GPU's memory."""
FIT_TO_MEMORY = {None, -1, "auto"}
"""Values of ``max_model_len`` that let the KV cache decide, as vLLM itself does."""
MOST_BLOCKS = 2**18
"""KV cache blocks of an engine whose model is tiny: each is an object in vLLM's memory."""


def refuse_memory_setting(name: str, option: str = "--set") -> None:
    """Refuse to change a setting of ``OF_MEMORY`` in a replay.

    Raises:
        UsageError: If it is such a setting; the text states what to use instead.
    """
    if name in OF_MEMORY:
        msg = (
            f"{option} {name}: it acts by way of the GPU's memory, which a replay lacks: "
            "--set num_gpu_blocks_override=N"
        )
        raise UsageError(msg)


def dtype_bytes(dtype: str) -> float:
    """Return the bytes of a number of this type.

    Raises:
        UsageError: If the type is unknown.
    """
    if dtype not in DTYPE_BYTES:
        msg = f"unknown data type '{dtype}': known are {', '.join(DTYPE_BYTES)}"
        raise UsageError(msg)
    return DTYPE_BYTES[dtype]


def weight_bytes(shape: Shape, tensor_parallel_size: int = 1) -> float:
    """Return the bytes of weights on each GPU: layers as stored, embeddings in the model's own type."""
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    layers = (shape.parameters - embeddings) * dtype_bytes(shape.weight_dtype)
    return (layers + embeddings * dtype_bytes(shape.dtype)) / tensor_parallel_size


def kv_bytes_per_token(shape: Shape, dtype: str | None = None, tensor_parallel_size: int = 1) -> float:
    """Return the bytes of KV cache that a token takes on each GPU.

    Heads are divided among GPUs, and each has one at least. Latent attention (MLA) caches one vector for all
    heads, on every GPU.

    Args:
        shape: Shape of the model.
        dtype: Type of the cache; None: as the model's.
        tensor_parallel_size: Number of GPUs.
    """
    each = dtype_bytes(dtype or shape.dtype)
    if shape.kv_rank:
        return shape.layers * (shape.kv_rank + shape.rope_dim) * each
    heads = max(1.0, shape.kv_heads / tensor_parallel_size)
    return 2 * shape.layers * heads * shape.head_dim * each


def activation_bytes(shape: Shape, max_num_batched_tokens: int, max_num_seqs: int, tp: int = 1) -> float:
    """Estimate the peak, in bytes, that vLLM measures with a batch of its largest size."""
    wide = max(shape.intermediate if shape.dense_layers or not shape.experts else 0,
               (shape.experts_per_token + shape.shared_experts) * shape.expert_intermediate)  # fmt: skip
    width = LIVE_HIDDEN * shape.hidden + LIVE_INTERMEDIATE * wide / tp
    logits = max_num_seqs * shape.vocab * LOGITS_BYTES
    return max_num_batched_tokens * width * dtype_bytes(shape.dtype) + logits


class CacheOptions(TypedDict, total=False):
    """Options of ``kv_cache_blocks``."""

    tensor_parallel_size: int
    block_size: int
    gpu_memory_utilization: float
    kv_dtype: str | None
    max_num_batched_tokens: int
    max_num_seqs: int


def kv_cache_blocks(
    shape: Shape,
    gpu: Gpu,
    tensor_parallel_size: int = 1,
    *,
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    kv_dtype: str | None = None,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
) -> int:
    """Return the KV cache blocks of ``block_size`` tokens in what is left of vLLM's share of the memory.

    At most ``MOST_BLOCKS``.

    Raises:
        UsageError: If the weights do not fit, or nothing is left for the cache.
    """
    share = gpu.memory_bytes * gpu_memory_utilization
    weights = weight_bytes(shape, tensor_parallel_size)
    peak = activation_bytes(shape, max_num_batched_tokens, max_num_seqs, tensor_parallel_size)
    per_block = block_size * kv_bytes_per_token(shape, kv_dtype, tensor_parallel_size)
    blocks = int((share - weights - peak - OUTSIDE_BYTES) // per_block)
    if blocks < 1:
        msg = (
            f"{shape.name} does not fit: {(weights + peak + OUTSIDE_BYTES) / 1e9:.1f} GB on each of "
            f"{tensor_parallel_size} {gpu.name}, which has {share / 1e9:.1f} GB for vLLM; "
            f"raise --tensor-parallel-size"
        )
        raise UsageError(msg)
    return min(blocks, MOST_BLOCKS)
