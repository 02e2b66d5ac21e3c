"""Loads from files of the field, random draws or recorded traces: lengths and times, no text."""

from schedtrace.workloads.files import open_workload
from schedtrace.workloads.random_load import random_workload
from schedtrace.workloads.recorded import from_trace, loads_of
from schedtrace.workloads.request import LoadRequest
from schedtrace.workloads.tokens import token_ids
from schedtrace.workloads.workload import Workload

__all__ = [
    "LoadRequest",
    "Workload",
    "from_trace",
    "loads_of",
    "open_workload",
    "random_workload",
    "token_ids",
]
