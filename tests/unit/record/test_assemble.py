"""From captures to lines: every figure of a step, by hand."""

import pytest

from schedtrace.model.printable import hashed
from schedtrace.model.trace import (
    AlsoSkipped,
    Arrival,
    ChunkCap,
    Exit,
    Finish,
    Output,
    Preemption,
    RowChange,
    RowChanges,
    ScheduledRequest,
    Step,
)
from schedtrace.model.trace_facts import Admission, DummyBatch, HeadRefusal, RankSync
from schedtrace.record import assemble
from schedtrace.record.allocation import RefusedHead
from schedtrace.record.capture import (
    ALL,
    NOBODY,
    Dropped,
    DummyPass,
    Happened,
    Result,
    Rows,
    SideEvents,
    Synced,
)
from schedtrace.record.clocks import RecordingClock
from schedtrace.record.facts import FIELDS, Prefixes
from schedtrace.record.metrics.tally import Tally
from schedtrace.record.otel.histories import Histories
from schedtrace.record.request_lives import RequestLives
from tests.toys import capture_of

ANCHOR_NS = 7_000_000


@pytest.fixture
def assembler(monkeypatch):
    """``assembler()``: of an engine; without vLLM, so no draft is known to be invalid."""
    monkeypatch.setattr(assemble, "reports_invalid_drafts", lambda: False)

    def made(**options):
        given = {"trial_ids": False, "hash_ids": False, "prefixes": Prefixes(), "drafts": False}
        return assemble.Assembler(RecordingClock(ANCHOR_NS, 17), **{**given, **options})

    return made


def at(us):
    """A monotonic time."""
    return ANCHOR_NS + us * 1000


def rows(got=None, new=None, computed=None, resumed=(), drafts=None):
    """``got`` and ``new``: request to scheduled tokens; ``computed``: to tokens before."""
    got, new, computed = got or {}, new or {}, computed or {}
    return Rows(
        ids=list(got),
        computed=[computed.get(one, 0) for one in got],
        scheduled=got | new,
        resumed=resumed,
        new=[(one, computed.get(one, 0)) for one in new],
        drafts=drafts or {},
    )


def capture(number, requests=None, *, full=False, events=None, side_events=NOBODY, waiting=(0, 0), **fields):
    """Step ``number``, begun 10 ms after the one before."""
    return capture_of(
        step=number,
        start_ns=at(10_000 * number),
        end_ns=at(10_000 * number + 150) + 999,
        token_budget=1000,
        max_num_running_reqs=8,
        num_running_before=1,
        num_running_after=2,
        num_waiting_before=waiting[0],
        num_waiting_after=waiting[1],
        num_not_ready_after=0,
        kv_blocks_total=50,
        kv_blocks_free_before=40,
        kv_blocks_free_after=30,
        rows=requests,
        full=full,
        events=events,
        side_events=side_events,
        **fields,
    )


def result(back_us, got=ALL, **fields):
    return Result(at(back_us), at(back_us + 20) + 999, got, **fields)


def arrival(name, prompt_tokens=100, **fields):
    return Arrival(name, -5, 0, prompt_tokens, **fields)


def came(*arrivals, finished=(), **fields):
    return SideEvents(list(arrivals), list(finished), **fields)


def test_a_step_in_full(assembler):
    first = capture(
        0,
        rows(new={"a": 84, "b": 300}, computed={"a": 16}),
        waiting=(3, 1),
        side_events=came(
            arrival("a"),
            arrival("b", 400),
            arrival("c", 70),
            dummies=[DummyPass(at(-9), at(-6), 3, 17), DummyPass(at(-5), at(-3) + 999, 3, 18)],
            synced=[Synced(at(-3), at(-1), 3, 18, go_on=False), Synced(at(-1), at(0), 4, 0, go_on=True)],
        ),
        events=[],
    )
    assert assembler().step_line(first, result(900, execution=("host", at(200), at(750) + 999))) == Step(
        step=0,
        start_us=0,
        schedule_us=150,
        output_us=900,
        update_us=20,
        execute_after_us=200,
        execute_us=550,
        token_budget=1000,
        remaining_budget=616,
        total_requests=2,
        max_num_running_reqs=8,
        num_running_before=1,
        num_running_after=2,
        num_waiting_before=3,
        num_waiting_after=1,
        waiting_tokens_after=70,
        kv_blocks_total=50,
        kv_blocks_free_before=40,
        kv_blocks_free_after=30,
        num_new=2,
        prefill_tokens=384,
        cached_tokens=16,
        output_tokens=2,
        requests=[ScheduledRequest("a", 16, 84, "new"), ScheduledRequest("b", 0, 300, "new")],
        arrived=[arrival("a"), arrival("b", 400), arrival("c", 70)],
        dummy_batches=2,
        dummy_us=5,
        dummies=[DummyBatch(-9, 3, 3, 17), DummyBatch(-5, 2, 3, 18)],
        syncs=[RankSync(-3, 2, 3, 18, wave_ended=True), RankSync(-1, 1, 4, 0)],
    )


