"""``pipeline-bubbles``: the batches in flight of a pipeline differ in size, so its stages wait."""

import polars as pl

from schedtrace.diagnose.batches_in_flight import Cohort, cohorts, cycles, even_cycle_frac
from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.allowed import BATCHED_TOKENS, batched_tokens, smallest_batched_tokens
from schedtrace.diagnose.rules.common import (
    StepExample,
    listed,
    severity_by_weight,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Message, Requests, Steps, joined
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

CODE = "pipeline-bubbles"

UNEVEN_FRAC = 0.2
"""``1 - mean / max`` of the batches in flight; those of 7, 13, 2 and 10 requests have 0.38."""


class Cycle(StepExample, kw_only=True):
    """Steps that follow each other, one for each batch in flight; ``step`` is the first."""

    sizes: list[int]
    cycle_us: int


class PipelineBubbles(Evidence, kw_only=True):
    """Sizes of the batches in flight, and what their unevenness costs."""

    stages: int
    depth: int
    cycles: int
    uneven_cycles: int
    unevenness_frac: float
    cohorts: list[Cohort]
    most_gain_frac: float
    examples: list[Cycle]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/pipeline-bubbles.md``."""
    stages, depth = timeline.header.pipeline_parallel_size, timeline.header.batches_in_flight
    if not stages or not depth or min(stages, depth) < 2:  # noqa: PLR2004  # no pipeline
        return []
    every = cycles(timeline, depth)
    uneven = every.filter(pl.col("largest") > pl.col("best"))
    requests, largest = int(uneven["requests"].sum()), int(uneven["largest"].sum())
    frac = 1 - requests / depth / largest if largest else 0.0
    if frac < UNEVEN_FRAC or 2 * uneven.height < every.height:
        return []
    most = largest / int(uneven["best"].sum()) - 1
    left = even_cycle_frac(every, uneven)
    share = _share(timeline, uneven, left)
    found = cohorts(timeline, uneven, depth)
    sizes = listed([say("{mean:n1}", mean=cohort.mean_requests) for cohort in found])
    evidence = PipelineBubbles(
        stages=stages,
        depth=depth,
        cycles=every.height,
        uneven_cycles=uneven.height,
        unevenness_frac=frac,
        cohorts=found,
        most_gain_frac=most,
        examples=Cycle.first(uneven.sort("largest", "step", descending=[True, False])),
    )
    return [
        Finding(
            code=CODE,
            severity=severity_by_weight(None, share),
            title=say("Uneven batches in the pipeline"),
            verdict=say(
                "The {depth:n} batches in flight hold {sizes} requests on average; the pipeline runs "
                "at the pace of the largest{cost}.",
                depth=depth,
                sizes=sizes,
                cost=say(": even batches would take {saved:%} less time", saved=1 - left)
                if left is not None
                else NOTHING,
            ),
            share_frac=share,
            holder=_holder(found),
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=uneven.height,
            trials=trial_numbers(uneven),
            steps=step_numbers(uneven),
            tokens=0,
            message=_message(evidence, left),
            advice=_advice(timeline, depth),
            evidence=evidence,
            example=_described(evidence.examples[0]),
        )
    ]


def _share(timeline: Timeline, uneven: pl.DataFrame, left: float | None) -> float | None:
    """Share of the requests' time that even batches would save; each request waits for whole cycles."""
    total_us = timeline.requests_us
    if left is None or not total_us:
        return None
    felt_us = int(uneven.select((pl.col("cycle_us") * pl.col("requests")).sum()).item())
    return float(min(1.0, felt_us * (1 - left) / total_us))


def _message(evidence: PipelineBubbles, left: float | None) -> Message:
    sentences = [
        say(
            "In {uneven:n} of {cycles:n cycle} without prefill a batch was larger than an even "
            "share; on average the batches lack {frac:%} of the largest one.",
            uneven=evidence.uneven_cycles,
            cycles=evidence.cycles,
            frac=evidence.unevenness_frac,
        ),
        say(
            "Even batches would finish at most {most:%} more tokens a second{estimate}.",
            most=evidence.most_gain_frac,
            estimate=say(
                ", by the lengths of cycles with smaller largest batches about {gain:%}",
                gain=1 / left - 1,
            )
            if left
            else NOTHING,
        ),
        say("Times of single stages are not in the trace."),
    ]
    return joined(sentences)


def _holder(found: list[Cohort]) -> Message:
    """Who is in the largest batch, and in the smallest."""
    largest = max(found, key=lambda cohort: cohort.mean_requests)
    smallest = min(found, key=lambda cohort: cohort.mean_requests)
    if not largest.requests:
        return NOTHING
    return say(
        "The largest batch holds {largest}, the smallest {smallest}. A request stays in its batch.",
        largest=Requests(largest.request_ids, largest.requests),
        smallest=Requests(smallest.request_ids, smallest.requests) if smallest.requests else "nobody",
    )


def _advice(timeline: Timeline, depth: int) -> list[Advice]:
    advice = [
        Advice(
            message=say(
                "Use a vLLM that balances the batches in flight (pull request 57433 measured 22.95 % more "
                "output tokens a second for queues of 7, 13, 2 and 10)."
            )
        )
    ]
    smallest, present = smallest_batched_tokens(timeline), batched_tokens(timeline)
    burst = timeline.steps["prefill_tokens"].max()
    if smallest is None or not isinstance(burst, int):
        return advice
    value = max(smallest, -(-burst // depth))
    if value >= burst:
        return advice
    spread = Advice(
        message=say(
            "Lower {setting} to {value:n} (now {present:n}): a burst of prompts then spreads "
            "over the batches.",
            setting=BATCHED_TOKENS,
            value=value,
            present=present,
        ),
        setting="max_num_batched_tokens",
        value=value,
        costs=say("Long prompts take more steps to their first token."),
    )
    return [spread, *advice]


def _described(example: Cycle) -> Message:
    return say(
        "{steps} held {sizes} requests and took {cycle:us}.",
        steps=Steps(example.step, example.step + len(example.sizes) - 1, example.trial),
        sizes=listed([say("{size:n}", size=size) for size in example.sizes]),
        cycle=example.cycle_us,
    )


RULE = Rule(
    code=CODE,
    summary="the batches in flight of a pipeline differ in size, so its stages wait for the largest",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.CONFIG}),
    find=find,
    quiet=1,
    proven=((None, "max_num_batched_tokens"),),
)
