"""Latencies of requests and their tails, and throughput.

Throughput is over the time with requests, of a trial over all of it, wherever it is shown.
"""

import random

import polars as pl
import pytest

from schedtrace.compare.compare import compare
from schedtrace.diagnose.analyze import analyze
from schedtrace.diagnose.run_statistics import engine_sums
from schedtrace.diagnose.serving_metrics import (
    counted_time,
    covered_seconds,
    distribution,
    inter_token,
    request_latencies,
    tails,
)
from schedtrace.model.trace import Preemption, ScheduledRequest
from schedtrace.model.what_if import ReplayOutcome
from schedtrace.present.pages.report import report_page
from schedtrace.present.renderers import Format, renderer
from schedtrace.read.run import read_run
from schedtrace.timeline.spans import united
from schedtrace.timeline.window import Window, windowed
from schedtrace.whatif.sweep import _measure
from schedtrace.whatif.sweep_rows import parse_slo, sweep_rows
from schedtrace.workloads.recorded_load import loads_of_run
from tests.makers import arrival, finish, manifest, result, run_folder, step


def weighted(*rows):
    return pl.DataFrame(
        rows, schema={"us": pl.Float64, "weight": pl.Int64}, orient="row", infer_schema_length=None
    )


def test_a_weight_is_so_many_values():
    chance = random.Random(4)  # noqa: S311  # figures, no secret
    rows = [(float(chance.randrange(40)), chance.randrange(4)) for _ in range(200)]
    found = distribution(weighted(*rows))
    whole = pl.Series([us / 1e3 for us, weight in rows for _ in range(weight)])
    assert found.count == len(whole)
    assert found.mean == pytest.approx(whole.mean())
    assert [found.p50, found.p90, found.p99] == pytest.approx(
        [whole.quantile(part, "linear") for part in (0.5, 0.9, 0.99)]
    )
    assert found.max == whole.max()


def test_unknown_values_and_none_at_all():
    assert distribution(weighted((None, 3), (5.0, 0))) is None
    assert distribution(weighted((2000.0, 1), (None, 1))).p99 == 2.0


def rows(view):
    """Time in ms to how many had it."""
    found = inter_token(view).filter(pl.col("weight") > 0).drop_nulls()
    return dict(
        sorted((us / 1e3, n) for us, n in found.group_by("us").agg(pl.col("weight").sum()).iter_rows())
    )


def got(number, *requests, **fields):
    """A step from ``(id, computed, scheduled, phase, drafts)``."""
    rows = [ScheduledRequest(*request) for request in requests]
    return step(number, got={row.request_id: row.scheduled_tokens for row in rows}, requests=rows, **fields)


def came(*ids):
    return {"arrived": [arrival(one, -20, prompt_tokens=100) for one in ids]}


def test_a_chunked_prompt_gives_one_token(view_of):
    """Three chunks, then two decodes; the outputs of steps 2, 3 and 4 are tokens."""
    steps = [
        got(0, ("a", 0, 40, "new"), **came("a")),
        got(1, ("a", 40, 40)),
        got(2, ("a", 80, 20), back=2000),
        got(3, ("a", 100, 1)),
        got(4, ("a", 101, 1)),
    ]
    assert rows(view_of(*steps)) == {9.0: 1, 10.0: 1}


def test_each_request_of_a_step_counts(view_of):
    """From step 1 on a and b decode; b gets nothing in step 3."""
    steps = [got(0, ("a", 0, 100, "new"), ("b", 0, 100, "new"), **came("a", "b"))]
    steps += [got(n, ("a", 99 + n, 1), ("b", 99 + n, 1)) for n in (1, 2)]
    steps += [got(3, ("a", 102, 1), back=4000), got(4, ("a", 103, 1), ("b", 102, 1))]
    assert rows(view_of(*steps)) == {7.0: 1, 10.0: 4, 13.0: 1, 20.0: 1}


