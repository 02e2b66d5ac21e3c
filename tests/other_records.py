"""A recorded run as vLLM itself would have logged it: console lines, metrics, iteration lines.

What such a record supports may be less than what the trace shows, and never anything else.
"""

from collections.abc import Iterator, Sequence

import polars as pl

from schedtrace.model.message import plain
from schedtrace.model.records import Statement
from schedtrace.model.report import RunReport
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from tests.console_logs import message, periodic

INTERVALS = 20
"""Number of periodic lines of an engine, whatever the length of the run."""
BUDGET = {"token_budget", "input_budget", "chunked_prefill_off"}
"""Causes for which prompts wait for the rest of the step, or for the next one."""
CAUSES = {
    "kv-cache-full": {"kv_blocks"},
    "kv-cache-possible": {"kv_blocks"},
    "seats-taken": {"max_num_seqs"},
    "seats-or-kv-cache": {"max_num_seqs", "kv_blocks"},
    "seats-or-budget": {"max_num_seqs", "paused", *BUDGET},
    "prompts-pending": BUDGET,
}
"""Statement to the causes, one of which the trace must have."""
WORDS = {"KV cache space": {"kv_blocks"}, "a seat": {"max_num_seqs"}, "the token budget": BUDGET}
"""Words for a limit to its causes."""
LIKELY = 0.5
"""Least share of the waits for capacity that a likely statement on them may be about."""
CAPACITY = {"kv_blocks", "max_num_seqs", *BUDGET}
SLOW = {
    "excess",
    "interference",
    "interruption",
    "long-prompt",
    "prefill-starves-decode",
    "slow-steps",
    "token-budget-bound",
}
"""Findings on steps that take longer with prompts, or on engines that stand still."""


def _span(run: Run) -> tuple[int, int]:
    """Begin of the first step and end of the last."""
    ends = [
        trace.steps.select(pl.max_horizontal("start_us", "output_us").max()).item() for trace in run.traces
    ]
    return min(trace.steps["start_us"].min() for trace in run.traces), max(ends)


def _after(trace: Trace, until: int) -> dict[str, float] | None:
    """The engine as the statistics of its last step before a time show it: finished requests are gone."""
    steps = trace.steps.filter(pl.col("start_us") < until)
    if steps.is_empty():
        return None
    last = steps.row(-1, named=True)
    later = trace.steps.filter(pl.col("start_us") >= until).head(1)["num_running_before"]
    gone = trace.finishes.filter(pl.col("step") == last["step"]).height
    blocks, free = last["kv_blocks_total"], last["kv_blocks_free_after"]
    return {
        "running": max(0, last["num_running_after"] - gone) if later.is_empty() else later.item(),
        "waiting": last["num_waiting_after"],
        "deferred": last["num_not_ready_after"] or 0,
        "usage": None if not blocks or free is None else 1 - free / (blocks - 1),
        "seats": last["max_num_running_reqs"],
    }


