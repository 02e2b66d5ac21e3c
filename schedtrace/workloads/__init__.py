"""Loads (lengths and times, no text) from workload files, random draws or recorded traces."""

from schedtrace.workloads.random_load import random_workload
from schedtrace.workloads.recorded_load import from_trace, loads_of
from schedtrace.workloads.workload import LoadRequest, Workload, token_ids
from schedtrace.workloads.workload_files import open_workload

__all__ = [
    "LoadRequest",
    "Workload",
    "from_trace",
    "loads_of",
    "open_workload",
    "random_workload",
    "token_ids",
]
