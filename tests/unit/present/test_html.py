"""Pages as HTML: what is linked, what is escaped, and that nothing but our own style sheet has an effect."""

import re
from html.parser import HTMLParser

import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.message import Request, StepList, Steps
from schedtrace.model.say import say
from schedtrace.present import sections
from schedtrace.present.phrases import STATES
from schedtrace.present.renderers.html import fragment, render, source_of, style_sheet
from schedtrace.present.sections import (
    Band,
    Bars,
    Column,
    FactRow,
    Facts,
    FindingSection,
    Headline,
    Note,
    Page,
    Part,
    Shares,
    State,
    States,
    Strip,
    Style,
    Styled,
    Table,
)

HOSTILE = '"><script>alert(1)</script><img src=x onerror="alert(2)">\' {{ 7 * 7 }} {# x #} &lt;'
VOID = {"meta"}


def html_of(*shown, **options):
    return str(fragment(shown, **options))


class Elements(HTMLParser):
    """Tags with their attributes; fails where a tag is not closed in its order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.words = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_names_are_marked_and_steps_and_requests_are_links():
    said = say(
        "{request:id} at {steps}: {cause:cause}, {setting:setting}, {code:code}, {time:us}",
        request="t1/3 &",
        steps=Steps(264, 270),
        cause=Cause.KV_BLOCKS,
        setting="--x",
        code="a.py:1",
        time=1500,
    )
    assert html_of(Note(said), rank=1) == (
        '<p class="note"><a href="#request=t1%2F3%20%26"><bdi class="request">t1/3 &amp;</bdi></a> at '
        '<a href="#step=264&amp;rank=1" data-step="264" data-last-step="270" data-rank="1">'
        "steps 264-270</a>: "
        '<code class="cause" data-cause="kv_blocks">kv_blocks</code>, <code class="setting">--x</code>, '
        '<code>a.py:1</code>, <span class="figure">1.50 ms</span></p>\n'
    )
    assert "href" not in html_of(Note(said))


def test_a_finding_links_to_the_steps_of_its_own_engine():
    steps = say("{steps}.", steps=StepList([3, 4, 9], whole=True))
    found = FindingSection(Styled("warning", Style.WARNING), "stall", "", [steps], engine_rank=2)
    root = sections.RootCauseSection(1, "Few seats", "", [], [], engine_rank=3, steps=steps)
    links = [about["href"] for tag, about in Elements(html_of(found, root, rank=0)).elements if tag == "a"]
    assert links == ["#step=3&rank=2", "#step=9&rank=2", "#step=3&rank=3", "#step=9&rank=3"]
    assert "Steps 3-4 and 9." in Elements(html_of(found)).words
    assert "Steps" not in html_of(root)


def test_a_column_of_steps_has_links():
    table = Table([Column("step", of_steps=True)], [["7"], ["7-9"], [""], ["-"]])
    links = [about for tag, about in Elements(html_of(table, rank=0)).elements if tag == "a"]
    assert [(one["data-step"], one["data-last-step"]) for one in links] == [("7", "7"), ("7", "9")]


STATED = States([(STATES["prefill"], 1), (STATES["decode"], 8), (State(HOSTILE, "?", Style.DIM), 3)])
BARS = Bars([0, 0.5, 1, 0.001], Style.GOOD)
BAD = say(HOSTILE.replace("{", "{{").replace("}", "}}") + "{x}", x=Request(HOSTILE))
EVERYTHING = [
    Headline(BAD, HOSTILE, [Styled(BAD, Style.DIM)], [HOSTILE]),
    Note(HOSTILE, HOSTILE),
    Facts([FactRow(HOSTILE, [BAD, Table([Column(HOSTILE)], [[HOSTILE]])])]),
    Table([Column(HOSTILE, numeric=True), Column(HOSTILE, of_steps=True)], [[BARS, HOSTILE]], HOSTILE),
    Strip([Band(HOSTILE, BARS), Band("", STATED), Band("x", HOSTILE)], HOSTILE),
    FindingSection(Styled(HOSTILE, Style.BAD), HOSTILE, HOSTILE, [BAD], HOSTILE),
    Shares(HOSTILE, [Part(HOSTILE, 0.25, Style.DECODE)]),
    sections.RootCauseSection(1, HOSTILE, HOSTILE, [BAD], [HOSTILE], steps=HOSTILE),
    Note(say("{x:cause}{y:code}{z:setting}", x=HOSTILE, y=HOSTILE, z=HOSTILE)),
]


@pytest.mark.parametrize("rank", [None, 0])
def test_texts_of_strangers_stay_texts(rank):
    read = Elements(html_of(*EVERYTHING, rank=rank))
    assert not {tag for tag, _ in read.elements} & {"script", "img", "style", "link", "iframe"}
    names = {name for _, about in read.elements for name in about}
    assert not [name for name in names if name.startswith("on") or name in {"style", "src"}]
    assert all(about["href"].startswith("#") for tag, about in read.elements if tag == "a")
    assert read.words.count(HOSTILE) > 20


def test_a_long_id_is_there_once_in_its_link_and_once_in_its_words():
    name = "é" * 10_000
    assert html_of(Note(say("{x:id}", x=name)), rank=0).count("é") == 10_000
    assert html_of(Note(say("{x:id}", x=name)), rank=0).count("%C3%A9") == 10_000


def test_a_document_allows_its_style_and_nothing_else():
    whole = render(Page(None, lambda _: EVERYTHING))
    style = re.search("<style>(.*)</style>", whole, re.DOTALL)[1]
    assert style == style_sheet()
    elements = Elements(whole).elements
    [policy] = [about["content"] for _, about in elements if "http-equiv" in about]
    assert policy == (
        f"default-src 'none'; style-src {source_of(style)}; base-uri 'none'; form-action 'none'"
    )
    assert [tag for tag, _ in elements].count("script") == 0
    assert "url(" not in style
    assert "@import" not in style


def test_pictures_are_drawn_by_attributes_and_have_words():
    drawn = html_of(
        Strip([Band("use", BARS), Band("", States([(STATES["decode"], 1)] * 480))], "left to right")
    )
    assert 'aria-label="highest 100 %" viewBox="0 0 4 100"' in drawn
    assert 'd="M1 100V50h1V100M2 100V0h1V100M3 100V97h1V100"' in drawn
    assert 'aria-label="decode 480 steps" viewBox="0 0 240 10"' in drawn
    assert drawn.count('<rect class="decode" data-state="decode" x="0" width="240" height="10">') == 1
    assert Elements(drawn).words.split() == ["use", "decode", "left", "to", "right", "decode"]
    shares = html_of(Shares("time", [Part("decode", 0.4412, Style.DECODE)]))
    assert '<rect class="decode" width="44.12%" height="100%"/>' in shares
    assert Elements(shares).words.split() == ["time", "decode", "44", "%"]


def _palettes():
    both = re.findall(r"(--[\w-]+): light-dark\((#\w{6}), (#\w{6})\);", style_sheet())
    return [{name: pair[at] for name, *pair in both} for at in (0, 1)]


def _luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_colour_of_text_can_be_read_on_both_backgrounds():
    for palette in _palettes():
        texts = [name for name in palette if name.endswith("text") or name == "--link"]
        assert len(texts) == 7
        for name in texts:
            for ground in ("--background", "--raised"):
                low, high = sorted((_luminance(palette[name]), _luminance(palette[ground])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground)
