import pytest

from schedtrace.present.sections import State, States, Style
from schedtrace.present.strips import state_characters

WAITS, RUNS, LOST = (
    State("waits", ".", Style.DIM),
    State("runs", "=", Style.DIM),
    State("lost", "!", Style.DIM, prominent=True),
)


def drawn(runs, width):
    return "".join(state.character for state in state_characters(States(runs), width))


@pytest.mark.parametrize(
    ("runs", "width", "characters"),
    [
        ([], 5, ""),
        ([(WAITS, 2), (RUNS, 1)], 5, "..="),
        ([(WAITS, 2), (RUNS, 1)], 1, "."),
        ([(WAITS, 4), (RUNS, 4)], 4, "..=="),
        ([(WAITS, 3), (RUNS, 5)], 4, "..=="),
        ([(WAITS, 9), (LOST, 1), (RUNS, 10)], 2, "!="),
        ([(WAITS, 10**18), (RUNS, 10**18)], 4, "..=="),
        ([(WAITS, 10**18), (LOST, 1), (RUNS, 10**18)], 3, ".!="),
    ],
)
def test_a_part_shows_a_prominent_state_or_the_most_frequent_one(runs, width, characters):
    assert drawn(runs, width) == characters
