"""Timeline of one engine: its trace with all tables that findings and metrics are computed from."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

import polars as pl

from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.model.manifest import OFFLINE, Manifest
from schedtrace.model.say import say
from schedtrace.read.run import FrontEndRecord
from schedtrace.read.trace import Trace
from schedtrace.timeline.aborted_work import aborted_work
from schedtrace.timeline.admission import behind_head, heads_by_size, refused_heads
from schedtrace.timeline.charges import charges
from schedtrace.timeline.engine_states import engine_busy_us, starved_steps, unstarved
from schedtrace.timeline.events import events, host_spans, interrupted_states
from schedtrace.timeline.frames import EngineFrames, demand_of, first_moment_us, last_moment_us
from schedtrace.timeline.holders import idle_holders, long_prefills
from schedtrace.timeline.queue_waits import mismatches
from schedtrace.timeline.spans import LENGTH_US, at_steps, level
from schedtrace.timeline.step_time import StepTime, busy_us, fit_step_time
from schedtrace.timeline.tables import EngineTables, make_tables
from schedtrace.timeline.unrecorded import recorded

WARMUP_TRIAL = 0
FACTS = ("admitted", "refusals", "kv_loads", "grammars", "set_aside")


@dataclass(eq=False)
class Timeline(EngineFrames):
    """The frames of one engine's trace with its tables, each made once, when first asked for.

    A property's function gets the tables that it is made of; no function looks up another's.
    """

    ready_tables: EngineTables | None = None
    """Tables that are not made of these frames, such as a window's; None: made of them."""
    longer_step_time: StepTime | None = None
    """Model of step times that was fitted to more steps than these; None: fitted to these."""

    @cached_property
    def tables(self) -> EngineTables:
        """The tables that all others are made of."""
        return self.ready_tables or make_tables(self)

    @property
    def gone(self) -> pl.DataFrame:
        """Requests that left in a gap of the trace (``timeline/unrecorded.py``)."""
        return self.tables.gone

    @property
    def waits(self) -> pl.DataFrame:
        """Stays of requests in the waiting queue (``timeline/queue_waits.py``)."""
        return self.tables.waits

    @property
    def request_states(self) -> pl.DataFrame:
        """Every moment of every request (``timeline/request_states.py``)."""
        return self.tables.request_states

    @property
    def engine_states(self) -> pl.DataFrame:
        """Every moment of the engine (``timeline/engine_states.py``)."""
        return self.tables.engine_states

    @property
    def starved(self) -> pl.DataFrame:
        """Times in which processors were short (``timeline/engine_states.py``)."""
        return self.tables.starved

    @cached_property
    def requests_us(self) -> int:
        """All requests' time added up, in microseconds: the whole of which shares are taken."""
        return int(recorded(self.request_states).select(LENGTH_US.sum()).item() or 0)

    @cached_property
    def busy_us(self) -> int:
        """The engine's time without what it was idle, in microseconds."""
        return engine_busy_us(self.engine_states)

    @cached_property
    def mismatches(self) -> pl.DataFrame:
        """Steps after which the rebuilt queue has another length than the recorded one."""
        return mismatches(self, self.waits)

    @cached_property
    def starved_steps(self) -> pl.Series:
        """Numbers of the steps for which processors were short."""
        return starved_steps(self, self.starved)

    @cached_property
    def step_time(self) -> StepTime | None:
        """Model of step times, for estimates of cost; None where too few steps have an output."""
        return self.longer_step_time or fit_step_time(unstarved(self, self.starved_steps, self.steps))

    @cached_property
    def events(self) -> pl.DataFrame:
        """Interruptions (``timeline/events.py``)."""
        return events(self, self.engine_states, self.starved, self.starved_steps)

    @cached_property
    def host_spans(self) -> pl.DataFrame:
        """Times in which an interruption kept the engine's thread from steps."""
        return host_spans(self.events, self.engine_states)

    @cached_property
    def interrupted_states(self) -> pl.DataFrame:
        """``request_states`` with the interruptions cut out (``timeline/events.py``)."""
        return interrupted_states(self, self.request_states, self.events, self.host_spans)

    @cached_property
    def refused_heads(self) -> pl.DataFrame:
        """Steps that refused the head of the queue for its size (``timeline/admission.py``)."""
        return refused_heads(self, self.waits, self.mismatches)

    @cached_property
    def held_up(self) -> pl.DataFrame:
        """Requests behind such a head that would have fitted."""
        return behind_head(self, self.waits, heads_by_size(self.refused_heads))

    @cached_property
    def idle_holders(self) -> pl.DataFrame:
        """Requests that held KV blocks and got nothing (``timeline/holders.py``)."""
        return idle_holders(self)

    @cached_property
    def long_prefills(self) -> pl.DataFrame:
        """Steps of whose prefill tokens one long prompt took at least half (``timeline/holders.py``)."""
        return long_prefills(self)

    @cached_property
    def aborted_work(self) -> pl.DataFrame:
        """Steps that computed for requests which were aborted later (``timeline/aborted_work.py``)."""
        return aborted_work(self, self.step_time)

    @cached_property
    def charges(self) -> pl.DataFrame:
        """What every wait is charged to (``timeline/charges.py``)."""
        return charges(
            self,
            self.request_states,
            events=self.events,
            held_up=self.held_up,
            idle=self.idle_holders,
            long=self.long_prefills,
            in_vain=self.aborted_work,
        )


