"""Statements on records that are weaker than a trace, by rules of their own.

A rule counts the moments that show something, and says how certain that is; it never turns moments into
shares of time or gains. A fact that the record lacks switches off every sentence that needs it.
"""

from schedtrace.diagnose.records.benchmarks import compare_with_trace
from schedtrace.diagnose.records.describe import (
    analyzed_records,
    described,
    described_metrics,
    periodic_lines,
)

__all__ = ["analyzed_records", "compare_with_trace", "described", "described_metrics", "periodic_lines"]
