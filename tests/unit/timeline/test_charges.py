"""``timeline.charges``: every wait followed to the end of its chain, in steps of 100 us."""

import polars as pl
import pytest

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Exit, Preemption
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.spans import LENGTH_US
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
