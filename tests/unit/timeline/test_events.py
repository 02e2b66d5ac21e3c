"""``timeline.events``: interruptions, in steps of 1 ms that take 970 us on the device."""

import resource

import polars as pl
import pytest

from schedtrace.model.causes import INTERRUPTIONS
from schedtrace.model.trace import Notice
from schedtrace.model.trace_facts import Control, Stalled
from schedtrace.timeline.engine_states import slow_on_device
from schedtrace.timeline.events import EPISODE, KINDS, PERIODIC, SCATTERED, _split, cost_us, standstills
from tests.makers import arrival, finish, step


def steady(count=40, *, longer=None, later=None, host=None, **more):
    """A request decodes.

    ``longer``, ``host`` and ``later``: step to what it, its ``schedule()`` or the gap before takes more.
    """
    lines, start = [], 0
    for number in range(count):
        start += (later or {}).get(number, 0)
        took = 10 + (host or {}).get(number, 0)
        back = took + 970 + (longer or {}).get(number, 0)
        first = number == 0
        lines.append(
            step(
                number,
                start=start,
                took=took,
                back=back,
                got={"a": 1},
                new="a" if first else "",
                decode_tokens=1,
                arrived=[arrival("a", None, 0)] if first else [],
                controls=more.get("controls", []) if number == more.get("told", 0) else [],
            )
        )
        start += back + 20
    return lines


def kinds(events):
    return events.select("kind", "part", "step").rows()


def test_steady_steps_have_none(view_of):
    assert view_of(*steady()).events.is_empty()


@pytest.mark.parametrize(
    ("where", "part"), [("longer", "device"), ("host", "schedule"), ("later", "host_gap")]
)
def test_every_tenth_step_is_slow(view_of, where, part):
    slow = dict.fromkeys((9, 19, 29, 39), 9_700)
    events = view_of(*steady(**{where: slow})).events
    assert kinds(events) == [("periodic", part, number) for number in slow]
    assert events["period_steps"].to_list() == [10] * 4


def test_a_begin_and_an_end(view_of):
    """970 us are what such a step takes: the rest is too long."""
    [event] = view_of(*steady(longer={20: 9_700})).events.to_dicts()
    assert (event["kind"], event["step"]) == ("scattered", 20)
    assert (event["begin_us"], event["end_us"]) == (20_000 + 10 + 970, 20_000 + 10 + 970 + 9_700)
    assert event["factor"] == pytest.approx(11)


@pytest.mark.parametrize(("slow", "kind"), [((0, 1), "first_steps"), ((20, 21, 22, 24), "episode")])
def test_slow_steps_at_the_beginning_and_in_a_row(view_of, slow, kind):
    events = view_of(*steady(longer=dict.fromkeys(slow, 5_000))).events
    assert kinds(events) == [(kind, "device", number) for number in slow]


def test_larger_steps_do_not_make_a_slower_device(view_of):
    """From step 60 on twice the tokens, which nobody saw before; then as before."""
    lines = steady(100, longer=dict.fromkeys(range(60, 99), 970))
    for number in range(60, 99):
        lines[number].decode_tokens = 2
    assert view_of(*lines).events.is_empty()


def asynchronous(works):
    """A worker takes each batch when the one before it begins; works: prefill tokens, and the output's time.

    A decode takes 1,000 us and 100 tokens of prefill as much again.
    """
    lines, ends = [], [0, 0]
    for number, (prefill, end) in enumerate(works):
        start = ends[-2]
        lines.append(
            step(
                number,
                start=start,
                took=10,
                back=end - start,
                got={"a": max(1, prefill)},
                new="a" if not number else "",
                prefill_tokens=prefill,
                decode_tokens=int(not prefill),
                execute_after_us=10,
                execute_us=end - start - 10,
                arrived=[arrival("a", None, 0)] if not number else [],
            )
        )
        ends.append(end)
    return lines


def batches(prefills, late=None, count=60):
    """Yield prefill tokens and the end of each of so many batches, which is late by so much, seen alone."""
    end = 0
    for number in range(count):
        prefill = prefills.get(number, 0)
        end += 1_000 + 10 * prefill
        yield prefill, end + (late or {}).get(number, 0)


