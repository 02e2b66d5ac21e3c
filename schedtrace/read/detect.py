"""Which kind of record a file is, told from its content."""

from collections.abc import Callable
from pathlib import Path

from schedtrace.errors import InputError
from schedtrace.model.regular import opened
from schedtrace.read.iteration_log import ITERATION, read_iteration_log
from schedtrace.read.loguru_log import read_loguru_log
from schedtrace.read.loguru_record import BEGINS
from schedtrace.read.options import READ, ReadOptions
from schedtrace.read.trace import Trace, read_trace

HEAD = 2**20
"""Bytes at the start of a file in which its kind must show; vLLM's own lines may come before."""
UNDERSTOOD = (
    "expected a trace of schedtrace (engine-<rank>.jsonl), a log of a patched schedule() "
    "({'token_budget': ..., 'requests': [...]}), or vLLM's log with --enable-logging-iteration-details"
)

Reader = Callable[[Path], list[Trace]]


def read_record(path: Path, options: ReadOptions = READ) -> list[Trace]:
    """Read a file of any kind; one trace an engine.

    Raises:
        InputError: it is of no known kind, or cannot be read.
    """
    reader = foreign_reader(path)
    if reader is not None:
        return reader(path)
    if path.suffix == ".jsonl" or _head(path).lstrip().startswith("{"):
        return [read_trace(path, options)]
    msg = f"{path}: not understood; {UNDERSTOOD}"
    raise InputError(msg)


def foreign_reader(path: Path) -> Reader | None:
    """What reads this file, if it is a foreign log.

    Raises:
        InputError: it cannot be read.
    """
    head = _head(path)
    if head.lstrip().startswith('{"type":"header"'):
        return None
    if BEGINS.search(head):
        return read_loguru_log
    return read_iteration_log if ITERATION.search(head) else None


def _head(path: Path) -> str:
    try:
        with opened(path) as file:
            return file.read(HEAD).decode(errors="replace")
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror})"
        raise InputError(msg) from error
