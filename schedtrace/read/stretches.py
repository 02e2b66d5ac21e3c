"""What requests got, as stretches of steps: a fraction of the rows that stand in the trace's lines.

A *stretch* is one request over consecutive steps of a trial: in each of them it got the same number of
tokens, and its computed tokens rose by just that number. A step in which it was new, resumed or had drafts is a
stretch of its own. All are cut after so many rows, so that the stretches of one table explode into bounded memory.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import polars as pl

from schedtrace.model.trace import ScheduledRequest
from schedtrace.read.schema import defaults_of, schema_of

ROWS_AT_ONCE = 2**18
"""Stretches are cut after so many rows."""
SCHEMA: dict[str, Any] = {
    "step": pl.Int64,
    "last_step": pl.Int64,
    "trial": pl.Int64,
    **schema_of(ScheduledRequest),
    "order": pl.Int64,
}
"""Of a table of stretches. ``step`` is the first one, before which ``computed_tokens`` were computed. In a
step's list, the request with the lowest ``order`` stands first."""
_COUNTED = ("request_id", "computed_tokens", "scheduled_tokens")
_ELSE = {name: value for name, value in defaults_of(ScheduledRequest).items() if name not in _COUNTED}
"""The other fields of a row, with their values in a stretch of several steps."""
_ORDINARY = tuple(_ELSE.values())
_id, _computed, _scheduled = (attrgetter(name) for name in _COUNTED)


class _Row:
    """A request of the last step, with its stretch, which is still open."""

    __slots__ = ("computed", "first", "more", "order", "request_id", "scheduled")

    def __init__(self, request_id: str, order: int) -> None:
        self.request_id, self.order = request_id, order

    def begin(self, step: int, computed: int, scheduled: int, more: tuple[Any, ...]) -> None:
        """A stretch begins in this step."""
        self.first, self.computed, self.scheduled, self.more = step, computed, scheduled, more

    def expected(self, step: int) -> int:
        """Its computed tokens in the step after the last."""
        return self.computed + (step - self.first) * self.scheduled

    def steady(self) -> bool:
        """The stretch goes on if it gets what is expected."""
        return self.scheduled == 1 and self.more is _ORDINARY


