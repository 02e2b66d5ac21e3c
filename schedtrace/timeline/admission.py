"""Admission by size: steps that refused a request for its size, its needs, and the requests behind it.

Had the scheduler passed over the head that it refused, which requests would it have admitted? The answer
follows, step by step, from the tokens, KV blocks and seats that the step left over. Requests behind the head
are taken in the order of the queue if they fit. An admitted request keeps its seat and its blocks, and grows
by a token per step, until the step that really scheduled it, so no room is assigned twice. A request for
which the room would not have lasted until then is not counted, because it would have been preempted.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl

from schedtrace.model.causes import OF_ITS_OWN_SIZE, Cause
from schedtrace.model.kv_need import KvNeed, kv_need
from schedtrace.timeline.frames import EngineFrames
from schedtrace.timeline.queue_waits import NEVER

BY_SIZE = (Cause.KV_BLOCKS, Cause.CHUNKED_PREFILL_OFF)
"""Causes of refusals that a smaller request behind the head could pass; other causes, such as an alignment,
stop every request.
"""


@dataclass(frozen=True)
class AdmissionNeed:
    """Largest room that a waiting request needs; hits in the prefix cache are unknown."""

    kv: KvNeed
    chunked: bool
    most_at_once: int
    """``long_prefill_token_threshold``; 0 for none."""
    whole: bool
    """``scheduler_reserve_full_isl``: whether the whole request must fit, not only its first chunk."""
    kept_free: int
    """Blocks of ``--watermark``."""

    def tokens(self, wanted: int, budget: int) -> int:
        """Return the tokens of the first chunk; 0 if none fits."""
        chunk = min(wanted, self.most_at_once or wanted)
        if self.chunked:
            return min(chunk, budget)
        return chunk if chunk <= budget else 0

    def blocks(self, tokens: int, computed: int = 0) -> int:
        """Return the KV blocks that it holds after a step that took it from ``computed`` to ``tokens``."""
        return sum(self.kv.held(computed, tokens) or ())

    def blocks_later(self, tokens: int, computed: int) -> int:
        """Return the KV blocks that it holds later, whatever the chunks of its earlier tokens were."""
        most = self.kv.sequence(tokens + self.kv.lookahead) or []
        return sum(map(min, most, self.kv.held(computed, tokens) or []))

    def blocks_asked(self, wanted: int, tokens: int) -> int:
        """Return the KV blocks that must be free to admit it with a first chunk of this many tokens."""
        chunk = self.blocks(tokens)
        return max(chunk, sum(self.kv.sequence(wanted) or ())) if self.whole else chunk


def refused_heads(frames: EngineFrames, waits: pl.DataFrame, mismatches: pl.DataFrame) -> pl.DataFrame:
    """Return the steps whose waiting loop ended at a request that was too large: one row each.

    Steps whose reconstructed queue differs in length from the recorded one are left out.

    Args:
        frames: One engine's.
        waits: ``queue_waits.waits``.
        mismatches: ``queue_waits.mismatches``.

    Columns: those of ``EngineFrames.exits`` with ``head`` for the request's id, ``order`` (its place in
    ``waits``), ``head_tokens``, ``fresh`` (it was not preempted before), and ``num_not_ready_after``,
    ``budget_left``, ``kv_blocks_free`` and ``seats_left`` after the step.
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
        .join(mismatches, on="step", how="anti", maintain_order="left")
        .filter(pl.col("kv_blocks_free").is_not_null())
    )
    places = waits.select(
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


def heads_by_size(heads: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``refused_heads`` that a smaller request could have passed."""
    return heads.filter(pl.col("cause").is_in([str(cause) for cause in BY_SIZE]))


def need_of(frames: EngineFrames, heads: pl.DataFrame) -> AdmissionNeed | None:
    """Return the room that a request needs on this engine; None if its KV blocks cannot be counted.

    Args:
        frames: The engine's trace.
        heads: ``refused_heads``: one that was refused more blocks than are counted for it shows
            that the count is not vLLM's.
    """
    config, header = frames.header.scheduler_config, frames.header
    kv = kv_need(header)
    if kv is None or kv.held(1, 2) is None or kv.sequence(1) is None:
        return None
    if "scheduler.num_lookahead_tokens" not in header.settings and int(frames.steps["draft_tokens"].sum()):
        kv = replace(kv, lookahead=max(group.block_size for group in kv.groups))
    need = AdmissionNeed(
        kv=kv,
        chunked=bool(config.get("enable_chunked_prefill", True)),
        most_at_once=int(config.get("long_prefill_token_threshold") or 0),
        whole=bool(config.get("scheduler_reserve_full_isl")),
        kept_free=int(float(config.get("watermark") or 0) * (header.kv_blocks_total or 0)),
    )
    recorded = heads.filter(pl.col("fresh")).select("head_tokens", "blocks_needed").drop_nulls().unique()
    is_vllms = all(needed <= need.blocks_asked(tokens, tokens) for tokens, needed in recorded.iter_rows())
    return need if is_vllms else None


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


def behind_head(frames: EngineFrames, waits: pl.DataFrame, heads: pl.DataFrame) -> pl.DataFrame:
    """Return the requests that a step would have admitted: one row each, with the first such step.

    Args:
        frames: The engine's trace.
        waits: ``queue_waits.waits``.
        heads: ``refused_heads``. Steps in which more requests are not ready than are known by name
            let nobody pass.

    Returns:
        ``PASSED_SCHEMA``: ``head`` was refused there, ``budget_left``, ``kv_blocks_free`` and ``seats_left``
        are what the step left over, ``tokens`` and ``blocks`` what the request would have got, ``left_step``
        the step in which it really left the queue (``queue_waits.NEVER``: none).
    """
    need = need_of(frames, heads)
    if need is None or heads.is_empty() or frames.header.foreign_queues:  # who comes next is not known
        return pl.DataFrame(schema=PASSED_SCHEMA)
    queue = _queue(frames, waits)
    rows = queue.to_dicts()
    since, left = queue["since_step"].to_numpy(), queue["left_step"].to_numpy()
    ready = queue["ready"].to_numpy()
    passing = _Passing(need)
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
    return pl.DataFrame(list(passing.passed.values()), schema=PASSED_SCHEMA)


@dataclass
class _Passing:
    """Requests that were hypothetically admitted so far, by their place in the queue."""

    need: AdmissionNeed
    passed: dict[int, dict[str, Any]] = field(default_factory=dict)
    inside: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Requests that in fact still wait, with the step that hypothetically admitted them (``passed_step``)."""
    given_up: set[int] = field(default_factory=set)
    """Places of requests that vLLM would have preempted again."""

    def keep(self, step: int, free: int | None) -> None:
        """Drop requests that have left the queue by now, and those that the free blocks no longer hold."""
        self.inside = {at: request for at, request in self.inside.items() if request["left_step"] > step}
        while self.inside and free is not None and self._held(step) > free:
            at, _ = self.inside.popitem()  # vLLM preempts the one that began last
            self.given_up.add(at)
            del self.passed[at]

    def let_pass(self, head: dict[str, Any], behind: list[dict[str, Any]]) -> None:
        """Fill the room that this step left over with requests behind its head."""
        step, need = head["step"], self.need
        budget = head["budget_left"] - len(self.inside)
        seats = head["seats_left"] - len(self.inside)
        free = head["kv_blocks_free"] - need.kept_free - self._held(step)
        for request in behind:
            if min(seats, budget, free) <= 0:
                return
            tokens = need.tokens(request["wanted_tokens"], budget)
            blocks = need.blocks_asked(request["wanted_tokens"], tokens)
            has_passed = request["order"] in self.inside or request["order"] in self.given_up
            if has_passed or not tokens or blocks > free:
                continue
            seats, budget, free = seats - 1, budget - tokens, free - need.blocks(tokens)
            self.inside[request["order"]] = {**request, "passed_step": step}
            grant = {"request_id": request["request_id"], "tokens": tokens, "blocks": blocks}
            row = {**head, **grant, "left_step": request["left_step"]}
            self.passed[request["order"]] = {name: row[name] for name in PASSED_SCHEMA}

    def _held(self, step: int) -> int:
        """Return the blocks that the requests would hold if each had computed a token in every step since."""
        held = 0
        for request in self.inside.values():
            more = min(step - request["passed_step"], request["most_after_prompt"])
            tokens = request["wanted_tokens"] + more
            held += self.need.blocks_later(tokens, tokens - 1 if more else 0)
        return held


def _queue(frames: EngineFrames, queue: pl.DataFrame) -> pl.DataFrame:
    """Return ``waits`` with ``most_after_prompt`` (tokens to compute) and ``ready`` (never skipped)."""
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
