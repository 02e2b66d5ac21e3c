"""Shapes of models: a table of public models, and conversion from and to a Hugging Face ``config.json``."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.errors import InputError, UsageError
from schedtrace.model import safe_files

DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a decoder with attention and gated MLP layers (three matrices), dense or with experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP in layers without experts."""
    vocab: int
    positions: int | None = None
    """Longest sequence (``max_position_embeddings``): vLLM's default of ``max_model_len``."""
    tied: bool = False
    """Whether input and output embeddings are the same matrix."""
    dtype: str = "bfloat16"
    """Type of activations, embeddings and weights, unless the weights are quantized."""
    quantization: str | None = None
    """Type in which the weights of the layers are stored (a key of ``DTYPE_BYTES``); None for ``dtype``."""
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    """Number of experts that every token goes through, in addition to ``experts_per_token``."""
    expert_intermediate: int = 0
    dense_layers: int = 0
    """Number of layers without experts at the beginning of a model with experts."""
    kv_rank: int = 0
    """Width of the compressed keys and values in multi-head latent attention; 0 if the model has none."""
    query_rank: int = 0
    """Width of the compressed queries; 0 if they are not compressed."""
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0

    @property
    def weight_dtype(self) -> str:
        """Type in which the weights of the layers are stored."""
        return self.quantization or self.dtype

    @property
    def attention_parameters(self) -> int:
        """Number of parameters in one layer's projections."""
        if not self.kv_rank:
            return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        query = self.heads * (self.nope_dim + self.rope_dim)
        return (
            (self.query_rank * (self.hidden + query) if self.query_rank else self.hidden * query)
            + self.hidden * (self.kv_rank + self.rope_dim)
            + self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
            + self.heads * self.value_dim * self.hidden
        )

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of one expert in one layer."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def expert_layers(self) -> int:
        """Number of layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def shared_parameters(self) -> int:
        """Number of parameters in all layers, without experts that only some tokens go through."""
        dense = (self.layers - self.expert_layers) * 3 * self.hidden * self.intermediate
        router_and_shared = self.hidden * self.experts + self.shared_experts * self.expert_parameters
        return self.layers * self.attention_parameters + dense + self.expert_layers * router_and_shared

    @property
    def parameters(self) -> int:
        """Number of all parameters except norms and biases (under 0.01 % of the models in the table)."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        routed = self.expert_layers * self.experts * self.expert_parameters
        return self.shared_parameters + routed + embeddings

    @property
    def active_parameters(self) -> int:
        """Number of parameters in the layers by which one token is multiplied."""
        return self.shared_parameters + self.expert_layers * self.experts_per_token * self.expert_parameters


REQUIRED = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "vocab": "vocab_size",
}
"""Key of a ``config.json`` (as ``transformers`` names it) for each field of ``Shape``."""
LATENT = {
    "kv_rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
"""Key of a ``config.json`` for each field of latent attention."""
OURS = "schedtrace_shape"
"""Key in a ``config.json`` that this module writes: the full name of the shape."""
QUANTIZED_AS = {"fp8": "fp8", "awq": "int4", "gptq": "int4"}
"""Stored type of a weight by the ``quant_method`` of a ``config.json``; scales are not counted."""
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
FULL_ATTENTION = frozenset({"full_attention", "attention"})


def _llama(
    name: str, layers: int, hidden: int, heads: int, intermediate: int, vocab: int, positions: int
) -> Shape:
    return Shape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_dim=128,
        intermediate=intermediate, vocab=vocab, positions=positions,
    )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        _llama("Qwen3-8B", 36, 4096, 32, 12_288, 151_936, 40_960),
        _llama("Qwen3-32B", 64, 5120, 64, 25_600, 151_936, 40_960),
        _llama("Llama-3.1-8B", 32, 4096, 32, 14_336, 128_256, 131_072),
        _llama("Llama-3.1-70B", 80, 8192, 64, 28_672, 128_256, 131_072),
        Shape(
            name="DeepSeek-V3",
            layers=61,
            hidden=7168,
            heads=128,
            kv_heads=128,
            head_dim=192,
            intermediate=18_432,
            vocab=129_280,
            positions=163_840,
            quantization="fp8",
            experts=256,
            experts_per_token=8,
            shared_experts=1,
            expert_intermediate=2048,
            dense_layers=3,
            kv_rank=512,
            query_rank=1536,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
        ),
    )
}
"""Shapes of public models, with the values of each model's ``config.json`` on Hugging Face."""


