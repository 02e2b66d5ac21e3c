"""Fleets that a replay refuses, and how it places their engines."""

import pytest

from schedtrace.errors import InputError, UsageError
from schedtrace.fleet.inputs import find_fleet
from schedtrace.whatif import fleet
from tests import makers
from tests.makers import arrival, finish, step


def lines(requests=12):
    """Requests 100 ms apart, of two steps each: enough steps to fit a model to."""
    for number in range(requests):
        name, at = f"r{number}", 100_000 * number
        yield step(2 * number, start=at, back=5_000, got={name: 10}, new=[name], arrived=[came(name, at)])
        yield step(2 * number + 1, start=at + 6_000, back=5_000, got={name: 1}, finished=[gone(name, at)])


def came(name, at):
    return arrival(name, at, at, prompt_tokens=10)


def gone(name, at):
    times = {"arrived_us": at, "queued_us": at, "first_token_us": at + 5_000, "last_token_us": at + 11_000}
    return finish(name, finished_us=at + 11_000, prompt_tokens=10, output_tokens=2, **times)


@pytest.fixture
def fleet_at(tmp_path):
    """``fleet_at({...}, {...})``: a folder with an engine for each of these headers."""

    def make(*headers):
        for number, header in enumerate(headers):
            fields = {"pid": number, **header}
            makers.run_folder(tmp_path / f"engine-{number}", *lines(), about=makers.manifest(), **fields)
        return find_fleet([str(tmp_path)])

    return make


@pytest.mark.parametrize(
    ("headers", "error", "words"),
    [
        ([{}, {"model": "other"}], InputError, "2 kinds"),
        ([{}, {"settings": {"kv_transfer_config.kv_role": "kv_producer"}}], InputError, "2 kinds"),
        ([{}], UsageError, "one engine is no fleet"),
        ([{"data_parallel_size": 2}] * 2, UsageError, "lock-step"),
    ],
)
def test_engines_that_cannot_replace_each_other_are_refused(fleet_at, headers, error, words):
    with pytest.raises(error, match=words):
        fleet.fleet_load(fleet_at(*headers))


def test_a_copy_of_a_recording_is_replayed_once(fleet_at):
    load, [note] = fleet.fleet_load(fleet_at({}, {}, {"pid": 1}))
    assert (len(load.timelines), note.arguments["copies"].count) == (2, 1)


def test_traces_that_do_not_fit_into_memory_are_refused(fleet_at, monkeypatch):
    monkeypatch.setattr("schedtrace.whatif.fleet.MOST_BYTES", 1000)
    with pytest.raises(InputError, match="MB of traces"):
        fleet.fleet_load(fleet_at({}, {}))


def test_the_engines_are_ranks_on_one_clock_and_requests_of_one_id_are_told_apart(fleet_at):
    anchor = 1_700_000_000_000_000
    load, notes = fleet.fleet_load(fleet_at({}, {"wall_anchor_us": anchor + 50_000}))
    [requests] = [list(of_one) for of_one in load.loads]
    assert [timeline.rank for timeline in load.timelines] == [0, 1]
    assert len({request.request_id for request in requests}) == len(requests) == 24
    assert [(each.data_parallel_rank, each.arrived_us) for each in requests[:3]] == [
        (0, 0),
        (1, 50_000),
        (0, 100_000),
    ]
    assert notes == []


def test_simulated_engines_begin_together(fleet_at):
    virtual = {"clock": "virtual"}
    load, _ = fleet.fleet_load(fleet_at(virtual, virtual | {"wall_anchor_us": 5}))
    assert [request.arrived_us for request in load.loads[0]][:2] == [0, 0]


def test_the_most_common_limits_are_replayed_and_other_engines_are_counted(fleet_at):
    load, [note] = fleet.fleet_load(fleet_at({"kv_blocks_total": 9}, {}, {}))
    assert load.header.kv_blocks_total != 9
    assert note.arguments["different"].count == 1


def test_a_part_of_the_load_keeps_each_engine_s_own_requests(fleet_at, monkeypatch):
    monkeypatch.setattr("schedtrace.whatif.part.FEWEST", 5)
    load, _ = fleet.fleet_load(fleet_at({}, {"wall_anchor_us": 1_700_000_000_050_000}), most_s=0.001)
    own = [len(timeline.arrivals) for timeline in load.timelines]
    assert own == [3, 2]
    assert (load.part.requests, load.part.whole_requests) == (5, 24)
