"""One engine's trace with all that is made of it: what findings and metrics are computed from."""

from functools import cached_property
from typing import Literal

import polars as pl

from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.model.manifest import OFFLINE, Manifest
from schedtrace.model.say import say
from schedtrace.read.run import FrontEndRecord
from schedtrace.read.trace import Trace
from schedtrace.timeline.charges import charges
from schedtrace.timeline.engine_states import engine_busy_us, engine_states
from schedtrace.timeline.events import events
from schedtrace.timeline.frames import Frames
from schedtrace.timeline.queue_waits import waits
from schedtrace.timeline.request_states import request_states
from schedtrace.timeline.spans import LENGTH_US, at_steps, level
from schedtrace.timeline.starvation import unstarved
from schedtrace.timeline.step_time import StepTime, busy_us, fit_step_time
from schedtrace.timeline.unrecorded import recorded

WARMUP_TRIAL = 0
FACTS = ("admitted", "refusals", "kv_loads", "grammars", "set_aside")


class Timeline(Frames):
    """The frames of one engine's trace, with the tables that are made of them, each where asked for first."""

    @property
    def waits(self) -> pl.DataFrame:
        """Each time that a request was in the waiting queue (``timeline/queue_waits.py``)."""
        return waits(self)

    @property
    def request_states(self) -> pl.DataFrame:
        """Every moment of every request (``timeline/request_states.py``)."""
        return request_states(self)

    @property
    def engine_states(self) -> pl.DataFrame:
        """Every moment of the engine (``timeline/engine_states.py``)."""
        return engine_states(self)

    @property
    def charges(self) -> pl.DataFrame:
        """What every wait is charged to (``timeline/charges.py``)."""
        return charges(self)

    @property
    def events(self) -> pl.DataFrame:
        """Interruptions (``timeline/events.py``)."""
        return events(self)

    @cached_property
    def step_time(self) -> StepTime | None:
        """The model of step times, for estimates of cost; None where too few steps tell theirs."""
        return fit_step_time(unstarved(self, self.steps))

    @cached_property
    def requests_us(self) -> int:
        """All requests' time added up: what shares of it are of."""
        return int(recorded(self.request_states).select(LENGTH_US.sum()).item() or 0)

    @property
    def busy_us(self) -> int:
        """The engine's time without what it was idle: what shares of the run are of."""
        return engine_busy_us(self)


def make_timeline(
    trace: Trace,
    manifest: Manifest | None = None,
    *,
    whole: bool = False,
    front_end: FrontEndRecord | None = None,
) -> Timeline:
    """Prepare a trace for the rules; the manifest tells how the requests came.

    Args:
        trace: One engine's.
        manifest: Of its run.
        whole: Leave nothing out, the warm-up neither: to tell about single steps and requests.
        front_end: What the front ends of its run recorded.
    """
    steps = trace.steps
    measured = pl.col("trial").is_null() | (pl.col("trial") != WARMUP_TRIAL)
    if whole:
        measured = pl.lit(value=True)
    elif trace.header.trial_ids:  # steps before the first request belong to no trial
        measured = pl.col("trial").is_not_null() & (pl.col("trial") != WARMUP_TRIAL)
    came = pl.concat([frame.select("request_id", "trial") for frame in (trace.arrivals, trace.present)])
    trial_of = came.unique("request_id")
    finishes = trace.finishes.join(
        trial_of, on="request_id", how="left", maintain_order="left", suffix="_of_arrival"
    )
    if "trial_of_arrival" in finishes.columns:  # of those that came before the trace began: when they went
        finishes = finishes.with_columns(trial=pl.coalesce("trial_of_arrival", "trial")).drop(
            "trial_of_arrival"
        )
    exits = _exits(trace)
    kept = (
        _as_scheduled(steps, exits)
        .filter(measured)
        .with_columns(
            end_us=pl.col("start_us") + pl.col("schedule_us"),
            used_tokens=_used(),
            use_frac=pl.when(pl.col("token_budget") > 0).then(_used() / pl.col("token_budget")),
            busy_us=busy_us(),
            eligible_after=pl.max_horizontal(0, pl.col("num_waiting_after") - pl.col("num_not_ready_after")),
        )
        .join(_context_tokens(trace.stretches(), steps), on="step", how="left", maintain_order="left")
        .join(_waiting_ends(exits), on="step", how="left", maintain_order="left")
        .with_columns(_told(pl.col("waiting_cause")), pl.col("waiting_via").fill_null("inferred"))
    )
    return Timeline(
        header=trace.header,
        steps=kept,
        stretches=trace.stretches().filter(measured),
        arrivals=trace.arrivals.filter(measured),
        finishes=finishes.filter(measured),
        present=trace.present.filter(measured),
        gaps=trace.gaps.filter(
            pl.col("next_step").is_between(*_ends(kept["step"]), closed=_closed(trace, kept))
        ),
        there_after=trace.there_after.filter(measured),
        preemptions=trace.preemptions().filter(measured).collect(),
        exits=exits.filter(measured),
        caps=_with_step(trace, trace.caps(), "remaining_budget").filter(measured),
        facts=trace.facts,
        closed_workload=manifest is not None and manifest.front_end == OFFLINE,
        warmup_steps=steps.filter(pl.col("trial") == WARMUP_TRIAL).height,
        warmup_requests=trial_of.filter((pl.col("trial") == WARMUP_TRIAL) & (not whole))["request_id"],
        lists={name: trace.large[name].filter(measured) for name in FACTS if name in trace.large},
        cpu=trace.cpu,
        controls=trace.controls,
        stalls=_stalls(trace),
        front_end=front_end,
        missing=[say("{problem}", problem=text) for text in trace.problems.missing(trace.path)],
        requests_missing=trace.problems.requests_missing,
    )


