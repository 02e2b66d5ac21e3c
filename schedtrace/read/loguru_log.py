"""Logs in which ``Scheduler.schedule()`` was patched to print one Python dict a call, as in the forum thread.

A record stands on one line or is wrapped over several, with or without ``#`` comments:
``2025-07-28 10:25:09.014 | DEBUG | ...:schedule:562 - {'token_budget': 16384, 'requests': [...], ...}``.
Every key may be missing. Records are repeated where the patch added its sink in every call.
"""

from collections.abc import Iterator
from pathlib import Path

from schedtrace.model.facts import Fact
from schedtrace.read.foreign import StepRows, foreign_trace
from schedtrace.read.loguru_record import Record, records
from schedtrace.read.problems import Problems
from schedtrace.read.trace import Trace

RECORD = "log of a patched schedule(), one dict a call"


def read_loguru_log(path: Path) -> list[Trace]:
    """The records of such a log as one trace; steps are numbered in the order of the records.

    ``start_us`` is when the record was logged, from the first record on, with the log's own resolution
    (milliseconds by default). Durations are unknown.

    Raises:
        InputError: it cannot be read.
    """
    problems, steps = Problems(), _Steps()
    for logged_us, record in _records(path, problems):
        steps.add(logged_us, record)
    trace = foreign_trace(
        path,
        steps.rows,
        record=RECORD,
        facts=frozenset({Fact.REQUESTS}) if steps.unlisted == 0 else frozenset(),
        problems=problems,
        notices=steps.notices(),
        token_budget=steps.token_budget,
        max_num_running_reqs=steps.max_num_running_reqs,
    )
    return [trace]


def _records(path: Path, problems: Problems) -> Iterator[tuple[int | None, Record]]:
    for line, logged_us, record in records(path):
        if record is None:
            problems.garbled_lines.append(line)
        else:
            yield logged_us, record


class _Steps:
    """Records to steps: repeats left out, requests that are seen for the first time told as new."""

    def __init__(self) -> None:
        self.rows = StepRows()
        self.unlisted = 0
        """Records that do not list all requests."""
        self.token_budget: int | None = None
        self.max_num_running_reqs: int | None = None
        self._count = 0
        self._repeats = 0
        self._went_back = 0
        self._began_us: int | None = None
        self._seen: set[int] = set()
        self._last: int | None = None
        self._computed: dict[str, int] = {}

    def add(self, logged_us: int | None, record: Record) -> None:
        key = hash((logged_us, record.key()))
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
        phases = [self._phase(one.request_id, one.computed_tokens) for one in record.requests or []]
        self.rows.add(
            step=self._count,
            start_us=None if logged_us is None or self._began_us is None else logged_us - self._began_us,
            token_budget=record.budget,
            remaining_budget=record.left,
            total_requests=record.scheduled_requests,
            max_num_running_reqs=record.max_num_running_reqs,
            num_new=phases.count("new") if listed else None,
            num_continued=phases.count("running") if listed else None,
            requests=[
                {
                    "request_id": str(one.request_id),
                    "computed_tokens": one.computed_tokens,
                    "scheduled_tokens": one.scheduled_tokens,
                    "phase": phase,
                }
                for one, phase in zip(record.requests or [], phases, strict=True)
            ],
        )
        self._count += 1

    def notices(self) -> list[str]:
        """What a person should know about the log."""
        said = []
        if self._repeats:
            records = "1 repeated record" if self._repeats == 1 else f"{self._repeats:,} repeated records"
            said.append(f"{records} left out: the logger wrote the same more than once")
        if self.unlisted:
            said.append(f"{self.unlisted:,} of {self._count:,} records do not list all their requests")
        if self._went_back:
            said.append(
                f"computed_tokens of a request went back {self._went_back:,} times: it was preempted, or the "
                "file holds several runs; the log does not tell which"
            )
        return said

    def _phase(self, request_id: str | int, computed_tokens: int | None) -> str:
        name, computed = str(request_id), computed_tokens or 0
        before = self._computed.get(name)
        self._computed[name] = computed
        if before is None:
            return "new"
        self._went_back += computed < before
        return "running"
