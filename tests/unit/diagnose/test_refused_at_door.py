"""Requests that the front end turned away."""

import pytest

from schedtrace.diagnose.rules.refused_at_door import RULE
from schedtrace.model.causes import Cause
from schedtrace.model.manifest import RequestRefusal
from schedtrace.read.run import FrontEndRecord
from tests.makers import SEATS, arrival, header, step

ANCHOR = header().wall_anchor_us


@pytest.fixture
def refusing(view_of):
    """``refusing([(15_000, "max_num_queued_reqs")], step(0), ...)``: what the rule finds."""

    def found(refused, *lines, arrived=10, rank=0, **config):
        view = view_of(*lines, scheduler_config=config, engine_rank=rank)
        lines = [RequestRefusal(at_unix_us=ANCHOR + us, reason=reason) for us, reason in refused]
        view.front_end = FrontEndRecord(refused=lines, arrived=arrived)
        return RULE(view)

    return found


def reqs(*moments):
    return [(us, "max_num_queued_reqs") for us in moments]


WAITING = [
    step(
        0,
        got={"a": 10},
        new="a",
        waiting=1,
        ended=Cause.KV_BLOCKS,
        arrived=[arrival("a", 0), arrival("b", 0)],
    ),
    step(1, got={"a": 10}, waiting=1, ended=Cause.KV_BLOCKS),
    step(2, got={"a": 10, "b": 10}, new="b"),
]


def test_count_reason_span_and_what_the_queue_waited_for(refusing, recorded_words):
    refused = [*reqs(5_000, 12_000), (19_000, "max_num_queued_tokens")]
    [finding] = refusing(refused, *WAITING, max_num_queued_reqs=20, max_num_queued_tokens=500)
    assert (finding.count, finding.steps, finding.leads, finding.severity) == (3, [1], True, "warning")
    assert finding.evidence.by_reason == {"max_num_queued_reqs": 2, "max_num_queued_tokens": 1}
    recorded_words(finding.verdict, finding.message, finding.holder)


def test_a_limit_below_the_seats_keeps_seats_empty(refusing, recorded_words):
    [finding] = refusing(reqs(100), step(0, got={"a": 10}, arrived=[arrival("a", 0)]), max_num_queued_reqs=2)
    [advice] = finding.advice
    assert (advice.setting, advice.value) == ("max_num_queued_reqs", SEATS)
    recorded_words(advice)


def test_a_limit_above_the_seats_trades_refusals_for_waiting(refusing, recorded_words):
    [finding] = refusing(reqs(100), *WAITING, max_num_queued_reqs=SEATS)
    [advice] = finding.advice
    assert (advice.setting, advice.value) == ("max_num_queued_reqs", None)
    recorded_words(advice)


@pytest.mark.parametrize(
    ("arrived", "leads", "severity"), [(20, False, "info"), (19, True, "warning"), (3, True, "critical")]
)
def test_it_leads_from_a_twentieth_of_all_requests(refusing, arrived, leads, severity):
    [finding] = refusing(reqs(100), *WAITING, arrived=arrived)
    assert (finding.leads, finding.severity) == (leads, severity)


@pytest.mark.parametrize(
    ("refused", "lines", "rank"),
    [(reqs(100), WAITING, 1), ([], WAITING, 0), (reqs(-1), WAITING, 0), (reqs(100), [step(0)], 0)],
    ids=["rank 0 reports for all", "nobody", "warm-up", "before the first request"],
)
def test_it_is_silent_about(refusing, refused, lines, rank):
    assert refusing(refused, *lines, rank=rank) == []


def test_a_reason_that_is_no_limit_has_no_value_and_while_no_step_ran_none_is_named(refusing, recorded_words):
    [finding] = refusing([(500_000, "policy")], *WAITING, policy="fcfs")
    assert (finding.steps, finding.evidence.by_reason) == ([], {"policy": 1})
    recorded_words(finding.message, finding.example)
