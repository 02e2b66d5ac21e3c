"""Step times from a model's shape and a GPU: the roofline.

Formulas and sources: ``docs/simulation.md``. The result is a rough estimate for use without a recording; a
fit to a trace is better. A GPU's peak performance is from its vendor's data sheet. The model takes a part of
the GPU's memory, and KV cache blocks take the rest. All figures are for one of ``tensor_parallel_size`` GPUs;
figures of memory are estimates.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from schedtrace.errors import UsageError
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.constants import HostTimes, OnHost
from schedtrace.step_times.shapes import DTYPE_BYTES, Shape


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU; rates are per second, for dense matrices (half of the rates for sparse ones)."""

    name: str
    bf16_flops: float
    fp8_flops: float
    """Operations per second in FP8; those of BF16 if the GPU has no FP8, because such weights are converted
    as they are read."""
    memory_bytes_per_s: float
    memory_bytes: int
    """Total memory as the driver reports it; vLLM takes its share of this."""
    link_bytes_per_s: float
    """Bandwidth of NVLink in one direction: half of the sum that data sheets state."""


MIB = 2**20
GPUS = {
    "a100": Gpu("A100 SXM 80GB", 312e12, 312e12, 2.039e12, 81_920 * MIB, 300e9),
    "h100": Gpu("H100 SXM", 989e12, 1979e12, 3.35e12, 81_559 * MIB, 450e9),
    "h200": Gpu("H200 SXM", 989e12, 1979e12, 4.8e12, 143_771 * MIB, 450e9),
    "b200": Gpu("B200 SXM", 2250e12, 4500e12, 8e12, 183_359 * MIB, 900e9),
}
"""GPUs by name, from NVIDIA's data sheets of A100, H100 and H200; the values of B200 are an eighth of the DGX
B200's."""


SAID_BESIDE = frozenset({"", "nvidia", "sxm", "sxm4", "sxm5", "sxm6", "80gb", "hbm2e", "hbm3", "hbm3e"})
"""Words in a GPU's name that do not distinguish GPUs of the table."""


def gpu(name: str) -> Gpu:
    """Return the GPU of this name, however spelled: ``h100``, ``H100-SXM``, ``NVIDIA H100 80GB HBM3``.

    Raises:
        UsageError: If the GPU is not in the table; an H100 on another board (PCIe, NVL) is another GPU.
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
        """Return the name in the table; vLLM treats "A100 SXM 80GB" specially."""
        return self._gpu.name

    def get_device_total_memory(self) -> int:
        """Return the GPU's memory in bytes."""
        return int(self._gpu.memory_bytes)

    def is_cpu(self, *_: object) -> bool:
        """Return False: the platform is a GPU."""
        return False

    is_tpu = is_device_capability = is_cpu


OUTSIDE_BYTES = 2**30
"""Assumed bytes for CUDA context, NCCL's buffers and CUDA graphs, which belong to no tensor."""
LIVE_HIDDEN, LIVE_INTERMEDIATE = 4, 2
"""Assumed number of a layer's activations that exist at once: of the model's width, and of its MLP's."""
LOGITS_BYTES = 4
"""Bytes of a logit: vLLM samples from float32 values."""
OF_MEMORY = {"gpu_memory_utilization", "kv_cache_memory_bytes", "cache_dtype", "kv_cache_dtype"}
"""Settings that change the number of KV cache blocks through a GPU's memory."""
FIT_TO_MEMORY = {None, -1, "auto"}
"""Values of ``max_model_len`` that let the size of the KV cache determine the length, as in vLLM."""
MOST_BLOCKS = 2**18
"""Maximum number of KV cache blocks for a tiny model, because each block is an object in vLLM's memory."""


def refuse_memory_setting(name: str, option: str = "--set") -> None:
    """Refuse to change a setting of ``OF_MEMORY`` in a replay.

    Raises:
        UsageError: If the setting is one of them; the text states what to use instead.
    """
    if name in OF_MEMORY:
        msg = (
            f"{option} {name}: it acts through the GPU's memory, which a replay does not have: "
            "--set num_gpu_blocks_override=N"
        )
        raise UsageError(msg)


