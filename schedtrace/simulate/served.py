"""Simulated executor in real time, for an engine that serves: ``vllm serve`` and ``schedtrace run``.

vLLM loads this executor by its path (``--distributed-executor-backend
schedtrace.simulate.served.ServedExecutor``) and creates it from vLLM's configuration alone, in the engine's
process. No weights are loaded and no memory is taken.
"""

import os
from concurrent.futures import Future
from typing import Any

import msgspec
import torch
from loguru import logger
from vllm.distributed.utils import get_pp_indices
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from schedtrace.errors import UsageError
from schedtrace.record.header import data_parallel_rank
from schedtrace.simulate import CPU_CACHE_SPACE, platform_is_cpu, releases
from schedtrace.simulate.clock import MachineClock
from schedtrace.simulate.executor import DUMMY, EngineClock, ModelRunner, Ran, SimulatedExecutor
from schedtrace.simulate.lockstep import CommonPasses
from schedtrace.step_times.batch import Batch
from schedtrace.step_times.roofline import MOST_BLOCKS
from schedtrace.step_times.simulated_device import KEY, simulated_device

FULL, SLIDING = "full_attention", "sliding_attention"
_SUPPORTED = f"layers of {FULL.replace('_', ' ')}, {SLIDING.replace('_', ' ')} and latent attention (MLA)"


def kv_cache_specs(config: Any) -> list[dict[str, Any]]:
    """Return vLLM's ``KVCacheSpec`` by layer name, for each stage of a pipeline.

    All GPUs of one stage have the same layers, so one GPU represents them.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UsageError: If the KV cache of any layer does not consist of keys and values of tokens.
    """
    model, parallel = config.model_config, config.parallel_config
    kinds = _kinds(model)
    stages = parallel.pipeline_parallel_size
    return [
        {
            f"model.layers.{layer}.self_attn.attn": _spec(config, kinds[layer])
            for layer in range(*get_pp_indices(len(kinds), stage, stages))
        }
        for stage in range(stages)
    ]


def kv_dtype(config: Any) -> str | None:
    """Return the KV cache's data type as ``step_times`` names it; None for the model's data type.

    Raises:
        UsageError: If the data type cannot be simulated.
    """
    dtype = str(config.cache_config.cache_dtype)
    if dtype == "auto":
        return None
    if dtype in {"fp8", "fp8_e4m3", "fp8_e5m2"}:
        return "fp8"
    if dtype in {"bfloat16", "float16", "float32"}:
        return dtype
    msg = f"--kv-cache-dtype {dtype} cannot be simulated: known are auto, bfloat16, float16, float32 and fp8"
    raise UsageError(msg)


def _kinds(model: Any) -> list[str]:
    """Return each layer's kind of attention."""
    text = model.hf_text_config
    unsupported = [
        name
        for name, present in (
            ("state-space layers", model.is_hybrid or model.has_inner_state or model.is_attention_free),
            ("an encoder and a decoder", getattr(model, "is_encoder_decoder", False)),
        )
        if present
    ]
    window = model.get_sliding_window()
    layers = list(
        getattr(text, "layer_types", None) or [SLIDING if window else FULL] * text.num_hidden_layers
    )
    unsupported += sorted({kind.replace("_", " ") for kind in set(layers) - {FULL, SLIDING}})
    if unsupported:
        msg = f"{model.model} has {', '.join(unsupported)}: only {_SUPPORTED} can be simulated"
        raise UsageError(msg)
    return [FULL if not window else kind for kind in layers]


def _spec(config: Any, kind: str) -> Any:
    model, cache = config.model_config, config.cache_config
    dtypes = {None: model.dtype, "fp8": torch.uint8}
    named = kv_dtype(config)
    arguments = {
        "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": dtypes[named] if named in dtypes else getattr(torch, str(named)),
        "use_mla": model.use_mla,
    }
    spec: Any = FullAttentionSpec
    if model.use_mla:
        spec = getattr(kv_cache_interface, "MLAAttentionSpec", FullAttentionSpec)  # 0.10.0 has one for both
        arguments["num_kv_heads"], arguments["cache_dtype_str"] = 1, cache.cache_dtype
    elif kind == SLIDING:
        spec, arguments["sliding_window"] = SlidingWindowSpec, model.get_sliding_window()
    return spec(block_size=cache.block_size, **releases.supported_arguments(spec, arguments))


