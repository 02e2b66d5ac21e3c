"""Inference of the exits of ``schedule()`` from the state after the call; marked ``via: inferred``.

Inference is only for schedulers whose source cannot be proven to be the running code (``marks/source.py``);
for all others, ``marks/exits.py`` records the exits and their causes. The order of the tests below follows
``Scheduler.schedule()`` of vLLM 0.12 to 0.33. If the state does not determine the cause, the cause is
``other`` with the known facts, never a guess.

A scheduler that is not vLLM's may also remove a request from ``running`` without preempting or finishing it,
and may let it keep its KV blocks, or drop it. After each call, requests that ran after the previous call and
no longer run are therefore looked up.
"""

from collections.abc import Callable
from functools import cache
from itertools import compress
from typing import Any

from schedtrace.model.causes import WAITING_STATUS_CAUSES, Cause
from schedtrace.model.trace import Exit, ExitKind
from schedtrace.model.trace_facts import SetAside
from schedtrace.record.allocation import blocks_of
from schedtrace.record.disguise import PLAIN, Beside, disguises, plain_class, set_class
from schedtrace.record.queues import Queues, head, held_back, max_running_requests, pause_name
from schedtrace.record.vllms_own import is_own_class


class InferredExits:
    """Inference of the exits of one scheduler's ``schedule()`` calls."""

    def __init__(self, scheduler: Any) -> None:
        self._manager = scheduler.kv_cache_manager
        self._queues = Queues(scheduler)
        self._refused: Any = None
        self._watched: type | None = None
        """Class that the cache manager has while its allocations are watched; otherwise None."""
        self._may_watch = is_own_class(type(self._manager))

    def begin(self, scheduler: Any, running: int, waiting: int) -> None:
        """Watch for failed allocations if this call could refuse blocks to a waiting request.

        A call without waiting requests or free seats is not watched: its only allocation failures are
        preemptions, which have their own hook. ``docs/overhead.md`` lists the cost of watching.
        """
        self.release()  # from a call that ended in an exception
        self._refused = None
        if self._may_watch and waiting and running < max_running_requests(scheduler):
            self._watch()

    def _watch(self) -> None:
        kind: Any = type(self._manager)  # hashable, as every class
        watching = _watching(kind)
        try:
            set_class(self._manager, watching)
        except TypeError:  # its class is none that Python assigns: whom it refuses is not known
            self._may_watch = False
            return
        self._watched = watching
        _WATCHES.store(self._manager, self._refuse)

    def _refuse(self, request: Any) -> None:
        self._refused = request

    def infer_exits(
        self, scheduler: Any, budget_left: int, scheduled: dict[str, int], preempted: int
    ) -> list[Exit]:
        """Return the exits of the call that has just ended.

        Args:
            scheduler: Scheduler after the call.
            budget_left: Token budget minus the tokens scheduled.
            scheduled: Tokens of this step by request id.
            preempted: Number of requests preempted in this call.
        """
        self.release()
        kind, cause, request, detail = self._why_waiting_ended(scheduler, budget_left, preempted)
        guard = "the state after schedule() does not tell which exit was taken"
        waiting_exit = Exit(
            "waiting",
            kind,
            cause,
            None if request is None else request.request_id,
            budget_left,
            detail,
            guard if cause == Cause.OTHER else None,
        )
        return [*_running_exits(scheduler, budget_left, scheduled), waiting_exit]

    def release(self) -> None:
        """Stop watching allocations, so that vLLM's objects have their original classes."""
        watched, self._watched = self._watched, None
        if watched is None:
            return
        _WATCHES.drop(self._manager)
        if type(self._manager) is watched:
            set_class(self._manager, plain_class(watched))

    def _why_waiting_ended(  # noqa: PLR0911  # one return per cause, in the order of vLLM's own checks
        self, scheduler: Any, budget_left: int, preempted: int
    ) -> tuple[ExitKind, Cause, Any, str | None]:
        """Return the kind and cause of the waiting loop's exit, its request, and further recorded facts."""
        if self._queues.count_waiting(scheduler) == 0:
            return "condition", Cause.QUEUE_EMPTY, None, None
        if preempted:
            return "gate", Cause.PREEMPTED_THIS_STEP, None, None
        pause = pause_name(scheduler)
        if pause != "UNPAUSED":
            return "gate", Cause.PAUSED, None, pause
        first, refused = head(scheduler), self._refused
        if budget_left <= 0:
            return "condition", Cause.TOKEN_BUDGET, first, None
        if refused is not None and refused.status.name != "RUNNING":
            return "break", Cause.KV_BLOCKS, refused, None
        occupied = len(scheduler.running) + getattr(scheduler, "num_waiting_for_streaming_input", 0)
        if occupied >= max_running_requests(scheduler):
            return "break", Cause.MAX_NUM_SEQS, first, None
        if held_back(scheduler):
            return "break", Cause.RANK_BALANCE, first, None
        if first is not None and (not_ready := WAITING_STATUS_CAUSES.get(first.status.name)):
            return "continue", not_ready, first, first.status.name
        chunked = getattr(scheduler.scheduler_config, "enable_chunked_prefill", True)
        if first is not None and not chunked and first.num_tokens > budget_left:
            return "break", Cause.CHUNKED_PREFILL_OFF, first, f"prompt of {first.num_tokens} tokens"
        return "break", Cause.OTHER, first, None


