"""KV caches too small for one request, found where arguments and ``config.json`` alone tell their size."""

from typing import Any

from schedtrace.engine.arguments import any_given, number_of, option_of
from schedtrace.errors import UsageError

_PLAIN_ATTENTION = {"llama", "qwen2", "qwen3", "mistral"}
"""Model types of which every layer keeps keys and values of every token, unless they have a window."""

_SPREADING = (
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp"),
)
"""Options that spread one request's KV cache over several devices."""


def check_kv_memory(arguments: list[str], config: dict[str, Any], *, longest: int, source: str) -> None:
    """Refuse a KV cache in which vLLM would find no room for one request of ``longest`` tokens.

    Raises:
        UsageError: what is too small, and what would be enough.
    """
    memory = number_of(arguments, "--kv-cache-memory-bytes")
    per_token = _least_bytes_per_token(arguments, config)
    if memory is None or memory < 1 or per_token is None or memory >= per_token * longest:
        return
    room = memory // per_token
    msg = (
        f"--kv-cache-memory-bytes {memory} has room for {room} tokens, and one request of {longest} tokens "
        f"({source}) must fit: raise it above {per_token * longest}, or lower --max-model-len below {room}"
    )
    raise UsageError(msg)


def check_kv_blocks(arguments: list[str], config: dict[str, Any], *, longest: int) -> None:
    """Refuse a number of blocks that the run's longest request can never get.

    Raises:
        UsageError: what is too small, and what would be enough.
    """
    blocks, size = number_of(arguments, "--num-gpu-blocks-override"), number_of(arguments, "--block-size")
    if blocks is None or size is None or size < 1 or not _is_plain(arguments, config):
        return
    room = max(0, blocks - 1) * size  # vLLM keeps one block for itself
    if longest - 1 <= room:  # the last output token is not kept
        return
    msg = (
        f"--num-gpu-blocks-override {blocks} with --block-size {size} has room for {room} tokens, and the "
        f"longest request has {longest}: raise it to {-(-(longest - 1) // size) + 1} or more"
    )
    raise UsageError(msg)


def _least_bytes_per_token(arguments: list[str], config: dict[str, Any]) -> int | None:
    """KV cache bytes of one token, at least; None where they are not counted so."""
    kv_dtype = option_of(arguments, "--kv-cache-dtype") or "auto"
    itemsize = 1 if kv_dtype.startswith("fp8") else 2 if kv_dtype in {"auto", "bfloat16", "float16"} else None
    sizes: list[Any] = [
        config.get(name) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    ]
    heads, layers, hidden = sizes
    if itemsize is None or not _is_plain(arguments, config) or not _are_counts(*sizes):
        return None
    kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim", hidden // heads)
    return 2 * layers * kv_heads * head_dim * itemsize if _are_counts(kv_heads, head_dim) else None


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _is_plain(arguments: list[str], config: dict[str, Any]) -> bool:
    """Whether one device keeps every token of a request in every layer."""
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    plain = config.get("model_type") in _PLAIN_ATTENTION and not windowed and "layer_types" not in config
    return plain and not any_given(arguments, _SPREADING)
