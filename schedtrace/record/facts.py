"""Facts other than decisions, read at the few places where they are visible.

A request's own facts and the hashes of its prompt are taken when it reaches the scheduler, its hits in the
prefix cache when it is admitted, the loads of its KV blocks when they begin and end, and the scheduler's
state after each ``schedule()``. Nearly all of this code runs on the scheduler's thread. Its callers, the
recorder and the marks, ensure that no error reaches vLLM.
"""

import hashlib
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schedtrace.model.causes import Cause
from schedtrace.model.trace import Finish
from schedtrace.model.trace_facts import MARKED_BLOCKS, Admission, KvLoad, Miss, marks_within
from schedtrace.record import allocation
from schedtrace.record.allocation import blocks_of, managers_of
from schedtrace.record.capture import Capture, Happened, State
from schedtrace.record.engine_hooks import INPUTS, Inputs
from schedtrace.record.marks.exits import SITES, Noted, as_events
from schedtrace.record.vllms_own import is_own, is_own_class
from schedtrace.record.written_ids import Salt

_CHILD = re.compile(r"(\d{1,5})_(.+)", re.DOTALL)


def requested(request: Any) -> dict[str, Any]:
    """Return the fields of an ``Arrival`` that must be read on the scheduler's thread."""
    facts: dict[str, Any] = {"client_index": getattr(request, "client_index", None)}
    if getattr(request, "structured_output_request", None) is not None:
        facts["structured"] = True
    # Disaggregated prefill: read before the request reaches the connector, which changes the parameters.
    transfer = getattr(request, "kv_transfer_params", None)
    if isinstance(transfer, dict):
        for side in ("prefill", "decode"):
            if transfer.get(f"do_remote_{side}") is True:
                facts["remote"] = side
        for name in ("remote_request_id", "transfer_id"):
            if isinstance(remote_id := transfer.get(name), str) and remote_id:
                facts[name] = remote_id
    params = request.sampling_params
    if params is None:
        return facts
    facts["logprobs"] = params.logprobs
    facts["prompt_logprobs"] = params.prompt_logprobs
    facts["min_tokens"] = params.min_tokens
    if params.logit_bias:
        facts["logit_bias"] = len(params.logit_bias)
    return facts


