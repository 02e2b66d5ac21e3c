"""``prefix-cache``: new or preempted requests found fewer cached tokens than had been computed before."""

import polars as pl

from schedtrace.diagnose.kv_cache import cache_use, kv_tier, resumptions, shared_beginnings
from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.allowed_settings import kv_space
from schedtrace.diagnose.rules.common import (
    PRESENT,
    advise,
    listed,
    prefill_cost,
    said,
    share_of_requests,
    step_finding,
)
from schedtrace.diagnose.serving_metrics import TIMES_MEDIAN, request_latencies
from schedtrace.diagnose.settings import RETENTION, has_windows, keeps_windows
from schedtrace.model.kv_need import kv_need
from schedtrace.model.message import NOTHING, Message, Setting, joined
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.timeline import Timeline

FEWEST_COMPARED = 3
"""Minimum numbers of requests that found their shared beginning, and that missed it, for a comparison of
latencies."""
MOST_FRAC = 0.5
MISSED_FRAC = 0.05
"""Minimum share of missed tokens in all prompt tokens at which a change is worthwhile."""
FEWEST_REQUESTS = 10
"""Minimum number of requests in a trace without any hit for this to be reported."""
SMALL_BLOCK = 16
"""vLLM's block size in tokens on GPUs; prompts that share fewer tokens do not count as beginning alike."""
KEEPS_BLOCK = "speculative_config.disable_eagle_block_drop"
"""Setting with which vLLM reuses the last cached block of every prompt instead of computing it again."""
LEAST_FRAC = 0.01
"""Minimum share of the requests' time for a sentence to state it."""

REASONS = {
    "skipped": "{requests:n request} did not look, since vLLM does not read the cache for prompt "
    "log-probabilities and some pooling tasks",
    "short": "{requests:n request} had a prompt no longer than one block of {size:n token}",
    "other_group": "{requests:n request} found their first block in some KV cache groups only",
    "not_cached": "{requests:n request} found their first block of {size:n token} gone or never cached",
    "unknown": "{requests:n request} found nothing for an unknown reason",
}
"""Phrase for each reason of a miss (``Admission.miss``)."""


class PrefixCache(Evidence, kw_only=True):
    """Cache hits of new requests, the hits that they missed, and the hits of preempted requests."""

    requests: int
    """Number of requests admitted for the first time."""
    prompt_tokens: int
    """Number of prompt tokens of requests admitted for the first time."""
    cached_tokens: int
    """Number of prompt tokens that newly admitted requests found in the cache."""
    hit_frac: float | None
    """Share of the prompt tokens that were found in the cache."""
    shareable_tokens: int | None
    """Number of tokens in those beginnings of prompts that an earlier prompt shares; None: prefix hashes are
    not recorded."""
    missed_tokens: int | None
    """Number of shareable tokens that were computed again; None: prefix hashes are not recorded."""
    group_lost_tokens: int | None
    """Number of missed tokens that one KV cache group still had and another had lost; None if there are none,
    or if vLLM does not report it (before 0.32)."""
    dropped_tokens: int | None
    """Number of missed tokens in the last blocks of shared beginnings, which vLLM computes again for a
    drafter that reads hidden states (EAGLE, MTP and similar); None: no such drafter, or not recorded."""
    shared_blocks: int | None
    """Number of KV blocks in all beginnings that prompts share, each counted once; None if unknown."""
    shared_end_blocks: int | None
    """Number of shared blocks that stay cached if groups with a sliding window keep only the ends of
    beginnings; None if there is no such group, or if unknown."""
    keeps_windows: bool
    """Whether groups with a sliding window keep all of their blocks cached."""
    lacks_states: bool
    """Whether another KV cache group still had most missed tokens, but a Mamba group, which caches a state
    only where a chunk of a prompt ends, had no state there."""
    usable_blocks: int | None
    """Number of KV blocks in the cache, without vLLM's null block; None: not recorded."""
    least_free_blocks: int | None
    """Smallest number of blocks that were free after a step, including cached ones; None: not recorded."""
    without_hit: dict[str, int]
    """Number of requests that found no cached tokens, by reason ([``miss``](../trace-format.md))."""
    salted: int
    """Number of requests with a cache salt."""
    resets: int
    """Number of times that ``prefix_keys``, the number of cached blocks, fell to 0."""
    evicted_blocks: int | None
    """Number of blocks by which ``prefix_keys`` fell from step to step, other than to 0; new keys hide
    losses. None: not recorded."""
    empty_tier: str | None
    """KV connector that stores the engine's blocks but brought no token; None if there is no such connector.
    """
    returned: int
    """Number of returns of preempted requests; a request may come back several times."""
    returned_requests: int
    """Number of preempted requests that came back."""
    lost_tokens: int
    """Number of tokens that the preempted requests had lost."""
    found_tokens: int
    """Number of lost tokens that the preempted requests found in the cache again."""
    evicted_tokens: int
    """Number of tokens in full blocks that the preempted requests did not find in the cache again."""
    missed_ttft_ms: float | None
    """Median time to first token of new requests that computed a part of a shared beginning again; None if
    too few requests missed their beginning, or too few found it, or if this is unknown."""
    reused_ttft_ms: float | None
    """Median time to first token of new requests that found their whole shared beginning."""

    @property
    def too_many(self) -> bool | None:
        """Whether all shared beginnings need more blocks than are always free; None if unknown."""
        if self.needed_blocks is None or self.least_free_blocks is None:
            return None
        return self.needed_blocks > self.least_free_blocks

    @property
    def needed_blocks(self) -> int | None:
        """Number of blocks that all shared beginnings occupy if windows are kept as now; None if unknown."""
        return self.shared_blocks if self.keeps_windows else self.shared_end_blocks or self.shared_blocks

    @property
    def needed_beyond(self) -> int | None:
        """``needed_blocks`` if the cache has fewer blocks; otherwise None."""
        needed, usable = self.needed_blocks, self.usable_blocks
        return needed if needed is not None and usable is not None and needed > usable else None

    @property
    def ends_fit(self) -> bool:
        """Whether all shared beginnings would fit only if windows kept just their ends."""
        ends = self.shared_end_blocks
        is_smaller = self.keeps_windows and ends is not None and ends <= (self.least_free_blocks or 0)
        return bool(self.too_many) and is_smaller


