"""One request's life, told from traces made by hand; times in the trace are microseconds, told in ms."""

from itertools import groupby

import pytest

from schedtrace.errors import UsageError
from schedtrace.explain.request import explain_request, find_request, queue_stays
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.printable import capped, hashed
from schedtrace.model.trace import ChunkCap, Events, Exit, Preemption, ScheduledRequest
from schedtrace.model.trace_facts import SetAside
from schedtrace.read.run import read_run
from tests import makers
from tests.makers import arrival, finish, step

FULL = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "a", 900)
SPENT = Exit("waiting", "condition", Cause.TOKEN_BUDGET, "a")


def got(computed, tokens, phase="running", name="a"):
    return [ScheduledRequest(name, computed, tokens, phase)]


@pytest.fixture
def life_of(run_of):
    """``life_of(step(0), ...)``: the life of request a in these steps."""
    return lambda *lines: explain_request(run_of("r", *lines), "a")


def messages(life, what):
    return [event.message for event in life.events if event.what == what]


@pytest.fixture
def life(life_of):
    """Queued at 2 ms, waits for two causes, has two chunks and then three outputs, one of them late."""
    cap = ChunkCap("a", Cap.TOKEN_BUDGET, 100, 60)
    times = {"first_token_us": 60_000, "last_token_us": 73_000, "finished_us": 73_100}
    return life_of(
        step(0, start=5_000, waiting=1, ended=FULL, arrived=[arrival("a", 1_000, 2_000, max_tokens=3)]),
        step(1, start=15_000, waiting=1, ended=FULL),
        step(2, start=30_000, waiting=1, ended=SPENT),
        step(3, start=40_000, back=10_000, requests=got(0, 60, "new"), caps=[cap]),
        step(4, start=50_000, back=10_000, requests=got(60, 40)),
        step(5, start=60_000, back=4_000, requests=got(100, 1)),
        step(6, start=64_000, back=9_000, requests=got(101, 1)),
        step(7, start=80_000, finished=[finish("a", arrived_us=1_000, output_tokens=3, **times)]),
    )


def spans(life):
    """State to the time that it was over, each stay in a state once."""
    return [(state, list(group)[-1].to_ms) for state, group in groupby(life.states, lambda one: one.state)]


def test_the_time_is_divided_without_a_gap(life):
    assert [
        (state.state, state.cause, state.from_ms, state.to_ms, state.step_count) for state in life.states
    ] == [
        ("front_end", None, 0, 1, 0),
        ("waiting", "next_step", 1, 4, 0),
        ("waiting", "max_num_seqs", 4, 29, 2),
        ("waiting", "token_budget", 29, 39, 1),
        ("prefill", None, 39, 59, 2),
        ("decode", None, 59, 72.1, 2),
    ]
    assert (life.e2e_ms, life.ttft_ms) == (72.1, 59)


def test_a_wait_is_divided_among_the_causes_of_the_steps_it_went_through(life):
    [wait] = queue_stays(life.states)
    assert (wait.since_step, wait.left_step, wait.wait_ms, wait.before_step_ms) == (0, 3, 38, 3)
    assert [(cause.cause, cause.steps, cause.wait_ms) for cause in wait.causes] == [
        ("max_num_seqs", 2, 25),
        ("token_budget", 1, 10),
    ]


@pytest.mark.parametrize(
    ("exits", "cause"),
    [
        ([Exit("waiting", "continue", Cause.GRAMMAR_PENDING, "a", 900), FULL], "grammar_pending"),
        ([Exit("waiting", "break", Cause.QUEUE_EMPTY)], "other"),
    ],
    ids=["its own skip", "the queue was empty"],
)
def test_what_it_waited_for(life_of, exits, cause):
    first = step(0, start=0, waiting=2, exits=exits, arrived=[arrival("a", 0, 0)])
    [wait] = queue_stays(life_of(first, step(1, start=7_000, requests=got(0, 100, "new"))).states)
    assert [(one.cause, one.wait_ms) for one in wait.causes] == [(cause, 7)]


