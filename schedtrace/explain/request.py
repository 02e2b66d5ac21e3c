"""One request's life."""

from itertools import pairwise

from schedtrace.explain.events import life_events
from schedtrace.explain.find import find_request
from schedtrace.explain.rows import RequestRows, request_rows
from schedtrace.explain.waits import waits
from schedtrace.model.facts import Fact
from schedtrace.model.life import MOST_GAPS, Gap, Life
from schedtrace.read.run import Run
from schedtrace.timeline.timeline import Timeline, make_timeline


def explain_request(run: Run, text: str) -> Life:
    """The life of the request that ``text`` names.

    Args:
        run: A run.
        text: Its id, or the beginning or end of it.

    Raises:
        UsageError: no request matches, or several do, or the record does not tell enough.
    """
    trace, request_id = find_request(run, text)
    trace.require(Fact.TIMES, "request")
    return request_life(run, make_timeline(trace, run.manifest, whole=True), request_id)


def request_life(run: Run, timeline: Timeline, request_id: str) -> Life:
    """The same from a timeline of the whole trace, which many lives can share, by the whole id."""
    rows = request_rows(timeline, request_id)
    states, gaps = rows.life_states(), _gaps(rows)
    came, gone = rows.arrival or {}, rows.finish or {}
    first_token = rows.first_token_us
    return Life(
        path=str(run.path),
        label=run.label,
        engine_rank=timeline.rank,
        request_id=request_id,
        trial=came.get("trial"),
        prompt_tokens=came.get("prompt_tokens", gone.get("prompt_tokens")),
        max_tokens=came.get("max_tokens"),
        output_tokens=gone.get("output_tokens"),
        cached_tokens=next((row["computed_tokens"] for row in rows.scheduled if row["phase"] == "new"), None),
        num_preemptions=sum(one["in_schedule"] for one in rows.preemptions),
        num_cache_resets=sum(not one["in_schedule"] for one in rows.preemptions),
        status=gone.get("status"),
        e2e_ms=None if rows.end_us is None else rows.since_us(rows.end_us),
        ttft_ms=None if first_token is None else rows.since_us(first_token),
        states=states,
        events=life_events(rows, waits(states)),
        outputs=len(gaps) + 1 if first_token is not None else 0,
        mean_gap_ms=sum(gap.gap_ms for gap in gaps) / len(gaps) if gaps else None,
        gaps=sorted(gaps, key=lambda gap: -gap.gap_ms)[:MOST_GAPS],
        problems=timeline.missing,
    )


def _gaps(rows: RequestRows) -> list[Gap]:
    """The time between successive outputs."""
    back = [row for row in rows.scheduled if row["outputs"] and row["output_us"] is not None]
    return [
        Gap(
            step=after["step"],
            gap_ms=(after["output_us"] - before["output_us"]) / 1e3,
            preempted=any(before["step"] <= lost["step"] <= after["step"] for lost in rows.preemptions),
        )
        for before, after in pairwise(back)
    ]
