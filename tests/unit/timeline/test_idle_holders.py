"""Holders of KV blocks that get nothing while ``head`` is refused some."""

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, HeadRefusal
from schedtrace.timeline.charges import FEWEST_STEPS
from tests.makers import arrival, finish, step


def refusing(steps, *, holders=(("a", 30), ("b", 20)), got="b", **fields):
    """So many steps refuse ``head``, whose first also gives ``got`` a token."""
    refusal = HeadRefusal("head", [5], 1, [name for name, _ in holders], [[blocks for _, blocks in holders]])
    for name, value in fields.items():
        setattr(refusal, name, value)
    no_blocks = Exit("waiting", "break", Cause.KV_BLOCKS, "head")
    lines = [step(number, waiting=1, ended=no_blocks, running=0) for number in range(1, steps + 1)]
    lines[0] = step(
        1,
        got=dict.fromkeys(got, 1),
        waiting=1,
        ended=no_blocks,
        refusals=[refusal],
        arrived=[arrival("head", None, 500)],
    )
    before = step(0, got={"a": 10, "b": 10}, new="ab", arrived=[arrival(name, None, 0) for name in "ab"])
    return [before, *lines]


def rows(view):
    return view.idle_holders.select("first_step", "last_step", "request_id", "blocks", "held", "kind").rows()


def test_who_got_nothing_and_keeps_half_of_the_blocks_holds_them_idly(view_of):
    found = rows(view_of(*refusing(FEWEST_STEPS)))
    assert found == [(1, FEWEST_STEPS, "a", 30, 50, "request")]


@pytest.mark.parametrize(
    "lines",
    [
        refusing(FEWEST_STEPS - 1),
        refusing(FEWEST_STEPS, holders=(("a", 30), ("b", 31))),
        refusing(FEWEST_STEPS, other_holders=2, other_held=[11]),
        refusing(FEWEST_STEPS, got="ab"),
    ],
    ids=["too few steps", "less than half", "others hold more", "all got tokens"],
)
def test_otherwise_the_cache_is_in_use(view_of, lines):
    assert rows(view_of(*lines)) == []


def test_nobody_ran(view_of):
    assert view_of(*refusing(FEWEST_STEPS, got="")).idle_holders["alone"].to_list() == [True, True]
    assert view_of(*refusing(FEWEST_STEPS)).idle_holders["alone"].to_list() == [False]


def test_a_session_is_silent_while_its_client_has_not_sent_more(view_of):
    lines = refusing(FEWEST_STEPS)
    lines[3].arrived = [arrival("a", None, 25_000, streaming_update=True)]
    found = view_of(*lines).idle_holders
    assert found.select("kind", "silent").rows() == [("session", False)]
    lines[2].exits.insert(0, Exit("waiting", "continue", Cause.STREAMING_INPUT_PENDING, "a"))
    assert view_of(*lines).idle_holders["silent"].to_list() == [True]


def test_a_finished_request_holds_only_what_nobody_fetched(view_of):
    lines = refusing(FEWEST_STEPS)
    lines[1].finished = [finish("a", finished_us=9000)]
    assert rows(view_of(*lines)) == []
    lines[1].refusals[0].finished_holders = ["a"]
    assert rows(view_of(*lines)) == [(1, FEWEST_STEPS, "a", 30, 50, "finished")]
