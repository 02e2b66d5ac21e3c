"""All rows of a request in a trace, and its waits."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import polars as pl

from schedtrace.model.life import LifeEvent, LifeState
from schedtrace.model.message import Message
from schedtrace.timeline.computing import with_work
from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.request_states import NEXT_STEP, QUEUED
from schedtrace.timeline.timeline import Timeline

Row = dict[str, Any]
_TIMES = ("arrived_us", "queued_us", "scheduled_us", "first_token_us", "last_token_us", "finished_us")
"""Times of a finish."""


@dataclass(frozen=True)
class RequestRows:
    """A request's rows; times in microseconds of the trace's clock."""

    timeline: Timeline
    request_id: str
    arrival: Row | None
    present: Row | None
    """State when the trace began; None: it arrived later, or at an unknown time."""
    finish: Row | None
    scheduled: list[Row]
    """Rows of the steps that scheduled it, with ``work``, ``lost_tokens``, ``start_us``, ``output_us`` and
    ``outputs``: the step gave it a token, since it reached the end of what it had to compute."""
    preemptions: list[Row]
    """Preemptions, with ``start_us`` of their step."""
    set_aside: list[Row]
    """Times at which it was set aside, with ``start_us`` of the step."""
    states: list[Row]
    """Its ``interrupted_states``, in their order in time, with the engine's time in each."""
    caps: dict[int, list[str]]
    """Step to the limits that made its chunk smaller."""

    @property
    def begin_us(self) -> int:
        """Arrival at the front end; where it is not recorded, the first thing that is."""
        return min(self._times_us() + [int(row["begin_us"]) for row in self.states[:1]])

    @property
    def end_us(self) -> int | None:
        """Time at which it left the scheduler; None if it did not."""
        if self.finish is None:
            return None
        return max([int(self.finish["finished_us"]), *(int(row["end_us"]) for row in self.states[-1:])])

    @property
    def first_token_us(self) -> int | None:
        """Time at which the output with its first token came back."""
        recorded = self.finish["first_token_us"] if self.finish else None
        # Otherwise it may have got tokens in steps that are missing.
        seen = self.scheduled if self.scheduled and self.scheduled[0]["phase"] == "new" else []
        outputs = (row["output_us"] for row in seen if row["outputs"])
        return recorded if recorded is not None else next(outputs, None)

    def _times_us(self) -> list[int]:
        """Return the recorded times of a request that was in no state for any time."""
        arrival, gone = self.arrival or self.present or {}, self.finish or {}
        times = [arrival.get("arrived_us"), arrival.get("queued_us"), *(gone.get(name) for name in _TIMES)]
        times += [row["start_us"] for row in (*self.scheduled, *self.preemptions)]
        return [int(us) for us in times if us is not None]

    def life_states(self) -> list[LifeState]:
        """Return the request's states, in milliseconds since its arrival."""
        return [
            *self._unrecorded(),
            *(
                LifeState(
                    state=row["state"],
                    cause=row["cause"],
                    from_ms=self.since_us(row["begin_us"]),
                    to_ms=self.since_us(row["end_us"]),
                    first_step=row["begin_step"],
                    last_step=row["end_step"],
                    tokens=self._tokens(row),
                    device_ms=row["device_us"] / 1e3,
                    of_state=row["of_state"],
                )
                for row in self.states
            ),
        ]

    def _tokens(self, state: Row) -> int:
        """Return the tokens scheduled for the request in the steps of a state, or of a part of a state."""
        if state["tokens"] is not None:
            return int(state["tokens"])
        first, last = state["begin_step"], state["end_step"]
        inside = (row for row in self.scheduled if first is not None and first <= row["step"] <= last)
        return sum(row["scheduled_tokens"] for row in inside)

    def _unrecorded(self) -> Iterator[LifeState]:
        """Yield the request's time before the recording began."""
        if self.present is None or self.present["at_us"] <= self.begin_us:
            return
        yield LifeState(
            state="unrecorded",
            cause=None,
            from_ms=0.0,
            to_ms=self.since_us(self.present["at_us"]),
            first_step=None,
            last_step=None,
            tokens=0,
            device_ms=0.0,
        )

    def since_us(self, us: int) -> float:
        """Return milliseconds since the request's arrival."""
        return (us - self.begin_us) / 1e3

    def event(self, us: int, what: str, sentence: Message, step: int | None = None) -> LifeEvent:
        """Return an event at a time of the trace's clock."""
        return LifeEvent(at_ms=self.since_us(us), what=what, step=step, last_step=step, message=sentence)


