"""An engine with vLLM's own, untouched scheduler, watched by an oracle; and what a trace says of the same."""

from collections import defaultdict
from typing import Any

from tests.contract.deciding import Deciding
from tests.contract.oracle import Oracle, Place

FILE = "vllm/v1/core/sched/scheduler.py"
LOOPS = ("running", "waiting")
TOLD_ONE_BY_ONE = 64
"""Exits at one place in one call; what is more shares a line in the trace."""

ExitLine = tuple[str, int, str, str | None, int, int]
"""Loop, line, kind, request, token budget left, and how many exits it stands for."""


class Watched(Deciding):
    """``exits`` has a list of exits for every call of ``schedule()``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.oracle = Oracle(type(self.scheduler).schedule, note_of_exit)
        self.exits: list[list[ExitLine]] = []

    def schedule(self, *args: Any) -> Any:
        with self.oracle.watching() as seen:
            output = super().schedule(*args)
        self.exits.append(_as_lines(seen))
        return output


def exits_told(trace: Any) -> list[list[ExitLine]]:
    """What a trace says of every call."""
    calls: dict[int, list[ExitLine]] = defaultdict(list)
    for line in trace.exits().collect().iter_rows(named=True):
        number = int(line["location"].removeprefix(f"{FILE}:"))
        found = (line["loop"], number, line["kind"], line["request_id"], line["budget_left"], line["count"])
        calls[line["step"]].append(found)
    return [calls[step] for step in trace.steps["step"]]


def note_of_exit(place: Place, variables: dict[str, Any]) -> ExitLine | None:
    """An exit as ``schedule()``'s own variables tell it; None where all that run were simply looked at."""
    scheduler = variables["self"]
    loop = LOOPS[place.loop]
    if "request" in place.bound:
        request = variables["request"]
    elif loop == "running":
        if variables["req_index"] >= len(scheduler.running):
            return None  # to vLLM 0.11.0 a preemption by priority may move the index beyond the end
        request = scheduler.running[variables["req_index"]]
    else:
        queue = _next_queue(scheduler)
        request = queue.peek_request() if queue else None
    who = request and request.request_id
    return (loop, place.line, place.kind, who, variables["token_budget"], 1)


def _next_queue(scheduler: Any) -> Any:
    """The queue that the waiting loop would look at next; vLLM 0.18 to 0.30 has a method for that."""
    if hasattr(scheduler, "_select_waiting_queue_for_scheduling"):
        return scheduler._select_waiting_queue_for_scheduling()
    return getattr(scheduler, "kv_holding_waiting", None) or scheduler.waiting


def _as_lines(seen: list[ExitLine]) -> list[ExitLine]:
    """The exits, with those put together that share a line; it names no request, and the first's budget."""
    lines: list[ExitLine] = []
    at: dict[int, list[int]] = defaultdict(list)
    for exit_line in seen:
        places = at[exit_line[1]]
        if len(places) > TOLD_ONE_BY_ONE:
            shared = lines[places[-1]]
            lines[places[-1]] = (*shared[:-1], shared[-1] + 1)
            continue
        places.append(len(lines))
        who = exit_line[3] if len(places) <= TOLD_ONE_BY_ONE else None
        lines.append((*exit_line[:3], who, *exit_line[4:]))
    return lines
