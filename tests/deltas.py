"""Full steps told as deltas: a simple encoder of trace format, made from its page and nothing else."""

from collections.abc import Sequence
from typing import Any

import msgspec

from schedtrace.model.delta import (
    BEFORE_FIELDS,
    CARRIED_FIELDS,
    EVENT_FIELDS,
    OUTPUT_FIELDS,
    OWN_FIELDS,
    Delta,
)
from schedtrace.model.trace import RowChange, RowChanges, ScheduledRequest, Step


def row_changes(before: Sequence[ScheduledRequest], after: Sequence[ScheduledRequest]) -> RowChanges | None:
    """What leads from the one list to the other; None: nothing can."""
    there = {row.request_id for row in after}
    gone = [place for place, row in enumerate(before) if row.request_id not in there]
    kept = [row for row in before if row.request_id in there]
    if [row.request_id for row in kept] != [row.request_id for row in after[: len(kept)]]:
        return None
    changed = []
    for place, (was, now) in enumerate(zip(kept, after, strict=False)):
        if now.phase != "running":
            return None
        as_expected = (was.computed_tokens + was.scheduled_tokens, 1, 0)
        if (now.computed_tokens, now.scheduled_tokens, now.draft_tokens) != as_expected:
            changed.append(RowChange(place, now.computed_tokens, now.scheduled_tokens, now.draft_tokens))
    return RowChanges(gone, changed, list(after[len(kept) :]))


def delta(before: Step, step: Step) -> msgspec.Struct | None:
    """The step's line if the one before is known; None: it cannot be a delta."""
    changes = row_changes(before.requests, step.requests)
    if changes is None or step.step != before.step + 1:
        return None
    told: dict[str, Any] = {name: getattr(step, name) for name in OWN_FIELDS | EVENT_FIELDS}
    told |= {name: getattr(step, name) for name in CARRIED_FIELDS if _differ(step, name, before, name)}
    told |= {
        name: getattr(step, name) for name, of in BEFORE_FIELDS.items() if _differ(step, name, before, of)
    }
    told |= {name: getattr(step, name) for name in OUTPUT_FIELDS if getattr(step, name) is not None}
    if step.output_us is not None and step.output_tokens == step.total_requests:
        del told["output_tokens"]
    elif step.output_us is not None:
        told["output_tokens"] = step.output_tokens
    return Delta(**told, changes=None if changes == RowChanges() else changes)


class Deltas:
    """Steps to lines: of so many the first in full, the others as deltas where they can be."""

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._before: Step | None = None
        self._count = 0

    def line_of(self, step: Step) -> msgspec.Struct:
        """The line of the next step."""
        line = delta(self._before, step) if self._before is not None else None
        if line is None or not self._count % self._full_every:
            changes = line and (row_changes(self._before.requests, step.requests) or RowChanges())
            line = msgspec.structs.replace(step, changes=changes)
        self._before, self._count = step, self._count + 1
        return line


def _differ(step: Step, name: str, before: Step, other: str) -> bool:
    return bool(getattr(step, name) != getattr(before, other))