def _find(timeline: Timeline) -> Findings:
    block_size = timeline.header.block_size
    if timeline.header.enable_prefix_caching is None or not block_size:
        return
    use = cache_use(timeline)
    if not timeline.header.enable_prefix_caching:
        yield from _off(timeline, use)
        return
    back = _returned(timeline, block_size)
    evidence = _evidence(timeline, use, back)
    missed = (evidence.missed_tokens or 0) >= MISSED_FRAC * max(1, evidence.prompt_tokens)
    nothing = not missed and _could_share(evidence, block_size)
    if not missed and not nothing and not evidence.evicted_tokens:
        return
    recomputed = _recomputed(use, back)
    columns = ["step", "trial", "request_id"]
    shown = pl.concat([use[columns], recomputed[columns]]) if nothing else recomputed
    hides_shared = evidence.salted > 0 or bool(evidence.without_hit.get("short"))
    alone = nothing and evidence.shareable_tokens == 0 and not hides_shared  # no cache would help
    again = evidence.evicted_tokens + (evidence.missed_tokens or 0 if missed else 0)
    share = _share(timeline, shown, evidence.missed_tokens or 0) if missed else None
    dropped = evidence.dropped_tokens or None
    yield step_finding(
        timeline,
        shown,
        evidence,
        title="Prefix cache misses"
        if again
        else "No prefix cache hits[: {salted:n} of {requests:n request} had a cache salt]",
        verdict="{tokens:n token} that had been computed before [{dropped:!}were not in the prefix cache "
        "and ]were computed again[, which took {felt:%} of the requests' time][; {dropped} of them are in "
        "the last cached block of each prompt, which vLLM does not reuse with drafts of this kind]"
        "[{too_many:?}: what prompts share takes {needed_blocks:n} of {usable_blocks:n block}"
        "[{ends_fit:?}, and {shared_end_blocks:n} if sliding "
        "windows kept their ends only]]."
        if again
        else (
            ""
            if alone
            else "The prefix cache gave nothing: none of the prompts found a block in it[; {short:n} of "
            "{requests:n} are no longer than one of {size:n token}]."
        ),
        share_frac=share,
        holder=_holder(evidence),
        count=shown["step"].n_unique(),
        tokens=again,
        message=joined(_sentences(evidence, block_size, missed=missed, nothing=nothing)),
        values={
            "felt": share if (share or 0.0) >= LEAST_FRAC else None,
            "short": evidence.without_hit.get("short"),
            "size": block_size,
            "dropped": "all" if dropped == again else dropped and say("{dropped:n}", dropped=dropped),
        },
        advice=_advice(timeline, evidence, block_size, missed=missed, nothing=nothing),
        example="{request_id:id} found {found_tokens:n} of "
        "{computed_before_tokens:n token/tokens that had been computed before} in {at}.",
        cases=recomputed,
        tail=_tail(evidence) if missed else NOTHING,
        **prefill_cost(timeline, again),
    )


