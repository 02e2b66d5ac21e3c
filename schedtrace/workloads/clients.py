"""Client patterns: rules for when clients send the next request, fitted to arrivals and answers.

A replay at the recorded times is wrong for clients that wait for answers, because they send more to an engine
that answers sooner. A pattern is a rate at which the next request arrives, given all earlier events. The fit
learns the rate from half of the load and predicts the arrivals of the second half, and vice versa. A pattern
is accepted if it predicts the arrivals better than their own rhythm does; if no pattern does, requests arrive
independently of answers.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple, Self

from schedtrace.model.message import Message
from schedtrace.model.say import say

Pattern = Literal["loop", "barrier", "limit", "sessions", "retries"]
"""Name of a pattern. ``loop``: each of N clients keeps one request open. ``barrier``: clients send N requests
at once, and the next N when all are done. ``limit``: a queue in front of the engine keeps at most N requests
open. ``sessions``: N users think between an answer and their next request. ``retries``: a request follows an
aborted request."""
FEWEST = 8
"""Minimum number of arrivals that can show a pattern."""
MOST = 4000
"""Maximum number of arrivals of a load that the fit uses."""
BETTER_NATS = 7.0
"""Minimum gain in the log-likelihood of held-out arrivals over a simpler pattern: odds of about 1000 to 1."""
MOST_NATS = 3.0
"""Maximum gain or loss that a single arrival contributes, because a single surprise is not a pattern."""
SAME_FRAC = 0.01
"""Resolution of times and ages, as a share of the median end-to-end latency."""
AT_ONCE_FRAC = 0.05
"""Maximum think time, as a share of the median end-to-end latency, that counts as sending at once. Even very
regular arrivals do not coincide so closely with answers by chance."""
MOSTLY_AT_ONCE_FRAC = 0.25
"""Maximum think time of nine in ten requests of clients that send at once, as a share of the median
end-to-end latency."""
FEWEST_EVENTS = 4
"""Minimum number of rounds of a barrier, or of aborted requests, that can show a pattern."""
FULL_FRAC = 0.15
"""Minimum share of requests that arrive at an answer, and minimum share of those that arrive later, if there
is a queue in front of the engine."""
TIMES_OPEN = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Numbers of sessions to try, as multiples of the largest number of open requests."""
MOST_BINS = 20
"""Maximum number of age bins, each with its own rate, per state."""
PRIOR = 0.5
"""Number of imagined arrivals, at the overall rate, with which the fit smooths each age bin of a state."""


@dataclass(frozen=True)
class Clients:
    """Clients whose requests follow answers."""

    pattern: Pattern
    clients: int
    """Number that belongs to the pattern: clients of a loop, sessions, requests in a barrier's round,
    requests that a limit keeps open, or retries."""
    think_us: tuple[float, ...]
    """Think times in microseconds, in order. A think time begins at the n-th answer for a loop or a limit, at
    the end of a round for a barrier, and at the abort for retries; for sessions, only the mean is known."""

    @property
    def is_replayed(self) -> bool:
        """Whether a replay sends the requests in response to its own answers."""
        return self.pattern in ("loop", "barrier")

    @property
    def note(self) -> Message:
        """Sentence about how the load is replayed."""
        thinks = round(median(self.think_us)) if self.think_us else None
        if not self.is_replayed:
            return say(
                "Requests follow answers ({pattern}) but are replayed at their recorded times: how they "
                "would follow other answers is not predicted.",
                pattern=PATTERNS[self.pattern],
            )
        if self.pattern == "barrier":
            return say(
                "The load comes in rounds of {clients:n request}; each is sent {thinks:us} (median) after "
                "the last answer of the round before, as recorded.",
                self,
                thinks=thinks,
            )
        if thinks is None:
            return say("The load is that of {clients:n client} with one request open each.", self)
        return say(
            "The load is a closed loop: {clients:n client} with one request open each, sent "
            "{thinks:us} (median) after the previous answer, as recorded.",
            self,
            thinks=thinks,
        )


PATTERNS = {"limit": "a queue in front", "sessions": "sessions with think time", "retries": "retries"}
"""Descriptions of the patterns that a replay does not follow."""


