"""Capture of steps on the scheduler's path: as few plain values as possible, and no object of vLLM.

An object that is kept alive costs the engine time, because its memory cannot be reused for the next step. The
lists and dicts of strings and numbers that a ``SchedulerOutput`` carries are kept by reference, and only for
steps that are not steady; vLLM builds new ones for every step and does not change them afterwards.
"""

import struct
from collections.abc import Collection, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from schedtrace.model.trace import Arrival, Exit, Finish, Preemption
from schedtrace.model.trace_facts import Admission, Control, Grammar, KvLoad, KvSend, SetAside
from schedtrace.record import allocation
from schedtrace.record.marks.exits import Noted
from schedtrace.record.worker_hooks import Execution

State = tuple[int | None, ...]


ALL = "all"
"""Value that states that every request of the step got exactly one token."""


class Happened(msgspec.Struct, gc=False):
    """Facts about one step other than its decisions, if there are any."""

    admitted: list[Admission] = []
    refusals: list[allocation.RefusedHead] = []
    kv_loads: list[KvLoad] = []
    grammars: list[Grammar] = []
    set_aside: list[SetAside] = []


class Rows(msgspec.Struct, gc=False):
    """Requests of a step that is not steady, with their tokens."""

    ids: list[str]
    """Requests that ran before: first running, then resumed ones."""
    computed: list[int]
    """Number of tokens of each request in ``ids`` that were computed before the step."""
    scheduled: dict[str, int]
    """Scheduled tokens of all requests in the step."""
    resumed: Collection[str]
    new: list[tuple[str, int]]
    """Ids and computed tokens of requests that are new to the workers."""
    drafts: dict[str, int]
    """Number of draft tokens of each request that has any."""


class Result(msgspec.Struct, gc=False, frozen=True):
    """Output of a step."""

    back_ns: int
    """Monotonic time at which ``update_from_output`` was called."""
    done_ns: int
    """Monotonic time at which ``update_from_output`` returned."""
    got: str | tuple[list[str], list[int] | None]
    """``ALL``, or the requests that got tokens, with the number of tokens of each (None: 1 each)."""
    execution: Execution | None = None
    """Period in which the worker executed the step."""
    invalid: dict[str, int] | None = None
    """Number of drafts that the grammar forbade, by request."""


class DummyPass(NamedTuple):
    """Dummy batch of a data-parallel rank."""

    began_ns: int
    ended_ns: int
    wave: int | None
    step_counter: int | None


class Synced(NamedTuple):
    """All-reduce among data-parallel ranks at the end of a pass."""

    began_ns: int
    ended_ns: int
    wave: int
    step_counter: int
    go_on: bool


class SideEvents(NamedTuple):
    """Events between two calls: arrivals, departures, passes with other ranks, controls, sent KV blocks."""

    arrived: Sequence[Arrival] = ()
    finished: Sequence[Finish] = ()
    dummies: Sequence[DummyPass] = ()
    synced: Sequence[Synced] = ()
    controls: Sequence[Control] = ()
    kv_sends: Sequence[KvSend] = ()


NOBODY = SideEvents()


class Capture:
    """Raw ``schedule()`` call: the state before and after it. Times are monotonic, in ns.

    It is a class with slots, not a struct, because on the scheduler's path, assigning fields by name costs a
    quarter of what a struct's keyword arguments cost.
    """

    __slots__ = (
        *("step", "start_ns", "end_ns", "throttled", "token_budget", "max_num_running_reqs"),
        *(
            "num_running_before",
            "num_running_after",
            "num_waiting_before",
            "num_waiting_after",
            "num_not_ready_after",
        ),
        *(
            "kv_blocks_total",
            "kv_blocks_free_before",
            "kv_blocks_free_after",
            "rows",
            "full",
            "events",
            "side_events",
        ),
        *("inferred", "preempted", "state", "happened", "ids", "result"),
    )

    step: int
    start_ns: int
    end_ns: int
    throttled: Any
    """First argument of the call: ``throttle_prefills``; in a user's own class, it may be anything."""
    token_budget: int
    max_num_running_reqs: int
    num_running_before: int
    num_running_after: int
    num_waiting_before: int
    num_waiting_after: int
    num_not_ready_after: int
    kv_blocks_total: int | None
    kv_blocks_free_before: int | None
    kv_blocks_free_after: int | None
    rows: Rows | None
    """Requests of the step; None for a steady step, which schedules the same requests in the same order as
    the step before and gives one token to each, after each has advanced by one token.
    """
    full: bool
    """Whether the line of this step must be full."""
    events: list[Noted] | None
    """Events that the marks recorded; None if the step is steady and its events equal those of the step
    before."""
    side_events: SideEvents
    inferred: list[Exit] | None
    """Inferred exits, if no mark recorded how the call ended."""
    preempted: Sequence[tuple[Preemption, int]]
    """Preemptions, each with the number of the preempted request's tokens."""
    state: State
    """Values of ``facts.FIELDS``; the same object as in the step before if none has changed."""
    happened: Happened | None
    ids: Sequence[str]
    """Requests of the step; set by the writer's thread."""
    result: Result | None
    """Output of the step; the engine's thread sets it in one assignment when the output is back."""


MOST_KEPT = 10_000
"""Maximum number of arrivals, and of departures, kept for consecutive dropped steps."""


