"""How much of a limit a run used: a limit of which little was used limits nothing."""

import polars as pl

from schedtrace.model.facts import Fact
from schedtrace.model.message import NOTHING, Count, Message, Number, Share, message
from schedtrace.model.settings import EffectiveSetting
from schedtrace.timeline.timeline import Timeline

LITTLE_USED = 0.5
"""A limit of which never more than half was used limits nothing."""
FEWEST_STEPS = 100
"""Working steps before "never" says anything about a limit."""
FEWEST_REQUESTS = 10
"""Prompts that must have come before "no hit in the prefix cache" says anything."""


def used(setting: EffectiveSetting, timelines: list[Timeline]) -> Message:
    """What the run used of this setting, over all engines; nothing where there is too little to say it."""
    known = [timeline for timeline in timelines if {Fact.QUEUE, Fact.CONFIG} <= timeline.facts]
    check = {
        "max_num_batched_tokens": _tokens,
        "max_num_seqs": _seats,
        "enable_prefix_caching": _hits,
    }.get(setting.name)
    return check(setting, known) if check and known else NOTHING


def _tokens(setting: EffectiveSetting, timelines: list[Timeline]) -> Message:
    most = _most(timelines, "used_tokens")
    if (
        not isinstance(setting.value, int)
        or not setting.value
        or _is_short(timelines)
        or most > LITTLE_USED * setting.value
    ):
        return NOTHING
    return message(
        "no step used more than {most} ({share})", most=Number(most), share=Share(most / setting.value)
    )


def _seats(setting: EffectiveSetting, timelines: list[Timeline]) -> Message:
    most = _most(timelines, "num_running_after")
    if (
        not isinstance(setting.value, int)
        or not setting.value
        or _is_short(timelines)
        or most > LITTLE_USED * setting.value
    ):
        return NOTHING
    return message("at most {most} ran at once", most=Count(most, "request"))


def _hits(setting: EffectiveSetting, timelines: list[Timeline]) -> Message:
    admitted = sum(int(timeline.steps["num_new"].sum() or 0) for timeline in timelines)
    hits = sum(int(timeline.steps["cached_tokens"].sum() or 0) for timeline in timelines)
    if not setting.value or hits or admitted < FEWEST_REQUESTS:
        return NOTHING
    return message("none of {requests} found a cached token", requests=Count(admitted, "request"))


def _is_short(timelines: list[Timeline]) -> bool:
    working = [timeline.steps.filter(pl.col("total_requests") > 0).height for timeline in timelines]
    return sum(working) < FEWEST_STEPS


def _most(timelines: list[Timeline], column: str) -> int:
    """The highest value in any step of any engine; 0 where none is known."""
    return max(
        int(timeline.steps.select(pl.col(column).max().fill_null(0)).item() or 0) for timeline in timelines
    )
