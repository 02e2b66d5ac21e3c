"""Reader of vLLM's console log: how the server started, its periodic lines, and how it failed."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from schedtrace.errors import InputError
from schedtrace.model.records import DumpedStep, Failure, ServerStart
from schedtrace.model.safe_files import opened
from schedtrace.read.file_sample import FileSample, RecordReader, first_sample
from schedtrace.read.foreign import is_log_line, quoted_from, records_in
from schedtrace.read.lines import reading
from schedtrace.read.records import console_lines, failure_lines
from schedtrace.read.records.console_lines import (
    EngineLines,
    StartLines,
    acceptance_in,
    snapshot_in,
    time_in,
)
from schedtrace.read.records.failure_lines import (
    OUTPUT_MARKER,
    STATS_MARKER,
    FailureLines,
    announces_failure,
    begins_dump,
    shows_failure,
    step_in,
    step_over_lines,
    step_with_stats,
)
from schedtrace.read.text_stream import LatestLines, marked_lines, text_lines

NAME = "vLLM's console log"
_OWN_MARKERS = (console_lines.SNAPSHOT_MARKER, OUTPUT_MARKER, *console_lines.START_MARKERS)
"""Byte strings in lines that only vLLM's console log contains."""
_STARTED = "Application startup complete"
_WORKER_WAIT = "No available shared memory broadcast block found in"
_ALSO = (
    console_lines.ACCEPTANCE_MARKER,
    STATS_MARKER,
    _WORKER_WAIT.encode(),
    _STARTED.encode(),
    *failure_lines.MARKERS,
)
"""Byte strings in lines that belong to the log but may also occur in other files."""
MARKERS = _OWN_MARKERS + _ALSO
"""Byte strings, one of which is in each line that is read."""
_SOURCE = re.compile(r"^(?:\[pod/(?P<pod>[^\]\s]{1,300})\] |(?P<container>[\w.-]{1,100}) +\| )")
"""Pattern of the prefixes with which ``kubectl logs --prefix`` and ``docker compose logs`` name a line's
source."""
_STERN = re.compile(
    r"(?P<names>(?:[a-z0-9][a-z0-9.-]{0,252} ){2,3})(?:[\d-]{10}T?\S{8,20} )?"
    r"(?:\([A-Z]\w{1,40} pid=\d|(?:DEBUG|INFO|WARNING|ERROR) )"
)
"""Pattern of the prefix of ``stern`` (namespace, pod and container) before vLLM's own prefix."""
_FRONT_END = re.compile(r"\((APIServer pid=\d{1,10})\)")
"""Pattern of the name of the process that prints a server's periodic lines."""
_ACTOR = re.compile(r"\(([A-Za-z_][\w:.#/()-]{0,120} pid=\d{1,10}(?:, ip=[\d.]{7,15})?)\) ")
"""Pattern of the name with which Ray prefixes an actor's lines; an actor that prints periodic lines is a
front end."""
_PROCESS_PREFIX = 200
"""Number of characters at the beginning of a line to search for the process's name."""
_OF_A_TRACEBACK = re.compile(
    r"  +\S|Traceback \(most|The above exception|During handling of|[\w.]{0,200}(?:Error|Exception)\b"
)
"""Pattern of a traceback's line that a process printed without a prefix, as releases up to 0.10 do."""
_COUNTS = re.compile(r"\bRunning: \d{1,9} reqs, Waiting: \d{1,9} reqs\b")
_LINE_TIME = re.compile(r"\b(?:INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d")
_TAIL = 2**16
"""Number of bytes to search for the last time stamp, at the end of a file."""
_LONGEST_DUMP = 2000
"""Maximum number of lines over which a dumped step may be spread."""
MOST_SERVERS = 100
"""Maximum number of sources and starts, in total, that are told apart within one file."""


