"""Azure LLM inference traces (2023, 2024) and the multimodal one of 2025: CSV, one request a line.

github.com/Azure/AzurePublicDataset. ``TIMESTAMP`` is a date with a time, with up to seven decimals and, in
some files, a time zone.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from schedtrace.workloads.rows import Row, csv_rows, refused, tokens

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES = "NumImages"
"""A further column of the multimodal trace."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


def read_azure(path: Path, _counts: Counter[str]) -> Iterator[Row]:
    """The rows of an Azure trace; decimals beyond microseconds are cut off."""
    for number, (at, context, generated) in csv_rows(path, COLUMNS):
        try:
            time = datetime.fromisoformat(at)
        except ValueError as error:
            raise refused(path, number, f"TIMESTAMP {at!r} is not a date with a time") from error
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        yield Row(
            line=number,
            prompt_tokens=tokens(path, number, "ContextTokens", context),
            output_tokens=tokens(path, number, "GeneratedTokens", generated),
            at_us=(time - _EPOCH) // _US,
        )
