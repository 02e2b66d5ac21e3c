"""Names of trace files: ``engine-0.jsonl``, or parts ``engine-0.000000.jsonl.zst`` and so on.

The path of a trace in parts is that of its files with ``*`` for the number: ``engine-0.*.jsonl.zst``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

PLAIN = "engine-*.jsonl"
PARTS = "engine-*.jsonl.zst"
_PART = re.compile(r"(engine-[^.]*)\.(\d{6,}|\*)\.jsonl\.zst")


def plain_name(rank: int) -> str:
    """The file of an engine whose trace is one plain file."""
    return f"engine-{rank}.jsonl"


def part_name(rank: int, number: int | None = None) -> str:
    """A part of an engine's trace; None: all of them."""
    return f"engine-{rank}.{'*' if number is None else f'{number:06}'}.jsonl.zst"


def is_in_parts(path: Path) -> bool:
    """Whether it is a part, or stands for all parts of a trace."""
    return _PART.fullmatch(path.name) is not None


def is_trace(path: Path) -> bool:
    """Whether it is called as a trace or one of its parts is."""
    return path.match(PLAIN) or is_in_parts(path)


def trace_of(path: Path) -> Path:
    """The trace that a part belongs to; a plain file is its own."""
    found = _PART.fullmatch(path.name)
    return path if found is None else path.with_name(f"{found[1]}.*.jsonl.zst")


def plain_of(trace: Path) -> str:
    """The name of the plain file with the same lines."""
    found = _PART.fullmatch(trace.name)
    return trace.name if found is None else f"{found[1]}.jsonl"


def part_number(part: Path) -> int:
    """Its number; 0 of a plain file."""
    found = _PART.fullmatch(part.name)
    return int(found[2]) if found and found[2] != "*" else 0


def files_of(trace: Path) -> list[Path]:
    """The files of a trace, in the order of their numbers; none if all its parts are gone."""
    found = _PART.fullmatch(trace.name)
    if found is None or found[2] != "*":
        return [trace]
    parts = [path for path in trace.parent.glob(PARTS) if trace_of(path) == trace]
    return sorted(parts, key=part_number)


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder, rank by rank."""
    found = {*folder.glob(PLAIN), *map(trace_of, filter(is_in_parts, folder.glob(PARTS)))}
    return sorted(found, key=_rank)


def _rank(trace: Path) -> tuple[int, str]:
    digits = "".join(character for character in trace.name.split(".")[0] if character.isdigit())
    return int(digits or 0), trace.name


SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
PLAIN = "plain"
DEFAULT = "maxsize=1G"
"""Of a server and an attachment: at 50 steps a second with 256 requests 1 GiB holds two days."""
EXPECTED = (
    "expected 'plain', or 'maxsize=SIZE' of at least 1M, 'maxage=TIME' of at least 1m, or both with a comma"
)
LEAST_BYTES = 2**20
LEAST_S = 60.0
PARTS = 16
"""A bound is kept to a sixteenth of it, since only whole parts go."""
PART_BYTES = 64 * 2**20
PART_S = 600.0
"""A part has at most so much: whoever asks for the last minutes reads one or two parts."""


@dataclass(frozen=True)
class Bounds:
    """How much of a trace in parts is kept; None: no bound."""

    max_bytes: int | None = None
    """Compressed, of each engine."""
    max_s: float | None = None
    parts: int = PARTS
    """Of which each bound consists."""

    @property
    def part_bytes(self) -> int:
        """A part that has so much is followed by another."""
        return PART_BYTES if self.max_bytes is None else min(PART_BYTES, self.max_bytes // self.parts)

    @property
    def part_s(self) -> float:
        """A part that is so old is followed by another."""
        return PART_S if self.max_s is None else min(PART_S, self.max_s / self.parts)


def bounds(text: str) -> Bounds | None:
    """What was asked for; None: a plain file.

    Raises:
        ValueError: it is not understood; the text says what is expected.
    """
    if text == PLAIN:
        return None
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if not given.keys() <= {"maxsize", "maxage"} or len(given) != text.count(",") + 1:
        raise ValueError(EXPECTED)
    size, age = given.get("maxsize"), given.get("maxage")
    max_bytes = None if size is None else int(_quantity(size, SIZES))
    max_s = None if age is None else _quantity(age, SECONDS)
    if (max_bytes is not None and max_bytes < LEAST_BYTES) or (max_s is not None and max_s < LEAST_S):
        raise ValueError(EXPECTED)
    return Bounds(max_bytes, max_s)


KEPT_EXPECTED = "expected a time of at least 8s and, if you like, a size of at least 1M: 120s or 120s,64M"
KEPT_BYTES = 64 * 2**20
KEPT_PARTS = 8
KEPT_LEAST_S = 8.0


def kept(text: str) -> Bounds:
    """What a flight recorder keeps in memory: ``120s`` or ``120s,64M``.

    Raises:
        ValueError: it is not understood; the text says what is expected.
    """
    age, *size = text.split(",")
    try:
        max_s = _quantity(age.strip(), SECONDS)
        max_bytes = int(_quantity(size[0].strip(), SIZES)) if size else KEPT_BYTES
    except ValueError:
        raise ValueError(KEPT_EXPECTED) from None
    if max_s < KEPT_LEAST_S or max_bytes < LEAST_BYTES or len(size) > 1:
        raise ValueError(KEPT_EXPECTED)
    return Bounds(max_bytes, max_s, KEPT_PARTS)


def _quantity(text: str, units: dict[str, float] | dict[str, int]) -> float:
    """Raises ValueError."""
    found = re.fullmatch(rf"(\d{{1,9}}(?:\.\d{{1,9}})?)([{''.join(units)}])", text)
    if found is None:
        raise ValueError(EXPECTED)
    return float(found[1]) * units[found[2]]
