"""Sentences of ``schedtrace step`` for every step of the page: templates, and columns that fill them.

A page with 50,000 steps cannot contain 50,000 texts. The sentences of ``explain/step.py`` are made once per
kind, with slots for the values that differ. A value that a sentence usually shares with its step is written
as the difference from the step's value, which is mostly 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import polars as pl

from schedtrace.explain.step import (
    SAME_STOP,
    Row,
    preemption_message,
    stop_message,
    stop_rows,
    stop_values,
    victim_values,
)
from schedtrace.model.message import MOST_REQUESTS, Message, Slot, pieces, with_slots
from schedtrace.model.printable import visible
from schedtrace.present.pages.story import budget_use, crowd
from schedtrace.present.report.packed import Packed
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Words:
    """Templates of sentences, and one row per sentence."""

    templates: list[Message]
    rows: pl.DataFrame
    """Rows in the order of the sentences; ``template`` is the index of a row's template."""


STOP = ("request_ids", "count", "blocks_needed", "blocks_free", "budget_left")
VICTIM = ("request_id", "for_request_id", "lost_tokens", "blocks_needed", "blocks_freed", "num_preemptions")
"""Columns that fill the sentences about preempted requests."""


def step_words(timeline: Timeline) -> dict[str, Words]:
    """Return every sentence of ``stops`` and ``preempted`` for all steps, in time linear in the exits.

    ``stops`` has the columns ``STOP`` and the slots ``requests`` (``request_ids``, of ``count``), ``needed``,
    ``free`` and ``left``. ``preempted`` has the columns ``VICTIM`` and the slots ``victim``, ``for``,
    ``lost``, ``needed``, ``freed`` and ``times``.
    """
    header = timeline.header
    stops = stop_rows(timeline.exits.sort("step", maintain_order=True)).with_columns(
        values=pl.lit(None, pl.String),  # they differ from exit to exit of one kind
        named=pl.col("request_ids").list.len() > 0,
        several=pl.col("count") > 1,
        lacked=pl.col("blocks_needed").is_not_null() & pl.col("blocks_free").is_not_null(),
    )
    lost = timeline.preemptions.sort("step", maintain_order=True).with_columns(
        by_itself=pl.col("for_request_id") == pl.col("request_id"),
        known=pl.col("for_request_id").fill_null("") != "",
        asked=pl.col("blocks_needed").is_not_null(),
        gave=pl.col("blocks_freed").is_not_null(),
        again=pl.col("num_preemptions").fill_null(0) > 1,
    )
    return {
        "stops": _words(
            stops,
            [*SAME_STOP, "named", "several", "lacked"],
            STOP,
            lambda row: stop_message(header, row, with_slots(stop_values(row))),
        ),
        "preempted": _words(
            lost,
            ["in_schedule", "by_itself", "known", "asked", "gave", "again"],
            VICTIM,
            lambda row: preemption_message(row, with_slots(victim_values(row))),
        ),
    }


def _words(
    frame: pl.DataFrame, kinds: list[str], filling: Iterable[str], make: Callable[[Row], Message]
) -> Words:
    """Return a template for each combination of the columns ``kinds``, made from the first row with it."""
    firsts = frame.unique(kinds, keep="first", maintain_order=True)
    numbered = firsts.select(*kinds).with_row_index("template")
    rows = frame.join(numbered, on=kinds, how="left", nulls_equal=True, maintain_order="left")
    return Words([make(row) for row in firsts.to_dicts()], rows.select("step", "template", *filling))


Parts = list[str | dict[str, Any]]
"""A sentence: plain words, ``{"is": "code", "text": "a.py:1"}``, and slots (``model.message.Slot``)."""


