"""Ranks on one clock, their common steps, and what they wait for, from steps made by hand."""

import dataclasses

import polars as pl
import pytest
from msgspec.structs import replace

from schedtrace.read.run import read_run
from schedtrace.timeline.engine_ranks import RecordedRanks, rank_loads
from schedtrace.timeline.frames import offset
from schedtrace.timeline.timeline import make_timeline
from tests.makers import header, step, write_trace
from tests.rank_traces import prefills, write_ranks

ANCHOR = 1_700_000_000_000_000


@pytest.fixture
def ranks_of(tmp_path):
    """``ranks_of(passes, ...)``: the ranks of a run with these common steps."""

    def read(passes, **fields):
        run = read_run(write_ranks(tmp_path / "run", passes, **fields))
        return RecordedRanks.from_timelines([make_timeline(trace, run.manifest) for trace in run.traces])

    return read


def test_common_steps_go_from_the_last_output_to_the_last_output(ranks_of):
    """5,000 us, 100 for each of 8 requests, 20 for each of 500 prefill tokens; outputs come 100 us before."""
    ranks = ranks_of(prefills(30, {0: 10}, {0: 5}))
    assert (ranks.lockstep, ranks.missing_ranks) == (True, 0)
    assert ranks.passes["length_us"].to_list()[:7] == [5700, 5800, 5800, 5800, 5800, 15800, 5800]
    assert ranks.passes["prefilling"].to_list()[4:7] == [0, 1, 0]
    assert ranks.passes.select("computing", "largest", "decoding", "most_prefill").row(5) == (2, 9, 8, 500)


def test_a_prefill_stalls_the_rank_that_only_decodes(ranks_of):
    stalls = ranks_of(prefills(60, {0: 10}, {0: 5})).prefill_stalls
    assert stalls.stalled["rank"].to_list() == [1] * 6
    assert stalls.stalled["excess_us"].to_list() == pytest.approx([10_000] * 6)
    assert stalls.saved_us() == pytest.approx(0, abs=10)  # rank 0 has all of it anyway


def test_prefills_at_the_same_time_stall_nobody(ranks_of):
    stalls = ranks_of(prefills(60, {0: 10, 1: 10}, {0: 5, 1: 5})).prefill_stalls
    assert stalls.stalled.is_empty()
    assert stalls.saved_us() == pytest.approx(0, abs=10)


def test_prefills_one_after_the_other_could_have_been_at_the_same_time(ranks_of):
    stalls = ranks_of(prefills(60, {0: 10, 1: 10}, {0: 5, 1: 9})).prefill_stalls
    assert stalls.stalled.group_by("rank").len().sort("rank").rows() == [(0, 6), (1, 6)]
    assert stalls.saved_us() == pytest.approx(60_000, rel=0.01)


def test_too_few_passes_without_prefill_tell_nothing(ranks_of):
    assert ranks_of(prefills(20, {0: 10}, {0: 5})).prefill_stalls is None


STOPS = dict.fromkeys(range(19, 200, 20), 50_000)
"""Every 20th common step takes 50 ms longer."""


def test_common_steps_that_no_ranks_work_explains_are_slow(ranks_of):
    slow = ranks_of([[(2, 0), (3, 0)]] * 200, stops=STOPS).slow_passes
    assert slow["step_counter"].to_list() == [*STOPS]
    assert slow.select(pl.col("end_us") - pl.col("begin_us")).to_series().to_list() == pytest.approx(
        [50_000] * 10, abs=200
    )
    assert slow.select("kind", "period_steps").unique().rows() == [("periodic", 20.0)]


def test_usual_common_steps_are_not_slow(ranks_of):
    """A prefill makes a step three times as long."""
    assert ranks_of(prefills(200, {0: 10, 1: 10}, {0: 5, 1: 9})).slow_passes.is_empty()


def test_without_a_ranks_trace_its_work_may_explain_a_slow_common_step(ranks_of):
    assert ranks_of([[(2, 0), (3, 0)]] * 200, stops=STOPS, data_parallel_size=3).slow_passes.is_empty()


def test_no_prefill_is_blamed_for_a_common_step_that_stops_all_ranks(ranks_of):
    """Every seventh common step has a prefill: two of these 28 are stopped, too."""
    stalls = ranks_of(prefills(200, {0: 7}, {0: 5}), stops=STOPS).prefill_stalls
    assert stalls.stalled["excess_us"].to_list() == pytest.approx([10_000] * 28, abs=300)


