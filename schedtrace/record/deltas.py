"""Steps in written form, as changes from the step before (on the writer's thread)."""

from itertools import compress
from operator import attrgetter
from typing import Any

from schedtrace.model.delta import BEFORE_FIELDS, CARRIED_FIELDS, EVENT_FIELDS, OWN_FIELDS
from schedtrace.model.trace import Phase, RowChange, RowChanges, ScheduledRequest, Step
from schedtrace.record.capture import Rows


class LatestRows:
    """Rows of the latest step that was not steady; the steady steps after that step are only counted."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        """Requests of the step, in one list object for a step and the steady steps after it."""
        self._computed: list[int] = []
        self._scheduled: list[int] = []
        self._drafts: dict[str, int] = {}
        self.phases: dict[str, Phase] = {}
        """Phases, other than ``running``, of requests in the latest step that is not steady."""
        self.left: list[tuple[str, int]] = []
        """Requests of the preceding step that this step lacks, with their computed tokens."""
        self.steady_steps = 0
        """Number of steady steps since that step."""

    def token_counts(self) -> tuple[list[int], list[int]]:
        """Return the computed and the scheduled tokens of each request in the latest step."""
        if not self.steady_steps:
            return self._computed, self._scheduled
        return [tokens - 1 for tokens in self._expected()], [1] * len(self.ids)

    def next(self) -> list[tuple[str, int]]:
        """Return the requests of the latest step, with their computed tokens after it."""
        return list(zip(self.ids, self._expected(), strict=True))

    def _expected(self) -> list[int]:
        """Return the computed tokens of each request in the next step, if it is steady."""
        done = self.steady_steps
        return [
            computed + scheduled + done
            for computed, scheduled in zip(self._computed, self._scheduled, strict=True)
        ]

    def row_changes(self, rows: Rows, phases: dict[str, Phase]) -> RowChanges | None:
        """Advance to the next step; return the changes, or None if no ``RowChanges`` can express them.

        Args:
            rows: Rows of the next step.
            phases: Phase of each request whose phase is not ``running``.
        """
        before, expected = self.ids, self._expected()
        self.ids = rows.ids + [request_id for request_id, _ in rows.new] if rows.new else rows.ids
        self._computed = rows.computed + [tokens for _, tokens in rows.new] if rows.new else rows.computed
        self._scheduled = list(map(rows.scheduled.__getitem__, self.ids))
        self._drafts, self.phases, self.steady_steps = rows.drafts, phases, 0
        changes = RowChanges()
        remaining, self.left = before, []
        if self.ids[: len(before)] != before:
            stays = [request_id in rows.scheduled for request_id in before]
            rest = zip(before, expected, stays, strict=True)
            self.left = [(request_id, tokens) for request_id, tokens, stay in rest if not stay]
            changes.gone = [place for place, stay in enumerate(stays) if not stay]
            remaining, expected = list(compress(before, stays)), list(compress(expected, stays))
        number = len(remaining)
        if self.ids[:number] != remaining or (phases and not phases.keys().isdisjoint(remaining)):
            return None
        changes.added = self.requests(number)
        if rows.drafts or self._computed[:number] != expected or self._scheduled[:number].count(1) != number:
            tokens_now = zip(self._computed, self._scheduled, expected, strict=False)
            changes.changed = [
                RowChange(place, computed, scheduled, rows.drafts.get(self.ids[place], 0))
                for place, (computed, scheduled, steady) in enumerate(tokens_now)
                if computed != steady or scheduled != 1 or self.ids[place] in rows.drafts
            ]
        return changes

    def requests(self, first: int = 0) -> list[ScheduledRequest]:
        """Return the rows of the latest step, from place ``first`` on."""
        if first == len(self.ids):
            return []
        computed, scheduled = self.token_counts()
        drafts, phases = ({}, {}) if self.steady_steps else (self._drafts, self.phases)
        return [
            ScheduledRequest(
                request_id, before, tokens, phases.get(request_id, "running"), drafts.get(request_id, 0)
            )
            for request_id, before, tokens in zip(
                self.ids[first:], computed[first:], scheduled[first:], strict=True
            )
        ]


_OWN = [name for name in Step.__struct_fields__ if name in OWN_FIELDS]
_EVENTS = sorted(EVENT_FIELDS)
_carried, _events = attrgetter(*CARRIED_FIELDS), attrgetter(*_EVENTS)
_NONE = RowChanges()


class Deltas:
    """Latest step, to which the next delta refers."""

    def __init__(self) -> None:
        self.latest: Step | None = None
        """Step that the next delta is based on; None if it must be written in full."""
        self._carried: tuple[Any, ...] = ()

    def set_base(self, step: Step) -> None:
        """Store a step with a full line as the latest step."""
        self.latest, self._carried = step, _carried(step)

    def delta(self, step: Step, changes: RowChanges | None) -> dict[str, Any]:
        """Return the ``Delta`` of a step as a dict, ready to be encoded.

        Args:
            step: Step without its requests.
            changes: Changes of the requests; None if there are none.

        Raises:
            ValueError: If there is no step before it.
        """
        before, carried_before = self.latest, self._carried
        if before is None:
            msg = "no step came before"
            raise ValueError(msg)
        self.latest, self._carried = step, _carried(step)
        line: dict[str, Any] = {"type": "delta"} | {name: getattr(step, name) for name in _OWN}
        if step.output_us is not None:
            line["output_us"], line["update_us"] = step.output_us, step.update_us
            if step.output_tokens != step.total_requests:
                line["output_tokens"] = step.output_tokens
            if step.execute_us is not None:
                line["execute_after_us"], line["execute_us"] = step.execute_after_us, step.execute_us
        if self._carried != carried_before:
            triples = zip(CARRIED_FIELDS, self._carried, carried_before, strict=True)
            line |= {name: value for name, value, old in triples if value != old}
        for name, after in BEFORE_FIELDS.items():
            if (value := getattr(step, name)) != getattr(before, after):
                line[name] = value
        line |= {name: value for name, value in zip(_EVENTS, _events(step), strict=True) if value}
        if changes is not None and changes != _NONE:
            line["changes"] = changes
        return line
