"""What is noted on the scheduler's path: plain values, as few as possible, and none of vLLM's objects.

An object kept alive costs the engine: its memory cannot be used again for the next step's. The lists and
dicts of strings and numbers that a ``SchedulerOutput`` carries are kept by reference, and only of steps that
are not steady; vLLM builds new ones for every step and does not change them afterwards.
"""

from collections.abc import Collection, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from schedtrace.model.trace import Arrival, Exit, Finish, Preemption
from schedtrace.model.trace_facts import Admission, Control, Grammar, HeadRefusal, KvLoad, SetAside
from schedtrace.record import block_holders
from schedtrace.record.exits import Noted
from schedtrace.record.vllms_own import is_own_class
from schedtrace.record.worker_hooks import Execution

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


ALL = "all"
"""Every request of the step got exactly one token."""


class Happened(msgspec.Struct, gc=False):
    """What one step has of it, if anything."""

    admitted: list[Admission] = []
    refusals: list[block_holders.Snapshot] = []
    kv_loads: list[KvLoad] = []
    grammars: list[Grammar] = []
    set_aside: list[SetAside] = []

    def lines(self) -> dict[str, Any]:
        """Fields of a ``Step`` (writer's thread)."""
        refusals: list[HeadRefusal] = list(map(block_holders.line, self.refusals))
        return {
            "admitted": self.admitted,
            "refusals": refusals,
            "kv_loads": self.kv_loads,
            "grammars": self.grammars,
            "set_aside": self.set_aside,
        }


class Rows(msgspec.Struct, gc=False):
    """What each request got in a step that is not steady."""

    ids: list[str]
    """Of requests that ran before: running ones, then resumed ones."""
    computed: list[int]
    """Of these, before the step."""
    scheduled: dict[str, int]
    """Of all requests."""
    resumed: Collection[str]
    new: list[tuple[str, int]]
    """Ids and computed tokens of requests that the workers do not know."""
    drafts: dict[str, int]
    """Number of draft tokens, of requests that have some."""


class Result(msgspec.Struct, gc=False, frozen=True):
    """What came back for one step."""

    back_ns: int
    """When ``update_from_output`` was called."""
    done_ns: int
    """When it returned."""
    got: str | tuple[list[str], list[int] | None]
    """``ALL``, or the ids of requests that got tokens and how many each (None: one each)."""
    execution: Execution | None = None
    """When the worker executed it."""
    invalid: dict[str, int] | None = None
    """Drafts that the grammar forbade, by request."""


class DummyPass(NamedTuple):
    """A dummy batch of a data-parallel rank."""

    began_ns: int
    ended_ns: int
    wave: int | None
    step_counter: int | None


class Synced(NamedTuple):
    """An all-reduce among data-parallel ranks at the end of a pass."""

    began_ns: int
    ended_ns: int
    wave: int
    step_counter: int
    go_on: bool


class Came(NamedTuple):
    """What came and went between two calls."""

    arrived: Sequence[Arrival] = ()
    finished: Sequence[Finish] = ()
    dummies: Sequence[DummyPass] = ()
    synced: Sequence[Synced] = ()
    controls: Sequence[Control] = ()


NOBODY = Came()


class Capture(msgspec.Struct, gc=False):
    """One ``schedule()`` call, raw. Times are nanoseconds of ``time.monotonic_ns``."""

    step: int
    start_ns: int
    end_ns: int
    token_budget: int
    max_num_running_reqs: int
    running_before: int
    running_after: int
    waiting_before: int
    waiting_after: int
    not_ready_after: int
    kv_blocks_total: int | None
    free_before: int | None
    free_after: int | None
    rows: Rows | None
    """None: a steady step. The same requests as in the step before in the same order, which had got one token
    each; each is one token further and got one token."""
    full: bool
    """It is time for a line in full."""
    events: list[Noted] | None
    """What the marks in ``schedule()`` noted; None: the very same as in the step before, and it is steady."""
    came: Came
    inferred: list[Exit] | None = None
    """Where they did not tell how the call ended."""
    preempted: Sequence[tuple[Preemption, int]] = ()
    """With the tokens that the victim had in all."""
    state: State = ()
    """What ``state_facts.FIELDS`` name; the same object as in the step before if nothing changed."""
    happened: Happened | None = None
    ids: Sequence[str] = ()
    """The step's requests; set by the writer's thread."""
    result: Result | None = None
    """Set in one assignment by the engine's thread when the output came back."""


