"""Deltas rebuilt: exactly, or not at all."""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from schedtrace.model.delta import Delta
from schedtrace.model.trace import (
    AlsoSkipped,
    End,
    Events,
    Exit,
    Notice,
    Output,
    RowChange,
    RowChanges,
    ScheduledRequest,
    Step,
)
from schedtrace.read import chain, tables
from schedtrace.read.chain import expanded_lines, removed_rows, without
from schedtrace.read.tables import rows_between
from schedtrace.read.trace import read_trace
from tests.deltas import Deltas
from tests.makers import arrival, encoded, finish, header, step, write_trace
from tests.unit.read.same import assert_same


def rows(*told):
    return [ScheduledRequest(*row) for row in told]


def delta(number, **fields):
    return Delta(step=number, start_us=10_000 * number, schedule_us=100, **fields)


def full(number, *told, **fields):
    used = sum(row[2] for row in told)
    told = rows(*told)
    defaults = {"requests": told, "total_requests": len(told), "remaining_budget": 1000 - used}
    return step(number, **{**defaults, **fields})


def got(trace):
    columns = ("step", "request_id", "computed_tokens", "scheduled_tokens", "phase", "draft_tokens")
    return trace.requests().select(columns).collect().rows()


TWO = full(0, ("a", 0, 7, "new"), ("b", 20, 1))
ONES = {"remaining_budget": 998}


def test_a_delta_that_tells_nothing_is_a_steady_step_and_a_steady_request_one_stretch(trace_of):
    trace = trace_of(TWO, delta(1, **ONES), delta(2))
    assert got(trace) == [
        (0, "a", 0, 7, "new", 0),
        (0, "b", 20, 1, "running", 0),
        (1, "a", 7, 1, "running", 0),
        (1, "b", 21, 1, "running", 0),
        (2, "a", 8, 1, "running", 0),
        (2, "b", 22, 1, "running", 0),
    ]
    assert trace.problems.sentences(trace.path) == []
    columns = ("step", "last_step", "request_id", "computed_tokens", "scheduled_tokens", "phase")
    assert trace.stretches().select(columns).collect().rows() == [
        (0, 0, "a", 0, 7, "new"),
        (0, 2, "b", 20, 1, "running"),
        (1, 2, "a", 7, 1, "running"),
    ]


SKIPS = {"loop": "running", "kind": "continue", "cause": "output_in_flight", "location": "scheduler.py:7"}
ENDED = Exit("waiting", "break", "queue_empty", None, 90)


def test_requests_that_share_an_entry_are_exits_of_their_own(trace_of):
    both = [Exit(**SKIPS, request_id="c", budget_left=99, also=[AlsoSkipped("d", 98)]), ENDED]
    all_three = [
        Exit(**SKIPS, request_id="c", budget_left=97, also=[AlsoSkipped("d", 96), AlsoSkipped(None, 95)])
    ]
    columns = ("step", "request_id", "budget_left", "cause", "count")
    trace = trace_of(
        full(0, ("a", 0, 7, "new"), ("b", 20, 1), exits=both), delta(1, **ONES), delta(2, exits=all_three)
    )
    assert trace.exits().select(columns).collect().rows() == [
        (0, "c", 99, "output_in_flight", 1),
        (0, "d", 98, "output_in_flight", 1),
        (0, None, 90, "queue_empty", 1),
        (1, "c", 99, "output_in_flight", 1),
        (1, "d", 98, "output_in_flight", 1),
        (1, None, 90, "queue_empty", 1),
        (2, "c", 97, "output_in_flight", 1),
        (2, "d", 96, "output_in_flight", 1),
        (2, None, 95, "output_in_flight", 1),
    ]
    assert "also" not in trace.exits().collect_schema()


def test_a_trace_in_full_has_an_entry_for_each_exit(tmp_path):
    shared = [Exit(**SKIPS, request_id="c", budget_left=99, also=[AlsoSkipped("d", 98)])]
    path = write_trace(tmp_path / "t.jsonl", header(schema_version=3), full(0, ("a", 0, 7), exits=shared))
    step_line = msgspec.json.decode(list(expanded_lines(path))[1], type=Step)
    assert step_line.exits == [
        Exit(**SKIPS, request_id="c", budget_left=99),
        Exit(**SKIPS, request_id="d", budget_left=98),
    ]


