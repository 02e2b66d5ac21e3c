"""Traces of Mooncake and of Qwen-Bailian: JSON Lines with the identity of every block of a prompt.

Mooncake: ``FAST25-release/traces`` of github.com/kvcache-ai/Mooncake; milliseconds, blocks of 512 tokens, the
last of which may be a part of one. Bailian: github.com/alibaba-edu/qwen-bailian-usagetraces-anon; the same
names, but seconds and blocks of 16 tokens.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from schedtrace.workloads.rows import Row, numbered_lines, refused

BLOCK, BAILIAN_BLOCK = 512, 16
US_PER_MS, US_PER_S = 1e3, 1e6
NO_IDS, SPARE_IDS = "no block ids", "spare block ids"
"""Counted."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[_Count] = []


def read_mooncake(path: Path, counts: Counter[str]) -> Iterator[Row]:
    """The rows of a Mooncake trace."""
    return _read(path, counts, US_PER_MS, BLOCK)


def read_bailian(path: Path, counts: Counter[str]) -> Iterator[Row]:
    """The rows of a Qwen-Bailian trace."""
    return _read(path, counts, US_PER_S, BAILIAN_BLOCK)


def _read(path: Path, counts: Counter[str], unit_us: float, block: int) -> Iterator[Row]:
    decode = msgspec.json.Decoder(_Line).decode
    for number, line in numbered_lines(path):
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise refused(path, number, error) from error
        blocks = -(-row.input_length // block)
        counts[NO_IDS] += not row.hash_ids
        counts[SPARE_IDS] += len(row.hash_ids) > blocks
        yield Row(
            line=number,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            at_us=row.timestamp * unit_us,
            prefix=tuple(row.hash_ids[:blocks]),
        )
