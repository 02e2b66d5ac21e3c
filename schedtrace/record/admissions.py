"""What the caches gave to a request when it was first scheduled, and why they had nothing."""

from typing import Any

from schedtrace.model.trace_facts import Admission, Miss
from schedtrace.record.cache_managers import managers_of
from schedtrace.record.own import is_own


def admissions(scheduler: Any, new_requests: list[Any]) -> list[Admission]:
    """One for every request among vLLM's ``scheduled_new_reqs`` that was never scheduled before."""
    requests = scheduler.requests
    found = ((new, requests.get(new.req_id)) for new in new_requests)
    return [
        _admission(scheduler, request, new.num_computed_tokens)
        for new, request in found
        if request is not None and not getattr(request, "num_preemptions", 0)
    ]


def _admission(scheduler: Any, request: Any, hit_tokens: int) -> Admission:
    manager = scheduler.kv_cache_manager
    caching = getattr(manager, "enable_caching", False)
    stats = getattr(request, "prefill_stats", None)
    local = getattr(stats, "num_local_cached_tokens", None)
    return Admission(
        request_id=request.request_id,
        local_tokens=local,
        external_tokens=getattr(stats, "num_external_cached_tokens", None),
        full_blocks=_full_blocks(scheduler, request) if caching else None,
        salted=getattr(request, "cache_salt", None) is not None,
        miss=_miss(scheduler, request) if caching and not (hit_tokens if local is None else local) else None,
    )


def _hashes(request: Any) -> Any:
    """Of its full blocks; None before vLLM 0.10.2, where requests do not carry them."""
    return getattr(request, "block_hashes", None)


def _full_blocks(scheduler: Any, request: Any) -> int | None:
    size = int(getattr(scheduler, "hash_block_size", None) or scheduler.block_size)
    hashes = _hashes(request)
    return None if hashes is None else min(len(hashes), int(request.num_prompt_tokens) // size)


def _miss(scheduler: Any, request: Any) -> Miss:
    """Why nothing was found. Looked at after the call, when its own blocks are in the pool already."""
    if getattr(request, "skip_reading_prefix_cache", False):
        return "skipped"
    if (request.num_tokens - 1) // scheduler.block_size == 0:
        return "short"
    pool, hashes = scheduler.kv_cache_manager.block_pool, _hashes(request)
    groups = _searched(scheduler)
    if not groups or not hashes or not is_own(pool):
        return "unknown"
    by_others = [_cached_by_others(pool, hashes[0], number, one, request) for number, one in groups]
    if not any(by_others):
        return "not_cached"
    return "unknown" if all(by_others) else "other_group"


def _searched(scheduler: Any) -> list[tuple[int, Any]]:
    """Number and manager of the groups whose first block has the hash that requests carry."""
    size = getattr(scheduler, "hash_block_size", None) or scheduler.block_size
    managers = enumerate(managers_of(scheduler.kv_cache_manager))
    return [(number, one) for number, one in managers if one.block_size == size]


def _cached_by_others(pool: Any, first: Any, group: int, manager: Any, request: Any) -> bool:
    cached = pool.get_cached_block(first, [group])
    own = dict.get(manager.req_to_blocks, request.request_id) or [None]
    return bool(cached) and cached[0] is not own[0]