def test_requests_go_change_and_come_in_this_order(trace_of):
    first = full(0, ("a", 1, 1), ("b", 2, 1), ("c", 3, 1), ("d", 4, 1))
    changes = RowChanges([0, 2], [RowChange(1, 40, 5, 2)], rows(("e", 0, 9, "new")))
    trace = trace_of(first, delta(1, changes=changes, total_requests=3, remaining_budget=985))
    assert got(trace)[4:] == [
        (1, "b", 3, 1, "running", 0),
        (1, "d", 40, 5, "running", 2),
        (1, "e", 0, 9, "new", 0),
    ]


def test_absent_fields_are_those_of_the_step_before_or_of_what_was_left_there(trace_of):
    before = step(
        0,
        trial=3,
        running=4,
        waiting=2,
        kv_blocks_free_after=77,
        waiting_tokens_after=50,
        num_new=1,
        dummy_batches=2,
        arrived=[arrival("x", 1)],
    )
    after = delta(1, waiting_tokens_after=None, num_waiting_after=1)
    row = trace_of(before, after).steps.row(1, named=True)
    assert {name: row[name] for name in ("trial", "num_running_before", "num_waiting_before", "num_new")} == {
        "trial": 3,
        "num_running_before": 4,
        "num_waiting_before": 2,
        "num_new": 1,
    }
    assert (row["num_waiting_after"], row["waiting_tokens_after"], row["dummy_batches"]) == (1, None, 0)
    assert (row["kv_blocks_free_before"], row["kv_blocks_free_after"]) == (77, 77)


def test_exits_are_carried_and_events_are_not(trace_of):
    refused = Exit("waiting", "break", "kv_blocks", "h")
    trace = trace_of(
        step(0, ended=refused, arrived=[arrival("h", 1)]), delta(1), delta(2, exits=[]), delta(3)
    )
    assert trace.exits().select("step", "request_id").collect().rows() == [(0, "h"), (1, "h")]
    assert trace.arrivals["request_id"].to_list() == ["h"]


@pytest.mark.parametrize(
    ("told", "means"),
    [
        ({}, (None, None, None)),
        ({"output_us": 5, "update_us": 1}, (5, 1, 2)),
        ({"output_us": 5, "update_us": 1, "output_tokens": 7}, (5, 1, 7)),
        ({"output_us": 5, "update_us": 1, "output_tokens": None}, (5, 1, None)),
    ],
)
def test_an_output_is_not_back_unless_told_and_has_a_token_for_each_request_unless_told(
    trace_of, told, means
):
    row = trace_of(TWO, delta(1, **ONES, **told)).steps.row(1, named=True)
    assert (row["output_us"], row["update_us"], row["output_tokens"]) == means


def test_an_output_line_completes_a_delta(trace_of):
    late = Output(step=1, output_us=77, update_us=7, output_tokens=3)
    steps = trace_of(TWO, delta(1, **ONES), delta(2), late).steps
    assert steps["output_tokens"].to_list() == [None, 3, None]
    assert steps["output_us"].to_list() == [1000, 77, None]


def test_lines_that_are_no_steps_may_stand_between(trace_of):
    between = [
        Notice(at_us=1, message="m"),
        Events(at_us=2),
        Output(step=0, output_us=1, update_us=1, output_tokens=2),
    ]
    assert trace_of(TWO, *between, delta(1, **ONES)).steps["step"].to_list() == [0, 1]


