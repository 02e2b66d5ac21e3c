"""Reader of logs of a ``schedule()`` patched to print a Python dict per call.

The format is that of the forum thread in ``docs/foreign-logs.md``.

A record is on one line or wrapped over several, with or without ``#`` comments: ``2025-07-28 10:25:09.014 |
DEBUG | ...:schedule:562 - {'token_budget': 16384, 'requests': [...], ...}``. Every key may be missing.
Records are repeated if the patch adds its log sink anew in every call.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from schedtrace.model.trace_facts import Fact
from schedtrace.read.foreign import (
    LARGEST,
    StepRows,
    foreign_trace,
    is_log_line,
    prose_notice,
    quoted_from,
)
from schedtrace.read.problems import Problems
from schedtrace.read.text_stream import LONGEST_LINE, text_lines
from schedtrace.read.trace import Trace

KEYS = ("token_budget", "remaining_budget", "total_requests", "requests", "max_num_running_reqs")
BEGINS = re.compile(rf"""\{{\s*['"](?:{"|".join(KEYS)})['"]\s*:""")
_KEY = re.compile(rf"""['"](?:{"|".join(KEYS)})['"]""")
MARKERS = tuple(f"{quote}{key}".encode() for key in KEYS for quote in "'\"")
"""Byte strings, one of which is in every record."""
_OPENS = re.compile(r"\{\s*(?:#.*)?$")
"""Pattern of a line that ends with an opening brace: the start of a wrapped record, whose first key is on the
next line."""
_OF_A_RECORD = re.compile(r"""^\s*(?:[\[{(#}\]).]|['"]\w+['"]\s*:)|\{\s*['"]\w+['"]\s*:""")
"""Pattern of a line that may be part of a record."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
_PREFIX = 200
"""Number of characters at the beginning of a line to search for its time stamp."""
_TOKEN = re.compile(
    r"""(?P<text>'(?:[^'\\\n]|\\.)*'?|"(?:[^"\\\n]|\\.)*"?)|(?P<comment>\#[^\n]*)|(?P<more>\.\.\.)"""
    r"""|[{}\[\](),:]|[^\s'"\#{}\[\](),:]+"""
)
_WORDS = {"None": "null", "True": "true", "False": "false", "(": "[", ")": "]"}
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  # the log does not tell its time zone; only differences count

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Left = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]


class RecordedRequest(msgspec.Struct):
    """An entry of ``requests``."""

    request_id: str | int
    computed_tokens: Count | None = None
    scheduled_tokens: Count | None = None


class Record(msgspec.Struct):
    """Output of one call, with the keys that the forum thread's patch logs."""

    token_budget: Count | None = None
    remaining_budget: Left | None = None
    total_requests: Count | None = None
    max_num_running_reqs: Count | None = None
    requests: list[RecordedRequest] | None = None

    @property
    def scheduled_tokens(self) -> int | None:
        """Scheduled tokens of all requests; None if not recorded for every request."""
        tokens = [request.scheduled_tokens for request in self.requests or []]
        recorded = [count for count in tokens if count is not None]
        return (
            sum(recorded) if self.requests is not None and len(recorded) == self.scheduled_requests else None
        )

    @property
    def scheduled_requests(self) -> int | None:
        """``total_requests``; if that is missing, the number of listed requests."""
        return len(self.requests or []) if self.total_requests is None else self.total_requests

    @property
    def budget(self) -> int | None:
        """``token_budget``; if that is missing, the sum of the used and the remaining budget."""
        if self.token_budget is not None:
            return self.token_budget
        return self._put_together(1, self.remaining_budget)

    @property
    def left(self) -> int | None:
        """``remaining_budget``; if that is missing, the budget minus the tokens of the requests."""
        if self.remaining_budget is not None:
            return self.remaining_budget
        return self._put_together(-1, self.token_budget)

    def _put_together(self, sign: int, tokens: int | None) -> int | None:
        used = self.scheduled_tokens
        return None if used is None or tokens is None else tokens + sign * used


