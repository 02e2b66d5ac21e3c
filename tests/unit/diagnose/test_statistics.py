import msgspec
import pytest

from schedtrace.diagnose.run_statistics import (
    STRIP_CELLS,
    engine_sums,
    pooled_reports,
    statistics,
    strip,
    trial_reports,
)
from schedtrace.diagnose.serving_metrics import FINISHED
from schedtrace.model.causes import Cause
from schedtrace.model.statistics import DraftUse, Outcomes, Percentiles, PrefixCacheUse
from schedtrace.model.trace import Exit, Preemption, ScheduledRequest
from schedtrace.model.trace_facts import Admission
from schedtrace.read.run import read_run
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.timeline import make_timeline
from tests.makers import arrival, finish, manifest, result, run_folder, step


@pytest.fixture
def counted(view_of):
    return lambda *lines, **header: of_engines(view_of(*lines, **header))


def of_engines(*timelines):
    return statistics(
        [engine_sums(timeline) for timeline in timelines], RecordedRanks.from_timelines(timelines)
    )


def done(name, first, last, **fields):
    """It came to the front end at -1 ms."""
    given = {"arrived_us": -1000, "queued_us": -500, "first_token_us": first, "last_token_us": last}
    return finish(name, finished_us=last, **{**given, "output_tokens": 3, **fields})


def came(name, **fields):
    return arrival(name, -1000, -500, **fields)


def two_classes(**of_b):
    """a runs in steps 0 to 2, b waits for a seat and runs in steps 3 to 5."""
    waits = Exit("waiting", "break", Cause.MAX_NUM_SEQS, "b")
    lines = [step(0, got={"a": 100}, new="a", waiting=1, ended=waits, arrived=[came("a"), came("b", **of_b)])]
    lines += [step(n, got={"a": 1}, waiting=1, ended=waits) for n in (1, 2)]
    lines += [step(3, got={"b": 100}, new="b", finished=[done("a", 1000, 21_000)])]
    lines += [step(n, got={"b": 1}) for n in (4, 5)]
    return [*lines, step(6, finished=[done("b", 31_000, 51_000)])]


def test_latency_by_priority(counted):
    every, first, second = counted(*two_classes(priority=3)).latency
    assert [(row.by, row.name, row.requests, row.finished) for row in (every, first, second)] == [
        ("all", "", 2, 2), ("priority", "0", 1, 1), ("priority", "3", 1, 1)
    ]  # fmt: skip
    assert (first.ttft_ms.p50, first.tpot_ms.p50, first.e2e_ms.p50, first.queue_ms.p50) == (2, 10, 22, 0.5)
    assert (second.ttft_ms.p50, second.e2e_ms.max, second.queue_ms.p99) == (32, 52, 30.5)
    assert (every.ttft_ms.count, every.ttft_ms.mean, every.ttft_ms.p50) == (2, 17, 17)
    assert first.waiting_frac == 0.5 / 21.5
    assert second.waiting_frac == 30.5 / 51.5


def test_latency_by_adapter(counted):
    every, base, adapter = counted(*two_classes(lora="sql")).latency
    assert [(row.by, row.name, row.ttft_ms.p50) for row in (every, base, adapter)] == [
        ("all", "", 17), ("lora", "", 2), ("lora", "sql", 32)
    ]  # fmt: skip


def test_one_class_is_one_row(counted):
    assert [row.by for row in counted(*two_classes()).latency] == ["all"]


def test_how_requests_ended(counted):
    lines = [
        step(0, got={"a": 9, "b": 9, "c": 9}, new="abc", arrived=[came(name) for name in "abcd"]),
        step(1, finished=[finish("a", "STOPPED"), finish("b", "ABORTED"), finish("c", "ERROR")]),
    ]
    assert counted(*lines).outcomes == Outcomes(arrived=4, finished=1, aborted=1, errored=1, unfinished=1)


