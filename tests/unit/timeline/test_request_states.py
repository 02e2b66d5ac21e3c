"""Every moment of every request, once."""

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from schedtrace.model.causes import Cause
from schedtrace.model.delta import Delta
from schedtrace.model.trace import Cpu, Events, Exit, Preemption, Present, ScheduledRequest
from schedtrace.model.trace_facts import SetAside, ThreadTime
from schedtrace.read.run import read_run
from schedtrace.timeline.pieces import cause_runs, placed
from schedtrace.timeline.queue_waits import overtakings
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, run_folder, step

COLUMNS = ("begin_us", "end_us", "state", "cause", "begin_step", "end_step", "tokens")


def of(view, request_id):
    return view.request_states.filter(pl.col("request_id") == request_id).select(COLUMNS).rows()


def skip(request_id, cause=Cause.LORA_CAP, loop="waiting", **fields):
    return Exit(loop, "continue", cause, request_id, 900, **fields)


def end(cause, loop="waiting"):
    return Exit(loop, "break", cause, budget_left=0)


def got(computed, tokens, phase="running", name="a"):
    return [ScheduledRequest(name, computed, tokens, phase)]


def ran(number, computed, tokens, phase="running", **fields):
    """A step of 50 us each 100 us that schedules tokens of ``a``."""
    return step(number, start=100 * number, back=50, requests=got(computed, tokens, phase), **fields)


CAME = [arrival("a", None, queued=60)]


def test_from_the_front_end_to_the_last_token(view_of):
    view = view_of(
        ran(1, 0, 100, "new", arrived=[arrival("a", 20, queued=60)]),
        ran(2, 100, 1),
        step(3, start=300, finished=[finish("a", finished_us=260)]),
    )
    assert of(view, "a") == [
        (20, 60, "front_end", None, None, None, 0),
        (60, 100, "waiting", "next_step", None, None, 0),
        (100, 150, "prefill", None, 1, 1, 100),
        (150, 260, "decode", None, 2, 2, 1),
    ]


def test_who_waits_waits_for_the_end_of_each_steps_loop(view_of):
    view = view_of(
        step(0, start=100, waiting=1, ended=Cause.KV_BLOCKS, arrived=[arrival("a", None, queued=60)]),
        step(1, start=200, waiting=1, ended=Cause.KV_BLOCKS),
        step(2, start=300, waiting=1, ended=Cause.MAX_NUM_SEQS),
        step(3, start=400, back=20, got={"a": 100}, new="a"),
        step(4, start=500, finished=[finish("a", finished_us=420)]),
    )
    assert of(view, "a") == [
        (60, 100, "waiting", "next_step", None, None, 0),
        (100, 300, "waiting", "kv_blocks", 0, 1, 0),
        (300, 400, "waiting", "max_num_seqs", 2, 2, 0),
        (400, 420, "prefill", None, 3, 3, 100),
    ]


def test_who_is_skipped_waits_for_a_cause_of_its_own(view_of):
    arrivals = [arrival("a", None, queued=60), arrival("b", None, queued=60)]
    exits = [skip("a"), end(Cause.KV_BLOCKS)]
    view = view_of(
        step(0, start=100, back=None, waiting=2, ended=Cause.KV_BLOCKS, arrived=arrivals),
        step(1, start=200, back=None, waiting=2, exits=exits),
        step(2, start=300, back=None, waiting=2, ended=Cause.KV_BLOCKS),
        step(3, start=400, back=None, waiting=2, ended=Cause.KV_BLOCKS),
    )
    assert of(view, "a")[1:3] == [
        (100, 200, "waiting", "kv_blocks", 0, 0, 0),
        (200, 300, "waiting", "lora_cap", 1, 1, 0),
    ]
    assert of(view, "b")[1:] == [(100, 500, "waiting", "kv_blocks", 0, 3, 0)]


def test_an_empty_queue_is_no_reason_to_wait(view_of):
    view = view_of(step(0, start=100, waiting=1, arrived=[arrival("a", None, queued=60)]), step(1, start=200))
    assert of(view, "a")[1][2:4] == ("waiting", "other")


