from dataclasses import replace
from pathlib import Path

import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules import RULES
from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import read_run
from tests.makers import step

THREAD = Path(__file__).parents[3] / "examples" / "forum-thread"
CODE = "budget-underused"


@pytest.fixture
def found(view_of):
    """What the rule finds in a record that tells of requests only."""
    return lambda *lines: RULES[CODE](replace(view_of(*lines), facts=frozenset({Fact.REQUESTS})))


def test_the_threads_first_round_left_room_for_fourteen_requests_of_the_second(recorded_words):
    report = analyze_run(read_run(THREAD / "profile_1025_bs16_in1024_out64.log"))
    [finding] = report.findings
    assert (finding.code, finding.severity, finding.cause) == (CODE, "info", None)
    assert (finding.steps, finding.tokens, finding.evidence.missed_requests) == ([0], 14336, 14)
    recorded_words(finding.message, finding.example)


def test_a_single_round_says_nothing_about_what_it_missed():
    report = analyze_run(read_run(THREAD / "profile_1031_bs16_in1024_out64.log"))
    assert (report.findings, report.trials[0].first_step_tokens) == ([], 5086)


def test_a_record_with_queue_lengths_is_left_to_the_rules_that_know_why(view_of):
    lines = [step(0, got={"a": 10}, new="a"), step(1, got={"b": 10}, new="b")]
    assert RULES[CODE](view_of(*lines)) == []


@pytest.mark.parametrize(
    ("first", "second", "fitted", "tokens"),
    [
        ({"a": 700}, {"b": 200, "c": 90, "d": 11}, 2, 290),
        (dict.fromkeys("abcdefg", 1), {"h": 1, "i": 1}, 1, 1),
    ],
    ids=["into the budget", "into the seats"],
)
def test_only_what_fits_counts(found, first, second, fitted, tokens):
    [finding] = found(step(0, got=first, new=first), step(1, got=second, new=second))
    assert (finding.evidence.missed_requests, finding.tokens) == (fitted, tokens)


@pytest.mark.parametrize(
    "lines",
    [
        [step(0, got={"a": 1000}, new="a"), step(1, got={"b": 10}, new="b")],
        [step(0, got={"a": 995}, new="a"), step(1, got={"b": 10}, new="b")],
        [step(0, got={"a": 10}, new="a"), step(1, got={"a": 10})],
        [step(0, got={"a": 10}, new="a"), step(1, got={"a": 1}), step(2, got={"a": 1000, "b": 10})],
        [step(0, got={"a": 10}, new="a"), step(1, got={"b": 10}, resumed="b")],
        [step(0), step(1, got={"b": 10}, new="b")],
        [],
    ],
    ids=[
        "budget spent",
        "does not fit",
        "nobody new",
        "not new then",
        "came back",
        "nobody in the first",
        "no steps",
    ],
)
def test_it_is_silent_where_nobody_new_would_have_fitted(found, lines):
    assert found(*lines) == []


def test_calls_that_scheduled_nothing_between_do_not_matter(found, recorded_words):
    [finding] = found(step(0, got={"a": 10}, new="a"), step(1), step(2, got={"b": 10}, new="b"))
    recorded_words(finding.example)
