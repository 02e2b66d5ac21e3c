"""Search for the request that a user's text names: by its whole id, or by the id's beginning or end."""

from collections.abc import Callable

import polars as pl

from schedtrace.errors import UsageError
from schedtrace.model.printable import capped, hashed, kept_prefix, visible
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace

MOST_LISTED = 8


def find_request(run: Run, text: str) -> tuple[Trace, str]:
    """Return the trace that contains the request, and the request's whole id.

    The first of these rules that matches an id decides:

    1. it equals ``text``: as it is, as it is printed, or as the trace writes it (cut or hashed);
    2. it begins or ends with ``text`` at a dash (``t1-1`` matches ``t1-1-99fdf569``, not ``t1-12-...``);
    3. it begins or ends with ``text``;
    4. it is cut, and ``text`` has the same beginning. (vLLM appends to a client's id, so the hash differs.)

    Raises:
        UsageError: If no request matches, or several do.
    """
    ids = {request_id: trace for trace in run.traces for request_id in _ids(trace)}
    written = {hashed(text) if trace.header.hashed_ids else capped(text) for trace in run.traces}
    rules: list[Callable[[str], bool]] = [
        lambda whole: text in {whole, visible(whole)} or whole in written,
        lambda whole: any(
            name.startswith(f"{text}-") or name.endswith(f"-{text}") for name in {whole, visible(whole)}
        ),
        lambda whole: any(name.startswith(text) or name.endswith(text) for name in {whole, visible(whole)}),
        lambda whole: (prefix := kept_prefix(whole)) is not None and text.startswith(prefix),
    ]
    for matches in rules:
        matching = [whole for whole in ids if text and matches(whole)]
        if len(matching) == 1:
            return ids[matching[0]], matching[0]
        if matching:
            more = f" and {len(matching) - MOST_LISTED} more" if len(matching) > MOST_LISTED else ""
            listed = ", ".join(matching[:MOST_LISTED])
            msg = f"request {capped(text)}: {len(matching)} requests match: {listed}{more}"
            raise UsageError(msg)
    listed = f"such as {', '.join(list(ids)[:3])}" if ids else "none at all"
    msg = f"request {capped(text)}: no request of {run.path} matches; it has {len(ids):,} requests, {listed}"
    raise UsageError(msg)


def _ids(trace: Trace) -> list[str]:
    scheduled = trace.stretches().select("request_id").unique(maintain_order=True).collect()
    starts = trace.present.select("request_id"), trace.arrivals.select("request_id")
    frames = [*starts, trace.finishes.select("request_id"), scheduled]
    return pl.concat(frames)["request_id"].unique(maintain_order=True).to_list()