MOST_KEPT = 10_000
"""Arrivals, and likewise departures, that are kept of steps dropped in a row."""


class Dropped(msgspec.Struct, gc=False):
    """What is kept of steps that are dropped in a row, because the writer is behind."""

    last_step: int = 0
    end_ns: int = 0
    """Of the last one."""
    steps: int = 0
    came: Came = msgspec.field(default_factory=lambda: Came([], [], [], [], []))
    preempted: list[tuple[Preemption, int]] = []
    started: list[tuple[str, int, int]] = []
    """Requests that the workers did not know: id, computed tokens, start of the step."""
    missing_arrivals: int = 0
    missing_finishes: int = 0

    def add(self, capture: Capture) -> Sequence[Arrival]:
        """Another step, which is not going to be written; those of its arrivals that are not kept."""
        self.last_step, self.end_ns = capture.step, capture.end_ns
        self.steps += 1
        missing = Came(*(_keep(kept, more) for kept, more in zip(self.came, capture.came, strict=True)))
        self.missing_arrivals += len(missing.arrived)
        self.missing_finishes += len(missing.finished)
        _keep(self.preempted, capture.preempted)
        if capture.rows is not None:
            new = [(request_id, computed, capture.start_ns) for request_id, computed in capture.rows.new]
            _keep(self.started, new)
        return missing.arrived


def _keep(kept: Any, more: Any) -> Any:
    """Add as many to a list as there is room for; the others."""
    room = MOST_KEPT - len(kept)
    kept += more[:room]
    return more[room:]


_request_id = attrgetter("request_id")


def only_samples(scheduler: Any) -> bool:
    """Whether an output of this scheduler always holds a token: no pooling, no transfer of KV or encodings.

    ``update_from_output`` emits an output for new tokens, a pooler's result, transfer parameters, or a
    request that stopped; the last without a token only where nothing is sampled.
    """
    model = scheduler.vllm_config.model_config
    connectors = (getattr(scheduler, name, None) for name in ("connector", "ec_connector"))
    return (
        getattr(model, "runner_type", None) == "generate"
        and not any(connector is not None for connector in connectors)
        and not getattr(scheduler, "is_mm_encoder_only", False)
    )


def tells_invalid_drafts() -> bool:
    """Whether a ``SchedulerOutput`` names the drafts that a grammar forbade."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return "num_invalid_spec_tokens" in getattr(SchedulerOutput, "__dataclass_fields__", ())


def tokens_got(output: Any, sampled_by: Any, outputs: Any) -> str | tuple[list[str], list[int] | None]:
    """``ALL``, or ids and numbers of tokens (None: one each).

    One token sampled for each, one client, no drafts, nobody gone meanwhile, and as many outputs as samples:
    then every sample became an output, and nothing else did. Otherwise the outputs are read one by one.

    Args:
        output: The step's ``SchedulerOutput``.
        sampled_by: vLLM's ``ModelRunnerOutput`` for it; None unless ``only_samples`` holds and no request has
            left or was preempted since the step was scheduled.
        outputs: What ``update_from_output`` returned: client index to ``EngineCoreOutputs``.
    """
    if not outputs:
        return [], None
    if sampled_by is not None and len(outputs) == 1 and not output.scheduled_spec_decode_tokens:
        (returned,) = outputs.values()
        lengths = list(map(len, sampled_by.sampled_token_ids))
        ones = lengths.count(1)
        if len(returned.outputs) == ones and ones + lengths.count(0) == len(lengths):
            if ones == len(output.num_scheduled_tokens):
                return ALL
            return list(compress(sampled_by.req_ids, lengths)), None
    every = [one for returned in outputs.values() for one in returned.outputs]
    return list(map(_request_id, every)), [len(one.new_token_ids) for one in every]
