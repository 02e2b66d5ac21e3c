"""Shared code of the readers of foreign logs; in their traces, unknown values are null."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from schedtrace.model.trace import SCHEMA_VERSION, Header
from schedtrace.model.trace_facts import Fact
from schedtrace.read.problems import Problems
from schedtrace.read.tables import FLAT, ORDINARY, STRETCH_SCHEMA, STRETCHES, Tables
from schedtrace.read.trace import NO_EVENTS, Trace

UNKNOWN = "unknown"
LARGEST = 2**40
"""Largest plausible count of tokens or requests; no recorder writes a larger one."""
EXTRA = {"elapsed_us": pl.Int64, "kv_cache_usage_frac": pl.Float64}
"""Columns of a step that only vLLM's iteration lines have."""
_CHUNK = 4096
_TEXT_OF_A_REQUEST = re.compile(r"""\b(?:prompt|output): ['"]|['"]role\\?['"]\s*:""")
"""Pattern of prompts and answers in vLLM's log, and of chat messages."""
_BEFORE_A_TEXT = ("prompt: ", "output: ", "role")
"""Words, at least one of which is in each match of ``_TEXT_OF_A_REQUEST``."""
_OF_A_LOG = re.compile(
    r"\b(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\d\d:\d\d:\d\d|\([\w:-]{1,80} pid=\d"
)
"""Pattern of a level, a time or the name of a vLLM process; lines of logged tracebacks have them, too."""
_PLACE = ".py:"
"""Part of the source location that each of vLLM's log records contains."""
_RECORD = re.compile(
    r"(?:\([\w:-]{1,80} pid=\d{1,10}[^()\n]{0,80}\) ){0,2}"
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?=\[?[\w/.]{1,200}\.py:\d)"
)
"""Pattern of the beginning of one of vLLM's log records."""
_PREFIX = 200
"""Number of characters at the beginning of a line to search for its level or time stamp."""


def quoted_from(line: str) -> int:
    """Return the index at which a request's text begins in a log line; the line's length if it has none."""
    prompt, answer, role = _BEFORE_A_TEXT
    if prompt not in line and answer not in line and role not in line:  # twice as fast as any()
        return len(line)
    match = _TEXT_OF_A_REQUEST.search(line)
    return len(line) if match is None else match.start()


def records_in(line: str) -> Iterator[str]:
    """Yield vLLM's log records on a line, without the text that a client sent.

    A line has several records if a web page or a pipe removed line breaks.
    """
    line = line[: quoted_from(line)]
    if line.count(_PLACE) < 2:  # noqa: PLR2004  # one record has one place
        yield line
        return
    begin = 0
    for match in islice(_RECORD.finditer(line), 1, None):
        yield line[begin : match.start()]
        begin = match.start()
    yield line[begin:]


def is_log_line(line: str) -> bool:
    """Return whether a line is blank or has a level, a time or the name of a vLLM process."""
    return not line.strip() or _OF_A_LOG.search(line, 0, _PREFIX) is not None


def prose_notice(kind: str, read: int, prose: int) -> list[str]:
    """Return a notice about a file in which most lines are neither of the expected kind nor log lines.

    Args:
        kind: Kind of the lines that were read, in the plural.
        read: Number of these lines.
        prose: Number of lines that are neither of that kind nor log lines.
    """
    if prose <= read:
        return []
    notice = (
        f"only {read:,} {kind} stand among {prose:,} lines that are no log lines: if the file merely quotes "
        "a log, give the log itself"
    )
    return [notice]


class StepRows:
    """Collector of steps; it turns batches of steps into frames, because frames need far less memory."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []
        self._requests: list[tuple[Any, ...]] = []
        self._frames: list[pl.DataFrame] = []
        self._tables = Tables()
        self.count = 0
        """Number of steps so far."""

    def add(self, step: int, requests: Iterable[tuple[Any, ...]] = (), **columns: Any) -> None:
        """Add a step; fields without a value are null.

        Args:
            step: Number of the step.
            requests: Id, computed tokens, scheduled tokens and phase of each request.
            columns: Columns of the step.
        """
        self._steps.append({"step": step, **columns})
        self.count += 1
        self._requests += [
            (step, step, None, *request, *ORDINARY[1:], place) for place, request in enumerate(requests)
        ]
        if len(self._steps) >= _CHUNK:
            self._flush()

    def frames(self) -> tuple[pl.DataFrame, dict[str, pl.LazyFrame]]:
        """Return all steps without their lists, and the tables of these lists as in ``Trace.large``."""
        self._flush()
        return pl.concat(self._frames), self._tables.scan(in_order=True)

    def _flush(self) -> None:
        self._frames.append(pl.DataFrame(self._steps, schema={**FLAT, **EXTRA}))
        self._tables.put({STRETCHES: pl.DataFrame(self._requests, schema=STRETCH_SCHEMA, orient="row")})
        self._steps, self._requests = [], []


def foreign_trace(
    path: Path,
    rows: StepRows,
    *,
    record: str,
    facts: frozenset[Fact],
    problems: Problems,
    notices: list[str],
    **header: Any,
) -> Trace:
    """Return a trace with all facts that a log contains.

    Args:
        path: Path of the log.
        rows: Steps of the log.
        record: Kind of log, in words.
        facts: Facts that the log contains.
        problems: Problems of the log.
        notices: Notices for the user.
        header: Fields of the header that the log contains.
    """
    text = (
        "schedtrace_version",
        "vllm_version",
        "python_version",
        "host",
        "device",
        "scheduler_class",
        "model",
    )
    number = ("pid", "token_budget", "max_num_running_reqs")
    # the anchor is 0: a log does not tell its time zone, so it lines up with nothing
    fields: dict[str, Any] = (
        dict.fromkeys(text, UNKNOWN)
        | dict.fromkeys(number)
        | {"engine_rank": 0, "wall_anchor_us": 0}
        | header
    )
    steps, large = rows.frames()
    return Trace(
        path=path,
        header=Header(schema_version=SCHEMA_VERSION, preemptions_recorded=False, **fields),
        steps=steps,
        large=large,
        arrivals=NO_EVENTS["arrived"],
        finishes=NO_EVENTS["finished"],
        notices=notices,
        end=None,
        problems=problems,
        facts=facts,
        record=record,
    )
