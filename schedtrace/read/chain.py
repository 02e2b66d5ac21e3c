"""Expansion of step lines: a delta after a known step is rebuilt, any other is dropped and counted."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from schedtrace.model.trace import Delta, Output, RowChanges, ScheduledRequest, Step
from schedtrace.read.columns import FIELDS, Values, rebuilt, value, values_of
from schedtrace.read.lines import AS_READ, WholeLines, decode_line
from schedtrace.read.running import Running
from schedtrace.read.tables import LARGEST

_AS_EXPECTED = RowChanges()


class Chain:
    """Reader of step lines in the order of the file, which accepts each step number once.

    Args:
        put: Gets tables of what requests got, as stretches.
    """

    def __init__(self, put: Callable[[pl.DataFrame], None]) -> None:
        self.running = Running(put)
        """Requests of the latest step."""
        self.in_order = True
        """Whether the steps came in the order of their numbers."""
        self.not_rebuilt: list[int] = []
        """Numbers of deltas that follow an unknown step."""
        self.doubtful: list[tuple[int, int]] = []
        """First and last of the rebuilt steps that do not lead to the full line after them."""
        self.refused: list[int] = []
        """Numbers of steps that appeared twice, or whose start is not between those of the neighbouring
        steps.
        """
        self._numbers: list[int] = []
        self._starts: list[int] = []
        """Step numbers so far, ascending."""
        self._forgotten = self._began = -LARGEST
        """Number and start of the last step that ``forget`` forgot."""
        self._before: Values = ()
        self._deltas = 0
        """Deltas rebuilt since the last full line."""
        self._adds_up = False
        """Whether the tokens of the last full line's requests equal the budget that the step used."""

    def take(self, line: Any) -> Values | None:
        """Return the values of a line's step; None if it is not new, contradicts others or cannot be rebuilt.

        Args:
            line: A step or delta as read; None: a broken line, which may have been one.
        """
        if line is None:
            self.running.lose()
            return None
        place = bisect_left(self._numbers, line.step)
        if not self._fits(line, place):
            self.refused.append(line.step)
            self.running.lose()
            return None
        values = self._full(line) if hasattr(line, "requests") else self._delta(line)
        if values is not None:
            self._before = values
            self.in_order &= place == len(self._numbers)
            self._numbers.insert(place, line.step)
            self._starts.insert(place, line.start_us)
        return values

    def _fits(self, line: Any, place: int) -> bool:
        """Return whether the step's number is new, and its time between those of the neighbouring steps."""
        if line.step <= self._forgotten or line.step in self._numbers[place : place + 1]:
            return False
        start: int = line.start_us
        before = self._starts[place - 1] if place else self._began
        return before <= start <= (self._starts[place] if place < len(self._starts) else LARGEST)

    def forget(self) -> None:
        """Forget the numbers of the steps so far: a growing trace may have no end. None may appear again."""
        if self._numbers:
            self._forgotten, self._began = self._numbers[-1], self._starts[-1]
            self._numbers, self._starts = [], []

    def _full(self, line: Any) -> Values:
        running, number = self.running, line.step
        continues = self._deltas and line.changes is not None and running.step == number - 1
        if continues and not running.agrees(number, line.changes, line.requests):
            self.doubtful.append((number - self._deltas, number - 1))
        running.full(number, line.trial, line.requests)
        self._deltas = 0
        values: Values = values_of(line)
        return values

    def _delta(self, line: Any) -> Values | None:
        running, number = self.running, line.step
        changes = _AS_EXPECTED if line.changes is None else line.changes
        if running.step == number - 1:
            values = rebuilt(line, self._before)
            if not self._deltas:
                self._adds_up = running.tokens == _used(self._before)
            used = _used(values) if self._adds_up else None
            if running.can_follow(changes, value(values, "total_requests"), used):
                running.follow(number, value(values, "trial"), changes)
                self._deltas += 1
                return values
        running.lose()
        self.not_rebuilt.append(number)
        return None


def _used(values: Values) -> int:
    return int(value(values, "token_budget") - value(values, "remaining_budget"))


_STEP: Any = AS_READ[Step]
_DELTA: Any = AS_READ[Delta]
_OUTPUT: Any = AS_READ[Output]
_LATE = tuple(name for name in Output.__struct_fields__ if name != "step")


def expanded_lines(path: Path) -> Iterator[bytes]:
    """Yield a trace's lines without newlines: steps in full with their output, all other lines unchanged.

    Steps that cannot be rebuilt, broken lines and ``output`` lines are left out.

    Args:
        path: A trace that ``read_trace`` accepts.

    Raises:
        InputError: If it cannot be read.
    """
    outputs: dict[int, Any] = {}
    for _, read in _lines(path):
        if isinstance(read, _OUTPUT):
            outputs.setdefault(read.step, read)
    chain = Chain(lambda _: None)
    for raw, read in _lines(path):
        if read is None or isinstance(read, (_STEP, _DELTA)):
            values = chain.take(read)
            if values is not None:
                yield _full_line(dict(zip(FIELDS, values, strict=True)), read, chain, outputs)
        elif not isinstance(read, _OUTPUT):
            yield raw


def _lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield each line as it is and as read; None if it is broken."""
    for _, chunk in WholeLines(path):
        yield from ((line, decode_line(line)) for line in chunk if line.strip())


def _full_line(values: dict[str, Any], read: Any, chain: Chain, outputs: dict[int, Any]) -> bytes:
    late = outputs.get(read.step)
    if late is not None:
        values |= {name: getattr(late, name) for name in _LATE}
    if isinstance(read, _STEP):
        requests = read.requests
    else:
        requests = [ScheduledRequest(*row) for row in chain.running.rows()]
    return msgspec.json.encode(Step(**values, requests=requests))
