"""A model folder for a shape of the table: a ``config.json``, which is enough for a simulated engine."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from schedtrace.model import safe_files
from schedtrace.step_times.shapes import SHAPES, Shape, shape

_FAMILIES = {
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "Llama-3.1": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "DeepSeek-V3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
}
_OURS = "schedtrace_shape"
"""Key of a ``config.json`` written here: the shape in full, of which vLLM is told less."""


def shape_of(model: str) -> Shape:
    """The shape of a model (``shapes.shape``), or that for which ``shape_folder`` has made a folder.

    Raises:
        UsageError: unknown.
        InputError: a ``config.json`` that cannot be read.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = json.loads((Path(model) / "config.json").read_bytes()).get(_OURS)
        if name in SHAPES:
            return SHAPES[name]
    return shape(model)


def shape_folder(known: Shape) -> Path:
    """A folder in the user's cache that holds ``config_of`` it; a temporary one if that cannot be written.

    Args:
        known: One of ``shapes.SHAPES``.
    """
    content = (json.dumps(config_of(known), indent=2) + "\n").encode()
    try:
        folder = safe_files.user_cache() / "models" / known.name
        file = folder / "config.json"
        if not (file.is_file() and file.read_bytes() == content):
            safe_files.make_folder(folder)
            safe_files.replace(file, content)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="schedtrace-")) / known.name
        folder.mkdir()
        safe_files.replace(folder / "config.json", content)
    return folder


def config_of(known: Shape) -> dict[str, Any]:
    """What ``transformers`` and vLLM must know of a shape of the table.

    The weights' quantization is left out: no weight is loaded, and vLLM's CPU build refuses FP8.
    """
    family = next(name for name in _FAMILIES if known.name.startswith(name))
    config: dict[str, Any] = {
        _OURS: known.name,
        **_FAMILIES[family],
        "max_position_embeddings": known.positions,
        "hidden_size": known.hidden,
        "intermediate_size": known.intermediate,
        "num_hidden_layers": known.layers,
        "num_attention_heads": known.heads,
        "num_key_value_heads": known.kv_heads,
        "vocab_size": known.vocab,
        "tie_word_embeddings": known.tied,
        "torch_dtype": known.dtype,
    }
    if known.kv_rank:
        config |= {
            "kv_lora_rank": known.kv_rank,
            "q_lora_rank": known.query_rank,
            "qk_nope_head_dim": known.nope_dim,
            "qk_rope_head_dim": known.rope_dim,
            "v_head_dim": known.value_dim,
        }
    else:
        config["head_dim"] = known.head_dim
    if known.experts:
        config |= {
            "n_routed_experts": known.experts,
            "num_experts_per_tok": known.experts_per_token,
            "n_shared_experts": known.shared_experts,
            "moe_intermediate_size": known.expert_intermediate,
            "first_k_dense_replace": known.dense_layers,
            # Of DeepSeek-V3; which experts a token goes to is not simulated.
            "n_group": 8,
            "topk_group": 4,
        }
    return config