def test_an_asynchronous_batch_that_waits_for_a_large_one_is_not_slow(view_of):
    """The worker has the decode of step 21 for 31 ms, 30 of them while it computes step 20."""
    timeline = view_of(*asynchronous(batches({20: 3000})))
    assert timeline.steps["execute_us"][21] == 31_990
    assert timeline.steps["execution_us"][20:23].to_list() == [31_000, 1_000, 1_000]
    assert timeline.events.is_empty()


def test_an_end_that_is_seen_late_shortens_the_next_batch(view_of):
    """The output of step 20 is taken while the large batch after it is prepared, 5 ms after its end."""
    prefills = dict.fromkeys((21, 31, 41), 3000)
    timeline = view_of(*asynchronous(batches(prefills, {20: 5_000})))
    assert timeline.steps["execution_us"][20:22].to_list() == [1_000, 31_000]
    assert timeline.events.is_empty()
    alone = view_of(*asynchronous(batches({31: 3000, 41: 3000}, dict.fromkeys(range(20, 60), 5_000))))
    assert kinds(alone.events) == [("scattered", "device", 20)]
    assert alone.host_spans.is_empty()


@pytest.mark.parametrize(("following", "factor"), [(21, 10.5), (22, 11.0)])
def test_an_end_that_is_seen_late_shortens_only_the_step_right_after_it(following, factor):
    """Step 20 takes ten steps more, and the next one that is known half a step less."""
    numbers = [*range(21), *range(following, following + 20)]
    steps = pl.DataFrame({"step": numbers, "trial": 0, "prefill_tokens": 0, "decode_tokens": 1}).with_columns(
        device_us=pl.when(step=20).then(11_000).when(step=following).then(500).otherwise(1_000),
        device_end_us=pl.col("step") * 1_000,
        overlap_us=5_000,
        used_tokens=1,
        context_tokens=0,
    )
    assert slow_on_device(steps)["factor"].to_list() == pytest.approx([factor], rel=0.01)


def test_the_end_of_a_decode_that_is_seen_late_belongs_to_the_prefill_after_it(view_of):
    """Preparing each prefill takes the worker 20 ms more than computing it, and it sees step 19 end then."""
    ends = [
        (prefill, end + 20_000 * (number >= 20)) for number, (prefill, end) in enumerate(batches({20: 1000}))
    ]
    ends[19] = (0, ends[19][1] + 15_000)
    timeline = view_of(*asynchronous(ends))
    assert timeline.steps["busy_us"][18:22].to_list() == [1_000, 1_000, 31_000, 1_000]
    assert timeline.steps["execution_us"][18:22].to_list() == [1_000, 1_000, 31_000, 1_000]
    assert timeline.events.is_empty()


@pytest.mark.parametrize(
    ("decodes", "execution_us", "busy_us"),
    [(1, [None, None], [11_000, 2_000]), (0, [12_500, 500], [12_500, 500])],
)
def test_of_two_prefills_only_the_sum_is_measured(view_of, decodes, execution_us, busy_us):
    """The end of step 20 is seen 1.5 ms late; a decode and a prefill in step 21 never take half a decode."""
    works = list(batches({20: 1000, 21: 100}, {20: 1_500}))
    lines = asynchronous(works)
    lines[21].decode_tokens = decodes
    steps = view_of(*lines).steps
    assert steps["execution_us"][19:23].to_list() == [1_000, *execution_us, 1_000]
    assert steps["busy_us"][19:23].to_list() == [1_000, *busy_us, 1_000]


def test_without_the_workers_clock_nothing_tells_that_an_end_was_seen_late(view_of):
    lines = asynchronous(
        [(100 * (number == 20), 1_000 * number + 20_000 * (number >= 19)) for number in range(60)]
    )
    for line in lines:
        line.execute_after_us = line.execute_us = None
    assert view_of(*lines).steps["busy_us"][19:21].to_list() == [21_000, 1_000]


