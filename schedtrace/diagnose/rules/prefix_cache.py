"""``prefix-cache``: what had been cached was computed again, or hits went down when blocks were short."""

import polars as pl

from schedtrace.diagnose.queue.resumptions import resumptions
from schedtrace.diagnose.rules.allowed import MORE_KV_SPACE, seats_setting
from schedtrace.diagnose.rules.common import (
    StepExample,
    in_trials,
    prefill_cost,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.facts import Fact
from schedtrace.model.message import Count, Message, Number, Request, Share, Steps, joined, message
from schedtrace.model.report import Evidence, Finding
from schedtrace.timeline.timeline import Timeline

CODE = "prefix-cache"
SUMMARY = "preempted requests no longer found their tokens cached, or hits went down when blocks were short"
NEEDS = (Fact.CACHE, Fact.REQUESTS, Fact.LIVES, Fact.PREEMPTIONS, Fact.BLOCKS, Fact.CONFIG)

SHORT_FRAC = 0.10
"""Blocks are short with fewer than a tenth of them free."""
FEWEST_REQUESTS = 10
"""On either side, to compare their hits."""
DROP = 0.5
"""Half the hits: less than that lies within what workloads vary by."""


class LostPrefix(StepExample, kw_only=True):
    """One preempted request that did not find all of its full blocks again."""

    request_id: str
    lost_tokens: int
    found_tokens: int
    evicted_tokens: int
    resumed_step: int


class ShortAdmission(StepExample, kw_only=True):
    """One request admitted while blocks were short."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int


class PrefixCache(Evidence, kw_only=True):
    """Hits of new requests, and what preempted ones found again."""

    prompt_tokens: int
    cached_tokens: int
    hit_frac: float | None
    hit_frac_when_short: float | None
    hit_frac_otherwise: float | None
    returned: int
    lost_tokens: int
    found_tokens: int
    evicted_tokens: int
    examples: list[LostPrefix] | list[ShortAdmission]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/prefix-cache.md``."""
    block_size = timeline.header.block_size
    if not timeline.header.enable_prefix_caching or not block_size:
        return []
    back = resumptions(timeline).filter(pl.col("resumed_step").is_not_null())
    whole = pl.col("lost_tokens") // block_size * block_size
    back = back.with_columns(evicted_tokens=(whole - pl.col("found_tokens")).clip(0))
    came = _admitted(timeline)
    calm, short = _hit_frac(came.filter(~pl.col("short"))), _hit_frac(came.filter("short"))
    dropped = _enough(came) and calm is not None and short is not None and short < DROP * calm
    missed = back.filter(pl.col("evicted_tokens") > 0)
    if missed.is_empty() and not dropped:
        return []
    shown = missed if missed.height else came.filter("short")
    trials = trial_numbers(shown)
    evidence = PrefixCache(
        prompt_tokens=int(came["prompt_tokens"].sum()),
        cached_tokens=int(came["cached_tokens"].sum()),
        hit_frac=_hit_frac(came),
        hit_frac_when_short=short,
        hit_frac_otherwise=calm,
        returned=back.height,
        lost_tokens=int(back["lost_tokens"].sum()),
        found_tokens=int(back["found_tokens"].sum()),
        evicted_tokens=int(back["evicted_tokens"].sum()),
        examples=LostPrefix.first(missed.sort("evicted_tokens", "step", descending=[True, False]))
        or ShortAdmission.first(shown),
    )
    cost = prefill_cost(timeline, evidence.evicted_tokens)
    return [
        Finding(
            code=CODE,
            severity=cost.severity(unknown="info"),
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=shown["step"].n_unique(),
            trials=trials,
            steps=step_numbers(shown),
            tokens=evidence.evicted_tokens,
            message=joined(_sentences(evidence, in_trials(timeline, trials), dropped=dropped)),
            advice=message(
                "vLLM keeps cached blocks until it needs them for other requests. More KV cache space "
                "({more}) or fewer requests at once ({limit}, now {seats}) keeps them longer.",
                more=MORE_KV_SPACE,
                limit=seats_setting(timeline),
                seats=Number(timeline.seats),
            ),
            evidence=evidence,
            example=_described(evidence.examples[0]),
            cost_ms=cost.ms,
            cost_frac=cost.frac,
            cost_error_frac=cost.error_frac,
        )
    ]


def _sentences(evidence: PrefixCache, trials: Message, *, dropped: bool) -> list[Message]:
    said = []
    if evidence.evicted_tokens:
        said.append(
            message(
                "{requests}{trials} came back for {lost} and found {found} of them in the prefix cache; "
                "{evicted} of full blocks were gone.",
                requests=Count(evidence.returned, "preempted request"),
                trials=trials,
                lost=Count(evidence.lost_tokens, "computed token"),
                found=Number(evidence.found_tokens),
                evicted=Count(evidence.evicted_tokens, "token"),
            )
        )
    if dropped:
        said.append(
            message(
                "Requests admitted with less than {few} of the KV blocks free found {short} of their prompts "
                "cached, the others {calm}. This is a correlation, no proof of a cause.",
                few=Share(SHORT_FRAC),
                short=Share(evidence.hit_frac_when_short),
                calm=Share(evidence.hit_frac_otherwise),
            )
        )
    if evidence.hit_frac is not None:
        said.append(
            message("{hit} of the prompt tokens of new requests were cached.", hit=Share(evidence.hit_frac))
        )
    return said


def _admitted(timeline: Timeline) -> pl.DataFrame:
    """Requests scheduled for the first time, with ``cached_tokens`` and whether blocks were ``short``."""
    free = pl.col("kv_blocks_free_before") / pl.col("kv_blocks_total")
    return (
        timeline.admitted.lazy()
        .filter(pl.col("phase") == "new")
        .select("step", "trial", "request_id", pl.col("computed_tokens").alias("cached_tokens"))
        .collect()
        .join(timeline.arrivals.select("request_id", "prompt_tokens").unique("request_id"), on="request_id")
        .join(timeline.steps.select("step", short=(free < SHORT_FRAC).fill_null(value=False)), on="step")
        .sort("step", "request_id")
    )


def _hit_frac(came: pl.DataFrame) -> float | None:
    prompt = int(came["prompt_tokens"].sum())
    return int(came["cached_tokens"].sum()) / prompt if prompt else None


def _enough(came: pl.DataFrame) -> bool:
    short = int(came["short"].sum())
    return min(short, came.height - short) >= FEWEST_REQUESTS


def _described(example: LostPrefix | ShortAdmission) -> Message:
    if isinstance(example, ShortAdmission):
        return message(
            "{step} admitted {request} with {cached} of {prompt} cached.",
            step=example.at,
            request=Request(example.request_id),
            cached=Number(example.cached_tokens),
            prompt=Count(example.prompt_tokens, "prompt token"),
        )
    return message(
        "{step} preempted {request} with {lost}; in {resumed} it found {found} of them.",
        step=example.at,
        request=Request(example.request_id),
        lost=Count(example.lost_tokens, "computed token"),
        resumed=Steps(example.resumed_step, example.resumed_step),
        found=Number(example.found_tokens),
    )
