"""``prefix-cache``: prompts or preempted requests found less in the prefix cache than had been computed."""

import polars as pl

from schedtrace.diagnose.cache_use import cache_use, resumptions
from schedtrace.diagnose.rule import Rule
from schedtrace.diagnose.rules.allowed import kv_space
from schedtrace.diagnose.rules.common import (
    StepExample,
    listed,
    prefill_cost,
    severity_by_weight,
    step_numbers,
    trial_numbers,
)
from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Count, Message, Steps, joined
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.timeline.timeline import Timeline

CODE = "prefix-cache"

MISSED_FRAC = 0.05
"""A twentieth of all prompt tokens: less is not worth a change."""
FEWEST_REQUESTS = 10
"""Without a hit, before that is worth a word."""
SMALL_BLOCK = 16
"""vLLM's block size on GPUs: prompts that do not share as much do not begin alike."""
LEAST_FRAC = 0.01
"""Of the requests' time, to be stated."""

REASONS = {
    "skipped": "{requests} did not look, since vLLM does not read the cache for prompt log-probabilities and "
    "some pooling tasks",
    "short": "{requests} had a prompt no longer than one block of {size}",
    "other_group": "{requests} found their first block in some KV cache groups only",
    "not_cached": "{requests} found their first block of {size} gone or never cached",
    "unknown": "{requests} found nothing for an unknown reason",
}
"""``Admission.miss`` in words."""


class Found(StepExample, kw_only=True):
    """What one request found in the cache when it was admitted or came back."""

    request_id: str
    computed_before_tokens: int
    found_tokens: int


class PrefixCache(Evidence, kw_only=True):
    """Hits of new requests, what they could have hit, and what preempted ones found again."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_frac: float | None
    shareable_tokens: int | None
    missed_tokens: int | None
    without_hit: dict[str, int]
    salted: int
    resets: int
    evicted_blocks: int | None
    returned: int
    """Returns of preempted requests; one may come back several times."""
    returned_requests: int
    lost_tokens: int
    found_tokens: int
    evicted_tokens: int
    examples: list[Found]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/prefix-cache.md``."""
    block_size = timeline.header.block_size
    if timeline.header.enable_prefix_caching is None or not block_size:
        return []
    use = cache_use(timeline)
    if not timeline.header.enable_prefix_caching:
        return _off(timeline, use)
    back = _returned(timeline, block_size)
    evidence = _evidence(timeline, use, back)
    missed = (evidence.missed_tokens or 0) >= MISSED_FRAC * max(1, evidence.prompt_tokens)
    nothing = not missed and _could_share(evidence, block_size)
    if not missed and not nothing and not evidence.evicted_tokens:
        return []
    shown = _shown(use, back, nothing=nothing)
    again = evidence.evicted_tokens + (evidence.missed_tokens or 0 if missed else 0)
    cost = prefill_cost(timeline, again)
    share = _share(timeline, shown, evidence.missed_tokens or 0) if missed else None
    example = evidence.examples[0] if evidence.examples else None
    return [
        Finding(
            code=CODE,
            severity=severity_by_weight(None, share),
            title=say("Prefix cache misses") if again else say("No prefix cache hits"),
            verdict=_verdict(share, again),
            share_frac=share,
            holder=_holder(evidence),
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=shown["step"].n_unique(),
            trials=trial_numbers(shown),
            steps=step_numbers(shown),
            tokens=again,
            message=joined(_sentences(evidence, block_size, missed=missed, nothing=nothing)),
            advice=_advice(timeline, evidence, block_size, missed=missed, nothing=nothing),
            evidence=evidence,
            example=_described(example) if example else None,
            cost_ms=cost.ms,
            cost_frac=cost.frac,
            cost_error_frac=cost.error_frac,
        )
    ]


def _off(timeline: Timeline, use: pl.DataFrame) -> list[Finding]:
    """Prompts begin alike, and nothing is kept of them."""
    shared = use.filter(pl.col("shareable_tokens") > 0)
    evidence = _evidence(timeline, use, _returned(timeline, timeline.header.block_size or 1).clear())
    again = evidence.missed_tokens or 0
    if again < MISSED_FRAC * max(1, evidence.prompt_tokens):
        return []
    share, cost = _share(timeline, shared, again), prefill_cost(timeline, again)
    return [
        Finding(
            code=CODE,
            severity=severity_by_weight(None, share),
            title=say("Prefix caching is off"),
            verdict=say(
                "Prefix caching is off, and {again:n} of {prompt:n prompt token} are the beginning "
                "of an earlier one{felt}.",
                again=again,
                prompt=evidence.prompt_tokens,
                felt=_felt(share),
            ),
            share_frac=share,
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=shared["step"].n_unique(),
            trials=trial_numbers(shared),
            steps=step_numbers(shared),
            tokens=again,
            message=say(
                "{requests:n prompt} begin as an earlier one does, by at least a full block of "
                "{size:n token}.",
                requests=shared["request_id"].n_unique(),
                size=timeline.header.block_size or 0,
            ),
            advice=[
                Advice(
                    message=say(
                        "{setting:setting}: blocks that are still there are not computed again.",
                        setting="--enable-prefix-caching",
                    ),
                    setting="enable_prefix_caching",
                    value=True,
                )
            ],
            evidence=evidence,
            cost_ms=cost.ms,
            cost_frac=cost.frac,
            cost_error_frac=cost.error_frac,
        )
    ]


