"""What a running request holds of the KV pool, by KV cache group, and what its tokens would fill."""

from dataclasses import dataclass

import polars as pl

from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class GroupHolding:
    """One KV cache group. Means over the refusals for KV blocks that tell who holds how much."""

    kind: str
    """vLLM's class of the group's spec: FullAttention, SlidingWindow, Mamba, ..."""
    block_size: int
    """Tokens in a block of this group."""
    blocks_per_request: float
    """Blocks that one of the named holders has in this group, null blocks aside."""
    tokens_need_blocks: float
    """Blocks that the tokens of such a request fill: ``ceil(tokens / block_size)``."""
    refused_needs_blocks: float | None
    """New blocks that a refused request asked for; None: vLLM's managers could not be asked."""
    share_of_pool: float | None
    """Blocks of all holders in this group as a share of all KV blocks; shared blocks count for each holder.
    None: the pool's size is not recorded."""


def group_holdings(timeline: Timeline) -> list[GroupHolding]:
    """One entry per KV cache group, in vLLM's order; none where no refusal tells who holds what.

    A group of which vLLM had too many blocks to look at is left out.
    """
    refusals = timeline.lists.get("refusals", pl.LazyFrame()).collect()
    if refusals.is_empty():
        return []
    refusals = refusals.filter(pl.col("holders").list.len() > 0).with_row_index("refusal")
    holders = _holders(timeline, refusals)
    total = timeline.header.kv_blocks_total
    found = []
    for number, group in enumerate(timeline.header.cache_groups):
        held = _number(pl.col("held"), number).list.get(pl.col("place"), null_on_oob=True)
        of_group = holders.with_columns(
            blocks=held, need=-(-pl.col("tokens") // group.block_size)
        ).drop_nulls(["blocks", "need"])
        if of_group.is_empty():
            continue
        others = pl.when(pl.col("other_holders") > 0).then(_number(pl.col("other_held"), number)).otherwise(0)
        all_held = refusals.select(
            blocks=_number(pl.col("held"), number).list.sum() + others,
            known=_number(pl.col("held"), number).list.len() > 0,
            needed=_number(pl.col("blocks_needed"), number),
        )
        taken = all_held.filter("known")["blocks"].mean()
        needed = all_held["needed"].mean()
        found.append(
            GroupHolding(
                kind=group.kind,
                block_size=group.block_size,
                blocks_per_request=_mean(of_group["blocks"]),
                tokens_need_blocks=_mean(of_group["need"]),
                refused_needs_blocks=None if needed is None else float(needed),  # type: ignore[arg-type]
                share_of_pool=float(taken) / total if taken is not None and total else None,  # type: ignore[arg-type]
            )
        )
    return found


def _holders(timeline: Timeline, refusals: pl.DataFrame) -> pl.DataFrame:
    """One row per refusal and named holder: ``held``, its ``place`` in it, and ``tokens`` when refused."""
    rows = (
        refusals.select("refusal", "step", "held", request_id="holders")
        .with_columns(place=pl.int_ranges(pl.col("request_id").list.len()))
        .explode("request_id", "place")
        .sort("step")
    )
    names = rows["request_id"].unique().implode()
    stretches = (
        timeline.stretches.filter(pl.col("request_id").is_in(names))
        .select("request_id", "step", "last_step", "computed_tokens", "scheduled_tokens", began="step")
        .sort("step")
        .collect()
    )
    steps = pl.min_horizontal("step", "last_step") - pl.col("began") + 1
    return rows.join_asof(stretches, on="step", by="request_id", check_sortedness=False).with_columns(
        tokens=pl.col("computed_tokens") + steps * pl.col("scheduled_tokens")
    )


def _number(lists: pl.Expr, number: int) -> pl.Expr:
    return lists.list.get(number, null_on_oob=True)


def _mean(values: pl.Series) -> float:
    return float(values.mean() or 0)  # type: ignore[arg-type]  # of numbers
