import weakref

import pytest
from msgspec import structs

from schedtrace.diagnose.analyze import (
    analyze,
    analyze_run,
    at_or_above,
    cap_counts,
    cap_table,
    cause_table,
    exit_counts,
)
from schedtrace.errors import UsageError
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.report import CapRow, CauseRow, Severity
from schedtrace.model.trace import ChunkCap, Exit, Preemption
from schedtrace.read.run import read_run
from schedtrace.timeline import timeline
from schedtrace.timeline.timeline import Timeline
from tests import makers
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
    findings = [makers.finding(severity=word) for word in ("critical", "warning", "info")]
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


LINE = "vllm/v1/core/sched/scheduler.py"


def exact(cause, request_id=None, budget_left=0, **fields):
    given = {"loop": "waiting", "kind": "break", "location": f"{LINE}:10", "via": "source", **fields}
    return Exit(cause=cause, request_id=request_id, budget_left=budget_left, **given)


def test_exits_of_one_place_are_one_row(view_of):
    lines = [
        step(0, waiting=1, ended=exact(Cause.MAX_NUM_SEQS, "a", 100)),
        step(1, waiting=1, ended=exact(Cause.MAX_NUM_SEQS, "a", 300)),
        step(2, waiting=1, ended=exact(Cause.MAX_NUM_SEQS, "b", 500)),
    ]
    assert cause_table([exit_counts(view_of(*lines))]) == [
        CauseRow(
            loop="waiting",
            kind="break",
            cause="max_num_seqs",
            detail=None,
            location=f"{LINE}:10",
            via="source",
            refusal=True,
            exits=3,
            steps=3,
            requests=2,
            mean_budget_left=300,
        )
    ]


def test_an_exit_line_that_stands_for_many_counts_as_many(view_of):
    skips = [
        exact(Cause.LORA_CAP, "a", kind="continue"),
        exact(Cause.LORA_CAP, None, kind="continue", count=9),
    ]
    [row] = cause_table([exit_counts(view_of(step(0, waiting=10, exits=skips)))])
    assert (row.exits, row.steps, row.requests) == (10, 1, 1)


def test_the_end_of_the_loop_is_a_refusal_only_if_somebody_is_left(view_of):
    spent = exact(Cause.TOKEN_BUDGET, kind="condition")
    rows = cause_table(
        [exit_counts(view_of(step(0, waiting=0, ended=spent), step(1, waiting=2, ended=spent)))]
    )
    assert [(row.refusal, row.exits) for row in rows] == [(True, 1), (False, 1)]


def test_a_running_request_left_out_is_refused_though_nobody_waits(view_of):
    left_out = exact(Cause.TOKEN_BUDGET, "a", loop="running", kind="condition")
    [row] = cause_table([exit_counts(view_of(step(0, waiting=0, ended=left_out)))])
    assert row.refusal


def test_an_empty_queue_and_a_load_that_begins_are_no_refusals(view_of):
    exits = [exact(Cause.KV_LOAD_STARTED, "a", kind="continue"), exact(Cause.QUEUE_EMPTY)]
    rows = cause_table([exit_counts(view_of(step(0, waiting=1, exits=exits)))])
    assert {row.cause: row.refusal for row in rows} == {"kv_load_started": False, "queue_empty": False}


def test_inferred_exits_are_rows_of_their_own(view_of):
    rows = cause_table([exit_counts(view_of(step(0, waiting=1, ended=Cause.KV_BLOCKS)))])
    assert [(row.cause, row.via, row.location) for row in rows] == [("kv_blocks", "inferred", None)]


def test_caps_are_added_up(view_of):
    caps = [
        ChunkCap("a", Cap.LONG_PREFILL, 900, 100, f"{LINE}:5"),
        ChunkCap("b", Cap.LONG_PREFILL, 300, 100, f"{LINE}:5"),
    ]
    lines = [step(0, got={"a": 100, "b": 100}, caps=caps), step(1, got={"a": 500}, caps=caps[:1])]
    assert cap_table([cap_counts(view_of(*lines))]) == [
        CapRow(
            cap="long_prefill_token_threshold",
            location=f"{LINE}:5",
            chunks=3,
            steps=2,
            requests=2,
            withheld_tokens=800 + 200 + 800,
            mean_budget_left=(800 + 500) / 2,
        )
    ]


def test_steps_with_equal_budgets_left_count_each(view_of):
    cap = ChunkCap("a", Cap.TOKEN_BUDGET, 200, 100)
    lines = [step(n, got={"a": used}, caps=[cap]) for n, used in enumerate([1000, 1000, 400])]
    [row] = cap_table([cap_counts(view_of(*lines))])
    assert row.mean_budget_left == 200


def test_a_queue_of_skipped_requests_only_is_blocked_by_what_they_were_skipped_for(found, recorded_words):
    skips = [
        exact(Cause.LORA_CAP, "a", 900, kind="continue"),
        exact(Cause.GRAMMAR_PENDING, "b", 900, kind="continue", location=f"{LINE}:20"),
        exact(Cause.LORA_CAP, "c", 900, kind="continue"),
        exact(Cause.QUEUE_EMPTY, None, 900),
    ]
    [finding] = found("blocked-budget", step(0, got={"x": 100}, waiting=3, exits=skips))
    assert (finding.cause, finding.via, finding.location) == ("lora_cap", "source", f"{LINE}:10")
    recorded_words(finding.example)


def test_where_the_loop_was_left_for_a_reason_skips_before_it_do_not_count(found):
    exits = [exact(Cause.LORA_CAP, "a", 900, kind="continue"), exact(Cause.MAX_NUM_SEQS, "b", 900)]
    [finding] = found("blocked-budget", step(0, got={"x": 100}, waiting=3, exits=exits))
    assert finding.cause == "max_num_seqs"


def test_exits_at_several_places_name_none(found):
    places = [exact(Cause.KV_BLOCKS, "a", 900, location=f"{LINE}:{line}") for line in (1, 2)]
    [finding] = found("blocked-budget", *(step(n, waiting=1, ended=place) for n, place in enumerate(places)))
    assert finding.location is None


def test_a_run_can_be_read_whose_trace_has_no_exits(run_of):
    report = analyze_run(run_of("r", step(0, exits=[])))
    assert (report.causes, report.caps) == ([], [])


def test_a_folder_with_two_engines_counts_each_steps(tmp_path):
    for rank in range(2):
        run_folder(tmp_path / "r", step(0, waiting=1, ended=exact(Cause.KV_BLOCKS, "a")), engine_rank=rank)
    [row] = analyze_run(read_run(tmp_path / "r")).causes
    assert (row.exits, row.steps, row.requests) == (2, 2, 1)
