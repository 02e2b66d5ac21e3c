"""The request that a person means by a part of its id."""

from collections.abc import Callable

import polars as pl

from schedtrace.errors import UsageError
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace

MOST_LISTED = 8


def find_request(run: Run, text: str) -> tuple[Trace, str]:
    """The trace and the whole id.

    An id that is ``text`` comes first; then one that begins or ends with it at a dash (``t1-1`` means
    ``t1-1-99fdf569``, not ``t1-12-...``), then one that begins or ends with it anyhow.

    Raises:
        UsageError: no request is meant, or several are.
    """
    ids = {request_id: trace for trace in run.traces for request_id in _ids(trace)}
    ways: list[Callable[[str], bool]] = [
        lambda whole: whole == text,
        lambda whole: whole.startswith(f"{text}-") or whole.endswith(f"-{text}"),
        lambda whole: whole.startswith(text) or whole.endswith(text),
    ]
    for way in ways:
        found = [whole for whole in ids if text and way(whole)]
        if len(found) == 1:
            return ids[found[0]], found[0]
        if found:
            more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
            msg = f"request {text}: {len(found)} requests are meant: {', '.join(found[:MOST_LISTED])}{more}"
            raise UsageError(msg)
    there = f"such as {', '.join(list(ids)[:3])}" if ids else "and no other either"
    msg = f"request {text}: none of this id in {run.path}, which has {len(ids):,} requests, {there}"
    raise UsageError(msg)


def _ids(trace: Trace) -> list[str]:
    scheduled = trace.stretches().select("request_id").unique(maintain_order=True).collect()
    frames = [trace.arrivals.select("request_id"), trace.finishes.select("request_id"), scheduled]
    return pl.concat(frames)["request_id"].unique(maintain_order=True).to_list()
