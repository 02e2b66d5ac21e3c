"""Timed traces in JSON: Mooncake, Qwen-Bailian and vLLM's ``timed_trace`` use the same field names.

Their rows are ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, an id for each begun block
of the prompt. Units differ: Mooncake has whole milliseconds and blocks of 512 tokens, the others seconds and
blocks of 16. The units are therefore inferred from the rows; if the rows do not suffice, the user must state
them.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.workloads.rows import Row, json_rows, token_count, unreadable_row
from schedtrace.workloads.workload import Source

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
"""Tokens per block; the second also applies to vLLM's ``timed_trace``."""
TimeUnit = Literal["s", "ms", "us"]
UNITS_US: dict[TimeUnit, float] = {"s": 1e6, "ms": 1e3, "us": 1.0}
UNIT_WORDS: dict[TimeUnit, str] = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
NO_IDS, SPARE_IDS = "no block ids", "spare block ids"
"""Keys that count rows without block ids, and rows with more ids than blocks."""
NO_OUTPUT_LENGTH = "no output_length: add it, or give --output-len"
LOOKED_AT = 10_000
"""Maximum number of rows from which units are inferred."""
FITS = 0.9
"""Minimum share, among the rows with ids, of rows that have an id for each begun block."""
_SIZES = tuple(2**power for power in range(17))
"""Candidates for the number of tokens per block."""


class TimedRow(msgspec.Struct):
    """Line of the file."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: float
    output_length: float | None = None
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Id of the conversation, which only Qwen-Bailian's files have."""


@dataclass(frozen=True)
class Units:
    """Meaning of the numbers in a file."""

    unit: TimeUnit
    block: int
    source: Source
    note: Message | None = None
    """Message on what was inferred, and from what; None if nothing was inferred, or if it makes no
    difference."""

    def trace_rows(self, path: Path, counts: Counter[str], output_len: int | None = None) -> Iterator[Row]:
        """Yield the rows of the file; rows without an output length get ``output_len``."""
        for number, row in json_rows(path, TimedRow):
            if not math.isfinite(row.timestamp):
                raise unreadable_row(path, number, "timestamp is too large")
            output = output_len if row.output_length is None else row.output_length
            if output is None:
                raise unreadable_row(path, number, NO_OUTPUT_LENGTH)
            prompt = token_count(path, number, "input_length", row.input_length)
            blocks = -(-prompt // self.block)
            counts[NO_IDS] += not row.hash_ids
            counts[SPARE_IDS] += len(row.hash_ids) > blocks
            yield Row(
                line=number,
                prompt_tokens=prompt,
                output_tokens=token_count(path, number, "output_length", output),
                at_us=row.timestamp * UNITS_US[self.unit],
                prefix=tuple(row.hash_ids[:blocks]),
            )


@dataclass
class BlockSizes:
    """Candidates for the size of blocks, and how many rows each of them fits."""

    rows_with_ids: int = 0
    fitting: Counter[int] = field(default_factory=Counter)
    """Number of rows with an id for each begun block, by block size."""

    def add(self, ids: int, length: float) -> None:
        """Add a prompt with its number of ids and its number of tokens."""
        if ids and length > 0:
            self.rows_with_ids += 1
            self.fitting.update(size for size in _SIZES if (ids - 1) * size < length <= ids * size)

    def block_tokens(self, path: Path) -> int | None:
        """Return the number of tokens per block; None if the rows do not determine it.

        Raises:
            UsageError: If no size fits.
        """
        if not self.rows_with_ids:
            return None
        most = max(self.fitting.values(), default=0)
        if most < FITS * self.rows_with_ids:
            msg = (
                f"{path}: hash_ids have no id for each block of the prompt, whatever the size of a block: "
                "give --prefix-block TOKENS"
            )
            raise UsageError(msg)
        best = [size for size, count in self.fitting.items() if count == most]
        usual = [size for size in (BAILIAN_BLOCK, MOONCAKE_BLOCK) if size in best]
        sure = best if len(best) == 1 else usual
        return sure[0] if len(sure) == 1 else None


@dataclass
class _Evidence:
    """Evidence from the first rows of a file."""

    blocks: BlockSizes = field(default_factory=BlockSizes)
    times: set[float] = field(default_factory=set)
    """Times of the rows; at most two are kept."""
    is_whole: bool = True
    """Whether all times are whole numbers."""
    is_bailian: bool = False

    def add(self, row: TimedRow) -> None:
        """Add one more row to the evidence."""
        self.is_bailian |= row.chat_id is not msgspec.UNSET
        self.is_whole &= row.timestamp.is_integer()
        if len(self.times) < 2:  # noqa: PLR2004  # two tell that there are gaps
            self.times.add(row.timestamp)
        self.blocks.add(len(row.hash_ids), row.input_length)

    @property
    def has_gaps(self) -> bool:
        """Whether requests arrive at different times."""
        return len(self.times) > 1

    def time_unit(self, block: int | None) -> TimeUnit | None:
        """Return the unit of the times; None if the rows do not show it."""
        if block == MOONCAKE_BLOCK and self.is_whole:
            return "ms"
        if block == BAILIAN_BLOCK and (self.is_bailian or not self.is_whole):
            return "s"
        return None


def units_of(path: Path, unit: TimeUnit | None = None, block: int | None = None) -> Units:
    """Infer from the first rows of a file the units that the user did not state.

    Raises:
        UsageError: If the rows do not show a unit; the text names the option that sets it.
    """
    shown = _Evidence()
    with suppress(InputError):  # an error in a row is reported where the row is used
        for _, row in islice(json_rows(path, TimedRow), LOOKED_AT):
            shown.add(row)
    size = block or shown.blocks.block_tokens(path)
    file_unit = unit or shown.time_unit(size)
    if file_unit is None and shown.has_gaps:
        what = "whole numbers" if shown.is_whole else "with fractions"
        blocks = f"blocks of {size} tokens" if size else "no block ids that tell"
        msg = (
            f"{path}: timestamps ({what}, {blocks}) may be seconds or milliseconds: give --time-unit s or "
            "--time-unit ms"
        )
        raise UsageError(msg)
    source: Source = "timed_trace"
    if shown.is_bailian:
        source = "bailian"
    elif size in {None, MOONCAKE_BLOCK} and file_unit in {None, "ms"}:
        source = "mooncake"
    read_unit = UNIT_WORDS[file_unit] if file_unit and unit is None and shown.has_gaps else None
    read_block = size if block is None else None
    note = say(
        "[Timestamps are read as {unit} (--time-unit). ][Ids are read as those of blocks of {block:n token}, "
        "which fits {fits:n} of {rows:n row} (--prefix-block).]",
        unit=read_unit,
        block=read_block,
        fits=shown.blocks.fitting[size or 0],
        rows=shown.blocks.rows_with_ids,
    )
    return Units(file_unit or "ms", size or MOONCAKE_BLOCK, source, note if read_unit or read_block else None)
