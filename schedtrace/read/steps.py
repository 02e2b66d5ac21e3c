"""The steps of a trace, collected chunk by chunk."""

from itertools import pairwise
from typing import Any

import msgspec
import polars as pl

from schedtrace.read.columns import between_steps, entries_of, steps_of
from schedtrace.read.schema import LARGEST
from schedtrace.read.tables import LARGE, Tables


class Steps:
    """The steps as they come, each number once.

    Args:
        tables: What is nested in them goes there.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._frames: list[pl.DataFrame] = []
        self._events: dict[str, list[pl.DataFrame]] = {"arrived": [], "finished": []}
        self._latest = -LARGEST
        self.in_order = True
        """They stood in the order of their numbers."""

    def add(self, steps: list[Any]) -> None:
        """Add the steps of a chunk."""
        numbers = [self._latest, *(step.step for step in steps)]
        if any(one >= other for one, other in pairwise(numbers)):
            self.in_order = False
            steps = self._new_ones(steps)
        self._latest = max(numbers)
        self._tables.put({name: entries_of(steps, name) for name in LARGE})
        self._frames.append(steps_of(steps))
        for name, frames in self._events.items():
            frames.append(entries_of(steps, name).drop("start_us"))

    def _new_ones(self, steps: list[Any]) -> list[Any]:
        known = {number for frame in self._frames for number in frame["step"]}
        unique: dict[int, Any] = {}
        for step in steps:
            if step.step not in known:
                unique.setdefault(step.step, step)
        return list(unique.values())

    def frame(self) -> pl.DataFrame:
        """All of them, without their lists."""
        return self._sorted(pl.concat(self._frames))

    def events(self, column: str, idle: list[tuple[int | None, msgspec.Struct]]) -> pl.DataFrame:
        """Arrivals or finishes of the whole trace, those told with a step and those told between."""
        with_steps = self._sorted(pl.concat(self._events[column]))
        return pl.concat([with_steps, between_steps(column, idle)], how="diagonal")

    def _sorted(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame if self.in_order else frame.sort("step", maintain_order=True)
