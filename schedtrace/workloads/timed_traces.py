"""Timed traces in JSON: Mooncake, Qwen-Bailian and vLLM's ``timed_trace`` have the same names of fields.

Their rows are ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, an id for each begun block
of the prompt. Units differ: Mooncake has whole milliseconds and blocks of 512 tokens, the others seconds and
blocks of 16. So the rows themselves decide, and where they do not, the person is asked.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.workloads.rows import Row, json_rows, refused, tokens
from schedtrace.workloads.workload import Source

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
"""Tokens; the second is that of vLLM's ``timed_trace``, too."""
TimeUnit = Literal["s", "ms", "us"]
UNITS_US: dict[TimeUnit, float] = {"s": 1e6, "ms": 1e3, "us": 1.0}
UNIT_WORDS: dict[TimeUnit, str] = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
NO_IDS, SPARE_IDS = "no block ids", "spare block ids"
"""Counted."""
LOOKED_AT = 10_000
"""Rows from which units are found out."""
_FITS = 0.9
"""At least so many of the rows with ids must have one for each begun block."""
_SIZES = tuple(2**power for power in range(17))
"""Tokens of a block."""


class TimedRow(msgspec.Struct):
    """One line of the file."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: float
    output_length: float
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Qwen-Bailian's only."""


@dataclass(frozen=True)
class Units:
    """What the numbers of a file mean."""

    unit: TimeUnit
    block: int
    source: Source
    note: Message | None = None
    """What was found out, and from what; None: it was given, or changes nothing."""

    def rows(self, path: Path, counts: Counter[str]) -> Iterator[Row]:
        """The rows of the file.

        Raises:
            InputError: ``path:line: what``.
        """
        for number, row in json_rows(path, TimedRow):
            if not math.isfinite(row.timestamp):
                raise refused(path, number, "timestamp is too large")
            prompt = tokens(path, number, "input_length", row.input_length)
            blocks = -(-prompt // self.block)
            counts[NO_IDS] += not row.hash_ids
            counts[SPARE_IDS] += len(row.hash_ids) > blocks
            yield Row(
                line=number,
                prompt_tokens=prompt,
                output_tokens=tokens(path, number, "output_length", row.output_length),
                at_us=row.timestamp * UNITS_US[self.unit],
                prefix=tuple(row.hash_ids[:blocks]),
            )


def units_of(path: Path, unit: TimeUnit | None = None, block: int | None = None) -> Units:
    """Find out the units of a file from its first rows; what is given is not found out.

    Raises:
        UsageError: the rows do not decide, with the option that does.
    """
    rows = _first_rows(path)
    with_ids = [row for row in rows if row.hash_ids and row.input_length > 0]
    fitting = _fitting(with_ids)
    is_bailian = bool(rows) and rows[0].chat_id is not msgspec.UNSET
    size = block or _block(path, with_ids, fitting)
    is_whole = all(row.timestamp.is_integer() for row in rows)
    at_one_time = len({row.timestamp for row in rows}) < 2  # noqa: PLR2004  # no gap, so no unit
    convention: TimeUnit | None = None
    if size == MOONCAKE_BLOCK and is_whole:
        convention = "ms"
    elif size == BAILIAN_BLOCK and (is_bailian or not is_whole):
        convention = "s"
    if unit is None and convention is None and not at_one_time:
        what = "whole numbers" if is_whole else "with fractions"
        blocks = f"blocks of {size} tokens" if size else "no ids of blocks that tell"
        msg = (
            f"{path}: timestamps ({what}, {blocks}) may be seconds or milliseconds: give --time-unit s or "
            "--time-unit ms"
        )
        raise UsageError(msg)
    found = unit or convention or "ms"
    used = size or MOONCAKE_BLOCK
    source: Source = "timed_trace"
    if is_bailian:
        source = "bailian"
    elif used == MOONCAKE_BLOCK and found == "ms":
        source = "mooncake"
    told = None if unit and block else _note(found, size, with_ids, unit_matters=not at_one_time)
    return Units(found, used, source, told)


def _first_rows(path: Path) -> list[TimedRow]:
    """The first rows that can be read; what is wrong with a row is said where it is used."""
    rows = []
    try:
        for _, row in islice(json_rows(path, TimedRow), LOOKED_AT):
            rows.append(row)
    except InputError:
        pass
    return rows


def _fitting(rows: list[TimedRow]) -> Counter[int]:
    """How many rows have an id for each begun block, by the size of blocks."""
    sizes: Counter[int] = Counter()
    for row in rows:
        ids = len(row.hash_ids)
        sizes.update(size for size in _SIZES if (ids - 1) * size < row.input_length <= ids * size)
    return sizes


def _block(path: Path, rows: list[TimedRow], fitting: Counter[int]) -> int | None:
    """Tokens of a block; None where every size gives the same prefixes.

    Raises:
        UsageError: no size fits.
    """
    if not rows:
        return None
    most = max(fitting.values(), default=0)
    best = [size for size, count in fitting.items() if count == most]
    if most < _FITS * len(rows):
        msg = (
            f"{path}: hash_ids have no id for each block of the prompt, whatever the size of a block: give "
            "--prefix-block TOKENS"
        )
        raise UsageError(msg)
    if len(best) == 1:
        return best[0]
    usual = [size for size in (BAILIAN_BLOCK, MOONCAKE_BLOCK) if size in best]
    return usual[0] if len(usual) == 1 else None


def _note(unit: TimeUnit, block: int | None, rows: list[TimedRow], *, unit_matters: bool) -> Message | None:
    """What was found out."""
    fits = 0 if block is None else _fitting(rows)[block]
    if not unit_matters and block is None:
        return None
    return say(
        "[Timestamps are read as {unit} (--time-unit). ][Ids are read as those of blocks of {block:n token}, "
        "which fits {fits:n} of {rows:n row} (--prefix-block).]",
        unit=UNIT_WORDS[unit] if unit_matters else None,
        block=block,
        fits=fits,
        rows=len(rows),
    )
