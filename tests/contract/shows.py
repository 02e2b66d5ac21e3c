"""What at least one decision must look like in every load of a family, for the family to deserve its name."""

from collections.abc import Callable
from typing import Any

from tests.contract.deciding import Decision

BLOCK, SEATS = 16, 16


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _arrivals(names: list[str]) -> list[int]:
    """As which one each of them arrived."""
    return [int(name.split("-")[1]) for name in names]


def _budget_used(taken: Decision) -> int:
    return sum(tokens for _, tokens in taken["tokens"])


def _preempts(taken: Decision) -> bool:
    return bool(taken.get("preempted"))


def _was_reset(taken: Decision) -> bool:
    """With room for everybody, only a reset preempts; older releases tell when the victim is back."""
    return _preempts(taken) or bool(taken.get("resumed"))


def _overlaps(taken: Decision) -> bool:
    """Two steps are in flight."""
    return taken.get("in_flight") == 2


def _several_at_once(taken: Decision) -> bool:
    """A request got more than one token from one step: its drafts were right."""
    return any(len(tokens) > 1 for _, tokens, _ in taken.get("told", ()))


def _full_at_three(taken: Decision) -> bool:
    return len(taken["running"]) == 3 and bool(taken["waiting"])


def _sets_aside(taken: Decision) -> bool:
    """Somebody is passed over, and seats are left for others."""
    return bool(taken["deferred"]) and len(taken["running"]) < SEATS


def _refuses(taken: Decision) -> bool:
    """Somebody waits though there is a seat; no preemption has closed the queue."""
    open_seats = len(taken["running"]) < SEATS and not taken.get("preempted", True)
    return open_seats and taken["wants"] is not None


def _keeps_blocks_free(taken: Decision) -> bool:
    return _refuses(taken) and _budget_used(taken) < 256 and _blocks(taken["wants"]) <= taken["free"]


def _keeps_chunks_out(taken: Decision) -> bool:
    """The next one's first chunk would fit, all of it would not."""
    if not _refuses(taken):
        return False
    chunk = min(taken["wants"], 64 - _budget_used(taken))
    return chunk > 0 and _blocks(chunk) <= taken["free"] < _blocks(taken["wants"])


def _lets_chunks_in(taken: Decision) -> bool:
    """The one admitted last has not enough blocks for its prompt, and there are not enough."""
    [*_, (_, _, [blocks], prompt)] = taken.get("new") or [("", 0, [()], 0)]
    return len(blocks) + taken["free"] < _blocks(prompt)


def _two_chunks_of(size: int, taken: Decision) -> bool:
    return [tokens for _, tokens in taken.get("tokens", ())].count(size) >= 2


def _fair_share(taken: Decision) -> int:
    return 256 // max(len(taken["running"]) + len(taken["waiting"]), 1)


SHOWS: dict[str, Callable[[Decision], Any]] = {
    "fcfs": lambda taken: len(taken["running"]) == SEATS and taken["waiting"],
    "priority": lambda taken: _arrivals(taken["waiting"]) != sorted(_arrivals(taken["waiting"])),
    "priority_tight": _preempts,
    "small_budget": lambda taken: _refuses(taken) and _budget_used(taken) == 32,
    "tight_kv": _preempts,
    "tight_kv_small_budget": _preempts,
    "few_seqs": _full_at_three,
    "max_num_active_seqs": _full_at_three,
    "chunked_prefill_off": lambda taken: _refuses(taken) and 256 - taken["wants"] < _budget_used(taken) < 256,
    "lora_cap": _sets_aside,
    "one_lora": _sets_aside,
    "long_prefill_cap": lambda taken: _two_chunks_of(24, taken),
    "adaptive_long_prefill_cap": lambda taken: (
        _fair_share(taken) > 2 and _two_chunks_of(_fair_share(taken), taken)
    ),
    "prefix_caching": lambda taken: any(computed for _, computed, *_ in taken.get("new", ())),
    "prefix_caching_tight": _preempts,
    "aborts": lambda taken: taken.get("aborted"),
    "async": _overlaps,
    "async_tight": lambda taken: _overlaps(taken) and _preempts(taken),
    "async_aborts": lambda taken: taken.get("aborted"),
    "async_model_len": lambda taken: (
        _overlaps(taken) and any(computed == 62 for _, computed, _ in taken["cached"])
    ),
    "pipeline": lambda taken: taken.get("in_flight") == 3 and _preempts(taken),
    "watermark": _keeps_blocks_free,
    "whole_sequence_reserved": _keeps_chunks_out,
    "first_chunk_reserved": _lets_chunks_in,
    "paused": lambda taken: taken["running"] and not taken.get("tokens", True),
    "resets": _was_reset,
    "async_resets": lambda taken: _overlaps(taken) and _was_reset(taken),
    "throttled_prefill": lambda taken: (
        _refuses(taken) and not taken["new"] and _budget_used(taken) < 64 and taken["usage"] < 0.5
    ),
    "spec_decode": _several_at_once,
    "spec_decode_draft_model": lambda taken: (
        _refuses(taken) and 47 - len(taken["tokens"]) <= _budget_used(taken) < 48
    ),
    "async_spec_decode": _several_at_once,
    "grammar_pending": _sets_aside,
    "streaming_input": lambda taken: taken["holding"] or taken["skipped"],
    "mixed": lambda taken: _preempts(taken) and taken["deferred"],
    "async_mixed": lambda taken: _overlaps(taken) and _preempts(taken) and taken["deferred"],
}
