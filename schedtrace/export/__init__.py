"""A run in formats of other tools: tables, the trace in full, traces for viewers, its load."""

from enum import StrEnum


class ExportKind(StrEnum):
    """Formats of the files."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"
    """The trace itself, every step in full."""
    PERFETTO = "perfetto"
    CHROME = "chrome"
    """The Trace Event Format of ``chrome://tracing``, in which torch writes its profiles."""
    MOONCAKE = "mooncake"
    """The load as a timed trace of lengths and prefixes, for benchmarks that replay one."""