def step_templates(words: dict[str, Words]) -> dict[str, list[Parts]]:
    """Return the templates of the lines of ``schedtrace step``.

    ``used`` has the slots ``tokens``, ``budget``, ``left`` and ``requests``; its second template is for steps
    that scheduled no request. ``crowd``, for before and after a step, has ``running``, ``waiting``, ``free``
    and ``total`` (KV blocks); its second template is for steps of which only the free blocks are known, the
    third for those without known blocks. ``stops`` and ``preempted`` are the templates of ``words``, in their
    order.
    """
    tokens, left, running, waiting, free, total = (
        Slot(name, "number") for name in ("tokens", "left", "running", "waiting", "free", "total")
    )
    budget, requests = Slot("budget", "count", "token"), Slot("requests", "count", "request")
    return {
        "used": [template_parts(budget_use(tokens, budget, left, someone)) for someone in (requests, None)],
        "crowd": [
            template_parts(crowd(running, waiting, *blocks))
            for blocks in ((free, total), (free, None), (None, None))
        ],
        **{
            name: [template_parts(template) for template in variants.templates]
            for name, variants in words.items()
        },
    }


def template_parts(template: Message) -> Parts:
    """Return a template in printable form, in which everything except its slots is filled in."""
    written: Parts = []
    for text, value in pieces(template):
        if isinstance(value, Slot):
            written.append(msgspec.to_builtins(value))
        elif value is not None:
            written.append({"is": str(value.__struct_config__.tag), "text": visible(text)})
        elif written and isinstance(written[-1], str):
            written[-1] += visible(text)
        else:
            written.append(visible(text))
    return written


MOST_NAMED = MOST_REQUESTS + 1
"""Maximum number of requests named in a sentence; all further ones are counted."""
NOT_DRAWN = -2
"""Index of a request that the page does not draw."""


def add_words(
    packed: Packed, name: str, timeline: Timeline, rows: pl.DataFrame, ids: pl.Series
) -> dict[str, list[Parts]]:
    """Add the columns that fill the sentences of an engine's steps; return their templates.

    Columns ``<name>stops.*``: ``step``, ``template``, ``count``, ``needed``; ``free`` and ``left``: the
    step's free blocks and unused tokens minus the sentence's; ``named``: number of entries of ``request``
    that belong to the sentence. Columns ``<name>preempted.*``: ``step``, ``template``, ``victim``, ``for``,
    ``lost``, ``needed``, ``freed``, ``times``. Requests are places in ``ids``.

    Args:
        packed: Columns of the page, to which the new columns are added.
        name: Name of the engine in ``packed``.
        timeline: Timeline of the engine.
        rows: Rows of the page's steps; merged steps get no words.
        ids: Requests of the page.
    """
    single = rows.filter(pl.col("count") == 1).select(
        pl.col("step").cast(pl.Int64),
        of_free=pl.col("kv_total") - pl.col("kv_used"),
        of_left=pl.col("token_budget")
        - pl.sum_horizontal("decode_tokens", "prefill_tokens", "recompute_tokens"),
    )
    exits, preemptions = (
        frame.join(single, on="step", how="semi", maintain_order="left")
        for frame in (timeline.exits, timeline.preemptions)
    )
    words = step_words(replace(timeline, exits=exits, preemptions=preemptions))
    stops = words["stops"].rows.join(single, on="step", how="inner", maintain_order="left")
    named = stops["request_ids"].list.head(MOST_NAMED)
    lost = words["preempted"].rows
    for column, values in {
        "stops.step": stops["step"],
        "stops.template": stops["template"],
        "stops.count": stops["count"],
        "stops.needed": stops["blocks_needed"],
        "stops.free": stops["of_free"] - stops["blocks_free"],
        "stops.left": stops["of_left"] - stops["budget_left"],
        "stops.named": named.list.len(),
        "stops.request": _places(named.explode(empty_as_null=False), ids),
        "preempted.step": lost["step"],
        "preempted.template": lost["template"],
        "preempted.victim": _places(lost["request_id"], ids),
        "preempted.for": _places(lost["for_request_id"], ids),
        "preempted.lost": lost["lost_tokens"],
        "preempted.needed": lost["blocks_needed"],
        "preempted.freed": lost["blocks_freed"],
        "preempted.times": lost["num_preemptions"],
    }.items():
        packed.add(f"{name}{column}", values, differences=column.endswith((".step", ".request")))
    return step_templates(words)


def _places(names: pl.Series, ids: pl.Series) -> pl.Series:
    """Return the place of each request among the page's requests; null for null."""
    place = names.replace_strict(
        ids, pl.int_range(len(ids), eager=True), default=NOT_DRAWN, return_dtype=pl.Int64
    )
    return pl.select(pl.when(names.is_not_null()).then(place)).to_series()
