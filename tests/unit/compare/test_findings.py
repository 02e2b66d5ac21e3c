import pytest

from schedtrace.compare.compare import compare
from schedtrace.compare.findings import finding_changes, refusal_changes
from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules.bound import WaitingFor
from schedtrace.diagnose.rules.queueing import Queueing
from schedtrace.model.causes import Cause
from schedtrace.model.message import message
from schedtrace.model.report import Evidence, Finding, RequestTime, RunReport
from schedtrace.model.trace import Exit
from schedtrace.present.phrases import plain
from tests.makers import step


def blocked_budget(comparison):
    """What became of this kind of finding: other rules may have more to say about so few steps."""
    return [change for change in comparison.findings if change.code == "blocked-budget"]


def blocked(number, cause, **fields):
    return step(number, got={"x": 1}, waiting=1, waiting_tokens_after=5, ended=cause, **fields)


def test_findings_went_appeared_or_stayed_by_code_and_cause(run_of):
    base = run_of("a", blocked(0, Cause.KV_BLOCKS), blocked(1, Cause.LORA_CAP), blocked(2, Cause.LORA_CAP))
    new = run_of("b", blocked(0, Cause.LORA_CAP), blocked(1, Cause.MAX_NUM_SEQS))
    comparison = compare(base=base, new=new)
    told = {
        (one.code, one.cause): (one.state, one.base_count, one.new_count)
        for one in blocked_budget(comparison)
    }
    assert told == {
        ("blocked-budget", "kv_blocks"): ("went", 1, 0),
        ("blocked-budget", "lora_cap"): ("stayed", 2, 1),
        ("blocked-budget", "max_num_seqs"): ("appeared", 0, 1),
    }
    verdict = plain(comparison.verdict)
    assert "gone: blocked-budget kv_blocks" in verdict
    assert "new: blocked-budget max_num_seqs" in verdict
    assert "lora_cap" not in verdict


def test_a_finding_that_went_keeps_the_message_of_the_base(run_of):
    comparison = compare(base=run_of("a", blocked(0, Cause.LORA_CAP)), new=run_of("b", step(0, got={"x": 1})))
    [change] = blocked_budget(comparison)
    assert change.state == "went"
    assert "1 step of 1 " in plain(change.message)


def test_a_finding_that_stayed_has_the_message_of_the_new_run(run_of):
    base = run_of("a", blocked(0, Cause.LORA_CAP))
    new = run_of("b", blocked(0, Cause.LORA_CAP), blocked(1, Cause.LORA_CAP))
    [change] = blocked_budget(compare(base=base, new=new))
    assert (change.state, "2 steps of 2 " in plain(change.message)) == ("stayed", True)


def test_trials_that_show_a_finding_are_told_for_both_sides(run_of):
    base = run_of("a", blocked(0, Cause.KV_BLOCKS, trial=2), blocked(1, Cause.KV_BLOCKS, trial=1))
    new = run_of("b", blocked(0, Cause.KV_BLOCKS, trial=3))
    [change] = blocked_budget(compare(base=base, new=new))
    assert (change.base_trials, change.new_trials) == ([1, 2], [3])


def exact(cause, request_id, detail=None):
    return Exit("waiting", "break", cause, request_id, 0, detail, via="source")


def test_the_causes_of_two_runs_are_compared_by_their_share_of_the_steps(run_of):
    seats = exact(Cause.MAX_NUM_SEQS, "a")
    base = run_of("base", *(step(n, waiting=1, ended=seats) for n in range(4)))
    new = run_of("new", step(0, waiting=1, ended=seats), *(step(n) for n in range(1, 4)))
    [change] = refusal_changes(base=analyze_run(base), new=analyze_run(new))
    assert (change.cause, change.base_exits, change.new_exits) == ("max_num_seqs", 4, 1)
    assert (change.base_steps_frac, change.new_steps_frac) == (1.0, 0.25)


