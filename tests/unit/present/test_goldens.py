"""What a person reads, character by character; UPDATE_GOLDENS=1 writes the files again (then read them)."""

import contextlib
import os
import re
from functools import cache
from pathlib import Path

import pytest

from schedtrace.compare.compare import compare
from schedtrace.diagnose.analyze import analyze
from schedtrace.present.pages.comparison import comparison_page
from schedtrace.present.pages.report import report_page
from schedtrace.present.renderers import Format, renderer
from schedtrace.read.run import read_run
from tests.unit.present import hand_made

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(home):
    """The runs read from relative paths, so that no text depends on where the tests are run."""
    with contextlib.chdir(home):
        return {
            "small-kv": read_run(hand_made.small_kv(Path("small-kv"))),
            "enough": read_run(hand_made.enough(Path("enough"))),
            "two-engines": read_run(hand_made.two_bare_engines(Path("two-engines"))),
        }


@pytest.fixture(scope="module")
def report_of(home, runs):
    """``report_of(name)``: the report of a run, analyzed once."""

    @cache
    def report(name):
        with contextlib.chdir(home):
            return analyze([runs[name]])

    return report


@pytest.fixture(scope="module")
def comparison_of(runs):
    """``comparison_of(base, new)``: the comparison of two runs, made once."""
    return cache(lambda base, new: compare(base=runs[base], new=runs[new]))


def text_of(page, width=80, output_format=Format.TEXT):
    return renderer(output_format)(page, width=width)


def check(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["small-kv", "enough", "two-engines"])
def test_analyze(report_of, name):
    check(f"analyze-{name}", text_of(report_page(report_of(name))))


def test_analyze_details(report_of):
    check("analyze-details", text_of(report_page(report_of("small-kv"), full=True)))


def test_analyze_of_several_runs_is_each_of_them_with_a_blank_line_between(runs, report_of):
    both = text_of(report_page(analyze([runs["small-kv"], runs["enough"]])))
    first, second = (text_of(report_page(report_of(name))) for name in ("small-kv", "enough"))
    assert both == f"{first}\n{second}"


@pytest.mark.parametrize(
    ("base", "new"), [("small-kv", "enough"), ("enough", "small-kv"), ("enough", "enough")]
)
def test_diff(comparison_of, base, new):
    check(f"diff-{base}-{new}", text_of(comparison_page(comparison_of(base, new))))


def test_markdown(report_of, comparison_of):
    diff = comparison_page(comparison_of("enough", "small-kv"))
    check("diff-markdown", text_of(diff, output_format=Format.MARKDOWN))
    report = report_page(report_of("small-kv"))
    check("analyze-markdown", text_of(report, output_format=Format.MARKDOWN))


def test_colour_is_for_terminals_and_changes_no_character(report_of, monkeypatch):
    page = report_page(report_of("small-kv"))
    plain = text_of(page)
    monkeypatch.delenv("NO_COLOR")
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    coloured = text_of(page)
    assert "\x1b[" in coloured
    uncoloured = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in uncoloured.splitlines()] == plain.splitlines()