def records(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, int | None, Record | None]]:
    """Yield the line number, time and content of each record; the content is None if the record is broken.

    The time is in microseconds, in an unknown time zone. Braces in the text of a request, which vLLM may log,
    do not begin a record.

    Args:
        lines: Numbers and texts of the lines.
    """
    start, depth, size, logged_us = 0, 0, 0, None
    parts: list[str] = []
    for number, whole_line in lines:
        line = whole_line if parts else whole_line[: quoted_from(whole_line)]
        at, time = 0, _time_of(line)
        if parts and (time is not None or BEGINS.search(line)):
            yield from _record_in(start, logged_us, "\n".join(parts), whole=False)
            parts = []
        if not parts:
            logged_us = time if time is not None else logged_us
        while at < len(line):
            if not parts:
                begins = BEGINS.search(line, at) or _OPENS.search(line, at)
                if begins is None:
                    break
                start, depth, size = number, 0, 0
                alone, at = at == 0, begins.start()
                if alone and (record := _as_it_stands(line[at : line.rfind("}") + 1])):
                    yield number, logged_us, record  # nearly always, and far faster
                    logged_us = None
                    break
            end, depth = _end_of(line, at, depth)
            parts.append(line[at:end])
            size += len(parts[-1])
            at = len(line) if end is None else end
            if end is not None or size > LONGEST_LINE:
                yield from _record_in(start, logged_us, "\n".join(parts), whole=end is not None)
                parts, logged_us = [], None
    if parts:
        yield from _record_in(start, logged_us, "\n".join(parts), whole=False)


def parse_record(text: str) -> Record | None:
    """Return a record from its text; None if the text is not a record."""
    return _decoded(_as_json(text))


@lru_cache(maxsize=1)
def _as_it_stands(text: str) -> Record | None:
    """Parse a record that is JSON except for its quotes.

    The result is cached, because the next record is often a repeat.
    """
    return None if '"' in text or "\\" in text else _decoded(text.replace("'", '"'))


def _decoded(text: str) -> Record | None:
    try:
        record = msgspec.json.decode(text, type=Record)
    except (msgspec.DecodeError, RecursionError):
        return None
    return record if any(getattr(record, key) is not None for key in KEYS) else None


def _record_in(
    start: int, logged_us: int | None, text: str, *, whole: bool
) -> Iterator[tuple[int, int | None, Record | None]]:
    """Yield the record in ``text``; yield nothing if this text in braces is not a record."""
    if _KEY.search(text):
        yield start, logged_us, parse_record(text) if whole else None


def _time_of(line: str) -> int | None:
    time = _TIME.search(line, 0, _PREFIX)
    if time is None:
        return None
    try:
        return (datetime.fromisoformat(time[0].replace(",", ".")) - _EPOCH) // timedelta(microseconds=1)
    except ValueError:
        return None


def _end_of(line: str, at: int, depth: int) -> tuple[int | None, int]:
    """Return the index after the bracket that closes a record (None without one), and the final depth."""
    for token in _TOKEN.finditer(line, at):
        depth += (token[0] in "{[(") - (token[0] in "}])")
        if depth == 0:
            return token.end(), 0
    return None, depth


def _as_json(text: str) -> str:
    """Rewrite a Python literal as JSON: double quotes, and no comments, ``...`` or trailing commas."""
    out: list[str] = []
    for token in _TOKEN.finditer(text):
        word = token[0]
        if token["comment"] or token["more"]:
            continue
        if token["text"]:
            word = msgspec.json.encode(word[1:-1]).decode()
        if word in "}])" and out and out[-1] == ",":
            out.pop()
        if word != "," or (out and out[-1] not in {"[", "{", ","}):
            out.append(_WORDS.get(word, word))
    return "".join(out)


PHASES = {"unknown": "running"}
"""Phase of the trace's format in place of ``unknown``, the phase of a request with computed tokens in the
first record: it was present before that record or found these tokens in the prefix cache."""
RECORD = "log of a patched schedule(), one dict a call"


