"""vLLM's console lines about a start, and those that it prints periodically, in the formats of V1 releases.

A start states version, model, arguments, token budget and KV cache; newer releases print the size of the KV
cache and the maximum concurrency on one line, with the device's name in place of ``GPU``. Each engine prints
a periodic line every 10 s: ``Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput:
1055.3 tokens/s, Running: 18 reqs, Waiting: 43 reqs, GPU KV cache usage: 95.9%, Prefix cache hit rate: 0.0%``.
Releases up to 0.8 name no engine; a line about several engines together begins with ``2 Engines
Aggregated:``; each figure after ``Waiting`` may be missing. V0 wrote ``Swapped`` and ``Pending`` in place of
``Waiting``.
"""

import ast
import re
from collections import deque
from datetime import date
from functools import lru_cache
from typing import NamedTuple

from schedtrace.model.printable import hide_secrets, shortened
from schedtrace.model.records import Range, ServerStart

SNAPSHOT_MARKER = b"Avg generation throughput: "
ACCEPTANCE_MARKER = b"SpecDecoding metrics: "
LATEST_SNAPSHOTS = 50_000
"""Minimum number of latest periodic lines that are kept; of a single engine, they cover almost six days."""
FIRST_FIGURE = "Avg prompt throughput: "
"""First figure of each periodic line, after the prefix."""
_SNAPSHOT = re.compile(
    r"Avg prompt throughput: (?P<prompt>\d{1,12}(?:\.\d{1,6})?) tokens/s, "
    r"Avg generation throughput: (?P<generation>\d{1,12}(?:\.\d{1,6})?) tokens/s, "
    r"Running: (?P<running>\d{1,9}) reqs, Waiting: (?P<waiting>\d{1,9}) reqs"
    r"(?:, \w{1,20} KV cache usage: (?P<usage>\d{1,3}(?:\.\d{1,6})?)%"
    r", Prefix cache hit rate: (?P<hits>\d{1,3}(?:\.\d{1,6})?)%)?(?P<rest>[^\n]{0,1000})"
)
"""Pattern of a periodic line; its optional part covers most formats, because several patterns would be
slower."""
_ENGINE = re.compile(r"(?:(?P<many>\d{1,6}) Engines Aggregated: |Engine (?P<engine>\d{1,6}): )$")
"""Pattern of the text before the first figure."""
_LONGEST_ENGINE = 40
_DEFERRED = re.compile(r"\bDeferred: (\d{1,9}) reqs")
_PREEMPTIONS = re.compile(r"\bPreemptions: (\d{1,9})")
_KV_USAGE = re.compile(r"\bKV cache usage: (\d{1,3}(?:\.\d{1,6})?)%")
_HIT_RATE = re.compile(r"(?:^|, )Prefix cache hit rate: (\d{1,3}(?:\.\d{1,6})?)%")
_EXTERNAL = re.compile(r"\bExternal prefix cache hit rate: (\d{1,3}(?:\.\d{1,6})?)%")
_ACCEPTANCE = re.compile(
    r"SpecDecoding metrics: .{0,2000}?Avg Draft acceptance rate: (\d{1,3}(?:\.\d{1,6})?)%"
)
_LOG_TIME = re.compile(r"\b(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_LAST_HOUR, _LAST_MINUTE = 23, 59
_YEAR_S = 366 * 86_400.0
_PREFIX = 400
"""Number of characters before a line's message to search for its time stamp."""


class PeriodicLine(NamedTuple):
    """Figures of one of vLLM's periodic console lines."""

    at_s: float | None
    """Time in seconds, counted from an arbitrary moment."""
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
        """Number of waiting requests without the deferred ones, which more capacity would not help."""
        return self.waiting - (self.deferred or 0)


class EngineLines:
    """Periodic lines of one engine, or of several engines together."""

    def __init__(self, engine_rank: int | None, engines: int) -> None:
        self.engine_rank = engine_rank
        self.engines = engines
        self.snapshots: deque[PeriodicLine] = deque()
        self.lines = 0
        """Number of lines, including those that were dropped."""
        self.repeats = 0
        """Number of lines that repeat the line before them."""
        self.acceptance_frac: Range | None = None
        """Smallest and largest share of accepted draft tokens that a line states."""

    def add(self, snapshot: PeriodicLine) -> None:
        """Add a line unless it repeats the line before it: a pasted log often contains a line twice."""
        if snapshot.at_s is not None and self.snapshots and self.snapshots[-1] == snapshot:
            self.repeats += 1
            return
        self.lines += 1
        self.snapshots.append(snapshot)

    def add_acceptance(self, frac: float) -> None:
        """Add the share of accepted draft tokens that a line states."""
        so_far = self.acceptance_frac or Range(frac, frac)
        self.acceptance_frac = Range(min(so_far.low, frac), max(so_far.high, frac))

    def keep_latest(self, lines: int) -> None:
        """Drop all but the latest ``lines`` lines."""
        while len(self.snapshots) > lines:
            self.snapshots.popleft()


def snapshot_in(line: str) -> tuple[int | None, int, PeriodicLine] | None:
    """Return the rank, the number of engines and the figures in a periodic line; None for any other line."""
    begin = line.find(FIRST_FIGURE)
    match = _SNAPSHOT.match(line, begin) if begin >= 0 else None
    if match is None:
        return None
    engine = _ENGINE.search(line, max(0, begin - _LONGEST_ENGINE), begin)
    many, rank = engine.groups() if engine is not None else (None, None)
    prompt, generation, running, waiting, usage, hits, rest = match.groups()
    deferred = _DEFERRED.search(rest) if "Deferred" in rest else None
    preemptions = _PREEMPTIONS.search(rest) if "Preemptions" in rest else None
    snapshot = PeriodicLine(
        at_s=time_in(line[:begin]),
        prompt_tokens_per_s=float(prompt),
        generation_tokens_per_s=float(generation),
        running=int(running),
        waiting=int(waiting),
        deferred=int(deferred[1]) if deferred else None,
        kv_cache_usage_frac=_as_fraction(usage) if usage else _fraction(_KV_USAGE, rest),
        prefix_cache_hit_frac=_as_fraction(hits) if hits else _fraction(_HIT_RATE, rest),
        external_hit_frac=_fraction(_EXTERNAL, rest) if "External" in rest else None,
        preemptions=int(preemptions[1]) if preemptions else None,
    )
    return None if many else int(rank or 0), int(many or 1), snapshot


def acceptance_in(line: str) -> float | None:
    """Return the share of accepted draft tokens that a line states; None if it states none."""
    return _fraction(_ACCEPTANCE, line)


def time_in(prefix: str) -> float | None:
    """Return the last timestamp in a line's prefix, in seconds since the year began; vLLM's own comes last.

    vLLM's timestamps have no year, so a leap year is assumed, in which 29 February is valid.
    """
    times = _LOG_TIME.findall(prefix[-_PREFIX:])
    if not times:
        return None
    month, day, hour, minute, second = map(int, times[-1])
    days = _days_before(month, day)
    if days is None or hour > _LAST_HOUR or max(minute, second) > _LAST_MINUTE:
        return None
    return ((days * 24 + hour) * 60 + minute) * 60.0 + second


def elapsed_s(before: float | None, after: float | None) -> float | None:
    """Return the time between two lines, even across a new year; None if unknown or negative."""
    if before is None or after is None:
        return None
    elapsed = after - before
    if elapsed < -_YEAR_S / 2:
        elapsed += _YEAR_S
    return elapsed if elapsed >= 0 else None


@lru_cache(366)
def _days_before(month: int, day: int) -> int | None:
    """Return the number of days from 1 January of a leap year to a date; None for an invalid date."""
    try:
        return (date(2000, month, day) - date(2000, 1, 1)).days
    except ValueError:
        return None


def _fraction(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    return None if match is None else _as_fraction(match[1])


def _as_fraction(percent: str) -> float | None:
    fraction = float(percent) / 100
    return round(fraction, 6) if fraction <= 1 else None


_START = re.compile(
    r"(?P<deed>Initializing a|Dumping input data for) V1 LLM engine "
    r"\(v(?P<version>[\w.+-]{1,80})\) with config: "
)
_CONFIG_MODEL = re.compile(r"\bmodel='([^'\n]{1,500})'")
_CONFIG_LENGTH = re.compile(r"\bmax_seq_len=(\d{1,12})\b")
_VERSION = re.compile(
    r"vLLM (?:API )?server version (?P<version>[\w.+-]{1,80})(?:, serving model (?P<model>\S{1,500}))?"
)
_ARGUMENTS = re.compile(r"non-default args: (\{.{0,100000}\})")
_BUDGET = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,12})\b")
_DEFAULT = re.compile(
    r"(?:Setting|Defaulting) (?P<name>max_num_seqs|max_num_batched_tokens) to (?P<value>\d{1,12}) for "
)
"""Pattern of a default for the user's GPU, which vLLM logs at debug level."""
_CACHE_SIZE = re.compile(r"\bKV cache size: (\d[\d,]{0,20}) tokens")
_CONCURRENCY = re.compile(
    r"Maximum concurrency for (\d[\d,]{0,20}) tokens per request: (\d{1,9}(?:\.\d{1,6})?)x"
)
START_MARKERS = (
    b" V1 LLM engine (v",
    b"server version ",
    b"non-default args: {",
    b"Chunked prefill is enabled with max_num_batched_tokens=",
    b" usage context.",
    b"KV cache size: ",
    b"Maximum concurrency for ",
)
_START_WORDS = tuple(marker.decode() for marker in START_MARKERS)
_PLAIN = re.compile(r"'([a-z]\w{0,80})': ('[^'\\]{0,500}'|-?\d+(?:\.\d+)?|True|False|None)(?=[,}])")
LONGEST_VALUE = 200
"""Maximum number of characters of an argument's value that are kept."""


