"""All cases by name."""

import os

# vLLM reads them when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

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
