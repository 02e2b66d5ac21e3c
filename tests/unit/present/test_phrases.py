"""Pictures of characters, and series of values."""

import pytest

from schedtrace.present.phrases import BARS, bar, series


@pytest.mark.parametrize(
    ("fraction", "height"), [(-0.1, 0), (0, 0), (1e-9, 1), (0.125, 1), (0.5, 4), (0.99, 8), (1, 8), (1.5, 8)]
)
def test_bars_are_as_high_as_the_fraction_and_anything_above_nothing_shows(fraction, height):
    assert bar(fraction) == BARS[height]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([1, 15], "1, 15"),
        ([1] * 6, "1, 1, 1, 1, 1, 1"),
        ([1024] * 7, "1,024, 1,024, 1,024, 1,024, 1,024, 1,024 ... (7)"),
    ],
)
def test_a_long_series_is_cut_and_tells_its_length(values, text):
    assert series(values) == text