def ending() -> pl.Expr:
    """Return how a request of ``timeline.finishes`` ended: an abort not asked for is the scheduler's."""
    by_scheduler = pl.col("in_schedule") & pl.col("abort_us").is_null()
    return pl.when(by_scheduler).then(pl.col("status") + " by the scheduler").otherwise("status")


def request_rows(timeline: Timeline, request_id: str) -> RequestRows:
    """Gather a request's rows from a timeline of the whole trace."""
    its = pl.col("request_id") == request_id
    times = timeline.steps.select(pl.col("step").cast(pl.Int64), "start_us", "output_us")
    scheduled = with_work(timeline, timeline.requests_of(its).drop("start_us"))
    lost, prompt = pl.col("lost_tokens"), pl.col("prompt_tokens")
    tokens = pl.max_horizontal(
        prompt, pl.when(lost >= prompt).then(lost + 1)
    )  # one was sampled, not computed
    scheduled = scheduled.join(times, on="step", how="left", maintain_order="left").with_columns(
        outputs=pl.col("computed_tokens") + pl.col("scheduled_tokens") >= tokens
    )
    caps: dict[int, list[str]] = {}
    for cap in timeline.caps.filter(its).to_dicts():
        caps.setdefault(cap["step"], []).append(cap["cap"])
    arrivals = timeline.arrivals.filter(its & ~pl.col("streaming_update")).to_dicts()
    went = timeline.finishes.filter(its).with_columns(status=ending()).to_dicts()
    return RequestRows(
        timeline=timeline,
        request_id=request_id,
        arrival=arrivals[0] if arrivals else None,
        present=next(iter(timeline.present.filter(its).to_dicts()), None),
        finish=went[-1] if went else None,
        scheduled=scheduled.to_dicts(),
        preemptions=timeline.preemptions.filter(its).sort("step").to_dicts(),
        set_aside=timeline.set_aside.filter(its).join(times, on="step").sort("step").to_dicts(),
        states=with_engine_time(timeline.interrupted_states.filter(its), timeline.engine_states).to_dicts(),
        caps=caps,
    )


@dataclass(frozen=True)
class WaitedFor:
    """A cause that it waited for."""

    cause: str
    steps: int
    wait_ms: float
    interrupted: bool
    """True for a kind of interruption: nothing refused the request meanwhile."""


@dataclass(frozen=True)
class Wait:
    """A time in the waiting queue."""

    from_ms: float
    since_step: int | None
    """First step that refused it; None if the first step that could schedule it did."""
    left_step: int | None
    """The step that scheduled it; None: none did."""
    wait_ms: float
    before_step_ms: float
    """Part of the wait until a step could see it."""
    causes: list[WaitedFor]
    """The rest, the longest first."""


def waits(states: list[LifeState]) -> list[Wait]:
    """Return each stay in the queue; a request that the first possible step schedules has one, too."""
    queue_waits = []
    for queued, group in groupby(
        enumerate(states), key=lambda entry: (entry[1].of_state or entry[1].state) in QUEUED
    ):
        stay = list(group)
        if queued:
            after = states[stay[-1][0] + 1 :]
            queue_waits.append(_wait([state for _, state in stay], after[0].first_step if after else None))
    return queue_waits


def _wait(stay: list[LifeState], left_step: int | None) -> Wait:
    refused = [state for state in stay if state.cause != NEXT_STEP]
    causes = []
    for cause, interrupted in dict.fromkeys((state.cause, state.of_state is not None) for state in refused):
        runs = [
            state for state in refused if (state.cause, state.of_state is not None) == (cause, interrupted)
        ]
        steps, wait_ms = sum(run.steps for run in runs), sum(run.to_ms - run.from_ms for run in runs)
        causes.append(WaitedFor(cause or "", steps, wait_ms, interrupted))
    wait_ms = stay[-1].to_ms - stay[0].from_ms
    return Wait(
        from_ms=stay[0].from_ms,
        since_step=next((state.first_step for state in refused if state.first_step is not None), None),
        left_step=left_step,
        wait_ms=wait_ms,
        before_step_ms=wait_ms - sum(cause.wait_ms for cause in causes),
        causes=sorted(causes, key=lambda cause: -cause.wait_ms),
    )