def test_a_large_batch_that_seems_short_does_not_make_the_others_slow(view_of):
    """The first large batch ends with the small one before it, as on a GPU that loads its kernels."""
    prefills = {0: 1000, 1: 15_000} | dict.fromkeys((20, 40), 15_000)
    timeline = view_of(*asynchronous(batches(prefills, {0: 145_000})))
    assert timeline.steps["execution_us"][1] == 6_000
    assert 20 not in timeline.events["step"].to_list()
    assert 40 not in timeline.events["step"].to_list()


def test_no_call_of_schedule(view_of):
    timeline = view_of(*steady(later={20: 30_000}))
    [event] = timeline.events.to_dicts()
    assert (event["kind"], event["step"], event["factor"]) == ("no_call", 20, pytest.approx(30_020 / 20))
    assert cost_us(timeline.request_states, timeline.engine_states, timeline.events) == 30_000


@pytest.mark.parametrize(("paused", "running", "silent"), [(2, 0, True), (1, 0, False), (2, 1, False)])
def test_sessions_that_wait_for_their_clients_need_no_call(view_of, paused, running, silent):
    """vLLM calls schedule() only for other requests than these, of which step 19 leaves two."""
    lines = steady(later={20: 30_000})
    lines[19].num_running_after, lines[19].num_waiting_after, lines[19].sessions_paused = running, 2, paused
    assert view_of(*lines).events.is_empty() is silent


def test_of_steps_that_were_not_recorded_nobody_knows(view_of):
    lines = steady(later={20: 30_000})
    assert view_of(*lines[:19], *lines[20:]).events.is_empty()


def test_twice_as_long_is_far_and_less_is_not(view_of):
    assert view_of(*steady(longer={20: 960})).events.is_empty()
    assert view_of(*steady(longer={20: 980})).events.height == 1


def test_a_step_with_more_work_is_not_slow(view_of):
    """Five prefills of one size: each is as the others, whatever a model of 35 decodes says."""
    lines = steady(longer=dict.fromkeys((5, 12, 13, 26, 30), 9_700))
    for number in (5, 12, 13, 26, 30):
        lines[number].prefill_tokens, lines[number].decode_tokens = 500, 0
    assert view_of(*lines).events.is_empty()


@pytest.mark.parametrize(("other", "slow"), [({}, []), ({12: 530}, [26])])
def test_a_step_unlike_all_others_takes_no_longer_than_smaller_ones_together(view_of, other, slow):
    """A prefill of 500 tokens takes 10,670 us, a decode of one token 970, another such prefill 1,500."""
    lines = steady(longer={26: 9_700} | other)
    for number in (26, *other):
        lines[number].prefill_tokens, lines[number].decode_tokens = 500, 0
        lines[number].remaining_budget = lines[number].token_budget - 500
    assert view_of(*lines).events["step"].to_list() == slow


def test_a_step_is_compared_with_those_around_it(view_of, monkeypatch):
    """Most of nine like it took as long, but long before; the four around it did not."""
    long_ago, around = (2, 5, 8, 12, 15), (84, 86, 92, 94)
    lines = steady(100, longer=dict.fromkeys((*long_ago, 90), 9_700))
    for number in (*long_ago, *around, 90):
        lines[number].decode_tokens = 2
    assert 90 not in view_of(*lines).events["step"].to_list()
    monkeypatch.setattr("schedtrace.timeline.engine_states.NEAR", 30)
    assert 90 in view_of(*lines).events["step"].to_list()


def test_a_pause_of_all(view_of):
    """It lasts from 20.5 to 50 ms, and the step in flight goes on until 20.98."""
    controls = [
        Control("pause_state", 20_500, detail="PAUSED_ALL"),
        Control("pause_state", 50_000, detail="UNPAUSED"),
    ]
    timeline = view_of(*steady(later={21: 29_000}, controls=controls, told=21))
    [event] = timeline.events.to_dicts()
    assert (event["kind"], event["step"], event["detail"]) == ("paused", 21, "PAUSED_ALL")
    assert (event["begin_us"], event["end_us"]) == (20_500, 50_000)
    assert timeline.host_spans.rows() == [(20_980, 50_000)]
    assert cost_us(timeline.request_states, timeline.engine_states, timeline.events) == 50_000 - 20_980