_WATCHES: Beside[Callable[[Any], None]] = Beside()
"""Function that each watched cache manager calls with a request to which it refuses blocks."""


@cache
def _watching(base: type) -> type:
    """Return a subclass of ``base`` that reports refused requests; copies of its objects are of ``base``."""

    class Watched(*disguises(base, base)):  # type: ignore[misc]  # mypy knows no class that is found at run time
        __slots__ = ()

        def allocate_slots(self, *args: object, **kwargs: object) -> Any:
            blocks = super().allocate_slots(*args, **kwargs)
            if blocks is None and (refuse := _WATCHES.look_up(self)) is not None:
                refuse(args[0] if args else kwargs.get("request"))
            return blocks

    setattr(Watched, PLAIN, base)
    return Watched


def _running_exits(scheduler: Any, budget_left: int, scheduled: dict[str, int]) -> list[Exit]:
    """Return an exit for each running request without tokens, or a single exit if the budget is spent."""
    running = scheduler.running
    if len(running) == len(scheduled):  # everything scheduled is in running, so nobody was left out
        return []
    left_out = [request for request in running if request.request_id not in scheduled]
    if left_out and budget_left <= 0:
        return [Exit("running", "condition", Cause.TOKEN_BUDGET, left_out[0].request_id, 0)]
    exits = []
    for request in left_out:
        placeholders = getattr(request, "num_output_placeholders", 0)
        last = request.num_prompt_tokens + request.max_tokens
        is_last_in_flight = placeholders > 0 and request.num_computed_tokens + 2 - placeholders >= last
        cause = Cause.OUTPUT_IN_FLIGHT if is_last_in_flight else Cause.OTHER
        exits.append(Exit("running", "continue", cause, request.request_id, budget_left))
    return exits


class Departures:
    """Departures from the running list of a scheduler that is not vLLM's."""

    def __init__(self) -> None:
        self._ran: dict[str, Any] = {}
        """Requests that ran after the last call, by id."""
        self._explained: set[str] = set()
        """Ids of requests that ran after the last call and were preempted or finished since."""

    def explain(self, request_id: str) -> None:
        """Record that a request was preempted or finished, which explains why it stopped running."""
        self._explained.add(request_id)

    def unexplained(self, scheduler: Any) -> tuple[list[SetAside], list[Any]]:
        """Return requests that stopped running for no recorded reason: those that wait, and all others."""
        if type(scheduler.running) is not list:
            return [], []
        runs = {request.request_id: request for request in scheduler.running}
        left = [
            request
            for request_id, request in self._ran.items()
            if request_id not in runs
            and request.request_id not in self._explained
            and not getattr(request, "resumable", False)  # it may wait for its client (vLLM 0.15 and newer)
        ]
        self._ran = runs
        self._explained.clear()
        waits = [scheduler.requests.get(request.request_id) is request for request in left]
        aside = [_set_aside(scheduler, request) for request in compress(left, waits)]
        return aside, [request for request, waiting in zip(left, waits, strict=True) if not waiting]


def _set_aside(scheduler: Any, request: Any) -> SetAside:
    """Return the entry of a request that waits although it was not preempted."""
    blocks = blocks_of(scheduler.kv_cache_manager, request.request_id)
    return SetAside(
        request_id=request.request_id,
        wanted_tokens=request.num_tokens - request.num_computed_tokens,
        blocks_held=sum(blocks) if blocks else None,
    )
