"""Rules for all findings, one per file: pure functions from a timeline, or from all ranks, to findings.

Every rule's definition, with its columns and thresholds, is in ``docs/findings/<code>.md``.
"""

from types import ModuleType
from typing import Any

from schedtrace.diagnose.rule import Rule, package_rules
from schedtrace.diagnose.rules import (
    aborted_requests,
    arrival_limited,
    batched_prefill,
    better_setting,
    blocked_budget,
    budget_underused,
    capped_prefill,
    client_limited,
    front_end,
    head_of_line,
    interruption,
    kv_bound,
    kv_held_idle,
    long_context,
    long_prompt,
    long_tail,
    max_num_seqs_bound,
    never_fits,
    no_progress,
    other_limit,
    pipeline_bubbles,
    preemption,
    prefill_stall,
    prefill_starves_decode,
    prefix_cache,
    priority_inversion,
    rank_imbalance,
    rank_interruption,
    refused_at_door,
    scheduler_overhead,
    slow_rank,
    slow_steps,
    spec_decode,
    stall,
    token_budget_bound,
)
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.timeline import Timeline

_OF_AN_ENGINE = (
    never_fits,
    no_progress,
    refused_at_door,
    kv_bound,
    max_num_seqs_bound,
    token_budget_bound,
    long_context,
    long_prompt,
    capped_prefill,
    head_of_line,
    kv_held_idle,
    priority_inversion,
    other_limit,
    interruption,
    aborted_requests,
    long_tail,
    batched_prefill,
    slow_steps,
    scheduler_overhead,
    pipeline_bubbles,
    front_end,
    client_limited,
    arrival_limited,
    prefix_cache,
    spec_decode,
    blocked_budget,
    budget_underused,
    preemption,
    stall,
    prefill_starves_decode,
)

_OF_ALL_RANKS = (slow_rank, rank_imbalance, prefill_stall)
_OF_REPLAYS = (better_setting,)
"""Kinds of findings that only replays yield; their ``find`` yields nothing."""


def _rules(modules: tuple[ModuleType, ...]) -> dict[str, Rule[Any]]:
    return {module.RULE.code: module.RULE for module in modules}


_OWN: dict[str, Rule[Any]] = _rules((*_OF_AN_ENGINE, *_OF_ALL_RANKS, *_OF_REPLAYS))
PACKAGES = package_rules(_OWN)
"""Rules that other packages register (``diagnose/rule.py``)."""
RULES: dict[str, Rule[Timeline]] = _rules(_OF_AN_ENGINE) | PACKAGES.rules
"""Rules that judge each engine separately, by code."""
RANK_RULES: dict[str, Rule[RecordedRanks]] = {
    **_rules(_OF_ALL_RANKS),
    client_limited.RULE.code: client_limited.RANKS_RULE,
    interruption.RULE.code: rank_interruption.RANKS_RULE,
}
"""Rules that judge all ranks of a run together, by code."""
KINDS: dict[str, Rule[Any]] = _OWN | PACKAGES.rules
"""All rules by code."""
