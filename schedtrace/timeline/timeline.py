"""Timeline of one engine: its trace, or a part of it, with all tables behind findings and metrics.

``make_tables`` builds the tables on which all others depend, each from the frames and the tables before it.
``Timeline`` adds the tables that not every command needs. ``windowed`` cuts a timeline to the time between
two moments, with the requests as they were then.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import polars as pl

from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.model.manifest import OFFLINE, Manifest
from schedtrace.model.say import say
from schedtrace.read.run import FrontEndRecord
from schedtrace.read.trace import Trace
from schedtrace.timeline.charges import (
    make_charges,
    make_idle_holders,
    make_long_prefills,
    make_prefills,
    work_for_aborted,
)
from schedtrace.timeline.engine_states import (
    engine_busy_us,
    make_engine_states,
    make_starved,
    make_starved_steps,
    thread_times,
    unstarved,
)
from schedtrace.timeline.events import make_events, make_host_spans, make_interrupted_states
from schedtrace.timeline.frames import (
    EngineFrames,
    demand_of,
    first_moment_us,
    last_moment_us,
    make_gone,
    states_outside_gaps,
)
from schedtrace.timeline.queue_waits import (
    behind_head,
    heads_by_size,
    make_mismatches,
    make_refused_heads,
    make_waits,
)
from schedtrace.timeline.request_states import make_queue_times, make_request_states
from schedtrace.timeline.spans import at_steps, level, total_us
from schedtrace.timeline.step_time import StepTime, device_busy_us, fit_step_time


@dataclass(frozen=True)
class EngineTables:
    """Tables from which all others are built; those of a window are cut out of those of the whole trace."""

    gone: pl.DataFrame
    """Requests that left in a gap of the trace (``timeline/frames.py``)."""
    waits: pl.DataFrame
    """Stays of requests in the waiting queue (``timeline/queue_waits.py``)."""
    request_states: pl.DataFrame
    """Every moment of every request (``timeline/request_states.py``)."""
    engine_states: pl.DataFrame
    """Every moment of the engine (``timeline/engine_states.py``)."""
    thread_times: pl.DataFrame
    """Periods in which threads ran, and waited for a processor (``timeline/engine_states.py``)."""
    starved: pl.DataFrame
    """Periods in which the engine lost much of its busy time for lack of processors."""


def make_tables(frames: EngineFrames) -> EngineTables:
    """Build the tables of one engine, each from those before it."""
    departures = make_gone(frames)
    queue = make_waits(frames, departures)
    requests = make_request_states(frames, queue, departures)
    engine = make_engine_states(frames, requests)
    threads = thread_times(frames, engine)
    return EngineTables(
        gone=departures,
        waits=queue,
        request_states=requests,
        engine_states=engine,
        thread_times=threads,
        starved=make_starved(threads, engine),
    )


WARMUP_TRIAL = 0
FACTS = ("admitted", "refusals", "kv_loads", "grammars", "set_aside")


@dataclass(eq=False)
class Timeline(EngineFrames):
    """Frames of one engine's trace with its tables, each built on first use.

    Each property passes the tables that it needs to a function; no function looks up another table.
    """

    ready_tables: EngineTables | None = None
    """Tables that are not built from these frames, such as a window's; None to build them."""
    longer_step_time: StepTime | None = None
    """Model of step times fitted to more steps than these; None to fit it to these."""

    @cached_property
    def tables(self) -> EngineTables:
        """Tables from which all others are built."""
        return self.ready_tables or make_tables(self)

    @property
    def gone(self) -> pl.DataFrame:
        """Requests that left in a gap of the trace (``timeline/frames.py``)."""
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
        """Periods in which the engine was starved of processor time (``timeline/engine_states.py``)."""
        return self.tables.starved

    @cached_property
    def requests_us(self) -> int:
        """Total time of all requests in microseconds; shares refer to it."""
        return total_us(self.recorded_states)

    @cached_property
    def recorded_states(self) -> pl.DataFrame:
        """Rows of ``request_states`` outside of gaps."""
        return states_outside_gaps(self.request_states)

    @cached_property
    def queue_times(self) -> pl.DataFrame:
        """Queue time of each request first scheduled in this trace (``timeline/request_states.py``)."""
        return make_queue_times(self, self.request_states)

    @cached_property
    def busy_us(self) -> int:
        """Time of the engine without its idle time, in microseconds."""
        return engine_busy_us(self.engine_states)

    @cached_property
    def mismatches(self) -> pl.DataFrame:
        """Steps after which the reconstructed queue differs in length from the recorded one."""
        return make_mismatches(self, self.waits)

    @cached_property
    def starved_steps(self) -> pl.Series:
        """Numbers of the steps in which the engine was starved."""
        return make_starved_steps(self, self.starved)

    @cached_property
    def step_time(self) -> StepTime | None:
        """Model of step times, for estimates of cost; None if too few steps have an output."""
        return self.longer_step_time or fit_step_time(unstarved(self, self.starved_steps, self.steps))

    @cached_property
    def events(self) -> pl.DataFrame:
        """Interruptions (``timeline/events.py``)."""
        return make_events(self, self.engine_states, self.starved, self.starved_steps)

    @cached_property
    def host_spans(self) -> pl.DataFrame:
        """Periods in which an interruption kept the engine's thread from running steps."""
        return make_host_spans(self.events, self.engine_states)

    @cached_property
    def interrupted_states(self) -> pl.DataFrame:
        """``request_states`` with the interruptions cut out (``timeline/events.py``)."""
        return make_interrupted_states(self, self.request_states, self.events, self.host_spans)

    @cached_property
    def refused_heads(self) -> pl.DataFrame:
        """Steps that refused the head of the queue for its size (``timeline/queue_waits.py``)."""
        return make_refused_heads(self, self.waits, self.mismatches)

    @cached_property
    def held_up(self) -> pl.DataFrame:
        """Requests that would have fitted behind a refused head (``timeline/queue_waits.py``)."""
        return behind_head(self, self.waits, heads_by_size(self.refused_heads))

    @cached_property
    def idle_holders(self) -> pl.DataFrame:
        """Requests that held KV blocks and got no tokens (``timeline/charges.py``)."""
        return make_idle_holders(self)

    @cached_property
    def long_prefills(self) -> pl.DataFrame:
        """Steps in which a long prompt took at least half of the prefill tokens (``timeline/charges.py``)."""
        return make_long_prefills(self, self.prefills)

    @cached_property
    def prefills(self) -> pl.DataFrame:
        """Prompts of which each step computed a part (``timeline/charges.py``)."""
        return make_prefills(self)

    @cached_property
    def aborted_work(self) -> pl.DataFrame:
        """Steps that computed for requests that were aborted later (``timeline/charges.py``)."""
        return work_for_aborted(self, self.step_time)

    @cached_property
    def charges(self) -> pl.DataFrame:
        """Charges of every wait (``timeline/charges.py``)."""
        return make_charges(
            self,
            self.request_states,
            events=self.events,
            held_up=self.held_up,
            idle=self.idle_holders,
            long=self.long_prefills,
            in_vain=self.aborted_work,
        )

    @cached_property
    def charged_us(self) -> dict[str, int]:
        """Time of each charge, added up, in microseconds."""
        return dict(self.charges.group_by("charge").agg(pl.col("time_us").sum()).iter_rows())