class StartLines:
    """Facts about a start, collected line by line."""

    def __init__(self) -> None:
        self.facts = ServerStart()
        self.lines = 0
        """Number of lines that contained a fact."""

    def begins_start(self, line: str) -> bool:
        """Return whether a line is one of the first lines of a start."""
        if not any(marker in line for marker in _START_WORDS):
            return False
        if _VERSION.search(line) or _ARGUMENTS.search(line):
            return True
        engine = _START.search(line)
        return engine is not None and engine["deed"].startswith("Initializing")

    def take(self, line: str) -> bool:
        """Store the facts in a line; return whether it contains any."""
        if not any(marker in line for marker in _START_WORDS):
            return False
        facts, before = self.facts, self.lines
        if match := _START.search(line):
            self._take_engine(match["version"], line[match.end() :])
        elif match := _VERSION.search(line):
            facts.vllm_version = match["version"]
            facts.model = match["model"] or facts.model
            self.lines += 1
        elif match := _ARGUMENTS.search(line):
            self._take_arguments(match[1])
        elif match := _BUDGET.search(line):
            facts.token_budget = int(match[1])
            self.lines += 1
        elif match := _DEFAULT.search(line):
            name = "max_num_seqs" if match["name"] == "max_num_seqs" else "token_budget"
            setattr(facts, name, int(match["value"]))
            self.lines += 1
        if match := _CACHE_SIZE.search(line):
            facts.kv_cache_tokens = _count(match[1])
            self.lines += 1
        if match := _CONCURRENCY.search(line):
            facts.max_model_len, facts.max_concurrency = _count(match[1]), float(match[2])
            self.lines += 1
        return self.lines > before

    def _take_engine(self, version: str, config: str) -> None:
        self.facts.vllm_version = version
        if model := _CONFIG_MODEL.search(config):
            self.facts.model = model[1]
        if length := _CONFIG_LENGTH.search(config):
            self.facts.max_model_len = int(length[1])
        self.lines += 1

    def _take_arguments(self, text: str) -> None:
        arguments = arguments_in(text)
        if arguments is None:
            return
        facts = self.facts
        facts.arguments = {
            name: shortened(str(value), LONGEST_VALUE) for name, value in hide_secrets(arguments).items()
        }
        seats, budget, length = (
            value if type(value := arguments.get(name)) is int and value > 0 else None
            for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        )
        facts.max_num_seqs = seats or facts.max_num_seqs
        facts.token_budget = budget or facts.token_budget
        facts.max_model_len = length or facts.max_model_len
        facts.model = facts.model or (str(arguments["model"]) if "model" in arguments else None)
        self.lines += 1


def arguments_in(text: str) -> dict[str, object] | None:
    """Return the arguments in a printed dict; None if the text is not a dict of plain values.

    Values that are not literals, such as an object's ``repr``, make the parser fail; the plain values are
    then taken one by one.
    """
    try:
        parsed = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        plain = _PLAIN.findall(text)
        return {name: ast.literal_eval(value) for name, value in plain} or None
    if not isinstance(parsed, dict):
        return None
    return {str(name): value for name, value in parsed.items()}


def _count(text: str) -> int:
    return int(text.replace(",", ""))