class ServedExecutor(SimulatedExecutor):
    """Executor whose batches take as long as ``additional_config["schedtrace"]`` states, in real time.

    Tokens are made up: their text has no meaning, and grammars and log probabilities are ignored.

    Args:
        vllm_config: Configuration of vLLM; its device gets the name of the simulated device.

    Raises:
        UsageError: If a feature cannot be simulated, or the GPU or the model is unknown.
        InputError: If step times or a ``config.json`` cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        _refuse(vllm_config)
        self._device = simulated_device(vllm_config.additional_config)
        self._loras: set[int] = set()
        self._specs = kv_cache_specs(vllm_config)
        parallel = vllm_config.parallel_config
        rank = data_parallel_rank(parallel)
        device = msgspec.structs.replace(self._device, seed=self._device.seed + rank)  # ranks scatter apart
        times = device.times(
            vllm_config.model_config.model, parallel.tensor_parallel_size, kv_dtype(vllm_config)
        )
        vllm_config.additional_config[KEY]["device"] = self._device.name_in_traces()  # the recorder reads it
        if self._device.async_scheduling is not None:  # decides the scheduler's class, made after this
            vllm_config.scheduler_config.async_scheduling = self._device.async_scheduling
        logger.info(
            "schedtrace: {}, nothing is computed. {}", self._device.name_in_traces(), times.description
        )
        clock = MachineClock()
        self._common = None
        if parallel.data_parallel_size > 1:  # of a dense model's ranks each has 1 (vLLM 0.14 and newer)
            self._common = CommonPasses(parallel, clock, parallel.pipeline_parallel_size)
        super().__init__(vllm_config, clock=clock, times=times, model_runner=ModelRunner())

    def execute_dummy_batch(self) -> None:
        """Launch a batch of one token; return once all ranks have launched theirs, as on a GPU."""
        if self._common is None:
            super().execute_dummy_batch()
        else:
            self._common.dispatch(self._times.device_us(DUMMY)).result()

    def _launched(self, now_us: float, batch: Batch, output: Any) -> Future[Any]:
        """Return the output of a batch; in lock-step, it is done when all ranks are done."""
        if self._common is None:
            return super()._launched(now_us, batch, output)
        return _InCommon(self._clock, self._common.dispatch(self._times.device_us(batch)), output)

    def shutdown(self) -> None:
        """Leave the group of ranks."""
        if self._common is not None:
            self._common.close()

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Return the specs of each stage of the pipeline."""
        return self._specs

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return every layout for each GPU, because any is acceptable; vLLM 0.32 and newer ask for them."""
        from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: PLC0415  # older releases have none

        return [[layout.name for layout in KVCacheLayout]] * len(self._specs)

    def determine_available_memory(self) -> list[int]:
        """Return the size of the KV cache per GPU in bytes, for each pipeline stage.

        This is ``--kv-cache-memory-bytes``, or the size of ``--num-gpu-blocks-override``. Otherwise it is the
        GPU memory that the model leaves free (estimated by ``step_times.roofline``). On vLLM's CPU platform,
        ``VLLM_CPU_KVCACHE_SPACE`` replaces ``--kv-cache-memory-bytes``; in that case, neither of the two is
        used.
        """
        config = self.vllm_config
        cache, parallel, scheduler = config.cache_config, config.parallel_config, config.scheduler_config
        kv_bytes = getattr(cache, "kv_cache_memory_bytes", None)  # vLLM 0.11 and newer
        if kv_bytes and not (platform_is_cpu() and os.environ.get(CPU_CACHE_SPACE)):
            return [kv_bytes] * len(self._specs)
        blocks = cache.num_gpu_blocks_override or self._device.memory_blocks(
            config.model_config.model,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            tensor_parallel_size=parallel.tensor_parallel_size,
            block_size=cache.block_size,
            gpu_memory_utilization=cache.gpu_memory_utilization,
            kv_dtype=kv_dtype(config),
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
        )
        if blocks == MOST_BLOCKS:
            logger.warning("schedtrace: KV cache cut to {} blocks, more would only slow vLLM", MOST_BLOCKS)
        return [blocks * sum(spec.page_size_bytes for spec in specs.values()) for specs in self._specs]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """Do nothing, because there is no cache to create and, up to 0.26, nothing to compile."""

    def compile_or_warm_up_model(self) -> None:
        """Do nothing, because there is nothing to compile."""

    def collective_rpc(
        self,
        method: Any,
        timeout: Any = None,
        args: Any = (),
        *_: object,
        non_block: bool = False,
        **__: object,
    ) -> Any:
        """Return the workers' answers about adapters and tasks; None for commands to a device."""
        del timeout  # nothing takes time
        answers = self._adapters(method, *args) if method in _ADAPTERS else super().collective_rpc(method)
        if not non_block:
            return answers
        done: Future[Any] = Future()
        done.set_result(answers)
        return done

    def _adapters(self, method: str, *args: Any) -> list[Any]:
        if method == "list_loras":
            return [set(self._loras)]
        (adapter,) = args
        number = getattr(adapter, "lora_int_id", adapter)
        is_loaded = number in self._loras
        if method == "add_lora":
            self._loras.add(number)
        elif method == "remove_lora":
            self._loras.discard(number)
        return [not is_loaded if method == "add_lora" else is_loaded]


class _InCommon(Future[Any]):
    """Output that is available when all ranks are done with the pass."""

    def __init__(self, clock: EngineClock, ran: "Future[Ran]", output: Any) -> None:
        super().__init__()
        self._clock, self._ran, self._output = clock, ran, output

    def done(self) -> bool:
        return self._ran.done() and self._clock.now_us >= self._ran.result().ended_us

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002  # vLLM gives none
        ran = self._ran.result()
        ran.put_on_output(self._output)
        self._clock.until(ran.ended_us)
        return self._output


_ADAPTERS = ("add_lora", "remove_lora", "pin_lora", "list_loras")


def _refuse(config: Any) -> None:
    """Refuse settings that would need a model's answers or other machines."""
    together = config.parallel_config.data_parallel_size > 1
    refused = {
        "sleeping ranks in lock-step": together and getattr(config.model_config, "enable_sleep_mode", False),
        "speculative decoding: how many drafts a model would accept is not known": config.speculative_config,
        "pooling models": config.model_config.runner_type != "generate",
        "KV connectors": config.kv_transfer_config,
    }
    for what, present in refused.items():
        if present:
            msg = f"the simulated executor does not simulate {what}"
            raise UsageError(msg)
