"""How much of a limit a run used: a limit of which little was used limits nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Use:
    """The most that one engine used, and how long one looked."""

    steps: int
    """That scheduled something."""
    most_tokens: int
    """In one step."""
    most_running: int
    """Requests at once."""
    admitted: int
    cached_tokens: int


def use_of(timeline: Timeline) -> Use | None:
    """None where the record does not tell."""
    if not {Fact.QUEUE, Fact.CONFIG} <= timeline.facts:
        return None
    steps = timeline.steps
    most_tokens, most_running = (
        int(steps.select(pl.col(column).max().fill_null(0)).item() or 0)
        for column in ("used_tokens", "num_running_after")
    )
    return Use(
        steps=steps.filter(pl.col("total_requests") > 0).height,
        most_tokens=most_tokens,
        most_running=most_running,
        admitted=int(steps["num_new"].sum() or 0),
        cached_tokens=int(steps["cached_tokens"].sum() or 0),
    )


def used(setting: EffectiveSetting, engines: Sequence[Use]) -> Message:
    """What the run used of this setting, over all engines; nothing where there is too little to say it."""
    check = {
        "max_num_batched_tokens": _tokens,
        "max_num_seqs": _seats,
        "enable_prefix_caching": _hits,
    }.get(setting.name)
    return check(setting, engines) if check and engines else NOTHING


def _tokens(setting: EffectiveSetting, engines: Sequence[Use]) -> Message:
    most = max(engine.most_tokens for engine in engines)
    limit = _limit(setting, engines)
    if limit is None or most > LITTLE_USED * limit:
        return NOTHING
    return message("no step used more than {most} ({share})", most=Number(most), share=Share(most / limit))


def _seats(setting: EffectiveSetting, engines: Sequence[Use]) -> Message:
    most = max(engine.most_running for engine in engines)
    limit = _limit(setting, engines)
    if limit is None or most > LITTLE_USED * limit:
        return NOTHING
    return message("at most {most} ran at once", most=Count(most, "request"))


def _hits(setting: EffectiveSetting, engines: Sequence[Use]) -> Message:
    admitted = sum(engine.admitted for engine in engines)
    hits = sum(engine.cached_tokens for engine in engines)
    if not setting.value or hits or admitted < FEWEST_REQUESTS:
        return NOTHING
    return message("none of {requests} found a cached token", requests=Count(admitted, "request"))


def _limit(setting: EffectiveSetting, engines: Sequence[Use]) -> int | None:
    """The limit in a run that is long enough to say how little of it was used; None: it is not."""
    value = setting.value
    if not isinstance(value, int) or sum(engine.steps for engine in engines) < FEWEST_STEPS:
        return None
    return value or None