def test_a_victim_is_preempted_then_recomputes_until_its_next_token(view_of):
    lost = Preemption("a", 101, for_request_id="b")
    view = view_of(
        ran(1, 0, 100, "new", arrived=CAME),
        ran(2, 100, 1),
        step(3, start=300, preempted=[lost], waiting=1, ended=Cause.PREEMPTED_THIS_STEP),
        step(4, start=400, waiting=1, ended=Cause.KV_BLOCKS),
        # 101 computed tokens are lost, the 102nd was sampled: the next token is back after step 6.
        ran(5, 0, 101, "resumed"),
        ran(6, 101, 1),
        ran(7, 102, 1),
        step(8, start=800, finished=[finish("a", finished_us=760)]),
    )
    assert of(view, "a")[1:] == [
        (100, 150, "prefill", None, 1, 1, 100),
        (150, 300, "decode", None, 2, 2, 1),
        (300, 400, "preempted", "preempted_this_step", 3, 3, 0),
        (400, 500, "preempted", "kv_blocks", 4, 4, 0),
        (500, 650, "recompute", None, 5, 6, 102),
        (650, 760, "decode", None, 7, 7, 1),
    ]


def test_a_victim_that_finds_all_it_lost_in_a_cache_decodes_at_once(view_of):
    view = view_of(
        ran(1, 0, 100, "new", arrived=CAME),
        step(2, start=200, preempted=[Preemption("a", 100)], waiting=1, ended=Cause.PREEMPTED_THIS_STEP),
        ran(3, 100, 1, "resumed"),
        step(4, start=400, finished=[finish("a", finished_us=350)]),
    )
    assert of(view, "a")[3:] == [
        (200, 300, "preempted", "preempted_this_step", 2, 2, 0),
        (300, 350, "decode", None, 3, 3, 1),
    ]


def test_a_running_request_that_gets_nothing_is_stalled_for_what_ended_the_loop(view_of):
    view = view_of(
        ran(1, 0, 60, "new", arrived=CAME),
        step(2, start=200, running=1, ended=end(Cause.TOKEN_BUDGET, "running")),
        step(3, start=300, running=1, ended=skip("a", Cause.PREFILL_THROTTLED, "running")),
        ran(4, 60, 40),
        step(5, start=500, finished=[finish("a", finished_us=450)]),
    )
    assert of(view, "a")[1:] == [
        (100, 200, "prefill", None, 1, 1, 60),
        (200, 300, "stalled", "token_budget", 2, 2, 0),
        (300, 400, "stalled", "prefill_throttled", 3, 3, 0),
        (400, 450, "prefill", None, 4, 4, 40),
    ]


def test_a_step_that_passes_over_it_for_its_output_in_flight_takes_nothing_from_it(view_of):
    passed = skip("a", Cause.OUTPUT_IN_FLIGHT, "running")
    view = view_of(
        ran(1, 0, 100, "new", arrived=CAME),
        step(2, start=120, running=1, ended=passed),
        step(3, start=200, finished=[finish("a", finished_us=160)]),
    )
    assert of(view, "a")[1:] == [(100, 160, "prefill", None, 1, 1, 100)]


def test_with_a_step_in_flight_it_stalls_only_once_its_output_is_back(view_of):
    view = view_of(
        ran(1, 0, 60, "new", arrived=CAME),
        step(2, start=110, running=1, ended=end(Cause.TOKEN_BUDGET, "running")),
        ran(3, 60, 40),
        step(4, start=400, finished=[finish("a", finished_us=360)]),
    )
    assert of(view, "a")[1:3] == [
        (100, 150, "prefill", None, 1, 1, 60),
        (150, 300, "stalled", "token_budget", 2, 2, 0),
    ]


def test_an_output_that_comes_after_its_preemption_begins_no_decode(view_of):
    view = view_of(
        step(1, start=100, back=250, requests=got(0, 100, "new"), arrived=CAME),
        step(2, start=200, back=250, requests=got(100, 1)),
        step(3, start=300, preempted=[Preemption("a", 100)], waiting=1, ended=Cause.PREEMPTED_THIS_STEP),
        step(4, start=400, waiting=1, ended=Cause.KV_BLOCKS),
    )
    assert [row[:3] for row in of(view, "a")[1:3]] == [(100, 300, "prefill"), (300, 300, "decode")]
    assert of(view, "a")[3][:4] == (300, 400, "preempted", "preempted_this_step")


def test_who_is_aborted_in_the_queue_waited_until_then(view_of):
    gone = [finish("a", "ABORTED", finished_us=250)]
    view = view_of(
        step(1, start=100, waiting=1, ended=Cause.KV_BLOCKS, arrived=CAME),
        step(2, start=200, waiting=1, ended=Cause.KV_BLOCKS),
        step(3, start=300, finished=gone),
    )
    assert of(view, "a")[1:] == [(100, 250, "waiting", "kv_blocks", 1, 2, 0)]


