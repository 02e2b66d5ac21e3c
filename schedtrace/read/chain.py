"""Reader of step lines: a delta is rebuilt if the step before it is known, and otherwise dropped and counted.

``Chain`` takes the lines in turn; ``Running`` holds the requests of the last step and applies the next line
to them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, pairwise, repeat
from operator import add, attrgetter, ne, not_, or_
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import polars as pl
from msgspec import UNSET
from msgspec.structs import astuple

from schedtrace.model.delta import Delta
from schedtrace.model.trace import Output, RowChanges, ScheduledRequest, Step
from schedtrace.read.lines import AS_READ, LARGEST, WholeLines, decode_line
from schedtrace.read.tables import (
    DETAILS,
    ORDINARY,
    ROWS_AT_ONCE,
    STRETCH_SCHEMA,
    Columns,
    columns_of,
)

T = TypeVar("T")
_BLOCK = 32
"""Number of values compared at once."""
_FEW = 4
"""Number of removed requests up to which finding each in turn is faster than finding all at once."""


class Stretch:
    """Stretch of a request up to the last step; the next step may continue it."""

    __slots__ = ("computed", "details", "first", "is_open", "order", "request_id", "scheduled")

    def __init__(self, request_id: str, order: int) -> None:
        self.request_id, self.order, self.is_open = request_id, order, False

    def begin(self, step: int, computed: int, scheduled: int, details: tuple[Any, ...] = ORDINARY) -> None:
        """Begin a new stretch of the request in this step."""
        self.first, self.computed, self.scheduled, self.details = step, computed, scheduled, details
        self.is_open = True

    def expected(self, step: int) -> int:
        """Return the computed tokens that the request has at this step if its stretch continues."""
        return self.computed + (step - self.first) * self.scheduled


class EndedStretches:
    """Collector of ended stretches.

    Args:
        put: Function that receives tables of stretches. All steps of a table precede those of the next table.
    """

    def __init__(self, put: Callable[[pl.DataFrame], None]) -> None:
        self._put = put
        self._rows: list[tuple[Any, ...]] = []
        self._columns: list[list[Any]] = [[] for _ in STRETCH_SCHEMA]
        self._count = 0

    def add(self, stretches: Sequence[Stretch], step: int, trial: int | None) -> None:
        """Add stretches that end with this step."""
        self._rows += [
            (
                stretch.first,
                step,
                trial,
                stretch.request_id,
                stretch.computed,
                stretch.scheduled,
                *stretch.details,
                stretch.order,
            )
            for stretch in stretches
        ]
        for stretch in stretches:
            stretch.is_open = False

    def add_single(self, step: int, trial: int | None, columns: Sequence[Iterable[Any]]) -> None:
        """Add stretches that consist of this step alone, given as their columns from ``request_id`` on."""
        first = len(self._columns[0])
        for column, values in zip(self._columns[3:], columns, strict=True):
            column.extend(values)
        more = len(self._columns[-1]) - first
        for column, value in zip(self._columns, (step, step, trial), strict=False):
            column.extend([value] * more)

    def is_due(self, rows: int) -> bool:
        """Return whether all stretches must end before a step with ``rows`` rows, to keep tables small."""
        return self._count + rows > ROWS_AT_ONCE

    def count_rows(self, rows: int) -> None:
        """Add a step's number of rows to the count; first make a table if it would become too large."""
        if self.is_due(rows):
            self.flush()
        self._count += rows

    def flush(self) -> None:
        """Make a table of the collected stretches."""
        rows = list(zip(*self._rows, strict=True)) or [()] * len(STRETCH_SCHEMA)
        self._put(pl.concat([_table(rows), _table(self._columns)]).sort("step", "order"))
        self._rows, self._columns, self._count = [], [[] for _ in STRETCH_SCHEMA], 0


def _table(columns: Iterable[Sequence[Any]]) -> pl.DataFrame:
    named = zip(STRETCH_SCHEMA.items(), columns, strict=True)
    return pl.DataFrame([pl.Series(name, column, dtype) for (name, dtype), column in named])