def console_lines(run: Run, *, with_start: bool = False) -> Iterator[str]:
    """The run as vLLM's front end would have logged it, had it been 20 intervals of 10 s long.

    Prompts count when their last token is computed, as in vLLM. After a line without any token, vLLM prints
    no further one until there are tokens again.
    """
    begin, end = _span(run)
    interval = max(1, -(-(end - begin) // INTERVALS))
    was_idle = dict.fromkeys(range(len(run.traces)), False)
    if with_start:
        seats = run.traces[0].header.max_num_running_reqs
        arguments = f"non-default args: {{'model': 'm', 'max_num_seqs': {seats}}}"
        yield message("INFO", arguments, "utils.py:233").rstrip("\n")
    for place in range(INTERVALS):
        until = begin + (place + 1) * interval
        for rank, trace in enumerate(run.traces):
            state = _after(trace, until)
            if state is None:
                continue
            since = until - interval
            done = trace.finishes.filter(pl.col("first_token_us").is_between(since, until, closed="left"))
            steps = trace.steps.filter(pl.col("start_us").is_between(since, until, closed="left"))
            prompt, output = done["prompt_tokens"].sum() or 0, steps["output_tokens"].sum() or 0
            is_idle = not prompt and not output
            if is_idle and was_idle[rank]:
                continue
            was_idle[rank] = is_idle
            yield periodic(
                10 * place,
                running=state["running"],
                waiting=state["waiting"],
                kv=100 * (state["usage"] or 0.0),
                prompt=prompt / 10,
                output=output / 10,
                engine=f"Engine {trace.header.engine_rank:03}: ",
                more=f"Deferred: {state['deferred']} reqs, " if state["deferred"] else "",
            )


def metrics_dump(run: Run, place: float) -> str:
    """The run's ``/metrics`` at a place between its begin (0) and its end (1)."""
    begin, end = _span(run)
    until = begin + round(place * (end - begin))
    lines = []
    for trace in run.traces:
        state = _after(trace, until)
        if state is None:
            continue
        steps = trace.steps.filter(pl.col("start_us") < until)
        begun = trace.finishes.filter(pl.col("first_token_us") < until)
        done = trace.finishes.filter((pl.col("finished_us") < until) & pl.col("first_token_us").is_not_null())
        preempted = trace.large["preempted"].collect().join(steps, on=["trial", "step"], how="semi").height
        seconds = {
            "e2e_request_latency_seconds": done["finished_us"] - done["arrived_us"],
            "request_queue_time_seconds": done["scheduled_us"] - done["queued_us"],
            "request_prefill_time_seconds": done["first_token_us"] - done["scheduled_us"],
            "request_decode_time_seconds": done["last_token_us"] - done["first_token_us"],
        }
        values = {
            "num_requests_running": state["running"],
            "num_requests_waiting": state["waiting"],
            "prompt_tokens_total": begun["prompt_tokens"].sum(),
            "generation_tokens_total": steps["output_tokens"].sum(),
            "num_preemptions_total": preempted,
        } | ({} if state["usage"] is None else {"kv_cache_usage_perc": state["usage"]})
        for name, times in seconds.items():
            values |= {f"{name}_sum": (times.sum() or 0) / 1e6, f"{name}_count": done.height}
        engine = f'engine="{trace.header.engine_rank}",model_name="m"'
        lines += [f"vllm:{name}{{{engine}}} {value}" for name, value in values.items()]
        reasons = {"capacity": state["waiting"] - state["deferred"], "deferred": state["deferred"]}
        lines += [
            f'vllm:num_requests_waiting_by_reason{{{engine},reason="{reason}"}} {count}'
            for reason, count in reasons.items()
        ]
    return "\n".join(lines) + "\n"


def waits_for_capacity(report: RunReport) -> dict[str, float]:
    """Share of the requests' time in waits, by cause."""
    shares: dict[str, float] = {}
    for part in report.time_split:
        if part.part == "waiting" and part.cause in CAPACITY:
            shares[part.cause] = shares.get(part.cause, 0.0) + part.share_frac
    return shares


def disagreements(statements: Sequence[Statement], report: RunReport) -> Iterator[str]:
    """Statements of a weaker record that the trace's report contradicts."""
    shares, codes = waits_for_capacity(report), codes_of(report)
    total = sum(shares.values())
    refusals = {row.cause for row in report.causes if row.refusal}
    for statement in statements:
        causes = claimed_causes(statement)
        of_causes = sum(shares.get(cause, 0.0) for cause in causes)
        text = f"{statement.certainty} {plain(statement.text)}"
        if causes and statement.certainty == "likely" and of_causes < LIKELY * total:
            yield f"{of_causes:.0%} of the requests' time, {shares}: {text}"
        if causes and not causes & refusals:
            yield f"no such refusal in {sorted(refusals)}: {text}"
        if statement.code == "none-admitted" and not codes & {"never-fits", "stall", "interruption"}:
            yield f"{sorted(codes)}: {text}"
        is_likely = statement.certainty == "likely"
        if statement.code == "no-tokens" and is_likely and not codes & {"stall", "no-progress", *SLOW}:
            yield f"{sorted(codes)}: {text}"
        if statement.code == "uneven-ranks" and not codes & {"rank-imbalance", "slow-rank"}:
            yield f"{sorted(codes)}: {text}"
        if statement.code == "decodes-slowed-by-prefills" and is_likely and not codes & SLOW:
            yield f"{sorted(codes)}: {text}"


def claimed_causes(statement: Statement) -> set[str]:
    """Causes, one of which requests wait for according to a statement; none if it is not about a queue."""
    if statement.code == "several-limits":
        text = plain(statement.text)
        return {cause for words, causes in WORDS.items() if words in text for cause in causes}
    return CAUSES.get(statement.code, set())


def codes_of(report: RunReport) -> set[str]:
    """Codes of the findings and of their symptoms."""
    codes, pending = set(), list(report.findings)
    while pending:
        finding = pending.pop()
        codes.add(finding.code)
        pending += finding.symptoms
    return codes