def test_a_request_that_ran_when_the_trace_began_decodes_from_its_first_step(view_of):
    view = view_of(ran(1, 130, 1), ran(2, 131, 1))
    assert of(view, "a") == [(100, 300, "decode", None, 1, 2, 2)]


def test_the_warm_ups_requests_are_in_no_state(view_of):
    lines = [
        step(1, trial=0, got={"w": 5}, new="w", arrived=[arrival("w", 0)]),
        step(2, trial=1, got={"w": 1, "a": 5}, new="a", arrived=[arrival("a", 1)], finished=[finish("w")]),
    ]
    states = view_of(*lines, trial_ids=True).request_states
    assert states["request_id"].unique().to_list() == ["a"]
    assert states["trial"].unique().to_list() == [1]


def test_nothing_recorded_is_no_state(view_of):
    assert view_of().request_states.is_empty()
    assert view_of(step(0)).request_states.is_empty()


LETTERS = "abc"
STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "every": st.integers(1, 300),
            "back": st.one_of(st.none(), st.integers(0, 700)),
            "got": st.lists(st.sampled_from(LETTERS), unique=True),
            "phase": st.sampled_from(["new", "resumed", "running"]),
            "tokens": st.integers(0, 120),
            "lost": st.lists(st.sampled_from(LETTERS), unique=True, max_size=1),
            "came": st.lists(st.sampled_from(LETTERS), unique=True),
            "gone": st.lists(st.sampled_from(LETTERS), unique=True, max_size=1),
            "ended": st.sampled_from([Cause.KV_BLOCKS, Cause.QUEUE_EMPTY, None]),
            "skipped": st.lists(st.sampled_from(LETTERS), unique=True),
        }
    ),
    max_size=12,
)


@given(STEPS)
def test_whatever_a_trace_says_states_follow_each_other_without_gap_or_overlap(tmp_path_factory, turns):
    """Also where it contradicts itself: no order of events is taken for granted."""
    now, lines = 0, []
    for number, turn in enumerate(turns):
        now += turn["every"]
        rows = [ScheduledRequest(name, 0, turn["tokens"], turn["phase"]) for name in turn["got"]]
        exits = [skip(name) for name in turn["skipped"]] + ([end(turn["ended"])] if turn["ended"] else [])
        lines.append(
            step(
                number,
                start=now,
                took=7,
                back=turn["back"],
                requests=rows,
                total_requests=len(rows),
                exits=exits,
                preempted=[Preemption(name, 50) for name in turn["lost"]],
                arrived=[arrival(name, now - 30, queued=now - 9) for name in turn["came"]],
                finished=[finish(name, finished_us=now - 5) for name in turn["gone"]],
            )
        )
    run = read_run(run_folder(tmp_path_factory.mktemp("run"), *lines))
    view = make_timeline(run.traces[0])
    for _, rows in view.request_states.group_by("request_id"):
        assert rows["begin_us"].to_list()[1:] == rows["end_us"].to_list()[:-1]
        assert (rows["end_us"] >= rows["begin_us"]).all()
    engine = view.engine_states
    assert engine["begin_us"].to_list()[1:] == engine["end_us"].to_list()[:-1]
    assert (engine["end_us"] > engine["begin_us"]).all()


def test_one_that_was_set_aside_is_neither_stalled_nor_preempted(view_of):
    view = view_of(
        ran(1, 0, 100, "new", arrived=CAME),
        ran(2, 100, 1),
        step(3, start=300, waiting=1, ended=Cause.MAX_NUM_SEQS, set_aside=[SetAside("a", 1, blocks_held=7)]),
        step(4, start=400, waiting=1, ended=Cause.MAX_NUM_SEQS),
        ran(5, 101, 1, "resumed"),
        step(6, start=600, finished=[finish("a", finished_us=560)]),
    )
    assert of(view, "a")[-3:] == [
        (150, 300, "decode", None, 2, 2, 1),
        (300, 500, "set_aside", "max_num_seqs", 3, 4, 0),
        (500, 560, "decode", None, 5, 5, 1),
    ]
    assert view.mismatches.is_empty()


def test_a_later_arrival_that_is_admitted_first_overtakes(view_of):
    arrivals = [arrival(name, None, queued=50 + number) for number, name in enumerate("abc")]
    view = view_of(
        step(1, start=100, waiting=2, ended=Cause.MAX_NUM_SEQS, got={"b": 9}, new="b", arrived=arrivals),
        step(2, start=200, waiting=1, ended=Cause.MAX_NUM_SEQS, got={"c": 9}, new="c"),
        step(3, start=300, got={"a": 9}, new="a"),
    )
    assert overtakings(view, view.tables.gone) == 2