Made = TypeVar("Made")


def made_once(make: Callable[[Timeline], Made]) -> Callable[[Timeline], Made]:
    """Wrap a function of a timeline so that it computes its result once per timeline.

    The wrapped function stores the results, and no other code can reach them.
    """
    results: WeakKeyDictionary[Timeline, Made] = WeakKeyDictionary()

    @wraps(make)
    def computed(timeline: Timeline) -> Made:
        if timeline not in results:
            results[timeline] = make(timeline)
        return results[timeline]

    return computed


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
        manifest: Manifest of its run, which states how the requests were sent.
        whole: Whether to include the warm-up, as descriptions of single steps and requests need it.
        front_end: Record of the run's front ends.
    """
    steps = trace.steps
    measured = pl.col("trial").is_null() | (pl.col("trial") != WARMUP_TRIAL)
    if whole:
        measured = pl.lit(value=True)
    elif trace.header.trial_ids:  # steps before the first request belong to no trial
        measured = pl.col("trial").is_not_null() & (pl.col("trial") != WARMUP_TRIAL)

    def without_warmup(rows: pl.DataFrame) -> pl.DataFrame:
        has_trials = trace.header.trial_ids or rows["trial"].null_count() < rows.height
        return rows.filter(measured) if has_trials and not (whole or rows.is_empty()) else rows

    requests = pl.concat([frame[["request_id", "trial"]] for frame in (trace.arrivals, trace.present)])
    trial_of = requests.unique("request_id")
    finishes = trace.finishes
    if not finishes.is_empty():  # of those that came before the trace began: when they went
        of_arrival = trial_of.rename({"trial": "trial_of_arrival"})
        finishes = (
            finishes.join(of_arrival, on="request_id", how="left", maintain_order="left")
            .with_columns(trial=pl.coalesce("trial_of_arrival", "trial"))
            .drop("trial_of_arrival")
        )
    # An exit that ends a loop is a refusal only if a request is left in the queue.
    left = (pl.col("loop") == "running") | (pl.col("num_waiting_after") > 0)
    refusal = left & ~pl.col("cause").is_in([str(cause) for cause in NOT_A_REFUSAL])
    exits = _with_step(trace, trace.exits(), "num_waiting_after").with_columns(refusal=refusal)
    waiting = pl.col("num_waiting_after")  # it tells the cause of a waiting loop without a recorded one
    nobody = pl.when(waiting == 0).then(pl.lit(str(Cause.QUEUE_EMPTY)))
    inferred = nobody.when(waiting > 0).then(pl.lit(str(Cause.OTHER)))
    measured_steps = (
        without_warmup(_as_scheduled(steps, exits))
        .with_columns(
            end_us=pl.col("start_us") + pl.col("schedule_us"),
            used_tokens=_used(),
            use_frac=pl.when(pl.col("token_budget") > 0).then(_used() / pl.col("token_budget")),
            busy_us=device_busy_us(),
            eligible_after=pl.max_horizontal(0, pl.col("num_waiting_after") - pl.col("num_not_ready_after")),
        )
        .join(context_tokens(trace.stretches(), steps), on="step", how="left", maintain_order="left")
        .join(_waiting_ends(exits), on="step", how="left", maintain_order="left")
        .with_columns(
            pl.col("waiting_cause").fill_null(inferred), pl.col("waiting_via").fill_null("inferred")
        )
    )
    arrivals, finishes, present = map(without_warmup, (trace.arrivals, finishes, trace.present))
    stalls = _stalls(trace)
    gaps, numbers = trace.gaps.clear(), measured_steps["step"]
    if numbers.len():  # a gap before the first step counts unless it lacks only the warm-up
        is_first = numbers[0] == trace.steps["step"][0]
        inside = pl.col("next_step").is_between(
            numbers[0], numbers[-1], closed="both" if is_first else "right"
        )
        gaps = trace.gaps.filter(inside)
    return Timeline(
        header=trace.header,
        steps=measured_steps,
        stretches=trace.stretches().filter(measured),
        arrivals=arrivals,
        finishes=finishes,
        present=present,
        gaps=gaps,
        there_after=without_warmup(trace.there_after),
        preemptions=trace.preemptions().filter(measured).collect(),
        exits=without_warmup(exits),
        caps=without_warmup(_with_step(trace, trace.caps(), "remaining_budget")),
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
        warmup_steps=int((steps["trial"] == WARMUP_TRIAL).sum()),
        warmup_requests=trial_of.filter((pl.col("trial") == WARMUP_TRIAL) & (not whole))["request_id"],
        lists={name: trace.large[name].filter(measured) for name in FACTS if name in trace.large},
        cpu=trace.cpu,
        controls=trace.controls,
        kv_sends=trace.kv_sends,
        stalls=stalls,
        front_end=front_end,
        missing=[say("{problem}", problem=text) for text in trace.problems.missing(trace.path)],
        requests_missing=trace.problems.requests_missing,
    )


def _there_first(present: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return the requests listed at the trace's beginning, not those listed in or after a gap."""
    if present.is_empty():
        return present
    spans = gaps[["from_us", "to_us"]].sort("from_us")
    listed = present.filter(~pl.col("at_us").is_in(pl.lit(gaps["told_us"].drop_nulls()).implode()))
    place = spans["from_us"].search_sorted(listed["at_us"], side="left").cast(pl.Int64) - 1
    if spans.is_empty():
        return listed
    is_outside = (place < 0) | (spans["to_us"].gather(place.clip(0)) < listed["at_us"])
    return listed.filter(is_outside)


