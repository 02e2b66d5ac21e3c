"""What is noted on the scheduler's path: plain values, as few as possible, and none of vLLM's objects.

An object kept alive costs the engine: its memory cannot be used again for the next step's. The lists and
dicts of strings and numbers that a ``SchedulerOutput`` carries are kept by reference, and only of steps that
are not steady; vLLM builds new ones for every step and does not change them afterwards.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from schedtrace.model.trace import Arrival, Exit, Finish, Preemption
from schedtrace.model.trace_facts import Control
from schedtrace.record.execution import Execution
from schedtrace.record.exits import Noted
from schedtrace.record.happened import Happened
from schedtrace.record.state_facts import State

_T = TypeVar("_T")

ALL = "all"
"""Every request of the step got exactly one token."""


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
    arrived: list[Arrival] = []
    finished: list[Finish] = []
    dummies: list[DummyPass] = []
    synced: list[Synced] = []
    controls: list[Control] = []
    preempted: list[tuple[Preemption, int]] = []
    started: list[tuple[str, int, int]] = []
    """Requests that the workers did not know: id, computed tokens, start of the step."""
    missing_arrivals: int = 0
    missing_finishes: int = 0

    def add(self, capture: Capture) -> Sequence[Arrival]:
        """Another step, which is not going to be written; those of its arrivals that are not kept."""
        came = capture.came
        self.last_step, self.end_ns = capture.step, capture.end_ns
        self.steps += 1
        missing = _keep(self.arrived, came.arrived)
        self.missing_arrivals += len(missing)
        self.missing_finishes += len(_keep(self.finished, came.finished))
        _keep(self.dummies, came.dummies)
        _keep(self.synced, came.synced)
        _keep(self.controls, came.controls)
        _keep(self.preempted, capture.preempted)
        if capture.rows is not None:
            new = [(request_id, computed, capture.start_ns) for request_id, computed in capture.rows.new]
            _keep(self.started, new)
        return missing


def _keep(kept: list[_T], more: Sequence[_T]) -> Sequence[_T]:
    """Keep as many as there is room for; the others."""
    room = MOST_KEPT - len(kept)
    kept += more[:room]
    return more[room:]
