"""The lines of ``front-end-<pid>.jsonl``: what only vLLM's front end knows."""

from typing import Any

import msgspec


class Configured(msgspec.Struct, omit_defaults=True, tag="configured", tag_field="type", kw_only=True):
    """vLLM made an engine's configuration of its arguments."""

    at_unix_us: int
    usage_context: str | None = None
    """What for, in vLLM's words: ``LLM_CLASS``, ``OPENAI_API_SERVER``, ``ENGINE_CONTEXT``."""
    given: dict[str, Any] = {}
    """Arguments that differ from vLLM's default; secrets are hidden, and structured ones not shown."""
    derived: dict[str, Any] = {}
    """Arguments that were not given, with the value that vLLM chose; those of the scheduler and the cache."""
    context_defaults: dict[str, dict[str, int]] = {}
    """Of ``max_num_seqs`` and ``max_num_batched_tokens``: vLLM's default on this platform, by usage context
    (vLLM 0.12 and newer). vLLM adapts it to the model and to other arguments."""


class Refused(msgspec.Struct, omit_defaults=True, tag="refused", tag_field="type", kw_only=True):
    """The front end turned a request away, which no engine ever saw."""

    at_unix_us: int
    reason: str
    """The limit: ``max_num_queued_reqs`` or ``max_num_queued_tokens``."""


FrontEndLine = Configured | Refused
