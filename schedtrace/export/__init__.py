"""Export of a run to other tools' formats: tables, the full trace, traces for viewers, and the load."""

from enum import StrEnum


class ExportKind(StrEnum):
    """Formats of exported files."""

    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"
    """Trace with every step in full."""
    PERFETTO = "perfetto"
    CHROME = "chrome"
    """Trace Event Format of ``chrome://tracing``, in which torch writes its profiles."""
    MOONCAKE = "mooncake"
    """Load as a timed trace of lengths and prefixes, for benchmarks that replay such traces."""
