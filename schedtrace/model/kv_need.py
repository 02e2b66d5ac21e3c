"""KV blocks of a request by cache group, as vLLM's cache managers count them.

The counts are the same for a trace, whose header records the groups, and for a running engine. For some
groups, the recorded facts do not determine what the manager counts (encoder outputs, Mamba's prefill
checkpoints, classes of other packages); the need is then unknown. Hits in the prefix cache are not known
beforehand; with them, a request needs less.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import CacheGroup

_FULL = frozenset({"FullAttention", "MLAAttention", "SinkFullAttention", "HiddenStateCache"})
"""Kinds of groups that keep the KV blocks of every token."""
_REFERENCE = "RSWA"
"""Kind of group that keeps the prompt and a window; the prompt's length determines which blocks it frees."""
_WINDOW = frozenset({"SlidingWindow", "SlidingWindowMLA"})
_CHUNK = "ChunkedLocalAttention"
_MAMBA = "Mamba"
_RING = "CircularBuffer"
"""Kind of group with one block per request."""


@dataclass(frozen=True)
class KvNeed:
    """Calculator of the blocks that requests need in one engine's KV cache groups."""

    groups: tuple[CacheGroup, ...]
    lookahead: int = 0
    """Slots for draft tokens, in addition to a request's tokens."""
    max_model_len: int | None = None

    def held(self, computed: int, tokens: int) -> list[int] | None:
        """Return how many blocks a request holds after a step, by group, without null blocks; None: unknown.

        For a request with no computed tokens, these are the blocks that vLLM requests for its first chunk.
        Blocks that only rejected drafts needed, or that a batch in flight still reads, are not counted.

        Args:
            computed: Number of the request's tokens that were computed before the step.
            tokens: Number of its tokens that are computed after the step.
        """
        slots = tokens + self.lookahead
        if self.max_model_len is not None:
            slots = min(slots, self.max_model_len)
        return _known(_held(group, computed, tokens, slots) for group in self.groups)

    def sequence(self, tokens: int) -> list[int] | None:
        """Return how many free blocks, by group, vLLM requires to admit a whole sequence; None if unknown.

        Follows the check of ``scheduler_reserve_full_isl``: a group that frees blocks during the sequence
        counts with the largest number that it holds at once (``admission_cap``).
        """
        if self.max_model_len is not None:
            tokens = min(tokens, self.max_model_len)
        counts = [(_held(group, 0, tokens, tokens), group.admission_cap) for group in self.groups]
        return _known(count if count is None or cap is None else min(count, cap) for count, cap in counts)

    def peak_blocks(self, tokens: int) -> list[int] | None:
        """Return a request's peak number of blocks, by group, up to this many tokens; None if unknown.

        An aligned Mamba group temporarily holds one more state whenever it starts a block.
        """
        blocks = self.sequence(tokens)
        return blocks and [
            count + (group.cache_mode == "align" and tokens > group.block_size)
            for group, count in zip(self.groups, blocks, strict=True)
        ]

    def cached(self, tokens: int) -> tuple[int, int] | None:
        """Return two numbers of blocks that a prompt's first tokens leave in the cache; None if unknown.

        The first number counts all blocks. In the second, a windowed group counts only the blocks in the
        window of the last token: vLLM keeps no others with ``prefix_cache_retention_interval`` 0.
        """
        ends, windows = self.held(tokens, tokens), [group.kind in _WINDOW for group in self.groups]
        if ends is None or not all(group.kind in {*_FULL, *_WINDOW} for group in self.groups):
            return None
        every = [-(-tokens // group.block_size) for group in self.groups]
        ends_only = [end if window else all_ for end, window, all_ in zip(ends, windows, every, strict=True)]
        return sum(every), sum(ends_only)

    @property
    def is_bounded(self) -> bool:
        """Whether ``sequence`` and ``peak_blocks`` are upper bounds for every request."""
        windowed = (group for group in self.groups if group.kind in {*_WINDOW, _CHUNK})
        return all(group.admission_cap is not None for group in windowed)


def kv_need(header: Header) -> KvNeed | None:
    """Return the calculator for a recorded engine; None if the size of its blocks is not recorded.

    A record without cache groups is treated as having one group of full attention.
    """
    groups = tuple(header.cache_groups)
    if not groups and header.block_size is not None:
        groups = (CacheGroup("FullAttention", header.block_size, layers=0),)
    if not groups or any(group.block_size < 1 for group in groups):  # 0: a broken header
        return None
    lookahead = int(header.settings.get("scheduler.num_lookahead_tokens") or 0)
    return KvNeed(groups, lookahead, header.max_model_len)


def _known(counts: Iterable[int | None]) -> list[int] | None:
    blocks = list(counts)
    known_blocks = [count for count in blocks if count is not None]
    return known_blocks if len(known_blocks) == len(blocks) else None


def _held(group: CacheGroup, computed: int, tokens: int, slots: int) -> int | None:
    size = group.block_size
    blocks = -(-slots // size)
    if group.kind in _FULL or (group.kind == _REFERENCE and not computed):
        return blocks
    if group.kind in _WINDOW and group.window:
        skipped = computed - group.window + 1 - (group.retained_tokens or 0)
        return blocks - max(0, skipped) // size
    if group.kind == _CHUNK and group.window:
        return blocks - computed // group.window * group.window // size
    if group.kind == _RING:
        return 1
    return _mamba_blocks(group, computed, tokens, blocks) if group.kind == _MAMBA else None


def _mamba_blocks(group: CacheGroup, computed: int, tokens: int, blocks: int) -> int | None:
    size, drafts = group.block_size, group.speculative_blocks or 0
    if group.cache_mode in {"none", "all"}:
        return blocks + drafts - max(0, computed - 1) // size
    if group.cache_mode != "align" or group.checkpoint_blocks != 0:
        return None
    # The state that the step begins with stays until the next one has begun.
    return 1 + drafts + (computed > 0 and -(-computed // size) != -(-tokens // size))
