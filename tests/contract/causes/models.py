"""Tiny models with an encoder, Mamba layers or MTP modules: there is nothing but their configuration."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

from schedtrace.simulate.driver import TINY_MODEL

IMAGE_TOKENS = 32


@cache
def sees_images() -> dict[str, Any]:
    """Options for a model whose images are ``IMAGE_TOKENS`` long; vLLM asks its processor for that."""
    folder = _folder(
        {
            "architectures": ["Blip2ForConditionalGeneration"],
            "model_type": "blip-2",
            "num_query_tokens": IMAGE_TOKENS,
            "text_config": {"model_type": "opt", "num_hidden_layers": 2},
            "vision_config": {"image_size": 28, "patch_size": 14},
            "torch_dtype": "bfloat16",
        }
    )
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "preprocessor_config.json": {
            "image_processor_type": "BlipImageProcessor",
            "processor_class": "Blip2Processor",
            "size": {"height": 28, "width": 28},
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    words = {"<unk>": 0, "<image>": 1}
    Tokenizer(models.WordLevel(words, "<unk>")).save(str(folder / "tokenizer.json"))
    return {"model": str(folder), "skip_tokenizer_init": False, "mm_hasher_algorithm": "sha256"}


def image(name: str, at: int) -> Any:
    """An image in a prompt, from token ``at`` on."""
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=at, length=IMAGE_TOKENS),
    )


def attention_spec(block: int = 16) -> Any:
    """Full attention layers."""
    return FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


def mamba_spec(attention: Any, mode: str = "align", block: int | None = None) -> Any:
    """Mamba layers beside attention layers, in blocks of as many bytes and, if not given, as many tokens."""
    return MambaSpec(
        block_size=block or attention.block_size,
        shapes=((attention.page_size_bytes // 4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
    )


def with_mamba(block: int = 16) -> dict[str, Any]:
    """Options for cache groups of a hybrid model, whose chunks must end at block boundaries."""
    attention = attention_spec(block)
    mamba = mamba_spec(attention)
    return {
        "kv_groups": [KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["mamba"], mamba)],
        "block_size": block,
        "mamba_cache_mode": "align",
        "enable_prefix_caching": True,
    }


@cache
def with_mtp() -> dict[str, Any]:
    """Options for a model with three MTP modules: no chunk may end within 3 tokens of the prompt's end."""
    modules = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 3}
    return {
        "model": str(_folder(TINY_MODEL | modules)),
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
    }


def _folder(config: dict[str, Any]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="schedtrace-model-"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