Made = TypeVar("Made")


def made_once(make: Callable[[Timeline], Made]) -> Callable[[Timeline], Made]:
    """Wrap a function of a timeline so that it computes its result once for each, while the timeline lives.

    The results belong to the wrapped function: nothing else can reach them.
    """
    results: WeakKeyDictionary[Timeline, Made] = WeakKeyDictionary()

    @wraps(make)
    def once(timeline: Timeline) -> Made:
        if timeline not in results:
            results[timeline] = make(timeline)
        return results[timeline]

    return once


def make_timeline(
    trace: Trace,
    manifest: Manifest | None = None,
    *,
    whole: bool = False,
    front_end: FrontEndRecord | None = None,
) -> Timeline:
    """Prepare a trace for the rules.

    Args:
        trace: One engine's trace.
        manifest: Manifest of its run: how the requests were sent.
        whole: Leave nothing out, the warm-up neither, to describe single steps and requests.
        front_end: Record of the run's front ends.
    """
    steps = trace.steps
    measured = pl.col("trial").is_null() | (pl.col("trial") != WARMUP_TRIAL)
    if whole:
        measured = pl.lit(value=True)
    elif trace.header.trial_ids:  # steps before the first request belong to no trial
        measured = pl.col("trial").is_not_null() & (pl.col("trial") != WARMUP_TRIAL)
    requests = pl.concat([frame.select("request_id", "trial") for frame in (trace.arrivals, trace.present)])
    trial_of = requests.unique("request_id")
    finishes = trace.finishes.join(
        trial_of, on="request_id", how="left", maintain_order="left", suffix="_of_arrival"
    )
    if "trial_of_arrival" in finishes.columns:  # of those that came before the trace began: when they went
        finishes = finishes.with_columns(trial=pl.coalesce("trial_of_arrival", "trial")).drop(
            "trial_of_arrival"
        )
    exits = _exits(trace)
    measured_steps = (
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
        .with_columns(_waiting_cause(pl.col("waiting_cause")), pl.col("waiting_via").fill_null("inferred"))
    )
    arrivals, finishes = trace.arrivals.filter(measured), finishes.filter(measured)
    present, stalls = trace.present.filter(measured), _stalls(trace)
    gaps = trace.gaps.filter(
        pl.col("next_step").is_between(*_ends(measured_steps["step"]), closed=_closed(trace, measured_steps))
    )
    return Timeline(
        header=trace.header,
        steps=measured_steps,
        stretches=trace.stretches().filter(measured),
        arrivals=arrivals,
        finishes=finishes,
        present=present,
        gaps=gaps,
        there_after=trace.there_after.filter(measured),
        preemptions=trace.preemptions().filter(measured).collect(),
        exits=exits.filter(measured),
        caps=_with_step(trace, trace.caps(), "remaining_budget").filter(measured),
        begin_us=first_moment_us(measured_steps),
        end_us=last_moment_us(
            steps=measured_steps,
            arrivals=arrivals,
            present=present,
            finishes=finishes,
            stalls=stalls,
            controls=trace.controls,
            cpu=trace.cpu,
            end_missing=trace.problems.end_missing,
        ),
        demand=demand_of(trace.header, measured_steps, finishes),
        there_first=_there_first(present, gaps),
        facts=trace.facts,
        closed_workload=manifest is not None and manifest.front_end == OFFLINE,
        warmup_steps=steps.filter(pl.col("trial") == WARMUP_TRIAL).height,
        warmup_requests=trial_of.filter((pl.col("trial") == WARMUP_TRIAL) & (not whole))["request_id"],
        lists={name: trace.large[name].filter(measured) for name in FACTS if name in trace.large},
        cpu=trace.cpu,
        controls=trace.controls,
        stalls=stalls,
        front_end=front_end,
        missing=[say("{problem}", problem=text) for text in trace.problems.missing(trace.path)],
        requests_missing=trace.problems.requests_missing,
    )


