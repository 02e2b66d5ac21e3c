"""All cases by name."""

from tests.exam import budgets, healthy, kv, machine, outside, roles
from tests.exam.case import CASES, Case, record

__all__ = ["CASES", "Case", "budgets", "healthy", "kv", "machine", "outside", "record", "roles"]