def test_without_a_result_the_output_is_left_open_and_completed_by_a_line_of_its_own(assembler):
    engine = assembler()
    first = capture(0, rows(new={"a": 100}), side_events=came(arrival("a")), events=[])
    line = engine.step_line(first, None)
    assert (line.output_us, line.update_us, line.output_tokens, line.execute_us) == (None, None, None, None)
    late = result(900, got=(["a"], [3]), execution=("host", at(200), at(750)))
    assert engine.output(first, late) == Output(
        step=0, output_us=900, update_us=20, output_tokens=3, execute_after_us=200, execute_us=550
    )


def test_a_steady_step_is_a_delta_of_what_differs(assembler):
    engine = assembler()
    engine.step_line(capture(0, rows(new={"a": 100}), side_events=came(arrival("a")), events=[]), result(900))
    engine.step_line(capture(1, rows({"a": 1}, computed={"a": 100}), events=[]), result(10_900))
    assert engine.step_line(capture(2), result(20_900)) == {
        "type": "delta",
        "step": 2,
        "start_us": 20_000,
        "schedule_us": 150,
        "output_us": 20_900,
        "update_us": 20,
        "num_running_before": 1,
        "kv_blocks_free_before": 40,
    }


def test_the_figures_of_steady_steps(assembler):
    engine = assembler(full_lines=True)
    engine.step_line(capture(0, rows(new={"a": 100}), side_events=came(arrival("a")), events=[]), result(900))
    engine.step_line(capture(1, rows({"a": 1}, computed={"a": 100}), events=[]), result(10_900))
    engine.step_line(capture(2), result(20_900))
    line = engine.step_line(capture(3, full=True), result(30_900))
    assert line.requests == [ScheduledRequest("a", 102, 1)]
    assert (line.num_new, line.num_continued, line.prefill_tokens, line.decode_tokens) == (0, 1, 0, 1)
    assert (line.remaining_budget, line.output_tokens, line.cached_tokens) == (999, 1, 0)


def test_changes_of_a_step_that_is_not_steady(assembler):
    engine = assembler()
    first = rows(new={"a": 100, "b": 60, "c": 9})
    engine.step_line(capture(0, first, side_events=came(*map(arrival, "abcd")), events=[]), result(900))
    second = rows({"b": 40, "c": 1}, new={"d": 5}, computed={"b": 60, "c": 9})
    line = engine.step_line(capture(1, second, events=[]), None)
    assert line["changes"] == RowChanges(
        gone=[0], changed=[RowChange(0, 60, 40)], added=[ScheduledRequest("d", 0, 5, "new")]
    )


def test_rows_that_no_changes_describe_are_written_in_full(assembler):
    engine = assembler()
    engine.step_line(
        capture(0, rows(new={"a": 9, "b": 9}), side_events=came(*map(arrival, "ab")), events=[]), None
    )
    line = engine.step_line(capture(1, rows({"b": 1, "a": 1}, computed={"a": 9, "b": 9}), events=[]), None)
    assert [request.request_id for request in line.requests] == ["b", "a"]
    assert line.changes is None


def test_a_line_in_full_says_what_a_delta_would_have_said(assembler):
    engine = assembler()
    engine.step_line(capture(0, rows(new={"a": 9}), side_events=came(arrival("a", 9)), events=[]), None)
    line = engine.step_line(capture(1, rows({"a": 2}, computed={"a": 9}), events=[], full=True), None)
    assert (line.requests, line.changes) == (
        [ScheduledRequest("a", 9, 2)],
        RowChanges(changed=[RowChange(0, 9, 2)]),
    )


def test_a_chunk_over_the_end_of_the_prompt_is_part_prefill_part_decode(assembler):
    engine = assembler()
    line = engine.step_line(
        capture(0, rows({"a": 30}, computed={"a": 80}), side_events=came(arrival("a")), events=[]), None
    )
    assert (line.prefill_tokens, line.decode_tokens, line.recomputed_tokens) == (20, 10, 0)


