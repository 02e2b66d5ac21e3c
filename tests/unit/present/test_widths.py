"""Every page at every width: no word, id or number of it is lost, and none is added."""

import contextlib
import re
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from schedtrace.compare.compare import compare
from schedtrace.diagnose.analyze import analyze, catalogue
from schedtrace.explain.request import explain_request
from schedtrace.explain.step import explain_step
from schedtrace.present.pages.comparison import comparison_page
from schedtrace.present.pages.report import report_page
from schedtrace.present.pages.report_details import catalogue_page
from schedtrace.present.pages.story import request_page, step_page
from schedtrace.present.phrases import BARS, EIGHTHS, STATES
from schedtrace.present.sections import Commands, Facts, Table
from schedtrace.read.run import read_run
from tests.unit.present import hand_made
from tests.unit.present.test_goldens import text_of as rendered

WIDE = 160
WIDTHS = [40, 60, 61, 80, 100, WIDE]
SAMPLE = Path(__file__).parents[2] / "docs" / "data" / "base"
THREAD = Path(__file__).parents[3] / "examples" / "forum-thread"
PICTURE = re.compile(
    f"[{re.escape(BARS + EIGHTHS + ''.join(state.character for state in STATES.values()))}]+"
)
"""Words of nothing but a picture's characters: a picture is as wide as there is room."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every kind of page, by what it shows."""
    with contextlib.chdir(tmp_path_factory.mktemp("runs")):  # paths are words, too
        return pages_of_runs()


def pages_of_runs():
    small = read_run(hand_made.small_kv(Path("small-kv")))
    enough = read_run(hand_made.enough(Path("enough")))
    engines = read_run(hand_made.two_bare_engines(Path("two-engines")))
    stories, sample = (
        read_run(hand_made.crowded(Path("crowded"))),
        read_run(Path(shutil.copytree(SAMPLE, "sample"))),
    )
    log = read_run(Path(shutil.copy(min(THREAD.glob("profile*.log")), ".")))
    reports = {"small-kv": small, "two-engines": engines, "crowded": stories, "sample": sample, "log": log}
    pairs = {"diff": (enough, small), "diff-log": (log, log), "diff-same": (small, small)}
    reports = {name: analyze([run]) for name, run in reports.items()}
    lives = dict.fromkeys(("t1-29", "t1-0", "t1-43"), stories)
    return {
        "findings": catalogue_page(catalogue()),
        **{f"first-{name}": report_page(report) for name, report in reports.items()},
        **{name: report_page(report, full=True) for name, report in reports.items()},
        **{name: comparison_page(compare(base=base, new=new)) for name, (base, new) in pairs.items()},
        **{f"step-{number}": step_page(explain_step(stories, number)) for number in range(5)},
        "step-all": step_page(explain_step(stories, 2), everything=True),
        **{name: request_page(explain_request(run, name)) for name, run in lives.items()},
    }


@pytest.fixture(scope="module")
def text_of():
    """``text_of(page, width)``, rendered once."""
    return cache(rendered)


def words(text):
    """How often each word stands there, pictures left out; in a block, a semicolon ends each cell."""
    found = (word.rstrip(";") for word in text.split())
    return Counter(word for word in found if not PICTURE.fullmatch(word))


def headings(page):
    """Words of the headings of its tables: blocks repeat them in each row."""
    parts = [part for section in page.sections if isinstance(section, Facts) for part in section.facts]
    tables = [part for fact in parts for part in fact.content if isinstance(part, Table)]
    tables += [section for section in page.sections if isinstance(section, Table)]
    return {word for table in tables for column in table.columns for word in column.heading.split()}


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_terminal(text_of, pages, width):
    for name, page in pages.items():
        lines = [line for line in text_of(page, width).splitlines() if line not in commands(page)]
        assert max(map(len, lines)) <= width, name


def commands(page):
    """Lines that are as long as the command in them."""
    found = [section for section in page.sections if isinstance(section, Commands)]
    return {f"  {command}" for section in found for command in section.commands}


@pytest.mark.parametrize("width", [width for width in WIDTHS if width >= 60])
def test_every_word_and_number_is_there_as_often_as_at_the_widest(text_of, pages, width):
    for name, page in pages.items():
        expected, found = words(text_of(page, WIDE)), words(text_of(page, width))
        repeated = headings(page)
        for word in expected | found:
            if word in repeated:
                assert found[word] >= 1, (name, word)
            else:
                assert found[word] == expected[word], (name, word)


def test_the_pages_have_a_table_that_does_not_fit_into_60_columns(text_of, pages):
    """Else the test above would not see the blocks."""
    assert any(line.startswith("trial 1") for line in text_of(pages["small-kv"], 60).splitlines())


def test_a_word_longer_than_the_line_is_folded(text_of, pages):
    text = text_of(pages["step-2"], 24)
    assert "vllm/v1/core/sched/scheduler.py:500" in "".join(text.split())