def test_events_are_told_in_order_and_in_words(life, recorded_words):
    assert [(event.at_ms, event.what, event.step, event.last_step) for event in life.events] == [
        (0, "arrived", None, None),
        (1, "queued", None, None),
        (39, "scheduled", 3, 3),
        (39, "chunk", 3, 3),
        (49, "chunk", 4, 4),
        (59, "first_token", 4, 4),
        (59, "decode", 5, 6),
        (72.1, "finished", None, None),
    ]
    recorded_words(event.message for event in life.events)


@pytest.mark.parametrize(
    "fields", [{"prompt_tokens": 1}, {"max_tokens": 0, "priority": -2, "lora": "x"}], ids=str
)
def test_what_came_is_told_where_it_is_first_seen(life_of, fields, recorded_words):
    newcomer = arrival("a", None, 0, **fields)
    recorded_words(messages(life_of(step(0, arrived=[newcomer])), "queued"))


def test_gaps_lie_between_outputs(life):
    assert (life.outputs, life.mean_gap_ms) == (3, 6.5)
    assert [(gap.step, gap.gap_ms, gap.preempted) for gap in life.gaps] == [(6, 9, False), (5, 4, False)]


@pytest.fixture
def preempted(life_of):
    """Decodes, loses 101 tokens to b in step 2, comes back with 50 from the cache in step 4."""
    times = {"first_token_us": 5_000, "last_token_us": 55_000, "finished_us": 55_010}
    lost = {"preempted": [Preemption("a", 101, "b", 1)], "ended": Cause.PREEMPTED_THIS_STEP}
    return life_of(
        step(0, start=0, requests=got(0, 100, "new"), arrived=[arrival("a", -1_000, 0)], back=5_000),
        step(1, start=10_000, requests=got(100, 1), back=5_000),
        step(2, start=20_000, waiting=1, **lost),
        step(3, start=30_000, waiting=1, ended=Cause.KV_BLOCKS),
        step(4, start=40_000, requests=got(50, 52, "resumed"), back=5_000),
        step(5, start=50_000, requests=got(102, 1), back=5_000),
        step(6, start=60_000, finished=[finish("a", arrived_us=-1_000, **times)]),
    )


def test_what_a_preemption_cost_has_states_of_its_own(preempted):
    assert [(state.state, state.from_ms, state.to_ms, state.step_count) for state in preempted.states] == [
        ("front_end", 0, 1, 0),
        ("prefill", 1, 6, 1),
        ("decode", 6, 21, 1),
        ("preempted", 21, 31, 1),
        ("preempted", 31, 41, 1),
        ("recompute", 41, 46, 1),
        ("decode", 46, 56.01, 1),
    ]
    assert preempted.num_preemptions == 1
    gaps = [(gap.step, gap.gap_ms, gap.preempted) for gap in preempted.gaps]
    assert gaps == [(4, 30, True), (1, 10, False), (5, 10, False)]


def test_a_preemption_and_the_return_are_events(preempted, recorded_words):
    for what in ("scheduled", "preempted", "resumed", "chunk"):
        recorded_words(messages(preempted, what))


@pytest.mark.parametrize("held", [7, 0, None])
def test_that_its_scheduler_set_it_aside_is_told_with_what_it_keeps(life_of, held, recorded_words):
    first = step(0, requests=got(0, 100, "new"), arrived=[arrival("a", 0, 0)])
    life = life_of(first, step(1, waiting=1, set_aside=[SetAside("a", 1, blocks_held=held)]))
    recorded_words(messages(life, "set_aside"))


def test_an_output_that_comes_back_after_the_preemption_is_no_decode(life_of):
    """With steps in flight: step 0's output is back after step 1 has preempted it."""
    lost = {"preempted": [Preemption("a", 100, "b")], "ended": Cause.PREEMPTED_THIS_STEP}
    times = {"last_token_us": 25_000, "first_token_us": 15_000, "finished_us": 25_000}
    life = life_of(
        step(0, start=0, back=15_000, requests=got(0, 100, "new"), arrived=[arrival("a", 0, 0)]),
        step(1, start=10_000, waiting=1, **lost),
        step(2, start=20_000, requests=got(0, 101, "resumed"), back=5_000),
        step(3, start=40_000, finished=[finish("a", **times)]),
    )
    assert spans(life) == [("prefill", 10), ("preempted", 20), ("recompute", 25)]


