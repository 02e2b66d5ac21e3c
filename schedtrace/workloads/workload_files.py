"""Reader of workload files of any known format."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from schedtrace.errors import InputError, UsageError
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.workloads.chats import LIMITS, NO_ANSWER, NO_TEXT, OTHER_URL
from schedtrace.workloads.formats import FAILED, IGNORED_TIME, FormatOptions, WorkloadFormat, format_of
from schedtrace.workloads.random_load import AT_ONCE, arrivals_s
from schedtrace.workloads.rows import CHARACTERS_A_TOKEN, ESTIMATED, CountTokens, Row, unreadable_row
from schedtrace.workloads.timed_traces import NO_IDS, SPARE_IDS, TimeUnit
from schedtrace.workloads.workload import LoadRequest, Workload, make_workload

NO_OUTPUT, NO_PROMPT, SORTED = "no output", "no prompt", "sorted"
OVERRIDDEN = "other output"
"""Key under which rows are counted whose own output length is overridden."""
OF_ROWS = {
    NO_OUTPUT: "{rows:n row} without output tokens left out.",
    NO_PROMPT: "{rows:n row} without prompt tokens left out.",
    FAILED: "{rows:n request} that failed or were cancelled left out.",
    OTHER_URL: "{rows:n row} that ask for something else than text left out.",
    NO_TEXT: "{rows:n message} with parts that are no text: these are left out.",
    LIMITS: "{rows:n row} with the client's limit (max_tokens) as output length: answers may end before it.",
    NO_ANSWER: "{rows:n conversation} without a question and an answer left out.",
    IGNORED_TIME: "{rows:n row} with a timestamp, which is not read: only a timed trace, with input_length "
    "and output_length, says when its requests arrive.",
    OVERRIDDEN: "--output-len replaces the output length of {rows:n row}.",
    NO_IDS: "{rows:n row} without block ids: they share no prefix.",
    SPARE_IDS: "{rows:n row} with more block ids than the prompt has blocks: the last ids were ignored.",
}
"""Templates of notes on numbers of rows, by key."""


def counted_notes(counts: Counter[str]) -> Iterator[Message]:
    """Yield the notes on counted rows."""
    for counted, template in OF_ROWS.items():
        if counts[counted]:
            yield say(template, rows=counts[counted])


def file_notes(
    kind: WorkloadFormat, counts: Counter[str], *, requests: int, asked: int | None, at_once: bool
) -> Iterator[Message]:
    """Yield the notes on a file.

    Args:
        kind: Format of the file.
        counts: Counts of one reading.
        requests: Number of usable requests.
        asked: Number of requests that the user asked for; None for all.
        at_once: Whether all requests arrive at once because the file has no times.
    """
    yield from kind.notes
    yield from counted_notes(counts)
    if asked is not None and requests < asked:
        template = "The file has {found:n usable request}, not the {wanted:n request} asked for."
        yield say(template, found=requests, wanted=asked)
    if counts[SORTED]:
        yield say("Rows were not in order of time, and were sorted.")
    if counts[ESTIMATED]:
        template = "Lengths of texts are estimates: {characters:n character} a token."
        yield say(template, characters=CHARACTERS_A_TOKEN)
    if kind.prefix_block is None:
        yield say("Which prompts begin alike is not in the file: no prefix is shared.")
    if kind.images:
        yield say("Images are left out: requests have the tokens of their texts only.")
    if at_once:
        yield AT_ONCE


MOST_SORTED = 100_000
"""Maximum number of requests in a file that is not in order of time, so that the requests fit into memory."""


def open_workload(
    path: Path,
    *,
    num_prompts: int | None = None,
    output_len: int | None = None,
    rate: float | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
    speedup: float | None = None,
    prequeue: bool = False,
    count_tokens: CountTokens | None = None,
    time_unit: TimeUnit | None = None,
    prefix_block: int | None = None,
) -> Workload:
    """Return the load in a file, whose content determines its format (``docs/workloads.md``).

    The file is read once to check it, and again by each iteration. Rows without prompt or output tokens are
    left out and counted in the notes. Up to ``MOST_SORTED`` requests out of order are sorted by time.

    Args:
        path: Path of a regular file.
        num_prompts: Number of usable requests to take; if the file has fewer and its times are not used, it
            is repeated.
        output_len: Output tokens of every request, instead of the file's.
        rate: Requests per second, to draw arrival times anew as in ``schedtrace run``; None for the file's
            times or, if it has none, for all at once.
        burstiness: Shape of the gamma distribution of the gaps at that rate; 1 is Poisson.
        seed: Random seed of the gaps.
        speedup: Divisor of the gaps between the file's times.
        prequeue: Whether all requests arrive at 0.
        count_tokens: Function that measures texts; None to estimate 4 characters per token.
        time_unit: Unit of a timed trace in JSON; None to infer it from its rows.
        prefix_block: Tokens of each block that has an id; None to infer the size from the rows.

    Raises:
        InputError: If the file is unreadable, of no known format or without a usable request; an error in a
            row reads ``path:line: what``.
        UsageError: If options exclude each other, ``speedup`` is set for a file without times, or a timed
            trace lacks an option that it needs.
    """
    if sum([rate is not None, speedup is not None, prequeue]) > 1:
        msg = "a request rate, a speedup and prequeue exclude each other: give one of them"
        raise UsageError(msg)
    kind = format_of(path, FormatOptions(count_tokens, output_len, time_unit, prefix_block))
    if speedup is not None and not kind.timed:
        msg = f"{path}: a speedup needs arrival times, which this file does not have: give a request rate"
        raise UsageError(msg)
    if kind.timed and rate is None and not prequeue:
        times = _Times(speedup=speedup or 1.0)
    else:
        times = _Times(drawn=True, rate=rate, burstiness=burstiness, seed=seed)
    file = _File(path, kind, num_prompts, output_len, times)
    counts: Counter[str] = Counter()

    def readable_load() -> Workload:
        return make_workload(
            path.name, kind.source, lambda: file.requests(counts), prefix_block=kind.prefix_block
        )

    if kind.sessions:  # turns of a session stand one after the other, whatever their times
        file = replace(file, unsorted_line=0)
    try:
        load = readable_load()
    except _OutOfOrderError as error:
        file, counts = replace(file, unsorted_line=error.line), Counter({SORTED: 1})
        load = readable_load()
    if not load.requests:
        msg = f"{path}: no usable request in it"
        raise InputError(msg)
    at_once = times.drawn and rate is None and not prequeue
    notes = file_notes(kind, counts, requests=load.requests, asked=num_prompts, at_once=at_once)
    return replace(load, notes=list(notes), read=lambda: file.requests(Counter()))


@dataclass(frozen=True)
class _Times:
    """Source of arrival times: the file, or a draw."""

    drawn: bool = False
    rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0
    speedup: float = 1.0

    def arrivals_us(self, rows: Iterator[Row]) -> Iterator[tuple[Row, float]]:
        """Yield each row with its arrival, the first at 0; a later turn has its earliest possible arrival."""
        if self.drawn:
            times = arrivals_s(self.rate, burstiness=self.burstiness, seed=self.seed)
            earliest_us: dict[str, float] = {}
            for row in rows:
                before_us = None if row.session is None else earliest_us.get(row.session)
                at_us = next(times) * 1e6 if before_us is None else before_us + row.delay_us
                if row.session is not None:
                    earliest_us[row.session] = at_us
                yield row, at_us
            return
        first: float | None = None
        for row in rows:
            at_us = row.at_us or 0.0
            first = at_us if first is None else first
            yield row, (at_us - first) / self.speedup


@dataclass(frozen=True)
class _File:
    """Workload file with the selection of requests to read."""

    path: Path
    kind: WorkloadFormat
    num_prompts: int | None
    output_len: int | None
    times: _Times
    unsorted_line: int | None = None
    """Line of the first row that is earlier than the row before it; rows must then be sorted. None if there
    is no such row."""

    def requests(self, counts: Counter[str]) -> Iterator[LoadRequest]:
        """Yield the requests, reading the file once.

        Raises:
            _OutOfOrderError: If a row is earlier than the row before it, and ``unsorted_line`` is unknown.
        """
        timed = self.times.arrivals_us(self._rows(counts))
        if self.kind.sessions and self.times.drawn:
            timed = iter(sorted(timed, key=lambda pair: pair[1]))
        latest: dict[str, str] = {}
        for number, (row, at_us) in enumerate(timed):
            before = None if row.session is None else latest.get(row.session)
            if row.session is not None:
                latest[row.session] = f"r{number}"
            counts[OVERRIDDEN] += self.output_len not in {None, row.output_tokens}
            yield LoadRequest(
                request_id=f"r{number}",
                arrived_us=at_us,
                prompt_tokens=row.prompt_tokens,
                output_tokens=self.output_len or row.output_tokens,
                priority=row.priority,
                data_parallel_rank=row.data_parallel_rank,
                prefix=row.prefix,
                after=before,
                delay_us=row.delay_us,
            )

    def _rows(self, counts: Counter[str]) -> Iterator[Row]:
        """Yield the chosen rows in order of time."""
        rows: Iterator[Row] = islice(self._usable(counts), self.num_prompts)
        last_us = float("-inf")
        if self.unsorted_line is not None:
            held = list(islice(rows, MOST_SORTED + 1))
            if len(held) > MOST_SORTED:
                what = (
                    f"earlier than the row before it, and more than {MOST_SORTED:,} requests are not sorted: "
                    "sort the file by time"
                )
                raise unreadable_row(self.path, self.unsorted_line, what)
            rows = iter(sorted(held, key=lambda row: row.at_us or 0.0))
        for row in rows:
            at_us = row.at_us or 0.0
            if at_us < last_us and not self.times.drawn:
                raise _OutOfOrderError(row.line)
            last_us = at_us
            yield row

    def _usable(self, counts: Counter[str]) -> Iterator[Row]:
        """Yield rows with tokens; repeat the file for ``num_prompts`` if its times are not used."""
        usable = 0
        while True:
            before = usable
            for row in self.kind.reader(self.path, counts):
                if not row.prompt_tokens or not row.output_tokens:
                    counts[NO_OUTPUT if row.prompt_tokens else NO_PROMPT] += 1
                    continue
                usable += 1
                yield row
            if self.num_prompts is None or not self.times.drawn or usable == before:
                return


class _OutOfOrderError(Exception):
    """Error: the row on this line is earlier than the row before it."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line