def _could_share(evidence: PrefixCache, block_size: int) -> bool:
    """Whether there was no hit although prompts may begin alike: for less than a large block, or salted."""
    long_enough = not evidence.without_hit.get("short") and block_size <= SMALL_BLOCK
    none = not evidence.cached_tokens and evidence.requests >= FEWEST_REQUESTS
    return none and (not long_enough or evidence.salted > 0)


def _returned(timeline: Timeline, block_size: int) -> pl.DataFrame:
    """Preempted requests that came back, with ``evicted_tokens``: of full blocks, and not found again."""
    whole = pl.col("lost_tokens") // block_size * block_size
    return (
        resumptions(timeline)
        .filter(pl.col("resumed_step").is_not_null())
        .with_columns(evicted_tokens=(whole - pl.col("found_tokens")).clip(0))
    )


def _evidence(timeline: Timeline, use: pl.DataFrame, back: pl.DataFrame) -> PrefixCache:
    prompt, cached = int(use["prompt_tokens"].sum()), int(use["cached_tokens"].sum())
    known = use["shareable_tokens"].is_not_null().any()
    resets, evicted = _keys_lost(timeline)
    misses = use.filter(pl.col("cached_tokens") == 0)["miss"].drop_nulls().value_counts(sort=True)
    return PrefixCache(
        requests=use.height,
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_frac=cached / prompt if prompt else None,
        shareable_tokens=int(use["shareable_tokens"].sum()) if known else None,
        missed_tokens=int(use["missed_tokens"].sum()) if known else None,
        without_hit=dict(misses.iter_rows()),
        salted=int(use["salted"].fill_null(value=False).sum()),
        resets=resets,
        evicted_blocks=evicted,
        returned=back.height,
        returned_requests=back["request_id"].n_unique(),
        lost_tokens=int(back["lost_tokens"].sum()),
        found_tokens=int(back["found_tokens"].sum()),
        evicted_tokens=int(back["evicted_tokens"].sum()),
        examples=Found.first(_examples(use, back)),
    )


def _keys_lost(timeline: Timeline) -> tuple[int, int | None]:
    """How often the cache became empty between two steps of a trial, and how many keys it lost otherwise.

    The keys are counted once a step, so a loss shows only as far as it exceeds the step's new keys.
    """
    keys = timeline.steps.select("prefix_keys", fell=-pl.col("prefix_keys").diff().over("trial"))
    if keys["prefix_keys"].is_null().all():
        return 0, None
    fell = keys.filter(pl.col("fell") > 0)
    return fell.filter(pl.col("prefix_keys") == 0).height, int(
        fell.filter(pl.col("prefix_keys") > 0)["fell"].sum()
    )


def _shown(use: pl.DataFrame, back: pl.DataFrame, *, nothing: bool) -> pl.DataFrame:
    """Admissions and returns that show it: ``step``, ``trial`` and ``request_id``."""
    columns = ["step", "trial", "request_id"]
    admitted = use if nothing else use.filter(pl.col("missed_tokens") > 0)
    gone = back.filter(pl.col("evicted_tokens") > 0).with_columns(step="resumed_step")
    return pl.concat([admitted.select(columns), gone.select(columns)]).sort("step", "request_id")


def _examples(use: pl.DataFrame, back: pl.DataFrame) -> pl.DataFrame:
    """Those that had to compute most again."""
    admitted = use.filter(pl.col("missed_tokens") > 0).select(
        *("step", "trial", "request_id"),
        computed_before_tokens="shareable_tokens",
        found_tokens=pl.col("cached_tokens").cast(pl.Int64),
        again="missed_tokens",
    )
    gone = back.filter(pl.col("evicted_tokens") > 0).select(
        pl.col("resumed_step").alias("step"),
        *("trial", "request_id"),
        computed_before_tokens="lost_tokens",
        found_tokens=pl.col("found_tokens").cast(pl.Int64),
        again="evicted_tokens",
    )
    return pl.concat([admitted, gone], how="vertical_relaxed").sort(
        "again", "step", "request_id", descending=[True, False, False]
    )


def _share(timeline: Timeline, shown: pl.DataFrame, tokens: int) -> float | None:
    """Share of the requests' time: every request of a step that computes tokens again spends that time."""
    model, total_us = timeline.step_time, timeline.requests_us
    if model is None or not model.per_prefill_token_us or not total_us:
        return None
    sizes = shown.join(timeline.steps.select("step", "total_requests"), on="step")["total_requests"]
    together = int(sizes.sum()) / max(1, sizes.len())
    return float(min(1.0, tokens * model.per_prefill_token_us * together / total_us))