def test_a_step_that_went_without_it_is_counted_and_says_why(life_of, recorded_words):
    skip = Exit("running", "continue", Cause.OUTPUT_IN_FLIGHT, "a", 900)
    life = life_of(
        step(0, requests=got(0, 100, "new"), arrived=[arrival("a", 0, 0)]),
        step(1, requests=got(100, 1), total_requests=1),
        step(2, got={"b": 1}, exits=[skip]),
        step(3, requests=got(101, 1), total_requests=1),
    )
    recorded_words(messages(life, "decode"))
    assert [(state.state, state.step_count) for state in life.states] == [("prefill", 1), ("decode", 3)]
    assert (life.status, life.e2e_ms) == (None, None)


def test_decodes_in_every_step_count_their_drafts_and_no_step_without_it(life_of, recorded_words):
    drafted = [ScheduledRequest("a", 100 + 3 * n, 3, draft_tokens=2) for n in range(2)]
    life = life_of(
        step(0, requests=got(0, 100, "new"), total_requests=1, arrived=[arrival("a", 0, 0)]),
        *(step(n + 1, requests=[row], total_requests=1) for n, row in enumerate(drafted)),
    )
    recorded_words(messages(life, "decode"))


@pytest.mark.parametrize("tokens", [39, 40, 41])
def test_a_resumed_chunk_tells_recompute_from_prefill(life_of, tokens, recorded_words):
    life = life_of(
        step(0, requests=got(0, 60, "new"), arrived=[arrival("a", 0, 0)]),
        step(1, preempted=[Preemption("a", 60, "b")], waiting=1, ended=Cause.PREEMPTED_THIS_STEP),
        step(2, requests=got(20, tokens, "resumed")),
    )
    recorded_words(messages(life, "chunk")[-1])


def test_a_request_that_was_aborted_in_the_queue_says_what_it_waited_for(life_of, recorded_words):
    gone = finish("a", "ABORTED", finished_us=14_000, output_tokens=0)
    life = life_of(
        step(0, start=2_000, waiting=1, ended=FULL, arrived=[arrival("a", 0, 1_000)]),
        step(1, start=20_000, finished=[gone]),
    )
    assert spans(life) == [("front_end", 1), ("waiting", 14)]
    recorded_words(event.message for event in life.events[-2:])


def test_a_request_from_before_the_trace_is_told_as_far_as_it_is_known(life_of):
    life = life_of(step(0, start=4_000, requests=got(130, 1)), step(1, start=9_000, requests=got(131, 1)))
    assert (life.prompt_tokens, life.status) == (None, None)
    assert [(state.state, state.from_ms, state.step_count) for state in life.states] == [("decode", 0, 2)]


def test_the_warm_up_can_be_asked_about(run_of):
    line = step(0, trial=0, got={"t0-0": 100}, new=["t0-0"], arrived=[arrival("t0-0", 0, 0)])
    assert explain_request(run_of("r", line, trial_ids=True), "t0-0").trial == 0


@pytest.mark.parametrize(
    ("lines", "times"),
    [
        ([step(0, finished=[finish("a", finished_us=5_000)])], [("finished", 0.0)]),
        ([step(0, finished=[finish("a", arrived_us=2_000, finished_us=5_000)])], [("finished", 3.0)]),
        ([step(0), Events(at_us=1, arrived=[arrival("a", None, 20_000)])], [("queued", 0.0)]),
    ],
    ids=["only its end", "its end with its arrival", "it came at the very end"],
)
def test_a_request_that_was_in_no_state_for_any_time_is_explained(life_of, lines, times):
    life = life_of(*lines)
    assert ([(event.what, event.at_ms) for event in life.events], life.states) == (times, [])


