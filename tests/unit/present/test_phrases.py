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
)
from schedtrace.model.say import say
from schedtrace.present.phrases import phrase, pieces, plain


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
