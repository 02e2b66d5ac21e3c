import pytest

from schedtrace.model.trace import Preemption
from schedtrace.present.phrases import plain
from tests.makers import step

CODE = "preemption"


def test_preemptions_are_counted_with_what_they_threw_away(found):
    [finding] = found(
        CODE,
        step(0, got={"a": 970}),
        step(1, preempted=[Preemption("a", 40, "b", 1), Preemption("c", 60, "b", 1)]),
        step(2, got={"a": 30}, recomputed_tokens=30),
        step(3, preempted=[Preemption("a", 50, "a", 2)]),
        step(4, preempted=[Preemption("d", 5)]),
    )
    assert (finding.severity, finding.cause, finding.via) == ("warning", "kv_blocks", "recorded")
    assert (finding.count, finding.steps, finding.tokens) == (4, [1, 3, 4], 155)
    evidence = finding.evidence
    assert (evidence.victims, evidence.recomputed_tokens, evidence.computed_tokens) == (3, 30, 1000)
    assert (evidence.for_another_request, evidence.for_itself) == (2, 1)
    assert [(one.step, one.lost_tokens) for one in evidence.examples] == [(1, 60), (3, 50), (1, 40)]


def test_who_was_hit_more_than_once_is_named_worst_first(found):
    hits = ["a", "b", "c", "b", "a", "b"]
    [finding] = found(CODE, *(step(n, preempted=[Preemption(one, 1)]) for n, one in enumerate(hits)))
    assert [(one.request_id, one.times) for one in finding.evidence.repeat_victims] == [("b", 3), ("a", 2)]
    assert plain(finding.message) == (
        "6 preemptions discarded 6 computed tokens of 3 requests, 2 of them repeatedly (b 3 times). vLLM "
        "computed 0 tokens again, 0 % of all tokens computed."
    )


def test_nobody_hit_twice_is_not_talked_about(found):
    [finding] = found(CODE, step(0, preempted=[Preemption("a", 1), Preemption("b", 1)]))
    assert finding.evidence.repeat_victims == []
    assert "repeatedly" not in plain(finding.message)


@pytest.mark.parametrize(("recomputed", "severity"), [(99, "warning"), (100, "critical"), (101, "critical")])
def test_it_is_critical_from_a_tenth_of_all_tokens_computed_on(found, recomputed, severity):
    [finding] = found(
        CODE, step(0, got={"x": 1000}, recomputed_tokens=recomputed, preempted=[Preemption("a", 200)])
    )
    assert finding.severity == severity
    assert f"vLLM computed {recomputed} tokens again, 10 % of all tokens computed." in plain(finding.message)


def test_no_more_than_all_tokens_are_computed_again(found):
    [finding] = found(CODE, step(0, recomputed_tokens=50, preempted=[Preemption("a", 50)]))
    assert "vLLM computed 50 tokens again, 100 % of all tokens computed." in plain(finding.message)


def test_where_nothing_is_computed_again_nothing_is(found):
    [finding] = found(CODE, step(0, preempted=[Preemption("a", 50)]))
    assert (finding.severity, finding.evidence.recomputed_tokens) == ("warning", 0)
    assert "vLLM computed 0 tokens again, 0 % of all tokens computed." in plain(finding.message)


def test_a_reset_outside_schedule_is_no_preemption(found):
    reset = Preemption("a", 40, in_schedule=False)
    assert found(CODE, step(0, preempted=[reset])) == []
    [finding] = found(CODE, step(0, preempted=[reset, Preemption("b", 5)]))
    assert (finding.count, finding.tokens, finding.evidence.victims) == (1, 5, 1)


@pytest.mark.parametrize(
    ("wanted_by", "whom"),
    [
        (None, "for a request that is not recorded"),
        ("a", "for blocks that it needed itself"),
        ("b", "for b"),
    ],
)
def test_the_example_says_for_whom(found, wanted_by, whom):
    [finding] = found(CODE, step(7, trial=2, preempted=[Preemption("a", 40, wanted_by)]))
    assert plain(finding.example) == (
        f"step 7 of trial 2 preempted a {whom}, which discarded 40 computed tokens."
    )


def test_preemptions_of_the_warm_up_do_not_count(found):
    warm = step(0, trial=0, preempted=[Preemption("w", 9)], recomputed_tokens=9, prefill_tokens=9)
    assert found(CODE, warm, step(1, trial=1), trial_ids=True) == []
