"""History of a request."""

from collections.abc import Callable
from itertools import pairwise

import polars as pl

from schedtrace.errors import UsageError
from schedtrace.explain.request_events import RequestRows, life_events, queue_stays, request_rows
from schedtrace.model.printable import capped, hashed, kept_prefix, visible
from schedtrace.model.story import MOST_GAPS, Gap, Life
from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.frames import offset
from schedtrace.timeline.timeline import Timeline, make_timeline

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


def explain_request(run: Run, text: str) -> Life:
    """Return the history of the request that ``text`` names.

    Args:
        run: A run.
        text: Id of the request, or its beginning or end.

    Raises:
        UsageError: If no request matches, or several do, or the record lacks facts.
    """
    for trace in run.traces:
        for fact in (Fact.REQUESTS, Fact.TIMES):
            trace.require(fact, "request")
    trace, request_id = find_request(run, text)
    return request_life(run, make_timeline(trace, run.manifest, whole=True), request_id)


def request_life(run: Run, timeline: Timeline, request_id: str) -> Life:
    """Return the history of the request with this whole id, from a timeline of the whole trace.

    Callers may reuse the timeline for several requests.
    """
    rows = request_rows(timeline, request_id)
    states, gaps = rows.life_states(), _gaps(rows)
    arrival, gone = rows.arrival or rows.present or {}, rows.finish or {}
    first_token = rows.first_token_us
    return Life(
        path=str(run.path),
        label=run.label,
        engine_rank=timeline.rank,
        request_id=request_id,
        trial=arrival.get("trial"),
        into_recording_ms=(rows.begin_us + offset(timeline.header, run.traces.headers[0]).us) / 1e3,
        prompt_tokens=arrival.get("prompt_tokens", gone.get("prompt_tokens")),
        max_tokens=arrival.get("max_tokens"),
        output_tokens=gone.get("output_tokens"),
        cached_tokens=next((row["computed_tokens"] for row in rows.scheduled if row["phase"] == "new"), None),
        num_preemptions=sum(preemption["in_schedule"] for preemption in rows.preemptions),
        num_cache_resets=sum(not preemption["in_schedule"] for preemption in rows.preemptions),
        status=gone.get("status"),
        e2e_ms=None if rows.end_us is None else rows.since_us(rows.end_us),
        ttft_ms=None if first_token is None else rows.since_us(first_token),
        states=states,
        events=life_events(rows, queue_stays(states)),
        outputs=len(gaps) + 1 if first_token is not None or (rows.present and gaps) else 0,
        mean_gap_ms=sum(gap.gap_ms for gap in gaps) / len(gaps) if gaps else None,
        gaps=sorted(gaps, key=lambda gap: -gap.gap_ms)[:MOST_GAPS],
        problems=timeline.missing,
    )


def _gaps(rows: RequestRows) -> list[Gap]:
    """Return the time between successive outputs."""
    back = [row for row in rows.scheduled if row["outputs"] and row["output_us"] is not None]
    return [
        Gap(
            step=after["step"],
            gap_ms=(after["output_us"] - before["output_us"]) / 1e3,
            preempted=any(before["step"] <= lost["step"] <= after["step"] for lost in rows.preemptions),
        )
        for before, after in pairwise(back)
    ]
