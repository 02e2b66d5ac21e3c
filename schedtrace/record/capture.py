"""What is noted on the scheduler's path: references and scalars, as few as possible.

The lists and dicts that a ``SchedulerOutput`` carries are kept by reference and read later in the writer's
thread; vLLM builds new ones for every step and does not change them afterwards.
"""

from typing import Any

from schedtrace.model.trace import Arrival, Exit, Finish, Preemption
from schedtrace.record.exits import Event


class Capture:
    """One ``schedule()`` call, raw. Times are nanoseconds of ``time.monotonic_ns``."""

    __slots__ = (
        "arrived",
        "dummy_batches",
        "end_ns",
        "events",
        "finished",
        "free_after",
        "free_before",
        "inferred",
        "kv_blocks_total",
        "max_num_running_reqs",
        "not_ready_after",
        "output",
        "preempted",
        "result",
        "running_after",
        "running_before",
        "start_ns",
        "step",
        "token_budget",
        "waiting_after",
        "waiting_before",
    )

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
    output: Any
    """The ``SchedulerOutput``."""
    events: list[Event]
    """What the marks in ``schedule()`` noted."""
    inferred: list[Exit] | None
    """Where they did not tell how the call ended."""
    preempted: list[tuple[Preemption, int]]
    """With the tokens that the victim had in all."""
    arrived: list[Arrival]
    finished: list[Finish]
    dummy_batches: int
    result: "Result | None"
    """Set in one assignment by the engine's thread when the output came back."""


class Result:
    """What came back for one step."""

    __slots__ = ("back_ns", "done_ns", "outputs")

    def __init__(self, back_ns: int, done_ns: int, outputs: Any) -> None:
        self.back_ns = back_ns
        self.done_ns = done_ns
        self.outputs = outputs
        """What ``update_from_output`` returned: client index -> ``EngineCoreOutputs``."""
