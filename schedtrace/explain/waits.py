"""The times that a request was in the waiting queue, from its states."""

from dataclasses import dataclass
from itertools import groupby

from schedtrace.model.life import LifeState
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED


@dataclass(frozen=True)
class WaitedFor:
    """One cause that it waited for."""

    cause: str
    steps: int
    wait_ms: float


@dataclass(frozen=True)
class Wait:
    """One time in the waiting queue."""

    from_ms: float
    since_step: int | None
    """First step that refused it; None: the first step that could schedule it did."""
    left_step: int | None
    """The step that scheduled it; None: none did."""
    wait_ms: float
    before_step_ms: float
    """Of these, until a step could see it."""
    causes: list[WaitedFor]
    """The rest, the longest first."""


def waits(states: list[LifeState]) -> list[Wait]:
    """Each stay in the queue; a request that the first possible step schedules has one, too."""
    found = []
    for queued, group in groupby(enumerate(states), key=lambda entry: entry[1].state in QUEUED):
        stay = list(group)
        if queued:
            after = states[stay[-1][0] + 1 :]
            found.append(_wait([state for _, state in stay], after[0].first_step if after else None))
    return found


def _wait(stay: list[LifeState], left_step: int | None) -> Wait:
    refused = [state for state in stay if state.cause != NEXT_STEP]
    causes = []
    for cause in dict.fromkeys(state.cause or "" for state in refused):
        runs = [state for state in refused if state.cause == cause]
        causes.append(
            WaitedFor(cause, sum(run.steps for run in runs), sum(run.to_ms - run.from_ms for run in runs))
        )
    wait_ms = stay[-1].to_ms - stay[0].from_ms
    return Wait(
        from_ms=stay[0].from_ms,
        since_step=refused[0].first_step if refused else None,
        left_step=left_step,
        wait_ms=wait_ms,
        before_step_ms=wait_ms - sum(cause.wait_ms for cause in causes),
        causes=sorted(causes, key=lambda cause: -cause.wait_ms),
    )
