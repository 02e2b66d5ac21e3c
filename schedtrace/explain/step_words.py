"""The sentences about the exits and preemptions of all steps: few templates, and what fills them.

A page that shows any of 50,000 steps cannot hold 50,000 stories. These are the very sentences of
``explain/exits.py``, made once for each kind with slots in place of what differs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from schedtrace.explain.exits import (
    SAME_STOP,
    Row,
    Values,
    preempted,
    stop_rows,
    stop_values,
    stopped,
    victim_values,
)
from schedtrace.model.message import Message, with_slots
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Words:
    """Templates, and a row for each sentence."""

    templates: list[Message]
    rows: pl.DataFrame
    """In their order; ``template``: the index of its own."""


@dataclass(frozen=True)
class StepWords:
    """Every sentence of ``stops`` and ``victims``, for all steps of one engine."""

    stops: Words
    """Columns ``step``, ``template``, ``request_ids``, ``count``, ``blocks_needed``, ``blocks_free`` and
    ``budget_left``; slots ``requests`` (``request_ids``, of ``count``), ``needed``, ``free`` and ``left``."""
    preempted: Words
    """Columns ``step``, ``template``, ``request_id``, ``for_request_id``, ``lost_tokens``, ``blocks_needed``,
    ``blocks_freed`` and ``num_preemptions``; slots ``victim``, ``for``, ``lost``, ``needed``, ``freed`` and
    ``times``."""


def step_words(timeline: Timeline) -> StepWords:
    """The sentences of every step of a timeline; work of the number of exits, not of templates."""
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
    return StepWords(
        _words(
            stops,
            [*SAME_STOP, "named", "several", "lacked"],
            ["request_ids", "count", "blocks_needed", "blocks_free", "budget_left"],
            lambda row: stopped(header, row, _slots(stop_values, row)),
        ),
        _words(
            lost,
            ["in_schedule", "by_itself", "known", "asked", "gave", "again"],
            [
                "request_id",
                "for_request_id",
                "lost_tokens",
                "blocks_needed",
                "blocks_freed",
                "num_preemptions",
            ],
            lambda row: preempted(row, _slots(victim_values, row)),
        ),
    )


def _slots(values: Callable[[Row], Values], row: Row) -> Values:
    return with_slots(values(row))


def _words(
    frame: pl.DataFrame, kinds: list[str], filling: list[str], make: Callable[[Row], Message]
) -> Words:
    """One template for each combination of the columns ``kinds``, from the first row that has it."""
    firsts = frame.unique(kinds, keep="first", maintain_order=True)
    numbered = firsts.select(*kinds).with_row_index("template")
    rows = frame.join(numbered, on=kinds, how="left", nulls_equal=True, maintain_order="left")
    return Words([make(row) for row in firsts.to_dicts()], rows.select("step", "template", *filling))
