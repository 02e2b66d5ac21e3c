"""Records that cannot answer what is asked of them: that is said, and is no success."""

from schedtrace.model.trace_facts import Fact
from tests.makers import arrival, run_folder, step
from tests.unit.cli.test_foreign_logs import FIRST, ITERATIONS

WORKS = [
    step(0, start=0, got={"a": 100}, new="a", arrived=[arrival("a", None, 0)]),
    step(1, start=1000, got={"a": 1}),
]


def test_a_log_without_a_finding_is_no_success(cli):
    code, out, err = cli("analyze", ITERATIONS, "--fail-on", "warning")
    assert code == 3
    assert "Nothing limits" not in out
    assert "This record cannot tell what limits the engine: it lacks" in " ".join(out.split())
    assert err.startswith(f"schedtrace: --fail-on warning cannot be judged: {ITERATIONS} does not record ")
    assert err.count("\n") == 1


def test_a_finding_that_the_record_can_show_is_judged(cli):
    only = ["--only", "budget-underused"]
    assert cli("analyze", FIRST, "--fail-on", "info", *only)[0] == 1
    assert cli("analyze", FIRST, "--fail-on", "warning", *only)[0] == 0


def test_a_severe_finding_counts_though_others_cannot_be_judged(cli):
    assert cli("analyze", FIRST, "--fail-on", "info")[0] == 1


def test_a_trace_is_judged_and_one_without_steps_is_not(cli, tmp_path):
    assert cli("analyze", run_folder(tmp_path / "run", *WORKS), "--fail-on", "critical")[0] == 0
    code, _, err = cli("analyze", run_folder(tmp_path / "empty"), "--fail-on", "critical")
    assert (code, err.count("has no step")) == (3, 1)


def test_preemptions_that_nobody_sees_are_not_judged(cli, tmp_path):
    run = run_folder(tmp_path / "run", *WORKS, preemptions_recorded=False)
    code, _, err = cli("analyze", run, "--fail-on", "critical")
    assert code == 3
    assert str(Fact.PREEMPTIONS) in err
    ignored = ["never-fits", "no-progress", "preemption", "prefix-cache"]
    options = [word for code in ignored for word in ("--ignore", code)]
    assert cli("analyze", run, "--fail-on", "critical", *options)[0] == 0


def test_a_metric_that_two_records_do_not_have_is_no_regression_and_no_success(cli, tmp_path):
    for asked, what in (("regression", "a metric that can be worse"), ("regression:ttft-p50", "TTFT p50")):
        code, _, err = cli("diff", ITERATIONS, ITERATIONS, "--fail-on", asked)
        assert (code, err.count(f"do not both record {what}")) == (3, 1)
    run = run_folder(tmp_path / "run", *WORKS)
    assert cli("diff", run, run, "--fail-on", "regression")[0] == 0


def test_two_logs_are_alike_in_what_both_record(cli):
    said = " ".join(cli("diff", ITERATIONS, ITERATIONS)[1].split())
    assert "no difference found in what both record" in said
    assert "No setting that both records have differs." in said
    assert "No finding that both records can show on either side." in said
    assert "One side does not record who was refused." in said


def test_step_and_request_say_what_the_record_lacks(cli):
    for command, fact in (("step", Fact.TIMES), ("request", Fact.REQUESTS)):
        code, _, err = cli(command, ITERATIONS, "3")
        assert (code, err.count(f"does not record {fact}, which {command} needs")) == (2, 1)


def test_a_log_that_begins_later_has_no_first_step(cli, tmp_path):
    """Its first request has computed tokens: whether it is new is not known."""
    log = tmp_path / "later.log"
    request = {"request_id": "a", "scheduled_tokens": 1}
    records = [
        {"token_budget": 64, "total_requests": 1, "requests": [request | {"computed_tokens": computed}]}
        for computed in (40, 41)
    ]
    log.write_text("".join(f"{record}\n" for record in records))
    out = " ".join(cli("analyze", log)[1].split())
    assert "It shows 2 steps of 1 request and 1 token." in out
    assert "all 2 - / - - " in out
    assert "New requests" not in out


def test_a_table_that_a_record_cannot_fill_is_not_written(cli, tmp_path):
    """An empty table of arrivals would mean that none came."""
    assert cli("export", FIRST, "--to", "csv", "--output", tmp_path / "out")[0] == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"steps.csv", "requests.csv"}