def test_what_a_preemption_threw_away_is_recomputed_up_to_where_it_was(assembler):
    engine = assembler(full_lines=True)
    engine.step_line(
        capture(0, rows(new={"a": 100}), side_events=came(arrival("a")), events=[], full=True), None
    )
    lost = capture(1, rows(), events=[], full=True, waiting=(0, 1))
    lost.preempted = [(Preemption("a", lost_tokens=120), 121)]
    line = engine.step_line(lost, None)
    assert (line.preempted, line.waiting_tokens_after) == ([Preemption("a", lost_tokens=120)], 121)
    line = engine.step_line(
        capture(2, rows({"a": 89}, computed={"a": 32}, resumed={"a"}), events=[], full=True), None
    )
    assert (line.num_new, line.num_resumed, line.num_continued) == (0, 1, 0)
    assert (line.prefill_tokens, line.recomputed_tokens, line.decode_tokens) == (68, 88, 1)
    assert (line.cached_tokens, line.waiting_tokens_after) == (32, 0)
    assert line.requests == [ScheduledRequest("a", 32, 89, "resumed")]


def test_a_smaller_second_loss_does_not_shrink_the_first(assembler):
    engine = assembler(full_lines=True)
    twice = capture(0, rows(), events=[], full=True, side_events=came(arrival("a")), waiting=(0, 1))
    twice.preempted = [(Preemption("a", lost_tokens=120), 121), (Preemption("a", lost_tokens=50), 121)]
    engine.step_line(twice, None)
    line = engine.step_line(capture(1, rows({"a": 121}, resumed={"a"}), events=[], full=True), None)
    assert line.recomputed_tokens == 120


def test_a_new_row_of_a_request_that_ran_before_is_resumed(assembler):
    """The V2 model runner gets resumed requests as new ones."""
    engine = assembler(full_lines=True)
    engine.step_line(
        capture(0, rows(new={"a": 100}), side_events=came(arrival("a")), events=[], full=True), None
    )
    line = engine.step_line(capture(1, rows(new={"a": 90}, computed={"a": 10}), events=[], full=True), None)
    assert ([row.phase for row in line.requests], line.num_new, line.num_resumed) == (["resumed"], 0, 1)


def test_drafts_are_counted(assembler):
    engine = assembler(drafts=True)
    line = engine.step_line(
        capture(
            0,
            rows({"a": 4, "b": 3}, computed={"a": 9, "b": 9}, drafts={"a": 3, "b": 2}),
            events=[],
            side_events=came(*map(arrival, "ab")),
        ),
        result(900, got=(["a", "b"], [2, 3])),
    )
    assert (line.draft_tokens, line.output_tokens) == (5, 5)
    assert [row.draft_tokens for row in line.requests] == [3, 2]
    end = Finish("a", "STOPPED", 1, 1, 1)
    engine.side_fields(came(finished=[end]))
    assert (end.drafts, end.drafts_accepted, end.drafts_invalid) == (3, 1, None)


def test_totals_begin_with_the_requests_that_are_there_and_end_when_nobody_asks(assembler):
    engine = assembler()
    there = came(arrival("a"), arrival("b", 400), arrival("c", 70))
    engine.step_line(capture(0, rows(new={"a": 100}), side_events=there, events=[]), result(900))
    tally = Tally()
    engine.count_with(tally)
    assert (tally.waits.count.total(), tally.running.count["running"], tally.clock_us) == (2, 1, 150)
    engine.step_line(capture(1, rows({"a": 1}, computed={"a": 100}), events=[]), result(10_900))
    engine.count_with(None)
    engine.step_line(capture(2), result(20_900))
    assert (tally.steps, tally.tokens["decode"]) == (1, 1)


def test_histories_begin_with_the_clock_of_the_recording_and_end_when_nobody_asks(assembler):
    engine, histories = assembler(hash_ids=True), Histories()
    engine.follow_with(histories)
    assert engine.histories is histories
    assert (histories.wall_anchor_us, histories._written_id("a")) == (17, hashed("a"))
    engine.follow_with(None)
    assert engine.histories is None


def test_a_request_that_is_left_out_keeps_its_computed_tokens(assembler):
    engine = assembler()
    engine.step_line(
        capture(0, rows(new={"a": 84}, computed={"a": 16}), side_events=came(arrival("a")), events=[]),
        result(900),
    )
    engine.step_line(capture(1, rows(), events=[]), result(10_900))
    assert [(entry.request_id, entry.state, entry.computed_tokens) for entry in engine.begin_anew()[2]] == [
        ("a", "running", 100)
    ]


