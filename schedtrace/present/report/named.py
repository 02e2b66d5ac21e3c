"""What a report's findings name: steps to mark, and steps and requests that are told in full."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from schedtrace.model.message import Message, Request, Requests
from schedtrace.model.report import Finding, RunReport
from schedtrace.present.phrases import plain

MOST_STORIES, FEWEST_STORIES = 40, 6
"""Steps and requests told in full; fewer of a long trace, where each takes half a second."""


@dataclass
class Named:
    """Steps and requests that findings name, the most important finding's first."""

    steps: dict[int, list[int]] = field(default_factory=dict)
    """By rank, each step once."""
    requests: list[str] = field(default_factory=list)
    examples: list[tuple[int, int]] = field(default_factory=list)
    """Rank and number of the first step of each finding."""


def named(report: RunReport) -> Named:
    """What a run's findings and their symptoms name."""
    found = Named()
    for finding in report.every_finding():
        own = found.steps.setdefault(finding.engine_rank, [])
        own += finding.steps
        found.examples += [(finding.engine_rank, step) for step in finding.steps[:1]]
        found.requests += _requests(finding)
    found.steps = {rank: list(dict.fromkeys(steps)) for rank, steps in found.steps.items()}
    found.requests = list(dict.fromkeys(found.requests))
    found.examples = list(dict.fromkeys(found.examples))
    return found


def marked(report: RunReport) -> list[dict[str, Any]]:
    """For the page: the root causes that name steps, in their order."""
    return [
        {
            "title": plain(finding.title),
            "severity": finding.severity,
            "rank": finding.engine_rank,
            "ranks": finding.engine_ranks or [finding.engine_rank],
            "steps": ranges(finding.steps),
            "cause": finding.cause,
            "named": len(finding.steps),
            "count": finding.count,
        }
        for finding in report.findings
        if finding.title and finding.steps
    ]


def ranges(steps: list[int]) -> list[list[int]]:
    """Steps as the first and last of each run of them that follow each other."""
    ordered = sorted(set(steps))
    if not ordered:
        return []
    cuts = [at + 1 for at, (here, there) in enumerate(pairwise(ordered)) if there != here + 1]
    return [
        [ordered[first], ordered[last - 1]]
        for first, last in zip([0, *cuts], [*cuts, len(ordered)], strict=True)
    ]


def _requests(finding: Finding) -> Iterator[str]:
    messages: list[Message] = [finding.message, finding.holder, finding.verdict]
    messages += [finding.example] if finding.example else []
    for one in messages:
        for part in one.parts():
            if isinstance(part, Request):
                yield part.request_id
            elif isinstance(part, Requests):
                yield from part.request_ids