class Got(NamedTuple):
    """Columns of a step, each with one entry per request."""

    ids: tuple[str, ...]
    computed: tuple[int, ...]
    scheduled: tuple[int, ...]
    details: tuple[tuple[Any, ...], ...]
    """Columns of ``DETAILS``; empty if no caller needs them."""
    alone: Sequence[bool]
    """Whether the row is a stretch of its own, for each row; empty if no row is."""

    def without(self, places: Sequence[int]) -> "Got":
        """Return the columns, except the details, without the rows at these ascending indices."""
        ids, computed, scheduled = self.ids, self.computed, self.scheduled
        return Got(
            tuple(without(ids, places)),
            tuple(without(computed, places)),
            tuple(without(scheduled, places)),
            (),
            without(self.alone, places),
        )


def got_in_line(requests: Sequence[Any]) -> Got:
    """Read the columns from a full line."""
    if not requests:
        return Got((), (), (), ((),) * len(ORDINARY), ())
    ids, computed, scheduled, *details = zip(*map(astuple, requests), strict=True)
    alone: list[bool] = []
    for values, ordinary in zip(details, ORDINARY, strict=True):
        if values.count(ordinary) < len(values):
            unusual = list(map(ne, values, repeat(ordinary)))
            alone = list(map(or_, alone, unusual)) if alone else unusual
    return Got(ids, computed, scheduled, tuple(details), alone)


def got_by(rows: Sequence[Stretch], step: int) -> Got:
    """Read a step's columns from the stretches that continue in this step or end with it."""
    return Got(
        tuple([row.request_id for row in rows]),
        tuple([row.expected(step) for row in rows]),
        tuple([row.scheduled for row in rows]),
        (),
        [row.details is not ORDINARY for row in rows],
    )


def not_continued(before: Got, now: Got) -> list[int]:
    """Return the indices of the rows that begin a new stretch, except rows that are a stretch of their own.

    Args:
        before: Columns of the last step, whose requests are also the first ones of this step.
        now: Columns of this step.
    """
    here = len(before.ids)
    if now.alone:
        return [
            place
            for place in compress(range(here), map(not_, now.alone))
            if (before.alone and before.alone[place])
            or before.computed[place] + before.scheduled[place] != now.computed[place]
            or before.scheduled[place] != now.scheduled[place]
        ]
    expected = tuple(map(add, before.computed, before.scheduled))
    places = {*_different(expected, now.computed), *_different(before.scheduled, now.scheduled)}
    return sorted(places.union(compress(range(here), before.alone)))


def removed_rows(before: Sequence[str], now: tuple[str, ...]) -> list[int]:
    """Return the ascending indices of the rows to remove so that the rest are the first rows of ``now``."""
    places: list[int] = []
    left = tuple(before)
    while left != now[: len(left)]:
        if len(places) == _FEW:
            there = set(now)
            places = [place for place, name in enumerate(before) if name not in there]
            left = tuple(without(before, places))
            return places if left == now[: len(left)] else list(range(len(before)))
        place = next(_different(left, now), len(now))
        places.append(place + len(places))
        left = left[:place] + left[place + 1 :]
    return places


def without(items: Sequence[T], places: Sequence[int]) -> list[T]:
    """Return the items that are not at these ascending indices."""
    left: list[T] = []
    for before, place in pairwise([-1, *places, len(items)]):
        left += items[before + 1 : place]
    return left


def _different(first: tuple[Any, ...], second: tuple[Any, ...]) -> Iterator[int]:
    """Yield the indices at which the first sequence differs from the second, which must be at least as long.

    Differences are few, so comparing whole blocks first takes a third of the time.
    """
    for start in range(0, len(first), _BLOCK):
        these, those = first[start : start + _BLOCK], second[start : start + _BLOCK]
        if these != those:
            numbers = enumerate(zip(these, those, strict=False), start)
            yield from [place for place, (here, there) in numbers if here != there]