def test_a_preemption_in_between_counts_as_time(view_of):
    """Token at 1 ms and 11 ms; 101 tokens are computed again in two chunks, the next token is at 61 ms."""
    steps = [
        got(0, ("a", 0, 100, "new"), **came("a")),
        got(1, ("a", 100, 1)),
        step(2, preempted=[Preemption("a", 101, "b")], waiting=1),
        *(step(n, waiting=1) for n in (3, 4)),
        got(5, ("a", 0, 80, "resumed")),
        got(6, ("a", 80, 22)),
        got(7, ("a", 102, 1)),
    ]
    assert rows(view_of(*steps)) == {10.0: 2, 50.0: 1}


def test_an_output_with_drafts_is_one(view_of):
    steps = [
        got(0, ("a", 0, 100, "new"), **came("a")),
        got(1, ("a", 100, 4, "running", 3)),
        got(2, ("a", 102, 4, "running", 3)),
    ]
    assert rows(view_of(*steps)) == {10.0: 2}


def test_an_output_that_is_not_back(view_of):
    steps = [got(n, ("a", 99 + n, 1)) for n in range(1, 4)]
    steps[1].output_us = None
    assert rows(view_of(got(0, ("a", 0, 100, "new"), **came("a")), *steps)) == {10.0: 1}


def test_a_step_that_was_scheduled_before_the_last_token_was_known_gives_none(view_of):
    """The token of step 2 is the last one; step 3 was in flight."""
    steps = [got(0, ("a", 0, 100, "new"), **came("a")), *(got(n, ("a", 99 + n, 1)) for n in (1, 2, 3))]
    ended = finish("a", first_token_us=1000, last_token_us=21_000, finished_us=22_000)
    assert rows(view_of(*steps, step(4, finished=[ended]))) == {10.0: 2}


def latencies(view, *columns):
    return dict(request_latencies(view).select("request_id", pl.concat_list(columns)).iter_rows())


SURVIVORS = [
    got(
        0,
        ("done", 0, 100, "new"),
        ("gone", 0, 100, "new"),
        ("stays", 0, 100, "new"),
        ("chunk", 0, 50, "new"),
        arrived=[arrival(one, -20) for one in ("done", "gone", "stays", "chunk", "never")],
        waiting=1,
    ),
    got(
        1,
        ("done", 100, 1),
        ("gone", 100, 1),
        ("stays", 100, 1),
        ("chunk", 50, 10),
        waiting=1,
        finished=[
            finish(
                "done", arrived_us=-20, first_token_us=1000, last_token_us=11_000, output_tokens=2,
                finished_us=11_000,
            ),
            finish(
                "gone", "ABORTED", arrived_us=-20, first_token_us=1000, last_token_us=1000, output_tokens=1,
                finished_us=11_000,
            ),
            finish("never", "ABORTED", arrived_us=-20, output_tokens=0, finished_us=11_000),
        ],
    ),
]  # fmt: skip


def test_who_had_a_first_token_counts_for_ttft_however_it_ended(view_of):
    """``chunk`` has computed 60 of its 100 prompt tokens when the trace ends."""
    found = latencies(view_of(*SURVIVORS), "ttft_us", "tpot_us", "e2e_us")
    assert found == {
        "done": [1020, 10_000, 11_020],
        "gone": [1020, None, None],
        "never": [None] * 3,
        "stays": [1020, None, None],
        "chunk": [None] * 3,
    }


def test_a_first_token_before_the_window_is_one(view_of):
    window = windowed(view_of(*SURVIVORS[:1], got(1, ("stays", 100, 1))), Window(begin_us=5000))
    assert latencies(window, "ttft_us")["stays"] == [None]
    assert engine_sums(window).requests.filter(request_id="stays")["has_token"].to_list() == [True]