class Dropped(msgspec.Struct, gc=False):
    """Facts about consecutive steps that were dropped because the writer fell behind."""

    last_step: int = 0
    end_ns: int = 0
    """Monotonic time in nanoseconds at which the last dropped step ended."""
    steps: int = 0
    side_events: SideEvents = msgspec.field(default_factory=lambda: SideEvents([], [], [], [], [], []))
    preempted: list[tuple[Preemption, int]] = []
    started: list[tuple[str, int, int]] = []
    """Requests that were new to the workers: id, computed tokens and start of the step."""
    missing_arrivals: int = 0
    missing_finishes: int = 0

    def add(self, capture: Capture) -> Sequence[Arrival]:
        """Add a dropped step; return its arrivals for which there is no room."""
        self.last_step, self.end_ns = capture.step, capture.end_ns
        self.steps += 1
        missing = SideEvents(
            *(_keep(events, more) for events, more in zip(self.side_events, capture.side_events, strict=True))
        )
        self.missing_arrivals += len(missing.arrived)
        self.missing_finishes += len(missing.finished)
        _keep(self.preempted, capture.preempted)
        if capture.rows is not None:
            new = [(request_id, computed, capture.start_ns) for request_id, computed in capture.rows.new]
            _keep(self.started, new)
        return missing.arrived


def _keep(events: Any, more: Any) -> Any:
    """Add as many entries to a list as it has room for; return the rest."""
    room = MOST_KEPT - len(events)
    events += more[:room]
    return more[room:]


_request_id = attrgetter("request_id")


def only_samples(scheduler: Any) -> bool:
    """Return whether every output of this scheduler has a token: no pooling, no KV or encoder transfer.

    ``update_from_output`` emits an output for new tokens, a pooler's result, transfer parameters, or a
    request that stopped; the last has no token only if nothing is sampled.
    """
    model = scheduler.vllm_config.model_config
    connectors = (getattr(scheduler, name, None) for name in ("connector", "ec_connector"))
    return (
        getattr(model, "runner_type", None) == "generate"
        and not any(connector is not None for connector in connectors)
        and not getattr(scheduler, "is_mm_encoder_only", False)
    )


def reports_invalid_drafts() -> bool:
    """Return whether a ``SchedulerOutput`` counts the drafts that a grammar forbade."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return "num_invalid_spec_tokens" in getattr(SchedulerOutput, "__dataclass_fields__", ())


def tokens_got(output: Any, sampled_by: Any, outputs: Any) -> str | tuple[list[str], list[int] | None]:
    """Return ``ALL``, or the requests that got tokens and the number of tokens of each (None: 1 each).

    Suppose that at most one token was sampled for each request, there is one client, no request has drafts or
    has left since, and there are as many outputs as tokens. Then every token became an output, and nothing
    else did. In all other cases, the outputs are read one by one.

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
        single_tokens = lengths.count(1)
        if len(returned.outputs) == single_tokens and single_tokens + lengths.count(0) == len(lengths):
            if single_tokens == len(output.num_scheduled_tokens):
                return ALL
            return list(compress(sampled_by.req_ids, lengths)), None
    every = [output_ for returned in outputs.values() for output_ in returned.outputs]
    return list(map(_request_id, every)), [len(output_.new_token_ids) for output_ in every]


FULL_EVERY_NS = 900_000_000
"""Maximum time between full lines in nanoseconds; the writer does not delay them."""


class SteadySteps:
    """Detector of steady steps on the scheduler's path; no rows are stored for them.

    At scale, nearly every step is steady: it has the same requests in the same order, each of which has
    advanced by one token and gets one token. All of these values are compared at C speed, not just a sum or a
    count. Computed tokens are packed into one large number with 32 bits per request, so adding the number
    with a one in each place adds one to each.

    Args:
        never: Whether to treat no step as steady, so that every line is written in full.
    """

    def __init__(self, *, never: bool = False) -> None:
        self._never = never
        self._ids: list[str] | None = None
        """Requests of the latest step; None if the next step's rows must be kept in any case."""
        self._computed = 0
        """Computed tokens of each request, packed into one number."""
        self._ones: list[int] = []
        self._one_each = 0
        """Number with a 1 in each request's place."""
        self._pack = struct.Struct("").pack
        self._full_ns = 0

    def start_over(self) -> None:
        """Forget the previous step, so that the next one is not expressed relative to it."""
        self._ids = None
        self._full_ns = 0

    def changed_rows(self, output: Any, now_ns: int) -> tuple[Rows | None, bool]:
        """Return the requests of a step (None if the step is steady), and whether a full line is due.

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
            and not resumed_ids(cached)
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
            resumed=resumed_ids(cached),
            new=new,
            drafts=dict(zip(drafts, map(len, drafts.values()), strict=True)) if drafts else {},
        )
        number = len(ids) + len(new)
        if output.total_num_scheduled_tokens != number or drafts:
            self._ids = None
            return rows, full
        if len(self._ones) != number:
            self._ones = [1] * number
            self._pack = struct.Struct(f"<{number}I").pack
            self._one_each = int.from_bytes(self._pack(*self._ones), "little")
        self._ids = ids + [request_id for request_id, _ in new] if new else ids
        self._computed = self._packed(computed + [tokens for _, tokens in new] if new else computed)
        return rows, full

    def _packed(self, computed: list[int]) -> int:
        """Return all numbers packed into one; if any is too large, the next step is not treated as steady."""
        try:
            return int.from_bytes(self._pack(*computed), "little")
        except struct.error:
            self._ids = None
            return -1


def resumed_ids(cached: Any) -> Collection[str]:
    """Return the ids of resumed requests; up to vLLM 0.11.0 each request has a flag instead."""
    ids: Collection[str] | None = getattr(cached, "resumed_req_ids", None)
    return set(compress(cached.req_ids, cached.resumed_from_preemption)) if ids is None else ids
