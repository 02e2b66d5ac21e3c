"""Who holds the KV blocks that the head of the queue was refused, and how many of each group it needs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from schedtrace.model.trace_facts import HeadRefusal
from schedtrace.record.allocation import apart, managers_of, not_own, question
from schedtrace.record.vllms_own import is_own

MOST_HOLDERS = 16
MOST_BLOCKS_LOOKED_AT = 4096
"""In a group whose tables hold null blocks; some 30 ns each, on the scheduler's path."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Snapshot(msgspec.Struct, gc=False):
    """Plain values, taken on the scheduler's path; ``line`` makes a line of them."""

    request_id: str
    needed: list[int]
    free: int | None
    groups: list[tuple[list[str], list[int]]]
    """Requests and the blocks of each; none of a group with too many to look at."""
    finished: list[str]


def snapshot(scheduler: Any, request_id: str, arguments: Arguments) -> Snapshot | None:
    """The state right after a request was refused blocks; None where vLLM's managers are not known.

    Raises:
        Exception: whatever vLLM's own code raises when it is asked once more.
    """
    manager = scheduler.kv_cache_manager
    managers = managers_of(manager)
    if not managers or not hasattr(manager, "block_pool") or not_own(manager) is not None:
        return None
    requests = scheduler.requests
    groups = [_held(one) for one in managers]
    gone: list[str] = []
    if getattr(scheduler, "connector", None) is not None:  # only a transfer keeps their blocks
        ids = {one for of_group, _ in groups for one in of_group}
        known = ((one, requests.get(one)) for one in ids)
        gone = [
            one for one, request in known if request is None or (is_own(request) and request.is_finished())
        ]
    free = manager.block_pool.get_num_free_blocks()
    return Snapshot(request_id, needed_by_group(manager, arguments), free, groups, gone)


def needed_by_group(manager: Any, arguments: Arguments) -> list[int]:
    """What each of vLLM's managers asks for; empty where nobody can be asked, or no number is meant.

    vLLM's own ``allocate_slots`` calls them, on copies that note their answers: the arguments of that call
    differ between releases.
    """
    if (ask := question(manager)) is None:
        return []
    copied = apart(manager)
    managers = managers_of(copied)
    answers: list[int] = []
    for one in managers:
        one.get_num_blocks_to_allocate = _noting(one.get_num_blocks_to_allocate, answers)
    positional, keywords = arguments
    ask(copied, *positional, **keywords)
    needed = answers[-len(managers) :]
    return [] if len(needed) < len(managers) or sum(needed) > manager.block_pool.num_gpu_blocks else needed


def _noting(ask: Callable[..., int], answers: list[int]) -> Callable[..., int]:
    def noted(*args: Any, **kwargs: Any) -> int:
        answers.append(ask(*args, **kwargs))
        return answers[-1]

    return noted


def _held(manager: Any) -> tuple[list[str], list[int]]:
    tables = manager.req_to_blocks
    ids, lengths = list(tables), list(map(len, tables.values()))
    if _all_real(manager):
        return ids, lengths
    if sum(lengths) > MOST_BLOCKS_LOOKED_AT:
        return [], []
    return ids, [sum(not block.is_null for block in blocks) for blocks in tables.values()]


def _all_real(manager: Any) -> bool:
    """Whether no null block stands in its tables: only layers that attend to everything keep all blocks."""
    return type(manager).__name__ == "FullAttentionManager"


def line(taken: Snapshot) -> HeadRefusal:
    """The line's struct (writer's thread)."""
    held = [dict(zip(ids, counts, strict=True)) for ids, counts in taken.groups]
    totals: dict[str, int] = {}
    for group in held:
        for request_id, blocks in group.items():
            totals[request_id] = totals.get(request_id, 0) + blocks
    holders = sorted((one for one, blocks in totals.items() if blocks), key=totals.__getitem__, reverse=True)
    largest, others = holders[:MOST_HOLDERS], holders[MOST_HOLDERS:]
    return HeadRefusal(
        request_id=taken.request_id,
        blocks_needed=taken.needed,
        blocks_free=taken.free,
        holders=largest,
        held=[[group.get(one, 0) for one in largest] if group else [] for group in held],
        finished_holders=[one for one in largest if one in taken.finished],
        other_holders=len(others),
        other_held=[sum(group.get(one, 0) for one in others) for group in held] if others else [],
    )


def held_blocks(manager: Any) -> Counter[str]:
    """How many blocks each request has in all cache groups of a ``KVCacheManager``.

    Of copies: any thread may ask, and the engine may go on meanwhile.
    """
    tables = [one.req_to_blocks for one in managers_of(manager)]
    held: Counter[str] = Counter()
    for one in [dict.copy(table) for table in tables if isinstance(table, dict)]:
        held.update(dict(zip(one, map(len, one.values()), strict=True)))
    return held


def usable_blocks(manager: Any) -> int | None:
    """KV blocks without the null block; None where the pool is not known."""
    pool = getattr(manager, "block_pool", None)
    return None if pool is None else int(pool.num_gpu_blocks) - 1


def free_blocks(manager: Any) -> int | None:
    """KV blocks that nobody has; None where the pool is not known."""
    pool = getattr(manager, "block_pool", None)
    return None if pool is None else int(pool.get_num_free_blocks())
