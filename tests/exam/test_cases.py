"""Each case of the exam gets the right answer, on one page; and its load does what it is meant to do."""

import re

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from tests.exam.answers import mistakes, page_of
from tests.exam.cases import CASES
from tests.exam.page import PAGE, table, with_table

pytestmark = pytest.mark.vllm

NAMES = [
    pytest.param(name, marks=[pytest.mark.xfail(reason=one.missing, strict=False)] if one.missing else [])
    for name, one in CASES.items()
]


@pytest.mark.parametrize("name", CASES)
def test_the_load_does_what_it_is_meant_to_do(recorded, name):
    one, run = CASES[name], read_run(recorded / name)
    assert len(run.traces) == one.ranks
    trace = run.traces[0]
    assert (trace.header.clock, trace.notices, trace.problems.sentences(trace.path)) == ("virtual", [], [])
    taken = trace.exits().filter(pl.col("cause").is_in(list(one.exits))).select("cause", "count").collect()
    counts = dict(taken.group_by("cause").agg(pl.col("count").sum()).iter_rows())
    assert {
        cause: counts.get(cause, 0) for cause, least in one.exits.items() if counts.get(cause, 0) < least
    } == {}
    assert trace.preemptions().collect().height >= one.preemptions


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_right_and_fits_one_screen(recorded, name):
    assert mistakes(CASES[name], recorded / name) == {}, page_of(recorded / name)


def test_every_question_is_a_case():
    numbers = {int(found[0]) for name in CASES if (found := re.match(r"\d+", name))}
    assert numbers >= {*range(1, 32, 2), 107, 111, 113}


def test_the_page_has_the_present_sentences(recorded):
    """docs/exam.md quotes what is really said."""
    text = PAGE.read_text()
    assert text == with_table(text, table(recorded))
