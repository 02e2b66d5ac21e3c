"""What a refused request would have needed, where the trace shows that the count is not vLLM's."""

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from schedtrace.timeline.queue_waits import need_of
from tests.makers import arrival, step


@pytest.mark.parametrize(("tokens", "counts"), [(0, False), (10, False), (40, True)])
def test_a_refusal_of_more_blocks_than_are_counted_leaves_the_need_unknown(tokens, counts, view_of):
    """Three blocks of 16 are refused: 10 tokens need one, 40 need three."""
    refused = Exit("waiting", "break", Cause.KV_BLOCKS, request_id="b", blocks_needed=3)
    arrivals = [arrival("b", 0, prompt_tokens=tokens)]
    view = view_of(step(0, waiting=1, ended=refused, arrived=arrivals), step(1, waiting=1, ended=refused))
    assert (need_of(view, view.refused_heads) is not None) is counts
