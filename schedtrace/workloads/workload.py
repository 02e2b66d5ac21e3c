"""A load: requests in the order in which they reach the engine, read anew by each iteration.

Of a closed loop, in which clients keep so many requests open and send the next one after an answer, the
recorded times would be wrong in a replay: an engine that answers sooner is sent more.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Literal

import msgspec

from schedtrace.model.message import Message
from schedtrace.model.say import say

FEWEST = 8
"""Requests that follow an answer: fewer show no pattern."""
AT_ONCE_FRAC = 0.05
"""Of the median end-to-end latency: a client that thinks so little sends its next request at once."""
MOSTLY_AT_ONCE_FRAC = 0.25
"""Likewise of nine tenths of the requests."""
STEADY_FRAC = 0.35
"""Think times that differ by less than this share of their median are a client's, not chance."""
TIGHTER = 0.5
"""An arrival has to follow the answer before it at least twice as tightly as it follows earlier arrivals."""


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, and how long they think."""

    clients: int
    think_us: tuple[float, ...]
    """From the n-th answer to the n-th request that follows one, in order."""

    @property
    def note(self) -> Message:
        """How it is replayed."""
        if not self.think_us:
            return say("The load is that of {clients:n client} with one request open each.", self)
        return say(
            "The load is a closed loop: {clients:n client} with one request open each; the next one was "
            "sent {thinks:us} (median) after an answer, and so it is here.",
            self,
            thinks=round(median(self.think_us)),
        )


def closed_loop(
    arrived_us: Sequence[float], answered_us: Sequence[float | None], clients: int | None = None
) -> ClosedLoop | None:
    """The closed loop that a load is; None where arrivals do not follow answers.

    Of ``C`` clients the request ``C + n`` follows the answer ``n``. A closed loop shows in these lags: they
    are next to nothing, or steadier than the time from the request ``n`` to the request ``C + n``, which
    would be the steady one if a clock set the pace.

    Args:
        arrived_us: When each request was sent, in any order.
        answered_us: When each was answered, in the same order; None: never.
        clients: So many, whatever the times look like; None: as many as were open at most.
    """
    came, gone = sorted(arrived_us), sorted(us for us in answered_us if us is not None)
    most = _most_open(came, gone) if clients is None else clients
    lags = [sent - answered for sent, answered in zip(came[most:], gone, strict=False)]
    loop = ClosedLoop(most, tuple(max(0.0, lag) for lag in lags))
    if clients is not None:
        return loop
    if len(lags) < FEWEST:
        return None
    took = median(b - a for a, b in zip(arrived_us, answered_us, strict=True) if b is not None)
    nine_tenths = quantiles(lags, n=10, method="inclusive")[-1]
    at_once = median(lags) <= AT_ONCE_FRAC * took and nine_tenths <= MOSTLY_AT_ONCE_FRAC * took
    periods = [later - earlier for later, earlier in zip(came[most:], came, strict=False)][: len(lags)]
    steady = _spread(lags) <= STEADY_FRAC * median(lags) and _spread(lags) < TIGHTER * _spread(periods)
    return loop if at_once or steady else None


def _most_open(came: Sequence[float], gone: Sequence[float]) -> int:
    """Requests that were open at once, at most; an answer and the request that follows it do not overlap."""
    return max((number - bisect.bisect_right(gone, us) for number, us in enumerate(came, 1)), default=0)


def _spread(values: Sequence[float]) -> float:
    """The interquartile range: a pause of the client now and then does not count."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