@dataclass
class ServerLog:
    """Lines of one server, from one start to the next."""

    source: str | None = None
    front_end: str | None = None
    """Name of the process that wrote the lines, if the log states it."""
    start: ServerStart = field(default_factory=ServerStart)
    start_lines: int = 0
    """Number of lines about the start."""
    engines: list[EngineLines] = field(default_factory=list)
    """Periodic lines of each engine, in the order of ranks."""
    step: DumpedStep | None = None
    begun_dump: int | None = None
    """Number of the line that begins a dumped step without ending it."""
    failure: Failure | None = None
    worker_waits: int = 0
    """Number of reports that one of vLLM's processes waited a long time for another."""
    last_s: float | None = None
    """Time of the log's last line, on the same clock as the periodic lines; None if unknown."""
    notices: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was read."""
        return not (self.engines or self.step or self.failure or self.start_lines)


class LineOrigin(NamedTuple):
    """Source and front end of a line, as far as the log names them."""

    source: str | None
    front_end: str | None


class _Server:
    """Parser's state for one server."""

    def __init__(self, origin: LineOrigin) -> None:
        self.origin = origin
        self.start = StartLines()
        self.failures = FailureLines()
        self.engines: dict[int | None, EngineLines] = {}
        self._step: DumpedStep | None = None
        self._begun_dump: int | None = None
        self._latest: EngineLines | None = None
        self._worker_waits = 0
        self._serves = False

    @property
    def is_started(self) -> bool:
        """Whether the start is over, so that further lines of a start belong to the next one."""
        return self._has_engine or self.failures.announced

    @property
    def _has_engine(self) -> bool:
        return self._serves or bool(self.engines) or self.start.facts.kv_cache_tokens is not None

    def take(self, number: int, line: str) -> None:
        """Evaluate a line."""
        if (snapshot := snapshot_in(line)) is not None:
            rank, engines, content = snapshot
            self._latest = self.engines.setdefault(rank, EngineLines(rank, engines))
            self._latest.add(content)
        elif (step := step_in(line) or step_with_stats(line, self._step)) is not None:
            self._step = step
        elif self._step is None and begins_dump(line):
            self._step, self._begun_dump = DumpedStep(), number
        elif self._latest is not None and (acceptance := acceptance_in(line)) is not None:
            self._latest.add_acceptance(acceptance)
        elif _WORKER_WAIT in line:
            self._worker_waits += 1
        elif _STARTED in line:
            self._serves = True
        elif not self.start.take(line):
            self.failures.take(number, line)

    def log(self) -> ServerLog:
        """Return the log that has been read so far."""
        engines = sorted(self.engines.values(), key=lambda engine: engine.engine_rank or 0)
        repeats = sum(engine.repeats for engine in engines)
        notices = [f"{repeats:,} repeated periodic lines are left out"] if repeats else []
        failure, step = self.failures.failure(has_engine=self._has_engine), self._step
        is_dump = step is not None and (step.scheduled_tokens is not None or self._begun_dump is not None)
        if failure is None and not is_dump:
            step = None  # statistics that somebody logs are no dump
        return ServerLog(
            source=self.origin.source,
            front_end=self.origin.front_end,
            start=self.start.facts,
            start_lines=self.start.lines,
            engines=engines,
            step=step,
            begun_dump=self._begun_dump,
            failure=failure,
            worker_waits=self._worker_waits,
            notices=notices,
        )


