"""Tells steady steps from others, on the scheduler's path: nothing of a steady step's requests is kept.

At scale nearly every step is steady: the same requests in the same order, each one token further and given
one token. All of that is compared, at C speed: no sum or count stands for it. Computed tokens are packed into
one large number: 32 bits for each request, so adding the number of all ones adds one to each, exactly.
"""

import struct
from collections.abc import Collection
from itertools import compress
from typing import Any

from schedtrace.record.capture import Rows

FULL_EVERY_NS = 900_000_000
"""A step is written in full after this long at the latest; the writer adds no delay to that."""


class SteadySteps:
    """The requests of the latest step, as far as the next one can be compared with them.

    Args:
        never: Take no step for steady: every line is to be written in full.
    """

    def __init__(self, *, never: bool = False) -> None:
        self._never = never
        self._ids: list[str] | None = None
        """None: the next step's requests must be kept, whatever they are."""
        self._computed = 0
        """Computed tokens of each, in a number."""
        self._ones: list[int] = []
        self._one_each = 0
        """The same, in a number."""
        self._pack = struct.Struct("").pack
        self._full_ns = 0

    def forget(self) -> None:
        """A step is not going to be recorded: the next one cannot be told by its difference to it."""
        self._ids = None
        self._full_ns = 0

    def rows(self, output: Any, now_ns: int) -> tuple[Rows | None, bool]:
        """The requests of a step, None if it is steady; and whether it is time for a line in full.

        Args:
            output: vLLM's ``SchedulerOutput``.
            now_ns: Monotonic time.
        """
        cached = output.scheduled_cached_reqs
        ids, computed = cached.req_ids, cached.num_computed_tokens
        full = self._never or now_ns - self._full_ns >= FULL_EVERY_NS
        if (
            ids == self._ids
            and not full
            and not output.scheduled_new_reqs
            and not output.scheduled_spec_decode_tokens
            and list(output.num_scheduled_tokens.values()) == self._ones
            and not _resumed(cached)
        ):
            expected, self._computed = self._computed + self._one_each, self._packed(computed)
            if self._computed == expected:
                return None, False
        if full:
            self._full_ns = now_ns
        new = [(request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs]
        drafts = output.scheduled_spec_decode_tokens
        rows = Rows(
            ids=ids,
            computed=computed,
            scheduled=output.num_scheduled_tokens,
            resumed=_resumed(cached),
            new=new,
            drafts=dict(zip(drafts, map(len, drafts.values()), strict=True)) if drafts else {},
        )
        self._remember(rows, output.total_num_scheduled_tokens)
        return rows, full

    def _packed(self, computed: list[int]) -> int:
        """The numbers in one; if they are too large for that, the next step must be kept."""
        try:
            return int.from_bytes(self._pack(*computed), "little")
        except struct.error:
            self._ids = None
            return -1

    def _remember(self, rows: Rows, total: int) -> None:
        """What the next step is compared with; only where each request got one token."""
        number = len(rows.ids) + len(rows.new)
        if total != number or rows.drafts:
            self._ids = None
            return
        ids, computed = rows.ids, rows.computed
        if rows.new:
            ids = ids + [request_id for request_id, _ in rows.new]
            computed = computed + [tokens for _, tokens in rows.new]
        if len(self._ones) != number:
            self._ones = [1] * number
            self._pack = struct.Struct(f"<{number}I").pack
            self._one_each = int.from_bytes(self._pack(*self._ones), "little")
        self._ids = ids
        self._computed = self._packed(computed)


def _resumed(cached: Any) -> Collection[str]:
    """Ids of resumed requests; to vLLM 0.11.0 each request has a flag instead."""
    ids: Collection[str] | None = getattr(cached, "resumed_req_ids", None)
    return set(compress(cached.req_ids, cached.resumed_from_preemption)) if ids is None else ids
