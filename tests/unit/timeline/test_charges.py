"""``timeline.charges``: every wait followed to the end of its chain, in steps of 100 us.

Idle holders keep blocks while ``head`` is refused some; long prompts take most of budgets of 1,000 tokens;
work for aborted requests takes 80 us of each step.
"""

import polars as pl
import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, HeadRefusal, Preemption, ScheduledRequest
from schedtrace.model.trace_facts import KvLoad
from schedtrace.timeline.charges import ABORTED_WORK, FEWEST_STEPS
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.queue_waits import need_of
from schedtrace.timeline.spans import LENGTH_US
from schedtrace.timeline.step_time import StepTime
from tests.makers import arrival, finish, step

BY_PRIORITY = {"max_num_seqs": 8, "enable_chunked_prefill": True, "policy": "priority"}
NO_CHUNKS = {"max_num_seqs": 8, "enable_chunked_prefill": False, "policy": "fcfs"}


def at(number, **fields):
    return step(number, start=100 * number, back=None, **fields)


def came(name, at=0, **fields):
    return [arrival(name, None, queued=at, **fields)]


def waits(number, cause, **fields):
    """a waits for this."""
    return at(number, **{"waiting": 1, "ended": Exit("waiting", "break", cause, "a"), **fields})


def refused(cause, **fields):
    """a waits for this in step 0, and step 1 takes it."""
    then = {**dict.fromkeys(fields.get("got", {}), 1), "a": 100}
    return [waits(0, cause, arrived=came("a"), **fields), at(1, got=then, new="a")]


def seats_held(*stalled):
    """Two requests run; step 1 skips these, and a waits for a seat."""
    skips = [Exit("running", "continue", Cause.PP_STAGGER, name) for name in stalled]
    exits = [*skips, Exit("waiting", "break", Cause.MAX_NUM_SEQS, "a")]
    running = dict.fromkeys("rs", 10)
    left = {name: 1 for name in "rs" if name not in stalled}
    return [
        at(0, got=running, new="rs", arrived=[*came("r"), *came("s")]),
        waits(1, None, got=left, exits=exits, running=2, arrived=came("a", 100)),
        at(2, got={**dict.fromkeys("rs", 1), "a": 100}, new="a"),
    ]


def behind(prompt_tokens):
    """A prompt of 2,000 tokens takes two whole steps; a comes for the second one."""
    return [
        at(0, got={"long": 1000}, new=["long"], arrived=came("long", prompt_tokens=2000)),
        waits(1, Cause.TOKEN_BUDGET, got={"long": 1000}, arrived=came("a", 100, prompt_tokens=prompt_tokens)),
        at(2, got={"long": 1, "a": 100}, new="a"),
    ]


def urgent(running):
    """a, of priority 1, waits for a seat while one of this priority runs."""
    return [
        at(0, got={"r": 100}, new="r", arrived=came("r", priority=running)),
        waits(1, Cause.MAX_NUM_SEQS, got={"r": 1}, arrived=came("a", 100, priority=1)),
        at(2, got={"r": 1, "a": 100}, new="a"),
    ]


