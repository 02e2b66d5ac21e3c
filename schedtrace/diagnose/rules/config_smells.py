"""``config-smells``: settings that had, or can have, no effect in this run."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import polars as pl

from schedtrace.diagnose.rules.allowed import (
    BATCHED_TOKENS,
    can_lower_batched_tokens,
    smallest_batched_tokens,
    threshold,
)
from schedtrace.model.facts import Fact
from schedtrace.model.message import Count, Message, Number, Setting, Share, joined, message
from schedtrace.model.report import Evidence, Finding
from schedtrace.timeline.timeline import Timeline

CODE = "config-smells"
SUMMARY = "settings without effect in this run, each with its evidence"
NEEDS = (Fact.QUEUE, Fact.CONFIG)

LITTLE_USED = 0.5
"""A limit of which never more than half was used limits nothing."""

FEWEST_STEPS = 100
"""Working steps before "never" says anything about a limit."""

FEWEST_REQUESTS = 10
"""Prompts that must have come before "no hit in the prefix cache" says anything."""


@dataclass(frozen=True)
class Smell:
    """One setting without effect."""

    setting: str
    shown: Message
    advice: Message

    def about(self, sentence: Message) -> Message:
        """``max_num_seqs: ...``."""
        return message("{setting}: {sentence}", setting=Setting(self.setting), sentence=sentence)


class SmellExample(msgspec.Struct, kw_only=True):
    """One setting and what the trace shows."""

    setting: str
    shown: Message


class Smells(Evidence, kw_only=True):
    """The settings."""

    settings: list[str]
    examples: list[SmellExample]


def find(timeline: Timeline) -> list[Finding]:
    """See ``docs/findings/config-smells.md``."""
    found = [smell for check in _CHECKS if (smell := check(timeline)) is not None]
    if not found:
        return []
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
            message=joined([smell.about(smell.shown) for smell in found]),
            advice=joined([smell.about(smell.advice) for smell in found]),
            evidence=Smells(
                settings=[smell.setting for smell in found],
                examples=[SmellExample(setting=smell.setting, shown=smell.shown) for smell in found],
            ),
            example=found[0].shown,
        )
    ]


def _budget_not_reached(timeline: Timeline) -> Smell | None:
    """Only where vLLM accepts a smaller one, and no request waited for tokens."""
    most, budget = _most(timeline, "used_tokens"), timeline.token_budget
    if _is_short(timeline) or not can_lower_batched_tokens(timeline):
        return None
    if most > LITTLE_USED * budget:
        return None
    return Smell(
        "max_num_batched_tokens",
        message(
            "no step used more than {most} of {budget} ({share}).",
            most=Number(most),
            budget=Count(budget, "token"),
            share=Share(most / budget),
        ),
        message(
            "a smaller {setting} (vLLM accepts {smallest} and more here) leaves activation memory to the KV "
            "cache.",
            setting=BATCHED_TOKENS,
            smallest=Number(smallest_batched_tokens(timeline)),
        ),
    )


def _seats_not_reached(timeline: Timeline) -> Smell | None:
    most = _most(timeline, "num_running_after")
    if _is_short(timeline) or most > LITTLE_USED * timeline.seats:
        return None
    return Smell(
        "max_num_seqs",
        message(
            "at most {most} of {seats} requests ran at once.",
            most=Number(most),
            seats=Number(timeline.seats),
        ),
        message("a larger value changes nothing for this load."),
    )


def _threshold_without_effect(timeline: Timeline) -> Smell | None:
    now, budget = threshold(timeline), timeline.token_budget
    if not now or now < budget:
        return None
    return Smell(
        "long_prefill_token_threshold",
        message(
            "{now} is not below the token budget of {budget}, which limits chunks first.",
            now=Number(now),
            budget=Number(budget),
        ),
        message("unset it, or set it below the budget."),
    )


def _partial_prefills(timeline: Timeline) -> Smell | None:
    config = timeline.header.scheduler_config
    names = ("max_num_partial_prefills", "max_long_partial_prefills")
    given = [f"{name}={config[name]}" for name in names if config.get(name) not in (None, 1)]
    if not given:
        return None
    return Smell(
        " and ".join(given),
        message("vLLM's V1 scheduler accepts these settings and ignores them."),
        message(
            "unset them; V1 limits chunks by {setting}.", setting=Setting("long_prefill_token_threshold")
        ),
    )


def _cache_without_hits(timeline: Timeline) -> Smell | None:
    admitted = int(timeline.steps["num_new"].sum() or 0)
    hits = int(timeline.steps["cached_tokens"].sum() or 0)
    if not timeline.header.enable_prefix_caching or hits or admitted < FEWEST_REQUESTS:
        return None
    return Smell(
        "enable_prefix_caching",
        message("none of {requests} found a cached token.", requests=Count(admitted, "request")),
        message("prompts without a common prefix gain nothing from it; it costs little."),
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
