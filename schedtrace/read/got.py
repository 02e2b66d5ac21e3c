"""What the requests of one step got, as columns: whole steps are compared much faster than row by row."""

from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from operator import add, ne, not_, or_
from typing import Any, NamedTuple

from msgspec.structs import astuple

from schedtrace.read.stretches import ORDINARY, Stretch


class Got(NamedTuple):
    """Of one step, place by place."""

    ids: tuple[str, ...]
    computed: tuple[int, ...]
    scheduled: tuple[int, ...]
    others: tuple[tuple[Any, ...], ...]
    """A column for each of ``OTHERS``; none where nobody asks for them."""
    alone: Sequence[bool]
    """Whether the row is a stretch of its own; empty if none is."""

    def of(self, stay: Sequence[bool]) -> "Got":
        """Of some places, without the other columns."""
        ids = tuple(compress(self.ids, stay))
        computed, scheduled = (tuple(compress(of, stay)) for of in (self.computed, self.scheduled))
        return Got(ids, computed, scheduled, (), list(compress(self.alone, stay)))

    def columns_alone(self) -> list[Iterable[Any]]:
        """The columns of the rows that are stretches of their own."""
        return [compress(column, self.alone) for column in (*self[:3], *self.others)]


def got_in_line(requests: Sequence[Any]) -> Got:
    """From a full line."""
    if not requests:
        return Got((), (), (), ((),) * len(ORDINARY), ())
    ids, computed, scheduled, *others = zip(*map(astuple, requests), strict=True)
    alone: list[bool] = []
    for values, ordinary in zip(others, ORDINARY, strict=True):
        if values.count(ordinary) < len(values):
            unusual = list(map(ne, values, repeat(ordinary)))
            alone = list(map(or_, alone, unusual)) if alone else unusual
    return Got(ids, computed, scheduled, tuple(others), alone)


def got_by(rows: Sequence[Stretch], step: int) -> Got:
    """From stretches that go on in this step or end with it."""
    return Got(
        tuple([row.request_id for row in rows]),
        tuple([row.expected(step) for row in rows]),
        tuple([row.scheduled for row in rows]),
        (),
        [row.others is not ORDINARY for row in rows],
    )


def not_continued(before: Got, now: Got) -> list[int]:
    """Places at which another stretch of several steps begins.

    Args:
        before: Of the last step; its requests are the first of this one, too.
        now: Of this step.
    """
    here = len(before.ids)
    if now.alone:
        places: Iterable[int] = compress(range(here), map(not_, now.alone))
        return [place for place in places if not _continues(before, now, place)]
    expected = map(add, before.computed, before.scheduled)
    others = map(or_, map(ne, expected, now.computed), map(ne, before.scheduled, now.scheduled))
    return list(compress(range(here), map(or_, others, before.alone) if before.alone else others))


def _continues(before: Got, now: Got, place: int) -> bool:
    return (
        not (before.alone and before.alone[place])
        and before.computed[place] + before.scheduled[place] == now.computed[place]
        and before.scheduled[place] == now.scheduled[place]
    )