def one_each(count, *, slow, took=1000, extra=49_000):
    """Step ``n`` computes the prompt of request ``n``, of which that is all; one takes far longer."""
    lines, begin, back = [], 0, 0
    for number in range(count):
        length = took + (extra if number == slow else 0)
        ended = finish(
            f"r{number - 1}",
            arrived_us=begin - 20,
            first_token_us=back,
            last_token_us=back,
            finished_us=back + 20,
        )
        begin = back + 100 if number else 0
        lines.append(
            step(
                number,
                start=begin,
                took=10,
                back=length - 10,
                got={f"r{number}": 1},
                prefill_tokens=1,
                new=[f"r{number}"],
                arrived=[arrival(f"r{number}", begin - 20, begin - 10)],
                finished=[ended] if number else [],
            )
        )
        back = begin + length
    return lines


@pytest.mark.parametrize(
    ("count", "slow"), [(40, None), (20, 10)], ids=["all take about as long", "too few requests"]
)
def test_there_is_no_tail(view_of, count, slow):
    assert tails(view_of(*one_each(count, slow=slow))) == []


def test_a_slow_step_makes_the_tail_of_the_request_in_it(view_of):
    [ttft, e2e] = tails(view_of(*one_each(41, slow=20)))
    assert (ttft.metric, e2e.metric) == ("ttft_ms", "e2e_ms")
    assert (ttft.requests, ttft.slowest, ttft.slowest_request) == (40, 1, "r20")
    assert ttft.slowest_ms == pytest.approx(50.02)
    assert ttft.median_ms == pytest.approx(1.02)
    [part] = ttft.parts
    assert (part.state, part.cause) == ("interrupted", "scattered")
    assert part.share_frac == pytest.approx(1.0, abs=1e-4)  # the length of a usual step is fitted
    assert part.time_ms == pytest.approx(49.0, abs=0.01)
    assert (ttft.first_step, ttft.last_step) == (20, 20)


def test_a_prompt_counts_without_what_was_cached(view_of):
    lines = one_each(40, slow=20)
    for number, line in enumerate(lines):
        line.requests = [ScheduledRequest(f"r{number}", 0 if number == 20 else 90, 1, "new")]
    [ttft, _] = tails(view_of(*lines))
    assert (ttft.prefill_tokens, ttft.usual_prefill_tokens) == (100, 10)


S = 1_000_000
GAP_S = 19


def one_request(number, name, at_us, *, steps=5, trial=None):
    """A request of a second that gets a token in each of its steps, the last one when it ends."""
    each = S // steps
    return [
        step(
            number + at,
            start=at_us + at * each,
            back=each,
            got={name: 1},
            new=name if at == 0 else "",
            trial=trial,
            output_tokens=1,
            arrived=[arrival(name, at_us, queued=at_us)] if at == 0 else [],
        )
        for at in range(steps)
    ] + [
        step(
            number + steps,
            start=at_us + S,
            took=0,
            back=0,
            trial=trial,
            output_tokens=0,
            finished=[
                finish(
                    name,
                    output_tokens=steps,
                    finished_us=at_us + S,
                    arrived_us=at_us,
                    first_token_us=at_us + each,
                    last_token_us=at_us + S,
                )
            ],
        )
    ]


def load(at_s=0, *, warm_up=False, trial=None):
    """A request of 5 tokens a second, and one 19 s before it: a warm-up."""
    begin = (at_s + (GAP_S + 1 if warm_up else 0)) * S
    before = one_request(0, "w", at_s * S, trial=trial) if warm_up else []
    return [*before, *one_request(len(before), "a", begin, trial=trial)]


def report_of(run, **options):
    return analyze([run], **options).runs[0]


def shown(run):
    return renderer(Format.TEXT)(report_page(analyze([run])), width=80)


def seconds_said(run):
    return {name: value.value for name, value in counted_time(report_of(run)).arguments.items()}


def test_a_warm_up_request_long_before_changes_no_throughput(run_of):
    alone, warmed = run_of("alone", *load()), run_of("warmed", *load(warm_up=True))
    for run, lasted in ((alone, 1), (warmed, 21)):
        report = report_of(run)
        (trial,), (engine,) = report.trials, report.statistics.engines
        assert (trial.throughput_over, trial.duration_s) == ("requests", lasted)
        assert trial.output_tokens_per_s == engine.output_tokens_per_s == 5
        assert (trial.throughput_s, trial.requests_per_s) == (1 if run is alone else 2, 1)
        assert trial.total_tokens_per_s == engine.total_tokens_per_s == 105
    assert "5.00 output tok/s while requests were present (" in shown(warmed)
    assert "5.00 output tok/s, TTFT" in shown(alone)
    assert seconds_said(warmed) == {"counted": 2, "lasted": 21}
    assert seconds_said(alone) == {}


