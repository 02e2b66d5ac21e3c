"""Who would have been admitted, had the scheduler passed over the request that it refused at the head.

Told step by step from what the step left over: tokens, KV blocks and seats. Those behind the head are taken
in the order of the queue if they fit. One that was let pass keeps its seat and its blocks, which grow by a
token a step, until the step that really scheduled it; so nothing is given away twice. One for which the room
would not have lasted until then is not counted at all: it would have been preempted.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from schedtrace.timeline.admission import Need, need_of
from schedtrace.timeline.queue_waits import NEVER
from schedtrace.timeline.timeline import Timeline

COLUMNS = {
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


def behind_head(timeline: Timeline, heads: pl.DataFrame) -> pl.DataFrame:
    """Requests that would have been admitted: one row each, with the first step that could have done so.

    Args:
        timeline: The engine's trace.
        heads: ``refused_heads(timeline)``. Steps in which more requests are not ready than are known by name
            let nobody pass.

    Returns:
        ``COLUMNS``: ``head`` was refused there, ``budget_left``, ``kv_blocks_free`` and ``seats_left`` are
        what the step left over, ``tokens`` and ``blocks`` what the request would have got, ``left_step``
        the step in which it really left the queue (``queue_waits.NEVER``: none).
    """
    if heads.is_empty() or timeline.header.foreign_queues:  # who comes next there is not known
        return pl.DataFrame(schema=COLUMNS)
    queue = _queue(timeline)
    rows = queue.to_dicts()
    since, left = queue["since_step"].to_numpy(), queue["left_step"].to_numpy()
    ready = queue["ready"].to_numpy()
    passing = _Passing(need_of(timeline, heads))
    refused = {head["step"]: head for head in heads.iter_rows(named=True)}
    for step, free in timeline.steps.select("step", "kv_blocks_free_after").iter_rows():
        passing.keep(step, free)
        if step not in refused:
            continue
        there = (since <= step) & (step < left)
        if refused[step]["num_not_ready_after"] > (there & ~ready).sum():
            continue  # who else cannot run is not known
        behind = np.flatnonzero(there & ready)
        passing.let_pass(refused[step], [rows[at] for at in behind[behind > refused[step]["order"]]])
    return pl.DataFrame(list(passing.found.values()), schema=COLUMNS)


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
            self.found[one["order"]] = {name: told[name] for name in COLUMNS}

    def _held(self, step: int) -> int:
        """Blocks that they hold by now, had each computed a token more in every step since."""
        return sum(
            self.need.blocks(one["wanted_tokens"] + min(step - one["passed_step"], one["most_after_prompt"]))
            for one in self.inside.values()
        )


def _queue(timeline: Timeline) -> pl.DataFrame:
    """``timeline.waits`` with ``most_after_prompt`` (tokens to compute) and ``ready`` (never skipped)."""
    queue = timeline.waits
    most = (
        (pl.col("max_tokens") - 1).fill_null(NEVER).alias("most_after_prompt")
    )  # the last one is not computed
    asked = timeline.arrivals.select("request_id", most).unique("request_id", keep="first")
    skipped = (
        timeline.exits.filter((pl.col("loop") == "waiting") & (pl.col("kind") == "continue"))
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
