"""Wording of numbers and of each kind of argument."""

import pytest

from schedtrace.model.message import (
    CauseWord,
    Code,
    Count,
    Duration,
    Number,
    Request,
    Requests,
    Setting,
    Share,
    StepList,
    Steps,
    given,
    joined,
    phrase,
    pieces,
    plain,
)
from schedtrace.model.numbers import duration, integer, number, percent
from schedtrace.model.say import say


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (999, "999"),
        (1234, "1,234"),
        (1_234_567, "1,234,567"),
        (10**18 + 1, "1,000,000,000,000,000,001"),
        (2.4, "2"),
        (2.5 + 1e-9, "2"),
        (-1500, "-1,500"),
        (-0.1, "0"),
    ],
)
def test_integers_have_thousands_separated(value, text):
    assert integer(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (5, "5"),
        (5.0, "5.00"),
        (0.0, "0"),
        (0.42, "0.42"),
        (0.1, "0.10"),
        (0.0999, "0.1"),
        (0.001, "0.001"),
        (0.01234, "0.012"),
        (-0.001, "-0.001"),
        (9.876, "9.88"),
        (12.34, "12.3"),
        (99.94, "99.9"),
        (123.4, "123"),
        (1234.5, "1,234"),
        (-3.456, "-3.46"),
        (9.996, "10.0"),
        (99.96, "100"),
        (1000.0, "1,000"),
        (123, "123"),
        (1_000_000, "1,000,000"),
    ],
)
def test_numbers_have_two_or_three_digits_that_matter(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "decimals", "text"), [(3, 1, "3.0"), (3.0, 1, "3.0"), (1234.56, 0, "1,235"), (None, 1, "-")]
)
def test_decimals_may_be_asked_for(value, decimals, text):
    assert number(value, decimals) == text


@pytest.mark.parametrize("off", [-1e-9, 1e-9])
def test_noise_of_the_last_bits_changes_no_text(off):
    exact = [n / 1000 for n in range(5, 12_000, 5)] + [float(n) for n in range(1, 1200)]
    assert [number(value * (1 + off)) for value in exact] == [*map(number, exact)]
    assert [integer(value * (1 + off)) for value in exact] == [*map(integer, exact)]
    shares = [value / 12 for value in exact if value <= 12]
    for signed in (False, True):
        written = [percent(value * (1 + off), signed=signed) for value in shares]
        assert written == [percent(value, signed=signed) for value in shares]
    assert percent(off / 1e9, signed=True) == "+0.0 %"
    assert [duration(1e7 * (1 + off)), duration(1e3 * (1 + off))] == ["10.0 s", "1.00 ms"]


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (None, "-"),
        (0, "0 %"),
        (0.0001, "<1 %"),
        (0.0049, "<1 %"),
        (0.005, "<1 %"),
        (0.165, "16 %"),
        (0.995, ">99 %"),
        (0.006, "1 %"),
        (0.125, "12 %"),
        (0.994, "99 %"),
        (0.996, ">99 %"),
        (0.9999, ">99 %"),
        (1, "100 %"),
    ],
)
def test_what_is_not_quite_nothing_or_all_is_not_rounded_to_it(fraction, text):
    assert percent(fraction) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.1234, "+12.3 %"), (-0.5, "-50.0 %"), (0, "+0.0 %"), (None, "-")]
)
def test_changes_carry_their_sign(fraction, text):
    assert percent(fraction, signed=True) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Request("a"), "a"),
        (Requests([], 1), "1 request"),
        (Requests([], 1234), "1,234 requests"),
        (Requests(["a"], 1), "a"),
        (Requests(["a", "b", "c", "d"], 4), "a, b, c and d"),
        (Requests(["a", "b", "c", "d", "e"], 5), "a, b, c and 2 others"),
        (Requests(["a"], 2), "a and 1 other"),
        (Steps(3, 3), "step 3"),
        (Steps(3, 5, 1), "steps 3-5 of trial 1"),
        (CauseWord("kv_blocks"), "kv_blocks"),
        (Setting("--x"), "--x"),
        (Code("x:1"), "x:1"),
        (Duration(1_234), "1.23 ms"),
        (Duration(9_999_000), "9,999 ms"),
        (Duration(9_999_999), "10.0 s"),
        (Duration(1_000), "1.00 ms"),
        (Share(0.123), "12 %"),
        (Share(-0.5, signed=True), "-50.0 %"),
        (Share(None), "-"),
        (Count(1, "step"), "1 step"),
        (Count(1234, "token"), "1,234 tokens"),
        (Count(2, "entry", "entries"), "2 entries"),
        (Count(1, "entry", "entries"), "1 entry"),
        (Number(None), "-"),
        (Number(1234.5), "1,234"),
        (Number(3), "3"),
        (Number(3.0, 1), "3.0"),
        (given(4.0), "4"),
        (given(0.5), "0.50"),
    ],
)
def test_each_kind_of_argument_is_written(value, text):
    assert phrase(value) == text
    assert plain(say("<{x}>", x=value)) == f"<{text}>"


def test_pieces_name_the_argument_that_they_are():
    inner = say("{step:step}!", step=1)
    whole = joined([say("a {id:id}", id="r"), inner])
    parts = [("a ", None), ("r", Request("r")), (" ", None), ("step 1", Steps(1, 1)), ("!", None)]
    assert list(pieces(whole)) == parts
    assert list(pieces("as it is {x}")) == [("as it is {x}", None)]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([7], "Step 7"),
        ([7, 8], "Steps 7-8"),
        ([248, 249, 250, 257], "Steps 248-250 and 257"),
        ([1, 3, 4, 9, 10, 11], "Steps 1, 3-4 and 9-11"),
        (list(range(0, 16, 2)), "Steps 0, 2, 4, 6, 8, 10, 12 and 14"),
        (list(range(0, 18, 2)), "Steps 0, 2, 4, 6, 8, 10, 12, 14 and more"),
        ([1, 2, "cut"], "Steps 1-2 and more"),
        ([1, "cut"], "Steps 1 and more"),
    ],
)
def test_steps_are_ranges(steps, text):
    numbers = [step for step in steps if step != "cut"]
    value = StepList(numbers, whole=numbers == steps)
    assert plain(say("{steps}", steps=value)) == phrase(value) == text


def test_each_range_of_a_list_is_steps_of_its_own():
    parts = list(pieces(say("{steps}.", steps=StepList([3, 4, 9], whole=True))))
    assert parts == [
        ("Steps ", None),
        ("3-4", Steps(3, 4)),
        (" and ", None),
        ("9", Steps(9, 9)),
        (".", None),
    ]