HELD_UP = [
    at(
        0,
        got={"r": 1},
        waiting=3,
        ended=Exit("waiting", "break", Cause.KV_BLOCKS, "L"),
        kv_blocks_free_after=5,
        arrived=[*came("L", prompt_tokens=200), *came("a", prompt_tokens=60), *came("b", prompt_tokens=15)],
    ),
    at(1, got=dict.fromkeys("Labr", 10), new="Lab"),
]
"""5 blocks of 10 tokens are free: L and a do not fit, b would."""
AGAIN = [
    at(0, got={"a": 100}, new="a", arrived=came("a")),
    waits(1, Cause.PREEMPTED_THIS_STEP, preempted=[Preemption("a", 100)]),
    at(2, got={"a": 100}, resumed="a", recomputed_tokens=100),
    at(3, finished=[finish("a", finished_us=300)]),
]
CASES = {
    "a limit": (refused(Cause.LORA_CAP), {}, {("a", "lora_cap"): 100}),
    "a seat": (refused(Cause.MAX_NUM_SEQS), {}, {("a", "max_num_seqs"): 100}),
    "KV blocks": (refused(Cause.KV_BLOCKS, running=2, kv_loads_parked=1), {}, {("a", "kv_blocks"): 100}),
    "as many loads parked as run": (
        refused(Cause.KV_BLOCKS, running=2, kv_loads_parked=2),
        {},
        {("a", "parked_loads"): 100},
    ),
    "one load parked, none run": (
        refused(Cause.KV_BLOCKS, running=0, kv_loads_parked=1),
        {},
        {("a", "parked_loads"): 100},
    ),
    "half of the seats stalled": (
        seats_held("r"),
        {},
        {("r", "pp_stagger"): 100, ("a", "max_num_seqs"): 100},
    ),
    "all seats stalled": (
        seats_held("r", "s"),
        {},
        {("r", "pp_stagger"): 100, ("s", "pp_stagger"): 100, ("a", "pp_stagger"): 100},
    ),
    "a less urgent one runs": (
        urgent(2),
        {"scheduler_config": BY_PRIORITY},
        {("a", "priority_inversion"): 100},
    ),
    "one as urgent runs": (urgent(1), {"scheduler_config": BY_PRIORITY}, {("a", "max_num_seqs"): 100}),
    "first come, first served": (urgent(2), {}, {("a", "max_num_seqs"): 100}),
    "behind a long prompt": (behind(500), {}, {("a", "long_prompt"): 100}),
    "a prompt of its kind": (behind(501), {}, {("a", "token_budget"): 100}),
    "whole prompts, two fifths of the budget unused": (
        refused(Cause.CHUNKED_PREFILL_OFF, got={"r": 600}),
        {"scheduler_config": NO_CHUNKS},
        {("a", "chunked_prefill_off"): 40, ("a", "token_budget"): 60},
    ),
    "behind a head that does not fit": (
        HELD_UP,
        {},
        {("L", "kv_blocks"): 100, ("a", "kv_blocks"): 100, ("b", "head_of_line"): 100},
    ),
    "a preemption": (AGAIN, {}, {("a", "kv_blocks"): 100, ("a", "recompute"): 100}),
}


@pytest.mark.parametrize(("lines", "header", "expected"), CASES.values(), ids=CASES)
def test_a_wait_is_charged_to_the_end_of_its_chain(view_of, lines, header, expected):
    view = view_of(*lines, **header)
    charges = view.charges.select("request_id", "charge", "time_us").rows()
    assert {(request_id, charge): us for request_id, charge, us in charges} == expected
    lost = view.request_states.filter(
        pl.col("state").is_in(["waiting", "preempted", "stalled", "recompute"])
        & pl.col("cause").ne_missing(NEXT_STEP)
    )
    assert sum(us for *_, us in charges) == lost.select(LENGTH_US.sum()).item()


def test_a_request_that_no_step_could_see_yet_waits_for_nobody(view_of):
    view = view_of(at(0), at(1, got={"a": 100}, new="a", arrived=came("a", 50)))
    assert view.charges.is_empty()


def test_only_the_steps_with_the_long_prompt_are_charged_to_it(view_of):
    """It is done after step 1; in step 2 decodes of others spend the budget."""
    full = waits(2, Cause.TOKEN_BUDGET, got={"x": 1000})
    lines = [*behind(100)[:2], full, at(3, got={"long": 1, "a": 100}, new="a")]
    charges = view_of(*lines).charges.filter(pl.col("request_id") == "a")
    assert dict(charges.select("charge", "time_us").iter_rows()) == {"long_prompt": 100, "token_budget": 100}


@pytest.mark.parametrize(("tokens", "counts"), [(0, False), (10, False), (40, True)])
def test_a_refusal_of_more_blocks_than_are_counted_leaves_the_need_unknown(tokens, counts, view_of):
    """Three blocks of 16 are refused: 10 tokens need one, 40 need three."""
    refused = Exit("waiting", "break", Cause.KV_BLOCKS, request_id="b", blocks_needed=3)
    arrivals = [arrival("b", 0, prompt_tokens=tokens)]
    view = view_of(step(0, waiting=1, ended=refused, arrived=arrivals), step(1, waiting=1, ended=refused))
    assert (need_of(view, view.refused_heads) is not None) is counts


def refusing(steps, *, holders=(("a", 30), ("b", 20)), got="b", **fields):
    """So many steps refuse ``head``, whose first also gives ``got`` a token."""
    refusal = HeadRefusal("head", [5], 1, [name for name, _ in holders], [[blocks for _, blocks in holders]])
    for name, value in fields.items():
        setattr(refusal, name, value)
    no_blocks = Exit("waiting", "break", Cause.KV_BLOCKS, "head")
    lines = [step(number, waiting=1, ended=no_blocks, running=0) for number in range(1, steps + 1)]
    lines[0] = step(
        1,
        got=dict.fromkeys(got, 1),
        waiting=1,
        ended=no_blocks,
        refusals=[refusal],
        arrived=[arrival("head", None, 500)],
    )
    before = step(0, got={"a": 10, "b": 10}, new="ab", arrived=[arrival(name, None, 0) for name in "ab"])
    return [before, *lines]


