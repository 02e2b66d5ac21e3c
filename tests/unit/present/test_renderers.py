"""One page, as every renderer draws it, and renderers of other packages."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from schedtrace.errors import UsageError
from schedtrace.model.causes import Cause
from schedtrace.model.message import Message, Requests
from schedtrace.model.say import say
from schedtrace.present import renderers
from schedtrace.present.phrases import CHANGES, SEVERITIES, STATES, state, state_characters
from schedtrace.present.renderers import ENTRY_POINTS, Format, html, renderer
from schedtrace.present.renderers.markdown import cell, code, prose
from schedtrace.present.sections import (
    Band,
    Bars,
    Column,
    Commands,
    FactRow,
    Facts,
    Field,
    FindingSection,
    Headline,
    Note,
    Page,
    Part,
    RootCauseSection,
    Shares,
    State,
    States,
    Strip,
    Style,
    Styled,
    Table,
    figure_field,
    table,
)
from tests.unit.present.test_goldens import check

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
    assert json.loads(drawn(Format.JSON))["said"] == {"text": "t1_[x] waited 1,200 ms for kv_blocks"}


def test_json_has_lists_of_values_and_sentences_on_one_line_and_leaves_texts_alone():
    document = {
        "steps": [1, 2, 3],
        "none": [],
        "texts": ["a, [b", "{", '"\n[\n1,\n2]'],
        "said": WAITED,
        "rows": [{"step": 1, "ids": ["a", "b"]}],
    }
    text = renderer(Format.JSON)(Page(document, lambda _: []))
    assert text.split("\n") == [
        "{",
        '  "steps": [1, 2, 3],',
        '  "none": [],',
        '  "texts": ["a, [b", "{", "\\"\\n[\\n1,\\n2]"],',
        '  "said": {"text": "t1_[x] waited 1,200 ms for kv_blocks"},',
        '  "rows": [',
        "    {",
        '      "step": 1,',
        '      "ids": ["a", "b"]',
        "    }",
        "  ]",
        "}",
        "",
    ]
    assert json.loads(text) == document | {"said": {"text": "t1_[x] waited 1,200 ms for kv_blocks"}}


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
    fields = [Field("number", str), figure_field("twice", lambda number: str(2 * number), of_steps=True)]
    columns = [Column("number"), Column("twice", numeric=True, of_steps=True)]
    rows = [["1", "2"], ["2", "4"]]
    assert table([1, 2, 3], fields, most=2) == Table(columns, rows, "1 more: --format json lists them all")
    assert table([1, 2], fields, "and so on", most=2) == Table(columns, rows, "and so on")


RARE = State("rare", "R", Style.PREFILL, prominent=True)
USUAL = State("usual", "=", Style.DECODE)
SECTIONS = [
    Headline(say("Request {id:id}", id="a_"), " of r", ["8 tokens"], ["2 steps are missing"]),
    TABLE,
    Facts(
        [
            FactRow("used", ["8 of 9 tokens", "by 2"]),
            FactRow("", [TABLE]),
            FactRow("where", ["x" * 50]),
        ]
    ),
    FindingSection(Styled("warning", Style.WARNING), "kv-bound", "cause x", ["They waited."], "More room."),
    FindingSection(Styled("info", Style.INFO), "stall", "", ["x" * 55]),
    Strip(
        [
            Band("use", Bars([0, 0.5, 1, 0, 0, 0, 0, 0.1], Style.GOOD)),
            Band("states", States([(USUAL, 5), (RARE, 1), (USUAL, 2)])),
            Band("waiting", "no request"),
        ],
        "time",
    ),
    Shares("time", [Part("decode", 0.4412, Style.DECODE), Part("waiting", 0.005, Style.DIM, "kv_blocks")]),
    RootCauseSection(1, Styled("Few seats", Style.WARNING), "+9 %", ["They waited."], ["More.", "Fewer."]),
    Note("Nothing.", "Check:"),
    Commands("More:", ["schedtrace analyze a run"]),
]


@pytest.mark.parametrize(
    ("output_format", "width"),
    [(Format.TEXT, 60), (Format.TEXT, 22), (Format.TEXT, 16), (Format.MARKDOWN, 60)],
)
def test_every_kind_of_section(output_format, width):
    """UPDATE_GOLDENS=1 writes them again (then read them)."""
    check(f"sections-{output_format}-{width}", drawn(output_format, *SECTIONS, width=width))


def test_every_kind_of_section_in_html():
    check("sections-html", html.fragment(SECTIONS, rank=0, level=2))


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


@pytest.mark.parametrize(
    ("value", "span"),
    [
        ("a", "`a`"),
        (40, "`40`"),
        ("[x](y) <b> @team", "`[x](y) <b> @team`"),
        ("a`b", "``a`b``"),
        ("`", "`` ` ``"),
        ("``a", "``` ``a ```"),
        ("", "`  `"),
        (" ", "`   `"),
    ],
)
def test_a_code_span_cannot_be_ended_by_what_is_in_it(value, span):
    assert code(value) == span


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("2 steps of 8 left 80 % (<1 %), 0 -> 2.", "2 steps of 8 left 80 % (<1 %), 0 -> 2."),
        ("--max-num-seqs and max_num_seqs: 3*4", "--max-num-seqs and max_num_seqs: `3*4`"),
        ("request [red]<img> waited", "request `[red]<img>` waited"),
        ("_x_ y_", "`_x_` `y_`"),
        ("@team #1 ~~a~~ $x$ :smile:", "`@team` `#1` `~~a~~` `$x$` `:smile:`"),
        ("https://x www.y a@b", "`https://x` `www.y` `a@b`"),
        ("&lt; & a&b; AT&T", "`&lt;` & `a&b;` `AT&T`"),
        (r"\x1b a\|b", r"`\x1b` `a\|b`"),
    ],
)
def test_words_that_could_mean_something_become_code_spans(text, markdown):
    assert prose(text) == markdown


def test_a_cell_ends_neither_the_cell_nor_the_line():
    assert cell("a | b\n c") == r"a \| b c"


def codes_as_lines(page, *, width=None):  # noqa: ARG001  # of the protocol
    """Render a catalogue of findings as a code a line."""
    return "".join(f"{kind.code}\n" for kind in page.document.findings)


def raising(page, *, width=None):  # noqa: ARG001  # of the protocol
    """Fail."""
    msg = "no width"
    raise ValueError(msg)


@pytest.fixture
def installed(monkeypatch):
    """Stand in for packages that name a renderer, two of which fail."""
    points = {
        "codes": EntryPoint("codes", f"{__name__}:codes_as_lines", ENTRY_POINTS),
        "raising": EntryPoint("raising", f"{__name__}:raising", ENTRY_POINTS),
        "broken": EntryPoint("broken", "no_such_package:render", ENTRY_POINTS),
    }

    def entry_points(*, group, name=None):
        assert group == ENTRY_POINTS
        return tuple(point for key, point in points.items() if name in {None, key})

    monkeypatch.setattr(renderers, "entry_points", entry_points)


@pytest.mark.usefixtures("installed")
def test_a_command_prints_with_another_packages_renderer(cli):
    _, codes, _ = cli("findings", "--format", "codes")
    _, document, _ = cli("findings", "--format", "json")
    assert codes.split() == [kind["code"] for kind in json.loads(document)["findings"]]


@pytest.mark.usefixtures("installed")
def test_an_unknown_format_is_a_usage_error_that_names_all_formats(cli):
    code, _, message = cli("findings", "--format", "yaml")
    assert code == 2
    assert all(name in message for name in ("text", "json", "codes", "broken"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "reason"), [("broken", "no_such_package"), ("raising", "no width")])
def test_a_renderer_that_fails_is_named(name, reason):
    with pytest.raises(UsageError, match=reason):
        renderer(name)(Page(None, lambda _: []))
