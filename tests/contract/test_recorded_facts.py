"""What a trace says is what happened, step by step, seen by an observer who asks vLLM's objects only."""

import time

import polars as pl
import pytest

pytest.importorskip("vllm")

from schedtrace.read.run import read_run
from schedtrace.record.writer import WRITE_LATEST_NS
from tests.contract.facts.told import trace_file
from tests.contract.loads import LOADS, SHORT_STEPS, under_load
from tests.contract.observer import Observer

pytestmark = pytest.mark.vllm

LIMIT_S = 60
OBSERVED = (
    "which limit makes an allocation fail cannot be told from "
    "tests.contract.observer._Refusing.allocate_slots: it does not say in its own code when it fails"
)


@pytest.fixture(params=LOADS, scope="module")
def seen_and_told(request, tmp_path_factory):
    """A load seen from outside, and its trace read back."""
    name, seed = request.param.rsplit("-", 1)
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(folder))
        seen = under_load(Observer, name, int(seed), steps=SHORT_STEPS)
    [trace] = read_run(folder).traces
    return seen, trace


def test_every_step_and_nothing_else_is_told(seen_and_told):
    seen, trace = seen_and_told
    assert (trace.end.steps, trace.end.dropped_steps) == (len(seen.steps), 0)
    assert (trace.notices, trace.problems.sentences(trace.path)) == ([OBSERVED], [])


def test_steps(seen_and_told):
    seen, trace = seen_and_told
    assert trace.steps.select(list(seen.steps[0])).to_dicts() == seen.steps


def test_what_each_request_got(seen_and_told):
    seen, trace = seen_and_told
    columns = ["step", "request_id", "computed_tokens", "scheduled_tokens", "phase"]
    assert sorted(trace.requests().select(columns).collect().rows()) == sorted(seen.rows)


def test_tokens_that_wait(seen_and_told):
    """Compare up to the first preemption of several batches in flight: its victim gets one more token."""
    seen, trace = seen_and_told
    until = seen.preemptions[0][0] if seen.depth > 1 and seen.preemptions else None
    assert trace.steps["waiting_tokens_after"].to_list()[:until] == seen.waiting_tokens[:until]


def test_preemptions(seen_and_told):
    seen, trace = seen_and_told
    columns = ["step", "request_id", "lost_tokens", "for_request_id", "num_preemptions", "in_schedule"]
    assert trace.preemptions().select(columns).collect().rows() == seen.preemptions


def test_every_request_arrives_once(seen_and_told):
    seen, trace = seen_and_told
    columns = ["step", "request_id", "prompt_tokens", "max_tokens", "priority"]
    at_front_end_us = pl.col("arrived_us") + trace.header.wall_anchor_us
    assert trace.arrivals.select(*columns, at_front_end_us).rows() == [
        (
            seen.came[request_id],
            request_id,
            request.num_prompt_tokens,
            request.max_tokens,
            request.priority,
            int(request.arrival_time * 1e6),
        )
        for request_id, request in seen.requests.items()
    ]


def test_every_request_finishes_once(seen_and_told):
    seen, trace = seen_and_told
    after_the_last = pl.col("step").fill_null(len(seen.steps))
    columns = ["status", "prompt_tokens", "output_tokens", "num_preemptions", "cached_tokens"]
    finishes = trace.finishes.select("request_id", after_the_last, *columns)
    assert finishes.height == len(seen.requests)
    assert {row[0]: row[1:] for row in finishes.iter_rows()} == {
        request_id: (
            *seen.went[request_id],
            request.num_prompt_tokens,
            seen.delivered.get(request_id, 0),
            getattr(request, "num_preemptions", None),
            seen.first_cached.get(request_id, 0),
        )
        for request_id, request in seen.requests.items()
    }


def test_the_times_of_a_life_are_those_of_its_steps(seen_and_told):
    seen, trace = seen_and_told
    starts, outputs = trace.steps["start_us"], trace.steps["output_us"]
    columns = {"scheduled_us": starts, "first_token_us": outputs, "last_token_us": outputs}
    for life in trace.finishes.select("request_id", *columns).iter_rows(named=True):
        steps = seen.life.get(life.pop("request_id"), {})
        assert life == {
            name: times[steps[name]] if name in steps else None for name, times in columns.items()
        }


def test_a_life_is_told_in_order(seen_and_told):
    _, trace = seen_and_told
    names = ["queued_us", "scheduled_us", "first_token_us", "last_token_us", "finished_us"]
    lives = [[time for time in life if time is not None] for life in trace.finishes.select(names).iter_rows()]
    assert lives == [sorted(life) for life in lives]


def test_a_step_without_output_for_long_is_written_before_and_completed_after(recording):
    seen = Observer()
    seen.add("slow", prompt=10, max_tokens=1)
    seen.schedule()
    until = time.monotonic() + LIMIT_S
    while '"type":"step"' not in trace_file(recording).read_text() and time.monotonic() < until:
        time.sleep(0.02)
    [trace] = read_run(recording).traces
    assert trace.steps["output_us"].to_list() == [None]
    seen.update()
    seen.finish()
    [trace] = read_run(recording).traces
    assert trace.steps["output_tokens"].to_list() == [1]
    assert trace.steps["output_us"][0] > WRITE_LATEST_NS / 1000
    assert trace.finishes["first_token_us"].to_list() == trace.steps["output_us"].to_list()


def test_who_comes_and_goes_while_no_step_runs_is_told(recording):
    seen = Observer()
    seen.add("early")
    seen.step()
    seen.add("late")
    seen.abort("late")
    seen.abort("early")
    seen.finish()
    [trace] = read_run(recording).traces
    assert trace.arrivals["request_id"].to_list() == ["early", "late"]
    assert sorted(trace.finishes.select("request_id", "status").rows()) == [
        ("early", "ABORTED"),
        ("late", "ABORTED"),
    ]


def test_hashed_ids_leave_no_clear_id_anywhere(recording, monkeypatch):
    monkeypatch.setenv("SCHEDTRACE_HASH_IDS", "1")
    seen = Observer(num_blocks=14, max_num_seqs=4)
    for number in range(8):
        seen.add(f"secret{number}", prompt=40, max_tokens=60)
    seen.finish()
    [trace] = read_run(recording).traces
    assert not [file for file in recording.rglob("*") if b"secret" in file.read_bytes()]
    ids = trace.arrivals["request_id"]
    assert ids.n_unique() == 8
    assert sorted(trace.finishes["request_id"]) == sorted(ids)
    preemptions, exits = trace.preemptions().collect(), trace.exits().collect()
    assert len(preemptions) == len(seen.preemptions) > 0
    for told in (preemptions["request_id"], preemptions["for_request_id"], exits["request_id"].drop_nulls()):
        assert set(told) <= set(ids)


@pytest.mark.parametrize(("given", "trials"), [("1", [0, 0, 3]), ("0", [None, None, None])])
def test_trials_are_told_by_the_ids_of_schedtrace_run_only(recording, monkeypatch, given, trials):
    monkeypatch.setenv("SCHEDTRACE_TRIAL_IDS", given)
    seen = Observer()
    seen.add("t0-0", max_tokens=2)
    seen.step()
    seen.step()
    seen.add("t3-0", max_tokens=1)
    seen.finish()
    [trace] = read_run(recording).traces
    assert trace.steps["trial"].to_list() == trials
    assert trace.header.trial_ids is (given == "1")