IDS = ["t1-1-aa", "t1-12-bb", "t1-12-bc", "t1-1", "cmpl-7"]


@pytest.fixture
def run(run_of):
    arrivals = [arrival(name, 0, 0) for name in IDS]
    return run_of(
        "r", step(0, arrived=arrivals, got={"only-scheduled": 1}, finished=[finish("only-finished")])
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("t1-1", "t1-1"),
        ("t1-1-aa", "t1-1-aa"),
        ("aa", "t1-1-aa"),
        ("t1-12-bc", "t1-12-bc"),
        ("c", None),
        ("cm", "cmpl-7"),
        ("7", "cmpl-7"),
        ("only-s", "only-scheduled"),
        ("finished", "only-finished"),
    ],
)
def test_a_beginning_or_end_is_enough_if_one_request_has_it(run, text, meant):
    if meant is None:
        with pytest.raises(UsageError, match="2 requests match: t1-12-bc, cmpl-7"):
            find_request(run, text)
    else:
        assert find_request(run, text)[1] == meant


def test_a_part_up_to_a_dash_goes_before_longer_ones(run_of):
    arrivals = [arrival(name, 0, 0) for name in ("t1-1-aa", "t1-12-bb")]
    assert find_request(run_of("r", step(0, arrived=arrivals)), "t1-1")[1] == "t1-1-aa"


def test_several_are_listed(run):
    with pytest.raises(UsageError) as told:
        find_request(run, "t1-12")
    assert str(told.value) == "request t1-12: 2 requests match: t1-12-bb, t1-12-bc"


def test_many_are_listed_in_part(run_of):
    arrivals = [arrival(f"x{n}", 0, 0) for n in range(10)]
    with pytest.raises(UsageError, match=r"10 requests match: x0, .*x7 and 2 more$"):
        find_request(run_of("r", step(0, arrived=arrivals)), "x")


@pytest.mark.parametrize("text", ["nobody", ""])
def test_none_says_what_is_there(run, text):
    with pytest.raises(UsageError, match=r"no request of .*r matches; it has 7 requests, such as t1-1-aa"):
        find_request(run, text)


def test_every_engine_is_searched(tmp_path):
    for rank in (0, 1):
        folder = makers.run_folder(tmp_path / "r", step(0, got={f"r{rank}": 1}), engine_rank=rank)
    trace, found = find_request(read_run(folder), "r1")
    assert (trace.header.engine_rank, found) == (1, "r1")


@pytest.mark.parametrize("text", ["a\x1b\n", r"a\x1b\n", "a\x1b", r"a\x1b", r"\n"])
def test_an_id_is_found_as_it_is_and_as_it_is_printed(run_of, text):
    come = [arrival("a\x1b\n", 0, 0), arrival("b", 0, 0)]
    assert find_request(run_of("r", step(0, arrived=come)), text)[1] == "a\x1b\n"


def test_two_ids_never_have_to_share_a_printed_form(run_of):
    run = run_of("r", step(0, arrived=[arrival(name, 0, 0) for name in ("a\x1b", r"a\x1b")]))
    assert find_request(run, "a\x1b")[1] == "a\x1b"
    assert find_request(run, r"a\\x1b")[1] == r"a\x1b"
    with pytest.raises(UsageError, match="2 requests match"):  # as it is, or as the other is printed
        find_request(run, r"a\x1b")


def test_a_long_id_is_found_by_the_whole_of_it_by_what_is_written_and_without_vllms_suffix(run_of):
    ids = [f"{name * 1000}-1234abcd" for name in ("a", "b")]
    run = run_of("r", step(0, arrived=[arrival(capped(name), 0, 0) for name in ids]))
    for text in (ids[0], capped(ids[0]), "a" * 1000, "a" * 64):
        assert find_request(run, text)[1] == capped(ids[0])


def test_a_hashed_id_is_found_by_the_id(run_of):
    run = run_of("r", step(0, arrived=[arrival(hashed("t1-6"), 0, 0)]), hashed_ids=True)
    assert find_request(run, "t1-6")[1] == hashed("t1-6")
