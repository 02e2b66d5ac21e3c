"""The findings: one rule a file, each a pure function from a view to what it found.

Every rule's definition, with its columns and thresholds, stands in ``docs/findings/<code>.md``.
"""

from collections.abc import Callable

from schedtrace.diagnose.rules import arrival_limited, blocked_budget, budget_saturated, preemption
from schedtrace.diagnose.view import View
from schedtrace.model.report import Finding

Rule = Callable[[View], list[Finding]]

RULES: dict[str, Rule] = {
    arrival_limited.CODE: arrival_limited.find,
    blocked_budget.CODE: blocked_budget.find,
    preemption.CODE: preemption.find,
    budget_saturated.CODE: budget_saturated.find,
}
