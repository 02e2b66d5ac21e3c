"""Problems of a trace, in sentences for the user."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

_NAMED = 5


@dataclass
class Problems:
    """Problems of a trace."""

    garbled_lines: list[int] = field(default_factory=list)
    """Line numbers (from 1) of dropped lines that are not valid trace lines."""
    truncated: bool = False
    """Whether the last line was cut off, and dropped."""
    unclosed: bool = False
    """Whether the end line is absent: the engine was killed, or still runs."""
    unfinished_requests: int = 0
    """Requests that had arrived but not ended when an unclosed trace ends."""
    missing_steps: int = 0
    """Steps missing from the file, according to the numbering."""
    dropped_steps: int = 0
    """Missing steps that the recorder dropped, but whose arrivals and departures it recorded."""
    end_missing: bool = False
    """Whether steps after the last one are missing, or could not be rebuilt."""
    first_step: int = 0
    """First step in the file; earlier steps are in another file, or lost."""
    began_unix_us: int | None = None
    """Unix time at which the first recorded step began, unless it is the engine's first step."""
    gaps: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Missing parts: first and last step, begin and end in microseconds on the trace's clock."""
    broken_frames: int = 0
    """Frames that cannot be decompressed; each holds about a second."""
    dropped: list[str] = field(default_factory=list)
    """Sentence for each part, or rest of a part, that does not belong to this trace."""
    missing_arrivals: int = 0
    """Minimum number of requests without a recorded arrival in a trace that lacks lines."""
    missing_finishes: int = 0
    """Missing departures, not counting requests that have not ended."""
    not_rebuilt: list[tuple[int, int]] = field(default_factory=list)
    """First and last of the dropped steps whose lines contain changes to an unknown step."""
    refused: list[int] = field(default_factory=list)
    """Dropped steps whose number appeared before, or whose time contradicts the neighbouring steps."""
    doubtful: list[tuple[int, int]] = field(default_factory=list)
    """First and last of the steps that were rebuilt from changes but do not lead to the full line after
    them.
    """

    @property
    def is_incomplete(self) -> bool:
        """Return whether something is missing between the first and the last line."""
        return bool(
            self.missing_steps
            or self.not_rebuilt
            or self.gaps
            or self.broken_frames
            or self.garbled_lines
            or self.refused
            or self.dropped
        )

    @property
    def requests_missing(self) -> bool:
        """Whether the file may lack requests."""
        lost = self.missing_steps > self.dropped_steps or self.garbled_lines or self.not_rebuilt
        return bool(lost or self.first_step or self.missing_arrivals or self.missing_finishes)

    def sentences(self, trace: Path) -> list[str]:
        """Return a sentence per problem."""
        sentences = [f"{trace}: the last line is cut off and was dropped"] if self.truncated else []
        sentences += self.missing(trace)
        if self.unclosed:
            open_ones = (
                f"; {self.unfinished_requests} requests had not ended" if self.unfinished_requests else ""
            )
            sentences.append(
                f"{trace}: not closed, the engine was killed or still runs; up to one second before the end "
                f"may be missing{open_ones}"
            )
        return sentences

    def missing(self, trace: Path) -> list[str]:
        """Return the sentences about gaps before the end of the trace, which concern every answer."""
        sentences = self._missing_files(trace)
        if self.garbled_lines:
            count = len(self.garbled_lines)
            lines = ", ".join(str(number) for number in self.garbled_lines[:_NAMED])
            more = ", ..." if count > _NAMED else ""
            sentences.append(f"{trace}: {_lines(count)} not understood and dropped (line {lines}{more})")
        if self.dropped_steps:
            sentences.append(
                f"{trace}: {_missing(self.dropped_steps)}, the disk was too slow; requests that arrived or "
                "ended meanwhile are recorded, what they were given is not"
            )
        if lost := self.missing_steps - self.dropped_steps:
            them = "it" if lost == 1 else "them"
            sentences.append(
                f"{trace}: {_missing(lost)}, and so is any request that arrived or ended in {them}"
            )
        for what, count in (("arrival", self.missing_arrivals), ("end", self.missing_finishes)):
            if count:
                requests = "1 request" if count == 1 else f"{count:,} requests"
                sentences.append(f"{trace}: the {what} of at least {requests} is missing")
        if self.refused:
            sentences.append(
                f"{trace}: {_steps(number_ranges(self.refused))} dropped: the number had come before, or the "
                "step began before the one in front of it"
            )
        if self.not_rebuilt:
            sentences.append(
                f"{trace}: {_steps(self.not_rebuilt)} could not be rebuilt: a line that "
                "they continue is missing or broken"
            )
        if self.doubtful:
            sentences.append(
                f"{trace}: {_steps(self.doubtful)}, rebuilt from changes, do not lead to the full line after "
                "them; what each request got in them may be wrong"
            )
        return sentences

    def _missing_files(self, trace: Path) -> list[str]:
        sentences = [f"{trace}: {sentence}" for sentence in self.dropped]
        if self.first_step:
            began = "" if self.began_unix_us is None else f" ({_utc(self.began_unix_us)})"
            begins = f"begins at step {self.first_step:,}{began}"
            sentences.append(f"{trace}: {begins}; requests that ended before are not in it")
        for first, last, from_us, to_us in self.gaps:
            steps = f": {_steps([(first, last)])}" if last >= first else ""
            missing = f"from {from_us / 1e6:,.2f} to {to_us / 1e6:,.2f} s into the recording"
            sentences.append(f"{trace}: a part is missing, nothing is known {missing}{steps}")
        if self.broken_frames:
            frames = "1 frame" if self.broken_frames == 1 else f"{self.broken_frames:,} frames"
            sentences.append(f"{trace}: {frames} cannot be decompressed: each had up to a second")
        return sentences


def number_ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers; the numbers are sorted."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def _steps(spans: list[tuple[int, int]]) -> str:
    """Name some steps and give their number: ``50 steps (12-60, 75)``."""
    count = sum(last - first + 1 for first, last in spans)
    named = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans[:_NAMED])
    more = ", ..." if len(spans) > _NAMED else ""
    return f"{count:,} step{'' if count == 1 else 's'} ({named}{more})"


def _missing(steps: int) -> str:
    return "1 step is missing" if steps == 1 else f"{steps:,} steps are missing"


def _utc(unix_us: int) -> str:
    return f"{datetime.fromtimestamp(unix_us / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _lines(count: int) -> str:
    return "1 line was" if count == 1 else f"{count:,} lines were"
