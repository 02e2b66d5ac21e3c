"""Step times from a model's shape and a GPU: the roofline. Formulas and sources: ``docs/simulation.md``.

The result is an estimate within a factor, for use without a recording; a fitted trace is better.
"""

from dataclasses import dataclass
from functools import cached_property

from schedtrace.errors import UsageError
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.constants import HostTimes, OnHost
from schedtrace.step_times.gpus import Gpu, dtype_bytes, kv_bytes_per_token, weight_bytes
from schedtrace.step_times.shapes import Shape


@dataclass(frozen=True)
class Efficiency:
    """Share of a data sheet's figures that kernels reach, and their other costs. All are assumptions."""

    compute: float = 0.7
    """780 of 989 TFLOP/s were measured for one large BF16 product on an H100; layers have smaller ones."""
    memory: float = 0.8
    """Compared with measured decode of 72 billion parameters on two H100 in ``docs/simulation.md``."""
    step_us: float = 500.0
    """Input preparation, sampling, and the output's way to the host."""
    layer_us: float = 10.0
    """Gaps between the kernels of a layer, replayed from a CUDA graph."""
    all_reduce_us: float = 10.0
    """Latency of one all-reduce among GPUs linked by NVLink; a layer has two."""


DEFAULT_EFFICIENCY, DEFAULT_HOST = Efficiency(), HostTimes()


@dataclass(frozen=True)
class Roofline(OnHost):
    """Times of a shape on GPUs; each group of kernels takes the longer of compute and memory time.

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
        """Operations of a pair of tokens in all layers: in prefill, and in decode."""
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
        read = weight_bytes(shape) - self._unread_bytes(tokens)
        return self._longer((layers + logits), read / self.gpu.memory_bytes_per_s) / self.tensor_parallel_size

    def _unread_bytes(self, tokens: int) -> float:
        """Return the bytes that a step does not read: experts without tokens, and input embeddings."""
        shape = self.shape
        unread = 0.0 if shape.tied else shape.vocab * shape.hidden * dtype_bytes(shape.dtype)
        if shape.experts:
            missed = (1 - shape.experts_per_token / shape.experts) ** tokens
            routed = shape.expert_layers * shape.experts * shape.expert_parameters
            unread += missed * routed * dtype_bytes(shape.weight_dtype)
        return unread

    def _attention_us(self, batch: Batch, tokens: int) -> float:
        prefill_flops, decode_flops = self._pair_flops
        # Each of a request's decode tokens (one, and drafts) attends over the request's context.
        each = batch.decode_tokens / batch.decode_requests if batch.decode_requests else 0.0
        pairs = prefill_flops * batch.prefill_attention + decode_flops * each * batch.decode_context_tokens
        moved = self._kv_bytes * (batch.context_tokens + tokens)
        compute = pairs / self.tensor_parallel_size / self.gpu.bf16_flops
        return self._longer(compute, moved / self.gpu.memory_bytes_per_s)

    def _all_reduce_us(self, tokens: int) -> float:
        """Return the microseconds of two all-reduces a layer, in a ring of the GPUs."""
        gpus = self.tensor_parallel_size
        if gpus == 1:
            return 0.0
        sent = 2 * (gpus - 1) / gpus * tokens * self.shape.hidden * dtype_bytes(self.shape.dtype)
        each = self.efficiency.all_reduce_us + 1e6 * sent / self.gpu.link_bytes_per_s
        return 2 * self.shape.layers * each

    def _longer(self, compute_s: float, memory_s: float) -> float:
        return 1e6 * max(compute_s / self.efficiency.compute, memory_s / self.efficiency.memory)