def test_the_time_in_the_queue_ends_with_the_first_admission(view_of):
    """a comes 6 ms before step 1 and is taken by step 3; what it waits after a preemption is not counted."""
    waits = {"got": {"r": 1}, "waiting": 1, "ended": Cause.KV_BLOCKS}
    view = view_of(
        step(0, got={"r": 1}),
        step(1, **waits, arrived=[arrival("a", 4000, 4000)]),
        step(2, **waits),
        step(3, got={"a": 100}, new="a"),
        step(4, **waits, preempted=[Preemption("a", 100)]),
        step(5, got={"a": 100}, resumed="a"),
    )
    assert view.queue_times.select("request_id", "step", "queue_us").rows() == [("a", 3, 26_000)]


def test_a_request_decodes_once_its_first_token_is_back_although_the_trace_ends_there(view_of):
    view = view_of(ran(1, 0, 100, "new", arrived=CAME, update_us=80), closed=False)
    assert of(view, "a")[-2:] == [
        (100, 150, "prefill", None, 1, 1, 100),
        (150, 230, "decode", None, None, None, 0),
    ]


def test_a_request_that_ends_with_its_first_token_never_decodes(view_of):
    gone = [finish("a", finished_us=155, output_tokens=1)]
    view = view_of(
        ran(1, 0, 100, "new", arrived=CAME, update_us=80), step(2, start=300, finished=gone), closed=False
    )
    assert of(view, "a")[-1] == (100, 155, "prefill", None, 1, 1, 100)


def test_a_request_that_was_there_prefills_until_its_first_token_is_back(view_of):
    """The file began while the step with the prompt was on the device."""
    there = Present("a", "running", 20, 100, 60, first_token_us=240, computed_tokens=100, output_tokens=1)
    view = view_of(
        Events(at_us=210, present=[there]),
        ran(3, 100, 1),
        step(4, start=400, finished=[finish("a", finished_us=360)]),
    )
    assert of(view, "a") == [
        (210, 240, "prefill", None, None, None, 0),
        (240, 360, "decode", None, 3, 3, 1),
    ]


def test_a_trace_ends_with_its_last_step_where_later_ones_are_lost(view_of):
    """The thread's line proves that the engine lived on; what requests did meanwhile is not known."""
    lost = Delta(step=4, start_us=5000, schedule_us=7)
    later = Cpu(at_us=4000, threads=[ThreadTime("engine", 1, 1, 1, 1)])
    lines = (ran(1, 0, 100, "new", arrived=CAME, update_us=80), later)
    assert of(view_of(*lines, closed=False), "a")[-1][1] == 4000
    assert of(view_of(*lines, lost, closed=False), "a")[-1][1] == 230


RUNS_STEPS = placed(
    pl.DataFrame({"step": range(6), "start_us": range(0, 600, 100), "output_us": range(50, 650, 100)})
)
USUAL = pl.Series(["a", "a", "a", "a", "b", "b"])
WITHIN_A_RUN, OVER_TWO, EMPTY = ("x", 1, 3), ("y", 2, 6), ("z", 4, 4)
SPANS = pl.DataFrame(
    [WITHIN_A_RUN, OVER_TWO, EMPTY],
    schema={"request_id": pl.String, "first": pl.Int64, "end": pl.Int64},
    orient="row",
)


def runs(*named):
    """Return each run as request, first and last place, and cause; ``named``: step, request and cause."""
    columns = {"step": pl.Int64, "request_id": pl.String, "cause": pl.String}
    rows = cause_runs(SPANS, USUAL, pl.DataFrame(named, schema=columns, orient="row"), RUNS_STEPS)
    return rows.select("request_id", "place", "last", "cause").rows()


def test_a_run_begins_and_ends_with_the_span():
    assert runs() == [("x", 1, 2, "a"), ("y", 2, 3, "a"), ("y", 4, 5, "b")]


def test_a_step_that_names_a_request_has_a_run_of_its_own():
    """After it, the usual cause of the next step holds again; a request without a span is left out."""
    assert runs((3, "y", "c"), (2, "x", "c"), (5, "y", "d"), (1, "w", "c")) == [
        ("x", 1, 1, "a"),
        ("x", 2, 2, "c"),
        ("y", 2, 2, "a"),
        ("y", 3, 3, "c"),
        ("y", 4, 4, "b"),
        ("y", 5, 5, "d"),
    ]
