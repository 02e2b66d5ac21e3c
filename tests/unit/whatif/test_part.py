"""Of a long load so much is replayed as takes a few seconds."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import polars as pl
import pytest

from schedtrace.diagnose.analyze import analyze_run
from schedtrace.diagnose.run_statistics import pooled_reports
from schedtrace.errors import InputError
from schedtrace.model.causes import Cause
from schedtrace.model.report import Report
from schedtrace.model.say import say
from schedtrace.model.what_if import LoadPart
from schedtrace.present.pages.report import report_page
from schedtrace.present.renderers.text import render
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import ChargeTables
from schedtrace.whatif.part import REQUEST_US, STEP_US, _Time, part_of, replay_s
from schedtrace.whatif.prediction import Predictor, recorded_load
from schedtrace.workloads.clients import Clients
from tests import makers
from tests.unit.whatif.conftest import a_document, a_fit

STEP_S = (STEP_US + REQUEST_US) / 1e6
"""Of a step with one request."""


@pytest.fixture
def base(tmp_path):
    """``base(trials)``: 120 requests one after the other, each a step of its own."""

    def made(trials=0):
        def named(number):
            return f"t{1 + number * trials // 120}-{number}" if trials else f"r{number}"

        lines = [
            makers.step(
                number,
                got={named(number): 10},
                new=[named(number)],
                arrived=[makers.arrival(named(number), number * makers.STEP_EVERY_US)],
                finished=[makers.finish(named(number), finished_us=number * makers.STEP_EVERY_US + 1000)],
                trial=1 + number * trials // 120 if trials else None,
            )
            for number in range(120)
        ]
        return recorded_load(read_run(makers.run_folder(tmp_path / "run", *lines)), a_fit())

    return made


def test_a_short_load_is_replayed_as_a_whole(base):
    whole = base()
    assert replay_s(whole.timelines) == pytest.approx(120 * STEP_S)
    assert part_of(whole, most_s=120.5 * STEP_S) is whole


def test_of_a_long_load_the_first_requests(base):
    part = part_of(base(), most_s=70.5 * STEP_S)
    assert (part.requests, part.part.whole_requests) == (69, 120)  # the 70th is answered after its step
    assert [request.request_id for request in part.loads[0]] == [f"r{number}" for number in range(69)]
    [timeline] = part.timelines
    assert (timeline.arrivals.height, timeline.finishes.height, timeline.steps.height) == (69, 69, 69)
    [trial] = pooled_reports(part.timelines, None)
    assert (trial.requests_finished, trial.steps) == (69, 69)


def test_never_fewer_than_show_something(base):
    assert part_of(base(), most_s=STEP_S).requests == 50


def test_of_several_trials_the_first_ones(base):
    part = part_of(base(trials=3), most_s=80.5 * STEP_S)
    assert (len(part.loads), part.requests, part.part.whole_requests) == (2, 80, 120)
    assert [timeline.trials() for timeline in part.timelines] == [[1, 2]]
    assert [trial.requests_finished for trial in pooled_reports(part.timelines, None)] == [40, 40]
    assert part.timelines[0].whole_trials


@pytest.fixture
def kv_bound():
    """The root cause of a run in which requests waited for KV blocks."""
    return makers.finding(
        "kv-bound",
        title=say("KV cache too small"),
        share_frac=0.15,
        cause=str(Cause.KV_BLOCKS),
        message=say("20 requests waited."),
    )


def set_charges(timeline, charges):
    none = pl.DataFrame()
    vars(timeline)["charge_tables"] = ChargeTables(none, none, none, none, charges, {})


@pytest.fixture
def troubled(base):
    """Requests 80 to 99 waited for KV blocks, for 900 of the 1,000 us that each request takes."""
    whole = base()
    begin = pl.Series("begin_us", range(80, 100)) * makers.STEP_EVERY_US
    waits = pl.DataFrame({"begin_us": begin, "end_us": begin + 900, "charge": [str(Cause.KV_BLOCKS)] * 20})
    set_charges(whole.timelines[0], waits)
    return whole


def test_a_part_holds_what_the_verdict_is_about(troubled, kv_bound):
    """Half of the share of the whole is 7.5 %: 3 of the 29 requests that a replay may take."""
    part = part_of(troubled, [kv_bound], most_s=30.5 * STEP_S)
    assert [request.request_id for request in part.loads[0]] == [f"r{number}" for number in range(54, 104)]
    assert next(iter(part.loads[0])).arrived_us == 0
    assert part.part == LoadPart(requests=50, whole_requests=120, begin_s=0.54, end_s=0.83)
    assert part.load_words == "50 of this load's 120 requests (0.54 to 0.83 s)"
    [trial] = pooled_reports(part.timelines, None)
    assert (trial.requests_finished, trial.steps) == (50, 50)
    assert part.absent == frozenset()


def test_clients_that_wait_for_answers_are_replayed_from_the_begin_or_not_at_all(troubled, kv_bound):
    paced = replace(
        troubled, loads=[replace(load, clients=Clients("loop", 4, ())) for load in troubled.loads]
    )
    with pytest.raises(InputError, match=r"holds 50 of the 120 requests, .* it stays as it is"):
        part_of(paced, [kv_bound], most_s=30.5 * STEP_S)


def test_figures_that_a_replay_is_judged_by_are_written_as_all_others(base):
    trials = [[SimpleNamespace(e2e_ms=SimpleNamespace(mean=mean))] for mean in (29_114.0, 4_930.0)]
    told = r"-83 % off in E2E mean \(29\.1 s recorded, 4,930 ms replayed\)"
    with Predictor(base()) as predictor:
        vars(predictor).update(_reports=trials[0], replayed=SimpleNamespace(replayed_trials=trials[1]))
        with pytest.raises(InputError, match=told):
            predictor.require_reproduced("E2E mean")


@pytest.mark.parametrize(
    ("tested", "told"),
    [
        (
            a_document(part=LoadPart(requests=566, whole_requests=8000, begin_s=12.3, end_s=18.9)),
            "566 of this load's 8,000 requests (12.3 to 18.9 s). What advice gains is of these",
        ),
        ("the replay is off", "Not predicted: the replay is off."),
    ],
)
def test_the_page_says_what_was_replayed(base, tested, told):
    run = base().run
    report = Report(runs=[analyze_run(run, test=lambda _, findings: (findings, tested))])
    assert told in " ".join(render(report_page(report)).split())


def test_a_part_of_several_ranks_is_on_the_first_ones_clock(base, kv_bound):
    """Rank 1's clock began 1 s before rank 0's: its wait from 1.8 to 2 s is rank 0's from 0.8 to 1 s."""
    first = base().timelines[0]
    anchor_us = first.header.wall_anchor_us - 1_000_000
    second = replace(first, header=msgspec.structs.replace(first.header, wall_anchor_us=anchor_us))
    rows = {"begin_us": [1_800_000], "end_us": [2_000_000]}
    waits = pl.DataFrame({**rows, "charge": [str(Cause.KV_BLOCKS)]})
    states = pl.DataFrame({"begin_us": [1_000_000], "end_us": [2_200_000]})
    first = replace(first, ready_tables=replace(first.tables, request_states=states.clear()))
    second = replace(second, ready_tables=replace(second.tables, request_states=states))
    set_charges(first, waits.clear())
    set_charges(second, waits)
    time = _Time([first, second])
    assert time.later_us == [0, -1_000_000]
    assert time.shares(time.spans(kv_bound), [0, 800_000], [800_000, 1_000_000]) == [0.0, 1.0]
