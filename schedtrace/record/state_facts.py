"""What is read after every ``schedule()``: a few attributes, where this release of vLLM has them.

The values are a tuple, so that a step in which nothing of it changed is told by one comparison.
"""

from typing import Any

from schedtrace.record.own import is_own_class

FIELDS = (
    "finished_holding",
    "deferred_free_blocks",
    "encoder_slots_free",
    "encoder_slots_freeable",
    "sessions_paused",
    "prefix_keys",
    "wave",
    "step_counter",
    "kv_loads_parked",
    "throttle_prefills",
)
"""Names of the values, in order: fields of ``Step``."""

State = tuple[int | None, ...]


class StateReader:
    """Reads one scheduler. What its release lacks is found out once, and None from then on.

    Args:
        scheduler: vLLM's, just built.
    """

    __slots__ = ("_defers", "_encoder", "_paused", "_pool", "_scheduler", "engine")

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._defers = hasattr(scheduler, "deferred_frees")
        self._paused = hasattr(scheduler, "num_waiting_for_streaming_input")
        encoder = getattr(scheduler, "encoder_cache_manager", None)
        used = getattr(encoder, "cache_size", 0) and hasattr(encoder, "num_freeable_slots")
        self._encoder = encoder if used else None
        pool = getattr(scheduler.kv_cache_manager, "block_pool", None)
        known = getattr(pool, "cached_block_hash_to_block", None)
        caches = getattr(pool, "enable_caching", False) and (type(known) is dict or is_own_class(type(known)))
        self._pool = pool if caches else None
        self.engine: Any = None
        """The ``EngineCore`` whose ranks run in lock-step, once it is known."""

    @property
    def prefix_keys(self) -> int | None:
        """Block hashes that the prefix cache knows; None without prefix caching."""
        return None if self._pool is None else len(self._pool.cached_block_hash_to_block)

    def read(self, running: int, waiting: int, parked: int | None, throttled: Any) -> State:
        """The values right after ``schedule()``.

        Args:
            running: Requests in ``running``.
            waiting: Requests in all waiting queues.
            parked: Requests that wait for KV blocks from elsewhere.
            throttled: First argument of the call, which a class of a user's own may take for something else.
        """
        scheduler, encoder, engine = self._scheduler, self._encoder, self.engine
        deferred = None
        if self._defers:
            deferred = sum(len(blocks) for _, blocks in frees) if (frees := scheduler.deferred_frees) else 0
        return (
            len(scheduler.requests) - running - waiting,
            deferred,
            None if encoder is None else encoder.num_free_slots,
            None if encoder is None else encoder.num_freeable_slots,
            scheduler.num_waiting_for_streaming_input if self._paused else None,
            self.prefix_keys,
            None if engine is None else engine.current_wave,
            None if engine is None else engine.step_counter,
            parked,
            throttled if isinstance(throttled, bool) else None,
        )