@pytest.mark.parametrize(("vllms_count", "counts"), [(None, [1, 2]), (4, [4, 4])])
def test_preemptions_are_counted_if_vllm_does_not_count_them(assembler, vllms_count, counts):
    engine = assembler()
    engine.step_line(capture(0, rows(new={"a": 9}), side_events=came(arrival("a", 9)), events=[]), None)
    for step, count in enumerate(counts, start=1):
        lost = Preemption("a", lost_tokens=9, num_preemptions=vllms_count)
        engine.step_line(capture(step, rows(), preempted=[(lost, 10)], events=[]), None)
        [entry] = engine.begin_anew()[2]
        assert (entry.num_preemptions, entry.lost_tokens, entry.computed_tokens) == (count, 9, 0)


def test_requests_that_dropped_steps_admitted_run_after_them(assembler):
    engine, tally = assembler(drafts=True), Tally()
    engine.count_with(tally)
    there = came(arrival("a"), arrival("b"))
    engine.step_line(capture(0, rows(new={"a": 100}), side_events=there, events=[], waiting=(1, 0)), None)
    engine.dropped(Dropped(last_step=1, end_ns=at(10_200), steps=1))
    both = rows({"a": 1, "b": 1}, computed={"a": 101, "b": 100})
    line = engine.step_line(capture(2, both, full=True, events=[]), None)
    assert line.waiting_tokens_after == 0
    assert (tally.waits.count.total(), tally.running.count["running"]) == (0, 2)
    ends = [Finish("a", "STOPPED", 30_000, 100, 2), Finish("b", "STOPPED", 30_000, 100, 2)]
    engine.step_line(
        capture(3, rows(new={"c": 70}), side_events=came(arrival("c", 70), finished=ends), events=[]), None
    )
    assert [end.drafts for end in ends] == [None, None]
    engine.step_line(
        capture(4, rows({"c": 3}, computed={"c": 70}, drafts={"c": 2}), events=[]),
        result(40_900, (["c"], [3])),
    )
    end = Finish("c", "STOPPED", 50_000, 70, 4)
    engine.step_line(capture(5, rows(), side_events=came(finished=[end]), events=[]), None)
    assert (end.drafts, end.drafts_accepted) == (2, 2)


def test_waiting_tokens_are_unknown_where_vllm_counts_other_requests(assembler):
    line = assembler().step_line(
        capture(0, rows(), side_events=came(arrival("a")), waiting=(1, 2), events=[]), None
    )
    assert line.waiting_tokens_after is None


def test_a_request_that_leaves_gets_the_times_of_its_life(assembler):
    engine = assembler()
    engine.step_line(
        capture(0, rows(new={"a": 84}, computed={"a": 16}), side_events=came(arrival("a")), events=[]),
        result(900),
    )
    engine.step_line(capture(1, rows({"a": 1}, computed={"a": 100}), events=[]), result(10_900))
    end = Finish("a", "LENGTH_CAPPED", 11_000, 100, 2)
    line = engine.step_line(capture(2, rows(), side_events=came(finished=[end]), events=[]), None)
    assert line["finished"] == [
        Finish(
            "a",
            "LENGTH_CAPPED",
            11_000,
            100,
            2,
            arrived_us=-5,
            queued_us=0,
            scheduled_us=0,
            first_token_us=900,
            last_token_us=10_900,
            cached_tokens=16,
        )
    ]


@pytest.mark.parametrize(
    ("trial_ids", "name", "trial"),
    [
        (True, "t3-7", 3),
        (True, "t12-0", 12),
        (True, "xt3-7", None),
        (True, "t-7", None),
        (False, "t3-7", None),
    ],
)
def test_the_trial_is_in_the_ids_of_schedtrace_run(assembler, trial_ids, name, trial):
    engine = assembler(trial_ids=trial_ids)
    assert (
        engine.step_line(capture(0, rows(), side_events=came(arrival(name)), events=[]), None).trial == trial
    )


def test_ids_are_hashed_wherever_they_stand(assembler):
    engine = assembler(hash_ids=True)
    engine.step_line(capture(0, rows(new={"v": 9}), side_events=came(*map(arrival, "avf")), events=[]), None)
    inferred = [Exit("waiting", "break", "kv_blocks", "a", 5), Exit("waiting", "break", "kv_blocks", None)]
    happened = Happened([Admission("a")], [RefusedHead("a", [2], 1, [(["v", "f"], [3, 2])], ["f"])])
    taken = capture(1, rows(new={"a": 5}), full=True, events=[], inferred=inferred, happened=happened)
    taken.preempted = [(Preemption("v", 9, "a"), 9)]
    taken.side_events = came(finished=[Finish("f", "ABORTED", 1, 1, 1)])
    line = engine.step_line(taken, None)
    a, v, f = (assemble.WrittenIds(hash_ids=True)[name] for name in "avf")
    assert len({a, v, f, *"avf"}) == 6
    assert [row.request_id for row in line.requests] == [a]
    assert [(victim.request_id, victim.for_request_id) for victim in line.preempted] == [(v, a)]
    assert [one.request_id for one in line.exits] == [a, None]
    assert [one.request_id for one in line.finished] == [f]
    assert [one.request_id for one in line.admitted] == [a]
    [refusal] = line.refusals
    assert isinstance(refusal, HeadRefusal)
    assert (refusal.request_id, refusal.holders, refusal.finished_holders) == (a, [v, f], [f])
    assert [row.request_id for row in line.changes.added] == [a]


