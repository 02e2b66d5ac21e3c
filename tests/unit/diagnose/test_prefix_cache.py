import pytest

from schedtrace.model.trace import Preemption, ScheduledRequest
from schedtrace.present.phrases import plain
from tests.makers import arrival, step

CODE = "prefix-cache"


def new(name, cached, tokens=100):
    return ScheduledRequest(name, cached, tokens - cached, "new")


def admits(number, *rows, **fields):
    return step(number, requests=list(rows), arrived=[arrival(row.request_id, 0) for row in rows], **fields)


def lost_and_found(lost, cached):
    """v loses its tokens in step 1 and comes back in step 3, with some of them from the cache."""
    return [
        admits(0, new("v", 30)),
        step(1, preempted=[Preemption("v", lost)]),
        step(3, requests=[ScheduledRequest("v", cached, 5, "resumed")]),
    ]


def test_whole_blocks_that_were_not_found_again_are_counted(found):
    """47 tokens fill 4 blocks of 10; 20 of them were still cached, so 20 were gone."""
    [finding] = found(CODE, *lost_and_found(47, 20))
    assert (finding.cause, finding.severity, finding.tokens) == (None, "info", 20)
    assert (finding.count, finding.steps) == (1, [1])
    evidence = finding.evidence
    assert (evidence.returned, evidence.lost_tokens, evidence.found_tokens) == (1, 47, 20)
    assert (evidence.evicted_tokens, evidence.hit_frac) == (20, 0.3)
    assert "in step 3 it found 20 of them" in plain(finding.example)
    assert (finding.cost_ms, finding.cost_frac) == (None, None)


@pytest.mark.parametrize("cached", [40, 47, 60])
def test_a_block_that_was_not_full_cannot_be_found(found, cached):
    assert found(CODE, *lost_and_found(47, cached)) == []


def test_nothing_is_said_without_prefix_caching(found):
    for header in ({"enable_prefix_caching": False}, {"enable_prefix_caching": None}, {"block_size": None}):
        assert found(CODE, *lost_and_found(47, 20), **header) == []


def test_who_does_not_come_back_looks_for_nothing(found):
    assert found(CODE, *lost_and_found(47, 20)[:2]) == []


def test_a_reset_is_no_preemption(found):
    first, _, last = lost_and_found(47, 20)
    assert found(CODE, first, step(1, preempted=[Preemption("v", 47, in_schedule=False)]), last) == []


def crowd(first, many, cached, free):
    """Requests one by one, each with so much cached, while so many of 100 blocks are free."""
    return [admits(n, new(f"r{n}", cached), kv_blocks_free_before=free) for n in range(first, first + many)]


@pytest.mark.parametrize(
    ("short", "many", "free", "found_it"),
    [(39, 10, 9, True), (40, 10, 9, False), (39, 9, 9, False), (39, 10, 10, False)],
    ids=["under half", "half", "too few", "not short"],
)
def test_hits_that_halve_while_blocks_are_short_are_told_as_no_more_than_that(
    found, short, many, free, found_it
):
    findings = found(CODE, *crowd(0, 10, 80, 90), *crowd(10, many, short, free))
    assert len(findings) == found_it
    for finding in findings:
        evidence = finding.evidence
        assert (evidence.hit_frac_otherwise, evidence.hit_frac_when_short) == (0.8, short / 100)
        assert "This is a correlation, no proof of a cause." in plain(finding.message)
        assert (finding.tokens, finding.count, finding.steps) == (0, 10, list(range(10, 20)))
        assert finding.cost_ms is None


WORK = [
    step(n, took=0, back=1000 + 100 * (n % 5), got={"y": 9}, prefill_tokens=10 * (n % 5))
    for n in range(10, 50)
]
"""Steps of 1,000 us and 10 us a prefill token."""


def test_the_cost_is_what_the_tokens_take(found):
    """2,020 of them were gone."""
    [finding] = found(CODE, *lost_and_found(2047, 20), *WORK)
    assert finding.cost_ms == pytest.approx(20.2, rel=0.05)
    assert finding.cost_error_frac is not None
    assert finding.severity == "warning"


def test_a_cost_below_the_error_of_the_model_is_not_given(found):
    """20 tokens would be 0.04 % of the run."""
    [finding] = found(CODE, *lost_and_found(47, 20), *WORK)
    assert (finding.cost_ms, finding.cost_frac, finding.cost_error_frac) == (None, None, None)
    assert finding.severity == "info"
