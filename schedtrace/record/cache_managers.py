"""The managers of vLLM's KV cache groups, over all releases."""

from typing import Any


def managers_of(manager: Any) -> tuple[Any, ...]:
    """One per cache group, in order; none where this ``KVCacheManager`` is not put together of such."""
    coordinator = getattr(manager, "coordinator", None)
    return tuple(getattr(coordinator, "single_type_managers", ()))


def blocks_of(manager: Any, request_id: str) -> list[int]:
    """How many blocks a request has, by cache group, null blocks included; none where it cannot be read."""
    tables = [one.req_to_blocks for one in managers_of(manager)]
    if not all(isinstance(table, dict) for table in tables):
        return []
    return [len(dict.get(table, request_id, ())) for table in tables]
