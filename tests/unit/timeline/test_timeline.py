import polars as pl
import pytest
from polars.testing import assert_frame_equal

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Events, Exit, Preemption, ScheduledRequest
from schedtrace.model.trace_facts import HeadRefusal
from schedtrace.timeline.per_step import CHART_SCHEMA, per_step
from schedtrace.timeline.timeline import context_tokens, make_timeline
from tests.makers import arrival, finish, manifest, step

WARM_UP_AND_TWO_TRIALS = [
    step(0),  # before the first request: of no trial
    step(1, trial=0, got={"w": 5}, new="w", arrived=[arrival("w", 0)], preempted=[Preemption("w", 5)]),
    step(2, trial=0, finished=[finish("w")]),
    step(3, trial=1, got={"a": 5}, new="a", arrived=[arrival("a", 1)], preempted=[Preemption("a", 5)]),
    step(4, trial=2, got={"b": 5}, new="b", arrived=[arrival("b", 2)], finished=[finish("a")]),
    Events(at_us=9, finished=[finish("b")]),
]


def test_the_warm_up_is_in_no_frame_but_counted(view_of):
    """A finish belongs to the trial of its arrival, not of the step that tells it."""
    view = view_of(*WARM_UP_AND_TWO_TRIALS, trial_ids=True)
    assert view.steps["step"].to_list() == [3, 4]
    assert view.requests.collect()["request_id"].to_list() == ["a", "b"]
    assert view.arrivals["request_id"].to_list() == ["a", "b"]
    assert view.preemptions["request_id"].to_list() == ["a"]
    assert (view.warmup_steps, view.trials()) == (2, [1, 2])
    assert view.trial_rows(view.steps, 2)["step"].to_list() == [4]
    assert dict(view.finishes.select("request_id", "trial").rows()) == {"a": 1, "b": 2}


def test_the_lists_of_facts_are_those_of_the_trials(view_of):
    warm, measured = HeadRefusal("w", [9]), HeadRefusal("a", [7])
    lines = [step(0, trial=0, refusals=[warm]), step(1, trial=1, refusals=[measured])]
    lists = view_of(*lines, trial_ids=True).lists
    empty = {name for name, table in lists.items() if table.collect().is_empty()}
    assert empty == {"admitted", "kv_loads", "grammars", "set_aside"}
    assert lists["refusals"].select("step", "request_id").collect().rows() == [(1, "a")]


def test_what_came_and_went_between_steps_belongs_to_the_trial_of_its_line(view_of):
    lines = [
        Events(at_us=1, trial=0, arrived=[arrival("w", 0)]),
        Events(at_us=2, trial=1, arrived=[arrival("a", 1)]),
        step(0, trial=1, got={"a": 5}, new="a"),
        Events(at_us=9, trial=2, finished=[finish("w"), finish("a")]),
    ]
    view = view_of(*lines, trial_ids=True)
    assert view.arrivals.select("request_id", "trial").rows() == [("a", 1)]
    assert view.finishes.select("request_id", "trial").rows() == [("a", 1)]


def test_a_trace_without_trials_is_one_trial_of_everything(view_of):
    view = view_of(step(0), step(1, got={"a": 5}))
    assert (view.trials(), view.warmup_steps) == ([None], 0)
    assert view.trial_rows(view.steps, None).height == 2


def test_steps_tell_when_schedule_returned_and_what_was_used(view_of):
    row = view_of(step(3, start=500, took=70, got={"a": 250, "b": 50})).steps.row(0, named=True)
    assert (row["end_us"], row["used_tokens"]) == (570, 300)


def test_the_last_exit_of_the_waiting_loop_is_the_one_that_ended_it(view_of):
    exits = [
        Exit("waiting", "continue", Cause.GRAMMAR_PENDING, "g"),
        Exit("waiting", "break", Cause.KV_BLOCKS, "k", 7, "free", location="scheduler.py:7", via="source"),
        Exit("running", "continue", Cause.NO_NEW_TOKENS, "r"),
    ]
    row = view_of(step(0, exits=exits)).steps.row(0, named=True)
    told = [row[f"waiting_{name}"] for name in ("cause", "request", "detail", "location", "via")]
    assert told == ["kv_blocks", "k", "free", "scheduler.py:7", "source"]


def test_without_an_exit_of_the_waiting_loop_the_queue_was_empty_or_the_cause_is_not_known(view_of):
    running = Exit("running", "continue", Cause.NO_NEW_TOKENS, "r", via="source")
    lines = [step(0, exits=[running]), step(1, ended=None, waiting=1), step(2, ended=Cause.PAUSED)]
    view = view_of(*lines, exits_via="source")
    assert view.steps["waiting_cause"].to_list() == ["queue_empty", "other", "paused"]
    assert view.steps["waiting_via"].to_list() == ["inferred", "inferred", "inferred"]


def test_an_exit_of_the_waiting_loop_refuses_somebody_only_while_somebody_waits(view_of):
    waits = Exit("waiting", "break", Cause.KV_BLOCKS, "w")
    runs = Exit("running", "continue", Cause.NO_NEW_TOKENS, "r")
    view = view_of(step(0, exits=[runs, waits], waiting=1), step(1, exits=[runs, waits]))
    refusals = view.exits.filter("refusal").select("step", "loop").rows()
    assert refusals == [(0, "running"), (0, "waiting"), (1, "running")]