def shape(name: str) -> Shape:
    """Return the shape of a model in the table, in a model's folder or in a ``config.json``.

    Args:
        name: Name in the table, optionally after an organisation or before ``-Instruct``; or a path.

    Raises:
        UsageError: If the name is neither in the table nor a path, or the kind of model is not supported.
        InputError: If the ``config.json`` cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        plain = name.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
        for listed in SHAPES.values():
            if listed.name.lower() == plain:
                return listed
        msg = f"unknown model '{name}': known are {', '.join(SHAPES)}, or name a folder with a config.json"
        raise UsageError(msg)
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror})"
        raise InputError(msg) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        msg = f"{path}: not a model's config.json ({error})"
        raise InputError(msg) from error
    written = SHAPES.get(str(config.get(OURS)))
    if written is not None:
        return written
    file_name = path.parent.name if path.name == "config.json" else path.stem
    return _shape_of(file_name or str(path), config.get("text_config") or config, path)


def _shape_of(name: str, config: dict[str, Any], path: Path) -> Shape:
    """Return the shape in a ``config.json``, in which some values have several possible names."""
    kinds = set(config.get("layer_types") or config.get("layers_block_type") or ()) - FULL_ATTENTION
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        kinds.add("sliding_attention")
    if kinds:
        msg = f"{path}: layers of {', '.join(sorted(kinds))} are not modelled; fit a recorded trace instead"
        raise UsageError(msg)
    try:
        figures: dict[str, Any] = {field: config[key] for field, key in REQUIRED.items()}
        experts = next((config[key] for key in EXPERTS if config.get(key)), 0)
        expert = config.get("moe_intermediate_size") or figures["intermediate"]
        shared = config.get("n_shared_experts") or 0
        return Shape(
            name=name,
            **figures,
            kv_heads=config.get("num_key_value_heads") or figures["heads"],
            head_dim=config.get("head_dim") or figures["hidden"] // figures["heads"],
            positions=config.get("max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
            quantization=_quantization(config, path),
            experts=experts,
            experts_per_token=config["num_experts_per_tok"] if experts else 0,
            shared_experts=shared if experts else 0,
            expert_intermediate=expert if experts else 0,
            dense_layers=config.get("first_k_dense_replace") or 0 if experts else 0,
            **{field: config.get(key) or 0 for field, key in LATENT.items()},
        )
    except KeyError as error:
        msg = f"{path}: lacks {error}, which the model's shape needs"
        raise InputError(msg) from error


def _quantization(config: dict[str, Any], path: Path) -> str | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method not in QUANTIZED_AS:
        msg = f"{path}: quantization '{method}' is not modelled: known are {', '.join(QUANTIZED_AS)}"
        raise UsageError(msg)
    return "int8" if method == "gptq" and quantization.get("bits") == 8 else QUANTIZED_AS[method]  # noqa: PLR2004  # bits


_FAMILIES = {
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "Llama-3.1": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "DeepSeek-V3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
}


def shape_folder(shape: Shape) -> Path:
    """Return a folder with the shape's ``config.json``, in the user's cache or else a temporary one.

    A simulated engine needs no other files.

    Args:
        shape: One of ``SHAPES``.
    """
    content = (json.dumps(hf_config(shape), indent=2) + "\n").encode()
    try:
        folder = safe_files.user_cache() / "models" / shape.name
        file = folder / "config.json"
        if not (file.is_file() and file.read_bytes() == content):
            safe_files.make_folder(folder)
            safe_files.replace(file, content)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="schedtrace-")) / shape.name
        folder.mkdir()
        safe_files.replace(folder / "config.json", content)
    return folder


def hf_config(shape: Shape) -> dict[str, Any]:
    """Return the ``config.json`` that ``transformers`` and vLLM need for a shape of the table.

    It leaves out the weights' quantization, because no weight is loaded and vLLM's CPU build refuses FP8.
    """
    family = next(name for name in _FAMILIES if shape.name.startswith(name))
    config: dict[str, Any] = {
        OURS: shape.name,
        **_FAMILIES[family],
        **{key: getattr(shape, field) for field, key in REQUIRED.items()},
        "max_position_embeddings": shape.positions,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": shape.dtype,
    }
    if shape.kv_rank:
        config |= {key: getattr(shape, field) for field, key in LATENT.items()}
    else:
        config["head_dim"] = shape.head_dim
    if shape.experts:
        config |= {
            "n_routed_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "n_shared_experts": shape.shared_experts,
            "moe_intermediate_size": shape.expert_intermediate,
            "first_k_dense_replace": shape.dense_layers,
            # Of DeepSeek-V3; which experts a token goes to is not simulated.
            "n_group": 8,
            "topk_group": 4,
        }
    return config