class Running:
    """Tracker of the scheduled requests from step to step.

    Args:
        put: Function that receives tables of the requests' stretches.
    """

    def __init__(self, put: Callable[[pl.DataFrame], None]) -> None:
        self._ended = EndedStretches(put)
        self._rows: list[Stretch] = []
        self._unsteady: list[Stretch] | None = None
        """Requests whose stretch ends even if the next step gives them one token, as expected; None if not
        determined yet."""
        self._at: tuple[int, int | None] | None = None
        """Step and trial of the latest rows; None if the rows are unknown."""
        self._line: Got | None = None
        """Columns of the latest full line, until ``_take_over`` has copied them to the rows."""
        self._orders = 0
        self._cut = False
        """Whether all stretches have ended, so that the next step begins new ones."""

    @property
    def step(self) -> int | None:
        """Number of the last step; None if its requests are unknown."""
        return self._at and self._at[0]

    @property
    def tokens(self) -> int:
        """Tokens that the last step scheduled."""
        self._take_over()
        return sum(row.scheduled for row in self._rows)

    def request_rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the fields of each request of the last step, in the order of the step's requests."""
        self._take_over()
        if self._at is not None:
            for row in self._rows:
                yield (row.request_id, row.expected(self._at[0]), row.scheduled, *row.details)

    def lose(self) -> None:
        """Forget the last step, because a line after it was lost: the next line cannot continue it."""
        self._end(self._rows)
        self._rows, self._at, self._line = [], None, None

    def cut(self) -> None:
        """End all stretches with the last step and store them; the next step begins new ones."""
        self._take_over()
        self._end(self._rows)
        self._cut = True
        self._ended.flush()

    def full(self, step: int, trial: int | None, requests: Sequence[Any]) -> None:
        """Apply a full line, which lists all requests of its step."""
        if self.step != step - 1:
            self.lose()
        now = got_in_line(requests)
        # The stretches of requests that are no longer scheduled end; all end if the rest changed their order.
        before = self._line or got_by(self._rows, step - 1)
        if removed := removed_rows(before.ids, now.ids):
            self._take_out(removed)
            before = before.without(removed)
        if self._is_cut(trial, len(requests)):
            self._end(self._rows)
            before = before._replace(alone=[True] * len(self._rows))
        self._ended.count_rows(len(requests))  # before anything of this step is added
        begun = not_continued(before, now)
        for place in range(len(self._rows), len(now.ids)):
            self._add(now.ids[place])
            if not now.alone or not now.alone[place]:
                begun.append(place)
        for place in begun:
            self._begin(self._rows[place], step, now.computed[place], now.scheduled[place])
        if now.alone:
            alone = list(compress(self._rows, now.alone))
            self._end(alone)
            columns = [compress(column, now.alone) for column in (*now[:3], *now.details)]
            self._ended.add_single(step, trial, [*columns, [row.order for row in alone]])
        self._at, self._line, self._unsteady, self._cut = (step, trial), now, None, False

    def can_follow(self, changes: Any, total: int, tokens: int | None = None) -> bool:
        """Return whether these changes can lead from the last step to the next.

        Args:
            changes: ``RowChanges`` as read.
            total: Number of requests that the next step must have.
            tokens: Tokens that the next step must have scheduled in total; None for any number.
        """
        leave, changed, added = changes.gone, changes.changed, changes.added
        left = len(self._rows) - len(leave)
        got = left - len(changed)
        for request in (*changed, *added):
            if request.computed_tokens < 0 or request.scheduled_tokens < 0:
                return False
            got += request.scheduled_tokens
        return (
            left + len(added) == total
            and tokens in {None, got}
            and (not leave or _ascend([-1, *leave, len(self._rows)]))
            and (not changed or _ascend([-1, *sorted([request.place for request in changed]), left]))
        )

    def follow(self, step: int, trial: int | None, changes: Any) -> None:
        """Apply changes that ``can_follow`` has accepted, to get the next step."""
        self._take_over()
        cut, unsteady = self._is_cut(trial, len(self._rows)), self._unsteady
        if cut or unsteady is None:
            unsteady = [row for row in self._rows if cut or row.scheduled != 1 or row.details is not ORDINARY]
        taken = self._take_out(changes.gone) if changes.gone else []
        changed = [self._rows[change.place] for change in changes.changed]
        changed_rows = {*taken, *changed}
        for row in unsteady:
            if row not in changed_rows:
                self._begin(row, step, row.expected(step), 1)
        for row, change in zip(changed, changes.changed, strict=True):
            has, gets, details = change.computed_tokens, change.scheduled_tokens, _details(change)
            alike = row.scheduled == gets and row.details is ORDINARY and details is ORDINARY
            if cut or not alike or row.expected(step) != has:
                self._begin(row, step, has, gets, details)
        for request in changes.added:
            changed.append(self._add(request.request_id))
            changed[-1].begin(step, request.computed_tokens, request.scheduled_tokens, _details(request))
        self._at, self._cut = (step, trial), False
        self._unsteady = [row for row in changed if row.scheduled != 1 or row.details is not ORDINARY]
        self._ended.count_rows(len(self._rows))

    def agrees(self, step: int, changes: Any, requests: Sequence[Any]) -> bool:
        """Return whether these changes, applied to the last step, result in these requests."""
        if not self.can_follow(changes, len(requests)):
            return False
        self._take_over()
        left = without(self._rows, changes.gone)
        rows = [(row.request_id, row.expected(step), 1, ORDINARY) for row in left]
        for request in changes.changed:
            same_id = rows[request.place][0]
            rows[request.place] = (
                same_id,
                request.computed_tokens,
                request.scheduled_tokens,
                _details(request),
            )
        return [*rows, *map(_all, changes.added)] == list(map(_all, requests))

    def _is_cut(self, trial: int | None, rows: int) -> bool:
        """Return whether all stretches end before the next step, which has this trial and ``rows`` rows."""
        return self._cut or (self._at is not None and self._at[1] != trial) or self._ended.is_due(rows)

    def _take_out(self, places: Sequence[int]) -> list[Stretch]:
        """Remove the rows at these ascending indices, end their stretches, and return them."""
        taken = [self._rows[place] for place in places]
        self._rows = without(self._rows, places)
        self._end(taken)
        return taken

    def _take_over(self) -> None:
        """Copy the values of rows that are stretches of their own from the latest full line."""
        if self._line is not None and self._at is not None:
            step, line = self._at[0], self._line
            for place in compress(range(len(line.ids)), line.alone):
                details = tuple(values[place] for values in line.details)
                self._rows[place].begin(step, line.computed[place], line.scheduled[place], details)
                self._rows[place].is_open = False  # it has been added already
        self._line = None

    def _add(self, request_id: str) -> Stretch:
        self._orders += 1
        self._rows.append(Stretch(request_id, self._orders))
        return self._rows[-1]

    def _begin(
        self, row: Stretch, step: int, computed: int, scheduled: int, details: tuple[Any, ...] = ORDINARY
    ) -> None:
        self._end([row])
        row.begin(step, computed, scheduled, details)

    def _end(self, rows: Iterable[Stretch]) -> None:
        """End the open stretches of these rows with the last step."""
        if self._at is not None:
            self._ended.add([row for row in rows if row.is_open], *self._at)


