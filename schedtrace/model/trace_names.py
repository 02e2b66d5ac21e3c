"""Names of trace files: ``engine-0.jsonl``, or parts ``engine-0.000000.jsonl.zst`` and so on.

The path of a trace in parts is that of its files with ``*`` for the number: ``engine-0.*.jsonl.zst``.
"""

import re
from pathlib import Path

PLAIN = "engine-*.jsonl"
PARTS = "engine-*.jsonl.zst"
_PART = re.compile(r"(engine-[^.]*)\.(\d{6,}|\*)\.jsonl\.zst")


def plain_name(rank: int) -> str:
    """Return the file of an engine whose trace is one plain file."""
    return f"engine-{rank}.jsonl"


def part_name(rank: int, number: int | None = None) -> str:
    """Return a part of an engine's trace; None: all of them."""
    return f"engine-{rank}.{'*' if number is None else f'{number:06}'}.jsonl.zst"


def is_in_parts(path: Path) -> bool:
    """Return whether it is a part, or stands for all parts of a trace."""
    return _PART.fullmatch(path.name) is not None


def is_trace(path: Path) -> bool:
    """Return whether it is called as a trace or one of its parts is."""
    return path.match(PLAIN) or is_in_parts(path)


def trace_of(path: Path) -> Path:
    """Return the trace that a part belongs to; a plain file is its own."""
    match = _PART.fullmatch(path.name)
    return path if match is None else path.with_name(f"{match[1]}.*.jsonl.zst")


def plain_of(trace: Path) -> str:
    """Return the name of the plain file with the same lines."""
    match = _PART.fullmatch(trace.name)
    return trace.name if match is None else f"{match[1]}.jsonl"


def part_number(part: Path) -> int:
    """Return a part's number; 0 for a plain file."""
    match = _PART.fullmatch(part.name)
    return int(match[2]) if match and match[2] != "*" else 0


def files_of(trace: Path) -> list[Path]:
    """Return the files of a trace, in the order of their numbers; none if all its parts are gone."""
    match = _PART.fullmatch(trace.name)
    if match is None or match[2] != "*":
        return [trace]
    parts = [path for path in trace.parent.glob(PARTS) if trace_of(path) == trace]
    return sorted(parts, key=part_number)


def traces_in(folder: Path) -> list[Path]:
    """Return the traces in a folder, rank by rank."""
    traces = {*folder.glob(PLAIN), *map(trace_of, filter(is_in_parts, folder.glob(PARTS)))}
    return sorted(traces, key=_rank)


def _rank(trace: Path) -> tuple[int, str]:
    digits = "".join(character for character in trace.name.split(".")[0] if character.isdigit())
    return int(digits or 0), trace.name
