"""Which prompts of a recorded load begin alike: from the hashes in the trace to identities of blocks."""

import math
from base64 import b64decode
from bisect import bisect_left

import polars as pl

from schedtrace.model.trace import Header

CHARACTERS = 4
"""Of ``Arrival.prefix_hashes`` for every full block: three bytes in Base64."""
BYTES = 3
MOST_BLOCKS = 256
"""Of a prompt whose hashes are recorded (``record/arrival_facts.py``)."""


def identities(hashes: str | None) -> tuple[int, ...]:
    """The number that each block's hash is; the same in every trial of a trace."""
    digests = b64decode(hashes or "")
    return tuple(int.from_bytes(digests[at : at + BYTES]) for at in range(0, len(digests), BYTES))


def prefix_block(header: Header, requests: pl.DataFrame) -> int | None:
    """Tokens of a hashed block: that size of the header with which every prompt has as many blocks as hashes.

    vLLM hashes blocks of ``block_size``, but smaller ones where cache groups differ. None: no hashes are
    recorded, or no size fits.
    """
    known = requests.filter(pl.col("prefix_hashes").is_not_null())
    if not known.height:
        return None
    groups = [group.block_size for group in header.cache_groups]
    sizes = [size for size in (header.block_size, *groups, math.gcd(*groups)) if size]
    blocks = pl.col("prefix_hashes").str.len_bytes() // CHARACTERS
    for size in dict.fromkeys(sizes):
        most = pl.min_horizontal(pl.col("prompt_tokens") // size, MOST_BLOCKS)
        if known.select((blocks == most).all()).item():
            return size
    return None


def found_elsewhere(requests: pl.DataFrame, every: pl.DataFrame, block: int) -> int:
    """How many requests found more of their prompt in a cache than any other prompt of the trace begins with.

    Args:
        requests: Of one trial, with ``prefix_hashes`` and ``cached_tokens``.
        every: All arrivals of the trace.
        block: Tokens of a hashed block.
    """
    texts = sorted(every["prefix_hashes"].drop_nulls().to_list())
    found = requests.filter(pl.col("prefix_hashes").is_not_null() & (pl.col("cached_tokens") >= block))
    count = 0
    for text, cached in found.select("prefix_hashes", "cached_tokens").iter_rows():
        key = text[: cached // block * CHARACTERS]
        second = bisect_left(texts, key) + 1
        count += second >= len(texts) or not texts[second].startswith(key)
    return count