NO_PROGRESS_US = 10_000_000
"""Time from which a batch without an output is a stall: the watchdog's own, unless it is set."""
LONGER = 5.0
"""Factor by which such a batch takes longer than any other."""


def _stalls(trace: Trace) -> pl.DataFrame:
    """Return the stalls, with ``open``: whether there was no progress until the trace's end."""
    later: list[Any] = [trace.cpu["at_us"].max(), trace.end.at_us if trace.end is not None else None]
    last_us: int = max((us for us in later if us is not None), default=0)
    stalls = trace.stalls
    if stalls["until_us"].null_count() == 0:
        stalls = pl.concat([stalls, _unanswered(trace, last_us)])
    ended = pl.col("until_us").is_null()
    until = pl.coalesce("until_us", pl.max_horizontal("at_us", pl.lit(last_us)))
    return stalls.with_columns(open=ended, until_us=until)


def _unanswered(trace: Trace, last_us: int) -> pl.DataFrame:
    """Return the stall of a batch whose output has not come back long after, without the watchdog."""
    computing = trace.steps.filter(pl.col("total_requests") > 0)
    back_us = computing["output_us"].max()
    if back_us is None:
        return trace.stalls.clear()
    open_ = computing.filter(
        pl.col("output_us").is_null() & (pl.col("start_us") >= computing["start_us"].max())
    )
    longest_us = computing.select((pl.col("output_us") - pl.col("start_us")).max()).item()
    stalls = open_.select(
        at_us=pl.lit(last_us),
        kind=pl.lit("worker"),
        since_us=pl.max_horizontal("start_us", pl.lit(back_us)),
        sentence=pl.format(
            "the worker does not answer: a batch is in flight ({} running)", "num_running_after"
        ),
        running="num_running_after",
        waiting="num_waiting_after",
    )
    lasts = pl.col("at_us") - pl.col("since_us")
    stalls = stalls.filter(lasts >= max(NO_PROGRESS_US, LONGER * longest_us))
    return pl.concat([trace.stalls.clear(), stalls], how="diagonal_relaxed").select(trace.stalls.columns)


