"""``pipeline-bubbles``: stages of a pipeline idle because its batches do not overlap, or differ in size."""

import polars as pl

from schedtrace.diagnose.batches_in_flight import (
    FEWEST_CYCLES,
    Cohort,
    cohorts,
    cycles,
    even_cycle_frac,
    executed_batches,
)
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import batched_tokens, smallest_batched_tokens
from schedtrace.diagnose.rules.common import (
    advise,
    first_step,
    largest,
    listed,
    share_of_requests,
    step_finding,
)
from schedtrace.model.message import NOTHING, Message, Requests, Steps
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

ALONE_FRAC = 0.5
"""Minimum share of the executions' time with a single batch in flight at which batches do not overlap."""
UNEVEN_FRAC = 0.2
"""Minimum unevenness, ``1 - mean / max``, of the batches in flight; batches of 7, 13, 2 and 10 requests have
0.38."""


class PipelineBubbles(Evidence, kw_only=True):
    """Sizes of the batches in flight, and the cost of their unevenness."""

    depth: int
    """Number of batches in flight."""
    cycles: int
    """Number of cycles: groups of ``depth`` consecutive steps without prefill."""
    uneven_cycles: int
    """Number of cycles whose largest batch is larger than an even share."""
    unevenness_frac: float
    """Unevenness of these cycles: ``1 - mean / max`` of their batches."""
    most_gain_frac: float
    """``sum(largest) / sum(best) - 1`` over these cycles: the gain if a stage's time were proportional to its
    batch."""


class OneAtATime(Evidence, kw_only=True):
    """Batches in flight: the configured number and the actual number."""

    stages: int
    """``pipeline_parallel_size``."""
    depth: int
    """Configured number of batches in flight."""
    mean_in_flight: float
    """Mean number of batches in flight right after a ``schedule()`` call: its own batch, and those whose
    execution had not ended."""
    steps: int
    """Number of batches whose execution is recorded."""
    alone_steps: int
    """Number of batches that were alone in flight although requests outside the batch were running."""
    alone_ms: float
    """Total time of the executions of batches that were alone in flight."""
    executed_ms: float
    """Total time of all executions."""
    most_gain_frac: float
    """Largest possible rise of throughput if the executions overlapped as configured."""


def _find(timeline: Timeline) -> Findings:
    stages, depth = timeline.header.pipeline_parallel_size, timeline.header.batches_in_flight
    if not stages or not depth or min(stages, depth) < 2:  # noqa: PLR2004  # no pipeline
        return
    batches = executed_batches(timeline)
    alone = batches.filter(
        (pl.col("in_flight") == 1) & (pl.col("num_running_after") > pl.col("total_requests"))
    )
    alone_us, executed_us = int(alone["execute_us"].sum()), int(batches["execute_us"].sum())
    if alone.height >= depth * FEWEST_CYCLES and alone_us >= ALONE_FRAC * executed_us:
        yield _one_at_a_time(timeline, batches, alone, stages=stages, depth=depth)
        return
    every = cycles(timeline, depth)
    uneven = every.filter(pl.col("largest") > pl.col("best"))
    requests, most = int(uneven["requests"].sum()), int(uneven["largest"].sum())
    frac = 1 - requests / depth / most if most else 0.0
    if frac < UNEVEN_FRAC or 2 * uneven.height < every.height:
        return
    left = even_cycle_frac(every, uneven)
    felt_us = int(uneven.select((pl.col("cycle_us") * pl.col("requests")).sum()).item())
    groups = cohorts(timeline, uneven, depth)
    cases = largest(uneven, "largest")
    first, sizes = first_step(cases), cases["sizes"][0].to_list()
    yield step_finding(
        timeline,
        uneven,
        PipelineBubbles(
            depth=depth,
            cycles=every.height,
            uneven_cycles=uneven.height,
            unevenness_frac=frac,
            most_gain_frac=most / int(uneven["best"].sum()) - 1,
        ),
        title="Uneven batches in the pipeline",
        verdict="In {uneven_cycles:n} of {cycles:n cycle} the {depth:n} batches in flight hold {means} "
        "requests on average; the pipeline runs at "
        "the pace of the largest[: even batches would take {saved:%} less time].",
        share_frac=None if left is None else share_of_requests(timeline, felt_us * (1 - left)),
        holder=_holder(groups),
        message="In {uneven_cycles:n} of {cycles:n cycle} without prefill a batch was larger than an "
        "even share; on average, batches are {unevenness_frac:%} smaller than the largest. Even "
        "batches would finish at most {most_gain_frac:%} more tokens a second[, and about {gain:%} more "
        "judging by cycles whose largest batch was smaller]. Times of single stages are not in the trace.",
        values={
            "means": listed([say("{mean_requests:n1}", cohort) for cohort in groups]),
            "saved": None if left is None else 1 - left,
            "gain": 1 / left - 1 if left else None,
            "counts": listed([say("{size:n}", size=size) for size in sizes]),
            "cycle_span": Steps(first.first, first.first + len(sizes) - 1, first.trial),
        },
        advice=_advice(timeline, depth),
        example="{cycle_span} held {counts} requests and took {cycle_us:us}.",
        cases=cases,
    )


