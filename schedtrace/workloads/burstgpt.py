"""BurstGPT: CSV, one request a line, github.com/HPMLL/BurstGPT.

``Timestamp`` is seconds since midnight of the first day. A request with 0 response tokens failed. Columns
``Session ID`` and ``Elapsed time`` of newer files are not read.
"""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from schedtrace.workloads.rows import Row, csv_rows, refused, tokens

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(path: Path, _counts: Counter[str]) -> Iterator[Row]:
    """The rows of a BurstGPT file."""
    for number, (at, asked, answered) in csv_rows(path, COLUMNS):
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