def test_who_is_refused_on_one_side_only_is_told_too(run_of):
    base = run_of("base", step(0, waiting=1, ended=exact(Cause.KV_BLOCKS, "a", detail="free")))
    new = run_of("new", step(0, waiting=1, ended=exact(Cause.KV_BLOCKS, "a", detail="watermark")))
    changes = refusal_changes(base=analyze_run(base), new=analyze_run(new))
    assert [(change.detail, change.base_exits, change.new_exits) for change in changes] == [
        ("free", 1, 0),
        ("watermark", 0, 1),
    ]


def report(*, waits=(), findings=()):
    """A run's report of which only these are known."""
    time = [
        RequestTime(
            engine_rank=rank, state="waiting", cause=cause, time_ms=ms, share_frac=0, requests=1, strip=[]
        )
        for rank, cause, ms in waits
    ]
    rest = {"path": "", "label": "", "config": {}, "problems": [], "not_judged": [], "causes": [], "caps": []}
    rest |= {"trials": [], "engine_time": [], "strip": [], "warmup_steps": 0}
    return RunReport(**rest, findings=list(findings), request_time=time)


def found(code, *, cost_frac=None, evidence):
    told = dict.fromkeys(Finding.__struct_fields__)
    told |= {"code": code, "count": 3, "trials": [], "message": message(""), "evidence": evidence}
    return Finding(**told | {"cost_frac": cost_frac})


def evidence_of(kind, **known):
    """Evidence of which only this is known."""
    return kind(**dict.fromkeys(kind.__struct_fields__) | known)


def bound(share):
    """A side of which this share of the waiting was for KV blocks, and the finding where it is enough."""
    evidence = evidence_of(WaitingFor, share_frac=share)
    findings = [found("kv-bound", evidence=evidence)] if share > 0.5 else []
    waits = [(0, "kv_blocks", share - 0.1), (0, "preempted_this_step", 0.1), (0, "other", 1 - share)]
    return report(waits=[*waits, (0, "next_step", 5)], findings=findings)


@pytest.mark.parametrize(
    ("base", "new", "state"),
    [
        (0.52, 0.48, "stayed"),
        (0.48, 0.52, "stayed"),
        (0.9, 0.46, "stayed"),
        (0.9, 0.44, "went"),
        (0.44, 0.9, "appeared"),
        (0.9, 0.8, "stayed"),
    ],
)
def test_a_share_that_crossed_its_threshold_went_only_if_it_halved(base, new, state):
    [change] = finding_changes(base=bound(base), new=bound(new))
    assert change.state == state
    assert (change.base_frac, change.new_frac) == (pytest.approx(base), pytest.approx(new))
    assert change.threshold_frac == 0.5


@pytest.mark.parametrize(
    ("cost_frac", "state"), [(0.06, "stayed"), (0.0999, "stayed"), (0.10, "went"), (0.5, "went")]
)
def test_a_share_that_the_other_side_does_not_have_is_at_most_the_threshold(cost_frac, state):
    base = report(findings=[found("scheduler-overhead", cost_frac=cost_frac, evidence=Evidence())])
    [change] = finding_changes(base=base, new=report())
    assert (change.state, change.base_frac, change.new_frac) == (state, cost_frac, None)


@pytest.mark.parametrize(("starved", "state"), [([], "stayed"), (["a"], "went")])
def test_queueing_that_was_found_for_starved_requests_went_with_them(starved, state):
    felt = evidence_of(Queueing, of_time_in_engine_frac=0.12, starved=starved, priority_inversions=[])
    [change] = finding_changes(base=report(findings=[found("queueing", evidence=felt)]), new=report())
    assert change.state == state


def test_what_counts_events_went_when_there_are_none():
    [change] = finding_changes(base=report(findings=[found("preemption", evidence=Evidence())]), new=report())
    assert (change.state, change.threshold_frac, change.base_frac) == ("went", None, None)
