"""Public traces in CSV, one request a line: Azure's of LLM inference, and BurstGPT.

Azure's are of 2023, 2024 and the multimodal one of 2025 (github.com/Azure/AzurePublicDataset).
``TIMESTAMP`` is a date with a time, with up to seven decimals and, in some files, a time zone. BurstGPT is
github.com/HPMLL/BurstGPT: ``Timestamp`` is seconds since midnight of the first day, and a request with 0
response tokens failed. Columns ``Session ID`` and ``Elapsed time`` of newer files are not read.
"""

import math
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from schedtrace.workloads.rows import Row, csv_rows, refused, tokens

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES = "NumImages"
"""A further column of the multimodal trace."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


def read_azure(path: Path, _counts: Counter[str]) -> Iterator[Row]:
    """The rows of an Azure trace; decimals beyond microseconds are cut off."""
    for number, (at, context, generated) in csv_rows(path, AZURE_COLUMNS):
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


BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(path: Path, _counts: Counter[str]) -> Iterator[Row]:
    """The rows of a BurstGPT file."""
    for number, (at, asked, answered) in csv_rows(path, BURSTGPT_COLUMNS):
        try:
            seconds = float(at)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            raise refused(path, number, f"Timestamp {at!r} is not a number of seconds")
        yield Row(
            line=number,
            prompt_tokens=tokens(path, number, "Request tokens", asked),
            output_tokens=tokens(path, number, "Response tokens", answered),
            at_us=seconds * 1e6,
        )
