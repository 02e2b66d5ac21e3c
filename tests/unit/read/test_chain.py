"""Who left between two full steps, as places to take out."""

import pytest

from schedtrace.read.chain import removed_rows, without


@pytest.mark.parametrize(
    ("before", "now", "places"),
    [
        ("abc", "abc", []),
        ("abc", "ac", [1]),
        ("abcd", "bdx", [0, 2]),
        ("abcdefghijkl", "bdfhjlx", [0, 2, 4, 6, 8, 10]),  # more than are looked for one by one
        ("abcdefghijkl", "lkjihx", list(range(12))),  # in another order: everybody leaves and comes again
    ],
)
def test_places_of_those_who_left(before, now, places):
    assert removed_rows(before, tuple(now)) == places
    assert tuple(without(before, places)) == tuple(now)[: len(before) - len(places)]
