import json
from pathlib import Path

import pytest

from schedtrace.diagnose.rules import RULES
from schedtrace.diagnose.rules.other_limit import HAVE_A_RULE
from schedtrace.diagnose.run_statistics import strip, trial_reports
from schedtrace.model.causes import Cause
from schedtrace.model.message import Steps
from schedtrace.model.report import Severity
from schedtrace.model.trace import Events, Step
from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import read_run
from schedtrace.read.trace import read_trace
from schedtrace.timeline.charges import CHARGES
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, header, step, write_trace

SHOWN = Path(__file__).parents[2] / "data" / "findings"
QUIET = {
    "an empty trace": [],
    "one step": [step(0, got={"a": 10}, new="a", arrived=[arrival("a", 0)])],
    "no requests": [step(0), step(1), step(2)],
    "steps whose outputs never came back": [step(0, back=None, got={"a": 10}), step(1, back=None)],
    "finished requests nobody saw arrive": [step(0, finished=[finish("a"), finish("b", "ABORTED")])],
    "an arrival that no step saw": [step(0), Events(at_us=2000, arrived=[arrival("a", 1500)])],
}
UNDERUSED = [
    step(0, got={"a": 100}, new="a"),
    step(1, got={"a": 1, "b": 100}, new="b", arrived=[arrival("b", 150)]),
    step(2, got={"a": 1}, waiting=2, waiting_tokens_after=9, ended=Cause.KV_BLOCKS),
]
"""Of ``budget-underused``, which is about records that do not tell why: no trace of schedtrace shows it."""


@pytest.fixture(scope="module", params=[(name, by) for name in QUIET for by in (False, True)], ids=str)
def quiet(request, tmp_path_factory):
    """A timeline with nothing to find; as in a report, all rules have the same."""
    name, trial_ids = request.param
    path = tmp_path_factory.mktemp("quiet") / "engine-0.jsonl"
    return make_timeline(read_trace(write_trace(path, header(trial_ids=trial_ids), *QUIET[name])))


def test_every_rule_is_silent_about(quiet):
    assert {code: findings for code, rule in RULES.items() if (findings := rule(quiet))} == {}


def test_a_limit_has_a_rule_of_its_own_or_is_another_limit():
    named = {str(charge) for rule in RULES.values() for charge in rule.charges}
    assert named | {*CHARGES} == HAVE_A_RULE | {*CHARGES}


@pytest.fixture
def showing(trace_of):
    """``showing(code)``: a recorded trace in which this rule finds something, and what is known beside it."""

    def trace(code):
        if code == "budget-underused":
            trace = trace_of(*UNDERUSED)
            trace.facts -= {Fact.QUEUE}
            return trace, None, None
        run = read_run(SHOWN / code / "shows")
        return run.traces[0], run.manifest, run.front_end

    return trace


@pytest.mark.parametrize(("code", "rule"), RULES.items(), ids=RULES)
def test_every_rule_finds_its_own_and_says_it_completely(showing, code, rule):
    trace, manifest, front_end = showing(code)
    trace.header.engine_rank = rank = 0 if code == "refused-at-door" else 5  # the front end's is of all
    [finding] = rule(make_timeline(trace, manifest, front_end=front_end))
    assert (finding.code, finding.engine_rank) == (code, rank)
    assert finding.severity.upper() in Severity.__members__
    assert finding.via in {"recorded", "source", "inferred"}
    assert finding.count >= len(finding.steps)
    assert {*finding.trials} <= {1, 2}
    assert finding.message
    assert bool(finding.title) is not bool(rule.symptom_of)
    if rule.symptom_of:
        assert finding.advice == []
        shown = [(each.first, each.last) for each in finding.example.parts() if isinstance(each, Steps)]
        assert any(first <= number <= last for first, last in shown for number in finding.steps)
    else:
        assert finding.verdict


@pytest.mark.parametrize(("code", "rule"), RULES.items(), ids=RULES)
def test_no_rule_counts_the_warm_up(showing, tmp_path, code, rule):
    trace, manifest, front_end = showing(code)
    head, *lines = map(json.loads, trace.path.read_text().splitlines())
    lines = [line | {"trial": 0} if line["type"] in {"step", "events"} else line for line in lines]
    warm_up = tmp_path / "engine-1.jsonl"
    warm_up.write_text("".join(json.dumps(line) + "\n" for line in (head | {"trial_ids": True}, *lines)))
    assert rule(make_timeline(read_trace(warm_up), manifest, front_end=front_end)) == []


@pytest.mark.parametrize("lines", QUIET.values(), ids=QUIET)
def test_figures_of_quiet_traces_do_not_invent_anything(view_of, lines):
    view = view_of(*lines)
    [report] = trial_reports(view, None)
    assert (report.preemptions, report.budget_use_waiting_frac) == (0, None)
    assert (report.ttft_ms, report.tpot_ms, report.e2e_ms) == (None, None, None)
    assert len(strip(view)) == sum(isinstance(line, Step) and line.total_requests > 0 for line in lines)