def clients_of(
    arrived_us: Sequence[float], answered_us: Sequence[float | None], aborted: Sequence[bool] = ()
) -> Clients | None:
    """Return the pattern that predicts the arrivals best; None if they do not depend on answers.

    Args:
        arrived_us: Times at which requests were sent, to any engine and in any order.
        answered_us: Times at which these requests were answered or aborted, in the same order; None: never.
        aborted: Whether a client aborted each request, in the same order; empty if no request was aborted.
    """
    history = _History.from_times(arrived_us, answered_us, aborted)
    if len(history.sent_us) - history.most_open < FEWEST:
        return None
    if history.is_at_once("loop"):
        return _clients("loop", history)
    best: Pattern | None = None
    best_nats = max((history.nats([variant]) for variant in _OWN_TIMES), key=lambda nats: nats.sum())
    for pattern, variants in _VARIANTS.items():
        if not history.allows(pattern):
            continue
        nats = history.nats(variants)
        better = float((nats - best_nats).clip(-MOST_NATS, MOST_NATS).sum())
        if better > (-BETTER_NATS if best is None and history.is_at_once(pattern) else BETTER_NATS):
            best, best_nats = pattern, nats
    return None if best is None else _clients(best, history)


def as_closed_loop(arrived_us: Sequence[float], answered_us: Sequence[float | None], clients: int) -> Clients:
    """Return a closed loop of this many clients, whatever pattern the load's times show."""
    return Clients("loop", clients, _History.from_times(arrived_us, answered_us).thinks_us(clients))


class _Spell(NamedTuple):
    """Period in which the next request may arrive, at a rate that depends on a state and its age."""

    arrival: int
    """Place of the next request among the arrivals."""
    state: int
    """State of the client or queue, such as ``_BEFORE``."""
    begin_us: float
    """Age of the state at the start of the period, in microseconds."""
    end_us: float
    """Age of the state at the end of the period, in microseconds."""
    comes: bool
    """Whether the request arrives at the end of the period."""
    weight: float = 1.0
    """Number of clients that may send the request."""


_BEFORE, _AFTER, _CLOCK, _STEADY, _NEXT = range(5)
"""States: before the answer that the next request waits for; after that answer; since the previous request;
at a constant rate, whatever the age; after a complete burst or round, when the next may begin."""


