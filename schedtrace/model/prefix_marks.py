"""Places in a prompt whose hashes a trace has: each of the first blocks, then blocks at growing distances.

A hash covers its block and all before it. Two prompts share their beginning up to the last mark that is equal
in both; what they share beyond it is less than the distance to the next mark, at most 1/128 of the whole.
"""

from bisect import bisect_right

FIRST_BLOCKS = 256
"""Blocks at a prompt's beginning that have a mark each: 4,096 tokens in blocks of 16."""
_PER_DOUBLING = 128
_DOUBLINGS = 16
CHARACTERS = 4
"""Characters of ``Arrival.prefix_hashes`` for every mark: three bytes in Base64."""


def _marked_blocks() -> tuple[int, ...]:
    marked = [*range(1, FIRST_BLOCKS + 1)]
    for doubling in range(_DOUBLINGS):
        step = (FIRST_BLOCKS << doubling) // _PER_DOUBLING
        marked += [marked[-1] + step * number for number in range(1, _PER_DOUBLING + 1)]
    return tuple(marked)


MARKED_BLOCKS = _marked_blocks()
"""Blocks from a prompt's beginning to each mark, that of the mark included; the last is block 16,777,216."""


def marks_within(blocks: int) -> int:
    """Count the marks of a prompt with so many full blocks."""
    return bisect_right(MARKED_BLOCKS, blocks)


def blocks_until(marks: int) -> int:
    """Return the blocks that so many marks cover; a text longer than all marks has those of the last."""
    return MARKED_BLOCKS[min(marks, len(MARKED_BLOCKS)) - 1] if marks else 0
