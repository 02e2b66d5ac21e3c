"""The findings: one rule a file, each a pure function from a timeline to what it found.

Every rule's definition, with its columns and thresholds, stands in ``docs/findings/<code>.md``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schedtrace.diagnose.rules import (
    arrival_limited,
    blocked_budget,
    budget_saturated,
    budget_underused,
    config_smells,
    decode_starves_prefill,
    head_of_line,
    kv_bound,
    late_arrivals,
    long_prefill_cap,
    max_num_seqs_bound,
    preemption,
    preemption_storm,
    prefill_starves_decode,
    prefix_cache,
    queueing,
    scheduler_overhead,
    stall,
    token_budget_bound,
)
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding
from schedtrace.timeline.timeline import Timeline


@dataclass(frozen=True)
class Rule:
    """One kind of finding."""

    code: str
    summary: str
    """One line: what it means when this is found."""
    needs: frozenset[Fact]
    """What a record must hold for this rule to judge it."""
    find: Callable[[Timeline], list[Finding]]

    def __call__(self, timeline: Timeline) -> list[Finding]:
        """Its findings in one engine's timeline."""
        return self.find(timeline)


_MODULES = (
    arrival_limited,
    blocked_budget,
    preemption,
    budget_saturated,
    budget_underused,
    kv_bound,
    max_num_seqs_bound,
    token_budget_bound,
    long_prefill_cap,
    late_arrivals,
    prefill_starves_decode,
    decode_starves_prefill,
    scheduler_overhead,
    config_smells,
    head_of_line,
    stall,
    preemption_storm,
    queueing,
    prefix_cache,
)

RULES = {
    module.CODE: Rule(module.CODE, module.SUMMARY, frozenset(module.NEEDS), module.find)
    for module in _MODULES
}
