"""The steps of a trace and what is nested in them, collected chunk by chunk."""

from typing import Any

import msgspec
import polars as pl

from schedtrace.read.chain import Chain
from schedtrace.read.columns import FLAT, between_steps, columns_of, entries_of, frame_of
from schedtrace.read.tables import EVENTS, LISTS, STRETCHES, Tables


class Steps:
    """The steps as they come, each number once.

    Args:
        tables: What is nested in them goes there.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.chain = Chain(lambda table: tables.put({STRETCHES: table}))
        self._frames: list[pl.DataFrame] = []
        self._events: dict[str, list[pl.DataFrame]] = {name: [] for name in EVENTS}

    def add(self, lines: list[Any]) -> None:
        """Add the steps and deltas of a chunk; a None is a line that may have been one of them."""
        taken = map(self.chain.take, lines)
        columns = columns_of([values for values in taken if values is not None])
        self._tables.put({name: entries_of(columns, name) for name in LISTS})
        self._frames.append(frame_of(columns, FLAT))
        for name, frames in self._events.items():
            frames.append(entries_of(columns, name).drop("start_us"))

    def end(self) -> None:
        """There are no more."""
        self.chain.running.end()
        self._tables.finish()

    def frame(self) -> pl.DataFrame:
        """All of them, without their lists."""
        return self._sorted(pl.concat(self._frames))

    def events(self, column: str, idle: list[tuple[int | None, msgspec.Struct]]) -> pl.DataFrame:
        """Arrivals or finishes of the whole trace, those told with a step and those told between."""
        with_steps = self._sorted(pl.concat(self._events[column]))
        return pl.concat([with_steps, between_steps(column, idle)], how="diagonal")

    def _sorted(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame if self.chain.in_order else frame.sort("step", maintain_order=True)
