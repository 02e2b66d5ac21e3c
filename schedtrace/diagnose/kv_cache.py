"""KV cache: blocks that requests need and hold, by KV cache group, and use of the prefix cache.

The hits of new requests in the prefix cache are compared with those in an unlimited cache; the hits of
preempted requests are reported separately.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.kv_need import kv_need as need_of_engine
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import MARK_CHARACTERS, blocks_until
from schedtrace.timeline.spans import at_steps, level
from schedtrace.timeline.timeline import Timeline, made_once
from schedtrace.workloads.recorded_load import prefix_block


def usable_blocks(header: Header) -> int | None:
    """Return the blocks that requests can hold, without vLLM's null block; None if the total is unknown."""
    return None if header.kv_blocks_total is None else header.kv_blocks_total - 1


def kv_tier(timeline: Timeline) -> str | None:
    """Return the KV connector in which the engine stores what it loads later; None if it has no such tier.

    A connector that passes requests on to another engine is no such tier.
    """
    settings = timeline.header.settings
    if settings.get("kv_transfer_config.kv_role") != "kv_both":
        return None
    requests = timeline.known_requests
    passed_on = "remote" in requests and requests["remote"].drop_nulls().len() > 0
    return None if passed_on else str(settings.get("kv_transfer_config.kv_connector", "the KV connector"))


def blocks_needed(header: Header, tokens: int) -> list[int] | None:
    """Return the blocks that a request of this length needs to run, by cache group; None if unknown."""
    need = need_of_engine(header)
    return need.sequence(tokens) if header.cache_groups and need and need.is_bounded else None


def most_blocks(header: Header, lengths: pl.Series) -> pl.Series:
    """Return the most KV blocks that a sequence of each length ever holds, in all cache groups together.

    The result is null if blocks cannot be counted.
    """
    need = need_of_engine(header)
    if need is None or not need.is_bounded or need.peak_blocks(1) is None:
        return pl.Series(lengths.name, [None] * lengths.len(), pl.Int64)
    distinct = lengths.drop_nulls().unique()
    blocks = pl.Series([sum(need.peak_blocks(tokens) or ()) for tokens in distinct], dtype=pl.Int64)
    return lengths.replace_strict(distinct, blocks, default=None, return_dtype=pl.Int64)


def longest_sequence(header: Header) -> int | None:
    """Return the maximum length, in tokens, of a request alone in the KV cache, without slots for drafts."""
    usable, length = usable_blocks(header), header.max_model_len
    need = need_of_engine(header)
    if usable is None or length is None or need is None or blocks_needed(header, 1) is None:
        return None
    needs = range(1, length + need.lookahead + 1)
    fitting = bisect_right(needs, usable, key=lambda tokens: sum(need.peak_blocks(tokens) or [0]))
    return max(0, min(length, fitting - need.lookahead))


@dataclass(frozen=True)
class Need:
    """KV blocks at one refusal. All values belong to one step, so that they add up; None: not recorded."""

    held_step: int | None
    """Step of the longest refusal with recorded holders; without one, a step in which as many blocks are held
    as in the median refused step."""
    running: int | None
    blocks_held: int | None
    blocks_free: int | None
    blocks_needed: int | None
    blocks_total: int | None
    blocks_for_all: int | None
    """Number of blocks for the largest number of requests that were present at once, as far as seats allow,
    assuming the largest need of as many consecutive requests; None if the cache has that many blocks."""
    largest_holder: str | None
    largest_holder_blocks: int | None
    set_aside: int
    """Number of requests that hold blocks but do not run."""

    def holdings(self) -> dict[str, Any]:
        """Return the fields by name."""
        return vars(self)


