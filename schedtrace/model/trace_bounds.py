"""Bounds of a recording: ``maxsize=1G,maxage=12h``, or ``plain`` for a single file without bounds.

A text that cannot be parsed raises ValueError, which states the expected form.
"""

import re
from dataclasses import dataclass

SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
PLAIN = "plain"
DEFAULT = "maxsize=1G"
"""Default bound for a server and an attachment: at 50 steps per second with 256 requests, 1 GiB holds two
days."""
EXPECTED = (
    "expected 'plain', or 'maxsize=SIZE' of at least 1M, 'maxage=TIME' of at least 1m, or both with a comma"
)
LEAST_BYTES = 2**20
LEAST_S = 60.0
PARTS = 16
"""Number of parts per bound; only whole parts are deleted, so a bound is kept to within a sixteenth."""
PART_BYTES = 64 * 2**20
PART_S = 600.0
"""Maximum seconds of a part; ``PART_BYTES``: its compressed bytes. A reader of the last few minutes therefore
needs only one or two parts."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a trace in parts; None means no bound."""

    max_bytes: int | None = None
    """Maximum compressed bytes per engine."""
    max_s: float | None = None
    parts: int = PARTS
    """Number of parts per bound."""

    @property
    def part_bytes(self) -> int:
        """Compressed bytes after which the next part begins."""
        return PART_BYTES if self.max_bytes is None else min(PART_BYTES, self.max_bytes // self.parts)

    @property
    def part_s(self) -> float:
        """Seconds after which the next part begins."""
        return PART_S if self.max_s is None else min(PART_S, self.max_s / self.parts)


def bounds(text: str) -> Bounds | None:
    """Parse the bounds of a trace; return None for a plain file."""
    if text == PLAIN:
        return None
    limits = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if not limits.keys() <= {"maxsize", "maxage"} or len(limits) != text.count(",") + 1:
        raise ValueError(EXPECTED)
    size, age = limits.get("maxsize"), limits.get("maxage")
    max_bytes = None if size is None else int(_quantity(size, SIZES))
    max_s = None if age is None else _quantity(age, SECONDS)
    if (max_bytes is not None and max_bytes < LEAST_BYTES) or (max_s is not None and max_s < LEAST_S):
        raise ValueError(EXPECTED)
    return Bounds(max_bytes, max_s)


KEPT_EXPECTED = "expected a time of at least 8s and, if you like, a size of at least 1M: 120s or 120s,64M"
KEPT_BYTES = 64 * 2**20
KEPT_PARTS = 8
KEPT_LEAST_S = 8.0


def memory_bounds(text: str) -> Bounds:
    """Parse the bounds of a flight recorder's memory: ``120s`` or ``120s,64M``."""
    age, *size = text.split(",")
    try:
        max_s = _quantity(age.strip(), SECONDS)
        max_bytes = int(_quantity(size[0].strip(), SIZES)) if size else KEPT_BYTES
    except ValueError:
        raise ValueError(KEPT_EXPECTED) from None
    if max_s < KEPT_LEAST_S or max_bytes < LEAST_BYTES or len(size) > 1:
        raise ValueError(KEPT_EXPECTED)
    return Bounds(max_bytes, max_s, KEPT_PARTS)


def size_of(text: str) -> int:
    """Parse a size in bytes: ``20G``."""
    try:
        return int(_quantity(text, SIZES))
    except ValueError:
        msg = "expected a size such as 20G, or 'off'"
        raise ValueError(msg) from None


def _quantity(text: str, units: dict[str, float] | dict[str, int]) -> float:
    """Parse a number with a unit, such as ``1.5G``."""
    match = re.fullmatch(rf"(\d{{1,9}}(?:\.\d{{1,9}})?)([{''.join(units)}])", text)
    if match is None:
        raise ValueError(EXPECTED)
    return float(match[1]) * units[match[2]]