NO_PREDECESSOR = {
    "nothing before it": [delta(1)],
    "a step is missing": [TWO, delta(2, **ONES)],
    "a garbled line between": [TWO, b"garbage", delta(1, **ONES)],
    "another step told again between": [step(5), TWO, step(5), delta(1, **ONES)],
    "a place that there is not": [TWO, delta(1, changes=RowChanges(changed=[RowChange(2, 1, 1)]), **ONES)],
    "a negative place": [TWO, delta(1, changes=RowChanges(changed=[RowChange(-1, 1, 1)]), **ONES)],
    "a place told twice": [TWO, delta(1, changes=RowChanges(changed=[RowChange(0, 1, 1)] * 2), **ONES)],
    "gone from a place that there is not": [TWO, delta(1, changes=RowChanges(gone=[2]), **ONES)],
    "gone from a negative place": [TWO, delta(1, changes=RowChanges(gone=[-1]), total_requests=1, **ONES)],
    "gone twice": [TWO, delta(1, changes=RowChanges(gone=[0, 0]), total_requests=0, remaining_budget=1000)],
    "gone in another order": [
        TWO,
        delta(1, changes=RowChanges(gone=[1, 0]), total_requests=0, remaining_budget=1000),
    ],
    "a negative number": [TWO, delta(1, changes=RowChanges(changed=[RowChange(0, -1, 1)]), **ONES)],
    "fewer requests than it says": [TWO, delta(1, total_requests=3, **ONES)],
    "other tokens than its budget lacks": [TWO, delta(1, remaining_budget=997)],
}


@pytest.mark.parametrize("lines", NO_PREDECESSOR.values(), ids=NO_PREDECESSOR)
def test_a_delta_that_cannot_be_rebuilt_is_dropped_and_counted_up_to_the_next_full_line(trace_of, lines):
    whole = [line for line in lines if isinstance(line, Step)]
    last = lines[-1].step
    trace = trace_of(*lines, delta(last + 1), full(last + 2, ("z", 0, 1)), delta(last + 3))
    assert trace.problems.not_rebuilt == [(last, last + 1)]
    assert trace.steps["step"].to_list() == sorted({*(one.step for one in whole), last + 2, last + 3})
    assert got(trace)[-1] == (last + 3, "z", 1, 1, "running", 0)
    said = f"2 steps ({last}-{last + 1}) could not be rebuilt: a line that they continue is missing or broken"
    assert f"{trace.path}: {said}" in trace.problems.sentences(trace.path)


def test_a_record_whose_tokens_never_add_up_is_rebuilt_all_the_same(trace_of):
    trace = trace_of(full(0, ("a", 1, 1), remaining_budget=5), delta(1), delta(2))
    assert (trace.steps.height, trace.problems.not_rebuilt) == (3, [])


def test_a_full_line_that_agrees_with_what_was_rebuilt_is_no_problem(trace_of):
    changes = RowChanges(added=rows(("c", 0, 4, "new")))
    end = full(3, ("a", 9, 1), ("b", 23, 1), ("c", 0, 4, "new"), changes=changes)
    assert trace_of(TWO, delta(1, **ONES), delta(2), end).problems.sentences("t") == []


@pytest.mark.parametrize(
    ("last", "changes"),
    [
        ([("a", 9, 1), ("b", 24, 1)], RowChanges()),
        ([("a", 9, 1), ("c", 23, 1)], RowChanges()),
        ([("a", 9, 1)], RowChanges()),
        ([("a", 9, 1), ("b", 23, 1)], RowChanges(gone=[7])),
        ([("a", 9, 1), ("b", 23, 1, "resumed")], RowChanges()),
        ([("b", 23, 1), ("a", 9, 1)], RowChanges()),
    ],
)
def test_a_full_line_that_differs_from_what_was_rebuilt_wins_and_casts_doubt_on_it(trace_of, last, changes):
    trace = trace_of(TWO, delta(1, **ONES), delta(2), full(3, *last, changes=changes), delta(4))
    assert trace.problems.doubtful == [(1, 2)]
    here = [row[1:5] for row in got(trace) if row[0] == 3]
    assert here == [(*row, "running")[:4] for row in last]
    [said] = trace.problems.sentences(trace.path)
    assert said == (
        f"{trace.path}: 2 steps (1-2), rebuilt from changes, do not lead to the full line after them; what "
        "each request got in them may be wrong"
    )


def test_a_full_line_with_changes_after_a_lost_line_is_no_contradiction(trace_of):
    trace = trace_of(TWO, delta(1, **ONES), b"x", full(3, ("q", 5, 1), changes=RowChanges()))
    assert trace.problems.doubtful == []
    assert trace.problems.missing_steps == 1


