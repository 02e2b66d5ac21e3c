"""The oracle on functions small enough to say by hand what it must see."""

import inspect

import pytest

from tests.contract.lines import WAYS
from tests.contract.oracle import Oracle


def toy(work, budget, is_open=True):  # noqa: C901, PLR0912  # a scheduler in small
    index = 0
    while index < len(work) and budget > 0:
        item = work[index]
        index += 1
        if item == "skip":
            continue  # skipped
        while True:
            new_blocks = None if item == "big" else item
            if new_blocks is not None:
                break
            if budget:
                budget = 0
                break  # refused
        if new_blocks is None:
            break  # left
        for letter in item:
            if letter == "b":
                break
        budget -= 1
    index = None
    if (  # gate
        budget and is_open
    ):
        while (  # drained
            budget > 1
        ):
            if budget == 5:
                break  # early
            index = budget
            budget -= 1
            try:
                if budget == 3:
                    continue  # tried
            finally:
                index = None
    return budget


def toy_that_ends_with_a_loop(budget):
    while budget > 0:  # last
        budget -= 1


def exits_of(function, lines, *args):
    """Comments of the lines at which a loop of ``function`` was left."""
    source, first = inspect.getsourcelines(function)

    def note(place, variables):
        name = source[place.line - first].rpartition("#")[2].strip()
        item = variables["item"] if "item" in place.bound else None
        return (name, place.kind, place.loop, item, variables["budget"])

    oracle = Oracle(function, note, lines)
    with oracle.watching() as kept:
        function(*args)
    return kept


RUNNING = "while index < len(work) and budget > 0:"
CASES = {
    "nothing to do": (([], 0), [(RUNNING, "condition", 0, None, 0), ("gate", "gate", 1, None, 0)]),
    "closed": ((["a"], 2, False), [(RUNNING, "condition", 0, None, 1), ("gate", "gate", 1, None, 1)]),
    "all done": (
        (["a", "skip", "b"], 4),
        [
            ("skipped", "continue", 0, "skip", 3),
            (RUNNING, "condition", 0, None, 2),
            ("drained", "condition", 1, None, 1),
        ],
    ),
    "budget used": ((["a", "b", "c"], 2), [(RUNNING, "condition", 0, None, 0), ("gate", "gate", 1, None, 0)]),
    "refused": (
        (["a", "big", "c"], 9),
        [("refused", "break", 0, "big", 0), ("left", "break", 0, "big", 0), ("gate", "gate", 1, None, 0)],
    ),
    "early": (([], 6), [(RUNNING, "condition", 0, None, 6), ("early", "break", 1, None, 5)]),
    "tried": (
        ([], 4),
        [
            (RUNNING, "condition", 0, None, 4),
            ("tried", "continue", 1, None, 3),
            ("drained", "condition", 1, None, 1),
        ],
    ),
}


@pytest.mark.parametrize("lines", WAYS)
@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES)
def test_it_sees_every_exit_and_nothing_else(given, expected, lines):
    assert exits_of(toy, lines, *given) == expected


@pytest.mark.parametrize("lines", WAYS)
def test_a_loop_at_the_end_of_its_function(lines):
    assert exits_of(toy_that_ends_with_a_loop, lines, 3) == [("last", "condition", 0, None, 0)]


@pytest.mark.parametrize("lines", WAYS)
def test_after_an_error_it_listens_no_more(lines):
    oracle = Oracle(toy, lambda place, _: place.line, lines)
    with pytest.raises(TypeError), oracle.watching() as kept:
        toy(["a", 1], 9)
    assert kept == []
    toy([], 0)
    assert kept == []
