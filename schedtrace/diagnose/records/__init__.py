"""Statements about records that are weaker than a trace, made by rules of their own.

A rule counts the snapshots that show a fact, and states with what certainty they show it; it never turns
snapshots into shares of time or gains. If a record lacks a fact, every sentence that needs the fact is left
out.
"""

from schedtrace.diagnose.records.describe import (
    analyzed_records,
    compare_with_trace,
    described,
    described_metrics,
    periodic_lines,
)

__all__ = ["analyzed_records", "compare_with_trace", "described", "described_metrics", "periodic_lines"]