counts = st.integers(0, 3)


@st.composite
def schedules(draw):
    """Full steps whose requests come, go, wait, change their order, have drafts and several tokens."""
    requests, computed, steps, number = [], {}, [], 0
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["steady"] * 3 + ["change"] * 3 + ["order", "skip", "empty"]))
        phases = {}
        if kind == "change":
            for name in (
                draw(st.lists(st.sampled_from(requests), unique=True, max_size=2)) if requests else ()
            ):
                requests.remove(name)
            for _ in range(draw(st.integers(0, 2))):
                name = (
                    f"r{len(computed)}"
                    if draw(st.booleans()) or not computed
                    else draw(st.sampled_from([*computed]))
                )
                if name not in requests:
                    requests.append(name)
                    phases[name] = draw(st.sampled_from(["new", "resumed", "running"]))
                    computed[name] = draw(counts)
        if kind == "order":
            requests = draw(st.permutations(requests))
        told = []
        for name in [] if kind == "empty" else requests:
            odd = kind == "change" and draw(st.booleans())
            tokens, drafts = (draw(counts), draw(st.integers(0, 1))) if odd else (1, 0)
            told.append((name, computed[name], tokens, phases.get(name, "running"), drafts))
            computed[name] += tokens + (draw(st.sampled_from([0, 0, 1])) if odd else 0)
        number += draw(st.sampled_from([1] * 8 + [2]))
        back = draw(st.booleans())
        steps.append(
            full(
                number,
                *told,
                trial=number // 9,
                back=100 if back else None,
                update_us=draw(counts) if back else None,
                output_tokens=draw(st.sampled_from([len(told), 0, None])) if back else None,
                running=draw(counts),
                waiting=draw(counts),
                waiting_tokens_after=draw(st.sampled_from([None, 5])),
                kv_blocks_free_before=draw(st.sampled_from([None, 90, 100])),
                ended=draw(st.sampled_from([None, Exit("waiting", "break", "queue_empty")])),
                arrived=[arrival(f"r{number}", 1)] if draw(st.booleans()) else [],
                finished=[finish("z")] if draw(st.booleans()) else [],
                dummy_batches=draw(st.integers(0, 1)),
            )
        )
    return steps


@given(schedules(), st.integers(1, 9), st.sampled_from([1, 5, 2**18]))
def test_any_steps_told_as_deltas_are_rebuilt_exactly(steps, full_every, rows_at_once):
    with (
        TemporaryDirectory() as folder,
        patch.object(tables, "ROWS_AT_ONCE", rows_at_once),
        patch.object(chain, "ROWS_AT_ONCE", rows_at_once),
    ):
        compare(steps, full_every, folder)


def compare(steps, full_every, folder):
    plain = read_trace(write_trace(Path(folder, "plain.jsonl"), header(), *steps))
    lines = list(map(Deltas(full_every).line_of, steps))
    short = read_trace(write_trace(Path(folder, "short.jsonl"), header(), *lines))
    in_full = list(expanded_lines(Path(folder, "short.jsonl")))
    assert got(plain) == [
        (one.step, row.request_id, row.computed_tokens, row.scheduled_tokens, row.phase, row.draft_tokens)
        for one in steps
        for row in one.requests
    ]
    assert_same(short, plain, others=())
    assert in_full[1:-1] == list(map(encoded, steps))
    whole = plain.requests().collect()
    middle = (pl.col("step") >= steps[0].step + 2) & (pl.col("step") <= steps[0].step + 4)
    some = rows_between(short.stretches(), short.steps, steps[0].step + 2, steps[0].step + 4)
    assert_frame_equal(some, whole.filter(middle))
    assert_frame_equal(short.requests().filter(middle).collect(), whole.filter(middle))
    assert_frame_equal(short.requests().select("step").head(3).collect(), whole.select("step").head(3))
    assert short.problems.not_rebuilt == short.problems.doubtful == []
    assert short.problems.missing_steps == plain.problems.missing_steps


