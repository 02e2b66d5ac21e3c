"""vLLM's periodic console lines, one per engine every 10 s, in all forms of V1.

``Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 1055.3 tokens/s, Running: 18
reqs, Waiting: 43 reqs, GPU KV cache usage: 95.9%, Prefix cache hit rate: 0.0%``. Releases up to 0.8 have no
engine; a line that sums up several engines begins with ``2 Engines Aggregated:``; each figure after
``Waiting`` may be missing. V0 wrote ``Swapped`` and ``Pending`` in place of ``Waiting``.
"""

import re
from collections import deque
from datetime import datetime
from typing import NamedTuple

SNAPSHOT_MARKER = b"Avg generation throughput: "
ACCEPTANCE_MARKER = b"SpecDecoding metrics: "
MOST_SNAPSHOTS = 100_000
"""Maximum number of lines of an engine that are kept, the latest ones: eleven days."""
_SNAPSHOT = re.compile(
    r"(?:(?P<many>\d{1,6}) Engines Aggregated: |Engine (?P<engine>\d{1,6}): )?"
    r"Avg prompt throughput: (?P<prompt>\d{1,12}(?:\.\d{1,6})?) tokens/s, "
    r"Avg generation throughput: (?P<generation>\d{1,12}(?:\.\d{1,6})?) tokens/s, "
    r"Running: (?P<running>\d{1,9}) reqs, Waiting: (?P<waiting>\d{1,9}) reqs(?P<rest>[^\n]{0,1000})"
)
_DEFERRED = re.compile(r"\bDeferred: (\d{1,9}) reqs")
_PREEMPTIONS = re.compile(r"\bPreemptions: (\d{1,9})")
_KV_USAGE = re.compile(r"\bKV cache usage: (\d{1,3}(?:\.\d{1,6})?)%")
_HIT_RATE = re.compile(r"(?:^|, )Prefix cache hit rate: (\d{1,3}(?:\.\d{1,6})?)%")
_EXTERNAL = re.compile(r"\bExternal prefix cache hit rate: (\d{1,3}(?:\.\d{1,6})?)%")
_ACCEPTANCE = re.compile(
    r"SpecDecoding metrics: .{0,2000}?Avg Draft acceptance rate: (\d{1,3}(?:\.\d{1,6})?)%"
)
V0 = re.compile(r"Running: \d+ reqs, Swapped: \d+ reqs, Pending: \d+ reqs")
_LOG_TIME = re.compile(r"\b(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_PREFIX = 400
"""Characters before a line's message in which its time is searched."""


class PeriodicLine(NamedTuple):
    """Figures of one of vLLM's periodic console lines."""

    at_s: float | None
    """Time in seconds, of an arbitrary zero."""
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    running: int
    waiting: int
    deferred: int | None
    kv_cache_usage_frac: float | None
    prefix_cache_hit_frac: float | None
    external_hit_frac: float | None
    preemptions: int | None

    @property
    def waiting_for_capacity(self) -> int:
        """Waiting requests without the deferred ones, which capacity would not help."""
        return self.waiting - (self.deferred or 0)


class EngineLines:
    """The periodic lines of one engine, or of several together."""

    def __init__(self, engine_rank: int | None, engines: int) -> None:
        self.engine_rank = engine_rank
        self.engines = engines
        self.snapshots: deque[PeriodicLine] = deque(maxlen=MOST_SNAPSHOTS)
        self.lines = 0
        """Number of lines, including those that are not kept."""
        self.repeats = 0
        """Number of lines that were there before."""
        self.acceptance_fracs: deque[float] = deque(maxlen=MOST_SNAPSHOTS)

    def add(self, snapshot: PeriodicLine) -> None:
        """Add a line, unless it repeats the one before: a pasted log often has the same line twice."""
        if snapshot.at_s is not None and self.snapshots and self.snapshots[-1] == snapshot:
            self.repeats += 1
            return
        self.lines += 1
        self.snapshots.append(snapshot)


def snapshot_in(line: str) -> tuple[int | None, int, PeriodicLine, int] | None:
    """Return rank, number of engines, content and place of a periodic line; None if the line is none."""
    match = _SNAPSHOT.search(line)
    if match is None:
        return None
    rest = match["rest"]
    deferred, preemptions = _DEFERRED.search(rest), _PREEMPTIONS.search(rest)
    snapshot = PeriodicLine(
        at_s=time_in(line[: match.start()]),
        prompt_tokens_per_s=float(match["prompt"]),
        generation_tokens_per_s=float(match["generation"]),
        running=int(match["running"]),
        waiting=int(match["waiting"]),
        deferred=int(deferred[1]) if deferred else None,
        kv_cache_usage_frac=_fraction(_KV_USAGE, rest),
        prefix_cache_hit_frac=_fraction(_HIT_RATE, rest),
        external_hit_frac=_fraction(_EXTERNAL, rest),
        preemptions=int(preemptions[1]) if preemptions else None,
    )
    many = int(match["many"] or 1)
    rank = None if match["many"] else int(match["engine"] or 0)
    return rank, many, snapshot, match.start()


def acceptance_in(line: str) -> float | None:
    """Return the share of accepted draft tokens that a line names."""
    return _fraction(_ACCEPTANCE, line)


def time_in(prefix: str) -> float | None:
    """Return the last timestamp in a line's prefix in seconds since the year began: vLLM's own if it has one.

    vLLM's timestamps have no year, so a leap year is assumed, in which 29 February is valid.
    """
    times = _LOG_TIME.findall(prefix[-_PREFIX:])
    if not times:
        return None
    month, day, hour, minute, second = map(int, times[-1])
    try:
        moment = datetime(2000, month, day, hour, minute, second)  # noqa: DTZ001  # differences only
    except ValueError:
        return None
    return (moment - datetime(2000, 1, 1)).total_seconds()  # noqa: DTZ001  # likewise


def _fraction(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    if match is None:
        return None
    fraction = float(match[1]) / 100
    return round(fraction, 6) if fraction <= 1 else None
