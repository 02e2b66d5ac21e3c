import msgspec
import pytest

from schedtrace.diagnose.latencies import FINISHED
from schedtrace.diagnose.run_statistics import STRIP_CELLS, strip, trial_reports
from schedtrace.model.causes import Cause
from schedtrace.model.statistics import Percentiles
from schedtrace.model.trace import Preemption
from tests.makers import arrival, finish, manifest, result, step


def ran(request_id, first_ms, last_ms, **fields):
    """A request that came at 0 and had its first and last token after so many milliseconds."""
    times = {"arrived_us": 0, "first_token_us": 1000 * first_ms, "last_token_us": 1000 * last_ms}
    return finish(request_id, **{**times, **fields})


def there(*finished, **fields):
    """A step that all of them were there for, from its start to its output."""
    at = {"start": 0, "back": 1_000_000, **fields}
    names = [one.request_id for one in finished]
    came = [arrival(name, 0, queued=0) for name in names]
    gone = [msgspec.structs.replace(one, finished_us=at["back"]) for one in finished]
    return step(0, **at, got=dict.fromkeys(names, 1), new=names, arrived=came, finished=gone)


def test_the_shape_of_a_trial_is_told_by_its_steps(view_of):
    [report] = trial_reports(
        view_of(
            step(0),
            step(1, got={"a": 600}, new="a"),
            step(2, got={"a": 1, "b": 99, "c": 200}, new="bc", waiting=1, ended=Cause.KV_BLOCKS),
            step(3, got={"a": 1, "b": 99}, waiting=1, preempted=[Preemption("c", 9)]),
            step(4, got={"a": 1, "c": 199, "d": 300}, resumed="c", new="d"),
            step(5, preempted=[Preemption("a", 9, in_schedule=False)]),
        ),
        None,
    )
    assert (report.trial, report.engine_rank, report.steps) == (None, 0, 6)
    assert (report.first_step_requests, report.first_step_tokens) == (1, 600)
    assert report.new_per_step == [1, 2, 1]
    assert report.budget_use_frac == pytest.approx((0.6 + 0.3 + 0.1 + 0.5) / 4)
    assert report.budget_use_waiting_frac == pytest.approx((0.3 + 0.1) / 2)
    assert report.preemptions == 1


def test_a_trial_lasts_from_the_start_of_its_first_step_to_its_last_output(view_of):
    [report] = trial_reports(view_of(step(0, start=500), step(1, back=2500), step(2, back=None)), None)
    assert report.duration_s == pytest.approx((10_000 + 2500 - 500) / 1e6)


def test_percentiles_interpolate_between_requests(view_of):
    done = [
        ran(name, ms, ms + 100, output_tokens=11) for name, ms in zip("abcd", (10, 20, 30, 40), strict=True)
    ]
    [report] = trial_reports(view_of(step(0, finished=done)), None)
    assert report.ttft_ms == Percentiles(
        count=4, mean=25, p50=25, p90=pytest.approx(37), p99=pytest.approx(39.7)
    )
    assert report.e2e_ms.p50 == 125
    assert report.tpot_ms == Percentiles(count=4, mean=10, p50=10, p90=10, p99=10)


def test_a_request_with_one_token_has_no_time_per_further_token(view_of):
    done = [ran("a", 10, 10, output_tokens=1), ran("b", 10, 40, output_tokens=2)]
    [report] = trial_reports(view_of(step(0, finished=done)), None)
    assert (report.ttft_ms.count, report.tpot_ms.count, report.tpot_ms.mean) == (2, 1, 30)


def test_a_request_whose_times_are_unknown_is_in_no_percentile(view_of):
    done = [ran("a", 10, 20), finish("b")]
    [report] = trial_reports(view_of(step(0, finished=done)), None)
    assert (report.requests_finished, report.ttft_ms.count) == (2, 1)


@pytest.mark.parametrize("status", ["ABORTED", "ERROR", "IGNORED", "of a newer version"])
def test_only_requests_that_got_what_they_asked_for_are_finished(view_of, status):
    """The other one had a first token all the same."""
    finished = [*(ran(name, 10, 20, status=name) for name in FINISHED), ran("z", 500, 900, status=status)]
    [report] = trial_reports(view_of(there(*finished)), None)
    assert FINISHED == ["STOPPED", "LENGTH_CAPPED", "REPETITION"]
    assert (report.requests_finished, report.requests_aborted, report.requests_per_s) == (3, 1, 3)
    assert (report.ttft_ms.count, report.e2e_ms.count, report.e2e_ms.p99) == (4, 3, 20)


