"""One page, as every renderer draws it."""

import json
from pathlib import Path

import msgspec
import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.message import Message, Requests
from schedtrace.model.say import say
from schedtrace.present import renderers
from schedtrace.present.renderers import Format, renderer
from schedtrace.present.sections import (
    Band,
    Bars,
    Column,
    Fact,
    Facts,
    Field,
    Finding,
    Headline,
    Note,
    Page,
    State,
    States,
    Strip,
    Style,
    Styled,
    Table,
    figure,
    table,
)
from schedtrace.present.strips import state_characters
from schedtrace.present.words import CHANGES, SEVERITIES, STATES, state

WAITED = say(
    "{request:id} waited {time:us} for {cause:cause}",
    request="t1_[x]",
    time=1_200_000,
    cause=Cause.KV_BLOCKS,
)


class Document(msgspec.Struct):
    said: Message
    name: str = "a\x1b"


def page(*sections, document=None):
    return Page(document or Document(WAITED), lambda _: sections)


def drawn(output_format, *sections, width=60):
    return renderer(output_format)(page(*sections), width=width)


def test_every_module_of_the_package_is_a_format_and_every_format_a_module():
    modules = {path.stem for path in Path(renderers.__file__).parent.glob("*.py")} - {"__init__"}
    assert modules == set(Format)
    assert all(callable(renderer(output_format)) for output_format in Format)


def test_one_message_is_text_markdown_and_json():
    assert drawn(Format.TEXT, Note(WAITED)) == "t1_[x] waited 1,200 ms for kv_blocks\n"
    assert drawn(Format.MARKDOWN, Note(WAITED)) == "`t1_[x]` waited 1,200 ms for `kv_blocks`\n"
    assert json.loads(drawn(Format.JSON))["said"] == {
        "is": "message",
        "text": "t1_[x] waited 1,200 ms for kv_blocks",
        "template": "{request} waited {time} for {cause}",
        "arguments": {
            "request": {"is": "request", "request_id": "t1_[x]"},
            "time": {"is": "duration", "us": 1_200_000},
            "cause": {"is": "cause", "cause": "kv_blocks"},
        },
    }


def test_sections_are_made_from_a_printable_copy_and_json_from_the_document():
    shown = Page(Document(WAITED), lambda document: [Note(document.name)])
    assert renderer(Format.TEXT)(shown) == "a\\x1b\n"
    assert renderer(Format.MARKDOWN)(shown) == "`a\\x1b`\n"
    assert json.loads(renderer(Format.JSON)(shown))["name"] == "a\x1b"


TABLE = Table(
    [Column("request"), Column("tokens\nnow", numeric=True), Column("why"), Column("")],
    [
        [say("{id:code}", id="a|b"), "1,234", Styled("cut", Style.BAD), Bars([0, 1], Style.INFO)],
        ["c", "5", "", Bars([1, 0.5], Style.INFO)],
    ],
    "3 more",
)


def test_a_table_has_its_figures_to_the_right():
    assert drawn(Format.TEXT, TABLE).splitlines() == [
        "         tokens",
        "request     now  why",
        "a|b       1,234  cut   █",
        "c             5       █▄",
        "3 more",
    ]


def test_a_table_that_does_not_fit_is_a_block_for_each_row():
    assert drawn(Format.TEXT, TABLE, width=20).splitlines() == [
        "request",
        "a|b",
        "  tokens now 1,234;",
        "  why cut",
        "   █",
        "c",
        "  tokens now 5",
        "  █▄",
        "3 more",
    ]


TRIALS = Table([Column("trial", numeric=True), Column("steps", numeric=True)], [["1", "12"]])
WORDS = Table([Column("ab"), Column("long words")], [["c", "de"]])
MEANING = "some words that go on and on"


@pytest.mark.parametrize(
    ("shown", "width", "lines"),
    [
        (TRIALS, 10, ["trial 1", "  steps 12"]),  # the first of a block's figures has its heading beside it
        (WORDS, 8, ["   long", "ab words", "c  de"]),  # side by side as soon as the words fit
        (WORDS, 7, ["ab", "c", "  long", "  words", "  de"]),
        # prose gets the room that names and short columns leave
        (
            Table([Column("name"), Column("meaning")], [["a-name", MEANING]]),
            24,
            ["name   meaning", "a-name some words that", "       go on and on"],
        ),
        (
            Table([Column("two words"), Column("prose")], [["x", MEANING]]),
            20,
            ["two words prose", "x         some words", "          that go on", "          and on"],
        ),
    ],
)
def test_a_table_stands_side_by_side_as_far_as_its_words_fit(shown, width, lines):
    assert drawn(Format.TEXT, shown, width=width).splitlines() == lines


def test_a_table_is_made_of_things_and_says_how_many_are_left_out():
    fields = [Field("number", str), figure("twice", lambda number: str(2 * number), of_steps=True)]
    columns = [Column("number"), Column("twice", numeric=True, of_steps=True)]
    rows = [["1", "2"], ["2", "4"]]
    assert table([1, 2, 3], fields, most=2) == Table(columns, rows, "1 more: --format json lists them all")
    assert table([1, 2], fields, "and so on", most=2) == Table(columns, rows, "and so on")


