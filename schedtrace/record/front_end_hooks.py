"""Hooks into the front end's process: user settings, vLLM's resulting settings, and rejected requests.

The hooks write to ``front-end-<pid>.jsonl`` beside the traces, because the front end makes the engine's
configuration and rejects requests before they reach an engine. vLLM also makes configurations just to read
defaults, and these write lines as well; the last line before the engines start is theirs.
"""

import contextlib
import copy
import dataclasses
import os
import threading
import time
from typing import Any

import msgspec

from schedtrace.model import safe_files
from schedtrace.model.manifest import Configured, RequestRefusal
from schedtrace.model.printable import hide_secrets
from schedtrace.record.hooks import Method, wrap
from schedtrace.record.run_folders import claim_run_dir

DERIVED = {
    "max_num_seqs": "scheduler_config",
    "max_num_batched_tokens": "scheduler_config",
    "enable_chunked_prefill": "scheduler_config",
    "async_scheduling": "scheduler_config",
    "max_model_len": "model_config",
    "enable_prefix_caching": "cache_config",
    "block_size": "cache_config",
    "gpu_memory_utilization": "cache_config",
}
"""Engine arguments that vLLM derives if they are not set, each with the section of the configuration that
holds the result."""

_lock = threading.Lock()


def wrap_front_end() -> None:
    """Install the wrappers; a process that is not a front end never calls the wrapped methods."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    wrap(EngineArgs, "create_engine_config", _configure)
    wrap(AsyncLLM, "_record_admission_rejection", _refuse)


def _configure(original: Method, args: Any, *positional: object, **keywords: object) -> Any:
    """Record the arguments as they were before the call, which fills in those that were not set."""
    before: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        before = {
            field.name: copy.copy(getattr(args, field.name, None)) for field in dataclasses.fields(args)
        }
    config = original(args, *positional, **keywords)
    with contextlib.suppress(Exception):
        context = positional[0] if positional else keywords.get("usage_context")
        _write(
            Configured(
                at_unix_us=time.time_ns() // 1000,
                usage_context=None if context is None else str(getattr(context, "value", context)),
                given=hide_secrets(_given(args, before)),
                derived={
                    name: _shown(getattr(getattr(config, part, None), name, None))
                    for name, part in DERIVED.items()
                    if name in before and before[name] is None
                },
                context_defaults=_context_defaults(args),
            )
        )
    return config


def _refuse(original: Method, front_end: Any, reason: Any, *args: object, **kwargs: object) -> Any:
    """Record the refusal of a request beyond ``max_num_queued_reqs`` or ``max_num_queued_tokens``."""
    with contextlib.suppress(Exception):
        _write(RequestRefusal(at_unix_us=time.time_ns() // 1000, reason=str(reason)))
    return original(front_end, reason, *args, **kwargs)


def _given(args: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments whose values differ from vLLM's defaults."""
    changed = {}
    for field in dataclasses.fields(args):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name in before and before[field.name] != default:
            changed[field.name] = _shown(before[field.name])
    return changed


def _context_defaults(args: Any) -> dict[str, dict[str, int]]:
    """Return the defaults that depend on the usage context, as vLLM has just read them."""
    try:
        tokens, seqs = args.get_batch_defaults(args.pipeline_parallel_size * args.tensor_parallel_size)
        by_name = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}
        return {
            name: {str(context.value): int(value) for context, value in defaults.items() if context}
            for name, defaults in by_name.items()
        }
    except Exception:  # an older vLLM, or another signature
        return {}


def _shown(value: Any) -> Any:
    """Return a scalar or None unchanged, and ``(given)`` for any other value, which may contain a secret."""
    return value if value is None or isinstance(value, bool | int | float | str) else "(given)"


def _write(line: msgspec.Struct) -> None:
    """Append one complete line to the file of this process."""
    folder = claim_run_dir()
    safe_files.make_folder(folder)
    with _lock:
        file = safe_files.appendable(folder / f"front-end-{os.getpid()}.jsonl")
        try:
            os.write(file, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(file)