def test_two_servers_are_compared_by_the_time_with_requests(run_of, recorded_words):
    comparison = compare(base=run_of("a", *load(warm_up=True)), new=run_of("b", *load()))
    assert {metric.name: metric.change_frac for metric in comparison.metrics}["output"] == 0
    recorded_words(comparison.notes)


def test_a_trial_is_measured_from_its_begin_to_its_end(run_of):
    told = manifest(trials=[result(1, 21.0, num_requests=2, input_tokens=200, output_tokens=10)])
    measured = run_of("a", *load(warm_up=True, trial=1), about=told)
    alone = run_of("b", *load(warm_up=True, trial=1))
    for run, source in ((measured, "front_end"), (alone, "trace")):
        (trial,) = report_of(run).trials
        assert (trial.throughput_from, trial.throughput_over, trial.throughput_s) == (source, "trial", 21)
        assert trial.output_tokens_per_s == pytest.approx(10 / 21)
    assert " output tok/s over whole trials (" in shown(measured)
    assert seconds_said(measured) == {"counted": 21, "busy": 2}


def test_a_part_of_a_trial_has_no_begin_and_no_end(run_of):
    run = run_of("a", *load(warm_up=True, trial=1))
    (trial,) = report_of(run, window=Window(begin_us=10 * S)).trials
    assert (trial.throughput_over, trial.throughput_s, trial.output_tokens_per_s) == ("requests", 1, 5)


def test_tokens_of_requests_that_go_on_count(run_of):
    (trial,) = report_of(run_of("a", *load()[:3])).trials
    assert (trial.requests_per_s, trial.output_tokens_per_s) == (0, 5)


def test_engines_that_worked_in_turn_do_not_add_up(tmp_path):
    """One engine works in the first second, the other one in the third; both give 5 tokens."""
    run_folder(tmp_path, *load(), engine_rank=0)
    run = read_run(run_folder(tmp_path, *load(at_s=2), engine_rank=1))
    report = report_of(run)
    assert [trial.output_tokens_per_s for trial in report.trials] == [2.5, 2.5]
    assert [trial.throughput_s for trial in report.trials] == [2, 2]
    assert [row.output_tokens_per_s for row in report.statistics.engines] == [2.5, 2.5, 5]
    output = {metric.name: metric for metric in compare(base=run, new=run).metrics}["output"]
    assert output.base.mean == 5


@pytest.mark.parametrize(("trial", "lasted"), [(None, 2), (1, 21)])
def test_a_sweep_measures_the_load_of_a_server_and_that_of_a_trial_alike(run_of, trial, lasted):
    run = run_of("a", *load(warm_up=True, trial=trial))
    (recorded,) = loads_of_run(run.traces)
    assert recorded.of_server is (trial is None)
    outcome = ReplayOutcome(key="", changes={})
    _measure(outcome, run.traces, [recorded])
    (row,) = sweep_rows([outcome], parse_slo("e2e_p99=1s"), recorded=None)
    assert row.figure("output").value == pytest.approx(10 / lasted)
    assert row.figure("requests").value == pytest.approx(2 / lasted)
    assert row.goodput_requests_per_s == pytest.approx(2 / 21)  # a pause less must not make more of late ones


def test_spans_are_counted_once():
    spans = pl.DataFrame({"begin_us": [0, 10, 50, 20, 60], "end_us": [30, 20, 60, 40, 70]})
    assert united(spans).rows() == [(0, 40), (50, 70)]
    assert covered_seconds(spans) == 60e-6
    assert covered_seconds(spans.clear()) == 0
