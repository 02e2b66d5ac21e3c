"""Shared prefixes of a load's prompts.

Hashes in a trace are converted to identities of blocks, and identities to made-up prompts that share exactly
the blocks that the recorded prompts shared.
"""

import hashlib
import math
from base64 import b64decode
from bisect import bisect_left

import polars as pl

from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import FIRST_BLOCKS, MARK_CHARACTERS, MARKED_BLOCKS, marks_within
from schedtrace.workloads.workload import LoadRequest

BYTES = 3
"""Number of bytes of a mark's hash."""


def identities(hashes: str | None) -> tuple[int, ...]:
    """Return a number for each block up to the last mark; the same in every trial of a trace.

    The number of a marked block is its hash. For a block between two marks, only the next mark shows whether
    two prompts share the block, so its number encodes that mark's hash and the distance from it.
    """
    digests = b64decode(hashes or "")
    marks = [int.from_bytes(digests[at : at + BYTES]) for at in range(0, len(digests), BYTES)]
    blocks = marks[:FIRST_BLOCKS]
    for mark, end in zip(marks[FIRST_BLOCKS:], MARKED_BLOCKS[FIRST_BLOCKS:], strict=False):
        blocks += [mark | before << 8 * BYTES for before in reversed(range(end - len(blocks)))]
    return tuple(blocks)


def prefix_block(header: Header, requests: pl.DataFrame) -> int | None:
    """Return the tokens of a hashed block: the size with which all prompts have their number of hashes.

    vLLM hashes blocks of ``block_size`` or, if cache groups differ, smaller blocks. None if no hashes are
    recorded, or no size in the header fits.
    """
    hashed = requests.filter(pl.col("prefix_hashes").is_not_null())
    if not hashed.height:
        return None
    groups = [group.block_size for group in header.cache_groups]
    unit = header.settings.get("cache_config.prefix_match_unit")
    sizes = [
        size
        for size in (unit, header.block_size, *groups, math.gcd(*groups))
        if isinstance(size, int) and size > 0
    ]
    marks = pl.col("prefix_hashes").str.len_bytes() // MARK_CHARACTERS
    for size in dict.fromkeys(sizes):
        blocks = pl.col("prompt_tokens") // size
        marked = pl.lit(pl.Series(MARKED_BLOCKS)).search_sorted(blocks, side="right")
        first_only = pl.min_horizontal(blocks, FIRST_BLOCKS)  # as trace schema 3 has it
        if hashed.select(((marks == marked) | (marks == first_only)).all()).item():
            return size
    return None


def found_elsewhere(requests: pl.DataFrame, every: pl.DataFrame, block: int) -> int:
    """Return how many requests found more of their prompt in a cache than any other prompt shares.

    Args:
        requests: Requests of one trial, with ``prefix_hashes`` and ``cached_tokens``.
        every: All arrivals of the trace.
        block: Number of tokens of a hashed block.
    """
    texts = sorted(every["prefix_hashes"].drop_nulls().to_list())
    hits = requests.filter(pl.col("prefix_hashes").is_not_null() & (pl.col("cached_tokens") >= block))
    count = 0
    for text, cached in hits.select("prefix_hashes", "cached_tokens").iter_rows():
        key = text[: marks_within(cached // block) * MARK_CHARACTERS]
        second = bisect_left(texts, key) + 1
        count += second >= len(texts) or not texts[second].startswith(key)
    return count


ID_BYTES = 8
"""Number of bytes of the hash of a request's id; two of 20,000 requests share a hash with a probability of
1e-11."""


def token_ids(request: LoadRequest, prefix_block: int | None, vocabulary: int = 2000) -> list[int]:
    """Return the token ids of a prompt with the request's length and prefix.

    A block with an identity contains that number in base ``vocabulary // 2``, lowest digit first, padded with
    zeros, so two such blocks are equal exactly if their identities are. The rest of the prompt contains a
    hash of the request's id, written in the same way with the upper half of the vocabulary, so it equals no
    block of another request. If a block has fewer tokens than its number has digits, the remaining digits are
    left out.

    Args:
        request: Request, whose ``prefix`` may end within a block.
        prefix_block: Tokens of each block of ``prefix``; None if the prefix is empty.
        vocabulary: Exclusive upper bound of the ids; at least 4.

    Raises:
        ValueError: If ``prefix_block`` is missing, or the prefix has more blocks than the prompt.
    """
    base = vocabulary // 2
    if request.prefix and prefix_block is None:
        msg = f"{request.request_id}: a prefix, but no size of its blocks"
        raise ValueError(msg)
    ids: list[int] = []
    for identity in request.prefix:
        left = request.prompt_tokens - len(ids)
        if left <= 0:
            msg = f"{request.request_id}: {len(request.prefix)} blocks, {request.prompt_tokens} prompt tokens"
            raise ValueError(msg)
        ids += _digits(identity, base, min(prefix_block or left, left))
    digest = hashlib.blake2b(request.request_id.encode(errors="surrogatepass"), digest_size=ID_BYTES).digest()
    own = _digits(int.from_bytes(digest), base, request.prompt_tokens - len(ids))
    return ids + [base + digit for digit in own]


def _digits(number: int, base: int, length: int) -> list[int]:
    """Return ``length`` digits of a number, the lowest first."""
    digits: list[int] = []
    while number and len(digits) < length:
        number, digit = divmod(number, base)
        digits.append(digit)
    return digits + [0] * (length - len(digits))