class Stretches:
    """Collects stretches step by step.

    Args:
        put: Gets a table of them now and then. All steps of a table stand before those of the next one.
    """

    def __init__(self, put: Callable[[pl.DataFrame], None]) -> None:
        self._put = put
        self._rows: list[_Row] = []
        self._unsteady: list[_Row] | None = None
        """Those of them that are not steady; None: not looked for yet."""
        self._at: tuple[int, int | None] | None = None
        """Step and trial of them; None: unknown."""
        self._done: list[tuple[Any, ...]] = []
        self._count = self._orders = 0

    @property
    def step(self) -> int | None:
        """The last step; None where its rows are unknown."""
        return self._at and self._at[0]

    @property
    def tokens(self) -> int:
        """That the last step scheduled."""
        return sum(row.scheduled for row in self._rows)

    def lose(self) -> None:
        """Nothing can follow the last step."""
        self._end_all(self._rows)
        self._rows, self._at = [], None

    def full(self, step: int, trial: int | None, requests: Sequence[Any]) -> None:
        """A step with all its rows."""
        if self.step != step - 1:
            self.lose()
        cut = self._is_cut(trial, len(requests))
        ids, computed, scheduled = (list(map(get, requests)) for get in (_id, _computed, _scheduled))
        self._match(ids)
        for row, had, got in zip(self._rows, computed, scheduled, strict=False):
            if cut or row.scheduled != got or row.more is not _ORDINARY or row.expected(step) != had:
                self._begin(row, step, had, got, _ORDINARY)
        for place in range(len(self._rows), len(ids)):
            self._add(ids[place]).begin(step, computed[place], scheduled[place], _ORDINARY)
        for place in _special(requests):
            more = _more(requests[place])
            self._begin(self._rows[place], step, computed[place], scheduled[place], more)
        self._at, self._unsteady = (step, trial), None
        self._counted(len(requests))

    def possible(self, changes: Any, total: int, tokens: int | None = None) -> bool:
        """Whether these changes can follow the last step.

        Args:
            changes: ``RowChanges`` as read.
            total: Requests that there must be after them.
            tokens: Tokens that these must have got together; None: any.
        """
        left = len(self._rows) - len(changes.gone)
        places = [change.place for change in changes.changed]
        told = [*changes.changed, *changes.added]
        return (
            left + len(changes.added) == total
            and all(one < other for one, other in pairwise([-1, *changes.gone, len(self._rows)]))
            and len(set(places)) == len(places)
            and all(0 <= place < left for place in places)
            and all(one.computed_tokens >= 0 and one.scheduled_tokens >= 0 for one in told)
            and tokens in {None, left - len(places) + sum(map(_scheduled, told))}
        )

    def follow(self, step: int, trial: int | None, changes: Any) -> None:
        """The next step, told by possible changes."""
        cut, unsteady = self._is_cut(trial, len(self._rows)), self._unsteady
        if cut or unsteady is None:
            unsteady = [row for row in self._rows if cut or not row.steady()]
        gone, self._rows = _apart(self._rows, changes.gone)
        self._end_all(gone)
        changed = [(self._rows[change.place], change) for change in changes.changed]
        told = {*gone, *(row for row, _ in changed)}
        for row in unsteady:
            if row not in told:
                self._begin(row, step, row.expected(step), 1, _ORDINARY)
        for row, change in changed:
            had, got, more = change.computed_tokens, change.scheduled_tokens, _more(change)
            same = row.scheduled == got and row.more is more is _ORDINARY and row.expected(step) == had
            if cut or not same:
                self._begin(row, step, had, got, more)
        added = [self._add(one.request_id) for one in changes.added]
        for row, one in zip(added, changes.added, strict=True):
            row.begin(step, one.computed_tokens, one.scheduled_tokens, _more(one))
        self._at = (step, trial)
        self._unsteady = [row for row in (*(row for row, _ in changed), *added) if not row.steady()]
        self._counted(len(self._rows))

    def agrees(self, step: int, changes: Any, requests: Sequence[Any]) -> bool:
        """Whether these changes lead from the last step to these rows."""
        if not self.possible(changes, len(requests)):
            return False
        _, kept = _apart(self._rows, changes.gone)
        rows = [(row.request_id, row.expected(step), 1, _ORDINARY) for row in kept]
        for one in changes.changed:
            name = rows[one.place][0]
            rows[one.place] = (name, one.computed_tokens, one.scheduled_tokens, _more(one))
        return [*rows, *map(_all_of, changes.added)] == list(map(_all_of, requests))

    def end(self) -> None:
        """No more steps."""
        self.lose()
        self._flush()

    def _is_cut(self, trial: int | None, rows: int) -> bool:
        """Whether all stretches end before the next step, which has so many rows."""
        return (self._at is not None and self._at[1] != trial) or self._count + rows > ROWS_AT_ONCE

    def _counted(self, rows: int) -> None:
        if self._count + rows > ROWS_AT_ONCE:
            self._flush()
        self._count += rows

    def _match(self, ids: list[str]) -> None:
        """End the stretches of those who are not there any more; of all if the others changed their order."""
        if [row.request_id for row in self._rows] == ids[: len(self._rows)]:
            return
        there = set(ids)
        kept = [row for row in self._rows if row.request_id in there]
        if [row.request_id for row in kept] != ids[: len(kept)]:
            kept = []
        left = set(kept)
        self._end_all(row for row in self._rows if row not in left)
        self._rows = kept

    def _add(self, request_id: str) -> _Row:
        self._orders += 1
        self._rows.append(_Row(request_id, self._orders))
        return self._rows[-1]

    def _begin(self, row: _Row, step: int, computed: int, scheduled: int, more: tuple[Any, ...]) -> None:
        if row.first < step:
            self._end_all([row])
        row.begin(step, computed, scheduled, more)

    def _end_all(self, rows: Iterable[_Row]) -> None:
        """Their stretches end with the last step."""
        if self._at is not None:
            step, trial = self._at
            self._done += [
                (row.first, step, trial, row.request_id, row.computed, row.scheduled, *row.more, row.order)
                for row in rows
            ]

    def _flush(self) -> None:
        columns = zip(*self._done, strict=True) if self._done else [()] * len(SCHEMA)
        series = [
            pl.Series(name, column, dtype)
            for (name, dtype), column in zip(SCHEMA.items(), columns, strict=True)
        ]
        self._put(pl.DataFrame(series).sort("step", "order"))
        self._done, self._count = [], 0


def _apart(rows: list[_Row], places: Sequence[int]) -> tuple[list[_Row], list[_Row]]:
    """Those at these ascending places, and the others."""
    if not places:
        return [], rows
    others: list[_Row] = []
    for before, place in pairwise([-1, *places, len(rows)]):
        others += rows[before + 1 : place]
    return [rows[place] for place in places], others


def _special(requests: Sequence[Any]) -> list[int]:
    """Places of the rows that are stretches of their own."""
    found: set[int] = set()
    for name, value in _ELSE.items():
        values = list(map(attrgetter(name), requests))
        if values.count(value) < len(values):
            found.update(place for place, one in enumerate(values) if one != value)
    return sorted(found)


def _more(one: Any) -> tuple[Any, ...]:
    more = tuple(getattr(one, name, value) for name, value in _ELSE.items())
    return _ORDINARY if more == _ORDINARY else more


def _all_of(one: Any) -> tuple[Any, ...]:
    return (one.request_id, one.computed_tokens, one.scheduled_tokens, _more(one))
