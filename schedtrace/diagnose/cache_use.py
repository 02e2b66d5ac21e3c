"""Use of the prefix cache: by new requests, compared with an unlimited cache, and by preempted requests."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import polars as pl

from schedtrace.model.trace_facts import MARK_CHARACTERS, blocks_until
from schedtrace.timeline.timeline import Timeline, made_once
from schedtrace.workloads.prefixes import prefix_block


@made_once
def cache_use(timeline: Timeline) -> pl.DataFrame:
    """Return one row per request that was admitted for the first time, in the order of these admissions.

    Columns: ``step``, ``trial``, ``request_id``, ``prompt_tokens`` and

    * ``cached_tokens``: found at the admission, in this engine's cache if that is recorded,
    * ``shareable_tokens``: in full blocks that a request admitted before it in the trial began with, up to
      the last common mark (``model.trace_facts``), but for the prompt's last token, which vLLM always
      computes; null if prefix hashes are not recorded,
    * ``missed_tokens``: shareable but not found,
    * ``miss``, ``salted``, ``longest_tokens``: as in ``Admission``; null if not recorded.
    """
    arrivals = timeline.started_requests
    size = prefix_block(timeline.header, arrivals) or timeline.header.block_size or 1
    rows = (
        timeline.admitted.lazy()
        .filter(pl.col("phase") == "new")
        .select("step", "trial", "request_id", "computed_tokens")
        .collect()
        .with_row_index("at")
        .join(arrivals[["request_id", "prompt_tokens", "prefix_hashes"]], on="request_id")
        .join(_admissions(timeline), on="request_id", how="left")
        .sort("at")
    )
    most = (pl.col("prompt_tokens") - 1) // size * size
    shareable = pl.lit(None, pl.Int64)
    if rows["prefix_hashes"].null_count() < rows.height:
        rows, shareable = _with_shared_blocks(rows), pl.min_horizontal(pl.col("blocks") * size, most)
    return (
        rows.with_columns(
            cached_tokens=pl.coalesce("local_tokens", "computed_tokens"), shareable_tokens=shareable
        )
        .with_columns(missed_tokens=(pl.col("shareable_tokens") - pl.col("cached_tokens")).clip(0))
        .select(
            *("step", "trial", "request_id", "prompt_tokens", "cached_tokens", "shareable_tokens"),
            *("missed_tokens", "miss", "salted", "longest_tokens"),
        )
    )


def _with_shared_blocks(rows: pl.DataFrame) -> pl.DataFrame:
    """Add ``blocks``, the leading blocks that each request shares with one admitted before in its trial."""
    blocks: dict[int, int] = {}
    for trial in rows[["trial", "at", "prefix_hashes"]].partition_by("trial"):
        hashes = [text or "" for text in trial["prefix_hashes"]]
        blocks |= dict(zip(trial["at"], shared_blocks(hashes), strict=True))
    return rows.hstack([pl.Series("blocks", [blocks[at] for at in rows["at"]], dtype=pl.Int64)])


class SharedBeginnings(NamedTuple):
    """Prefixes that at least two prompts of a trial share, each counted once."""

    tokens: int
    """Tokens of the full blocks of these prefixes."""
    ends: int
    """Number of these prefixes that are not part of a longer shared prefix."""


def shared_beginnings(timeline: Timeline) -> SharedBeginnings | None:
    """Return the shared prefixes of the trial that has most of them; None if hashes are not recorded."""
    arrivals = timeline.started_requests
    size = prefix_block(timeline.header, arrivals) or timeline.header.block_size
    hashed = arrivals[["trial", "prefix_hashes"]].drop_nulls("prefix_hashes")
    if hashed.is_empty() or not size:
        return None
    trials = hashed.group_by("trial").agg("prefix_hashes")["prefix_hashes"].to_list()
    blocks, ends = max(_shared_nodes(texts) for texts in trials)
    return SharedBeginnings(blocks * size, ends)


def _shared_nodes(texts: list[str]) -> tuple[int, int]:
    """Return the number of blocks in shared prefixes, and the number of prefixes without a longer one."""
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


def _admissions(timeline: Timeline) -> pl.DataFrame:
    schema = {
        "request_id": pl.String,
        "local_tokens": pl.Int64,
        "miss": pl.String,
        "salted": pl.Boolean,
        "longest_tokens": pl.Int64,
    }
    recorded = timeline.lists.get("admitted", pl.LazyFrame(schema=schema))
    return recorded.select(schema.keys()).collect().unique("request_id", keep="first")


def shared_blocks(hashes: list[str]) -> list[int]:
    """Return, for each prompt, the most leading blocks that it shares with an earlier one, up to a mark.

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
    """Return the steps in which a decoding request fills one KV block; a shorter stay fills none."""
    return timeline.header.block_size or STEPS_PER_BLOCK


@made_once
def resumptions(timeline: Timeline) -> pl.DataFrame:
    """Return one row per preemption in ``schedule()``, in order.

    Columns: those of ``model.trace.Preemption``, ``step``, ``trial`` and

    * ``lasted_steps``: steps since the request was last admitted; null where that is not in the trace,
    * ``cycle``: at most ``steps_per_block``,
    * ``resumed_step``: the step that admitted it again; null if none did before it ended or the trace did,
    * ``found_tokens``: of ``lost_tokens``, those it found in a cache then; null with ``resumed_step``,
    * ``away_us``: from the start of the step that preempted it to that of ``resumed_step``, or to its end, or
      to the last output of the trace.
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
