"""Rules for all findings: pure functions from a timeline, or from all ranks, to findings.

Each rule is in the file named after its finding; ``prefill_chunks``, ``queue_order`` and ``unused_budget``
contain several rules. ``docs/findings/<code>.md`` defines each finding, with its columns and thresholds.
"""

from collections.abc import Iterable
from typing import Any

from schedtrace.diagnose.rule import Rule, package_rules
from schedtrace.diagnose.rules import (
    aborted_requests,
    arrival_limited,
    better_setting,
    client_limited,
    front_end,
    interruption,
    kv_bound,
    kv_held_idle,
    long_context,
    long_tail,
    max_num_seqs_bound,
    never_fits,
    no_progress,
    other_limit,
    pipeline_bubbles,
    preemption,
    prefill_chunks,
    prefill_stall,
    prefill_starves_decode,
    prefix_cache,
    queue_order,
    rank_imbalance,
    rank_interruption,
    refused_at_door,
    scheduler_overhead,
    slow_rank,
    slow_steps,
    spec_decode,
    stall,
    token_budget_bound,
    unused_budget,
)
from schedtrace.timeline.engine_ranks import RecordedRanks
from schedtrace.timeline.timeline import Timeline

_OF_AN_ENGINE = (
    never_fits.RULE,
    no_progress.RULE,
    refused_at_door.RULE,
    kv_bound.RULE,
    max_num_seqs_bound.RULE,
    token_budget_bound.RULE,
    long_context.RULE,
    prefill_chunks.LONG_PROMPT_RULE,
    prefill_chunks.CAPPED_PREFILL_RULE,
    queue_order.HEAD_OF_LINE_RULE,
    kv_held_idle.RULE,
    queue_order.PRIORITY_INVERSION_RULE,
    other_limit.RULE,
    interruption.RULE,
    aborted_requests.RULE,
    long_tail.RULE,
    prefill_chunks.BATCHED_PREFILL_RULE,
    slow_steps.RULE,
    scheduler_overhead.RULE,
    pipeline_bubbles.RULE,
    front_end.RULE,
    client_limited.RULE,
    arrival_limited.RULE,
    prefix_cache.RULE,
    spec_decode.RULE,
    unused_budget.BLOCKED_BUDGET_RULE,
    unused_budget.BUDGET_UNDERUSED_RULE,
    preemption.RULE,
    stall.RULE,
    prefill_starves_decode.RULE,
)

_OF_ALL_RANKS = (slow_rank.RULE, rank_imbalance.RULE, prefill_stall.RULE)
_OF_REPLAYS = (better_setting.RULE,)
"""Rules for findings that only replays yield; ``find`` of these rules yields nothing."""


def _by_code(rules: Iterable[Rule[Any]]) -> dict[str, Rule[Any]]:
    return {rule.code: rule for rule in rules}


_OWN = _by_code((*_OF_AN_ENGINE, *_OF_ALL_RANKS, *_OF_REPLAYS))
PACKAGES = package_rules(_OWN)
"""Rules that other packages register (``diagnose/rule.py``)."""
RULES: dict[str, Rule[Timeline]] = _by_code(_OF_AN_ENGINE) | PACKAGES.rules
"""Rules that judge each engine separately, by code."""
RANK_RULES: dict[str, Rule[RecordedRanks]] = _by_code(
    (*_OF_ALL_RANKS, client_limited.RANKS_RULE, rank_interruption.RANKS_RULE)
)
"""Rules that judge all ranks of a run together, by code."""
KINDS: dict[str, Rule[Any]] = _OWN | PACKAGES.rules
"""All rules by code."""
