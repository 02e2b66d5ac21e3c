"""Admission by size: steps that refused a request for its size, its needs, and who stood behind it.

Who would have been admitted, had the scheduler passed over the request that it refused at the head, is told
step by step from what the step left over: tokens, KV blocks and seats. Those behind the head are taken in the
order of the queue if they fit. One that was let pass keeps its seat and its blocks, which grow by a token a
step, until the step that really scheduled it; so nothing is given away twice. One for which the room would
not have lasted until then is not counted at all: it would have been preempted.
"""

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from schedtrace.model.causes import OF_ITS_OWN_SIZE
from schedtrace.timeline.frames import Frames
from schedtrace.timeline.queue_waits import NEVER, mismatches, waits
from schedtrace.timeline.spans import at_steps, level


@dataclass(frozen=True)
class Need:
    """The room that a waiting request needs, at most: hits in the prefix cache are unknown."""

    block_size: int
    groups: int
    """KV cache groups: each takes blocks of its own for the same tokens."""
    drafts: bool
    """Each request takes room for drafts, at most one more block."""
    chunked: bool
    most_at_once: int
    """``long_prefill_token_threshold``; 0: none."""
    whole: bool
    """``scheduler_reserve_full_isl``: there must be room for all of it, not only for its first chunk."""
    kept_free: int
    """Blocks of ``--watermark``."""

    def tokens(self, wanted: int, budget: int) -> int:
        """Tokens of the first chunk; 0 if none fits."""
        chunk = min(wanted, self.most_at_once or wanted)
        if self.chunked:
            return min(chunk, budget)
        return chunk if chunk <= budget else 0

    def blocks(self, tokens: int) -> int:
        """KV blocks for so many tokens."""
        return (-(-tokens // self.block_size) + self.drafts) * self.groups


def refused_heads(frames: Frames) -> pl.DataFrame:
    """Steps whose waiting loop ended at a request that was too large: one row each.

    Without the steps for which ``waits`` reconstructs a queue of another length than the recorded one.

    Columns: those of ``Frames.exits`` with ``head`` for the request's id, ``order`` (its place in ``waits``),
    ``head_tokens``, ``fresh`` (it was not preempted before), and ``num_not_ready_after``, ``budget_left``,
    ``kv_blocks_free`` and ``seats_left`` after the step.
    """
    left_over = frames.steps.select(
        "step",
        "num_not_ready_after",
        budget_left="remaining_budget",
        kv_blocks_free="kv_blocks_free_after",
        seats_left=frames.seats - pl.col("num_running_after"),
    )
    refused = (
        frames.exits.filter(
            (pl.col("loop") == "waiting")
            & (pl.col("kind") == "break")
            & pl.col("cause").is_in(OF_ITS_OWN_SIZE)
            & pl.col("refusal")
        )
        .drop("budget_left")
        .unique("step", keep="last", maintain_order=True)
        .join(left_over, on="step", maintain_order="left")
        .join(mismatches(frames), on="step", how="anti", maintain_order="left")
        .filter(pl.col("kv_blocks_free").is_not_null())
    )
    places = waits(frames).select(
        "request_id",
        "since_step",
        "left_step",
        "order",
        head_tokens="wanted_tokens",
        fresh=~pl.col("preempted"),
    )
    return (
        refused.join(places, on="request_id", maintain_order="left")
        .filter((pl.col("since_step") <= pl.col("step")) & (pl.col("step") < pl.col("left_step")))
        .rename({"request_id": "head"})
    )


def need_of(frames: Frames, heads: pl.DataFrame) -> Need:
    """The room that a request needs on this engine.

    Args:
        frames: The engine's trace.
        heads: ``refused_heads(frames)``, whose recorded needs show how many KV cache groups there are.
    """
    config, header = frames.header.scheduler_config, frames.header
    block_size = header.block_size or 1
    kept_free = int(float(config.get("watermark") or 0) * (header.kv_blocks_total or 0))
    drafts = int(frames.steps["draft_tokens"].sum()) > 0
    own = (pl.col("head_tokens") + block_size - 1) // block_size + int(drafts)
    recorded = heads.filter(pl.col("fresh") & pl.col("blocks_needed").is_not_null() & (own > 0))
    groups = recorded.select((pl.col("blocks_needed") / own).ceil().max()).item()
    return Need(
        block_size=block_size,
        groups=max(1, int(groups or 1)),
        drafts=drafts,
        chunked=bool(config.get("enable_chunked_prefill", True)),
        most_at_once=int(config.get("long_prefill_token_threshold") or 0),
        whole=bool(config.get("scheduler_reserve_full_isl")),
        kept_free=kept_free,
    )


def blocks_needed(stretches: pl.LazyFrame, steps: pl.DataFrame, block_size: int) -> pl.DataFrame:
    """``step``, ``requests`` and ``blocks``: KV blocks that their tokens need when the step is over."""
    length = pl.col("last_step") - pl.col("step") + 1
    first = pl.col("computed_tokens") + pl.col("scheduled_tokens")
    last = pl.col("computed_tokens") + length * pl.col("scheduled_tokens")
    held = stretches.with_columns(
        requests=pl.lit(1), blocks=-(-first // block_size), most=-(-last // block_size)
    )
    # Each further block is taken in the first step whose tokens do not fit into those before it.
    filled = pl.col("full") * block_size - pl.col("computed_tokens")
    taken = (
        held.filter(pl.col("most") > pl.col("blocks"))
        .with_columns(full=pl.int_ranges("blocks", "most"))
        .explode("full")
        .with_columns(step=pl.col("step") + filled // pl.col("scheduled_tokens"), requests=0, blocks=1)
    )
    spans = (rows.select("step", "last_step", "requests", "blocks") for rows in (held, taken))
    all_spans = pl.concat(spans, how="vertical_relaxed")
    sums = level(all_spans, "step", pl.col("last_step") + 1, requests="requests", blocks="blocks")
    return at_steps(sums, steps.select("step"))


PASSED_SCHEMA = {
    "step": pl.Int64,
    "trial": pl.Int64,
    "head": pl.String,
    "head_tokens": pl.Int64,
    "cause": pl.String,
    "budget_left": pl.Int64,
    "kv_blocks_free": pl.Int64,
    "seats_left": pl.Int64,
    "request_id": pl.String,
    "tokens": pl.Int64,
    "blocks": pl.Int64,
    "left_step": pl.Int64,
}


def behind_head(frames: Frames, heads: pl.DataFrame) -> pl.DataFrame:
    """Requests that would have been admitted: one row each, with the first step that could have done so.

    Args:
        frames: The engine's trace.
        heads: ``refused_heads(frames)``. Steps in which more requests are not ready than are known by name
            let nobody pass.

    Returns:
        ``PASSED_SCHEMA``: ``head`` was refused there, ``budget_left``, ``kv_blocks_free`` and ``seats_left``
        are what the step left over, ``tokens`` and ``blocks`` what the request would have got, ``left_step``
        the step in which it really left the queue (``queue_waits.NEVER``: none).
    """
    if heads.is_empty() or frames.header.foreign_queues:  # who comes next there is not known
        return pl.DataFrame(schema=PASSED_SCHEMA)
    queue = _queue(frames)
    rows = queue.to_dicts()
    since, left = queue["since_step"].to_numpy(), queue["left_step"].to_numpy()
    ready = queue["ready"].to_numpy()
    passing = _Passing(need_of(frames, heads))
    refused = {head["step"]: head for head in heads.iter_rows(named=True)}
    for step, free in frames.steps.select("step", "kv_blocks_free_after").iter_rows():
        passing.keep(step, free)
        if step not in refused:
            continue
        there = (since <= step) & (step < left)
        if refused[step]["num_not_ready_after"] > (there & ~ready).sum():
            continue  # who else cannot run is not known
        (behind,) = (there & ready).nonzero()
        passing.let_pass(refused[step], [rows[at] for at in behind[behind > refused[step]["order"]]])
    return pl.DataFrame(list(passing.found.values()), schema=PASSED_SCHEMA)


@dataclass
class _Passing:
    """The requests that were let pass so far, by their place in the queue."""

    need: Need
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    inside: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Those that really wait still, with the step that let them pass."""
    given_up: set[int] = field(default_factory=set)
    """Those whose blocks would have been taken from them again."""

    def keep(self, step: int, free: int | None) -> None:
        """After a step with so many free blocks: who has still its place, and who would have lost it."""
        self.inside = {at: one for at, one in self.inside.items() if one["left_step"] > step}
        while self.inside and free is not None and self._held(step) > free:
            at, _ = self.inside.popitem()  # vLLM preempts the one that began last
            self.given_up.add(at)
            del self.found[at]

    def let_pass(self, head: dict[str, Any], behind: list[dict[str, Any]]) -> None:
        """Fill what this step left over with those behind its head."""
        step, need = head["step"], self.need
        budget = head["budget_left"] - len(self.inside)
        seats = head["seats_left"] - len(self.inside)
        free = head["kv_blocks_free"] - need.kept_free - self._held(step)
        for one in behind:
            if min(seats, budget, free) <= 0:
                return
            tokens = need.tokens(one["wanted_tokens"], budget)
            blocks = need.blocks(one["wanted_tokens"] if need.whole else tokens)
            known = one["order"] in self.inside or one["order"] in self.given_up
            if known or not tokens or blocks > free:
                continue
            seats, budget, free = seats - 1, budget - tokens, free - blocks
            self.inside[one["order"]] = {**one, "passed_step": step}
            got = {"request_id": one["request_id"], "tokens": tokens, "blocks": blocks}
            told = {**head, **got, "left_step": one["left_step"]}
            self.found[one["order"]] = {name: told[name] for name in PASSED_SCHEMA}

    def _held(self, step: int) -> int:
        """Blocks that they hold by now, had each computed a token more in every step since."""
        return sum(
            self.need.blocks(one["wanted_tokens"] + min(step - one["passed_step"], one["most_after_prompt"]))
            for one in self.inside.values()
        )


def _queue(frames: Frames) -> pl.DataFrame:
    """``timeline.waits`` with ``most_after_prompt`` (tokens to compute) and ``ready`` (never skipped)."""
    queue = waits(frames)
    most = (
        (pl.col("max_tokens") - 1).fill_null(NEVER).alias("most_after_prompt")
    )  # the last one is not computed
    asked = frames.known_requests.select("request_id", most)
    skipped = (
        frames.exits.filter((pl.col("loop") == "waiting") & (pl.col("kind") == "continue"))
        .select("request_id", pl.col("step").alias("skip"))
        .drop_nulls()
    )
    not_ready = (
        queue.join(skipped, on="request_id")
        .filter((pl.col("since_step") <= pl.col("skip")) & (pl.col("skip") < pl.col("left_step")))["order"]
        .unique()
    )
    return queue.join(asked, on="request_id", how="left", maintain_order="left").with_columns(
        pl.col("most_after_prompt").fill_null(NEVER), ready=~pl.col("order").is_in(not_ready.implode())
    )
