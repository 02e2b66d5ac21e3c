"""CUDA graphs that vLLM captured: their sizes, and the graph in which a batch runs."""

from bisect import bisect_left
from collections.abc import Sequence

from schedtrace.model.trace import Header


def graph_sizes(header: Header) -> list[int]:
    """Return the sizes of the graphs that an engine captured, in order; empty if none, or not recorded."""
    sizes = header.settings.get("compilation_config.cudagraph_capture_sizes")
    if header.settings.get("compilation_config.cudagraph_mode") in {None, "NONE"} or not isinstance(
        sizes, list
    ):
        return []
    return sorted(size for size in sizes if isinstance(size, int))


def graph_use(tokens: int | None, sizes: Sequence[int]) -> tuple[int | None, int | None]:
    """Return the tokens that pad a batch to the next captured size, and 1 if it is beyond the largest size.

    Both are None if the batch's tokens are not known.
    """
    if tokens is None:
        return None, None
    place = bisect_left(sizes, tokens)
    return (sizes[place] - tokens, 0) if place < len(sizes) else (0, int(bool(sizes)))
