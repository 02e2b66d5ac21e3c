import pytest

from schedtrace.model.trace import Preemption
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


def test_who_was_hit_more_than_once_is_named_worst_first(found, recorded_words):
    hits = ["a", "b", "c", "b", "a", "b"]
    [finding] = found(CODE, *(step(n, preempted=[Preemption(one, 1)]) for n, one in enumerate(hits)))
    assert [(one.request_id, one.times) for one in finding.evidence.repeat_victims] == [("b", 3), ("a", 2)]
    recorded_words(finding.message)


@pytest.mark.parametrize(
    ("got", "recomputed", "severity"),
    [
        (1000, 99, "warning"),
        (1000, 100, "critical"),
        (1000, 0, "warning"),
        (0, 50, "critical"),  # no more than all tokens are computed again
    ],
)
def test_it_is_critical_from_a_tenth_of_all_tokens_computed_on(
    found, got, recomputed, severity, recorded_words
):
    line = step(0, got={"x": got}, recomputed_tokens=recomputed, preempted=[Preemption("a", 200)])
    [finding] = found(CODE, line)
    assert (finding.severity, finding.evidence.repeat_victims) == (severity, [])
    assert finding.evidence.recomputed_tokens == recomputed
    recorded_words(finding.message)


def test_a_reset_outside_schedule_is_no_preemption(found):
    reset = Preemption("a", 40, in_schedule=False)
    assert found(CODE, step(0, preempted=[reset])) == []
    [finding] = found(CODE, step(0, preempted=[reset, Preemption("b", 5)]))
    assert (finding.count, finding.tokens, finding.evidence.victims) == (1, 5, 1)


@pytest.mark.parametrize("wanted_by", [None, "a", "b"])
def test_the_example_says_for_whom(found, wanted_by, recorded_words):
    [finding] = found(CODE, step(7, trial=2, preempted=[Preemption("a", 40, wanted_by)]))
    assert finding.evidence.examples[0].for_request_id == wanted_by
    recorded_words(finding.example)
