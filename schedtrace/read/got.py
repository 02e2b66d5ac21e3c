"""What the requests of one step got, as columns: whole steps are compared much faster than row by row."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, pairwise, repeat
from operator import add, ne, not_, or_
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import astuple

from schedtrace.read.stretches import ORDINARY, Stretch

T = TypeVar("T")
_BLOCK = 32
"""Values compared at once."""
_FEW = 4
"""So many are looked for one by one, which is faster than to look for all."""


class Got(NamedTuple):
    """Of one step, place by place."""

    ids: tuple[str, ...]
    computed: tuple[int, ...]
    scheduled: tuple[int, ...]
    others: tuple[tuple[Any, ...], ...]
    """A column for each of ``OTHERS``; none where nobody asks for them."""
    alone: Sequence[bool]
    """Whether the row is a stretch of its own; empty if none is."""

    def without(self, places: Sequence[int]) -> "Got":
        """Of the other places than these ascending ones, without the other columns."""
        ids, computed, scheduled = self.ids, self.computed, self.scheduled
        return Got(
            tuple(without(ids, places)),
            tuple(without(computed, places)),
            tuple(without(scheduled, places)),
            (),
            without(self.alone, places),
        )

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
    expected = tuple(map(add, before.computed, before.scheduled))
    places = {*_different(expected, now.computed), *_different(before.scheduled, now.scheduled)}
    return sorted(places.union(compress(range(here), before.alone)))


def gone(before: Sequence[str], now: tuple[str, ...]) -> list[int]:
    """Ascending places of those who have to be taken out, so that the others are the first ones now."""
    places: list[int] = []
    kept = tuple(before)
    while kept != now[: len(kept)]:
        if len(places) == _FEW:
            return _all_gone(before, now)
        place = next(_different(kept, now), len(now))
        places.append(place + len(places))
        kept = kept[:place] + kept[place + 1 :]
    return places


def _all_gone(before: Sequence[str], now: tuple[str, ...]) -> list[int]:
    there = set(now)
    places = [place for place, name in enumerate(before) if name not in there]
    kept = tuple(without(before, places))
    return places if kept == now[: len(kept)] else list(range(len(before)))


def without(of: Sequence[T], places: Sequence[int]) -> list[T]:
    """The others than those at these ascending places."""
    others: list[T] = []
    for before, place in pairwise([-1, *places, len(of)]):
        others += of[before + 1 : place]
    return others


def _different(one: tuple[Any, ...], other: tuple[Any, ...]) -> Iterator[int]:
    """Places where the first differs from the second, which is as long or longer.

    Mostly there are few: whole blocks are compared, which takes a third of the time.
    """
    for start in range(0, len(one), _BLOCK):
        these, those = one[start : start + _BLOCK], other[start : start + _BLOCK]
        if these != those:
            numbers = enumerate(zip(these, those, strict=False), start)
            yield from [place for place, (here, there) in numbers if here != there]


def _continues(before: Got, now: Got, place: int) -> bool:
    return (
        not (before.alone and before.alone[place])
        and before.computed[place] + before.scheduled[place] == now.computed[place]
        and before.scheduled[place] == now.scheduled[place]
    )