def test_a_table_in_markdown_cannot_be_left_by_what_is_in_it():
    assert drawn(Format.MARKDOWN, TABLE).splitlines() == [
        "| request | tokens now | why |  |",
        "| --- | ---: | --- | --- |",
        "| `a\\|b` | 1,234 | **cut** | `·█` |",
        "| c | 5 |  | `█▄` |",
        "",
        "3 more",
    ]


def test_a_headline_has_its_lines_and_warnings_below():
    head = Headline(say("Request {id:id}", id="a_"), " of r", ["8 tokens"], ["2 steps are missing"])
    assert drawn(Format.TEXT, head) == "Request a_ of r\n  8 tokens\n! 2 steps are missing\n"
    assert drawn(Format.MARKDOWN, head) == "**Request `a_`** of r\n\n* 8 tokens\n* 2 steps are missing\n"


def test_facts_stand_beside_their_labels_and_below_where_a_word_is_too_long():
    facts = Facts([Fact("used", ["8 of 9 tokens", "by 2"]), Fact("where", ["x" * 50])])
    assert drawn(Format.TEXT, facts).splitlines() == [
        "used       8 of 9 tokens",
        "           by 2",
        "where",
        "  " + "x" * 50,
    ]
    assert drawn(Format.MARKDOWN, facts) == f"**used**: 8 of 9 tokens\n\nby 2\n\n**where**: {'x' * 50}\n"


def test_a_finding_has_its_level_its_paragraphs_and_what_to_try():
    found = Finding(Styled("warning", Style.WARNING), "kv-bound", "cause x", ["They waited."], "More room.")
    assert drawn(Format.TEXT, found) == (
        "warning  kv-bound  cause x\n         They waited.\n         try: More room.\n"
    )
    assert drawn(Format.MARKDOWN, found) == (
        "**warning: kv-bound** cause x\n\nThey waited.\n\nTry: More room.\n"
    )


def test_a_long_word_moves_a_findings_text_to_the_left():
    found = Finding(Styled("info", Style.INFO), "stall", "", ["x" * 55])
    assert drawn(Format.TEXT, found) == f"info     stall\n  {'x' * 55}\n"


RARE = State("rare", "R", Style.PREFILL, prominent=True)
USUAL = State("usual", "=", Style.DECODE)


def test_a_strip_is_as_wide_as_there_is_room_and_keeps_what_is_rare_or_high():
    strip = Strip(
        [
            Band("use", Bars([0, 0.5, 1, 0, 0, 0, 0, 0.1], Style.GOOD)),
            Band("states", States([(USUAL, 5), (RARE, 1), (USUAL, 2)])),
            Band("waiting", "no request"),
        ],
        "time",
    )
    assert drawn(Format.TEXT, strip, width=22).splitlines() == [
        "use          ▄█    ▁",
        "states      =====R==",
        "waiting     no request",
        "            time: =",
        "            usual, R",
        "            rare",
    ]
    assert drawn(Format.TEXT, strip, width=16).splitlines()[:2] == ["use         ▄█ ▁", "states      ==R="]
    assert drawn(Format.MARKDOWN, strip).splitlines()[:2] == ["* use `·▄█····▁`", "* states `=====R==`"]


@pytest.mark.parametrize("text", ["- x", "1. x", "> x", "=== x", "+ x", "--- x", "| x"])
def test_a_paragraph_begins_no_list_quotation_rule_or_table(text):
    first = text.split()[0]
    assert drawn(Format.MARKDOWN, Note(text)) == f"`{first}` x\n"


def test_code_spans_that_touch_are_one():
    touching = say("{a:id}{b:code} `c", a="x`", b="``y")
    assert drawn(Format.MARKDOWN, Note(touching)) == "````x```y```` `` `c ``\n"


def test_of_several_requests_each_is_a_name():
    some = say("{requests} waited", requests=Requests(["a", "b_", "c", "d", "e"], 9))
    assert drawn(Format.MARKDOWN, Note(some)) == "`a`, `b_`, `c` and 6 others waited\n"
    assert drawn(Format.TEXT, Note(say("{n:n request} ran", n=2))) == "2 requests ran\n"


def test_severities_changes_and_states_have_their_words_in_one_place():
    assert set(SEVERITIES) == {"info", "warning", "critical"}
    assert set(CHANGES) == {"appeared", "went", "stayed"}
    assert {"waiting", "prefill", "decode", "recompute", "preempted"} <= set(STATES)
    assert state("new in vLLM") == State("new in vLLM", "?", Style.DIM)


WAITS, RUNS, LOST = (
    State("waits", ".", Style.DIM),
    State("runs", "=", Style.DIM),
    State("lost", "!", Style.DIM, prominent=True),
)


def characters_of(runs, width):
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
    assert characters_of(runs, width) == characters