def test_eligible_are_those_that_wait_for_the_scheduler_only(view_of):
    lines = [step(at, waiting=2, num_not_ready_after=count) for at, count in enumerate((0, 1, 2, 3))]
    assert view_of(*lines).steps["eligible_after"].to_list() == [2, 1, 0, 0]


def test_rows_stay_in_the_order_of_the_trace_whatever_they_are_joined_with(view_of):
    exits = [Cause.KV_BLOCKS, None, Cause.PAUSED, None] * 50
    lines = [step(at, waiting=1, ended=cause) for at, cause in enumerate(exits)]
    names = [f"t1-{at}" for at in range(200)]
    come = step(200, trial=1, arrived=[arrival(name, 0) for name in reversed(names)])
    gone = step(201, trial=1, finished=[finish(name) for name in names])
    view = view_of(*reversed(lines), come, gone)
    assert view.steps["step"].to_list() == list(range(202))
    assert view.steps["waiting_cause"].to_list()[:4] == ["kv_blocks", "other", "paused", "other"]
    assert view.finishes["request_id"].to_list() == names


@pytest.mark.parametrize(("front_end", "closed"), [("LLMEngine", True), ("AsyncLLM", False), (None, False)])
def test_a_workload_is_closed_if_the_offline_front_end_hands_it_over(trace_of, front_end, closed):
    trace = trace_of(step(0))
    assert make_timeline(trace, manifest(front_end=front_end)).closed_workload is closed
    assert make_timeline(trace).closed_workload is False


def test_a_later_part_of_a_session_is_no_new_request(view_of):
    whole = [arrival("s", 1, prompt_tokens=40), arrival("r", 2)]
    part = arrival("s", 3, prompt_tokens=90, streaming_update=True)
    view = view_of(step(0, arrived=[*whole, part]))
    assert view.new_requests["request_id"].to_list() == ["s", "r"]
    assert dict(view.prompt_lengths.rows()) == {"s": 40, "r": 100}
    assert view.waits["request_id"].to_list() == ["s", "r"]
    assert view.sessions.to_list() == ["s"]


@pytest.fixture
def trace(trace_of):
    """A chunked prefill, decodes across blocks, a step without requests, a chunk of nothing, a gap."""
    got = [
        [("a", 0, 7, "new"), ("b", 12, 1)],
        [("a", 7, 7), ("b", 13, 1)],
        [("a", 14, 7), ("b", 14, 1), ("c", 5, 0, "new")],
        [],
        *([("a", 21 + n, 1), ("c", 5, 0), ("d", 30 * n, 30)] for n in range(9)),
    ]
    numbers = [*range(4), *range(6, 15)]
    return trace_of(
        *(
            step(number, requests=[ScheduledRequest(*row) for row in rows], total_requests=len(rows))
            for number, rows in zip(numbers, got, strict=True)
        )
    )


def by_rows(trace, **sums):
    rows = trace.requests().group_by("step").agg(**sums).collect()
    return trace.steps.select("step").join(rows, on="step", how="left").fill_null(0)


def test_context_is_what_the_requests_of_a_step_had_computed(trace):
    expected = by_rows(trace, context_tokens=pl.col("computed_tokens").sum())
    assert expected["context_tokens"].to_list()[:5] == [12, 20, 33, 0, 26]
    assert_frame_equal(context_tokens(trace.stretches(), trace.steps), expected)


def rows(trace, offset_us=0):
    return per_step(make_timeline(trace), offset_us).to_dicts()


def test_tokens_of_a_step_add_up_to_its_budget(trace_of):
    got = [
        ScheduledRequest("a", 0, 40, "new"),
        ScheduledRequest("b", 10, 30, "resumed"),
        ScheduledRequest("c", 9, 1),
    ]
    one = step(
        0,
        start=1_000,
        back=500,
        requests=got,
        total_requests=3,
        budget=100,
        remaining_budget=29,
        prefill_tokens=60,
        recomputed_tokens=25,
        decode_tokens=1,
    )
    (row,) = rows(trace_of(one), offset_us=7)
    assert list(row) == list(CHART_SCHEMA)
    parts = {name: row[name] for name in row if name.endswith("_tokens")}
    assert parts == {"decode_tokens": 1, "prefill_tokens": 45, "recompute_tokens": 25, "unused_tokens": 29}
    assert (row["token_budget"], row["begin_us"], row["requests"]) == (100, 1_007, 3)


def test_a_cause_is_told_only_where_somebody_was_left_waiting(trace_of):
    refused = Exit("waiting", "break", "kv_blocks", "a.py:1", budget_left=5)
    empty = Exit("waiting", "end", "queue_empty", "a.py:2", budget_left=5)
    trace = trace_of(
        step(0, waiting=3, exits=[refused], preempted=[Preemption("v", 9), Preemption("w", 9)]),
        step(1, exits=[empty]),
    )
    first, second = rows(trace)
    assert (first["cause"], first["waiting"], first["preempted"]) == ("kv_blocks", 3, 2)
    assert (second["cause"], second["waiting"], second["preempted"]) == (None, 0, 0)
