import msgspec
import pytest

from schedtrace.diagnose.rules import RULES
from schedtrace.diagnose.trials import strip, trial_reports
from schedtrace.model.causes import Cause
from schedtrace.model.report import Severity
from schedtrace.model.trace import Preemption
from tests.makers import arrival, finish, step

QUIET = {
    "an empty trace": [],
    "one step": [step(0, got={"a": 10}, new="a", arrived=[arrival("a", 0)])],
    "no requests": [step(0), step(1), step(2)],
    "steps whose outputs never came back": [step(0, back=None, got={"a": 10}), step(1, back=None)],
    "finished requests nobody saw arrive": [step(0, finished=[finish("a"), finish("b", "ABORTED")])],
    "arrivals that no step took in": [step(0, arrived=[arrival("a", 0)])],
}
EVERYTHING = [
    step(0, trial=1, got={"a": 100}, new="a"),
    step(1, trial=1, got={"a": 1, "b": 100}, new="b", arrived=[arrival("b", 150)]),
    step(2, trial=1, got={"a": 1000}, waiting=2, waiting_tokens_after=9, ended=Cause.TOKEN_BUDGET),
    step(3, trial=2, got={"a": 1}, waiting=2, waiting_tokens_after=9, ended=Cause.KV_BLOCKS),
    step(4, trial=2, got={"a": 1}, preempted=[Preemption("b", 101, "a")]),
]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("lines", QUIET.values(), ids=QUIET)
@pytest.mark.parametrize("trial_ids", [False, True])
def test_every_rule_is_silent_about(view_of, rule, lines, trial_ids):
    assert rule(view_of(*lines, trial_ids=trial_ids)) == []


@pytest.mark.parametrize(("code", "rule"), RULES.items(), ids=RULES)
def test_every_rule_finds_its_own_and_says_it_completely(view_of, code, rule):
    [finding] = rule(view_of(*EVERYTHING))
    assert finding.code == code
    assert finding.severity.upper() in Severity.__members__
    assert finding.via in {"recorded", "source", "inferred"}
    assert finding.count >= len(finding.steps) == 1
    assert finding.trials in ([1], [2])
    assert finding.message.endswith(".")
    assert finding.evidence["example"].endswith(".")
    assert str(finding.steps[0]) in finding.evidence["example"]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_tells_the_rank(view_of, rule):
    [finding] = rule(view_of(*EVERYTHING, engine_rank=5))
    assert finding.engine_rank == 5


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_no_rule_counts_the_warm_up(view_of, rule):
    as_warm_up = [msgspec.structs.replace(line, trial=0) for line in EVERYTHING]
    assert rule(view_of(*as_warm_up, step(9, trial=1), trial_ids=True)) == []


@pytest.mark.parametrize("lines", QUIET.values(), ids=QUIET)
def test_figures_of_quiet_traces_do_not_invent_anything(view_of, lines):
    view = view_of(*lines)
    [report] = trial_reports(view, None)
    assert (report.preemptions, report.budget_use_waiting_frac) == (0, None)
    assert (report.ttft_ms, report.tpot_ms, report.e2e_ms) == (None, None, None)
    assert len(strip(view)) == sum(line.total_requests > 0 for line in lines)
