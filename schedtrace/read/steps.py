"""The steps of a trace, collected chunk by chunk; a delta is rebuilt if the step before it is known."""

from typing import Any

import msgspec
import polars as pl

from schedtrace.model.trace import RowChanges
from schedtrace.read.columns import FLAT, between_steps, columns_of, entries_of, frame_of
from schedtrace.read.deltas import Values, rebuilt, value, values_of
from schedtrace.read.running import Running
from schedtrace.read.schema import LARGEST
from schedtrace.read.tables import EVENTS, LISTS, STRETCHES, Tables

_AS_EXPECTED = RowChanges()


class Steps:
    """The steps as they come, each number once.

    Args:
        tables: What is nested in them goes there.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._running = Running(lambda table: tables.put({STRETCHES: table}))
        self._frames: list[pl.DataFrame] = []
        self._events: dict[str, list[pl.DataFrame]] = {name: [] for name in EVENTS}
        self._latest = -LARGEST
        self._numbers: set[int] | None = None
        """Of all steps; None: they are in order, so a new one is larger than the latest."""
        self._new: list[Values] = []
        """Of this chunk."""
        self._before: Values = ()
        self._deltas = 0
        """Rebuilt since the last full line."""
        self._adds_up = False
        """The tokens of that line's requests are those that its budget lacks."""
        self.not_rebuilt: list[int] = []
        """Numbers of deltas whose step before is unknown."""
        self.doubtful: list[tuple[int, int]] = []
        """First and last of steps that were rebuilt, and do not lead to the full line after them."""

    @property
    def in_order(self) -> bool:
        """They stood in the order of their numbers."""
        return self._numbers is None

    def add(self, lines: list[Any]) -> None:
        """Add the steps and deltas of a chunk; a None is a line that may have been one of them."""
        self._new = []
        for line in lines:
            if line is None or self._known(line.step):
                self._running.lose()
            elif hasattr(line, "requests"):
                self._add_full(line)
            else:
                self._add_delta(line)
        columns = columns_of(self._new)
        self._tables.put({name: entries_of(columns, name) for name in LISTS})
        self._frames.append(frame_of(columns, FLAT))
        for name, frames in self._events.items():
            frames.append(entries_of(columns, name).drop("start_us"))

    def end(self) -> None:
        """There are no more."""
        self._running.end()

    def frame(self) -> pl.DataFrame:
        """All of them, without their lists."""
        return self._sorted(pl.concat(self._frames))

    def events(self, column: str, idle: list[tuple[int | None, msgspec.Struct]]) -> pl.DataFrame:
        """Arrivals or finishes of the whole trace, those told with a step and those told between."""
        with_steps = self._sorted(pl.concat(self._events[column]))
        return pl.concat([with_steps, between_steps(column, idle)], how="diagonal")

    def _add_full(self, line: Any) -> None:
        rows, number = self._running, line.step
        continues = self._deltas and line.changes is not None and rows.step == number - 1
        if continues and not rows.agrees(number, line.changes, line.requests):
            self.doubtful.append((number - self._deltas, number - 1))
        rows.full(number, line.trial, line.requests)
        self._deltas = 0
        self._append(number, values_of(line))

    def _add_delta(self, line: Any) -> None:
        rows, number = self._running, line.step
        changes = _AS_EXPECTED if line.changes is None else line.changes
        if rows.step == number - 1:
            values = rebuilt(line, self._before)
            if not self._deltas:
                self._adds_up = rows.tokens == _used(self._before)
            used = _used(values) if self._adds_up else None
            if rows.can_follow(changes, value(values, "total_requests"), used):
                rows.follow(number, value(values, "trial"), changes)
                self._deltas += 1
                self._append(number, values)
                return
        rows.lose()
        self.not_rebuilt.append(number)

    def _append(self, number: int, values: Values) -> None:
        self._new.append(values)
        self._before = values
        if self._numbers is not None:
            self._numbers.add(number)
        self._latest = max(self._latest, number)

    def _known(self, number: int) -> bool:
        """Whether a step of this number was there before."""
        if number > self._latest:
            return False
        if self._numbers is None:
            self._numbers = {value(values, "step") for values in self._new}
            self._numbers.update(one for frame in self._frames for one in frame["step"])
        return number in self._numbers

    def _sorted(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame if self.in_order else frame.sort("step", maintain_order=True)


def _used(values: Values) -> int:
    return int(value(values, "token_budget") - value(values, "remaining_budget"))