def test_what_clients_chose_is_written_within_bounds(assembler):
    huge = 10**30
    wide = arrival("a", priority=-huge, max_tokens=huge, min_tokens=huge, logprobs=huge, lora="l" * 300)
    [written] = assembler().step_line(capture(0, rows(), side_events=came(wide), events=[]), None).arrived
    limit = 10**18 - 1
    assert (written.priority, written.max_tokens, written.min_tokens, written.logprobs) == (
        -limit, limit, limit, limit,
    )  # fmt: skip
    assert written.prompt_logprobs is None
    assert len(written.lora) < 256


def test_facts_of_the_state_are_fields_of_the_step(assembler):
    engine = assembler()
    state = tuple(range(len(FIELDS)))
    line = engine.step_line(capture(0, rows(), state=state, events=[]), None)
    assert [getattr(line, name) for name in FIELDS] == list(state)
    other = tuple(range(1, len(FIELDS) + 1))
    line = engine.step_line(capture(1, rows(), state=other, events=[], full=True), None)
    assert [getattr(line, name) for name in FIELDS] == list(other)


def test_every_request_that_shares_an_exit_is_written_as_a_hash(assembler, monkeypatch):
    shared = Exit("running", "continue", "output_in_flight", "a", 9, also=[AlsoSkipped("b", 8)])
    monkeypatch.setattr(assemble, "to_lines", lambda *_: ([shared], []))
    line = assembler(hash_ids=True).step_line(capture(0, rows(), events=["any"]), None)
    assert [line.exits[0].request_id, line.exits[0].also] == [hashed("a"), [AlsoSkipped(hashed("b"), 8)]]


def test_exits_stay_while_nothing_else_is_noted_and_the_budget_is_the_same(assembler, monkeypatch):
    noted = []

    def to_lines(events, remaining, threshold):
        noted.append((list(events), remaining, threshold))
        return [Exit("waiting", "break", events[0], "a", remaining)], [ChunkCap("a", "lora", 9, 5)]

    monkeypatch.setattr(assemble, "to_lines", to_lines)
    engine = assembler(long_prefill_threshold=77)
    first = engine.step_line(capture(0, rows(new={"a": 5}), events=["kv_blocks"]), None)
    assert first.exits == [Exit("waiting", "break", "kv_blocks", "a", 995)]
    assert first.caps == [ChunkCap("a", "lora", 9, 5)]
    engine.step_line(capture(1, rows({"a": 1}, computed={"a": 5}), events=["kv_blocks"]), None)
    assert "exits" not in engine.step_line(capture(2), None)
    assert noted == [(["kv_blocks"], 995, 77), (["kv_blocks"], 999, 77)]


def drafted(got, invalid=None):
    """``finish.drafts, .drafts_accepted, .drafts_invalid`` of request a, which had 3 drafts in one step."""
    lives = RequestLives(drafts=True, invalid=True)
    lives.note_arrival(Arrival("a", 0, 0, 10))
    lives.got_drafts(Result(0, 0, got, invalid=invalid), {"a": 3, "gone": 2})
    finish = Finish("a", "STOPPED", 0, 10, 4)
    lives.note_finish(finish)
    return finish.drafts, finish.drafts_accepted, finish.drafts_invalid


@pytest.mark.parametrize(
    ("got", "accepted"),
    [
        ((["a"], [4]), 3),
        ((["a"], [3]), 2),
        ((["a"], [1]), 0),
        ((["a"], [0]), 0),
        ((["a"], None), 0),
        ((["b"], [4]), 0),
        (ALL, 0),
    ],
)
def test_every_token_after_the_first_was_an_accepted_draft(got, accepted):
    assert drafted(got) == (3, accepted, 0)


def test_drafts_that_the_grammar_forbade_are_counted():
    assert drafted((["a"], [2]), invalid={"a": 1, "gone": 2}) == (3, 1, 1)