def _as_scheduled(steps: pl.DataFrame, exits: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with the token budget that ``schedule()`` really used, if that is less than recorded.

    A user's own scheduler may lower the budget during a call and raise it again. In such a step,
    ``schedule()`` ends for lack of budget although the step's tokens leave some.
    """
    spent = exits.filter(
        pl.col("cause") == str(Cause.TOKEN_BUDGET), pl.col("via") == "source", pl.col("budget_left") <= 0
    ).select(pl.col("step").unique(), spent=True)
    if spent.is_empty():
        return steps
    marked = steps.join(spent, on="step", how="left", maintain_order="left")
    lacking = pl.when("spent").then("remaining_budget").otherwise(0)
    return marked.with_columns(
        token_budget=pl.col("token_budget") - lacking, remaining_budget=pl.col("remaining_budget") - lacking
    ).drop("spent")


def context_tokens(stretches: pl.LazyFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return ``step`` and ``context_tokens``: tokens of the step's requests that were computed before it."""
    # In step n a request has computed_tokens + (n - step) * scheduled_tokens.
    grows = pl.when(pl.col("last_step") > pl.col("step")).then("scheduled_tokens").otherwise(0)
    at_zero = pl.col("computed_tokens") - pl.col("step") * grows
    sums = level(stretches, "step", pl.col("last_step") + 1, at_zero=at_zero, slope=grows)
    tokens = pl.col("at_zero") + pl.col("step") * pl.col("slope")
    return at_steps(sums, steps[["step"]]).select("step", context_tokens=tokens)


def _used() -> pl.Expr:
    """Return the scheduled tokens: the used budget or, if it is not recorded, prefill plus decode tokens."""
    of_both = pl.col("prefill_tokens") + pl.col("decode_tokens")
    return pl.coalesce(pl.col("token_budget") - pl.col("remaining_budget"), of_both)


def _with_step(trace: Trace, rows: pl.LazyFrame, column: str) -> pl.DataFrame:
    """Return the rows of a nested list of the steps, with a column of their step."""
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


@dataclass(frozen=True)
class Window:
    """Window of a recording: its ends in microseconds on the first trace's clock; None if unbounded."""

    begin_us: int | None = None
    end_us: int | None = None
    last_us: int | None = None
    """Length of the window in microseconds, counted back from its end; an alternative to ``begin_us``."""

    def __str__(self) -> str:
        bounds = {"--from": self.begin_us, "--to": self.end_us, "--last": self.last_us}
        return " ".join(f"{name} {us / 1e6:.9g}s" for name, us in bounds.items() if us is not None)

    def moments(self, timeline: Timeline) -> tuple[int, int]:
        """Return both moments on the clock of a trace that has steps."""
        first, end = timeline.begin_us, timeline.end_us
        if self.end_us is not None:
            end = min(end, self.end_us - timeline.offset_us)
        if self.last_us is not None:
            return max(first, end - self.last_us), end
        if self.begin_us is None:
            return first, end
        return max(first, self.begin_us - timeline.offset_us), end


def windowed(timeline: Timeline, window: Window) -> Timeline:
    """Return a timeline of the steps that began in the window, with all other tables cut to it.

    States keep their causes: a request that was already waiting waits from the window's beginning. A window
    without a step, such as one within a pause, has the requests present and the calls to the engine.
    """
    if timeline.steps.is_empty():
        return timeline
    begin_us, end_us = window.moments(timeline)
    steps = timeline.steps.filter(pl.col("start_us").is_between(begin_us, end_us, closed="left"))
    number = steps[["step"]]
    states = _cut(timeline.request_states, begin_us, end_us)
    there = states[["request_id"]].unique()
    tables = timeline.tables
    engine = _cut(tables.engine_states, begin_us, end_us)
    during = (pl.col("end_us") > begin_us) & (pl.col("begin_us") < end_us)
    return replace(
        timeline,
        steps=steps,
        stretches=_cut_stretches(timeline.stretches, number),
        arrivals=timeline.arrivals.filter(pl.col("queued_us") < end_us).join(
            there, on="request_id", how="semi", maintain_order="left"
        ),
        gaps=timeline.gaps.filter((pl.col("to_us") > begin_us) & (pl.col("from_us") < end_us)).with_columns(
            pl.col("from_us", "to_us").clip(begin_us, end_us)
        ),
        present=timeline.present.join(there, on="request_id", how="semi", maintain_order="left"),
        finishes=timeline.finishes.filter(pl.col("finished_us").is_between(begin_us, end_us)),
        preemptions=_of(timeline.preemptions, number),
        exits=_of(timeline.exits, number),
        caps=_of(timeline.caps, number),
        lists={
            name: rows.join(number.lazy(), on="step", how="semi") for name, rows in timeline.lists.items()
        },
        stalls=_cut(timeline.stalls.rename({"since_us": "begin_us", "until_us": "end_us"}), begin_us, end_us)
        .rename({"begin_us": "since_us", "end_us": "until_us"})
        .with_columns(pl.col("open") & (pl.col("until_us") < end_us).not_()),
        begin_us=begin_us,
        end_us=end_us,
        there_first=timeline.there_first.join(there, on="request_id", how="semi", maintain_order="left"),
        warmup_steps=0,
        is_window=True,
        ready_tables=replace(
            tables,
            gone=tables.gone.filter(pl.col("gone_us") < end_us),
            request_states=states,
            engine_states=engine,
            thread_times=thread_times(timeline, engine),
            starved=tables.starved.filter(during),
        ),
    )


def _cut(rows: pl.DataFrame, begin_us: int, end_us: int) -> pl.DataFrame:
    """Cut rows with ``begin_us`` and ``end_us`` to their parts in the window."""
    return rows.with_columns(pl.col("begin_us", "end_us").clip(begin_us, end_us)).filter(
        pl.col("end_us") > pl.col("begin_us")
    )


def _of(rows: pl.DataFrame, number: pl.DataFrame) -> pl.DataFrame:
    return rows.join(number, on="step", how="semi", maintain_order="left")


def _cut_stretches(stretches: pl.LazyFrame, number: pl.DataFrame) -> pl.LazyFrame:
    """Cut stretches to these steps; tokens computed before them count as computed from the start."""
    if number.is_empty():
        return stretches.filter(pl.lit(value=False))
    first, last = int(number["step"][0]), int(number["step"][-1])
    later = (first - pl.col("step")).clip(0)
    grown = pl.when(later > 0).then(later * pl.col("scheduled_tokens")).otherwise(0)
    return stretches.filter((pl.col("last_step") >= first) & (pl.col("step") <= last)).with_columns(
        step=pl.col("step").clip(first),
        last_step=pl.col("last_step").clip(None, last),
        computed_tokens=pl.col("computed_tokens") + grown,
    )