def dtype_bytes(dtype: str) -> float:
    """Return the size in bytes of a number of this type.

    Raises:
        UsageError: If the type is unknown.
    """
    if dtype not in DTYPE_BYTES:
        msg = f"unknown data type '{dtype}': known are {', '.join(DTYPE_BYTES)}"
        raise UsageError(msg)
    return DTYPE_BYTES[dtype]


def weight_bytes(shape: Shape, tensor_parallel_size: int = 1) -> float:
    """Return the bytes of weights on each GPU: layers in the stored type, embeddings in the model's type."""
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    layers = (shape.parameters - embeddings) * dtype_bytes(shape.weight_dtype)
    return (layers + embeddings * dtype_bytes(shape.dtype)) / tensor_parallel_size


def kv_bytes_per_token(shape: Shape, dtype: str | None = None, tensor_parallel_size: int = 1) -> float:
    """Return the bytes of KV cache that a token takes on each GPU.

    Heads are divided among the GPUs, each of which has at least one. Latent attention (MLA) caches one vector
    for all heads, on every GPU.

    Args:
        shape: Shape of the model.
        dtype: Type of the cache; None for the model's type.
        tensor_parallel_size: Number of GPUs.
    """
    each = dtype_bytes(dtype or shape.dtype)
    if shape.kv_rank:
        return shape.layers * (shape.kv_rank + shape.rope_dim) * each
    heads = max(1.0, shape.kv_heads / tensor_parallel_size)
    return 2 * shape.layers * heads * shape.head_dim * each


def activation_bytes(shape: Shape, max_num_batched_tokens: int, max_num_seqs: int, tp: int = 1) -> float:
    """Estimate the peak memory of activations, in bytes, that vLLM measures with its largest batch."""
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
    """Return the number of KV cache blocks that fit into the rest of vLLM's share of the memory.

    The number is at most ``MOST_BLOCKS``.

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


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's figures that kernels reach, and their other costs; all are assumptions."""

    compute: float = 0.7
    """Share of the peak rate: 780 of 989 TFLOP/s were measured for one large BF16 product on an H100, but
    layers have smaller products."""
    memory: float = 0.8
    """Share of the memory bandwidth, compared in ``docs/simulation.md`` with measured decodes of a model with
    72 billion parameters on two H100."""
    step_us: float = 500.0
    """Time for input preparation, sampling, and the output's transfer to the host."""
    layer_us: float = 10.0
    """Time of the gaps between the kernels of a layer, replayed from a CUDA graph."""
    all_reduce_us: float = 10.0
    """Latency of one all-reduce among GPUs linked by NVLink; each layer has two all-reduces."""


DEFAULT_EFFICIENCY, DEFAULT_HOST = Efficiency(), HostTimes()