def read_vllm_log(path: Path) -> list[ServerLog]:
    """Read the servers in a log, in the order of their first lines.

    Text that clients sent, which vLLM may log, is ignored.
    """
    servers: dict[LineOrigin, _Server] = {}
    origins = _Origins(servers)
    logs: list[ServerLog] = []
    left_out = 0
    latest = LatestLines(console_lines.SNAPSHOT_MARKER, console_lines.LATEST_SNAPSHOTS)
    lines = marked_lines(path, MARKERS, latest)
    for place, (number, source, line) in enumerate(_records(lines), start=1):
        origin = origins.origin(source, line)
        server = servers.get(origin)
        is_periodic = console_lines.FIRST_FIGURE in line
        if server is not None and not is_periodic and server.is_started and server.start.begins_start(line):
            logs.append(server.log())
            server = None
        if server is None:
            if len(logs) + len(servers) >= MOST_SERVERS:
                left_out += 1
                continue
            server = servers[origin] = _Server(origin)
        server.take(number, line)
        if place % console_lines.LATEST_SNAPSHOTS == 0:
            engines = [engine for log in logs for engine in log.engines]
            engines += [engine for server in servers.values() for engine in server.engines.values()]
            for engine in engines:  # equally many lines of each
                engine.keep_latest(console_lines.LATEST_SNAPSHOTS // len(engines))
    logs += [server.log() for server in servers.values()]
    logs = [log for log in logs if not log.is_empty]
    origins.add_front_ends(logs)
    for log in logs:
        _complete(path, log, latest.left_out)
    if not logs:
        msg = f"{path}: not one line of vLLM's log is understood"
        raise InputError(msg)
    if len(logs) == 1:
        logs[0].last_s = _last_time(path)
    logs[0].notices += [*origins.front_end_notices(), *_about_the_file(path, left_out)]
    return logs


class _Origins:
    """Assignment of lines to servers, which may share a terminal; engines do not name their front end.

    Args:
        servers: Servers that are being read, by origin.
    """

    def __init__(self, servers: dict[LineOrigin, _Server]) -> None:
        self._servers = servers
        self._latest: dict[str | None, LineOrigin] = {}
        """Origin of the latest line that names a front end, by the line's source."""
        self._seen: set[LineOrigin] = set()
        self._at_once = False
        self._actors: set[str] = set()
        """Ray actors that have printed a periodic line."""

    def origin(self, source: str | None, line: str) -> LineOrigin:
        """Return a line's origin; an engine's line belongs to the starting server, or else to the latest."""
        front_end = self._front_end(line)
        if front_end is None:
            starting = (
                origin
                for origin, server in reversed(self._servers.items())
                if origin.source == source and not server.is_started
            )
            return next(starting, self._latest.get(source, LineOrigin(source, None)))
        origin = LineOrigin(source, front_end)
        before = self._latest.get(source)
        if origin != before:
            self._at_once |= origin in self._seen
            self._seen.add(origin)
            self._latest[source] = origin
            unnamed = LineOrigin(source, None)
            if before is None and unnamed in self._servers:
                self._servers[origin] = self._servers.pop(unnamed)
                self._servers[origin].origin = origin
        return origin

    def _front_end(self, line: str) -> str | None:
        """Return the front end that a line names."""
        if match := _FRONT_END.search(line, 0, _PROCESS_PREFIX):
            return match[1]
        actor = _ACTOR.search(line, 0, _PROCESS_PREFIX)
        if actor is None:
            return None
        if console_lines.FIRST_FIGURE in line:
            self._actors.add(actor[1])
        return actor[1] if actor[1] in self._actors else None

    def add_front_ends(self, logs: Iterable[ServerLog]) -> None:
        """Add the front end to the source of each log if a source has several front ends."""
        front_ends = Counter(origin.source for origin in self._seen)
        for log in logs:
            if front_ends[log.source] > 1 and log.front_end is not None:
                log.source = log.front_end if log.source is None else f"{log.source}, {log.front_end}"

    def front_end_notices(self) -> Iterator[str]:
        """Yield a notice if lines of several front ends alternate."""
        if self._at_once:
            yield (
                "several servers wrote this log at once: a line that does not name its front end may be of "
                "another server"
            )


def _records(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str | None, str]]:
    """Yield line number, source and text of each log record, without the parts that clients sent."""
    pods: set[str] = set()
    for number, line in lines:
        prefix = _SOURCE.match(line)
        source = None if prefix is None else prefix["pod"] or prefix["container"]
        if source is None:
            stern = _STERN.match(line)
            if stern is not None and "-" in stern["names"]:  # as in a pod's name, not in words of a sentence
                names = stern["names"]
                if len(pods) < MOST_SERVERS:
                    pods.add(names)
            else:
                names = next((names for names in pods if line.startswith(names)), "")
            source = names.rstrip().replace(" ", "/") or None
        for record in records_in(line):
            yield number, source, record