def _closed(trace: Trace, steps: pl.DataFrame) -> Literal["both", "right"]:
    """Return "both" if a gap before the first of these steps counts: not if the warm-up is missing there."""
    is_first = steps.height > 0 and steps["step"][0] == trace.steps["step"][0]
    return "both" if is_first else "right"


def _ends(numbers: pl.Series) -> tuple[int, int]:
    return (int(numbers[0]), int(numbers[-1])) if numbers.len() else (0, -1)


def _stalls(trace: Trace) -> pl.DataFrame:
    """The watchdog's, with ``open``: there was no progress until the trace's end."""
    later = [trace.cpu["at_us"].max(), trace.end.at_us if trace.end is not None else None]
    last_us = pl.max_horizontal("at_us", pl.lit(max((us for us in later if us is not None), default=0)))
    ended = pl.col("until_us").is_null()
    return trace.stalls.with_columns(open=ended, until_us=pl.coalesce("until_us", last_us))


def _as_scheduled(steps: pl.DataFrame, exits: pl.DataFrame) -> pl.DataFrame:
    """The steps with the token budget that ``schedule()`` worked with, where less than the recorded one.

    A scheduler of a user's own may lower it for a call and raise it again. It shows where ``schedule()`` ends
    for want of budget although the step's tokens leave some.
    """
    spent = exits.filter(
        pl.col("cause") == str(Cause.TOKEN_BUDGET), pl.col("via") == "source", pl.col("budget_left") <= 0
    ).select(pl.col("step").unique(), spent=True)
    marked = steps.join(spent, on="step", how="left", maintain_order="left")
    lacking = pl.when("spent").then("remaining_budget").otherwise(0)
    return marked.with_columns(
        token_budget=pl.col("token_budget") - lacking, remaining_budget=pl.col("remaining_budget") - lacking
    ).drop("spent")


def _context_tokens(stretches: pl.LazyFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """``step`` and ``context_tokens``: computed tokens of its requests before it."""
    # In step n a request has computed_tokens + (n - step) * scheduled_tokens.
    grows = pl.when(pl.col("last_step") > pl.col("step")).then("scheduled_tokens").otherwise(0)
    at_zero = pl.col("computed_tokens") - pl.col("step") * grows
    sums = level(stretches, "step", pl.col("last_step") + 1, at_zero=at_zero, slope=grows)
    tokens = pl.col("at_zero") + pl.col("step") * pl.col("slope")
    return at_steps(sums, steps.select("step")).select("step", context_tokens=tokens)


def _used() -> pl.Expr:
    """By the budget; where a record does not tell it, by the tokens of the two kinds."""
    of_both = pl.col("prefill_tokens") + pl.col("decode_tokens")
    return pl.coalesce(pl.col("token_budget") - pl.col("remaining_budget"), of_both)


def _told(cause: pl.Expr) -> pl.Expr:
    """The cause; where no exit was recorded, whether anything waited decides what can be said."""
    waiting = pl.col("num_waiting_after")
    nobody = pl.when(waiting == 0).then(pl.lit(str(Cause.QUEUE_EMPTY)))
    return cause.fill_null(nobody.when(waiting > 0).then(pl.lit(str(Cause.OTHER))))


def _exits(trace: Trace) -> pl.DataFrame:
    """All exits; a loop that ends refuses somebody only if somebody is left in the queue."""
    left = (pl.col("loop") == "running") | (pl.col("num_waiting_after") > 0)
    refusal = left & ~pl.col("cause").is_in([str(cause) for cause in NOT_A_REFUSAL])
    return _with_step(trace, trace.exits(), "num_waiting_after").with_columns(refusal=refusal)


def _with_step(trace: Trace, rows: pl.LazyFrame, column: str) -> pl.DataFrame:
    """Rows of a nested list with a column of the step that they belong to."""
    beside = trace.steps.lazy().select("step", column)
    return rows.join(beside, on="step", how="left", maintain_order="left").collect()


def _waiting_ends(exits: pl.DataFrame) -> pl.DataFrame:
    """For every step the exit that tells why the waiting queue was not emptied."""
    told = ("cause", "detail", "guard", "location", "via")
    ended = pl.col("kind") != "continue"
    often = pl.col("count").sum().over("step", "cause", "location")
    return (
        exits.filter(pl.col("loop") == "waiting")
        .with_row_index("at")
        .with_columns(ended=ended, weight=pl.when(ended).then(pl.col("at")).otherwise(often))
        .sort("step", "refusal", "ended", "weight", "at", descending=[False, True, True, True, False])
        .unique("step", keep="first", maintain_order=True)
        .select(
            "step",
            pl.col("request_id").alias("waiting_request"),
            *(pl.col(name).alias(f"waiting_{name}") for name in told),
        )
    )
