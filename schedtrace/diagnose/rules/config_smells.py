"""``config-smells``: settings that did not have, or cannot have, the wished effect in this run."""

from collections.abc import Callable

import polars as pl

from schedtrace.diagnose.rules.common import share
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline

CODE = "config-smells"
SUMMARY = "settings that cannot have had the wished effect in this run, each with its evidence"
NEEDS = (Fact.QUEUE, Fact.CONFIG)

LITTLE_USED = 0.5
"""A limit of which never more than half was used limits nothing."""

FEWEST_STEPS = 100
"""Working steps before "never" says anything about a limit."""

FEWEST_REQUESTS = 10
"""Prompts that must have come before "no hit in the prefix cache" says anything."""

Smell = tuple[str, str, str]
"""The setting, what the trace shows, what to do."""


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/config-smells.md``."""
    found = [smell for check in _CHECKS if (smell := check(timeline)) is not None]
    if not found:
        return []
    names = [setting for setting, _, _ in found]
    return [
        Finding(
            code=CODE,
            severity="info",
            cause=None,
            via="recorded",
            engine_rank=timeline.rank,
            count=len(found),
            trials=[],
            steps=[],
            tokens=0,
            message=" ".join(f"{setting}: {shown}" for setting, shown, _ in found),
            advice=" ".join(f"{setting}: {advice}" for setting, _, advice in found),
            evidence={
                "settings": names,
                "example": found[0][1],
                "examples": [{"setting": setting, "shown": shown} for setting, shown, _ in found],
            },
        )
    ]


def _budget_not_reached(timeline: Timeline) -> Smell | None:
    most = _most(timeline, "used_tokens")
    budget = timeline.token_budget
    if _is_short(timeline):
        return None
    refused = timeline.steps.filter(
        (pl.col("num_waiting_after") > 0) & (pl.col("remaining_budget") == 0)
    ).height
    if refused or most > LITTLE_USED * budget:
        return None
    return (
        "max_num_batched_tokens",
        f"no step used more than {most:,} of {budget:,} tokens ({share(most / budget)}).",
        "A smaller --max-num-batched-tokens would have done, and leaves activation memory to the KV cache.",
    )


def _seats_not_reached(timeline: Timeline) -> Smell | None:
    if _is_short(timeline):
        return None
    most = _most(timeline, "num_running_after")
    if most > LITTLE_USED * timeline.seats:
        return None
    return (
        "max_num_seqs",
        f"never more than {most:,} of {timeline.seats:,} requests ran at once.",
        "Raising it cannot change anything for this load.",
    )


def _threshold_without_effect(timeline: Timeline) -> Smell | None:
    threshold = int(timeline.header.scheduler_config.get("long_prefill_token_threshold") or 0)
    if not threshold or threshold < timeline.token_budget:
        return None
    return (
        "long_prefill_token_threshold",
        f"{threshold:,} is not below the token budget of {timeline.token_budget:,}, which cuts first.",
        "Unset it, or set it below the budget.",
    )


def _partial_prefills(timeline: Timeline) -> Smell | None:
    config = timeline.header.scheduler_config
    names = ("max_num_partial_prefills", "max_long_partial_prefills")
    given = [f"{name}={config[name]}" for name in names if config.get(name) not in (None, 1)]
    if not given:
        return None
    return (
        " and ".join(given),
        "vLLM's V1 scheduler accepts these settings and does not look at them.",
        "Unset them; long_prefill_token_threshold is what V1 knows.",
    )


def _cache_without_hits(timeline: Timeline) -> Smell | None:
    admitted = int(timeline.steps["num_new"].sum() or 0)
    hits = int(timeline.steps["cached_tokens"].sum() or 0)
    if not timeline.header.enable_prefix_caching or hits or admitted < FEWEST_REQUESTS:
        return None
    return (
        "enable_prefix_caching",
        f"none of the {admitted:,} requests found a token of its prompt in the cache.",
        "Prompts without a common beginning gain nothing from it; it costs little, so this is no harm done.",
    )


def _is_short(timeline: Timeline) -> bool:
    return timeline.steps.filter(pl.col("total_requests") > 0).height < FEWEST_STEPS


def _most(timeline: Timeline, column: str) -> int:
    return int(timeline.steps.select(pl.col(column).max().fill_null(0)).item())


_CHECKS: tuple[Callable[[Timeline], Smell | None], ...] = (
    _budget_not_reached,
    _seats_not_reached,
    _threshold_without_effect,
    _partial_prefills,
    _cache_without_hits,
)