def test_prefix_cache(counted):
    found = ScheduledRequest("b", 64, 36, "new")
    lines = [
        step(0, got={"a": 100}, new="a", arrived=[came("a"), came("b")], admitted=[Admission("a", 0, 0)]),
        step(1, got={"b": 36}, new="b", requests=[found], admitted=[Admission("b", 48, 16)]),
        step(2, got={"b": 90}, resumed="b", requests=[ScheduledRequest("b", 32, 68, "resumed")]),
    ]
    use = PrefixCacheUse(
        requests=2,
        requests_with_hit=1,
        prompt_tokens=200,
        hit_tokens=64,
        hit_frac=0.32,
        local_tokens=48,
        external_tokens=16,
    )
    assert counted(*lines).prefix_cache == use
    assert counted(*lines[:1], enable_prefix_caching=False).prefix_cache is None


def test_drafts(counted):
    """Of 8 drafts in the steps, 6 are of the request that ended: at its rate 4 of 8 were for nothing."""
    lines = [
        step(0, got={"a": 10, "b": 6}, new="ab", draft_tokens=8, arrived=[came("a"), came("b")]),
        step(1, finished=[done("a", 1000, 2000, drafts=6, drafts_accepted=3, drafts_invalid=1)]),
    ]
    assert counted(*lines).drafts == DraftUse(
        drafts=6, accepted=3, invalid=1, accepted_frac=0.5, wasted_frac=4 / 16
    )
    assert counted(*lines[:1]).drafts is None


def test_step_durations(counted):
    """Steps of 1 ms every 10 ms, of which ``schedule()`` takes 0.1 ms; after step 2 the engine is idle."""
    lines = [step(0, got={"a": 100}, new="a", arrived=[came("a")]), step(1, got={"a": 1})]
    lines += [step(2, running=0), step(90, got={"b": 100}, new="b", arrived=[arrival("b", 895_000)])]
    durations = counted(*lines).durations
    assert (durations.device_ms.count, durations.device_ms.p50, durations.device_ms.max) == (3, 0.9, 0.9)
    assert (durations.start_to_start_ms.count, durations.start_to_start_ms.max) == (2, 10)


def test_sums_over_engines(tmp_path):
    """The second engine's clock began 1 ms later; it finishes nothing, and runs two dummy batches."""
    anchor = 1_700_000_000_000_000
    lines = two_classes()
    for rank, steps in ((0, lines), (1, [step(0, got={"x": 100}, new="x", arrived=[came("x")])])):
        if rank:
            steps.append(step(1, got={"x": 1}, back=44_000, dummy_batches=2, dummy_us=700))
        run_folder(tmp_path, *steps, engine_rank=rank, wall_anchor_us=anchor + 1000 * rank)
    run = read_run(tmp_path)
    first, second, both = of_engines(*map(make_timeline, run.traces)).engines
    assert (first.engine_rank, first.steps, first.requests_finished) == (0, 7, 2)
    assert (second.engine_rank, second.dummy_batches, second.dummy_ms) == (1, 2, 0.7)
    assert (both.engine_rank, both.steps, both.requests_finished, both.dummy_batches) == (None, 9, 2, 2)
    seconds = 0.0551  # b leaves at 51 ms, x is there until 55; step 6 is an empty call of 0.1 ms
    assert first.output_tokens_per_s == pytest.approx(6 / seconds)
    assert both.total_tokens_per_s == pytest.approx(206 / seconds)
    # a and b run for 21 ms each; the engines have requests for 55 ms, and the first one for step 6
    assert first.mean_running == pytest.approx(42 / 56, rel=0.02)
    assert both.mean_running == first.mean_running + second.mean_running
    assert both.mean_waiting == first.mean_waiting + second.mean_waiting


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


def test_steps_of_all_ranks_are_pooled_on_one_clock(run_of):
    """Rank 1's clock is 700 us ahead of rank 0's."""
    for rank in (0, 1):
        fields = {"engine_rank": rank, "wall_anchor_us": 5_000 + 700 * rank, "data_parallel_size": 2}
        run = run_of("ranks", step(0, start=1000, back=100), **fields)
    [report] = pooled_reports([make_timeline(trace) for trace in run.traces], None)
    assert (report.steps, report.duration_s) == (2, 800e-6)


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
