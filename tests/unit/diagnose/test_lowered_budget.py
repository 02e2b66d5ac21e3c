"""A scheduler that works with less than its token budget: the setting is not the limit."""

import pytest

from schedtrace.explain.step import explain_step
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit
from schedtrace.present.pages.story import step_page
from schedtrace.present.renderers.text import render
from tests.makers import arrival, step


def spent(left=0, via="source"):
    return Exit("waiting", "condition", Cause.TOKEN_BUDGET, "w", budget_left=left, via=via)


def steps(*, ended, many=30, **fields):
    """One request is decoded; then nothing is scheduled while two wait."""
    came = [arrival("a", 0, 0), arrival("w", 0, 0), arrival("v", 0, 0)]
    first = step(0, got={"a": 1}, new="a", waiting=2, ended=ended, arrived=came)
    return [first, *(step(number, waiting=2, ended=ended, **fields) for number in range(1, many))]


def test_a_budget_of_nothing_is_not_too_small(found, recorded_words):
    [finding] = found("token-budget-bound", *steps(ended=spent()))
    assert [advice.setting for advice in finding.advice] == [None]
    assert finding.leads
    recorded_words(finding.title, finding.verdict)
    [stall] = found("stall", *steps(ended=spent()))
    assert stall.severity == "critical"


@pytest.mark.parametrize(
    "ended",
    [spent(via="inferred"), Exit("waiting", "break", Cause.KV_BLOCKS, "w", budget_left=0, via="source")],
)
def test_where_the_source_does_not_say_so_the_budget_is_the_recorded_one(view_of, ended):
    assert view_of(*steps(ended=ended)).steps["token_budget"].unique().to_list() == [1000]


def test_a_stall_without_a_root_cause_keeps_its_severity(run_of):
    from schedtrace.diagnose.analyze import analyze

    report = analyze([run_of("run", *steps(ended=None))])
    [stall] = [one for one in report.runs[0].findings if one.code == "stall"] or [
        one for root in report.runs[0].findings for one in root.symptoms if one.code == "stall"
    ]
    assert stall.severity == "critical"


def test_a_step_has_one_budget(run_of):
    text = render(step_page(explain_step(run_of("run", *steps(ended=spent())), 7)), width=110)
    assert "0 of 0 tokens of budget (1,000 are set), 0 left" in text
    assert "0 tokens of budget left" in text
    assert "With max_num_batched_tokens" not in text
