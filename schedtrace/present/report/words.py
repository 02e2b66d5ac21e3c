"""The sentences of ``schedtrace step`` for every step of the page: templates, and columns that fill them.

What a sentence has in common with its step is written as the difference to it, which is mostly 0.
"""

from dataclasses import replace

import polars as pl

from schedtrace.explain.step_words import step_words
from schedtrace.present.phrases import MOST_REQUESTS
from schedtrace.present.report.packed import Packed
from schedtrace.present.step_templates import Parts, step_templates
from schedtrace.timeline.timeline import Timeline

MOST_NAMED = MOST_REQUESTS + 1
"""Requests of one sentence: more are counted."""
NOT_DRAWN = -2
"""A request that is not among those of the page."""


def add_words(
    packed: Packed, name: str, timeline: Timeline, rows: pl.DataFrame, ids: pl.Series
) -> dict[str, list[Parts]]:
    """Add what fills the sentences of an engine's steps; gives their templates.

    Columns ``<name>stops.*``: ``step``, ``template``, ``count``, ``needed``; ``free`` and ``left``: the
    step's free blocks and unused tokens minus the sentence's; ``named``: how many of ``request`` are its.
    Columns ``<name>preempted.*``: ``step``, ``template``, ``victim``, ``for``, ``lost``, ``needed``,
    ``freed``, ``times``. Requests are places in ``ids``.

    Args:
        packed: Where to.
        name: Of the engine in it.
        timeline: The engine's.
        rows: The page's steps; those that are not rows of their own get no words.
        ids: Requests of the page.
    """
    single = rows.filter(pl.col("count") == 1).select(
        pl.col("step").cast(pl.Int64),
        of_free=pl.col("kv_total") - pl.col("kv_used"),
        of_left=pl.col("token_budget")
        - pl.sum_horizontal("decode_tokens", "prefill_tokens", "recompute_tokens"),
    )
    told = single.select("step")
    words = step_words(
        replace(
            timeline,
            exits=timeline.exits.join(told, on="step", how="semi", maintain_order="left"),
            preemptions=timeline.preemptions.join(told, on="step", how="semi", maintain_order="left"),
        )
    )
    stops = words.stops.rows.join(single, on="step", how="inner", maintain_order="left")
    named = stops["request_ids"].list.head(MOST_NAMED)
    for column, values in {
        "step": stops["step"],
        "template": stops["template"],
        "count": stops["count"],
        "needed": stops["blocks_needed"],
        "free": stops["of_free"] - stops["blocks_free"],
        "left": stops["of_left"] - stops["budget_left"],
        "named": named.list.len(),
        "request": _places(named.explode(empty_as_null=False), ids),
    }.items():
        packed.add(f"{name}stops.{column}", values, differences=column in {"step", "request"})
    lost = words.preempted.rows
    for column, values in {
        "step": lost["step"],
        "template": lost["template"],
        "victim": _places(lost["request_id"], ids),
        "for": _places(lost["for_request_id"], ids),
        "lost": lost["lost_tokens"],
        "needed": lost["blocks_needed"],
        "freed": lost["blocks_freed"],
        "times": lost["num_preemptions"],
    }.items():
        packed.add(f"{name}preempted.{column}", values, differences=column == "step")
    return step_templates(words)


def _places(names: pl.Series, ids: pl.Series) -> pl.Series:
    """Where each request is among those of the page; null stays null."""
    place = names.replace_strict(
        ids, pl.int_range(len(ids), eager=True), default=NOT_DRAWN, return_dtype=pl.Int64
    )
    return pl.select(pl.when(names.is_not_null()).then(place)).to_series()
