"""Kinds of load: what arrives, what else happens, and the engine that it happens to."""

from dataclasses import dataclass, field
from typing import Any

from schedtrace.simulate.driver import tiny_model


@dataclass(frozen=True)
class Family:
    """A kind of load, and the engine it is for."""

    engine: dict[str, Any] = field(default_factory=dict)
    """Options of ``Engine``."""
    prompt: tuple[int, int] = (1, 120)
    output: tuple[int, int] = (1, 45)
    per_step: float = 0.5
    """Requests that arrive before a step, on average."""
    shared: int = 0
    priorities: int = 1
    loras: int = 0
    """Adapters; a request wants one of them, or none."""
    grammars: float = 0.0
    """Share of requests that wait until their grammar is compiled; every fourth of them in vain."""
    sessions: float = 0.0
    """Share of requests that wait for more input after their output, until their client gives up."""
    aborts: float = 0.0
    pauses: float = 0.0
    resets: float = 0.0
    """Chance before each step that the prefix cache is reset, which preempts everything that runs."""
    throttled: float = 0.0
    """Share of steps in which prefills are throttled, as the data-parallel engine does."""


def _right_ones(request_id: str, drafts: int) -> int:
    """How many drafts of a request are right: none to all, told by its id alone."""
    return sum(request_id.encode()) % (drafts + 1)


TIGHT = {"num_blocks": 40}
ASYNC = {"async_scheduling": True}
PREFIX = {"enable_prefix_caching": True}
CHUNKS = {"num_blocks": 30, "max_num_batched_tokens": 64}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFTS = {"drafts": 3, "accepted": _right_ones, "speculative_config": NGRAM}
DRAFT_MODEL = {"method": "draft_model", "model": tiny_model(), "num_speculative_tokens": 3}
"""Takes one more slot of the batch for every request in it."""
DRAFTED = {"accepted": _right_ones, "speculative_config": DRAFT_MODEL}
"""With async scheduling the scheduler counts on all drafts before it knows them."""
MIXED = LORA | PREFIX | TIGHT | {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 24}
EVERYTHING: dict[str, Any] = {
    "prompt": (33, 120), "shared": 32, "priorities": 3, "loras": 4, "grammars": 0.2,
    "aborts": 0.2, "pauses": 0.03, "resets": 0.02, "throttled": 0.2,
}  # fmt: skip

LONG = (1, 90)
"""Outputs of loads that would not show what they are named after with shorter ones, or few exits."""

FAMILIES = {
    "fcfs": Family(output=LONG, per_step=0.8),
    "priority": Family({"scheduling_policy": "priority"}, output=LONG, priorities=3),
    "priority_tight": Family({"scheduling_policy": "priority", "num_blocks": 30}, priorities=3),
    "small_budget": Family({"max_num_batched_tokens": 32}),
    "tight_kv": Family(TIGHT),
    "tight_kv_small_budget": Family({"num_blocks": 20, "max_num_batched_tokens": 32}, per_step=0.2),
    "few_seqs": Family({"max_num_seqs": 3}, per_step=0.2),
    "max_num_active_seqs": Family({"max_num_active_seqs": 3}, per_step=0.2),
    "chunked_prefill_off": Family({"enable_chunked_prefill": False}, prompt=(60, 200)),
    "lora_cap": Family(LORA, output=LONG, loras=6),
    "one_lora": Family(LORA | {"max_loras": 1}, loras=3),
    "long_prefill_cap": Family({"long_prefill_token_threshold": 24}),
    "adaptive_long_prefill_cap": Family(
        {"long_prefill_token_threshold": 2, "long_prefill_token_threshold_adaptive": True}
    ),
    "prefix_caching": Family(PREFIX, shared=64, prompt=(65, 120)),
    "prefix_caching_tight": Family(PREFIX | TIGHT, shared=64, prompt=(65, 120), output=LONG),
    "aborts": Family(TIGHT, output=LONG, aborts=0.3),
    "async": Family(ASYNC),
    "async_tight": Family(ASYNC | TIGHT),
    "async_aborts": Family(ASYNC | TIGHT, aborts=0.3),
    "async_model_len": Family(ASYNC | {"max_model_len": 64}, prompt=(1, 60), output=LONG),
    "pipeline": Family({"pipeline_parallel_size": 3} | TIGHT),
    "watermark": Family(TIGHT | {"watermark": 0.2}),
    "whole_sequence_reserved": Family(
        CHUNKS | {"scheduler_reserve_full_isl": True}, prompt=(100, 200), per_step=0.15
    ),
    "first_chunk_reserved": Family(
        CHUNKS | {"scheduler_reserve_full_isl": False}, prompt=(100, 200), per_step=0.15
    ),
    "paused": Family(pauses=0.1),
    "resets": Family(PREFIX, resets=0.05),
    "async_resets": Family(ASYNC | PREFIX, resets=0.05),
    "throttled_prefill": Family({"max_num_batched_tokens": 64}, throttled=0.7),
    "spec_decode": Family(DRAFTS | TIGHT),
    "spec_decode_draft_model": Family(
        DRAFTED | {"drafts": 3, "max_num_batched_tokens": 48}, prompt=(1, 20), pauses=0.1
    ),
    "async_spec_decode": Family(ASYNC | TIGHT | DRAFTED),
    "grammar_pending": Family(grammars=0.3),
    "streaming_input": Family(sessions=0.2, aborts=0.1),
    "mixed": Family(MIXED | DRAFTS | {"scheduling_policy": "priority"}, **EVERYTHING),
    "async_mixed": Family(MIXED | ASYNC | DRAFTED, **EVERYTHING),
}