def _about_the_file(path: Path, left_out: int) -> Iterator[str]:
    if left_out:
        yield f"the file has more than {MOST_SERVERS} sources and starts: {left_out:,} lines are left out"
    lines = [line for line in first_sample(path).sample_lines if line.strip()]
    records = (record for line in lines if is_log_line(line) for record in records_in(line))
    broken = sum(_COUNTS.search(record) is not None and snapshot_in(record) is None for record in records)
    if broken:
        yield f"{broken:,} periodic line{'s are' if broken > 1 else ' is'} shortened or broken, and left out"
    prose = sum(not (is_log_line(line) or _OF_A_TRACEBACK.match(line)) for line in lines)
    if prose > len(lines) / 2 and not first_sample(path).is_json:
        yield "most lines are no log lines: if the file merely quotes a log, give the log itself"


def _complete(path: Path, log: ServerLog, left_out: int) -> None:
    """Add a notice if old periodic lines were dropped; read a dumped step that is spread over several lines.

    If the dumped step remains incomplete, a notice is added, too.

    Args:
        path: Path of the log.
        log: Lines of one of its servers.
        left_out: Number of the file's periodic lines that were dropped unread.
    """
    lines_read = sum(engine.lines for engine in log.engines) + left_out
    latest = sum(len(engine.snapshots) for engine in log.engines)
    if latest < lines_read:
        log.notices.append(
            f"the file is long: only the latest {latest:,} of {lines_read:,} periodic lines count"
        )
    first, step = log.begun_dump, log.step
    if first is None or step is None or step.scheduled_tokens is not None:
        return
    lines: list[str] = []
    for number, line in text_lines(path):
        if number > first and (_LINE_TIME.search(line) or len(lines) >= _LONGEST_DUMP):
            break
        if number >= first:
            lines.append(line)
    if (joined := step_over_lines(lines)) is not None:
        stats = {name: getattr(step, name) for name in ("running", "waiting", "kv_cache_usage_frac")}
        log.step = msgspec.structs.replace(joined, **stats)
    else:
        log.notices.append(
            f"line {first:,}: the dump of a step is cut off or broken, so that its tokens and requests are "
            "unknown"
        )


def _last_time(path: Path) -> float | None:
    """Return the time of the last line with vLLM's own timestamp; None for a compressed file."""
    with reading(path), opened(path) as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL))
        tail = file.read(_TAIL).decode(errors="replace")
    times = _LINE_TIME.findall(tail)
    return time_in(times[-1]) if times else None


def is_vllm_log(sample: FileSample) -> bool:
    """Return whether a block has a periodic line, a dumped step, or lines about a start or its failure."""
    if sample.is_binary:
        return False
    markers = [marker.decode() for marker in READER.markers]
    for line in sample.sample_lines:
        if any(marker in line for marker in markers):
            text = line[: quoted_from(line)]
            if snapshot_in(text) or step_in(text) or begins_dump(text) or StartLines().take(text):
                return True
            if not sample.is_json and announces_failure(text):
                return True
    return (
        not sample.is_json
        and failure_lines.IN_ENGINE in sample.content
        and shows_failure(sample.sample_lines)
    )


def has_snapshots(sample: FileSample) -> bool:
    """Return whether a block has a periodic line, which takes precedence over all other content of a file."""
    marker = console_lines.SNAPSHOT_MARKER
    return (
        not sample.is_binary
        and marker in sample.content
        and any(
            snapshot_in(line[: quoted_from(line)]) is not None
            for line in sample.sample_lines
            if marker.decode() in line
        )
    )


READER = RecordReader(
    name=NAME,
    reads="periodic lines, a start or a failure",
    matches=is_vllm_log,
    read=read_vllm_log,
    samples=("12-console-v1.log", "14-scheduler-dump-k8s.log"),
    markers=(*_OWN_MARKERS, *failure_lines.OWN_MARKERS),
)