def _there_first(present: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return the requests listed at the trace's beginning, not those listed in or after a gap."""
    spans = gaps.select("from_us", "to_us").sort("from_us")
    listed = present.filter(~pl.col("at_us").is_in(gaps["told_us"].drop_nulls().implode()))
    place = spans["from_us"].search_sorted(listed["at_us"], side="left").cast(pl.Int64) - 1
    if spans.is_empty():
        return listed
    is_outside = (place < 0) | (spans["to_us"].gather(place.clip(0)) < listed["at_us"])
    return listed.filter(is_outside)


def _closed(trace: Trace, steps: pl.DataFrame) -> Literal["both", "right"]:
    """Return "both" if a gap before the first of these steps counts: not if the warm-up is missing there."""
    is_first = steps.height > 0 and steps["step"][0] == trace.steps["step"][0]
    return "both" if is_first else "right"


def _ends(numbers: pl.Series) -> tuple[int, int]:
    return (int(numbers[0]), int(numbers[-1])) if numbers.len() else (0, -1)


def _stalls(trace: Trace) -> pl.DataFrame:
    """Return the watchdog's stalls, with ``open``: there was no progress until the trace's end."""
    later = [trace.cpu["at_us"].max(), trace.end.at_us if trace.end is not None else None]
    last_us = pl.max_horizontal("at_us", pl.lit(max((us for us in later if us is not None), default=0)))
    ended = pl.col("until_us").is_null()
    return trace.stalls.with_columns(open=ended, until_us=pl.coalesce("until_us", last_us))


def _as_scheduled(steps: pl.DataFrame, exits: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with the token budget that ``schedule()`` worked with, where less than recorded.

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
    """Return ``step`` and ``context_tokens``: computed tokens of its requests before it."""
    # In step n a request has computed_tokens + (n - step) * scheduled_tokens.
    grows = pl.when(pl.col("last_step") > pl.col("step")).then("scheduled_tokens").otherwise(0)
    at_zero = pl.col("computed_tokens") - pl.col("step") * grows
    sums = level(stretches, "step", pl.col("last_step") + 1, at_zero=at_zero, slope=grows)
    tokens = pl.col("at_zero") + pl.col("step") * pl.col("slope")
    return at_steps(sums, steps.select("step")).select("step", context_tokens=tokens)


def _used() -> pl.Expr:
    """Return the scheduled tokens by the budget; without it, by the tokens of the two kinds."""
    of_both = pl.col("prefill_tokens") + pl.col("decode_tokens")
    return pl.coalesce(pl.col("token_budget") - pl.col("remaining_budget"), of_both)


def _waiting_cause(cause: pl.Expr) -> pl.Expr:
    """Return the cause; where no exit was recorded, the one that the queue's length allows."""
    waiting = pl.col("num_waiting_after")
    nobody = pl.when(waiting == 0).then(pl.lit(str(Cause.QUEUE_EMPTY)))
    return cause.fill_null(nobody.when(waiting > 0).then(pl.lit(str(Cause.OTHER))))


def _exits(trace: Trace) -> pl.DataFrame:
    """Return all exits; a loop that ends refuses a request only if one is left in the queue."""
    left = (pl.col("loop") == "running") | (pl.col("num_waiting_after") > 0)
    refusal = left & ~pl.col("cause").is_in([str(cause) for cause in NOT_A_REFUSAL])
    return _with_step(trace, trace.exits(), "num_waiting_after").with_columns(refusal=refusal)


def _with_step(trace: Trace, rows: pl.LazyFrame, column: str) -> pl.DataFrame:
    """Add to rows of a nested list a column of the step that they belong to."""
    beside = trace.steps.lazy().select("step", column)
    return rows.join(beside, on="step", how="left", maintain_order="left").collect()


def _waiting_ends(exits: pl.DataFrame) -> pl.DataFrame:
    """Return for every step the exit that shows why the waiting queue was not emptied."""
    columns = ("cause", "detail", "guard", "location", "via")
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
            *(pl.col(name).alias(f"waiting_{name}") for name in columns),
        )
    )
