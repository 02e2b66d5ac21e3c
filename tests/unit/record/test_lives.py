"""What becomes of a request's speculative tokens."""

import pytest

from schedtrace.model.trace import Arrival, Finish
from schedtrace.record.capture import ALL, Result
from schedtrace.record.request_lives import RequestLives


def drafted(got, invalid=None):
    """``finish.drafts, .drafts_accepted, .drafts_invalid`` of request a, which had 3 drafts in one step."""
    lives = RequestLives(drafts=True, invalid=True)
    lives.note_arrival(Arrival("a", 0, 0, 10))
    lives.got_drafts(Result(0, 0, got, invalid=invalid), {"a": 3, "gone": 2})
    finish = Finish("a", "STOPPED", 0, 10, 4)
    lives.note_finish(finish)
    return finish.drafts, finish.drafts_accepted, finish.drafts_invalid


@pytest.mark.parametrize(
    ("got", "accepted"),
    [
        ((["a"], [4]), 3),
        ((["a"], [3]), 2),
        ((["a"], [1]), 0),
        ((["a"], [0]), 0),
        ((["a"], None), 0),
        ((["b"], [4]), 0),
        (ALL, 0),
    ],
)
def test_every_token_after_the_first_was_an_accepted_draft(got, accepted):
    assert drafted(got) == (3, accepted, 0)


def test_drafts_that_the_grammar_forbade_are_counted():
    assert drafted((["a"], [2]), invalid={"a": 1, "gone": 2}) == (3, 1, 1)
