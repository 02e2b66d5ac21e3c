import pytest

from schedtrace.diagnose.rules import RULES
from schedtrace.model.causes import Cause
from tests.makers import BLOCK_SIZE, arrival, step

CODE = "arrival-limited"


def late(*arrivals, ended=Cause.QUEUE_EMPTY, got=100, back=1000, **fields):
    """Step 0 ends at 100 us with ``got`` of 1000 tokens used, its output is back at 1000; 1 takes them in."""
    first = {"x": got} if got else {}
    names = [one.request_id for one in arrivals]
    return [
        step(0, start=0, took=100, back=back, got=first, new=first, ended=ended, **fields),
        step(1, start=2000, back=500, got=dict.fromkeys(names, 100), new=names, arrived=list(arrivals)),
    ]


def test_requests_that_came_after_schedule_and_would_have_fitted_are_found_with_exact_figures(
    found, recorded_words
):
    came_late = arrival("a", came=150, queued=200, prompt_tokens=300)
    on_its_way = arrival("b", came=50, queued=120, prompt_tokens=200)
    [finding] = found(CODE, *late(came_late, on_its_way))
    assert (finding.severity, finding.cause, finding.via) == ("info", "queue_empty", "inferred")
    assert (finding.count, finding.steps, finding.tokens, finding.trials) == (1, [0], 500, [])
    evidence = finding.evidence
    assert (evidence.late_requests, evidence.on_their_way, evidence.extra_steps) == (2, 1, 1)
    assert finding.evidence.late_us_max == 50
    assert finding.evidence.extra_steps_us == 500
    recorded_words(finding.example)


def count_of_late(findings):
    return sum(finding.evidence.late_requests for finding in findings)


def test_late_requests_share_the_budget_left_in_the_order_of_the_queue(found):
    second = arrival("b", came=140, queued=300, prompt_tokens=500)
    first = arrival("a", came=150, queued=200, prompt_tokens=500)
    [finding] = found(CODE, *late(second, first))
    assert (count_of_late([finding]), finding.evidence.late_us_max) == (1, 50)


def of(*tokens, **fields):
    """Requests that come at 150 us, 10 us apart, with prompts of these lengths."""
    arrivals = [arrival(f"r{at}", 150 + 10 * at, prompt_tokens=count) for at, count in enumerate(tokens)]
    return late(*arrivals, **fields)


@pytest.mark.parametrize(
    ("lines", "header", "late_requests"),
    [
        (of(900), {}, 1),
        (of(901), {}, 0),
        (of(901, 10), {}, 0),  # nobody passes one that does not fit
        (of(100, 100), {"max_num_running_reqs": 3}, 2),
        (of(100, 100), {"max_num_running_reqs": 2}, 1),
        (of(100, 100), {"max_num_running_reqs": 1}, 0),
        (of(100, 100), {"scheduler_config": {"max_num_active_seqs": 2}}, 1),
        (of(300, kv_blocks_free_after=30), {}, 1),
        (of(301, kv_blocks_free_after=30), {}, 0),
        (of(301, kv_blocks_free_after=None), {}, 1),
        (of(900, kv_blocks_free_after=1), {"block_size": None}, 1),
        (late(arrival("a", 999)), {}, 1),
        (late(arrival("a", 1001)), {}, 0),  # after the output was back
        (late(arrival("a", came=50, queued=99)), {}, 0),  # queued before schedule() ended
    ],
)
def test_who_comes_late_counts_only_while_budget_seats_and_blocks_are_left(
    found, lines, header, late_requests
):
    assert BLOCK_SIZE == 10
    assert count_of_late(found(CODE, *lines, **header)) == late_requests


@pytest.mark.parametrize(
    "near_miss",
    [
        late(arrival("a", 150), ended=Cause.MAX_NUM_SEQS, waiting=1),
        late(arrival("a", 150), ended=Cause.KV_BLOCKS, waiting=1),
        late(arrival("a", 150), ended=None, waiting=1),
        late(arrival("a", 150), got=0),
        late(arrival("a", 150), got=1000),
        late(arrival("a", 150), back=None),
        late(arrival("a", None, queued=150)),
        late(arrival("a", 150, streaming_update=True)),
    ],
    ids=[
        "somebody waited for a seat",
        "somebody waited for KV blocks",
        "why it stopped is unknown",
        "the step scheduled nothing",
        "no budget was left",
        "its output never came back",
        "when it came is unknown",
        "it is a part of a running session",
    ],
)
def test_nothing_is_found_when(found, near_miss):
    assert found(CODE, *near_miss) == []


def test_nobody_waiting_says_that_the_queue_was_empty_where_no_exit_was_recorded(found):
    [finding] = found(CODE, *late(arrival("a", 150), ended=None), exits_via="source")
    assert (finding.steps, finding.via) == ([0], "inferred")


def test_a_server_that_waits_for_nobody_gets_no_setting(found, recorded_words):
    [finding] = found(CODE, *late(arrival("a", 150)))
    [advice] = finding.advice
    assert advice.setting is None
    recorded_words(advice)