@pytest.fixture
def idle(view_of):
    """``idle(*lines)``: the idle holders."""
    return lambda *lines: view_of(*lines).charge_tables.idle_holders


def rows(holders):
    return holders.select("first_step", "last_step", "request_id", "blocks", "held", "kind").rows()


def test_who_got_nothing_and_keeps_half_of_the_blocks_holds_them_idly(idle):
    found = rows(idle(*refusing(FEWEST_STEPS)))
    assert found == [(1, FEWEST_STEPS, "a", 30, 50, "request")]


@pytest.mark.parametrize(
    "lines",
    [
        refusing(FEWEST_STEPS - 1),
        refusing(FEWEST_STEPS, holders=(("a", 30), ("b", 31))),
        refusing(FEWEST_STEPS, other_holders=2, other_held=[11]),
        refusing(FEWEST_STEPS, got="ab"),
    ],
    ids=["too few steps", "less than half", "others hold more", "all got tokens"],
)
def test_otherwise_the_cache_is_in_use(idle, lines):
    assert rows(idle(*lines)) == []


def test_nobody_ran(idle):
    assert idle(*refusing(FEWEST_STEPS, got=""))["alone"].to_list() == [True, True]
    assert idle(*refusing(FEWEST_STEPS))["alone"].to_list() == [False]


def test_a_session_is_silent_while_its_client_has_not_sent_more(idle):
    lines = refusing(FEWEST_STEPS)
    lines[3].arrived = [arrival("a", None, 25_000, streaming_update=True)]
    found = idle(*lines)
    assert found.select("kind", "silent").rows() == [("session", False)]
    lines[2].exits.insert(0, Exit("waiting", "continue", Cause.STREAMING_INPUT_PENDING, "a"))
    assert idle(*lines)["silent"].to_list() == [True]


@pytest.mark.parametrize(("ended_us", "kind"), [(None, "aborted"), (8_500, "finished")])
def test_a_request_that_was_aborted_during_its_load_holds_its_blocks(idle, ended_us, kind):
    """c and d were aborted during loads; d is none of the largest holders. Step 1 begins at 10 ms."""
    lines = refusing(FEWEST_STEPS, holders=(("c", 30), ("b", 20)), other_holders=1, other_held=[10])
    lines[1].refusals[0].finished_holders = ["c"]
    lines[0].arrived += [arrival(name, None, 0) for name in "cd"]
    lines[0].finished = [finish(name, "ABORTED", finished_us=8_000) for name in "cd"]
    lines[0].kv_loads = [KvLoad("c", "begun", 900, [30]), KvLoad("d", "begun", 900, [10])]
    if ended_us is not None:
        lines[0].kv_loads += [KvLoad(name, "arrived", ended_us) for name in "cd"]
        lines[1].refusals[0].other_held = [0]
    of_d = [(1, FEWEST_STEPS, "d", 10, 60, "aborted")] if ended_us is None else []
    held = 60 if ended_us is None else 50
    expected = [(1, FEWEST_STEPS, "c", 30, held, kind), *of_d]
    assert rows(idle(*lines)) == expected


def test_a_finished_request_holds_only_what_nobody_fetched(idle):
    lines = refusing(FEWEST_STEPS)
    lines[1].finished = [finish("a", finished_us=9000)]
    assert rows(idle(*lines)) == []
    lines[1].refusals[0].finished_holders = ["a"]
    assert rows(idle(*lines)) == [(1, FEWEST_STEPS, "a", 30, 50, "finished")]


def chunks(number, **got):
    """A step with these chunks: a request's computed tokens and what it got."""
    requests = [
        ScheduledRequest(name, done, n, "running" if done else "new") for name, (done, n) in got.items()
    ]
    return step(number, got={name: n for name, (_, n) in got.items()}, requests=requests)


def come(**tokens):
    return [arrival(name, 0, 0, prompt_tokens=n) for name, n in tokens.items()]


def test_chunks_of_prompts_are_no_decodes(view_of):
    """a has 250 tokens in chunks of 100, 100 and 50, then decodes."""
    first = chunks(0, a=(0, 100))
    first.arrived = come(a=250)
    view = view_of(first, chunks(1, a=(100, 100)), chunks(2, a=(200, 50)), chunks(3, a=(250, 1)))
    rows = view.prefills.sort("step").select("step", "scheduled_tokens", "computed_tokens").rows()
    assert rows == [(0, 100, 0), (1, 100, 100), (2, 50, 200)]


