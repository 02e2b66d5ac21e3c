"""A trace with every step in full, for eyes and for tools that know no deltas."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from schedtrace.model.trace import Delta, Output, ScheduledRequest, Step
from schedtrace.read.chain import Chain
from schedtrace.read.deltas import FIELDS
from schedtrace.read.lines import AS_READ, decode_line
from schedtrace.read.options import READ, ReadOptions
from schedtrace.read.whole_lines import WholeLines

_STEP: Any = AS_READ[Step]
_DELTA: Any = AS_READ[Delta]
_OUTPUT: Any = AS_READ[Output]
_LATE = tuple(name for name in Output.__struct_fields__ if name != "step")


def expanded(path: Path, options: ReadOptions = READ) -> Iterator[bytes]:
    """The lines of a trace, without newlines: each step in full and with its output, all others as they are.

    Steps that cannot be rebuilt, broken lines and ``output`` lines are left out.

    Args:
        path: A trace that ``read_trace`` accepts.
        options: Its chunks and progress are used.

    Raises:
        InputError: it cannot be read.
    """
    outputs: dict[int, Any] = {}
    for _, read in _lines(WholeLines(path, options.chunk_bytes)):
        if isinstance(read, _OUTPUT):
            outputs.setdefault(read.step, read)
    chain = Chain(lambda _: None)
    for raw, read in _lines(WholeLines(path, options.chunk_bytes, options.progress)):
        if read is None or isinstance(read, (_STEP, _DELTA)):
            values = chain.take(read)
            if values is not None:
                yield _full_line(dict(zip(FIELDS, values, strict=True)), read, chain, outputs)
        elif not isinstance(read, _OUTPUT):
            yield raw


def _lines(lines: WholeLines) -> Iterator[tuple[bytes, Any]]:
    """Each line as it is and as read; None: it is broken."""
    for _, chunk in lines:
        yield from ((line, decode_line(line)) for line in chunk if line.strip())


def _full_line(values: dict[str, Any], read: Any, chain: Chain, outputs: dict[int, Any]) -> bytes:
    late = outputs.get(read.step)
    if late is not None:
        values |= {name: getattr(late, name) for name in _LATE}
    if isinstance(read, _STEP):
        requests = read.requests
    else:
        requests = [ScheduledRequest(*row) for row in chain.running.rows()]
    return msgspec.json.encode(Step(**values, requests=requests))