@pytest.mark.parametrize(("kind", "blocked"), [("engine", [(20_000, 50_000)]), ("worker", [])])
def test_a_stall_keeps_the_engines_thread_unless_it_is_the_workers(view_of, kind, blocked):
    stall = Stalled(kind=kind, since_us=20_000, until_us=50_000, sentence="it stood still")
    told = Notice(at_us=60_000, message=stall.sentence, stalled=stall)
    timeline = view_of(*steady(later={20: 30_000}), told)
    assert timeline.events["kind"].to_list() == ["stalled"]
    assert timeline.host_spans.rows() == blocked


def test_a_short_trace_tells_of_a_pause(view_of):
    controls = [Control("pause_state", 1_500, detail="PAUSED_ALL")]
    [event] = view_of(*steady(3, controls=controls)).events.to_dicts()
    assert (event["kind"], event["begin_us"], event["end_us"]) == ("paused", 1_500, 2_980)


def test_what_was_called(view_of):
    controls = [Control("collective_rpc", 20_980, 29_000, detail="update_weights")]
    [event] = view_of(*steady(later={21: 29_000}, controls=controls, told=21)).events.to_dicts()
    assert (event["kind"], event["detail"]) == ("called", "update_weights")
    assert event["end_us"] - event["begin_us"] == 29_000


def test_a_wait_during_an_interruption_is_charged_to_that(view_of):
    """b waits for a seat from 20 ms on, of which 9.7 ms are one slow step's."""
    lines = steady(longer={20: 9_700})
    for number in range(20, 40):
        lines[number].num_waiting_after = lines[number].num_waiting_before = 1
        lines[number].exits[0].cause = "max_num_seqs"
        lines[number].exits[0].request_id = "b"
    lines[20].arrived = [arrival("b", None, 19_990)]
    lines[39].finished = [finish("b", finished_us=49_000)]
    charges = view_of(*lines).charges
    sums = {charge: rows["time_us"].sum() for (charge,), rows in charges.group_by("charge")}
    assert sums["interrupted"] == 9_700
    assert sums["max_num_seqs"] > 0


def test_parts_of_spans_in_which_the_engine_did_not_step(view_of):
    view = view_of(*steady(4))
    still = view.engine_states.filter(pl.col("state").is_in(["host_gap", "schedule", "update"]))
    (first, *_, last), spans = still.rows(named=True), [(0, 0)]
    spans += [(first["begin_us"] + 1, last["end_us"] - 1), (last["end_us"] - 2, last["end_us"] + 9)]
    found = standstills(
        view.engine_states, pl.DataFrame(spans, schema=["begin_us", "end_us"], orient="row")
    ).rows()
    states = still.select("begin_us", "end_us").rows()
    each = [
        (max(begin, since), min(end, until))
        for begin, end in spans
        for since, until in states
        if since < end and until > begin
    ]
    assert (found, len(found) > still.height) == (each, True)


def test_every_kind_of_interruption_has_its_words():
    """Kinds of slow steps share theirs."""
    assert {*KINDS} - {*INTERRUPTIONS} == {PERIODIC, EPISODE, SCATTERED}


def test_the_pieces_of_a_long_wait_on_a_starved_machine_take_memory_once(view_of):
    """8,000 interruptions of one wait: a copy of their list for each piece would take a gigabyte."""
    timeline = view_of(step(0, start=0), step(1, start=200_000))
    begins = list(range(10, 160_010, 20))
    columns = {"begin_us": begins, "end_us": [begin + 5 for begin in begins], "kind": "starved"}
    row = {
        "request_id": "a",
        "state": "queued",
        "begin_us": 0,
        "end_us": 200_000,
        "begin_step": 0,
        "end_step": 1,
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pieces = _split(timeline, pl.DataFrame([{**row, "cause": None, "tokens": 0}]), pl.DataFrame(columns))
    assert pieces.height == 2 * len(begins) + 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
