"""Statements about records that contain less than a trace, made by separate rules.

A rule counts the snapshots that show a fact, and states how certain that fact is; it never derives shares of
time or gains from snapshots. If a record lacks a fact, every sentence that needs the fact is left out.
"""

from schedtrace.diagnose.records.describe import (
    analyzed_records,
    compare_with_trace,
    described,
    described_metrics,
    periodic_lines,
)

__all__ = ["analyzed_records", "compare_with_trace", "described", "described_metrics", "periodic_lines"]
