"""The requests of the latest step, and the next ones told by what changes (writer's thread)."""

from schedtrace.model.trace import Phase, RowChange, RowChanges, ScheduledRequest
from schedtrace.record.capture import Rows


class LatestRows:
    """The rows of a step; steady steps after it are only counted."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        """One list object for a step and the steady steps after it."""
        self._computed: list[int] = []
        self._scheduled: list[int] = []
        self._drafts: dict[str, int] = {}
        self.phases: dict[str, Phase] = {}
        """Of those requests of the latest step that is not steady which are not ``running``."""
        self._steady = 0

    def goes_on(self) -> None:
        """A steady step."""
        self._steady += 1

    def counts(self) -> tuple[list[int], list[int]]:
        """Computed and scheduled tokens of each, in the latest step."""
        if not self._steady:
            return self._computed, self._scheduled
        return [tokens - 1 for tokens in self._expected()], [1] * len(self.ids)

    def _expected(self) -> list[int]:
        """Computed tokens of each in the next step, if it is steady."""
        done = self._steady
        return [
            computed + scheduled + done
            for computed, scheduled in zip(self._computed, self._scheduled, strict=True)
        ]

    def become(self, rows: Rows, phases: dict[str, Phase]) -> RowChanges | None:
        """Go to the next step; returns what changed, or None if that cannot be told as changes.

        Args:
            rows: Of the next step.
            phases: Of those requests that are not ``running``.
        """
        before, expected = self.ids, self._expected()
        self.ids = rows.ids + [request_id for request_id, _ in rows.new] if rows.new else rows.ids
        self._computed = rows.computed + [tokens for _, tokens in rows.new] if rows.new else rows.computed
        self._scheduled = list(map(rows.scheduled.__getitem__, self.ids))
        self._drafts, self.phases, self._steady = rows.drafts, phases, 0
        changes = RowChanges()
        kept = before
        if self.ids[: len(before)] != before:
            changes.gone = [place for place, one in enumerate(before) if one not in rows.scheduled]
            kept = [one for one in before if one in rows.scheduled]
            expected = [tokens for one, tokens in zip(before, expected, strict=True) if one in rows.scheduled]
        number = len(kept)
        if self.ids[:number] != kept or any(phase_of in phases for phase_of in kept if phases):
            return None
        changes.added = self._requests(number)
        if rows.drafts or self._computed[:number] != expected or self._scheduled[:number].count(1) != number:
            changes.changed = self._changed(expected)
        return changes

    def _changed(self, expected: list[int]) -> list[RowChange]:
        drafts = self._drafts
        return [
            RowChange(place, computed, scheduled, drafts.get(self.ids[place], 0))
            for place, (computed, scheduled, wanted) in enumerate(
                zip(self._computed, self._scheduled, expected, strict=False)
            )
            if computed != wanted or scheduled != 1 or self.ids[place] in drafts
        ]

    def requests(self) -> list[ScheduledRequest]:
        """All rows of the latest step."""
        return self._requests(0)

    def _requests(self, first: int) -> list[ScheduledRequest]:
        if first == len(self.ids):
            return []
        computed, scheduled = self.counts()
        drafts, phases = ({}, {}) if self._steady else (self._drafts, self.phases)
        return [
            ScheduledRequest(one, before, tokens, phases.get(one, "running"), drafts.get(one, 0))
            for one, before, tokens in zip(self.ids[first:], computed[first:], scheduled[first:], strict=True)
        ]