def _verdict(share: float | None, again: int) -> Message:
    if not again:
        return say("The prefix cache gave nothing: none of the prompts found a block in it.")
    return say(
        "{again:n token} that had been computed before were not in the prefix cache and were "
        "computed again{felt}.",
        again=again,
        felt=_felt(share),
    )


def _felt(share: float | None) -> Message:
    if share is None or share < LEAST_FRAC:
        return NOTHING
    return say(", which took {share:%} of the requests' time", share=share)


def _holder(evidence: PrefixCache) -> Message:
    """Who emptied the cache."""
    parts = []
    if evidence.resets:
        parts.append(say("The cache was reset {times:n time}.", times=evidence.resets))
    if evidence.evicted_blocks:
        parts.append(
            say(
                "Running requests took at least {blocks:n block} that were cached.",
                blocks=evidence.evicted_blocks,
            )
        )
    if evidence.missed_tokens and evidence.evicted_blocks == 0 and not evidence.resets:
        parts.append(
            say(
                "The number of cached blocks never fell between two steps: the cache was reset while nothing "
                "ran, blocks were replaced one for one, or the requests came before they were computed."
            )
        )
    return joined(parts)


def _sentences(evidence: PrefixCache, block_size: int, *, missed: bool, nothing: bool) -> list[Message]:
    said = []
    if evidence.evicted_tokens:
        said.append(
            say(
                "{requests:n preempted request} came back{times} for {lost:n computed token} and "
                "found {found:n} of them; {evicted:n token} of full blocks were gone.",
                requests=evidence.returned_requests,
                times=NOTHING
                if evidence.returned == evidence.returned_requests
                else say(" {times:n time}", times=evidence.returned),
                lost=evidence.lost_tokens,
                found=evidence.found_tokens,
                evicted=evidence.evicted_tokens,
            )
        )
    if evidence.hit_frac is not None:
        could = say(
            "; earlier prompts began with {shareable:n} of them",
            shareable=evidence.shareable_tokens,
        )
        said.append(
            say(
                "{requests:n new request} found {hit:%} of {prompt:n prompt token} cached{could}.",
                requests=evidence.requests,
                hit=evidence.hit_frac,
                prompt=evidence.prompt_tokens,
                could=could if evidence.shareable_tokens else NOTHING,
            )
        )
    if missed or nothing:
        said.append(_reasons(evidence, block_size))
    return said


def _reasons(evidence: PrefixCache, block_size: int) -> Message:
    """Why requests found nothing, the most frequent reason first."""
    size = Count(block_size, "token")
    parts = []
    for miss, count in evidence.without_hit.items():
        if miss == "not_cached" and evidence.shareable_tokens == 0:
            continue  # nobody had it: the sentence below says so
        template = REASONS.get(miss, REASONS["unknown"])
        values: dict[str, Count] = {"requests": Count(count, "request")}
        if "{size}" in template:
            values["size"] = size
        parts.append(say(template, **values))
    reasons = say("{reasons}.", reasons=listed(parts)) if parts else NOTHING
    salted = (
        say("{salted:n request} had a cache salt.", salted=evidence.salted) if evidence.salted else NOTHING
    )
    alone = (
        say(
            "No two prompts share a full block of {size}; vLLM does not find a shorter shared beginning.",
            size=size,
        )
        if evidence.shareable_tokens == 0 and "not_cached" in evidence.without_hit
        else NOTHING
    )
    return joined([reasons, salted, alone])


def _advice(
    timeline: Timeline, evidence: PrefixCache, block_size: int, *, missed: bool, nothing: bool
) -> list[Advice]:
    """Only what would help: blocks that were taken, a block size above the prompts, readers that skip."""
    advice = []
    if missed and (evidence.evicted_tokens or evidence.evicted_blocks):
        advice.append(
            Advice(
                message=say(
                    "{space}: more than {blocks:n block}",
                    space=kv_space(timeline),
                    blocks=timeline.header.kv_blocks_total or 0,
                ),
                costs=say("Device memory."),
            )
        )
    if missed and evidence.without_hit.get("skipped"):
        advice.append(Advice(message=say("Ask for prompt log-probabilities only where they are needed.")))
    if nothing and not evidence.salted:
        advice.append(
            Advice(
                message=say(
                    "If prompts begin alike, use a smaller {setting:setting} (now {now:n}), as far as "
                    "the attention backend accepts it.",
                    setting="--block-size",
                    now=block_size,
                ),
                setting="block_size",
                costs=say("More blocks for vLLM to manage."),
            )
        )
    return advice


def _described(example: Found) -> Message:
    return say(
        "{request:id} found {found:n} of {before:n token/tokens that had been computed before} in {step}.",
        request=example.request_id,
        found=example.found_tokens,
        before=example.computed_before_tokens,
        step=Steps(example.step, example.step, example.trial),
    )


RULE = Rule(
    code=CODE,
    summary="prompts or preempted requests found less in the prefix cache than had been computed before",
    needs=frozenset({Fact.CACHE, Fact.REQUESTS, Fact.LIVES, Fact.PREEMPTIONS, Fact.BLOCKS, Fact.CONFIG}),
    find=find,
    quiet=5,
)