@dataclass(frozen=True)
class _History:
    """Arrivals and answers of a load, each in order of time and in microseconds."""

    sent_us: list[float]
    """Times of the arrivals."""
    gone_us: list[float]
    """Times of the answers and aborts."""
    ends_us: list[float]
    """Time of each request's answer or abort, in the order of ``sent_us``; infinite: never."""
    gave_up_us: list[float]
    """Times at which clients aborted requests."""
    took_us: float
    """Median end-to-end latency in microseconds."""

    @classmethod
    def from_times(
        cls, arrived_us: Sequence[float], answered_us: Sequence[float | None], aborted: Sequence[bool] = ()
    ) -> Self:
        pairs = sorted(
            (sent, math.inf if gone is None else gone)
            for sent, gone in zip(arrived_us, answered_us, strict=True)
        )
        given_up = [
            us for us, gave_up in zip(answered_us, aborted, strict=False) if gave_up and us is not None
        ]
        gone = sorted(us for _, us in pairs if us < math.inf)
        return cls(
            [sent for sent, _ in pairs],
            gone,
            [us for _, us in pairs],
            sorted(given_up),
            median([us - sent for sent, us in pairs if us < math.inf] or [0.0]),
        )

    @cached_property
    def most_open(self) -> int:
        """Maximum number of open requests; a request that arrives at an answer replaces the answered one."""
        return max(
            (number - bisect_right(self.gone_us, us) for number, us in enumerate(self.sent_us, 1)), default=0
        )

    @property
    def judged_places(self) -> range:
        """Places of the arrivals by which patterns are judged: those that may follow an answer."""
        return range(max(1, self.most_open), min(len(self.sent_us), max(1, self.most_open) + MOST))

    @cached_property
    def done_us(self) -> list[float]:
        """Time, for each place, at which all requests up to this place were answered or aborted."""
        return list(accumulate(self.ends_us, max))

    @cached_property
    def round_starts(self) -> list[int]:
        """Places of the requests that arrived while no request was open."""
        first_us, *later_us = self.sent_us
        found_idle = [place for place, us in enumerate(later_us, 1) if self.done_us[place - 1] <= us]
        return [0, *found_idle] if first_us is not None else []

    def thinks_us(self, clients: int) -> tuple[float, ...]:
        """Return the microseconds from the n-th answer to the n-th request that may follow an answer."""
        lags = zip(self.sent_us[clients:], self.gone_us, strict=False)
        return tuple(max(0.0, sent - gone) for sent, gone in lags)

    def allows(self, pattern: Pattern) -> bool:
        """Return whether the events that distinguish a pattern from simpler ones occurred repeatedly."""
        if pattern == "barrier":
            rounds = [self.ends_us[start:end] for start, end in pairwise(self.round_starts)]
            waited_us = [max(ends_us) - min(ends_us) for ends_us in rounds]
            if len(rounds) < FEWEST_EVENTS - 1 or _size(self.round_starts) <= 1:
                return False
            if median(waited_us) > AT_ONCE_FRAC * self.took_us:
                return True
            # All requests of a round are answered together, so a loop sends them together if each client
            # thinks equally long every time; a barrier's pauses vary by more than twice the time to send one.
            spans_us = [
                self.sent_us[end - 1] - self.sent_us[start] for start, end in pairwise(self.round_starts)
            ]
            low_us, _, high_us = quantiles(self.round_lags_us, n=4)
            return median(spans_us) < (high_us - low_us) / 2
        if pattern == "limit":
            lags_us = self.thinks_us(self.most_open)
            at_once = sum(lag <= AT_ONCE_FRAC * self.took_us for lag in lags_us)
            return FULL_FRAC * len(lags_us) <= at_once <= (1 - FULL_FRAC) * len(lags_us)
        if pattern == "sessions":  # simultaneous requests have no think times of their own
            return median(us - before for _, before, us in _gaps(self)) > SAME_FRAC * self.took_us
        return pattern != "retries" or len(self.gave_up_us) >= FEWEST_EVENTS

    @property
    def round_lags_us(self) -> list[float]:
        """Times from the end of each round to the start of the next, in microseconds."""
        return [self.sent_us[start] - self.done_us[start - 1] for start in self.round_starts[1:]]

    def is_at_once(self, pattern: Pattern) -> bool:
        """Return whether nearly all requests came right after the answer that a loop or barrier waits for."""
        lags_us = {"loop": self.thinks_us(self.most_open), "barrier": self.round_lags_us}.get(pattern, ())
        if len(lags_us) < FEWEST_EVENTS:
            return False
        nine_tenths = quantiles(lags_us, n=10, method="inclusive")[-1]
        return (
            median(lags_us) <= AT_ONCE_FRAC * self.took_us
            and nine_tenths <= MOSTLY_AT_ONCE_FRAC * self.took_us
        )

    def follows(self, clients: int, place: int) -> float:
        """Return the time of the answer after which a client may send a request; infinite: never."""
        nth = place - clients
        return self.gone_us[nth] if nth < len(self.gone_us) else math.inf

    def nats(self, variants: "Sequence[_Variant]") -> Any:
        """Return the log-likelihood of each arrival under a pattern fitted to the other half of the load.

        Args:
            variants: Forms of the pattern; each fit uses the form that suits its half of the load best.
        """
        import numpy as np  # noqa: PLC0415  # it takes a quarter of a second to load

        tables = [np.array([*variant(self)]) for variant in variants]
        middle = self.judged_places.start + len(self.judged_places) // 2
        halves = []
        for first in (True, False):
            fits = []
            for table in tables:
                held_out = (table[:, 0] < middle) == first
                rates = _Rates(table[~held_out], SAME_FRAC * self.took_us)
                fits.append((rates.nats(table[~held_out]).sum(), rates, table[held_out]))
            _, rates, spells = max(fits, key=lambda fit: fit[0])
            of_spells = rates.nats(spells)
            places = spells[:, 0].astype(int) - int(spells[0, 0])
            halves.append(np.bincount(places, of_spells))
        return np.concatenate(halves)


_Variant = Callable[[_History], Iterator[_Spell]]
"""Form of a pattern, as a function that yields the spells of each predicted arrival."""


