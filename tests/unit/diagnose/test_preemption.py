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
    assert evidence.for_itself == 1
    assert [(one.step, one.lost_tokens) for one in evidence.examples] == [(1, 60), (3, 50), (1, 40)]


def test_who_was_hit_more_than_once_is_named_worst_first(found):
    hits = ["a", "b", "c", "b", "a", "b"]
    [finding] = found(CODE, *(step(n, preempted=[Preemption(one, 1)]) for n, one in enumerate(hits)))
    assert [(one.request_id, one.times) for one in finding.evidence.repeat_victims] == [("b", 3), ("a", 2)]
    assert plain(finding.message).startswith(
        "6 preemptions discarded 6 computed tokens of 3 requests, 2 of them repeatedly (b 3 times). vLLM "
        "computed 0 tokens again, 0 % of all tokens computed. It is a storm: "
    )


@pytest.mark.parametrize(
    ("got", "recomputed", "severity", "part"),
    [
        (1000, 99, "warning", 10),
        (1000, 100, "critical", 10),
        (1000, 0, "warning", 0),
        (0, 50, "critical", 100),  # no more than all tokens are computed again
    ],
)
def test_it_is_critical_from_a_tenth_of_all_tokens_computed_on(found, got, recomputed, severity, part):
    line = step(0, got={"x": got}, recomputed_tokens=recomputed, preempted=[Preemption("a", 200)])
    [finding] = found(CODE, line)
    assert (finding.severity, finding.evidence.repeat_victims) == (severity, [])
    assert plain(finding.message).endswith(
        f"of 1 request. vLLM computed {recomputed} tokens again, {part} % of all tokens computed."
    )


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