def _ascend(places: Sequence[int]) -> bool:
    return all(place < next_place for place, next_place in pairwise(places))


def _details(request: Any) -> tuple[Any, ...]:
    details = tuple([getattr(request, name, value) for name, value in DETAILS.items()])
    return ORDINARY if details == ORDINARY else details


def _all(request: Any) -> tuple[Any, ...]:
    return (request.request_id, request.computed_tokens, request.scheduled_tokens, _details(request))


_AS_EXPECTED = RowChanges()


class Chain:
    """Reader of step lines, in the order of the file; it accepts each step number only once.

    Args:
        put: Function that receives tables of stretches: the tokens that requests got.
    """

    def __init__(self, put: Callable[[pl.DataFrame], None]) -> None:
        self.running = Running(put)
        """Requests of the latest step."""
        self.in_order = True
        """Whether the steps came in the order of their numbers."""
        self.not_rebuilt: list[int] = []
        """Step numbers of deltas that could not be rebuilt: the step before is unknown or does not fit."""
        self.doubtful: list[tuple[int, int]] = []
        """First and last number of each range of rebuilt steps that contradict the full line after them."""
        self.refused: list[int] = []
        """Numbers of refused steps: the number had appeared before, or the step did not start between its
        neighbours."""
        self._numbers: list[int] = []
        """Numbers of the steps accepted since ``forget``, ascending."""
        self._starts: list[int] = []
        """Start times of the steps in ``_numbers``, in the same order."""
        self._forgotten = self._began = -LARGEST
        """Number and start of the last step that ``forget`` dropped."""
        self._taken: list[Any] = []
        """Lines accepted since the last call of ``pop_columns``."""
        self._before: dict[str, Any] = {}
        """Values of the fields in the step before the lines in ``_taken``."""
        self._size = _Size(None, 0, 0, 0)
        """Size of the last accepted step."""
        self._deltas = 0
        """Number of deltas rebuilt since the last full line."""
        self._adds_up = False
        """Whether the tokens of the last full line's requests add up to the budget that the step used."""

    def take(self, line: Any) -> bool:
        """Accept a step if it is new, fits the others and can be rebuilt; return whether it was accepted.

        Args:
            line: A step or delta as read; None stands for a broken line, which may have been a step.
        """
        if line is None:
            self.running.lose()
            return False
        place = bisect_left(self._numbers, line.step)
        is_new = line.step > self._forgotten and line.step not in self._numbers[place : place + 1]
        began_us = self._starts[place - 1] if place else self._began
        next_us = self._starts[place] if place < len(self._starts) else LARGEST
        if not is_new or not began_us <= line.start_us <= next_us:
            self.refused.append(line.step)
            self.running.lose()
            return False
        if hasattr(line, "requests"):
            self._full(line)
        elif not self._continue(line):
            return False
        self._taken.append(line)
        self.in_order &= place == len(self._numbers)
        self._numbers.insert(place, line.step)
        self._starts.insert(place, line.start_us)
        return True

    def pop_columns(self) -> Columns:
        """Return the values of the steps accepted since the last call, in the order of the lines."""
        columns = columns_of(self._taken, self._before)
        if self._taken:
            self._before = {name: values[-1] for name, values in columns.items()}
        self._taken = []
        return columns

    def forget(self) -> None:
        """Forget the numbers of all steps so far, because a growing trace may have no end.

        Later steps with these or lower numbers are refused.
        """
        if self._numbers:
            self._forgotten, self._began = self._numbers[-1], self._starts[-1]
            self._numbers, self._starts = [], []

    def _full(self, line: Any) -> None:
        running, number = self.running, line.step
        continues = self._deltas and line.changes is not None and running.step == number - 1
        if continues and not running.agrees(number, line.changes, line.requests):
            self.doubtful.append((number - self._deltas, number - 1))
        running.full(number, line.trial, line.requests)
        self._deltas, self._size = 0, _Size(*_size_in(line))

    def _continue(self, line: Any) -> bool:
        """Apply a delta to the step before it; return whether that is possible."""
        running, number = self.running, line.step
        changes = _AS_EXPECTED if line.changes is None else line.changes
        if running.step == number - 1:
            if not self._deltas:
                self._adds_up = running.tokens == self._size.used
            both = zip(_size_in(line), self._size, strict=True)
            size = _Size._make(before if value is UNSET else value for value, before in both)
            if running.can_follow(changes, size.total_requests, size.used if self._adds_up else None):
                running.follow(number, size.trial, changes)
                self._deltas, self._size = self._deltas + 1, size
                return True
        running.lose()
        self.not_rebuilt.append(number)
        return False