def test_dummy_batches_are_the_passes_without_a_step(ranks_of):
    """Of 10 common steps rank 1 computes in the first 4; a pass of two requests takes 5.2 ms."""
    dummies = ranks_of([[(2, 0), (2, 0) if number < 4 else None] for number in range(10)]).dummies
    assert dummies.rows() == [(0, 0, 0), (1, 6, 6 * 5200)]


def test_independent_ranks_have_no_common_steps(ranks_of):
    ranks = ranks_of(prefills(60, {0: 10}, {0: 5}), lockstep=False)
    assert (ranks.lockstep, ranks.passes.height, ranks.prefill_stalls) == (False, 0, None)


def test_a_rank_without_a_trace_leaves_stalls_unknown(ranks_of):
    ranks = ranks_of(prefills(60, {0: 10}, {0: 5}), data_parallel_size=3)
    assert (ranks.missing_ranks, ranks.prefill_stalls) == (1, None)


def test_clocks_are_lined_up(tmp_path):
    for rank in (0, 1):
        head = header(engine_rank=rank, wall_anchor_us=ANCHOR + 700 * rank, data_parallel_size=2)
        write_trace(
            tmp_path / f"engine-{rank}.jsonl",
            head,
            step(0, start=1000, back=100, got={"a": 1}, wave=0, step_counter=0),
        )
    run = read_run(tmp_path)
    ranks = RecordedRanks.from_timelines([make_timeline(trace) for trace in run.traces])
    assert ranks.turns["start_us"].to_list() == [1000, 1700]
    assert ranks.passes.select("begin_us", "end_us").rows() == [(1000, 1800)]


def test_waits_are_avoidable_while_another_rank_has_room(ranks_of):
    """A request waits for 40 passes of 6.6 ms on rank 0, whose seats are taken; rank 1 holds 2."""
    loads = ranks_of([[(16, 0), (2, 0)]] * 40, lockstep=False, refused="max_num_seqs").loads
    assert loads.waited_us == {0: 40 * 6600, 1: 0}
    assert loads.avoidable_us == loads.waited_us
    assert loads.means().rows() == [(0, pytest.approx(16), pytest.approx(1)), (1, pytest.approx(2), 0)]


def test_the_avoidable_waits_of_all_waiting_requests_count(ranks_of):
    ranks = ranks_of([[(16, 0), (2, 0)]] * 40, lockstep=False, refused="max_num_seqs").each
    twice = [
        dataclasses.replace(rank, presence=rank.presence.with_columns(pl.col("waiting") * 2))
        for rank in ranks
    ]
    assert rank_loads(twice, {0: 0, 1: 0}).avoidable_us == {0: 2 * 40 * 6600, 1: 0}


def test_waits_are_not_avoidable_where_all_seats_are_taken(ranks_of):
    loads = ranks_of([[(16, 0), (16, 0)]] * 40, lockstep=False, refused="max_num_seqs").loads
    assert loads.avoidable_us == {0: 0, 1: 0}


PLAIN = header(host="a", wall_anchor_us=1_000, wall_uncertainty_us=2, wall_max_error_us=300)
ON_LINUX = replace(PLAIN, monotonic_anchor_us=50, clock_id="x")


@pytest.mark.parametrize(
    ("to", "fields", "expected"),
    [
        (ON_LINUX, {"monotonic_anchor_us": 80}, (30, 0)),
        (ON_LINUX, {"monotonic_anchor_us": 9, "clock_id": "y"}, (700, 4)),
        (PLAIN, {"host": "b"}, (700, 604)),
        (PLAIN, {"host": "b", "wall_max_error_us": None}, (700, None)),
        (PLAIN, {"wall_uncertainty_us": None}, (700, None)),
    ],
    ids=["one machine", "after a boot", "between hosts", "between hosts without NTP", "not told"],
)
def test_two_traces_on_one_clock(to, fields, expected):
    assert offset(replace(to, wall_anchor_us=1_700, **fields), to) == expected


def test_processes_of_one_machine_are_lined_up_exactly_both_ways():
    assert offset(ON_LINUX, replace(ON_LINUX, wall_anchor_us=1_700, monotonic_anchor_us=80)) == (-30, 0)
