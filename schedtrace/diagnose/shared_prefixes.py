"""How many tokens of each prompt an earlier request had already had: what a boundless prefix cache finds."""

from itertools import pairwise

import polars as pl

from schedtrace.timeline.timeline import Timeline

CHARACTERS = 4
"""Of ``Arrival.prefix_hashes`` for every full block."""


def cache_use(timeline: Timeline) -> pl.DataFrame:
    """One row per request that was admitted for the first time, in that order.

    Columns: ``step``, ``trial``, ``request_id``, ``prompt_tokens`` and

    * ``cached_tokens``: found then, in this engine's cache where that is recorded,
    * ``shareable_tokens``: in full blocks that an earlier request of the trial began with, but for the
      prompt's last token, which vLLM always computes; null where the prompts' beginnings are not recorded,
    * ``missed_tokens``: shareable and not found,
    * ``miss``, ``salted``: of ``Admission``; null where not recorded.
    """
    size = timeline.header.block_size or 1
    arrivals = timeline.arrivals.filter(~pl.col("streaming_update")).unique("request_id", keep="first")
    rows = (
        timeline.admitted.lazy()
        .filter(pl.col("phase") == "new")
        .select("step", "trial", "request_id", "computed_tokens")
        .collect()
        .with_row_index("at")
        .join(arrivals.select("request_id", "prompt_tokens", "prefix_hashes"), on="request_id")
        .join(_admissions(timeline), on="request_id", how="left")
        .sort("at")
    )
    known = rows["prefix_hashes"].is_not_null().any()
    blocks = (
        rows.group_by("trial", maintain_order=True)
        .agg("at", pl.col("prefix_hashes").fill_null(""))
        .with_columns(
            pl.col("prefix_hashes")
            .map_elements(lambda texts: pl.Series(shared_blocks(texts.to_list())), pl.List(pl.Int64))
            .alias("blocks")
        )
        .explode("at", "blocks")
        .select("at", "blocks")
    )
    most = (pl.col("prompt_tokens") - 1) // size * size
    shareable = pl.min_horizontal(pl.col("blocks") * size, most) if known else pl.lit(None, pl.Int64)
    return (
        rows.join(blocks, on="at", how="left", maintain_order="left")
        .with_columns(
            cached_tokens=pl.coalesce("local_tokens", "computed_tokens"), shareable_tokens=shareable
        )
        .with_columns(missed_tokens=(pl.col("shareable_tokens") - pl.col("cached_tokens")).clip(0))
        .select(
            *("step", "trial", "request_id", "prompt_tokens", "cached_tokens", "shareable_tokens"),
            *("missed_tokens", "miss", "salted"),
        )
    )


def _admissions(timeline: Timeline) -> pl.DataFrame:
    schema = {"request_id": pl.String, "local_tokens": pl.Int64, "miss": pl.String, "salted": pl.Boolean}
    recorded = timeline.lists.get("admitted", pl.LazyFrame(schema=schema))
    return recorded.select(schema.keys()).collect().unique("request_id", keep="first")


def shared_blocks(hashes: list[str]) -> list[int]:
    """For each prompt, the most leading blocks that it shares with an earlier one.

    In alphabetical order, a prompt shares most with one of its neighbours. Those of the earlier prompts alone
    are its neighbours once all later ones are taken out, so they are taken out from the last to the first.
    """
    order = sorted(range(len(hashes)), key=hashes.__getitem__)
    alike = [0, *(_alike(hashes[one], hashes[other]) for one, other in pairwise(order)), 0]
    place = {one: at for at, one in enumerate(order, start=1)}
    before, after = list(range(-1, len(order) + 1)), list(range(1, len(order) + 3))
    with_before = [0, *alike[:-1], 0]  # at a place: what it shares with the one before it
    found = [0] * len(hashes)
    for one in reversed(range(len(hashes))):
        at = place[one]
        previous, following = before[at], after[at]
        found[one] = max(with_before[at], with_before[following])
        with_before[following] = min(with_before[at], with_before[following])
        after[previous], before[following] = following, previous
    return found


def _alike(one: str, other: str) -> int:
    """Leading blocks that two prompts share."""
    least, most = 0, min(len(one), len(other)) // CHARACTERS
    while least < most:
        middle = (least + most + 1) // 2
        if one[: middle * CHARACTERS] == other[: middle * CHARACTERS]:
            least = middle
        else:
            most = middle - 1
    return least