class _Size(NamedTuple):
    """Fields of a step that are needed to rebuild it from a delta."""

    trial: int | None
    total_requests: int
    token_budget: int
    remaining_budget: int

    @property
    def used(self) -> int:
        """Tokens that the step scheduled."""
        return self.token_budget - self.remaining_budget


_size_in = attrgetter(*_Size._fields)


_STEP: Any = AS_READ[Step]
_DELTA: Any = AS_READ[Delta]
_OUTPUT: Any = AS_READ[Output]
_LATE = tuple(name for name in Output.__struct_fields__ if name != "step")


def expanded_lines(path: Path) -> Iterator[bytes]:
    """Yield a trace's lines without newlines: steps in full and with their output, all other lines unchanged.

    Steps that cannot be rebuilt, broken lines and ``output`` lines are left out.

    Args:
        path: A trace that ``read_trace`` accepts.
    """
    outputs: dict[int, Any] = {}
    for _, read in _lines(path):
        if isinstance(read, _OUTPUT):
            outputs.setdefault(read.step, read)
    chain = Chain(lambda _: None)
    for raw, read in _lines(path):
        if read is None or isinstance(read, (_STEP, _DELTA)):
            if chain.take(read):
                values = {name: column[0] for name, column in chain.pop_columns().items()}
                if (late := outputs.get(values["step"])) is not None:
                    values |= {name: getattr(late, name) for name in _LATE}
                if isinstance(read, _STEP):
                    requests = read.requests
                else:
                    requests = [ScheduledRequest(*row) for row in chain.running.request_rows()]
                yield msgspec.json.encode(Step(**values, requests=requests))
        elif not isinstance(read, _OUTPUT):
            yield raw


def _lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield each line, both as bytes and as decoded; the latter is None if the line is broken."""
    for _, chunk in WholeLines(path):
        yield from ((line, decode_line(line)) for line in chunk if line.strip())
