"""Defects of a trace, in words for users: gaps in which nothing is recorded, and other problems."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

GAP_SCHEMA = {
    "first_step": pl.Int64,
    "last_step": pl.Int64,
    "from_us": pl.Int64,
    "to_us": pl.Int64,
    "next_step": pl.Int64,
    "kind": pl.String,
    "told_us": pl.Int64,
}
"""Columns of a table of gaps, in order: the first and last missing step (if no step is missing, ``last_step``
is less than ``first_step``), the beginning and end of the unrecorded period, the first step after the gap,
the kind of gap, and the time at which the recorder listed the requests present (null if it did not)."""
TOLD = "told"
"""Kind of a gap after which the recorder listed the requests present."""
DROPPED = "dropped"
"""Kind of a gap in which the recorder dropped steps but recorded arrivals and departures."""
LOST = "lost"
"""Kind of a gap in which arrivals and departures are unknown."""


def gaps_of(
    steps: pl.DataFrame,
    begun_anew: Sequence[tuple[int, int]],
    events: Sequence[Any],
    first_step: int | None = None,
) -> pl.DataFrame:
    """Return the gaps between a trace's steps.

    Args:
        steps: All steps of the trace, in the order of their numbers.
        begun_anew: Losses of lines, as in ``WholeLines.begun_anew``.
        events: All ``events`` lines.
        first_step: Number with which the trace should begin; None if it may begin with any step.
    """
    if steps.is_empty():
        return pl.DataFrame(schema=GAP_SCHEMA)
    numbers = steps["step"].cast(pl.Int64)
    begin, end = int(numbers.min()), int(numbers.max())  # type: ignore[arg-type]  # integers
    begins_late = first_step is not None and first_step < begin
    if not begun_anew and not begins_late and numbers.n_unique() == end - begin + 1:
        return pl.DataFrame(schema=GAP_SCHEMA)
    over = pl.max_horizontal(pl.col("start_us") + pl.col("schedule_us"), pl.col("output_us"))
    numbered = (
        steps.sort("step")
        .select(pl.col("step", "start_us").cast(pl.Int64), over_us=over.cast(pl.Int64))
        .with_columns(before=pl.col("step").shift(1), since_us=pl.col("over_us").shift(1))
        .with_row_index("place")
    )
    restarts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for first, at_us in sorted(begun_anew):
        restarts[int(numbered["step"].search_sorted(first, side="left"))].append((first, at_us))
    dropped = sorted(line.at_us for line in events if line.dropped_steps)
    follows = pl.col("step") <= pl.col("before") + 1
    missing = numbered.filter(~follows | (pl.col("place") == 0) | pl.col("place").is_in(list(restarts)))
    rows: list[tuple[Any, ...]] = []
    for place, number, start_us, _, before, since_us in missing.iter_rows():
        first, from_us = (number if before is None else before + 1), min(since_us or 0, start_us)
        if before is None and first_step is not None and first_step < number:
            anew = {at_us for _, at_us in begun_anew}
            there_us = next((line.at_us for line in events if line.present and line.at_us not in anew), 0)
            first, from_us = first_step, min(there_us, start_us)
        for behind, told_us in restarts.get(place, ()) if before is not None or first < number else ():
            to_us = max(from_us, min(start_us, told_us))
            rows.append((first, behind - 1, from_us, to_us, behind, TOLD, told_us))
            first, from_us = behind, to_us
        if first < number:
            at = bisect_left(dropped, from_us)
            kind = DROPPED if at < len(dropped) and dropped[at] <= start_us else LOST
            rows.append((first, number - 1, from_us, start_us, number, kind, None))
    return pl.DataFrame(rows, schema=GAP_SCHEMA, orient="row")


_NAMED = 5


@dataclass
class Problems:
    """Problems of a trace."""

    garbled_lines: list[int] = field(default_factory=list)
    """Line numbers (from 1) of dropped lines that are not valid trace lines."""
    truncated: bool = False
    """Whether the last line was cut off and therefore dropped."""
    unclosed: bool = False
    """Whether the end line is missing, because the engine was killed or is still running."""
    unfinished_requests: int = 0
    """Number of requests that had arrived but not ended at the end of a trace that lacks an end line."""
    missing_steps: int = 0
    """Number of steps that are missing from the file, according to the step numbers."""
    dropped_steps: int = 0
    """Number of missing steps that the recorder dropped, but whose arrivals and departures it recorded."""
    end_missing: bool = False
    """Whether steps after the last one are missing, or could not be rebuilt."""
    first_step: int = 0
    """Number of the first step in the file; earlier steps are in another file or lost."""
    began_unix_us: int | None = None
    """Unix time in microseconds at which the first recorded step began; None if it is the engine's first
    step."""
    gaps: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Gaps that missing parts leave: the first and last missing step, and the beginning and end in
    microseconds on the trace's clock."""
    broken_frames: int = 0
    """Number of frames that cannot be decompressed; each holds about a second of the trace."""
    dropped: list[str] = field(default_factory=list)
    """Sentence for each part, or rest of a part, that is not used."""
    missing_arrivals: int = 0
    """Minimum number of requests whose arrival is not recorded, in a trace that lacks lines."""
    missing_finishes: int = 0
    """Number of departures that are not recorded; requests that are still present do not count."""
    not_rebuilt: list[tuple[int, int]] = field(default_factory=list)
    """First and last number of each range of steps that were dropped because their lines contain changes to
    an unknown step."""
    refused: list[int] = field(default_factory=list)
    """Steps that were dropped because their number appeared before, or their time contradicts the
    neighbouring steps."""
    doubtful: list[tuple[int, int]] = field(default_factory=list)
    """First and last number of each range of steps that were rebuilt from changes but contradict the next
    full line."""

    @property
    def is_incomplete(self) -> bool:
        """Return whether lines are missing between the first and the last one."""
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
        """Whether the file may lack some requests."""
        lost = self.missing_steps > self.dropped_steps or self.garbled_lines or self.not_rebuilt
        return bool(lost or self.first_step or self.missing_arrivals or self.missing_finishes)

    def sentences(self, trace: Path) -> list[str]:
        """Return one sentence per problem."""
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
        """Return the sentences about gaps before the end of the trace; such gaps can affect every result."""
        sentences = self._missing_files(trace)
        if self.garbled_lines:
            count = len(self.garbled_lines)
            lines = ", ".join(str(number) for number in self.garbled_lines[:_NAMED])
            more = ", ..." if count > _NAMED else ""
            dropped = "1 line was" if count == 1 else f"{count:,} lines were"
            sentences.append(f"{trace}: {dropped} not understood and dropped (line {lines}{more})")
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
            began = ""
            if self.began_unix_us is not None:
                began = f" ({datetime.fromtimestamp(self.began_unix_us / 1e6, UTC):%Y-%m-%d %H:%M:%S} UTC)"
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
    """Return the first and last number of each range of consecutive numbers in a sorted list."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def _steps(spans: list[tuple[int, int]]) -> str:
    """Describe some steps by number and count: ``50 steps (12-60, 75)``."""
    count = sum(last - first + 1 for first, last in spans)
    named = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans[:_NAMED])
    more = ", ..." if len(spans) > _NAMED else ""
    return f"{count:,} step{'' if count == 1 else 's'} ({named}{more})"


def _missing(steps: int) -> str:
    return "1 step is missing" if steps == 1 else f"{steps:,} steps are missing"