def _off(timeline: Timeline, use: pl.DataFrame) -> Findings:
    """Report that prompts begin alike while prefix caching is off."""
    again = int(use["missed_tokens"].sum())
    if again < MISSED_FRAC * max(1, int(use["prompt_tokens"].sum())):
        return
    shared = use.filter(pl.col("shareable_tokens") > 0)
    evidence = _evidence(timeline, use, _returned(timeline, timeline.header.block_size or 1).clear())
    share = _share(timeline, shared, again)
    yield step_finding(
        timeline,
        shared,
        evidence,
        title="Prefix caching is off",
        verdict="Prefix caching is off, and {tokens:n} of {prompt_tokens:n prompt token} are the "
        "beginning of an earlier one[, which took {felt:%} of the requests' time].",
        share_frac=share,
        count=shared["step"].n_unique(),
        tokens=again,
        message="{alike:n prompt} begin as an earlier one does, by at least a full block of {size:n token}.",
        values={
            "felt": share if (share or 0.0) >= LEAST_FRAC else None,
            "alike": shared["request_id"].n_unique(),
            "size": timeline.header.block_size or 0,
        },
        advice=[
            advise(
                "{option}: blocks that are still there are not computed again.",
                setting="enable_prefix_caching",
                value=True,
            )
        ],
        **prefill_cost(timeline, again),
    )


def _could_share(evidence: PrefixCache, block_size: int) -> bool:
    """Return whether there was no hit although prompts may begin alike: by a partial block, or with salts."""
    long_enough = not evidence.without_hit.get("short") and block_size <= SMALL_BLOCK
    none = not evidence.cached_tokens and evidence.requests >= FEWEST_REQUESTS
    return none and (not long_enough or evidence.salted > 0)


def _returned(timeline: Timeline, block_size: int) -> pl.DataFrame:
    """Return preempted requests that resumed, with ``evicted_tokens`` (of full blocks, not found again)."""
    whole = pl.col("lost_tokens") // block_size * block_size
    return (
        resumptions(timeline)
        .filter(pl.col("resumed_step").is_not_null())
        .with_columns(evicted_tokens=(whole - pl.col("found_tokens")).clip(0))
    )


def _evidence(timeline: Timeline, use: pl.DataFrame, back: pl.DataFrame) -> PrefixCache:
    prompt, cached = int(use["prompt_tokens"].sum()), int(use["cached_tokens"].sum())
    counted = use["shareable_tokens"].is_not_null().any()
    resets, evicted = _keys_lost(timeline)
    misses = use.filter(pl.col("cached_tokens") == 0)["miss"].drop_nulls().value_counts(sort=True)
    of_a_group = use.drop_nulls("longest_tokens").with_columns(
        had=pl.min_horizontal("longest_tokens", "shareable_tokens")
    )
    group_lost = of_a_group.select((pl.col("had") - pl.col("cached_tokens")).clip(0).sum()).item()
    shared, end_blocks = _shared_blocks(timeline)
    dropped = use.select(pl.col("missed_tokens").clip(upper_bound=timeline.header.block_size).sum()).item()
    free = timeline.steps["kv_blocks_free_after"].min()
    missed_ttft, reused_ttft = _first_token_ms(timeline, use)
    total, settings = timeline.header.kv_blocks_total, timeline.header.settings
    drops_last = settings.get("scheduler.use_eagle_block_drop", settings.get("scheduler.use_eagle"))
    missed_tokens, groups = int(use["missed_tokens"].sum()), timeline.header.cache_groups
    # Without a sliding window, another group may lack tokens only because a Mamba group lacks a state.
    only_states = all(group.kind != "SlidingWindow" for group in groups) and any(
        group.cache_mode == "align" for group in groups
    )
    empty_tier = None
    if use.height >= FEWEST_REQUESTS and "admitted" in timeline.lists:
        brought = timeline.lists["admitted"].select("external_tokens").collect().to_series()
        empty_tier = kv_tier(timeline) if not brought.has_nulls() and not brought.sum() else None
    return PrefixCache(
        requests=use.height,
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_frac=cached / prompt if prompt else None,
        shareable_tokens=int(use["shareable_tokens"].sum()) if counted else None,
        missed_tokens=missed_tokens if counted else None,
        group_lost_tokens=int(group_lost) if group_lost else None,
        dropped_tokens=int(dropped) if counted and drops_last else None,
        shared_blocks=shared,
        shared_end_blocks=end_blocks,
        keeps_windows=keeps_windows(timeline.header),
        lacks_states=only_states and bool(group_lost) and group_lost >= MOST_FRAC * missed_tokens,
        usable_blocks=None if total is None else total - 1,
        least_free_blocks=free if isinstance(free, int) else None,
        without_hit=dict(misses.iter_rows()),
        salted=int(use["salted"].fill_null(value=False).sum()),
        resets=resets,
        evicted_blocks=evicted,
        empty_tier=empty_tier,
        returned=back.height,
        returned_requests=back["request_id"].n_unique(),
        lost_tokens=int(back["lost_tokens"].sum()),
        found_tokens=int(back["found_tokens"].sum()),
        evicted_tokens=int(back["evicted_tokens"].sum()),
        missed_ttft_ms=missed_ttft,
        reused_ttft_ms=reused_ttft,
    )


