"""Marks: places in a prompt whose block hashes a trace records.

Each of the first blocks has a mark, and later blocks have marks at growing distances. A hash covers its block
and all earlier blocks. Two prompts share their prefix at least up to the last mark with equal hashes; the
shared tokens beyond it are fewer than the distance to the next mark, at most 1/128 of the prefix.
"""

from bisect import bisect_right

FIRST_BLOCKS = 256
"""Number of blocks at the start of a prompt with a mark each: 4,096 tokens in blocks of 16."""
_PER_DOUBLING = 128
"""Number of marks each time the length of the prefix doubles."""
_DOUBLINGS = 16
"""Number of doublings beyond the first blocks that have marks."""
CHARACTERS = 4
"""Number of characters in ``Arrival.prefix_hashes`` per mark: three bytes in Base64."""


def _marked_blocks() -> tuple[int, ...]:
    marked = [*range(1, FIRST_BLOCKS + 1)]
    for doubling in range(_DOUBLINGS):
        step = (FIRST_BLOCKS << doubling) // _PER_DOUBLING
        marked += [marked[-1] + step * number for number in range(1, _PER_DOUBLING + 1)]
    return tuple(marked)


MARKED_BLOCKS = _marked_blocks()
"""Number of blocks up to and including each mark; the last mark is at block 16,777,216."""


def marks_within(blocks: int) -> int:
    """Count the marks of a prompt with this many full blocks."""
    return bisect_right(MARKED_BLOCKS, blocks)


def blocks_until(marks: int) -> int:
    """Return the number of blocks that this many marks cover, at most as many as the last mark covers."""
    return MARKED_BLOCKS[min(marks, len(MARKED_BLOCKS)) - 1] if marks else 0
