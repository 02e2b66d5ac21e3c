"""What the writer's thread writes for each request id, found out once a request."""

from typing import Any

from schedtrace.model.ids import capped, hashed

MOST_KEPT = 100_000
"""Ids kept at most; more are requests of which the recorder never learned that they left."""


class WrittenIds(dict[Any, str]):
    """A cache: ``written[request_id]`` is what stands in the trace, by ``model.ids``.

    The answer depends on the id alone, so an entry may be dropped at any time.

    Args:
        hash_ids: Whether ids are written as hashes.
    """

    def __init__(self, *, hash_ids: bool) -> None:
        super().__init__()
        self._write = hashed if hash_ids else capped

    def __missing__(self, request_id: Any) -> str:
        if len(self) >= MOST_KEPT:
            self.clear()
        written = self[request_id] = self._write(request_id)
        return written

    def forget(self, request_id: Any) -> None:
        """Drop the entry of a request that has left."""
        self.pop(request_id, None)
