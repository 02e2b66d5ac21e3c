"""One run as a trace and as console lines: what the lines support never contradicts the trace."""

import polars as pl
import pytest

from schedtrace.diagnose.records import described
from schedtrace.read.records.vllm_log import read_vllm_log
from schedtrace.read.run import read_run
from tests.console_logs import periodic
from tests.samples import FINDINGS

INTERVALS = 20
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
CAUSES = {
    "kv-cache-full": {"kv_blocks"},
    "kv-cache-possible": {"kv_blocks"},
    "seats-taken": {"max_num_seqs"},
    "seats-or-kv-cache": {"max_num_seqs", "kv_blocks"},
    "prompts-pending": {"token_budget"},
}
"""Statement to the causes, one of which the trace must have."""


def console_lines(run):
    """The run as vLLM's front end would have logged it, had the run been 20 intervals long."""
    begin = min(trace.steps["start_us"].min() for trace in run.traces)
    end = max(trace.steps["start_us"].max() for trace in run.traces)
    interval = max(1, (end - begin) // INTERVALS)
    for place in range(INTERVALS):
        for trace in run.traces:
            until = begin + (place + 1) * interval
            steps = trace.steps.filter(pl.col("start_us") < until)
            if steps.is_empty():
                continue
            last, within = steps.row(-1, named=True), steps.filter(pl.col("start_us") >= until - interval)
            blocks, free = last["kv_blocks_total"], last["kv_blocks_free_after"]
            deferred = last["num_not_ready_after"]
            yield periodic(
                10 * place,
                running=last["num_running_after"],
                waiting=last["num_waiting_after"],
                kv=100 * (1 - free / (blocks - 1)),
                prompt=within["prefill_tokens"].sum() / 10,
                output=within["decode_tokens"].sum() / 10,
                engine=f"Engine {trace.header.engine_rank:03}: ",
                more=f"Deferred: {deferred} reqs, " if deferred else "",
            )


@pytest.mark.parametrize("name", NAMES)
def test_console_lines_of_a_run_do_not_contradict_its_trace(name, samples, tmp_path):
    run = read_run(FINDINGS / name / "shows")
    path = tmp_path / "console.log"
    path.write_text("\n".join(console_lines(run)))
    [record] = described("console.log", read_vllm_log(path))
    report = samples(name)
    causes = {row.cause for row in report.causes if row.refusal}
    codes = {finding.code for finding in report.findings}
    for statement in record.statements:
        needed = CAUSES.get(statement.code)
        if needed is not None and statement.certainty == "likely":
            assert causes & needed, statement
        if statement.code == "none-admitted":
            assert codes & {"never-fits", "stall", "interruption"}
        if statement.code == "uneven-ranks":
            assert codes & {"rank-imbalance", "slow-rank"}
        if statement.code == "decodes-slowed-by-prefills":
            assert codes & {"prefill-starves-decode", "long-prompt", "interruption"}
    if {"no-queue"} == {each.code for each in record.statements} and len(run.traces) == 1:
        assert not codes & {"kv-bound", "max-num-seqs-bound", "token-budget-bound"}