class _Rates:
    """Rates of arrivals by state and age, learned from spells.

    Args:
        spells: A row per spell, with the columns of ``_Spell``.
        same_us: Smallest difference in age that is resolved, in microseconds.
    """

    def __init__(self, spells: Any, same_us: float) -> None:
        self._same_us = max(1.0, same_us)
        times_us = spells[:, 5] * (spells[:, 3] - spells[:, 2])
        self._overall = max(spells[:, 4].sum(), PRIOR) / max(times_us.sum(), self._same_us)
        self._learned = {
            int(state): self._learn(spells[spells[:, 1] == state]) for state in {*spells[:, 1].tolist()}
        }

    def _learn(self, spells: Any) -> tuple[Any, Any]:
        """Return the edges of a state's age bins, and the arrivals per microsecond in each bin."""
        import numpy as np  # noqa: PLC0415  # as above

        edges = np.array([0.0, np.inf])
        ages = spells[spells[:, 4] > 0, 3]
        if len(ages) and spells[0, 1] != _STEADY:
            knots = np.quantile(ages, np.linspace(0, 1, min(MOST_BINS, 2 + math.isqrt(len(ages)))))
            half = self._same_us / 2
            inner = np.unique(np.concatenate([knots - half, knots + half]))
            inner = inner[inner > 0]
            apart = np.diff(inner, prepend=-np.inf) > half / 2
            edges = np.concatenate([[0.0], inner[apart], [np.inf]])
        exposed_us = _overlaps(spells, edges).sum(axis=0)
        arrived = np.histogram(ages, edges)[0]
        mean = (arrived.sum() + PRIOR) / (exposed_us.sum() + PRIOR / self._overall)
        rates = (arrived + PRIOR) / (exposed_us + PRIOR * np.minimum(np.diff(edges), 1 / mean))
        return edges, np.minimum(rates, 10 / self._same_us)  # times are not resolved better than that

    def nats(self, spells: Any) -> Any:
        """Return the log-likelihood of each spell."""
        import numpy as np  # noqa: PLC0415  # as above

        nats = np.zeros(len(spells))
        for state in {*spells[:, 1].tolist()}:
            unseen = np.array([0.0, np.inf]), np.array([self._overall])
            edges, rates = self._learned.get(int(state), unseen)
            own = spells[:, 1] == state
            rows = spells[own]
            at = np.clip(np.searchsorted(edges, rows[:, 3], side="right") - 1, 0, len(rates) - 1)
            nats[own] = rows[:, 4] * np.log(rates[at] * rows[:, 5]) - _overlaps(rows, edges) @ rates
        return nats


def _overlaps(spells: Any, edges: Any) -> Any:
    """Return the time in microseconds that each spell spends in each age bin, times its weight."""
    import numpy as np  # noqa: PLC0415  # as above

    begin = np.maximum(spells[:, 2, None], edges[None, :-1])
    end = np.minimum(spells[:, 3, None], edges[None, 1:])
    return spells[:, 5, None] * np.clip(end - begin, 0, None)


def _gaps(history: _History) -> Iterator[tuple[int, float, float]]:
    """Yield each predicted arrival's place, the time of the previous arrival, and its own time."""
    for place in history.judged_places:
        yield place, history.sent_us[place - 1], history.sent_us[place]


def _rhythm(history: _History, state: int = _CLOCK) -> Iterator[_Spell]:
    """Yield the spells of requests that arrive independently of answers."""
    for place, before, us in _gaps(history):
        yield _Spell(place, state, 0.0, us - before, comes=True)


def _bursts(history: _History) -> Iterator[_Spell]:
    """Yield the spells of bursts of equal size, whose times depend on the start of the previous burst."""
    sent_us, soon_us = history.sent_us, AT_ONCE_FRAC * history.took_us
    starts = [0, *(at for at in range(1, len(sent_us)) if sent_us[at] - sent_us[at - 1] > soon_us)]
    size = _size(starts)
    for place, before, us in _gaps(history):
        start = starts[bisect_right(starts, place - 1) - 1]
        if place - start < size:
            yield _Spell(place, _CLOCK, 0.0, us - before, comes=True)
        else:
            yield _Spell(place, _NEXT, before - sent_us[start], us - sent_us[start], comes=True)


def _size(starts: Sequence[int]) -> float:
    """Return the usual number of requests between two starts."""
    return median([later - earlier for earlier, later in pairwise(starts)] or [math.inf])


_OWN_TIMES = (_rhythm, partial(_rhythm, state=_STEADY), _bursts)
"""Forms of the pattern of requests that arrive independently of answers."""


def _waits_for(place: int, before: float, us: float, event_us: float) -> Iterator[_Spell]:
    """Yield the spells of a request that waits for an event: before and after the event."""
    if event_us > before:
        yield _Spell(place, _BEFORE, 0.0, min(event_us, us) - before, comes=us < event_us)
    if event_us <= us:
        yield _Spell(place, _AFTER, max(before - event_us, 0.0), us - event_us, comes=True)


