"""The KV cache specs of a model's layers, from vLLM's configuration alone: what workers would report."""

from typing import Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from schedtrace.errors import UsageError
from schedtrace.simulate import releases

FULL, SLIDING = "full_attention", "sliding_attention"
_SUPPORTED = f"layers of {FULL.replace('_', ' ')}, {SLIDING.replace('_', ' ')} and latent attention (MLA)"


def kv_cache_specs(config: Any) -> list[dict[str, Any]]:
    """Of each stage of a pipeline: vLLM's ``KVCacheSpec`` by the layer's name.

    GPUs of one stage have the same layers, so one speaks for all of them.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        UsageError: layers whose KV cache is not one of keys and values of tokens.
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
    """Type of the KV cache as ``step_times`` calls it; None: as the model's.

    Raises:
        UsageError: a type whose size is not just that of its numbers.
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
    """Each layer's kind of attention."""
    text = model.hf_text_config
    others = [
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
    others += sorted({kind.replace("_", " ") for kind in set(layers) - {FULL, SLIDING}})
    if others:
        msg = f"{model.model} has {', '.join(others)}: only {_SUPPORTED} can be simulated"
        raise UsageError(msg)
    return [FULL if not window else kind for kind in layers]


def _spec(config: Any, kind: str) -> Any:
    model, cache = config.model_config, config.cache_config
    dtypes = {None: model.dtype, "fp8": torch.uint8}
    named = kv_dtype(config)
    given = {
        "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": dtypes[named] if named in dtypes else getattr(torch, str(named)),
        "use_mla": model.use_mla,
    }
    spec: Any = FullAttentionSpec
    if model.use_mla:
        spec = getattr(kv_cache_interface, "MLAAttentionSpec", FullAttentionSpec)  # 0.10.0 has one for both
        given["num_kv_heads"], given["cache_dtype_str"] = 1, cache.cache_dtype
    elif kind == SLIDING:
        spec, given["sliding_window"] = SlidingWindowSpec, model.get_sliding_window()
    return spec(block_size=cache.block_size, **releases.known(spec, given))