@dataclass(frozen=True)
class Roofline(OnHost):
    """Step times of a shape on GPUs; each group of kernels takes the longer of compute and memory time.

    Args:
        shape: Shape of the model.
        gpu: One of the GPUs.
        tensor_parallel_size: Number of GPUs.
        kv_dtype: Type of the KV cache; None for the model's type.
        efficiency: Efficiency of kernels.
        host: Times of the engine's own work.

    Raises:
        UsageError: If heads cannot be divided among the GPUs, or a type is unknown.
    """

    shape: Shape
    gpu: Gpu
    tensor_parallel_size: int = 1
    kv_dtype: str | None = None
    efficiency: Efficiency = DEFAULT_EFFICIENCY
    host: HostTimes = DEFAULT_HOST

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1 or self.shape.heads % self.tensor_parallel_size:
            msg = (
                f"--tensor-parallel-size {self.tensor_parallel_size} does not divide the "
                f"{self.shape.heads} attention heads of {self.shape.name}"
            )
            raise UsageError(msg)
        dtype_bytes(self.kv_dtype or self.shape.dtype)

    @property
    def description(self) -> str:
        """Sentence with the model, the GPU and the assumed efficiency."""
        return (
            f"Roofline of {self.shape.name} ({self.shape.weight_dtype} weights) on "
            f"{self.tensor_parallel_size} x {self.gpu.name}: {self.efficiency.compute:.0%} of its compute, "
            f"{self.efficiency.memory:.0%} of its memory bandwidth (assumed); "
            f"an estimate within a factor of two"
            f"{', far too fast for small batches of experts' if self.shape.experts else ''}."
        )

    def device_us(self, batch: Batch) -> float:
        """Return the microseconds of weights, attention, all-reduces and launches; 0 without tokens."""
        tokens = batch.prefill_tokens + batch.decode_tokens
        if not tokens:
            return 0.0
        return (
            self._weights_us(batch, tokens)
            + self._attention_us(batch, tokens)
            + self._all_reduce_us(tokens)
            + self.efficiency.step_us
            + self.efficiency.layer_us * self.shape.layers
        )

    @cached_property
    def _kv_bytes(self) -> float:
        return kv_bytes_per_token(self.shape, self.kv_dtype, self.tensor_parallel_size)

    @cached_property
    def _pair_flops(self) -> tuple[int, int]:
        """Operations per pair of tokens in all layers: in prefill, and in decode."""
        shape = self.shape
        if not shape.kv_rank:
            each = 4 * shape.layers * shape.heads * shape.head_dim
            return each, each
        per_head = 2 * shape.layers * shape.heads
        prefill = shape.nope_dim + shape.rope_dim + shape.value_dim
        return per_head * prefill, per_head * (2 * shape.kv_rank + shape.rope_dim)

    def _weights_us(self, batch: Batch, tokens: int) -> float:
        shape = self.shape
        fp8 = shape.weight_dtype == "fp8"
        # vLLM computes logits for the last token of every chunk, used or not.
        sampled = batch.decode_tokens + batch.prefill_requests
        layers = 2 * shape.active_parameters * tokens / (self.gpu.fp8_flops if fp8 else self.gpu.bf16_flops)
        logits = 2 * shape.hidden * shape.vocab * sampled / self.gpu.bf16_flops
        # A step does not read input embeddings, nor experts without tokens.
        unread = 0.0 if shape.tied else shape.vocab * shape.hidden * dtype_bytes(shape.dtype)
        if shape.experts:
            missed = (1 - shape.experts_per_token / shape.experts) ** tokens
            routed = shape.expert_layers * shape.experts * shape.expert_parameters
            unread += missed * routed * dtype_bytes(shape.weight_dtype)
        read = weight_bytes(shape) - unread
        return self._longer((layers + logits), read / self.gpu.memory_bytes_per_s) / self.tensor_parallel_size

    def _attention_us(self, batch: Batch, tokens: int) -> float:
        prefill_flops, decode_flops = self._pair_flops
        # Each of a request's decode tokens (one, and drafts) attends over the request's context.
        each = batch.decode_tokens / batch.decode_requests if batch.decode_requests else 0.0
        pairs = prefill_flops * batch.prefill_attention + decode_flops * each * batch.decode_context_tokens
        moved = self._kv_bytes * (batch.context_tokens + tokens)
        compute = pairs / self.tensor_parallel_size / self.gpu.bf16_flops
        return self._longer(compute, moved / self.gpu.memory_bytes_per_s)

    def _all_reduce_us(self, tokens: int) -> float:
        """Return the microseconds of two all-reduces per layer, in a ring of the GPUs."""
        gpus = self.tensor_parallel_size
        if gpus == 1:
            return 0.0
        sent = 2 * (gpus - 1) / gpus * tokens * self.shape.hidden * dtype_bytes(self.shape.dtype)
        each = self.efficiency.all_reduce_us + 1e6 * sent / self.gpu.link_bytes_per_s
        return 2 * self.shape.layers * each

    def _longer(self, compute_s: float, memory_s: float) -> float:
        return 1e6 * max(compute_s / self.efficiency.compute, memory_s / self.efficiency.memory)
