"""Exits and caps, counted."""

from schedtrace.diagnose.analyze import analyze_run, cap_counts, cap_table, cause_table, exit_counts
from schedtrace.model.causes import Cap, Cause
from schedtrace.model.report import CapRow, CauseRow
from schedtrace.model.trace import ChunkCap, Exit
from tests.makers import run_folder, step

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


def test_a_queue_of_skipped_requests_only_is_blocked_by_what_they_were_skipped_for(found):
    skips = [
        exact(Cause.LORA_CAP, "a", 900, kind="continue"),
        exact(Cause.GRAMMAR_PENDING, "b", 900, kind="continue", location=f"{LINE}:20"),
        exact(Cause.LORA_CAP, "c", 900, kind="continue"),
        exact(Cause.QUEUE_EMPTY, None, 900),
    ]
    [finding] = found("blocked-budget", step(0, got={"x": 100}, waiting=3, exits=skips))
    assert (finding.cause, finding.via, finding.location) == ("lora_cap", "source", f"{LINE}:10")
    [example] = finding.evidence.examples
    assert (example.step, example.num_waiting_after, example.request_id) == (0, 3, "a")


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
    from schedtrace.read.run import read_run

    for rank in range(2):
        run_folder(tmp_path / "r", step(0, waiting=1, ended=exact(Cause.KV_BLOCKS, "a")), engine_rank=rank)
    [row] = analyze_run(read_run(tmp_path / "r")).causes
    assert (row.exits, row.steps, row.requests) == (2, 2, 1)