@pytest.mark.parametrize(("recorded", "count"), [(True, 1), (False, None)])
def test_preemptions_that_could_not_be_recorded_are_not_none(view_of, recorded, count):
    lines = [step(0, preempted=[Preemption("a", 1)] if recorded else [])]
    [report] = trial_reports(view_of(*lines, preemptions_recorded=recorded), None)
    assert report.preemptions == count


@pytest.mark.parametrize(
    ("status", "complete"),
    [
        ("finished", [True, True]),
        ("attached", [True, True]),
        ("running", [True, False]),
        ("interrupted", [True, False]),
        ("failed", [True, False]),
    ],
)
def test_a_trial_without_a_result_was_cut_if_the_run_ended_early(view_of, status, complete):
    view = view_of(step(0, trial=1, finished=[ran("a", 1, 2)], arrived=[arrival("a", 0)]), step(1, trial=2))
    told = manifest(status=status, trials=[result(1, 2.0, num_requests=1)])
    assert [report.complete for report in trial_reports(view, told)] == complete
    assert [report.complete for report in trial_reports(view, None)] == [True, True]


@pytest.mark.parametrize(("status", "complete"), [("finished", True), ("running", False), ("failed", False)])
def test_a_trial_of_which_the_trace_lacks_requests_was_cut_though_the_front_end_saw_it_end(
    view_of, status, complete
):
    view = view_of(step(0, trial=1, finished=[ran("a", 1, 2)], arrived=[arrival("a", 0)]))
    told = manifest(status=status, trials=[result(1, 2.0, num_requests=2)])
    [report] = trial_reports(view, told)
    assert (report.requests_finished, report.complete) == (1, complete)
    [of_two_ranks] = trial_reports(view, told, engines=2)
    assert of_two_ranks.complete


def test_a_trace_without_trials_is_never_cut(view_of):
    [report] = trial_reports(view_of(step(0)), manifest(status="failed"))
    assert report.complete


def test_throughput_is_the_front_ends_where_it_measured(view_of):
    lines = [step(0, trial=1, arrived=[arrival("a", 0)], finished=[finish("a")])]
    told = manifest(trials=[result(1, 2.0, num_requests=4, input_tokens=100, output_tokens=60)])
    [report] = trial_reports(view_of(*lines), told)
    assert report.throughput_from == "front_end"
    assert (report.requests_per_s, report.total_tokens_per_s, report.output_tokens_per_s) == (2, 80, 30)


def test_throughput_is_the_traces_without_a_front_end(view_of):
    finished = [
        finish("a", prompt_tokens=100, output_tokens=20),
        finish("b", prompt_tokens=60, output_tokens=20),
    ]
    [report] = trial_reports(view_of(there(*finished, back=500_000)), None)
    assert report.throughput_from == "trace"
    assert (report.requests_per_s, report.total_tokens_per_s, report.output_tokens_per_s) == (4, 400, 80)


def test_a_trial_that_the_front_end_did_not_finish_is_measured_by_the_trace(view_of):
    lines = [
        step(trial - 1, trial=trial, arrived=[arrival(name, 0)], finished=[finish(name)])
        for trial, name in ((1, "a"), (2, "b"))
    ]
    reports = trial_reports(view_of(*lines), manifest(trials=[result(1, 2.0)]))
    assert [report.throughput_from for report in reports] == ["front_end", "trace"]


def test_without_a_finished_request_there_is_no_throughput(view_of):
    [report] = trial_reports(view_of(step(0, got={"a": 5})), None)
    assert (report.requests_per_s, report.throughput_from, report.requests_finished) == (None, None, 0)


def test_each_trial_has_its_own_figures_and_the_warm_up_none(view_of):
    lines = [
        step(trial, trial=trial, got={name: 10 * (trial + 1)}, new=name, arrived=[arrival(name, 0)])
        for trial, name in enumerate("wab")
    ]
    reports = trial_reports(view_of(*lines, trial_ids=True), None)
    assert [(report.trial, report.first_step_tokens, report.steps) for report in reports] == [
        (1, 20, 1),
        (2, 30, 1),
    ]


def test_the_strip_has_one_cell_a_step_while_there_are_few(view_of):
    cells = strip(view_of(step(0), step(1, got={"a": 250}), step(2, got={"a": 1000}, waiting=1)))
    assert [(cell.use_frac, cell.waiting_frac) for cell in cells] == [(0.25, 0), (1, 1)]


def test_a_cell_of_many_steps_shows_their_highest_use_and_their_share_with_waiting(view_of):
    lines = [step(n, got={"a": 500 if n % 2 else 100}, waiting=n % 2) for n in range(2 * STRIP_CELLS)]
    cells = strip(view_of(*lines))
    assert [(cell.use_frac, cell.waiting_frac) for cell in cells] == [(0.5, 0.5)] * STRIP_CELLS
