"""The front ends' files of a run: what was given, what vLLM made of it, whom it turned away."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from schedtrace.errors import InputError
from schedtrace.model.manifest import Configured, FrontEndLine, Refused
from schedtrace.read.lines import HUGE_NUMBER, UNREADABLE, WholeLines
from schedtrace.read.read_options import READ

PATTERN = "front-end-*.jsonl"
_decode = msgspec.json.Decoder(FrontEndLine).decode


@dataclass(frozen=True)
class FrontEnd:
    """What the front ends of one run wrote."""

    configured: Configured | None = None
    """The configuration that the engines run with; None: not recorded."""
    refused: list[Refused] = field(default_factory=list)
    """In order of time."""
    arrived: int = 0
    """Requests that reached an engine, warm-up included; counted only where some were refused."""


def read_front_end(folder: Path, engines_began_unix_us: int) -> FrontEnd | None:
    """Read every ``front-end-<pid>.jsonl`` of a run folder; lines that are cut or broken are left out.

    A front end makes configurations only to read defaults, too; the engines' is the last one before they
    began.

    Args:
        folder: Of the run.
        engines_began_unix_us: When the first engine wrote its header.

    Returns:
        None where no front end wrote a line.
    """
    lines = [line for file in sorted(folder.glob(PATTERN)) for line in _lines(file)]
    if not lines:
        return None
    lines.sort(key=lambda line: line.at_unix_us)
    made = [line for line in lines if isinstance(line, Configured)]
    before = [line for line in made if line.at_unix_us <= engines_began_unix_us]
    return FrontEnd(
        configured=before[-1] if before else None,
        refused=[line for line in lines if isinstance(line, Refused)],
    )


def _lines(file: Path) -> list[Configured | Refused]:
    """The whole lines of one file; none of one that cannot be read."""
    found = []
    with suppress(InputError):
        for _, lines in WholeLines(file, READ.chunk_bytes):
            for line in lines:
                with suppress(*UNREADABLE):
                    found += [] if HUGE_NUMBER.search(line) else [_decode(line)]
    return found
