"""Throughput is over the time with requests, of a trial over all of it, wherever it is shown."""

import pytest

from schedtrace.compare.compare import compare
from schedtrace.diagnose.analyze import analyze
from schedtrace.diagnose.serving_metrics import counted_time, covered_seconds
from schedtrace.model.what_if import ReplayOutcome
from schedtrace.present.pages.report import report_page
from schedtrace.present.renderers import Format, renderer
from schedtrace.read.run import read_run
from schedtrace.timeline.spans import united
from schedtrace.timeline.window import Window
from schedtrace.whatif.sweep import _measure
from schedtrace.whatif.sweep_rows import parse_slo, sweep_rows
from schedtrace.workloads.recorded_load import loads_of_run
from tests.makers import arrival, finish, manifest, result, run_folder, step

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
    import polars as pl

    spans = pl.DataFrame({"begin_us": [0, 10, 50, 20, 60], "end_us": [30, 20, 60, 40, 70]})
    assert united(spans).rows() == [(0, 40), (50, 70)]
    assert covered_seconds(spans) == 60e-6
    assert covered_seconds(spans.clear()) == 0