class Prefixes:
    """Hashes of prompts' beginnings: blocks are stored on the scheduler's thread and hashed on the writer's.

    Args:
        block_size: Number of tokens per block if vLLM computes no hashes; None to record no such prompts.
        wanted: Whether to record hashes at all.
    """

    def __init__(self, block_size: int | None = None, *, wanted: bool = True) -> None:
        self._wanted = wanted
        self._salt = Salt()
        self._block_size = block_size
        self._blocks: dict[str, list[Any] | _Prompt] = {}

    def keep_prompt(self, request: Any) -> None:
        """Keep vLLM's hashes of the prompt's marked blocks, before output adds more.

        If vLLM computes no hashes, because nothing needs them, the prompt itself is kept until it is hashed.
        """
        hashes = getattr(request, "block_hashes", None) if self._wanted else None
        if hashes:
            marked = MARKED_BLOCKS[: marks_within(len(hashes))]
            self._blocks[request.request_id] = [hashes[block - 1] for block in marked]
        elif hashes is not None and (prompt := _prompt(request, self._block_size)) is not None:
            self._blocks[request.request_id] = prompt

    def drop_prompt(self, request_id: str) -> None:
        """Drop a prompt whose hashes will not be needed."""
        self._blocks.pop(request_id, None)

    def hashes(self, request_id: str) -> str | None:
        """Return ``Arrival.prefix_hashes``, once per request; None without a stored prompt of token ids."""
        blocks = self._blocks.pop(request_id, None)
        if blocks is None:
            return None
        if not isinstance(blocks, _Prompt):
            # Before vLLM 0.11, a hash is a tuple that begins with a number.
            hashes = [
                block if isinstance(block, bytes) else repr(getattr(block, "hash_value", block)).encode()
                for block in blocks
            ]
            return self._salt.hashed_blocks(hashes)
        try:
            return self._salt.hashed_blocks(list(blocks.block_hashes()))
        except (TypeError, OverflowError):
            return None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt whose blocks vLLM does not hash."""

    token_ids: Sequence[int]
    tokens: int
    """Number of tokens of the prompt alone; the list may grow later."""
    block_size: int
    told_apart_by: str
    """Key on which vLLM's hashes depend in addition to the tokens."""

    def block_hashes(self) -> Iterator[bytes]:
        """Yield one hash per marked block; each covers its block and all blocks before it."""
        before, begin = self.told_apart_by.encode(errors="surrogatepass"), 0
        for block in MARKED_BLOCKS[: marks_within(self.tokens // self.block_size)]:
            end = block * self.block_size
            tokens = array("q", self.token_ids[begin:end]).tobytes()
            before, begin = hashlib.blake2b(before + tokens, digest_size=16).digest(), end
            yield before


def _prompt(request: Any, block_size: int | None) -> _Prompt | None:
    """Return what is stored of a prompt; None if it fills no block, or is not made of token ids alone."""
    token_ids = getattr(request, "prompt_token_ids", None)
    only_tokens = (
        not getattr(request, "mm_features", None) and getattr(request, "prompt_embeds", None) is None
    )
    if not token_ids or not block_size or len(token_ids) < block_size or not only_tokens:
        return None
    lora = getattr(request, "lora_request", None)
    told_apart_by = f"{getattr(lora, 'lora_name', None)} {getattr(request, 'cache_salt', None)}"
    return _Prompt(token_ids, len(token_ids), block_size, told_apart_by)


def sibling(request_id: str, salt: Salt) -> tuple[int, str] | None:
    """Return the index and hashed parent of a child (``n`` > 1), from its id; None for any other id."""
    match = _CHILD.fullmatch(str(request_id))
    return (int(match[1]), salt.hashed_id(match[2])) if match else None


def admissions(scheduler: Any, new_requests: list[Any]) -> list[Admission]:
    """Return an admission for each of vLLM's ``scheduled_new_reqs`` that is scheduled for the first time."""
    caching = getattr(scheduler.kv_cache_manager, "enable_caching", False)
    admitted = []
    for new in new_requests:
        request = scheduler.requests.get(new.req_id)
        if request is None or getattr(request, "num_preemptions", None):
            continue
        stats = getattr(request, "prefill_stats", None)
        local = getattr(stats, "num_local_cached_tokens", None)
        full_blocks, hashes = None, getattr(request, "block_hashes", None)  # none before vLLM 0.10.2
        if caching and hashes is not None:
            size = int(getattr(scheduler, "hash_block_size", None) or scheduler.block_size)
            full_blocks = min(len(hashes), int(request.num_prompt_tokens) // size)
        missed = caching and not (new.num_computed_tokens if local is None else local)
        admitted.append(
            Admission(
                request_id=request.request_id,
                local_tokens=local,
                external_tokens=getattr(stats, "num_external_cached_tokens", None),
                longest_tokens=getattr(request, "shared_prefix_boundary", None) or None,
                full_blocks=full_blocks,
                salted=getattr(request, "cache_salt", None) is not None,
                miss=_miss(scheduler, request) if missed else None,
            )
        )
    return admitted


def _miss(scheduler: Any, request: Any) -> Miss:
    """Return why the prefix cache had no hit, given that the request's own blocks are already in the pool."""
    if getattr(request, "skip_reading_prefix_cache", False):
        return "skipped"
    if (request.num_tokens - 1) // scheduler.block_size == 0:
        return "short"
    pool, hashes = scheduler.kv_cache_manager.block_pool, getattr(request, "block_hashes", None)
    # Only groups whose first block has the kind of hash that requests carry can be searched.
    size = getattr(scheduler, "hash_block_size", None) or scheduler.block_size
    managers = enumerate(managers_of(scheduler.kv_cache_manager))
    groups = [(number, manager) for number, manager in managers if manager.block_size == size]
    if not groups or not hashes or not is_own(pool):
        return "unknown"
    by_others = []
    for number, manager in groups:
        cached = pool.get_cached_block(hashes[0], [number])
        own = dict.get(manager.req_to_blocks, request.request_id) or [None]
        by_others.append(bool(cached) and cached[0] is not own[0])
    if not any(by_others):
        return "not_cached"
    return "unknown" if all(by_others) else "other_group"


class KvLoads:
    """Requests of one scheduler that are parked for a KV load; all methods run on its thread."""

    def __init__(self, scheduler: Any) -> None:
        self.used = getattr(scheduler, "connector", None) is not None
        """Whether the scheduler has a connector."""
        self.parked: set[str] = set()
        """Requests that wait for a KV load."""
        self.events: list[KvLoad] = []
        """Events of loads since the last call that was recorded."""

    def note_begun(self, scheduler: Any, events: list[Noted], at_us: int) -> None:
        """Record the loads that a ``schedule()`` call began, as reported by its marks."""
        for event in as_events(events):
            if Cause.KV_LOAD_STARTED in SITES[event.site].causes:
                self.parked.add(event.request_id)
                self._note(scheduler, event.request_id, "begun", at_us)

    def note_ended(self, scheduler: Any, arrived: Any, at_us: int) -> None:
        """Record the loads that have ended according to ``KVConnectorOutput.finished_recving``."""
        for request_id in arrived if isinstance(arrived, set | frozenset | list | tuple) else ():
            self.parked.discard(request_id)
            self._note(
                scheduler, request_id, "failed" if _failed(scheduler, request_id) else "arrived", at_us
            )

    def _note(self, scheduler: Any, request_id: str, event: Any, at_us: int) -> None:
        blocks = blocks_of(scheduler.kv_cache_manager, request_id)
        self.events.append(KvLoad(request_id, event, at_us, blocks or None))


def _failed(scheduler: Any, request_id: str) -> bool:
    """Return whether a load failed, so that the engine must compute the tokens or end the request."""
    status = getattr(scheduler.requests.get(request_id), "status", None)
    again = getattr(scheduler, "failed_recving_kv_req_ids", ())
    return request_id in again or getattr(status, "name", None) == "FINISHED_ERROR"


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
"""Names of the values of a scheduler's state, in order; they are fields of ``Step``."""


class SchedulerFacts:
    """Facts of one scheduler.

    Args:
        scheduler: Scheduler of vLLM that was just created.
        since_anchor: Function that converts nanoseconds of the monotonic clock to the trace's microseconds.
    """

    def __init__(self, scheduler: Any, since_anchor: Callable[[int], int]) -> None:
        self._us = since_anchor
        self._state: State = ()
        self._defers = hasattr(scheduler, "deferred_frees")
        self._has_sessions = hasattr(scheduler, "num_waiting_for_streaming_input")
        encoder = getattr(scheduler, "encoder_cache_manager", None)
        used = getattr(encoder, "cache_size", 0) and hasattr(encoder, "num_freeable_slots")
        self._encoder = encoder if used else None
        pool = getattr(scheduler.kv_cache_manager, "block_pool", None)
        block_map = getattr(pool, "cached_block_hash_to_block", None)
        caches = getattr(pool, "enable_caching", False) and (
            type(block_map) is dict or is_own_class(type(block_map))
        )
        self._pool = pool if caches else None
        self._engine: Any = None
        """``EngineCore`` of a rank in lock-step with others; None otherwise, or until it is known."""
        self.salt = Salt()
        self._refused: str | None = None
        self._refusals: list[allocation.RefusedHead] = []
        self.inputs = Inputs(since_anchor)
        self.kv_loads = KvLoads(scheduler)
        if (manager := getattr(scheduler, "structured_output_manager", None)) is not None:
            INPUTS.store(manager, self.inputs)

    @property
    def prefix_keys(self) -> int | None:
        """Number of block hashes in the prefix cache now; None without prefix caching."""
        return None if self._pool is None else len(self._pool.cached_block_hash_to_block)

    def engine_is(self, engine: Any) -> None:
        """Set this scheduler's ``EngineCore``, which has a wave and a step counter on ranks in lock-step."""
        if hasattr(engine, "current_wave") and hasattr(engine, "step_counter"):
            self._engine = engine

    def arrival_fields(self, request: Any) -> dict[str, Any]:
        """Return the fields of an ``Arrival``, before the request enters the queue."""
        facts = requested(request) | self.inputs.input_times(request.request_id)
        if (place_and_parent := sibling(request.request_id, self.salt)) is not None:
            facts["sibling_index"], facts["parent"] = place_and_parent
        return facts

    def add_finish_facts(self, finish: Finish) -> None:
        """Add the facts about a finished request to its line."""
        finish.abort_us = self.inputs.abort_us(finish.request_id)
        self.kv_loads.parked.discard(finish.request_id)
        if finish.request_id == self._refused:
            self._refused = None

    def head_refused(self, scheduler: Any, request: Any, arguments: allocation.Arguments) -> None:
        """Record which requests hold blocks if ``allocate_slots`` has refused a new head of the queue."""
        if request.request_id == self._refused:
            return
        self._refused = request.request_id
        if (taken := allocation.refused_head(scheduler, request.request_id, arguments)) is not None:
            self._refusals.append(taken)

    def note_call(self, capture: Capture, scheduler: Any, output: Any, events: list[Noted]) -> None:
        """Store the state right after the call, and the events of the call and of the time before it.

        A value that this release of vLLM lacks is None.
        """
        encoder, engine = self._encoder, self._engine
        deferred = None
        if self._defers:
            deferred = sum(len(blocks) for _, blocks in frees) if (frees := scheduler.deferred_frees) else 0
        state = (
            len(scheduler.requests) - capture.num_running_after - capture.num_waiting_after,
            deferred,
            None if encoder is None else encoder.num_free_slots,
            None if encoder is None else encoder.num_freeable_slots,
            scheduler.num_waiting_for_streaming_input if self._has_sessions else None,
            self.prefix_keys,
            None if engine is None else engine.current_wave,
            None if engine is None else engine.step_counter,
            len(self.kv_loads.parked) if self.kv_loads.used else None,
            capture.throttled if isinstance(capture.throttled, bool) else None,
        )
        if state != self._state:
            self._state = state
        capture.state = self._state
        new, loads = output.scheduled_new_reqs, self.kv_loads
        if not (new or self._refusals or loads.used or self.inputs.compiled):
            return
        if loads.used:
            loads.note_begun(scheduler, events, self._us(capture.end_ns))
        refusals, self._refusals = self._refusals, []
        load_events, loads.events = loads.events, []
        capture.happened = Happened(
            admissions(scheduler, new) if new else [], refusals, load_events, self.inputs.grammars()
        )
