import pytest

from schedtrace.compare.compare import compare, finding_changes, refusal_changes
from schedtrace.diagnose.analyze import analyze_run
from schedtrace.model.causes import Cause
from schedtrace.model.message import Count
from schedtrace.model.report import Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace import Exit
from tests.makers import step
from tests.unit.compare.reports import report


def blocked_budget(comparison):
    """What became of this kind of finding: other rules may have more to say about so few steps."""
    return [change for change in comparison.findings if change.code == "blocked-budget"]


def blocked(number, cause, **fields):
    return step(number, got={"x": 1}, waiting=1, waiting_tokens_after=5, ended=cause, **fields)


def test_findings_went_appeared_or_stayed_by_code_and_cause(run_of, recorded_words):
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
    recorded_words(comparison.verdict)


def test_its_message_is_of_the_new_run_or_of_the_base_where_that_has_none(run_of):
    base = run_of("a", blocked(0, Cause.LORA_CAP))
    gone, stayed = run_of("b", step(0, got={"x": 1})), [blocked(at, Cause.LORA_CAP) for at in range(2)]
    for new, state, steps in ((gone, "went", 1), (run_of("c", *stayed), "stayed", 2)):
        [change] = blocked_budget(compare(base=base, new=new))
        assert (change.state, change.message.arguments["steps"]) == (state, Count(steps, "step"))


def test_trials_that_show_a_finding_are_told_for_both_sides(run_of):
    base = run_of("a", blocked(0, Cause.KV_BLOCKS, trial=2), blocked(1, Cause.KV_BLOCKS, trial=1))
    new = run_of("b", blocked(0, Cause.KV_BLOCKS, trial=3))
    [change] = blocked_budget(compare(base=base, new=new))
    assert (change.base_trials, change.new_trials) == ([1, 2], [3])


def exact(cause, request_id, detail=None):
    return Exit("waiting", "break", cause, request_id, 0, detail, via="source")


def changed_refusals(run_of, base, new):
    reports = [analyze_run(run_of(name, *lines)) for name, lines in (("a", base), ("b", new))]
    return refusal_changes(base=reports[0], new=reports[1])


def test_the_causes_of_two_runs_are_compared_by_their_share_of_the_steps(run_of):
    refused, served = (
        [step(n, waiting=1, ended=exact(Cause.MAX_NUM_SEQS, "a")) for n in range(4)],
        [step(n) for n in range(4)],
    )
    [change] = changed_refusals(run_of, refused, [*refused[:1], *served[1:]])
    assert (change.cause, change.base_exits, change.new_exits) == ("max_num_seqs", 4, 1)
    assert (change.base_steps_frac, change.new_steps_frac) == (1.0, 0.25)


def test_who_is_refused_on_one_side_only_is_told_too(run_of):
    base, new = (
        [step(0, waiting=1, ended=exact(Cause.KV_BLOCKS, "a", detail=detail))]
        for detail in ("free", "watermark")
    )
    changes = changed_refusals(run_of, base, new)
    rows = [(change.detail, change.base_exits, change.new_exits) for change in changes]
    assert rows == [("free", 1, 0), ("watermark", 0, 1)]


def found(code, *, cause=None, symptoms=(), **shares):
    told = dict.fromkeys(Finding.__struct_fields__)
    told |= {"code": code, "cause": cause, "count": 3, "trials": [], "message": say("")}
    return Finding(**told | {"evidence": Evidence(), "symptoms": list(symptoms)} | shares)


def bound(share):
    """A side of which this share of the requests' time was for KV blocks; found from a hundredth on."""
    return report(findings=[found("kv-bound", share_frac=share)] if share >= 0.01 else [])


@pytest.mark.parametrize(
    ("base", "new", "state"),
    [
        (0.015, 0.009, "stayed"),
        (0.009, 0.015, "stayed"),
        (0.02, 0.009, "went"),
        (0.9, 0.0, "went"),
        (0.0, 0.9, "appeared"),
        (0.9, 0.1, "stayed"),
    ],
)
def test_a_share_that_crossed_its_threshold_went_only_if_it_halved(base, new, state):
    [change] = finding_changes(base=bound(base), new=bound(new))
    assert change.state == state
    known = [share if share >= 0.01 else None for share in (base, new)]
    assert [change.base_frac, change.new_frac] == known
    assert change.threshold_frac == 0.01


@pytest.mark.parametrize(
    ("cost_frac", "state"), [(0.012, "stayed"), (0.0199, "stayed"), (0.02, "went"), (0.5, "went")]
)
def test_a_share_that_the_other_side_does_not_have_is_at_most_the_threshold(cost_frac, state):
    base = report(findings=[found("scheduler-overhead", cost_frac=cost_frac)])
    [change] = finding_changes(base=base, new=report())
    assert (change.state, change.base_frac, change.new_frac) == (state, cost_frac, None)


def test_what_counts_events_went_when_there_are_none():
    [change] = finding_changes(base=report(findings=[found("preemption")]), new=report())
    assert (change.state, change.threshold_frac, change.base_frac) == ("went", None, None)


def test_a_root_cause_that_became_a_symptom_of_another_stayed():
    alone = report(findings=[found("max-num-seqs-bound", cause="max_num_seqs", share_frac=0.3)])
    beneath = found("max-num-seqs-bound", cause="max_num_seqs", share_frac=0.2)
    under = report(findings=[found("kv-bound", cause="kv_blocks", share_frac=0.6, symptoms=[beneath])])
    states = {change.code: change.state for change in finding_changes(base=alone, new=under)}
    assert states == {"kv-bound": "appeared", "max-num-seqs-bound": "stayed"}