def need_at_refusals(timeline: Timeline, request_id: str | None = None) -> Need:
    """Return the KV blocks needed and held at refusals of the waiting loop; without refusals, at all steps.

    Args:
        timeline: Timeline of the engine.
        request_id: Request whose refusals count, as far as recorded; None for all requests.
    """
    refused = timeline.exits.filter(
        (pl.col("loop") == "waiting") & (pl.col("cause") == Cause.KV_BLOCKS) & pl.col("refusal")
    )
    if request_id is not None:
        refused = refused.filter((pl.col("request_id") == request_id).fill_null(value=True))
    of_step = at_steps(
        level(timeline.waits.filter(pl.col("set_aside")), "since_step", "left_step", set_aside=1),
        timeline.steps[["step", "kv_blocks_total", "kv_blocks_free_after", "num_running_after"]],
    )
    seen = refused[["step", "blocks_needed", "blocks_free"]].join(of_step, on="step", how="inner")
    if seen.is_empty():
        seen = of_step.with_columns(blocks_needed=pl.lit(None, pl.Int64), blocks_free=pl.lit(None, pl.Int64))
    free = pl.coalesce("blocks_free", "kv_blocks_free_after")
    seen = seen.with_columns(free=free, held=pl.col("kv_blocks_total") - 1 - free)  # 1: the null block
    holders = pl.col("num_running_after") + pl.col("set_aside")
    held_each = (
        seen.filter(pl.col("num_running_after") > 0).select((pl.col("held") / holders).median()).item()
    )
    step, holder, blocks = _longest_refusal(timeline, seen["step"])
    at = seen if step is None else seen.filter(pl.col("step") == step)
    at = at.drop_nulls("held").sort("held", "blocks_needed", "step")
    row = at.row((at.height - 1) // 2, named=True) if at.height else {}
    return Need(
        held_step=row.get("step"),
        running=row.get("num_running_after"),
        blocks_held=row.get("held"),
        blocks_free=row.get("free"),
        blocks_needed=row.get("blocks_needed"),
        blocks_total=timeline.header.kv_blocks_total,
        blocks_for_all=_for_all(timeline, held_each),
        largest_holder=holder,
        largest_holder_blocks=blocks,
        set_aside=row.get("set_aside", 0),
    )


def _for_all(timeline: Timeline, held_each: float | None) -> int | None:
    """Return the number of blocks for all requests at once: at least their number times their mean need.

    A few large requests need far more blocks than the same number of average requests, so the largest need of
    as many consecutively admitted requests counts, too.
    """
    peak = timeline.demand.requests
    peak = min(peak, timeline.seats) if timeline.seats else peak
    each, together = timeline.demand.blocks_each, 0
    if each is not None:
        ended = timeline.finishes.filter(pl.col("output_tokens") > 0).sort("trial", "scheduled_us")
        lengths = ended["prompt_tokens"] + ended["output_tokens"]
        need = need_of_engine(timeline.header)
        needs = {tokens: sum((need and need.sequence(tokens)) or ()) for tokens in lengths.unique()}
        blocks = lengths.replace_strict(needs, return_dtype=pl.Int64)
        together = int(blocks.rolling_sum(max(1, peak), min_samples=1).max() or 0)  # type: ignore[arg-type]  # of integers
    each = each or held_each
    if each is None:
        return None
    wanted = max(round(peak * each), together) + 1  # vLLM keeps one block for itself
    return wanted if wanted > (timeline.header.kv_blocks_total or 0) else None


def _longest_refusal(timeline: Timeline, steps: pl.Series) -> tuple[int | None, str | None, int | None]:
    """Return the longest refusal of these steps: its step, the largest holder, and that holder's blocks."""
    if "refusals" not in timeline.lists:
        return None, None, None
    rows = timeline.lists["refusals"].select("step", "holders", "held").collect()
    last = pl.lit(timeline.steps["step"].max())
    lasted = pl.col("step").shift(-1).fill_null(last) - pl.col("step")
    with_holders = rows.with_columns(lasted=lasted).filter(
        (pl.col("holders").list.len() > 0) & pl.col("step").is_in(pl.lit(steps).implode())
    )
    if with_holders.is_empty():
        return None, None, None
    longest = with_holders.sort("lasted", "step", descending=[True, False]).row(0, named=True)
    return longest["step"], longest["holders"][0], sum(group[0] for group in longest["held"] if group)


class GroupUse(msgspec.Struct, kw_only=True):
    """Use of one KV cache group, averaged over refusals of KV blocks with recorded holders."""

    kind: str
    """Class of the group's spec in vLLM, such as FullAttention, SlidingWindow or Mamba."""
    blocks_per_request: float
    """Mean number of blocks that a holder has in the group, without null blocks."""


def group_use(timeline: Timeline) -> list[GroupUse]:
    """Return one entry per KV cache group, in vLLM's order; empty if no refusal lists the holders.

    A group with too many blocks to examine is left out.
    """
    refusals = timeline.lists.get("refusals", pl.LazyFrame(schema={"held": pl.List(pl.List(pl.Int64))}))
    held = refusals.select("held").collect()
    uses = []
    for number, group in enumerate(timeline.header.cache_groups):
        blocks = held.select(pl.col("held").list.get(number, null_on_oob=True).explode())["held"].mean()
        if isinstance(blocks, float):
            uses.append(GroupUse(kind=group.kind, blocks_per_request=blocks))
    return uses


@made_once
def cache_use(timeline: Timeline) -> pl.DataFrame:
    """Return one row per request that was admitted for the first time, in the order of these admissions.

    Columns: ``step``, ``trial``, ``request_id``, ``prompt_tokens`` and

    * ``cached_tokens``: found at the admission, in this engine's cache if that is recorded,
    * ``shareable_tokens``: in full blocks with which an earlier request of the trial also began, up to the
      last common mark (``model.trace_facts``), without the prompt's last token, which vLLM always computes;
      null if prefix hashes are not recorded,
    * ``missed_tokens``: shareable, but neither found nor brought by a KV connector,
    * ``miss``, ``salted``, ``longest_tokens``: as in ``Admission``; null if not recorded.
    """
    arrivals = timeline.started_requests
    size = prefix_block(timeline.header, arrivals) or timeline.header.block_size or 1
    schema = {
        "request_id": pl.String,
        "local_tokens": pl.Int64,
        "external_tokens": pl.Int64,
        "miss": pl.String,
        "salted": pl.Boolean,
        "longest_tokens": pl.Int64,
    }
    recorded = timeline.lists.get("admitted", pl.LazyFrame(schema=schema))
    admissions = recorded.select(schema.keys()).collect().unique("request_id", keep="first")
    rows = (
        timeline.admitted.lazy()
        .filter(pl.col("phase") == "new")
        .select("step", "trial", "request_id", "computed_tokens")
        .collect()
        .with_row_index("at")
        .join(arrivals[["request_id", "prompt_tokens", "prefix_hashes"]], on="request_id")
        .join(admissions, on="request_id", how="left")
        .sort("at")
    )
    most = (pl.col("prompt_tokens") - 1) // size * size
    brought = pl.col("external_tokens").fill_null(0)
    shareable = pl.lit(None, pl.Int64)
    if rows["prefix_hashes"].null_count() < rows.height:
        blocks: dict[int, int] = {}
        for trial in rows[["trial", "at", "prefix_hashes"]].partition_by("trial"):
            hashes = [text or "" for text in trial["prefix_hashes"]]
            blocks |= dict(zip(trial["at"], shared_blocks(hashes), strict=True))
        rows = rows.hstack([pl.Series("blocks", [blocks[at] for at in rows["at"]], dtype=pl.Int64)])
        shareable = pl.min_horizontal(pl.col("blocks") * size, most)
    return (
        rows.with_columns(
            cached_tokens=pl.coalesce("local_tokens", "computed_tokens"), shareable_tokens=shareable
        )
        .with_columns(missed_tokens=(pl.col("shareable_tokens") - pl.col("cached_tokens") - brought).clip(0))
        .select(
            *("step", "trial", "request_id", "prompt_tokens", "cached_tokens", "shareable_tokens"),
            *("missed_tokens", "miss", "salted", "longest_tokens"),
        )
    )


class SharedBeginnings(NamedTuple):
    """Prefixes that at least two prompts of a trial share, each counted once."""

    tokens: int
    """Number of tokens in the full blocks of the shared prefixes."""
    ends: int
    """Number of shared prefixes that are not part of a longer shared prefix."""


def shared_beginnings(timeline: Timeline) -> SharedBeginnings | None:
    """Return the shared prefixes of the trial in which they have the most blocks; None without hashes."""
    arrivals = timeline.started_requests
    size = prefix_block(timeline.header, arrivals) or timeline.header.block_size
    hashed = arrivals[["trial", "prefix_hashes"]].drop_nulls("prefix_hashes")
    if hashed.is_empty() or not size:
        return None
    trials = hashed.group_by("trial").agg("prefix_hashes")["prefix_hashes"].to_list()
    blocks, ends = max(_shared_nodes(texts) for texts in trials)
    return SharedBeginnings(blocks * size, ends)


def _shared_nodes(texts: list[str]) -> tuple[int, int]:
    """Return the number of blocks in shared prefixes, and how many prefixes are not part of longer ones."""
    ordered = sorted(texts)
    alike = [0, *(_alike(first, second) for first, second in pairwise(ordered)), 0]
    most_alike = (max(neighbours) for neighbours in pairwise(alike))
    shared = sorted(
        {text[: marks * MARK_CHARACTERS] for text, marks in zip(ordered, most_alike, strict=True)}
    )
    continued = [_alike(first, second) for first, second in pairwise(shared)]
    marks = [len(text) // MARK_CHARACTERS for text in shared]
    blocks = sum(map(blocks_until, marks)) - sum(map(blocks_until, continued))
    return blocks, sum(own > common for own, common in zip(marks, [*continued, 0], strict=True))


def shared_blocks(hashes: list[str]) -> list[int]:
    """Return the number of leading blocks, up to a mark, that each prompt shares with any earlier prompt.

    In sorted order, a prompt shares most with one of its neighbours. To find the neighbours among earlier
    prompts only, prompts are removed from the last to the first.
    """
    order = sorted(range(len(hashes)), key=hashes.__getitem__)
    alike = [0, *(_alike(hashes[prompt], hashes[neighbour]) for prompt, neighbour in pairwise(order)), 0]
    place = {prompt: at for at, prompt in enumerate(order, start=1)}
    before, after = list(range(-1, len(order) + 1)), list(range(1, len(order) + 3))
    with_before = [0, *alike[:-1], 0]  # at a place: what it shares with the one before it
    shared = [0] * len(hashes)
    for prompt in reversed(range(len(hashes))):
        at = place[prompt]
        previous, following = before[at], after[at]
        shared[prompt] = max(with_before[at], with_before[following])
        with_before[following] = min(with_before[at], with_before[following])
        after[previous], before[following] = following, previous
    return [blocks_until(marks) for marks in shared]


def _alike(first: str, second: str) -> int:
    """Return the number of leading marks that two prompts share."""
    least, most = 0, min(len(first), len(second)) // MARK_CHARACTERS
    while least < most:
        middle = (least + most + 1) // 2
        if first[: middle * MARK_CHARACTERS] == second[: middle * MARK_CHARACTERS]:
            least = middle
        else:
            most = middle - 1
    return least


STEPS_PER_BLOCK = 16
"""Assumed block size (vLLM's on GPUs) if the trace does not record it."""


def steps_per_block(timeline: Timeline) -> int:
    """Return the number of steps in which a decoding request fills one KV block."""
    return timeline.header.block_size or STEPS_PER_BLOCK


@made_once
def resumptions(timeline: Timeline) -> pl.DataFrame:
    """Return one row per preemption in ``schedule()``, in order.

    Columns: those of ``model.trace.Preemption``, ``step``, ``trial`` and

    * ``lasted_steps``: steps since the request was last admitted; null if that is not in the trace,
    * ``cycle``: whether ``lasted_steps`` is at most ``steps_per_block``,
    * ``resumed_step``: the step that admitted the request again; null if none did,
    * ``found_tokens``: those of the ``lost_tokens`` that it found in a cache then; null if not resumed,
    * ``away_us``: from the start of the step that preempted the request to the start of ``resumed_step``; if
      not resumed, to the request's end or else the last output of the trace.
    """
    lost = timeline.preemptions.filter(pl.col("in_schedule"))
    admitted = (
        timeline.admitted.lazy()
        .select("request_id", "computed_tokens", pl.col("step").alias("resumed_step"))
        .collect()
        .sort("resumed_step")
    )
    last = admitted.select("request_id", pl.col("resumed_step").alias("admitted_step"))
    began = timeline.steps.select(
        pl.col("step").alias("resumed_step"), pl.col("start_us").alias("resumed_us")
    )
    ended = timeline.finishes[["request_id", "finished_us"]].unique("request_id", keep="last")
    end_us = timeline.steps.select(pl.max_horizontal("start_us", "output_us").max()).item()
    asof = partial(
        pl.DataFrame.join_asof,
        left_on="step",
        by="request_id",
        check_sortedness=False,
        coalesce=False,
        allow_exact_matches=False,
    )
    with_last = asof(lost.with_row_index("at"), last, right_on="admitted_step", strategy="backward")
    return (
        asof(with_last, admitted, right_on="resumed_step", strategy="forward")
        .join(began, on="resumed_step", how="left", maintain_order="left")
        .join(ended, on="request_id", how="left", maintain_order="left")
        .with_columns(
            lasted_steps=pl.col("step") - pl.col("admitted_step"),
            found_tokens=pl.min_horizontal(
                pl.when(pl.col("resumed_step").is_not_null()).then("computed_tokens"), "lost_tokens"
            ),
            away_us=pl.coalesce("resumed_us", "finished_us", pl.lit(end_us)) - pl.col("start_us"),
        )
        .with_columns(cycle=(pl.col("lasted_steps") <= steps_per_block(timeline)).fill_null(value=False))
        .sort("at")
        .drop("at", "admitted_step", "computed_tokens", "resumed_us", "finished_us")
    )
