"""What a refused request would have needed, where a damaged trace says what cannot be."""

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from schedtrace.timeline.admission import need_of, refused_heads
from tests.makers import arrival, step


@pytest.mark.parametrize(("tokens", "groups"), [(0, 1), (10, 3)])
def test_a_request_without_tokens_tells_nothing_of_cache_groups(tokens, groups, view_of):
    refused = Exit("waiting", "break", Cause.KV_BLOCKS, request_id="b", blocks_needed=3)
    came = [arrival("b", 0, prompt_tokens=tokens)]
    view = view_of(step(0, waiting=1, ended=refused, arrived=came), step(1, waiting=1, ended=refused))
    assert need_of(view, refused_heads(view)).groups == groups
