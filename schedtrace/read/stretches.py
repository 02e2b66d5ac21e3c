"""What requests got, as stretches of steps: a fraction of the rows that stand in the trace's lines.

A *stretch* is one request over consecutive steps of a trial: in each of them it got the same number of
tokens, and its computed tokens rose by just that number. A step in which it was new, resumed or had drafts
is a stretch of its own. All are cut after so many rows: those of one table explode into bounded memory.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import polars as pl

from schedtrace.model.trace import ScheduledRequest
from schedtrace.read.columns import schema_of

ROWS_AT_ONCE = 2**18
"""All stretches are cut after so many rows."""
SCHEMA: dict[str, Any] = {
    "step": pl.Int64,
    "last_step": pl.Int64,
    "trial": pl.Int64,
    **schema_of(ScheduledRequest),
    "order": pl.Int64,
}
"""Of a table of stretches. ``step`` is the first one, before which ``computed_tokens`` were computed. In a
step's list, the request with the lowest ``order`` stands first."""
OTHERS = {field.name: field.default for field in msgspec.structs.fields(ScheduledRequest)[3:]}
"""The other fields of a row than id and tokens, with their values in a stretch of several steps."""
ORDINARY = tuple(OTHERS.values())


class Stretch:
    """A request of the last step; what it gets next may continue the stretch."""

    __slots__ = ("computed", "first", "is_open", "order", "others", "request_id", "scheduled")

    def __init__(self, request_id: str, order: int) -> None:
        self.request_id, self.order, self.is_open = request_id, order, False

    def begin(self, step: int, computed: int, scheduled: int, others: tuple[Any, ...] = ORDINARY) -> None:
        """The first step of the request's next stretch."""
        self.first, self.computed, self.scheduled, self.others = step, computed, scheduled, others
        self.is_open = True

    def expected(self, step: int) -> int:
        """Computed tokens in a step, if nothing else is told."""
        return self.computed + (step - self.first) * self.scheduled


class Ended:
    """Collects stretches that have ended.

    Args:
        put: Gets a table of them now and then. All steps of a table come before those of the next one.
    """

    def __init__(self, put: Callable[[pl.DataFrame], None]) -> None:
        self._put = put
        self._rows: list[tuple[Any, ...]] = []
        self._columns: list[list[Any]] = [[] for _ in SCHEMA]
        self._count = 0

    def add(self, stretches: Sequence[Stretch], step: int, trial: int | None) -> None:
        """Stretches whose last step this is."""
        self._rows += [
            (one.first, step, trial, one.request_id, one.computed, one.scheduled, *one.others, one.order)
            for one in stretches
        ]
        for one in stretches:
            one.is_open = False

    def add_single(self, step: int, trial: int | None, columns: Sequence[Iterable[Any]]) -> None:
        """Stretches of only this step: their columns from ``request_id`` on."""
        first = len(self._columns[0])
        for column, values in zip(self._columns[3:], columns, strict=True):
            column.extend(values)
        more = len(self._columns[-1]) - first
        for column, value in zip(self._columns, (step, step, trial), strict=False):
            column.extend([value] * more)

    def is_due(self, rows: int) -> bool:
        """Whether all stretches are to end before a step of so many rows."""
        return self._count + rows > ROWS_AT_ONCE

    def count(self, rows: int) -> None:
        """A step of so many rows was there."""
        if self.is_due(rows):
            self.flush()
        self._count += rows

    def flush(self) -> None:
        """Make a table of what there is."""
        rows = list(zip(*self._rows, strict=True)) or [()] * len(SCHEMA)
        self._put(pl.concat([_table(rows), _table(self._columns)]).sort("step", "order"))
        self._rows, self._columns, self._count = [], [[] for _ in SCHEMA], 0


def _table(columns: Iterable[Sequence[Any]]) -> pl.DataFrame:
    named = zip(SCHEMA.items(), columns, strict=True)
    return pl.DataFrame([pl.Series(name, column, dtype) for (name, dtype), column in named])