@pytest.mark.parametrize(
    ("tokens", "usual", "mine", "others", "long"),
    [
        (1001, 250, 500, 500, True),
        (1001, 250, 499, 501, False),
        (1000, 250, 900, 100, False),
        (1001, 251, 500, 500, False),
    ],
)
def test_a_long_prompt_exceeds_budget_and_usual_prompts_and_takes_half_of_the_step(
    view_of, tokens, usual, mine, others, long
):
    line = chunks(0, a=(0, mine), b=(0, others))
    line.arrived = come(a=tokens, b=usual)
    rows = view_of(line).charge_tables.long_prefills.rows()
    assert rows == ([(0, "a", tokens, mine, 1000)] if long else [])


def test_of_two_in_a_step_the_larger_chunk_counts(view_of):
    line = chunks(0, b=(0, 400), a=(0, 600))
    line.arrived = come(a=3000, b=2000, c=10, d=10)
    assert view_of(line).charge_tables.long_prefills["request_id"].to_list() == ["a"]


def test_many_prompts_of_one_size_are_a_full_device(view_of):
    line = chunks(0, a=(0, 1000))
    line.arrived = come(a=3000, b=3000, c=10)
    assert view_of(line).charge_tables.long_prefills.is_empty()


STEPS = 10
MODEL = StepTime(20.0, 1.0, 30.0, 0.0, steps=STEPS, error_frac=0.0, most_base_us=20.0)
"""A step with two decodes takes 80 us: half of the 60 us beside its base are of each."""


def aborted(name, output_tokens=0, arrived_us=0):
    return finish(
        name, "ABORTED", finished_us=100 * STEPS, output_tokens=output_tokens, arrived_us=arrived_us
    )


def lines(*ends, others=("r",)):
    """x and others decode; w waits for a seat in each step, and x, y and z are aborted at the end."""
    got = dict.fromkeys(("x", *others), 1)
    steps = [
        step(
            number,
            start=100 * number,
            took=0,
            back=80,
            got=got,
            waiting=1,
            ended=Exit("waiting", "break", Cause.MAX_NUM_SEQS, "w"),
            decode_tokens=len(got),
            arrived=[] if number else [arrival(name, None, queued=0) for name in ("x", "r", "w", "y", "z")],
        )
        for number in range(STEPS)
    ]
    return [*steps, step(STEPS, start=100 * STEPS, took=0, got={"w": 1}, new=["w"], finished=[*ends])]


@pytest.fixture
def charged(view_of):
    """``charged(*lines)``: microseconds that w waited, by charge."""

    def charge(*every):
        timeline = view_of(*every)
        timeline.longer_step_time = MODEL
        rows = timeline.charges.filter(pl.col("request_id") == "w")
        return dict(rows.group_by("charge").agg(pl.col("time_us").sum()).iter_rows())

    return charge


def test_who_waits_while_the_device_works_for_aborted_requests_waits_for_that_work(charged):
    waits = charged(*lines(aborted("x"), aborted("y"), aborted("z")))
    assert waits == {Cause.MAX_NUM_SEQS: 700, ABORTED_WORK: 300}


def test_a_step_that_has_no_other_request_was_wholly_in_vain(charged):
    waits = charged(*lines(aborted("x"), aborted("y"), aborted("z"), others=()))
    assert waits == {Cause.MAX_NUM_SEQS: 200, ABORTED_WORK: 800}


@pytest.mark.parametrize(
    "ends",
    [
        [aborted("x"), aborted("y")],
        [aborted("x", 10, 0), aborted("y", 10, 400), aborted("z", 10, 800)],
        [finish("x", finished_us=1000), finish("y", finished_us=1000), finish("z", finished_us=1000)],
    ],
    ids=["fewer than three", "a stop string may have ended them", "finished"],
)
def test_answers_that_somebody_may_have_read_are_not_in_vain(charged, ends):
    assert charged(*lines(*ends)) == {Cause.MAX_NUM_SEQS: 1000}


def test_requests_that_are_aborted_at_the_same_age_had_a_timeout(charged):
    waits = charged(*lines(aborted("x", 10, 10), aborted("y", 10, 0), aborted("z", 10, 20)))
    assert waits == {Cause.MAX_NUM_SEQS: 700, ABORTED_WORK: 300}
