import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from schedtrace.diagnose.analyze import FORMER, catalogue, choose
from schedtrace.diagnose.rules import KINDS, RULES
from schedtrace.diagnose.rules.other_limit import HAVE_A_RULE
from schedtrace.diagnose.run_statistics import strip, trial_reports
from schedtrace.errors import UsageError
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
from tests.rank_traces import write_ranks

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


PAGE = Path("docs/python.md")
SAMPLE = Path("tests/data/findings/head-of-line/shows")
POINTS = """
[schedtrace.findings]
absent = no_such_package:RULE
taken = failing_rule:TAKEN
failing = failing_rule:RULE
large-steps = large_steps:RULE
"""
FAILING = """
from schedtrace import Rule

def find(timeline):
    raise ValueError("no such column")

RULE = Rule(code="failing", summary="never found", needs=frozenset(), find=find)
TAKEN = Rule(code="kv-bound", summary="never found", needs=frozenset(), find=find)
"""


@pytest.fixture
def installed(tmp_path):
    """Return the environment of a command beside which a package of such findings is installed."""
    [example] = [
        code for code in re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "RULE" in code
    ]
    (tmp_path / "large_steps.py").write_text(example)
    (tmp_path / "failing_rule.py").write_text(FAILING)
    about = tmp_path / "large_steps-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: large-steps\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


TWO_COMMANDS = """
import sys
from schedtrace.cli.main import main

ended = [main([*words, "--format", "json"]) for words in (["findings"], ["analyze", sys.argv[1]])]
sys.exit(max(ended))
"""


def documents(environment):
    """Return what ``findings`` and ``analyze`` print in a process with this environment."""
    command = [sys.executable, "-c", TWO_COMMANDS, str(SAMPLE)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, end = json.JSONDecoder().raw_decode(ended.stdout)
    return first, json.loads(ended.stdout[end:])


def test_the_rule_of_the_page_is_judged_and_one_that_fails_is_named(installed):
    listed, analyzed = documents(installed)
    kinds = [kind["code"] for kind in listed["findings"]]
    assert kinds[-2:] == ["failing", "large-steps"]
    [run] = analyzed["runs"]
    [finding] = [finding for finding in run["findings"] if finding["code"] == "large-steps"]
    assert finding["evidence"]["requests"] >= 3
    assert finding["count"] == len(finding["steps"]) > 0
    problems = " ".join(problem["text"] for problem in run["problems"])
    assert "no_such_package" in problems
    assert "no such column" in problems
    assert "there is a finding kv-bound already" in problems


EXAMPLE = Path(__file__).parents[3] / "examples" / "rank_balance"
CLASS = "schedtrace.balance.BalanceScheduler"


@pytest.fixture
def rule(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    return import_module("rank_balance.findings").RULE


@pytest.fixture
def timeline(tmp_path):
    """``timeline(passes, ...)``: that of rank 0 of a run of these passes."""

    def make(passes, **fields):
        return make_timeline(read_run(write_ranks(tmp_path / "run", passes, **fields)).traces[0])

    return make


def test_a_gate_without_ranks_in_lockstep(rule, timeline, recorded_words):
    """One of 16 requests waits for 30 steps, all of its time."""
    gated = timeline(
        [[(15, 0)]] * 30, lockstep=False, refused="rank_balance", scheduler_class=CLASS, exits_via="source"
    )
    [finding] = rule(gated)
    assert (finding.code, finding.count, finding.evidence.closed_steps) == ("balance-without-effect", 30, 30)
    assert finding.share_frac == pytest.approx(1 / 16)
    recorded_words(finding)


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [(2, {"scheduler_class": CLASS}), (1, {"lockstep": False})],
    ids=["ranks", "vLLM's own"],
)
def test_ranks_in_lockstep_and_other_schedulers_are_not_reported(rule, timeline, ranks, fields):
    assert rule(timeline([[(8, 0)] * ranks] * 30, **fields)) == []


def test_every_rule_is_listed_with_what_it_needs():
    told = {kind.code: kind for kind in catalogue().findings}
    assert list(told) == list(KINDS)
    assert told["preemption"].needs == ["preemptions"]
    assert told["preemption"].summary == KINDS["preemption"].summary


@pytest.mark.parametrize(
    ("only", "ignore", "left"),
    [
        ([], [], set(KINDS)),
        (["preemption"], [], {"preemption"}),
        ([], ["preemption"], set(KINDS) - {"preemption"}),
        (["preemption", "blocked-budget"], ["preemption"], {"blocked-budget"}),
    ],
)
def test_codes_are_chosen(only, ignore, left):
    assert choose(only=only, ignore=ignore) == left


@pytest.mark.parametrize("option", ["only", "ignore"])
def test_a_code_that_is_none_is_refused_with_those_there_are(option):
    with pytest.raises(
        UsageError, match=rf"--{option} preemtion: no such finding; there are {next(iter(KINDS))}, "
    ):
        choose(**{"only": [], "ignore": [], option: ["preemtion"]})


@pytest.mark.parametrize(("code", "place"), FORMER.items(), ids=FORMER)
def test_a_former_code_is_refused_with_the_place_of_its_facts(code, place):
    with pytest.raises(UsageError, match=f"^--ignore {code}: this finding is now {re.escape(place)}$"):
        choose(only=[], ignore=[code])
    assert place.rpartition(" ")[2] in KINDS or Path(place.rpartition(" ")[2]).is_dir()