Pass = tuple[int, int]
"""Of ranks in lock-step: a wave of the load, and a pass in it, both from 0."""


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load, without its text. Times are microseconds since the load began."""

    request_id: str
    arrived_us: float
    """The client sent it."""
    prompt_tokens: int
    output_tokens: int
    """It ends after so many, unless it is aborted before."""
    max_tokens: int | None = None
    """Limit that the client asked for; None: ``output_tokens``."""
    priority: int = 0
    data_parallel_rank: int | None = None
    """Rank that the client asks for; None: vLLM's front end chooses."""
    lora: str | None = None
    prefix: tuple[int, ...] = ()
    """Identity of each leading block of the prompt, ``Workload.prefix_block`` tokens each; the last one may
    be a part of a block. Two prompts share their first k blocks if their first k identities are equal."""
    front_end_us: float = 0.0
    """From its arrival until it reached the engine's input queue."""
    queued_step: int | None = None
    """Of a recorded load: ``schedule()`` calls of the trial that had begun when the scheduler got it."""
    queued_pass: Pass | None = None
    """Likewise, of ranks in lock-step: the first pass whose ``schedule()`` call found it in the queue."""
    abort_us: float | None = None
    """The client went away."""
    abort_step: int | None = None
    """Of a recorded load: ``schedule()`` calls of the trial that had begun when the scheduler dropped it."""
    abort_pass: Pass | None = None
    """Likewise: the first pass whose ``schedule()`` call did not find it any more."""
    answered_us: float | None = None
    """Of a recorded load: it ended, or its client went away; None: neither is recorded."""
    structured: bool = False
    """Its output follows a grammar."""
    draft_acceptance: float | None = None
    """Share of its speculative tokens that were accepted; None: not recorded, or none were scheduled."""


Source = Literal["mooncake", "bailian", "azure", "burstgpt", "sharegpt", "jsonl", "random", "recorded"]


@dataclass(frozen=True)
class Workload:
    """A stream of requests that can be iterated again and again, in bounded memory.

    Requests come in the order in which they reach the engine's input queue: by ``arrived_us + front_end_us``.
    """

    name: str
    source: Source
    prefix_block: int | None
    """Tokens of each block in ``LoadRequest.prefix``; None: which prompts begin alike is not known."""
    notes: list[Message]
    """What the source does not say, and what was assumed."""
    requests: int
    prompt_tokens: int
    output_tokens: int
    last_arrival_us: float
    """The first request arrives at 0."""
    read: Callable[[], Iterator[LoadRequest]] = field(repr=False)
    """Reads the requests once."""
    began_us: int | None = None
    """Of a recorded load: when it began, on the trace's clock."""
    of_server: bool = False
    """Recorded without trials: when it begins and ends is that of the record, and no part of the load."""
    closed: ClosedLoop | None = None
    """Its clients send their next request after an answer; None: requests come at their times."""

    @property
    def all_notes(self) -> list[Message]:
        """With how its clients are replayed."""
        return [*self.notes, *([self.closed.note] if self.closed else [])]

    def with_clients(self, clients: int) -> "Workload":
        """The load as that of so many clients, each with one request open, whatever its times look like."""
        arrived, answered = zip(*((one.arrived_us, one.answered_us) for one in self), strict=True)
        return replace(self, closed=closed_loop(arrived, answered, clients))

    def __iter__(self) -> Iterator[LoadRequest]:
        """Read it once more."""
        return self.read()

    def __len__(self) -> int:
        return self.requests


def make_workload(
    name: str,
    source: Source,
    read: Callable[[], Iterator[LoadRequest]],
    *,
    prefix_block: int | None = None,
    notes: Iterable[Message] = (),
    began_us: int | None = None,
    of_server: bool = False,
    closed: ClosedLoop | None = None,
) -> Workload:
    """A workload whose totals are those of one pass over ``read()``; ``notes`` are taken after that pass."""
    requests = prompt_tokens = output_tokens = 0
    last_arrival_us = 0.0
    for request in read():
        requests += 1
        prompt_tokens += request.prompt_tokens
        output_tokens += request.output_tokens
        last_arrival_us = max(last_arrival_us, request.arrived_us)
    return Workload(
        name=name,
        source=source,
        prefix_block=prefix_block,
        notes=list(notes),
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        last_arrival_us=last_arrival_us,
        read=read,
        began_us=began_us,
        of_server=of_server,
        closed=closed,
    )