def _loop(history: _History) -> Iterator[_Spell]:
    for place, before, us in _gaps(history):
        yield from _waits_for(place, before, us, history.follows(history.most_open, place))


def _barrier(history: _History) -> Iterator[_Spell]:
    starts, size = history.round_starts, _size(history.round_starts)
    for place, before, us in _gaps(history):
        is_whole = place - starts[bisect_right(starts, place - 1) - 1] >= size
        for spell in _waits_for(place, before, us, history.done_us[place - 1]):
            yield spell._replace(state=_NEXT) if is_whole and spell.state == _BEFORE else spell


def _limit(history: _History) -> Iterator[_Spell]:
    """Yield the spells of a queue that sends at answers if requests wait, and otherwise at once."""
    soon_us = AT_ONCE_FRAC * history.took_us
    for place, before, us in _gaps(history):
        answer_us = history.follows(history.most_open, place)
        if answer_us > before - soon_us:
            yield from _waits_for(place, before, us, answer_us)
        else:
            yield _Spell(place, _CLOCK, 0.0, us - before, comes=True)


def _sessions(history: _History, times_open: float) -> Iterator[_Spell]:
    """Yield the spells of sessions, each of which sends its next request only when it has none open."""
    sessions = max(1, round(times_open * history.most_open))
    gone = history.gone_us
    for place, before, us in _gaps(history):
        nth = bisect_right(gone, before)
        last = bisect_right(gone, us)
        moments = [before, *gone[nth:last], us]
        for more, (begin, end) in enumerate(pairwise(moments)):
            thinking = max(sessions - place + nth + more, 0.1)
            yield _Spell(place, _STEADY, 0.0, end - begin, more == last - nth, thinking)


def _retries(history: _History) -> Iterator[_Spell]:
    """Yield the spells of requests that repeat an aborted request, and of the requests between them."""
    given_up, pending, last_us = history.gave_up_us, 0, -math.inf
    nth = bisect_right(given_up, history.sent_us[history.judged_places.start - 1])
    for place, before, us in _gaps(history):
        pending = pending if before - last_us <= history.took_us else 0
        begin = before
        while nth < len(given_up) and given_up[nth] <= us:
            yield _age(place, begin, given_up[nth], last_us if pending else None, before)
            begin = last_us = given_up[nth]
            pending, nth = pending + 1, nth + 1
        yield _age(place, begin, us, last_us if pending else None, before)._replace(comes=True)
        pending = max(0, pending - 1)


def _age(place: int, begin: float, end: float, gave_up: float | None, before: float) -> _Spell:
    state, since = (_CLOCK, before) if gave_up is None else (_AFTER, gave_up)
    return _Spell(place, state, begin - since, end - since, comes=False)


_VARIANTS: dict[Pattern, list[_Variant]] = {
    "loop": [_loop],
    "barrier": [_barrier],
    "limit": [_limit],
    "sessions": [partial(_sessions, times_open=times) for times in TIMES_OPEN],
    "retries": [_retries],
}
"""Forms of each pattern, the simplest pattern first."""


def _clients(pattern: Pattern, history: _History) -> Clients:
    """Return the clients of an accepted pattern, with their number and think times."""
    if pattern == "sessions":
        fits = []
        for times_open in TIMES_OPEN:
            spells = [*_sessions(history, times_open)]
            thinking_us = sum(spell.weight * (spell.end_us - spell.begin_us) for spell in spells)
            weights = [spell.weight for spell in spells if spell.comes]
            nats = sum(map(math.log, weights)) - len(weights) * math.log(max(thinking_us, 1.0))
            sessions = max(1, round(times_open * history.most_open))
            fits.append((nats, sessions, thinking_us / len(weights)))
        _, sessions, mean_us = max(fits)
        return Clients(pattern, sessions, (mean_us,))
    if pattern == "retries":
        lags = [spell.end_us for spell in _retries(history) if spell.comes and spell.state == _AFTER]
        return Clients(pattern, len(lags), tuple(lags))
    if pattern == "barrier":
        return Clients(pattern, round(_size(history.round_starts)), tuple(history.round_lags_us))
    return Clients(pattern, history.most_open, history.thinks_us(history.most_open))
