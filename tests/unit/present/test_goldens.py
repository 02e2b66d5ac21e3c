"""What a person reads, character by character; UPDATE_GOLDENS=1 writes the files again (then read them)."""

import os
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from schedtrace.compare.compare import compare
from schedtrace.diagnose.analyze import analyze
from schedtrace.present.comparison import comparison_view
from schedtrace.present.markdown import markdown
from schedtrace.present.report import report_view
from schedtrace.read.run import read_run
from tests.unit.present import hand_made

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The runs read from relative paths, so that no text depends on where the tests are run."""
    monkeypatch.chdir(tmp_path)
    return {
        "small-kv": read_run(hand_made.small_kv(Path("small-kv"))),
        "enough": read_run(hand_made.enough(Path("enough"))),
        "two-engines": read_run(hand_made.two_bare_engines(Path("two-engines"))),
    }


def text_of(view, width=80, **terminal):
    plain = {"color_system": None, "legacy_windows": False, "_environ": {}}
    console = Console(width=width, file=StringIO(), highlight=False, **{**plain, **terminal})
    console.print(view)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def check(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["small-kv", "enough", "two-engines"])
def test_analyze(runs, name):
    check(f"analyze-{name}", text_of(report_view(analyze([runs[name]]))))


def test_analyze_of_several_runs_is_each_of_them_with_a_blank_line_between(runs):
    both = text_of(report_view(analyze([runs["small-kv"], runs["enough"]])))
    first, second = (text_of(report_view(analyze([runs[name]]))) for name in ("small-kv", "enough"))
    assert both == f"{first}\n{second}"


@pytest.mark.parametrize(
    ("base", "new"), [("small-kv", "enough"), ("enough", "small-kv"), ("enough", "enough")]
)
def test_diff(runs, base, new):
    check(f"diff-{base}-{new}", text_of(comparison_view(compare(base=runs[base], new=runs[new]))))


def test_markdown_of_a_diff(runs):
    check("diff-markdown", markdown(compare(base=runs["enough"], new=runs["small-kv"])))


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_nothing_is_wider_than_the_terminal(runs, width):
    for view in (
        report_view(analyze(list(runs.values()))),
        comparison_view(compare(base=runs["enough"], new=runs["small-kv"])),
    ):
        assert max(map(len, text_of(view, width).splitlines())) <= width


def test_colour_is_for_terminals_and_changes_no_character(runs):
    view = report_view(analyze([runs["small-kv"]]))
    coloured = text_of(view, color_system="standard", force_terminal=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == text_of(view).splitlines()
