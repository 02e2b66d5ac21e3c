"""One run as a trace and as vLLM's own log and metrics: what these support never contradicts the trace.

``tools/bench/four_records.py`` does the same with any runs.
"""

import pytest

from schedtrace.diagnose.records import described
from schedtrace.read.records.metrics import read_metrics
from schedtrace.read.records.vllm_log import read_vllm_log
from schedtrace.read.run import read_run
from tests.other_records import claimed_causes, console_lines, disagreements, metrics_dump
from tests.samples import FINDINGS

NAMES = (
    "client-limited",
    "decode-starves-prefill",
    "head-of-line",
    "interruption",
    "kv-bound",
    "kv-held-idle",
    "long-prompt",
    "long-tail",
    "max-num-seqs-bound",
    "never-fits",
    "other-limit",
    "prefix-cache",
    "rank-imbalance",
    "stall",
    "token-budget-bound",
)
LOGS = {
    "console lines": console_lines,
    "console lines with a start": lambda run: console_lines(run, with_start=True),
}


@pytest.mark.parametrize("name", NAMES)
def test_weaker_records_of_a_run_do_not_contradict_its_trace(name, samples, tmp_path):
    run = read_run(FINDINGS / name / "shows")
    report = samples(name)
    path = tmp_path / "record"
    for record, lines in LOGS.items():
        path.write_text("\n".join(lines(run)))
        [shown] = described("console.log", read_vllm_log(path))
        assert list(disagreements(shown.statements, report)) == [], record
        codes = {finding.code for finding in report.findings}
        if {"no-queue"} == {each.code for each in shown.statements} and len(run.traces) == 1:
            assert not codes & {"kv-bound", "max-num-seqs-bound", "token-budget-bound"}
    for places in ((0.5,), (0.3, 0.7)):
        path.write_text("".join(metrics_dump(run, place) for place in places))
        [shown] = described("metrics.txt", read_metrics(path))
        assert list(disagreements(shown.statements, report)) == [], places


def test_the_limit_of_a_run_is_named(tmp_path):
    path = tmp_path / "console.log"
    for name, code, cause in (
        ("max-num-seqs-bound", "seats-taken", "max_num_seqs"),
        ("kv-bound", "several-limits", "kv_blocks"),
    ):
        path.write_text("\n".join(console_lines(read_run(FINDINGS / name / "shows"), with_start=True)))
        [shown] = described("console.log", read_vllm_log(path))
        [statement] = [each for each in shown.statements if claimed_causes(each)]
        assert (statement.code, cause in claimed_causes(statement)) == (code, True)