def test_another_number_of_tokens_begins_a_stretch_beside_a_new_request_too(trace_of):
    trace = trace_of(full(0, ("a", 0, 7)), full(1, ("a", 7, 1), ("b", 0, 5, "new")))
    assert got(trace) == [
        (0, "a", 0, 7, "running", 0),
        (1, "a", 7, 1, "running", 0),
        (1, "b", 0, 5, "new", 0),
    ]


def test_where_stretches_are_cut_they_stand_in_the_order_of_the_steps(trace_of, monkeypatch):
    monkeypatch.setattr(chain, "ROWS_AT_ONCE", 4)
    steps = [
        full(0, ("a", 5, 1), ("b", 5, 1)),
        full(1, ("a", 6, 1), ("b", 6, 1)),
        full(2, ("a", 7, 1), ("b", 7, 1), ("c", 0, 9, "new")),
        full(3, ("a", 8, 1), ("b", 8, 1), ("c", 9, 1)),
    ]
    table = trace_of(*steps).stretches().select("step", "last_step", "request_id").collect()
    assert table.rows() == [
        (0, 1, "a"),
        (0, 1, "b"),
        (2, 2, "a"),
        (2, 2, "b"),
        (2, 2, "c"),
        (3, 3, "a"),
        (3, 3, "b"),
        (3, 3, "c"),
    ]


def test_a_request_whose_computed_tokens_jump_begins_another_stretch(trace_of):
    changes = RowChanges(changed=[RowChange(0, 30, 1), RowChange(1, 21, 1)])
    trace = trace_of(full(0, ("a", 5, 1), ("b", 20, 1)), delta(1, changes=changes), delta(2))
    table = trace.stretches().select("step", "last_step", "request_id", "computed_tokens").collect()
    assert table.rows() == [(0, 0, "a", 5), (0, 2, "b", 20), (1, 2, "a", 30)]


def test_in_full_a_step_has_its_output_whichever_line_told_of_it(tmp_path):
    back = step(0, start=0, got={"a": 4}, new="a", update_us=50, output_tokens=1)
    out = step(0, start=0, got={"a": 4}, new="a", back=None)
    late = Output(step=0, output_us=1000, update_us=50, output_tokens=1)
    path = write_trace(tmp_path / "engine-0.jsonl", header(), out, late)
    assert list(expanded_lines(path))[1:-1] == [encoded(back)]


@pytest.mark.parametrize(
    ("before", "now", "places"),
    [
        ("abc", "abc", []),
        ("abc", "ac", [1]),
        ("abcd", "bdx", [0, 2]),
        ("abcdefghijkl", "bdfhjlx", [0, 2, 4, 6, 8, 10]),  # more than are looked for one by one
        ("abcdefghijkl", "lkjihx", list(range(12))),  # in another order: everybody leaves and comes again
    ],
)
def test_places_of_those_who_left(before, now, places):
    assert removed_rows(before, tuple(now)) == places
    assert tuple(without(before, places)) == tuple(now)[: len(before) - len(places)]


STEPS = 24


def schedule():
    """Steps in which requests come, prefill in chunks, decode, have drafts, are preempted and leave."""
    chance, computed, running, steps = Random(3), {}, [], []  # noqa: S311  # no secret
    for number in range(STEPS):
        phases, tokens = {}, {}
        if running and chance.random() < 0.3:
            running.remove(chance.choice(running))
        if len(running) < 4 and chance.random() < 0.7:
            name = chance.choice(["a", "b", "c", "d", "e", "f"])
            if name not in running:
                phases[name] = "resumed" if name in computed else "new"
                running.append(name)
                computed[name] = chance.choice([0, 4])
        told = []
        for name in running:
            tokens[name] = chance.choice([1, 1, 1, 1, 8])
            drafts = 3 if tokens[name] == 8 and name not in phases else 0
            told.append(
                ScheduledRequest(name, computed[name], tokens[name], phases.get(name, "running"), drafts)
            )
            computed[name] += tokens[name]
        used = sum(tokens.values())
        steps.append(
            step(
                number,
                requests=told,
                total_requests=len(told),
                remaining_budget=1000 - used,
                running=len(told),
                waiting=chance.choice([0, 2]),
                arrived=[arrival(name, number) for name in phases],
                ended=None,
            )
        )
    return steps


