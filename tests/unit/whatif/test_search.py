"""Changes that are worth a trial on a recorded load."""

from types import SimpleNamespace

import pytest

from schedtrace.whatif.search import menu
from tests.makers import step

NOW = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 512, "num_blocks": None}
GRAPHS = {
    "compilation_config.cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32],
    "compilation_config.cudagraph_mode": "FULL",
}


@pytest.fixture
def base(view_of):
    """``base(**header)``: a load of 25 running requests."""

    def made(*, has_draft_cost=False, **header):
        view = view_of(step(0, num_running_after=25), device="cpu", **header)
        return SimpleNamespace(
            timelines=[view], loads=[], times=SimpleNamespace(has_draft_cost=has_draft_cost)
        )

    return made


def seats(changes):
    return [value for name, value in changes if name == "max_num_seqs"]


def test_fewer_seats_are_parts_of_those_taken_and_the_captured_sizes_below(base):
    assert seats(menu(base(), NOW)) == [6, 12, 18]
    assert seats(menu(base(settings=GRAPHS), NOW)) == [6, 12, 16, 18, 24]


def test_with_drafts_each_request_fills_several_tokens_of_a_graph(base):
    """Three tokens each: 32 hold ten requests, 24 hold eight."""
    assert seats(menu(base(settings=GRAPHS), NOW | {"drafts": 2})) == [6, 8, 10, 12, 18]


@pytest.mark.parametrize(
    ("drafts", "has_cost", "offered"), [(2, True, True), (2, False, False), (None, True, False)]
)
def test_drafts_off_is_tried_where_the_record_shows_what_they_cost(base, drafts, has_cost, offered):
    changes = menu(base(has_draft_cost=has_cost), NOW | {"drafts": drafts, "speculative_config": {}})
    assert (("speculative_config", None) in changes) is offered
