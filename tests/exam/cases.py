"""All cases by name."""

from tests.exam import behind, budgets, demand, healthy, kv, machine, outside, roles
from tests.exam.case import CASES, Case, record

__all__ = [
    "CASES",
    "Case",
    "behind",
    "budgets",
    "demand",
    "healthy",
    "kv",
    "machine",
    "outside",
    "record",
    "roles",
]
