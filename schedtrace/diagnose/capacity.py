"""How many KV blocks a request of some length needs, and the longest one that the whole KV cache holds.

As vLLM's cache managers count, for those groups whose need follows from the header alone.
"""

from bisect import bisect_right

from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import CacheGroup

_WHOLE = {"FullAttention", "MLAAttention"}
"""Kinds of groups that keep every token."""


def usable_blocks(header: Header) -> int | None:
    """Blocks that requests can hold: vLLM keeps one as its null block. None where the total is unknown."""
    return None if header.kv_blocks_total is None else header.kv_blocks_total - 1


def blocks_needed(header: Header, tokens: int) -> list[int] | None:
    """Blocks for so many tokens by cache group; None where a group's need cannot be known."""
    needed = [_of_group(group, tokens) for group in header.cache_groups]
    known = [blocks for blocks in needed if blocks is not None]
    return known if known and len(known) == len(needed) else None


def longest_sequence(header: Header) -> int | None:
    """Most tokens that one request can have in the whole KV cache, slots for drafts set aside."""
    usable, length = usable_blocks(header), header.max_model_len
    if usable is None or length is None or blocks_needed(header, 1) is None:
        return None
    lookahead = int(header.settings.get("scheduler.num_lookahead_tokens") or 0)
    needs = range(1, length + lookahead + 1)
    fitting = bisect_right(needs, usable, key=lambda tokens: sum(blocks_needed(header, tokens) or [0]))
    return max(0, min(length, fitting - lookahead))


def _of_group(group: CacheGroup, tokens: int) -> int | None:
    if group.block_size < 1:  # a broken header
        return None
    blocks = -(-tokens // group.block_size)
    if group.kind in _WHOLE:
        return blocks
    if group.admission_cap is not None:
        return min(blocks, group.admission_cap)
    if group.kind == "Mamba" and group.cache_mode == "none":
        return blocks + (group.speculative_blocks or 0)
    return None
