"""Lengths that no engine can serve, refused before one is started.

Only what vLLM certainly refuses or cuts is refused here. Where its answer depends on more than the arguments
and the model's local ``config.json``, the question is left to vLLM.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from schedtrace.engine.arguments import any_given, model_of, number_of, switched_off
from schedtrace.engine.kv_fit import check_kv_blocks, check_kv_memory
from schedtrace.engine.spec import RANDOM, RunSpec
from schedtrace.engine.workload import Prompt
from schedtrace.errors import UsageError

_GIVEN = "--max-model-len"
_FIT_TO_MEMORY = -1
_ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""Of ``config.json``: where vLLM looks for a model's length. It takes the smallest, but
``model_max_length`` over all."""

_CHANGES_THE_MODEL = (
    *("--hf-overrides", "--hf-config-path", "--config-format", "--runner", "--disable-sliding-window"),
    *("--speculative-config", "-sc", "--spec-method"),
)
"""Options with which the length is not what ``config.json`` says."""

_UNSCALED_ROPE = {"default", "llama3"}


class Limit(NamedTuple):
    """Tokens that one request may have, prompt and output together."""

    tokens: int
    source: str


def check_lengths(run: RunSpec, prompts: list[Prompt]) -> None:
    """Refuse a run with requests, or with an engine, that cannot work.

    Raises:
        UsageError: what does not fit, where the limit comes from and what to change.
    """
    arguments = run.engine_args
    config = model_config(arguments)
    own = own_limit(arguments, config)
    given = number_of(arguments, _GIVEN)
    longest = max(prompts, key=_tokens)
    if given is None or given == _FIT_TO_MEMORY:
        limit = own
    else:
        limit = Limit(given, _GIVEN)
        _check_given(limit, own)
    if limit is not None:
        _check_longest(run, longest, limit)
        if given != _FIT_TO_MEMORY:
            _check_budget(arguments, limit)
            check_kv_memory(arguments, config, longest=limit.tokens, source=limit.source)
    check_kv_blocks(arguments, config, longest=_tokens(longest))


def _tokens(prompt: Prompt) -> int:
    """At least: a text has a token, and only the tokenizer knows the length of a completion."""
    return (prompt.input_len or 1) + (prompt.output_len or 1)


def _check_given(limit: Limit, own: Limit | None) -> None:
    if limit.tokens < 1:
        msg = f"{_GIVEN} {limit.tokens}: a length is 1 or more"
        raise UsageError(msg)
    if own is not None and limit.tokens > own.tokens and os.environ.get(_ALLOW_LONGER, "0") == "0":
        msg = (
            f"{_GIVEN} {limit.tokens} exceeds the model's own {own.tokens} ({own.source}): "
            f"lower it, or set {_ALLOW_LONGER}=1"
        )
        raise UsageError(msg)


def _check_longest(run: RunSpec, longest: Prompt, limit: Limit) -> None:
    """A longer prompt is an error of vLLM's, a longer output is cut without a word."""
    if _tokens(longest) <= limit.tokens:
        return
    of_data, lower = f"{run.dataset}: ", "the lengths in it, or --output-len"
    if run.dataset == RANDOM:
        of_data, lower = "", "--input-len or --output-len"
    prompt = "a text prompt" if longest.input_len is None else f"{longest.input_len} prompt tokens"
    msg = (
        f"{of_data}a request of {prompt} + {longest.output_len} output tokens exceeds the limit of "
        f"{limit.tokens} ({limit.source}): lower {lower}"
        f"{f', or raise {_GIVEN}' if limit.source == _GIVEN else ''}"
    )
    raise UsageError(msg)


def _check_budget(arguments: list[str], limit: Limit) -> None:
    """As vLLM's ``SchedulerConfig`` does."""
    budget = number_of(arguments, "--max-num-batched-tokens")
    if budget is None or budget >= limit.tokens or not switched_off(arguments, "--enable-chunked-prefill"):
        return
    msg = (
        f"--max-num-batched-tokens {budget} is less than one request of {limit.tokens} tokens "
        f"({limit.source}), and chunked prefill is off: raise the budget, lower {_GIVEN}, or drop "
        "--no-enable-chunked-prefill"
    )
    raise UsageError(msg)


def own_limit(arguments: list[str], config: dict[str, Any]) -> Limit | None:
    """The model's own length; None where ``config.json`` alone does not tell it."""
    nested = any(
        isinstance(value, dict) and name.endswith("config") and name != "quantization_config"
        for name, value in config.items()
    )
    known = {key: config[key] for key in _KEYS if config.get(key) is not None}
    if (
        not known
        or nested
        or not all(type(value) is int and value > 0 for value in known.values())
        or _rope_kind(config) not in _UNSCALED_ROPE
        or any_given(arguments, _CHANGES_THE_MODEL)
    ):
        return None
    key = "model_max_length" if "model_max_length" in known else min(known, key=lambda name: known[name])
    return Limit(known[key], f"{key} in {Path(str(model_of(arguments))) / 'config.json'}")


def _rope_kind(config: dict[str, Any]) -> object:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return None  # one for each kind of layer
    return rope.get("rope_type", rope.get("type", "default"))


def model_config(arguments: list[str]) -> dict[str, Any]:
    """The model's ``config.json``; empty if it is not local or cannot be read, which vLLM will tell."""
    try:
        content = json.loads((Path(str(model_of(arguments))) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
