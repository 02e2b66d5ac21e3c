import weakref

import pytest
from msgspec import structs

from schedtrace.diagnose.analyze import analyze, analyze_run, at_or_above
from schedtrace.errors import UsageError
from schedtrace.model.causes import Cause
from schedtrace.model.report import Finding, Severity
from schedtrace.model.trace import Preemption
from schedtrace.read.run import read_run
from schedtrace.timeline import timeline
from schedtrace.timeline.timeline import Timeline
from tests.makers import arrival, finish, manifest, result, run_folder, step, workload
from tests.rank_traces import write_ranks
from tests.unit.recorded_words import texts

BLOCKED = step(0, trial=1, got={"a": 1}, waiting=1, waiting_tokens_after=9, ended=Cause.KV_BLOCKS)
PAUSED = step(1, trial=1, got={"a": 1}, waiting=1, waiting_tokens_after=9, ended=Cause.PAUSED)
PREEMPTED = step(
    2, trial=1, prefill_tokens=100, recomputed_tokens=50, preempted=[Preemption("a", 50)], ended=None
)


def of_interest(findings):
    """Those that these lines are about; their made-up times and queues have something to find, too."""
    return [finding for finding in findings if finding.code in {"blocked-budget", "preemption"}]


def test_engines_of_a_run_are_reported_one_after_the_other(tmp_path):
    for rank, tokens in ((0, 100), (1, 300)):
        done = [finish("a", output_tokens=50)]
        line = step(0, trial=1, back=500_000, got={"a": tokens}, new="a", arrived=[arrival("a", 0)])
        told = manifest(trials=[result(1, 2.0)])
        run_folder(
            tmp_path,
            line,
            step(1, trial=1, start=500_000, finished=done),
            structs.replace(PREEMPTED, start_us=510_000, output_us=511_000),
            about=told,
            engine_rank=rank,
        )
    report = analyze_run(read_run(tmp_path))
    assert [(one.engine_rank, one.first_step_tokens) for one in report.trials] == [(0, 100), (1, 300)]
    assert {one.throughput_from for one in report.trials} == {"trace"}
    assert [one.engine_ranks for one in report.findings] == [[0, 1]]
    assert report.config["engines"] == 2


def test_one_engine_of_several_is_measured_by_its_trace_even_alone(tmp_path):
    for rank in (0, 1):
        done = step(0, trial=1, arrived=[arrival("a", 0)], finished=[finish("a")])
        run_folder(tmp_path, done, about=manifest(trials=[result(1, 2.0)]), engine_rank=rank)
    [alone] = analyze_run(read_run(tmp_path / "engine-1.jsonl")).trials
    assert (alone.engine_rank, alone.throughput_from) == (1, "trace")


def test_what_is_wrong_with_a_trace_and_what_the_recorder_said_is_told(run_of, recorded_words):
    run = run_of("r", step(0), step(2), notices=["no hook for preemptions"])
    recorded_words(text.replace(str(run.path), "RUN") for text in texts(analyze_run(run).problems))


@pytest.mark.parametrize(
    ("status", "is_problem"),
    [("failed", True), ("interrupted", True), ("running", True), ("finished", False)],
)
def test_a_run_that_did_not_finish_says_so(run_of, status, is_problem, recorded_words):
    problems = analyze_run(run_of("r", step(0), about=manifest(status=status, error="boom"))).problems
    assert len(problems) == is_problem
    recorded_words(problems)


def test_a_prefix_cache_that_was_not_empty_is_a_problem(run_of, recorded_words):
    trials = [result(trial, 1.0, prefix_cache_reset=trial == 2) for trial in (1, 2, 3)]
    problems = analyze_run(run_of("r", step(0), about=manifest(trials=trials))).problems
    recorded_words(problems)


def test_a_queue_that_disagrees_with_the_recorded_count_is_a_problem(run_of, recorded_words):
    problems = analyze_run(run_of("r", step(0, waiting=3, arrived=[arrival("a", 0)]), step(1))).problems
    recorded_words(problems)


def test_the_configuration_is_the_headers_and_the_manifests(run_of):
    bare = analyze_run(run_of("bare", step(0))).config
    full = analyze_run(run_of("full", step(0), about=manifest(workload=workload(prequeue=True)))).config
    varied = workload(range_ratio=0.5)
    assert analyze_run(run_of("varied", step(0), about=manifest(workload=varied))).config["workload"][
        "range_ratio"
    ] == pytest.approx(0.5)
    shared = {"token_budget": 1000, "max_num_running_reqs": 8, "policy": "fcfs", "engines": 1}
    assert shared.items() <= bare.items() <= full.items()
    assert "workload" not in bare
    assert (full["workload"]["prequeue"], full["workload"]["num_prompts"]) == (True, 4)


def test_several_runs_are_reported_each_for_itself(run_of):
    report = analyze([run_of("a", BLOCKED), run_of("b", PAUSED)])
    assert [run.label for run in report.runs] == ["a", "b"]
    causes = [[finding.cause for finding in of_interest(run.findings)] for run in report.runs]
    assert causes == [["kv_blocks"], ["paused"]]


@pytest.mark.parametrize(
    ("asked", "passing"),
    [
        (None, []),
        ("critical", ["critical"]),
        ("Warning", ["critical", "warning"]),
        ("info", ["critical", "warning", "info"]),
    ],
)
def test_a_severity_asked_for_is_passed_by_it_and_by_worse(asked, passing):
    severe = at_or_above(asked)
    unknown = dict.fromkeys(Finding.__struct_fields__)
    findings = [Finding(**unknown | {"severity": word}) for word in ("critical", "warning", "info")]
    assert [finding.severity for finding in findings if severe(finding)] == passing


def test_a_severity_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UsageError) as refused:
        at_or_above("dire")
    assert all(name.lower() in str(refused.value) for name in ("dire", *Severity.__members__))


def test_one_timeline_of_a_run_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """What all ranks together need is taken from each before it goes."""
    made, alive = [], []

    class Watched(Timeline):
        def __init__(self, **fields):
            alive.append(sum(one() is not None for one in made))
            made.append(weakref.ref(self))
            super().__init__(**fields)

    monkeypatch.setattr(timeline, "Timeline", Watched)
    run = read_run(write_ranks(tmp_path / "run", [[(2, 0), (2, 0), (14, 0)]] * 40, lockstep=False))
    findings = analyze_run(run).findings
    assert "rank-imbalance" in {finding.code for finding in findings}
    assert alive == [0, 0, 0]  # the last one is the uneven one, which needs no second look


def test_a_trace_that_is_read_once_is_not_kept(tmp_path):
    run = read_run(write_ranks(tmp_path / "run", [[(2, 0), (2, 0)]] * 3))
    assert [header.engine_rank for header in run.traces.headers] == [0, 1]
    assert run.traces.once(1) is not run.traces.once(1)
    assert run.traces.once(0) is run.traces[0]
    assert run.traces[1] is run.traces.once(1)