def test_requests_on_their_way_and_those_that_were_never_scheduled_are_told_so(found, recorded_words):
    first, _ = late(arrival("a", came=50, queued=120))
    [finding] = found(CODE, first, step(1, start=2000, arrived=[arrival("a", came=50, queued=120)]))
    evidence = finding.evidence
    assert (evidence.late_requests, evidence.on_their_way, evidence.extra_steps) == (1, 1, 0)
    recorded_words(finding.message)
    both = late(arrival("a", came=150, queued=200), arrival("b", came=50, queued=120))
    [finding] = found(CODE, *both)
    assert (finding.evidence.late_us_max, finding.evidence.on_their_way) == (50, 1)
    recorded_words(finding.message)


def test_with_two_steps_in_flight_a_late_request_counts_once_at_the_first_to_come_back(found):
    came = arrival("a", came=350, queued=400)
    [finding] = found(
        CODE,
        step(0, start=0, took=100, back=1000, got={"x": 100}, new="x"),
        step(1, start=200, took=100, back=1200, got={"x": 1}),
        step(2, start=1100, took=100, back=1000, got={"x": 1, "a": 100}, new="a", arrived=[came]),
    )
    assert (finding.steps, finding.tokens, count_of_late([finding])) == ([0], 100, 1)


def test_trials_that_show_it_are_named(found):
    came = arrival("b", came=20_150, queued=20_200)
    [finding] = found(
        CODE,
        step(0, trial=1, got={"a": 100}, new="a", arrived=[arrival("a", 0, queued=0)]),
        step(2, trial=2, got={"x": 100}, new="x", arrived=[arrival("x", 15_000)]),
        step(3, trial=2, got={"x": 1, "b": 100}, new="b", arrived=[came]),
        trial_ids=True,
    )
    assert (finding.trials, finding.steps) == ([2], [2])


def test_not_yet_arrived_and_refused_are_told_apart_in_one_trace(found):
    lines = [
        *late(arrival("a", 150), arrival("b", 160)),
        step(2, got={"x": 1}, waiting=3, waiting_tokens_after=200, ended=Cause.MAX_NUM_SEQS),
    ]
    [not_arrived] = found(CODE, *lines)
    [refused] = found("blocked-budget", *lines)
    assert (not_arrived.steps, not_arrived.cause) == ([0], "queue_empty")
    assert (refused.steps, refused.cause) == ([2], "max_num_seqs")


@pytest.fixture
def handovers(view_of):
    """Return what the finding says of short steps of a run whose requests all exist from the start."""

    def find(*lines, closed=True, **header):
        view = view_of(*lines, **header)
        view.closed_workload = closed
        return [finding.evidence.handover for finding in RULES[CODE](view) if finding.evidence.handover]

    return find


def slow_front_end(last_came, *, waiting=0, running=1, used=1):
    """Requests a and b at 0, c when told; steps of 1 ms each 10 ms, the third one has all."""
    return [
        step(
            0,
            got={"a": used},
            running=running,
            waiting=waiting,
            arrived=[arrival("a", 0, 0), arrival("b", 0, 0)],
        ),
        step(1, got={"a": 1, "b": 1}, running=2),
        step(2, got={"a": 1, "b": 1, "c": 9}, arrived=[arrival("c", last_came, last_came)]),
    ]


def test_steps_before_the_last_request_arrived_are_short(handovers):
    [handover] = handovers(*slow_front_end(15_000))
    assert (handover.steps, handover.to_come) == (2, 1)
    assert handover.spent_ms == 2.0
    assert handover.spent_frac == 2000 / 21_000
    assert handover.handed_over_ms == 15.0


def test_short_steps_are_found_where_no_request_was_late(view_of, recorded_words):
    view = view_of(*slow_front_end(15_000))
    view.closed_workload = True
    [finding] = RULES[CODE](view)
    assert (finding.count, finding.steps, finding.severity) == (2, [0, 1], "info")
    assert not finding.is_root
    assert (finding.evidence.late_requests, finding.evidence.late_us_max) == (0, None)
    recorded_words(finding)


def test_a_request_that_arrived_before_schedule_was_done_is_no_short_step(handovers):
    assert handovers(*slow_front_end(100)) == []


@pytest.mark.parametrize("limited", [{"waiting": 1}, {"running": 8}, {"used": 1000}])
def test_steps_that_something_else_limited_are_not_short(handovers, limited):
    [handover] = handovers(*slow_front_end(15_000, **limited))
    assert handover.steps == 1


def test_no_step_is_short_where_clients_choose_the_time(handovers):
    assert handovers(*slow_front_end(15_000), closed=False) == []


def test_the_requests_of_the_next_trial_are_not_awaited(handovers):
    lines = [
        step(0, trial=1, got={"a": 1}, arrived=[arrival("t1-a", 0, 0)]),
        step(1, trial=2, got={"b": 1}, arrived=[arrival("t2-b", 9000, 9000)]),
    ]
    assert handovers(*lines) == []


def test_short_steps_of_less_than_a_hundredth_of_the_run_are_left_out(handovers):
    rest = [step(n, got={"a": 1}, back=10_000) for n in range(3, 40)]
    assert handovers(*slow_front_end(15_000), *rest) == []
