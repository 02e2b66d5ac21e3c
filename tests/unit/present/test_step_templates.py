"""The sentences that JavaScript fills are those of ``schedtrace step``."""

import json
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

import schedtrace.present
from schedtrace.model.message import (
    CauseWord,
    Code,
    Count,
    Message,
    Number,
    Request,
    Requests,
    Slot,
    Steps,
    filled,
    pieces,
    plain,
    with_slots,
)
from schedtrace.model.numbers import duration, number, percent
from schedtrace.model.say import say
from schedtrace.present.pages.story import budget_use, crowd
from schedtrace.present.report.step_sentences import Words, step_templates, template_parts

SCRIPT = Path(schedtrace.present.__file__).parent / "sentence.js"
WRITE = """
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map(([name, ...values]) => sentences[name](...values))));
"""


def node():
    """The one of the system, else that of playwright."""
    found = shutil.which("node")
    driver = pytest.importorskip("playwright").__file__
    return found or str(Path(driver).parent / "driver" / "node")


def in_javascript(calls):
    """What functions of ``sentence.js`` return: names with their arguments."""
    ended = subprocess.run(
        [node(), "-e", SCRIPT.read_text(encoding="utf-8") + WRITE],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout)


def filled_in_javascript(cases):
    """Templates with the values of their slots."""
    calls = [
        ["pieces", template_parts(template), {name: raw(value) for name, value in values.items()}]
        for template, values in cases
    ]
    return [[(piece["text"], piece.get("is")) for piece in found] for found in in_javascript(calls)]


def raw(value):
    match value:
        case Requests(ids, count):
            return {"ids": ids, "count": count}
        case Request(request_id):
            return request_id
        case Count(count):
            return count
        case Number(known):
            return known


def merged(sentence):
    """Words, and what they are; plain words that follow each other as one."""
    found = []
    for words, kind in sentence:
        if found and kind is found[-1][1] is None:
            found[-1] = (found[-1][0] + words, None)
        else:
            found.append((words, kind))
    return found


def in_python(template, values):
    kinds = (Request, CauseWord, Code, Steps)
    return [
        (words, value.__struct_config__.tag if isinstance(value, kinds) else None)
        for words, value in pieces(filled(template, values))
    ]


def test_javascript_writes_every_argument_as_python_does():
    names = ["a", "b", "c", "d", "e"]
    lists = [Requests(names[:some], some + more) for some in range(6) for more in (0, 1, 2, 1234)]
    counts = [Count(n, "entry", "entries") for n in (0, 1, 2)] + [Count(n, "step") for n in (0, 1, 1234567)]
    values = [*lists, *counts, Number(0), Number(1234), Number(None), Request("<b>&")]
    cases = [(say("<{x}> {c:code}", c="k", **with_slots({"x": value})), {"x": value}) for value in values]
    written = [merged(in_python(*case)) for case in cases]
    assert [merged(sentence) for sentence in filled_in_javascript(cases)] == written


def test_javascript_rounds_as_python_does():
    chance = Random(1)  # noqa: S311  # no secret
    figures = [
        *(n / 8 for n in range(900)),
        *(n / 64 for n in range(1, 900, 7)),
        *(
            m * (1 + off)
            for m in (0.1, 1.0, 9.995, 10.0, 16.5, 99.95, 100.0, 2.5, 1234.5)
            for off in (-1e-9, 0, 1e-9)
        ),
        *(n / 1000 for n in range(0, 3000, 7)),
        99.95,
        1234.5,
        1235.5,
        None,
    ]
    figures += [chance.uniform(0.001, 10 ** chance.randint(-2, 5)) for _ in range(2000)]
    times = [1000 * figure for figure in figures if figure is not None] + [
        9_999_499,
        9_999_500,
        9_999_999,
        10_000_000,
        1e9,
    ]
    shares = (
        [n / 1000 for n in range(1001)]
        + [n / 800 for n in range(801)]
        + [0.0049, 0.9951, 0.005, 0.995, 0.165 + 1e-10, 0.165 - 1e-10, 1 - 1e-12, 1e-12, None]
    )
    assert in_javascript([["number", figure] for figure in figures]) == [*map(number, figures)]
    assert in_javascript([["duration", us] for us in times]) == [*map(duration, times)]
    assert in_javascript([["percent", share] for share in shares]) == [*map(percent, shares)]


def test_a_template_is_printable_words_and_slots():
    template = say("{code:code}: {x} {{}}{more}", code="\u202e", x=Slot("n", "number"), more="\x1b")
    assert template_parts(template) == [
        {"is": "code", "text": "\\u202e"},
        ": ",
        {"is": "slot", "name": "n", "kind": "number", "noun": "", "plural": None},
        " {}\\x1b",
    ]


def test_what_is_known_of_every_step_has_its_templates():
    templates = step_templates({"stops": Words([Message("a")], None)})
    assert templates["stops"] == [["a"]]
    written = [
        "".join(part if isinstance(part, str) else f"<{part['name']}>" for part in parts_)
        for parts_ in templates["used"] + templates["crowd"]
    ]
    assert written == [
        "<tokens> of <budget> of budget, <left> left, by <requests>",
        "<tokens> of <budget> of budget, <left> left",
        "<running> running, <waiting> waiting, <free> of <total> KV blocks free",
        "<running> running, <waiting> waiting, <free> KV blocks free",
        "<running> running, <waiting> waiting",
    ]
    assert plain(budget_use(Number(1200), Count(1, "token"), Number(0), Count(2, "request"))) == (
        "1,200 of 1 token of budget, 0 left, by 2 requests"
    )
    assert plain(crowd(Number(1), Number(2), None, Number(9))) == "1 running, 2 waiting"