def _one_at_a_time(
    timeline: Timeline, batches: pl.DataFrame, alone: pl.DataFrame, *, stages: int, depth: int
) -> Finding:
    """Report batches that are scheduled only after the previous one has been executed."""
    alone_us, executed_us = int(alone["execute_us"].sum()), int(batches["execute_us"].sum())
    saved_us = alone_us * (1 - 1 / depth)
    felt_us = int(alone.select((pl.col("execute_us") * pl.col("num_running_after")).sum()).item())
    evidence = OneAtATime(
        stages=stages,
        depth=depth,
        mean_in_flight=float(batches.select(pl.col("in_flight").mean()).item()),
        steps=batches.height,
        alone_steps=alone.height,
        alone_ms=alone_us / 1e3,
        executed_ms=executed_us / 1e3,
        most_gain_frac=executed_us / (executed_us - saved_us) - 1,
    )
    return step_finding(
        timeline,
        alone,
        evidence,
        title="The pipeline has one batch in flight",
        verdict="{depth:n} batches in flight are configured, {mean_in_flight:n1} are reached: "
        "{alone_steps:n} of {steps:n batch/batches} were scheduled after the execution of the one before had "
        "ended, so {idle:n} of {stages:n} stages were idle.",
        share_frac=share_of_requests(timeline, felt_us * (1 - 1 / depth)),
        message="In {alone_steps:n} of {steps:n step} requests ran that were not in the batch, and no other "
        "batch was in flight; these executions took {alone_ms:ms} of {executed_ms:ms}. If they overlapped as "
        "configured, throughput would rise by {most_gain_frac:%} at most.",
        values={"idle": stages - 1},
        advice=[
            advise(
                "Find what waits for a batch's result before the next is scheduled: vLLM schedules {depth:n} "
                "batches before it asks for the oldest result (vLLM issue 28270 is such a fault).",
                evidence,
            )
        ],
        example="{at} executed {total_requests:n} of {num_running_after:n request} in {execute_us:us}, with "
        "no other batch in flight.",
        cases=largest(alone, "execute_us"),
    )


def _holder(groups: list[Cohort]) -> Message:
    """Describe the largest and the smallest batch."""
    largest = max(groups, key=lambda cohort: cohort.mean_requests)
    smallest = min(groups, key=lambda cohort: cohort.mean_requests)
    if not largest.requests:
        return NOTHING
    return say(
        "The largest batch holds {largest}, the smallest {smallest}. A request stays in its batch.",
        largest=Requests(largest.request_ids, largest.requests),
        smallest=Requests(smallest.request_ids, smallest.requests) if smallest.requests else "nobody",
    )


def _advice(timeline: Timeline, depth: int) -> list[Advice]:
    balanced = advise(
        "Use a vLLM that balances the batches in flight (pull request 57433 measured 22.95 % more output "
        "tokens a second for queues of 7, 13, 2 and 10)."
    )
    smallest, burst = smallest_batched_tokens(timeline), timeline.steps["prefill_tokens"].max()
    if smallest is None or not isinstance(burst, int):
        return [balanced]
    value = max(smallest, -(-burst // depth))
    if value >= burst:
        return [balanced]
    spread = advise(
        "Lower {option} to {value:n} (now {now:n}): a burst of prompts then spreads over the batches.",
        setting="max_num_batched_tokens",
        value=value,
        now=batched_tokens(timeline),
        costs="Long prompts take more steps to their first token.",
    )
    return [spread, balanced]


RULE = Rule(
    code="pipeline-bubbles",
    summary="a pipeline's stages wait: its batches do not overlap, or differ in size",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.CONFIG}),
    find=_find,
    quiet=1,
    proven=((None, "max_num_batched_tokens"),),
)
