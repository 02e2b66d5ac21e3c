"""The pages of ``step`` and ``request`` as HTML for the steps and requests that a report names."""

from collections.abc import Sequence

from schedtrace.explain.request import request_life
from schedtrace.explain.step import StepStories
from schedtrace.model.printable import visible
from schedtrace.present.pages.request import request_page
from schedtrace.present.pages.step import step_page
from schedtrace.present.renderers.html import fragment, request_link, step_link
from schedtrace.read.run import Run
from schedtrace.timeline.timeline import Timeline


def stories(
    run: Run,
    timelines: Sequence[Timeline],
    steps: Sequence[tuple[int, int]],
    request_ids: Sequence[str],
    *,
    level: int = 2,
) -> dict[str, str]:
    """Fragments by the part of an address that leads to them: ``step=264&rank=0``, ``request=t1-3``.

    Args:
        run: A run.
        timelines: Its timelines, one a rank, each of a whole trace (``make_timeline(..., whole=True)``).
        steps: Rank and number of each step.
        request_ids: Whole ids.
        level: Of the headlines.

    Raises:
        UsageError: there is no such step.
        KeyError: there is no such rank.
    """
    by_rank = {timeline.rank: StepStories(run, timeline) for timeline in timelines}
    found = {
        step_link(step, rank): fragment(step_page(by_rank[rank].story(step)), rank=rank, level=level)
        for rank, step in dict.fromkeys(steps)
    }
    for request_id in dict.fromkeys(request_ids):
        for timeline in timelines:
            if _knows(timeline, request_id):
                page = request_page(request_life(run, timeline, request_id))
                found[request_link(visible(request_id))] = fragment(page, rank=timeline.rank, level=level)
                break
    return found


def _knows(timeline: Timeline, request_id: str) -> bool:
    return request_id in timeline.request_states["request_id"]