def read_loguru_log(path: Path) -> list[Trace]:
    """Return the records of such a log as one trace, with steps numbered in the order of the records.

    ``start_us`` is the time at which the record was logged, counted from the first record, with the log's own
    resolution (milliseconds by default). Durations are unknown.
    """
    problems, steps, prose = Problems(), _Steps(), 0

    def counted_lines() -> Iterator[tuple[int, str]]:
        nonlocal prose
        for number, line in text_lines(path):
            prose += not is_log_line(line) and _OF_A_RECORD.search(line) is None
            yield number, line

    for line, logged_us, record in records(counted_lines()):
        if record is None:
            problems.garbled_lines.append(line)
        else:
            steps.add(logged_us, record)
    trace = foreign_trace(
        path,
        steps.rows,
        record=RECORD,
        facts=frozenset({Fact.REQUESTS}) if steps.unlisted == 0 else frozenset(),
        problems=problems,
        notices=steps.log_notices() + prose_notice("records", steps.rows.count, prose),
        token_budget=steps.token_budget,
        max_num_running_reqs=steps.max_num_running_reqs,
        attached=steps.begins_later,
    )
    return [trace]


def has_records(lines: Iterable[str]) -> bool:
    """Return whether any record contains fields that only a call of ``schedule()`` logs.

    A single key, such as ``total_requests``, also occurs in results of benchmarks.
    """
    for _, _, record in records(enumerate(lines)):
        if record is None:
            continue
        if record.requests and all(request.scheduled_tokens is not None for request in record.requests):
            return True
        names = [name for name in KEYS if getattr(record, name) is not None]
        if len(names) > 1 and not {"token_budget", "remaining_budget"}.isdisjoint(names):
            return True
    return False


class _Steps:
    """Converter of records to steps, without repeats; requests seen for the first time are marked as new."""

    def __init__(self) -> None:
        self.rows = StepRows()
        self.begins_later = False
        """Whether requests of the first record had computed tokens, so that the log may lack the run's first
        steps.
        """
        self.unlisted = 0
        """Number of records that do not list all requests."""
        self.token_budget: int | None = None
        self.max_num_running_reqs: int | None = None
        self._repeats = 0
        self._went_back = 0
        self._began_us: int | None = None
        self._seen: set[int] = set()
        self._last: int | None = None
        self._computed: dict[str, int] = {}

    def add(self, logged_us: int | None, record: Record) -> None:
        key = hash((logged_us, msgspec.json.encode(record)))  # however a repeat is wrapped
        if key in self._seen and (logged_us is not None or key == self._last):
            self._repeats += 1
            return
        self._seen.add(key)
        self._last = key
        if self._began_us is None:
            self._began_us = logged_us
        listed = record.requests is not None and len(record.requests) == record.scheduled_requests
        self.unlisted += not listed
        if self.token_budget is None:
            self.token_budget = record.budget
        if self.max_num_running_reqs is None:
            self.max_num_running_reqs = record.max_num_running_reqs
        phases = [
            self._phase(request.request_id, request.computed_tokens) for request in record.requests or []
        ]
        complete = listed and "unknown" not in phases
        self.begins_later |= "unknown" in phases
        self.rows.add(
            step=self.rows.count,
            start_us=None if logged_us is None or self._began_us is None else logged_us - self._began_us,
            token_budget=record.budget,
            remaining_budget=record.left,
            total_requests=record.scheduled_requests,
            max_num_running_reqs=record.max_num_running_reqs,
            num_new=phases.count("new") if complete else None,
            num_continued=phases.count("running") if complete else None,
            requests=[
                (
                    str(request.request_id),
                    request.computed_tokens,
                    request.scheduled_tokens,
                    PHASES.get(phase, phase),
                )
                for request, phase in zip(record.requests or [], phases, strict=True)
            ],
        )

    def log_notices(self) -> list[str]:
        """Return notices about the log for the user."""
        sentences = []
        if self._repeats:
            records = "1 repeated record" if self._repeats == 1 else f"{self._repeats:,} repeated records"
            sentences.append(f"{records} left out: the logger wrote the same more than once")
        if self.unlisted:
            sentences.append(
                f"{self.unlisted:,} of {self.rows.count:,} records do not list all their requests"
            )
        if self._went_back:
            sentences.append(
                f"computed_tokens of a request went back {self._went_back:,} times: it was preempted, or the "
                "file holds several runs; the log does not tell which"
            )
        return sentences

    def _phase(self, request_id: str | int, computed_tokens: int | None) -> str:
        name, computed = str(request_id), computed_tokens or 0
        before = self._computed.get(name)
        self._computed[name] = computed
        if before is None:
            return "new" if self.rows.count or not computed else "unknown"
        self._went_back += computed < before
        return "running"
