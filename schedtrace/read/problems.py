"""What can be wrong with a trace, in words for the person."""

from dataclasses import dataclass, field
from pathlib import Path

_NAMED_LINES = 5


@dataclass
class Problems:
    """What is wrong with a trace, for the person to know."""

    garbled_lines: list[int] = field(default_factory=list)
    """Line numbers (from 1) that are no trace lines; dropped."""
    truncated: bool = False
    """The last line was cut off; dropped."""
    unclosed: bool = False
    """There is no end line: the engine was killed, or still runs."""
    unfinished_requests: int = 0
    """Requests that had arrived and not ended when an unclosed trace ends."""
    missing_steps: int = 0
    """Steps that the numbering says there were, and that are not in the file."""

    def sentences(self, trace: Path) -> list[str]:
        """One sentence a problem."""
        said = []
        if self.truncated:
            said.append(f"{trace}: the last line is cut off and was dropped")
        if self.garbled_lines:
            count = len(self.garbled_lines)
            lines = ", ".join(str(number) for number in self.garbled_lines[:_NAMED_LINES])
            more = ", ..." if count > _NAMED_LINES else ""
            said.append(f"{trace}: {_lines(count)} not understood and dropped (line {lines}{more})")
        if self.missing_steps:
            steps = "1 step is" if self.missing_steps == 1 else f"{self.missing_steps:,} steps are"
            said.append(f"{trace}: {steps} missing")
        if self.unclosed:
            open_ones = (
                f"; {self.unfinished_requests} requests had not ended" if self.unfinished_requests else ""
            )
            said.append(
                f"{trace}: not closed, the engine was killed or still runs; up to one second before the end "
                f"may be missing{open_ones}"
            )
        return said


def _lines(count: int) -> str:
    return "1 line was" if count == 1 else f"{count:,} lines were"
