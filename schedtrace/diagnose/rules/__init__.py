"""The findings: one rule a file, each a pure function from a view to what it found.

Every rule's definition, with its columns and thresholds, stands in ``docs/findings/<code>.md``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schedtrace.diagnose.rules import arrival_limited, blocked_budget, budget_saturated, preemption
from schedtrace.diagnose.view import View
from schedtrace.model.facts import Fact
from schedtrace.model.report import Finding


@dataclass(frozen=True)
class Rule:
    """One kind of finding."""

    code: str
    summary: str
    """One line: what it means when this is found."""
    needs: frozenset[Fact]
    """What a record must tell for this rule to judge it."""
    find: Callable[[View], list[Finding]]

    def __call__(self, view: View) -> list[Finding]:
        """What it finds; empty where there is nothing."""
        return self.find(view)


_MODULES = (arrival_limited, blocked_budget, preemption, budget_saturated)

RULES = {
    module.CODE: Rule(module.CODE, module.SUMMARY, frozenset(module.NEEDS), module.find)
    for module in _MODULES
}
