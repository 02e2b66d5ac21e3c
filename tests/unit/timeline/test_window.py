"""A part of a trace: four steps of 100 us, of which a waits in the first three."""

import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.rules import RULES
from schedtrace.errors import UsageError
from schedtrace.model.causes import Cause
from schedtrace.model.trace_facts import Control
from schedtrace.timeline.frames import Demand
from schedtrace.timeline.window import Window, windowed
from tests.makers import arrival, finish, step


def at(number, **fields):
    return step(number, start=1000 + 100 * number, back=100, **fields)


@pytest.fixture
def view(view_of):
    waits = {"got": {"x": 10}, "waiting": 1, "ended": Cause.KV_BLOCKS}
    return view_of(
        at(0, **waits, arrived=[arrival("a", None, 1000), arrival("x", None, 1000)]),
        at(1, **waits),
        at(2, **waits),
        at(3, got={"a": 100}, new="a", finished=[finish("x", finished_us=1300)]),
        at(4, finished=[finish("a", finished_us=1400)]),
    )


@pytest.mark.parametrize(
    ("window", "steps"),
    [
        (Window(), [0, 1, 2, 3, 4]),
        (Window(begin_us=1100), [1, 2, 3, 4]),
        (Window(begin_us=1101), [2, 3, 4]),
        (Window(end_us=1200), [0, 1]),
        (Window(begin_us=1100, end_us=1200), [1]),
        (Window(last_us=150), [4]),
        (Window(end_us=1300, last_us=100), [2]),
        (Window(last_us=10_000), [0, 1, 2, 3, 4]),
        (Window(begin_us=11_000), []),
    ],
)
def test_the_steps_that_began_in_it(view, window, steps):
    assert windowed(view, window).steps["step"].to_list() == steps


def test_states_are_cut_and_keep_their_causes(view):
    cut = windowed(view, Window(begin_us=1150, end_us=1350))
    waiting = cut.request_states.filter(cut.request_states["request_id"] == "a")
    rows = waiting.select("begin_us", "end_us", "state", "cause").rows()
    assert rows == [(1150, 1300, "waiting", "kv_blocks"), (1300, 1350, "prefill", None)]
    assert cut.end_us == 1350


def test_what_the_load_asks_for_is_not_cut(view_of):
    sizes = {"prompt_tokens": 20, "output_tokens": 13}
    view = view_of(
        at(0, got={"x": 10}, waiting=3, finished=[finish("x", finished_us=1050, **sizes)]),
        at(1, got={"y": 10}, waiting=1),
        at(2, got={"y": 10}, finished=[finish("y", finished_us=1250, prompt_tokens=1, output_tokens=0)]),
        block_size=16,
    )
    whole = Demand(requests=4, ended=1, blocks=3)  # 33 tokens; y produced none
    assert (view.demand, windowed(view, Window(begin_us=1150)).demand) == (whole, whole)


def test_demands_of_parts_make_that_of_the_whole():
    parts = [Demand(4, 2, 10), Demand(7, 0, 0), Demand(5, 2, 20)]
    assert sum(parts, Demand()) == Demand(7, 4, 30)
    assert sum(parts, Demand()).blocks_each == 7.5
    assert Demand(7, 3, 0).blocks_each is None


def test_who_came_and_went_in_it(view):
    early, late = windowed(view, Window(end_us=1300)), windowed(view, Window(begin_us=1350))
    assert early.finishes["request_id"].to_list() == ["x"]
    assert late.finishes["request_id"].to_list() == ["a"]
    assert late.arrivals["request_id"].to_list() == ["a"]


def test_exits_and_charges_are_of_it_alone(view):
    cut = windowed(view, Window(begin_us=1100, end_us=1200))
    assert cut.exits["step"].to_list() == [1]
    assert cut.charges.filter(cut.charges["charge"] == "kv_blocks")["time_us"].to_list() == [100]


def test_a_trace_without_steps_has_no_window(view_of):
    assert windowed(view_of(), Window(end_us=1005)).steps.is_empty()


def test_a_window_between_two_steps_charges_its_waits_to_their_cause(view):
    cut = windowed(view, Window(begin_us=1150, end_us=1190))
    assert cut.steps.is_empty()
    assert cut.charges.select("charge", "time_us").rows() == [("kv_blocks", 40)]
    [finding] = RULES["kv-bound"](cut)
    assert finding.evidence.largest_holder is None


def test_of_several_ranks_a_window_is_on_the_first_ones_clock(view):
    view.offset_us = 50  # its clock began 50 us later than the first rank's
    assert windowed(view, Window(begin_us=1150, end_us=1251)).steps["step"].to_list() == [1, 2]


def test_a_rank_whose_clock_began_before_the_first_ones_is_whole_without_a_begin(view):
    view.offset_us = -1150
    assert windowed(view, Window(end_us=200)).steps["step"].to_list() == [0, 1, 2, 3]
    assert windowed(view, Window(begin_us=0, end_us=200)).steps["step"].to_list() == [2, 3]


def test_a_window_within_a_pause_has_the_pause_and_who_waited(run_of, recorded_words):
    pause = Control("pause_state", 1450, detail="PAUSED_ALL")
    arrivals = [arrival("a", None, 1000), arrival("b", None, 1000)]
    ran = at(0, got={"a": 10}, new="a", waiting=1, ended=Cause.MAX_NUM_SEQS, arrived=arrivals)
    resumed = step(
        1,
        start=900_000,
        got={"a": 1},
        waiting=1,
        ended=Cause.MAX_NUM_SEQS,
        controls=[pause, Control("pause_state", 890_000, detail="UNPAUSED")],
    )
    run = run_of("r", ran, resumed)
    report = analyze_run(run, Window(begin_us=200_000, end_us=300_000))
    [finding, *_] = report.findings
    assert (finding.code, finding.cause, finding.share_frac) == ("interruption", "paused", 1.0)
    recorded_words(report.verdict[0])
    with pytest.raises(UsageError, match="no step began in --from 2s, and no request was there; its 2 steps"):
        analyze_run(run, Window(begin_us=2_000_000))