TRUE = schedule()
LINES = [
    encoded(header(schema_version=2)),
    *map(encoded, map(Deltas(full_every=7).line_of, TRUE)),
    encoded(End(at_us=9, steps=STEPS)),
]
IN_FULL = {one.step: encoded(one) for one in TRUE}


def test_the_trace_is_mostly_deltas():
    kinds = [msgspec.json.decode(line)["type"] for line in LINES]
    assert (kinds.count("delta"), kinds.count("step")) == (20, 4)


def rebuilt(tmp_path, content):
    """Step to its full line; fails if it is not the true one."""
    path = tmp_path / "engine-0.jsonl"
    path.write_bytes(content)
    found = {}
    for line in expanded_lines(path):
        if line.startswith(b'{"type":"step"'):
            number = msgspec.json.decode(line)["step"]
            assert line == IN_FULL[number]
            assert number not in found
            found[number] = line
    return found


def test_a_trace_cut_at_any_byte_has_the_steps_of_its_whole_lines(tmp_path):
    content = b"".join(line + b"\n" for line in LINES)
    ends = [at for at, byte in enumerate(content) if byte == 10]
    around = {end + by for end in ends[1:] for by in (-1, 0, 1, 2)} - {len(content), len(content) + 1}
    for size in sorted({*range(ends[0] + 1, ends[4]), *around}):
        whole = sum(at < size for at in ends) - 1
        assert list(rebuilt(tmp_path, content[:size])) == list(range(min(whole, STEPS)))


def counted(tmp_path, lines):
    """The numbers of the steps read, after a check that all others are counted."""
    found = rebuilt(tmp_path, b"".join(line + b"\n" for line in lines))
    trace = read_trace(tmp_path / "engine-0.jsonl")
    numbers = trace.steps["step"].to_list()
    assert numbers == sorted(found)
    assert trace.problems.doubtful == []
    lost = {n for first, last in trace.problems.not_rebuilt for n in range(first, last + 1)}
    assert not lost & set(numbers)
    assert len(numbers) + len(lost) + trace.problems.missing_steps == STEPS
    return numbers


def until_full(number):
    """The steps after this one up to the next full line."""
    return list(range(number, next((n for n in range(number + 1, STEPS) if n % 7 == 0), STEPS)))


@pytest.mark.parametrize("kept", [0, 30])
@pytest.mark.parametrize("number", range(STEPS))
def test_after_a_line_lost_or_garbled_all_up_to_the_next_full_one_are_counted(tmp_path, number, kept):
    left = [line if at != number + 1 else line[:kept] for at, line in enumerate(LINES)]
    assert counted(tmp_path, left) == sorted({*range(STEPS)} - {*until_full(number)})


@pytest.mark.parametrize("number", range(STEPS))
def test_after_a_line_told_twice_all_up_to_the_next_full_one_are_counted(tmp_path, number):
    doubled = [line for at, line in enumerate(LINES) for _ in range(1 + (at == number + 1))]
    assert counted(tmp_path, doubled) == sorted({*range(STEPS)} - {*until_full(number)[1:]})


@pytest.mark.parametrize("number", range(STEPS - 1))
def test_lines_in_another_order_are_never_rebuilt_wrongly(tmp_path, number):
    swapped = [*LINES]
    swapped[number + 1], swapped[number + 2] = swapped[number + 2], swapped[number + 1]
    assert set(counted(tmp_path, swapped)) >= {*range(STEPS)} - {*until_full(number), *until_full(number + 1)}


def test_a_trace_twice_in_one_file_counts_once(tmp_path):
    assert counted(tmp_path, [*LINES, *LINES]) == list(range(STEPS))


@pytest.mark.parametrize("seed", range(20))
def test_any_lines_lost_and_swapped_are_never_rebuilt_wrongly(tmp_path, seed):
    chance = Random(seed)  # noqa: S311  # no secret
    lines = [line for line in LINES[1:-1] if chance.random() < 0.9]
    for _ in range(chance.choice([0, 1, 3])):
        one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]
    assert len(counted(tmp_path, [LINES[0], *lines, LINES[-1]])) <= len(lines)
