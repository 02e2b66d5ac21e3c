import json

from polars.testing import assert_frame_equal

from schedtrace.diagnose.rules.front_end import ThreadShare, thread_shares
from schedtrace.model.causes import Cause
from schedtrace.model.trace import Cpu, Events, Exit, Notice, Output, Preemption, Step
from schedtrace.model.trace_facts import DummyBatch, RankSync, ThreadTime
from schedtrace.read.problems import Problems
from schedtrace.read.tables import schema_of
from schedtrace.read.trace import read_trace
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, encoded, finish, header, step, write_trace


def test_a_trace_closed_in_order_has_no_problems(trace_of):
    trace = trace_of(step(0), step(1))
    assert trace.steps["step"].to_list() == [0, 1]
    assert trace.problems == Problems()
    assert trace.problems.sentences(trace.path) == []


def test_the_step_frame_has_the_columns_and_types_of_the_step_line_but_its_lists(trace_of):
    lists = {"requests", "exits", "caps", "preempted", "arrived", "finished", "changes"}
    lists |= {"admitted", "refusals", "kv_loads", "grammars", "set_aside", "dummies", "syncs"}
    lists |= {"controls", "kv_sends"}
    for trace in (trace_of(step(0)), trace_of()):
        assert dict(trace.steps.schema) == {n: t for n, t in schema_of(Step).items() if n not in lists}


def test_values_at_their_default_are_left_out_of_the_line_and_filled_in_again(trace_of):
    line = step(0, got={"a": 5}, num_new=0)
    assert b"num_new" not in encoded(line)
    trace = trace_of(line)
    assert trace.steps["num_new"].to_list() == [0]
    assert trace.requests().collect()["phase"].to_list() == ["running"]
    assert trace.requests().collect()["draft_tokens"].to_list() == [0]


def test_what_is_not_known_stays_null(trace_of):
    row = trace_of(step(0, back=None)).steps.row(0, named=True)
    assert (row["output_us"], row["output_tokens"], row["waiting_tokens_after"]) == (None, None, None)


def test_the_first_output_line_of_a_step_completes_it(trace_of):
    late = Output(step=1, output_us=77, update_us=7, output_tokens=3)
    again, lost = (Output(step=number, output_us=5, update_us=1, output_tokens=1) for number in (1, 9))
    steps = trace_of(step(0), step(1, back=None), step(2), late, again, lost).steps
    assert steps["output_us"].to_list() == [1000, 77, 21_000]
    assert steps["update_us"].to_list() == [None, 7, None]
    assert steps["output_tokens"].to_list() == [None, 3, None]


def test_arrivals_and_finishes_come_from_steps_and_from_events_between_them(trace_of):
    trace = trace_of(
        step(0, arrived=[arrival("a", 0)], finished=[finish("z")]),
        Events(at_us=5, arrived=[arrival("b", 3, priority=2)], finished=[finish("a", "ABORTED")]),
    )
    assert trace.arrivals.select("request_id", "step", "priority").rows() == [("a", 0, 0), ("b", None, 2)]
    assert trace.finishes.select("request_id", "status").rows() == [("z", "LENGTH_CAPPED"), ("a", "ABORTED")]


def test_passes_of_a_rank_come_from_steps_and_from_events_between_them_in_order_of_time(trace_of):
    trace = trace_of(
        Events(at_us=50, dummies=[DummyBatch(10, 5, 0, 3)], syncs=[RankSync(15, 1, 0, 3, wave_ended=True)]),
        step(0, start=200, dummies=[DummyBatch(100, 7, 1, 0)], syncs=[RankSync(107, 2, 1, 0)]),
        Events(at_us=500, dummies=[DummyBatch(300, 9)]),
    )
    assert trace.dummies.columns == ["began_us", "took_us", "wave", "step_counter"]
    assert trace.dummies.rows() == [(10, 5, 0, 3), (100, 7, 1, 0), (300, 9, None, None)]
    assert trace.syncs.columns == ["began_us", "took_us", "wave", "step_counter", "wave_ended"]
    assert trace.syncs.rows() == [(15, 1, 0, 3, True), (107, 2, 1, 0, False)]
    assert trace.problems.garbled_lines == []