def _first_token_ms(timeline: Timeline, use: pl.DataFrame) -> tuple[float | None, float | None]:
    """Return the median times to first token, in ms, of requests that missed and found their beginning."""
    sharing = use.filter(pl.col("shareable_tokens") > 0).select(
        "request_id", missed=pl.col("missed_tokens") > 0
    )
    latencies = request_latencies(timeline)[["request_id", "ttft_us"]].drop_nulls()
    times = sharing.join(latencies, on="request_id")
    missed, reused = (times.filter(missed=is_missed)["ttft_us"] / 1e3 for is_missed in (True, False))
    if min(missed.len(), reused.len()) < FEWEST_COMPARED:
        return None, None
    return float(missed.median()), float(reused.median())  # type: ignore[arg-type]  # not empty


def _shared_blocks(timeline: Timeline) -> tuple[int | None, int | None]:
    """Return the number of blocks of all shared beginnings and, with sliding windows, of their ends."""
    shared, need = shared_beginnings(timeline), kv_need(timeline.header)
    if shared is None or need is None or not shared.ends:
        return None, None
    cached = need.cached(shared.tokens // shared.ends)
    if cached is None:
        return None, None
    every, ends = (count * shared.ends for count in cached)
    return every, ends if has_windows(timeline.header) else None


def _keys_lost(timeline: Timeline) -> tuple[int, int | None]:
    """Return how often the cache became empty between two steps, and the number of keys lost otherwise.

    Keys are counted once per step, so a loss is visible only if it exceeds the step's new keys.
    """
    keys = timeline.steps.select("prefix_keys", fell=-pl.col("prefix_keys").diff().over("trial"))
    if keys["prefix_keys"].is_null().all():
        return 0, None
    fell = keys.filter(pl.col("fell") > 0)
    return fell.filter(pl.col("prefix_keys") == 0).height, int(
        fell.filter(pl.col("prefix_keys") > 0)["fell"].sum()
    )


def _recomputed(use: pl.DataFrame, back: pl.DataFrame) -> pl.DataFrame:
    """Return the requests that computed tokens again, those with the most tokens first."""
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
    """Return the share of all requests' time for which computing again held up those present, or None."""
    model = timeline.step_time
    if model is None or not model.per_prefill_token_us:
        return None
    sizes = shown.join(timeline.steps.select("step", present=PRESENT), on="step")["present"]
    together = int(sizes.sum()) / max(1, sizes.len())
    return share_of_requests(timeline, tokens * model.per_prefill_token_us * together)


def _holder(evidence: PrefixCache) -> Message:
    """Describe what emptied the cache, or which cache group lacks the tokens."""
    if evidence.lacks_states:
        return say(
            "Another KV cache group still had {group_lost_tokens:n} of these, but the Mamba group had no "
            "state there: it caches a state only where a chunk of a prompt ends[{keeps_windows:!}, and keeps "
            "those at the ends of prompts and of beginnings that prompts share].",
            evidence,
        )
    parts = [
        say("[The KV connector {empty_tier:code} brought none of them.]", evidence),
        say(
            "[{group_lost_tokens:n token} of these were still in one KV cache group and lost in another.]",
            evidence,
        ),
        say("[The cache was reset {resets:n time}.]", evidence),
        say("[Running requests took at least {evicted_blocks:n block} that were cached.]", evidence),
    ]
    left = (evidence.missed_tokens or 0) - (evidence.dropped_tokens or 0)
    if left and evidence.evicted_blocks == 0 and not evidence.resets:
        parts.append(
            say(
                "The number of cached blocks never fell between two steps: the cache was reset while nothing "
                "ran, blocks were replaced one for one, or the requests came before they were computed."
            )
        )
    return joined(parts)


def _sentences(evidence: PrefixCache, block_size: int, *, missed: bool, nothing: bool) -> list[Message]:
    sentences = []
    if evidence.evicted_tokens:
        sentences.append(
            say(
                "{returned_requests:n preempted request} came back[ {times:n time}] for "
                "{lost_tokens:n computed token} and found {found_tokens:n} of them; {evicted_tokens:n token} "
                "of full blocks were gone.",
                evidence,
                times=evidence.returned if evidence.returned != evidence.returned_requests else None,
            )
        )
    if evidence.hit_frac is not None:
        sentences.append(
            say(
                "{requests:n new request} found {hit_frac:%} of {prompt_tokens:n prompt token} cached"
                "[; earlier prompts began with {shareable_tokens:n} of them].",
                evidence,
            )
        )
    sentences.append(say("[{tail}.]", tail=_tail(evidence)))
    if not missed and not nothing:
        return sentences
    misses = dict(evidence.without_hit)  # the most frequent reason first
    nobody_had_it = evidence.shareable_tokens == 0 and misses.pop("not_cached", None) is not None
    reasons = [
        said(REASONS.get(miss, REASONS["unknown"]), values={"requests": count, "size": block_size})
        for miss, count in misses.items()
    ]
    alone = (
        "No two prompts[{salted:?} of the same salt] share a full block of {size:n token}; vLLM does not "
        "find a shorter shared beginning."
    )
    return [
        *sentences,
        say("[{reasons}.]", reasons=listed(reasons)),
        say(
            "[{salted:n request} had a cache salt. Only requests with the same salt share blocks; the trace "
            "does not show whether prompts with different salts begin alike.]",
            evidence,
        ),
        say(alone, size=block_size, salted=evidence.salted > 0) if nobody_had_it else NOTHING,
    ]


def _tail(evidence: PrefixCache) -> Message:
    """State how long requests that miss their beginning wait for a first token, if far longer than others."""
    missed, reused = evidence.missed_ttft_ms, evidence.reused_ttft_ms
    if missed is None or reused is None or missed < TIMES_MEDIAN * reused:
        return NOTHING
    return say(
        "Requests that missed tokens waited {missed_ttft_ms:ms} (median) for their first token, requests "
        "that found all of them {reused_ttft_ms:ms}",
        evidence,
    )


def _advice(
    timeline: Timeline, evidence: PrefixCache, block_size: int, *, missed: bool, nothing: bool
) -> list[Advice]:
    """Return advice on blocks, sliding windows, the connector, salts, and requests that skip the cache."""
    advice = []
    gone = evidence.evicted_tokens or evidence.evicted_blocks or evidence.group_lost_tokens
    dropped = evidence.dropped_tokens or 0
    if dropped >= MISSED_FRAC * evidence.prompt_tokens:
        advice += _smaller_drop(timeline, block_size)
    missed = missed and (evidence.missed_tokens or 0) - dropped >= MISSED_FRAC * evidence.prompt_tokens
    if missed and evidence.empty_tier is not None:
        advice.append(
            advise("Find out why {empty_tier:code} finds none of these tokens, if it stores them.", evidence)
        )
    if missed and evidence.lacks_states:
        advice.append(_more_states(timeline, evidence, block_size))
    elif missed and evidence.ends_fit:
        advice.append(_window_ends(timeline, evidence))
    elif missed and evidence.too_many is False and evidence.group_lost_tokens and not evidence.keeps_windows:
        advice.append(
            advise(
                "{option} above {now:n}: windows then keep more than their ends",
                setting="prefix_cache_retention_interval",
                now=timeline.header.settings.get(RETENTION) or 0,
                costs="Blocks that other beginnings would have.",
            )
        )
    elif missed and gone and evidence.too_many is not False:
        advice.append(
            advise(
                "{space}: more than {total:n block}[; what prompts share takes {needed_beyond:n}]",
                evidence,
                space=kv_space(timeline),
                total=timeline.header.kv_blocks_total or 0,
                costs="Device memory.",
            )
        )
    if missed and evidence.without_hit.get("skipped"):
        advice.append(advise("Ask for prompt log-probabilities only where they are needed."))
    if nothing and evidence.salted:
        advice.append(
            advise(
                "If prompts of different salts begin alike, give these requests the same {salt:code}.",
                salt="cache_salt",
                costs="The time to the first token then shows a client whether another one has sent the same "
                "beginning.",
            )
        )
    if nothing and not evidence.salted:
        advice.append(_smaller_blocks(timeline, block_size))
    return advice


def _smaller_blocks(timeline: Timeline, block_size: int) -> Advice:
    """Return advice so that prompts share beginnings longer than a block."""
    if any(group.kind == "Mamba" for group in timeline.header.cache_groups):
        return advise(
            "If prompts begin alike, begin them with more than {now:n token} of common text, or use a "
            "narrower {state:setting}: vLLM makes a block at least as large as the state of a Mamba layer.",
            now=block_size,
            state="--mamba-ssm-cache-dtype",
            costs="A narrower state may change outputs.",
        )
    return advise(
        "If prompts begin alike, use a smaller {option} (now {now:n}), as far as the attention backend "
        "accepts it.",
        setting="block_size",
        now=block_size,
        costs="More blocks for vLLM to manage.",
    )


def _smaller_drop(timeline: Timeline, block_size: int) -> list[Advice]:
    """Return advice to keep the blocks that vLLM computes again, or to make them smaller."""
    smaller = advise(
        "a smaller {option} (now {now:n}), as far as the model and its attention backend accept it: vLLM "
        "computes one block of each prompt again",
        setting="block_size",
        now=block_size,
        costs="More blocks for vLLM to manage.",
    )
    if timeline.header.settings.get(KEEPS_BLOCK) is not False:
        return [smaller]
    keeps = advise(
        "{option} true in {drafts:setting}, an experiment of vLLM: it then reuses that block",
        option=KEEPS_BLOCK.partition(".")[2],
        drafts="--speculative-config",
        costs="Perhaps fewer accepted drafts.",
    )
    return [keeps, smaller]


def _more_states(timeline: Timeline, evidence: PrefixCache, block_size: int) -> Advice:
    """Return the advice to let a Mamba group cache states at more places."""
    smaller = "smaller chunks ({chunks:setting}): the Mamba group caches a state where each chunk ends"
    if evidence.keeps_windows:
        return advise(smaller, chunks="--max-num-batched-tokens", costs="More steps.")
    return advise(
        "{interval:setting} {size:n} (now {now:n}) together with " + smaller + ", and then keeps it",
        interval="--prefix-cache-retention-interval",
        size=block_size,
        now=timeline.header.settings.get(RETENTION) or 0,
        chunks="--max-num-batched-tokens",
        costs="More steps, and blocks that other beginnings would have.",
    )


def _window_ends(timeline: Timeline, evidence: PrefixCache) -> Advice:
    """Return advice to keep only the ends of windows: vLLM's option, or a newer vLLM that has it."""
    costs = "Only a prompt that continues another one, or begins as several do, finds its beginning."
    if RETENTION in timeline.header.settings:
        return advise(
            "{option} {value:n} (now every block): windows then keep their ends only, and what prompts share "
            "takes {shared_end_blocks:n} of {usable_blocks:n block}",
            evidence,
            setting="prefix_cache_retention_interval",
            value=0,
            costs=costs,
        )
    return advise(
        "a vLLM with {setting_name} 0: windows then keep their ends only, and what prompts share takes "
        "{shared_end_blocks:n} of {usable_blocks:n block}",
        evidence,
        setting_name=Setting("--prefix-cache-retention-interval"),
        costs=costs,
    )


RULE = Rule(
    code="prefix-cache",
    summary="prompts or preempted requests found less in the prefix cache than had been computed before",
    needs=frozenset({Fact.CACHE, Fact.REQUESTS, Fact.LIVES, Fact.PREEMPTIONS, Fact.BLOCKS, Fact.CONFIG}),
    find=_find,
    quiet=5,
)