def test_exits_and_preemptions_are_one_row_each_with_their_step(trace_of):
    skipped = Exit("waiting", "continue", Cause.GRAMMAR_PENDING, "g")
    ended = Exit("waiting", "break", Cause.KV_BLOCKS, "h", 9, via="source", location="scheduler.py:7")
    trace = trace_of(
        step(0, exits=[skipped, ended], preempted=[Preemption("a", 40, "b")], trial=3),
        step(1, ended=None),
    )
    exits = trace.exits().select("step", "trial", "cause", "budget_left", "via").collect()
    assert exits.rows() == [(0, 3, "grammar_pending", 0, "inferred"), (0, 3, "kv_blocks", 9, "source")]
    [preemption] = trace.preemptions().select("step", "for_request_id", "in_schedule").collect().rows()
    assert preemption == (0, "b", True)


def test_notices_of_the_header_come_first(trace_of):
    trace = trace_of(Notice(at_us=1, message="second"), notices=["first"])
    assert trace.notices == ["first", "second"]


def test_step_lines_written_again_with_spaces_and_in_another_order_read_the_same(trace_of):
    plain = [step(0, got={"a": 5}), step(1)]
    other = [json.dumps(json.loads(encoded(line)), sort_keys=True).encode() for line in plain]
    assert_frame_equal(trace_of(*plain).steps, trace_of(*other).steps)


def test_an_older_trace_with_fewer_fields_reads_as_if_they_were_at_their_defaults(trace_of, tmp_path):
    required = b'"start_us":0,"schedule_us":100,"token_budget":1000,"remaining_budget":1000,'
    required += b'"total_requests":0,"max_num_running_reqs":8,"num_running_before":0,"num_running_after":0,'
    required += b'"num_waiting_before":0,"num_waiting_after":0'
    old = trace_of(b'{"type":"step","step":0,' + required + b"}")
    bare = step(0, back=None, ended=None, kv_blocks_total=None, kv_blocks_free_after=None)
    new = write_trace(tmp_path / "new.jsonl", header(), bare)
    nothing_nested = [name for name, kind in old.steps.schema.items() if not kind.is_nested()]
    assert_frame_equal(old.steps.select(nothing_nested), read_trace(new).steps.select(nothing_nested))


def test_lists_written_though_they_are_empty_are_empty(trace_of):
    lists = b",".join(b'"%s":[]' % name for name in (b"preempted", b"arrived", b"finished", b"exits"))
    trace = trace_of(
        encoded(step(0, got={"a": 5}, ended=None)).replace(b'"requests"', lists + b',"requests"')
    )
    assert (trace.steps.height, trace.problems) == (1, Problems())
    assert (trace.requests().collect().height, trace.exits().collect().height) == (1, 0)


def test_fields_of_a_newer_version_are_ignored(trace_of):
    newer = encoded(step(0, got={"a": 5})).replace(
        b'"requests":[{', b'"shape":[1,{"x":2}],"requests":[{"y":3,'
    )
    trace = trace_of(newer)
    assert trace.steps["total_requests"].to_list() == [1]
    assert trace.requests().collect()["scheduled_tokens"].to_list() == [5]
    assert trace.problems.garbled_lines == []


def test_lines_of_processor_times_are_one_row_a_thread(trace_of):
    threads = [ThreadTime("engine", 1, 1, 10, 2), ThreadTime("worker", 3, 4, 50, 6)]
    trace = trace_of(step(0), Cpu(at_us=5, threads=threads), step(1))
    assert trace.steps["step"].to_list() == [0, 1]
    assert trace.problems == Problems()
    assert trace.cpu.rows() == [(5, "engine", 1, 1, 10, 2), (5, "worker", 3, 4, 50, 6)]


def test_a_threads_times_grow_from_the_first_to_the_last_time_it_was_seen_in_the_run(trace_of):
    def seen(at, ran, waited):
        return Cpu(at_us=at, threads=[ThreadTime("engine", 1, 2, ran, waited)])

    lines = [
        seen(50, 1, 1),
        step(0, start=100),
        seen(200, 10, 5),
        seen(400, 20, 9),
        seen(700, 50, 25),
        step(1, start=800),
    ]
    share = ThreadShare(role="engine", ran_frac=40 / 500, waited_frac=20 / 60)
    assert thread_shares(make_timeline(trace_of(*lines))) == [share]


def test_a_thread_seen_once_has_no_time(trace_of):
    one = Cpu(at_us=150, threads=[ThreadTime("engine", 1, 2, 3, 4)])
    assert thread_shares(make_timeline(trace_of(step(0, start=100), one))) == []
    assert thread_shares(make_timeline(trace_of())) == []
