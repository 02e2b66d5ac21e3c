"""Timeline of one engine: its trace, or a part of it, with all tables behind findings and metrics.

``make_tables`` builds the tables on which all others depend, each from the frames and the tables before it.
``Timeline`` adds the tables that not every command needs. ``make_timeline`` prepares a trace for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import polars as pl

from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.model.kv_need import kv_need
from schedtrace.model.manifest import OFFLINE, Manifest
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.read.run import FrontEndRecord
from schedtrace.read.trace import Trace
from schedtrace.timeline.aborted_requests import work_for_aborted
from schedtrace.timeline.charges import make_charges, make_idle_holders, make_long_prefills, make_prefills
from schedtrace.timeline.engine_states import (
    BUSY,
    find_starved_steps,
    make_engine_states,
    make_starved,
    thread_times,
    unstarved,
)
from schedtrace.timeline.events import DEVICE, make_events, make_interrupted_states, standstills
from schedtrace.timeline.frames import RECORDED, Demand, EngineFrames, make_gone
from schedtrace.timeline.queue_waits import (
    behind_head,
    heads_by_size,
    make_mismatches,
    make_refused_heads,
    make_waits,
)
from schedtrace.timeline.request_states import make_queue_times, make_request_states
from schedtrace.timeline.spans import at_steps, level, merged, total_us
from schedtrace.timeline.step_time import StepTime, fit_step_time


@dataclass(frozen=True)
class EngineTables:
    """Tables from which all others are built; a window's tables are cut from those of the whole trace."""

    gone: pl.DataFrame
    """Requests that may have left during a gap in the trace (``timeline/frames.py``)."""
    waits: pl.DataFrame
    """Stays of requests in the waiting queue (``timeline/queue_waits.py``)."""
    request_states: pl.DataFrame
    """State of every request at every moment (``timeline/request_states.py``)."""
    engine_states: pl.DataFrame
    """State of the engine at every moment (``timeline/engine_states.py``)."""
    thread_times: pl.DataFrame
    """Periods in which threads ran, and waited for a processor (``timeline/engine_states.py``)."""
    starved: pl.DataFrame
    """Periods in which the engine lost much of its busy time for lack of processors."""
    starved_steps: pl.Series
    """Numbers of the steps in which the engine was starved."""


def make_tables(frames: EngineFrames) -> EngineTables:
    """Build the tables of one engine, each from those before it."""
    departures = make_gone(frames)
    queue = make_waits(frames, departures)
    requests = make_request_states(frames, queue, departures)
    engine = make_engine_states(frames, requests)
    threads = thread_times(frames, engine)
    starved = make_starved(threads, engine)
    return EngineTables(
        gone=departures,
        waits=queue,
        request_states=requests,
        engine_states=engine,
        thread_times=threads,
        starved=starved,
        starved_steps=find_starved_steps(frames.steps, starved),
    )


WARMUP_TRIAL = 0
FACTS = ("admitted", "refusals", "kv_loads", "grammars", "set_aside")


@dataclass(frozen=True)
class ChargeTables:
    """Charges of every wait, with the tables of the requests that held what others waited for."""

    held_up: pl.DataFrame
    """Requests that would have fitted, but were behind a refused head (``timeline/queue_waits.py``)."""
    idle_holders: pl.DataFrame
    """Requests that held KV blocks and got no tokens (``timeline/charges.py``)."""
    long_prefills: pl.DataFrame
    """Steps in which a long prompt took at least half of the prefill tokens (``timeline/charges.py``)."""
    aborted_work: pl.DataFrame
    """Steps that computed for requests whose clients left later (``timeline/aborted_requests.py``)."""
    charges: pl.DataFrame
    """Charges of every wait (``timeline/charges.py``)."""
    charged_us: dict[str, int]
    """Total time of each charge, in microseconds."""


@dataclass(eq=False)
class Timeline(EngineFrames):
    """Frames of one engine's trace with its tables, which are built on first use.

    Each property that builds a table passes the tables it depends on to a function, which looks up no
    others.
    """

    ready_tables: EngineTables | None = None
    """Tables that are not built from the frames, such as a window's; None to build all of them."""
    longer_step_time: StepTime | None = None
    """Model of step times fitted to more steps than the timeline's; None to fit it to the timeline's steps.
    """

    @cached_property
    def tables(self) -> EngineTables:
        """Tables from which all others are built."""
        return self.ready_tables or make_tables(self)

    @property
    def waits(self) -> pl.DataFrame:
        """Stays of requests in the waiting queue (``timeline/queue_waits.py``)."""
        return self.tables.waits

    @property
    def request_states(self) -> pl.DataFrame:
        """State of every request at every moment (``timeline/request_states.py``)."""
        return self.tables.request_states

    @property
    def engine_states(self) -> pl.DataFrame:
        """State of the engine at every moment (``timeline/engine_states.py``)."""
        return self.tables.engine_states

    @property
    def starved(self) -> pl.DataFrame:
        """Periods in which the engine was starved of processor time (``timeline/engine_states.py``)."""
        return self.tables.starved

    @property
    def starved_steps(self) -> pl.Series:
        """Numbers of the steps in which the engine was starved."""
        return self.tables.starved_steps

    @cached_property
    def busy_us(self) -> int:
        """Total time in which the engine was busy, in microseconds."""
        return total_us(self.engine_states.filter(pl.col("state").is_in(BUSY)))

    @cached_property
    def mismatches(self) -> pl.DataFrame:
        """Steps after which the reconstructed queue differs in length from the recorded one."""
        return make_mismatches(self, self.waits)

    @cached_property
    def refused_heads(self) -> pl.DataFrame:
        """Steps that refused the head of the queue for its size (``timeline/queue_waits.py``)."""
        return make_refused_heads(self, self.waits, self.mismatches)

    @cached_property
    def events(self) -> pl.DataFrame:
        """Interruptions (``timeline/events.py``)."""
        tables = self.tables
        return make_events(self, tables.engine_states, self.busy_us, tables.starved, tables.starved_steps)

    @cached_property
    def host_spans(self) -> pl.DataFrame:
        """Periods in which an interruption kept the engine's thread from running steps."""
        return merged(standstills(self.engine_states, self.events.filter(pl.col("part") != DEVICE)))

    @cached_property
    def interrupted_states(self) -> pl.DataFrame:
        """``request_states``, cut at the edges of interruptions (``timeline/events.py``)."""
        return make_interrupted_states(self, self.request_states, self.events, self.host_spans)

    @cached_property
    def step_time(self) -> StepTime | None:
        """Model of step times, for estimates of cost; None if too few steps have an output."""
        return self.longer_step_time or fit_step_time(unstarved(self, self.starved_steps, self.steps))

    @cached_property
    def prefills(self) -> pl.DataFrame:
        """Prompts of which each step computed a part (``timeline/charges.py``)."""
        return make_prefills(self)

    @cached_property
    def charge_tables(self) -> ChargeTables:
        """Charges of every wait, with the tables on which they depend."""
        tables, events, model = self.tables, self.events, self.step_time
        held_up = behind_head(self, tables.waits, heads_by_size(self.refused_heads))
        long_prefills = make_long_prefills(self, self.prefills)
        idle_holders = make_idle_holders(self)
        aborted_work = work_for_aborted(self, model)
        charges = make_charges(
            self,
            tables.request_states,
            events=events,
            held_up=held_up,
            idle=idle_holders,
            long=long_prefills,
            in_vain=aborted_work,
        )
        charged_us = dict(charges.group_by("charge").agg(pl.col("time_us").sum()).iter_rows())
        return ChargeTables(held_up, idle_holders, long_prefills, aborted_work, charges, charged_us)

    @property
    def charges(self) -> pl.DataFrame:
        """Charges of every wait (``timeline/charges.py``)."""
        return self.charge_tables.charges

    @cached_property
    def recorded_states(self) -> pl.DataFrame:
        """Rows of ``request_states`` outside of gaps."""
        return self.request_states.filter(RECORDED)

    @cached_property
    def requests_us(self) -> int:
        """Total recorded time of all requests in microseconds, of which shares are computed."""
        return total_us(self.recorded_states)

    @cached_property
    def queue_times(self) -> pl.DataFrame:
        """Queue time of each request first scheduled in this trace (``timeline/request_states.py``)."""
        return make_queue_times(self, self.request_states)


Made = TypeVar("Made")


def made_once(make: Callable[[Timeline], Made]) -> Callable[[Timeline], Made]:
    """Wrap a function of a timeline so that it computes its result once per timeline.

    The wrapped function stores the results, which no other code can access.
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
        manifest: Manifest of the run, which states how the requests were sent.
        whole: Whether to include the warm-up, which descriptions of individual steps and requests need.
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
    context = context_tokens(trace.stretches(), steps)
    measured_steps = _with_figures(without_warmup(steps), exits, context)
    arrivals, finishes, present = map(without_warmup, (trace.arrivals, finishes, trace.present))
    stalls = _stalls(trace)
    gaps, numbers = trace.gaps.clear(), measured_steps["step"]
    if numbers.len():  # a gap before the first step counts unless it lacks only the warm-up
        is_first = numbers[0] == trace.steps["step"][0]
        inside = pl.col("next_step").is_between(
            numbers[0], numbers[-1], closed="both" if is_first else "right"
        )
        gaps = trace.gaps.filter(inside)
    after_gaps = gaps.select("next_step", at_us="told_us").drop_nulls().unique("at_us", keep="first")
    there_after = without_warmup(trace.there_after).join(after_gaps, on="at_us", maintain_order="left")
    return Timeline(
        header=trace.header,
        steps=measured_steps,
        stretches=trace.stretches().filter(measured),
        arrivals=arrivals,
        finishes=finishes,
        present=present,
        gaps=gaps,
        there_after=there_after,
        preemptions=trace.preemptions().filter(measured).collect(),
        exits=without_warmup(exits),
        caps=without_warmup(_with_step(trace, trace.caps(), "remaining_budget")),
        begin_us=int(measured_steps["start_us"].min() or 0),  # type: ignore[arg-type]  # integers
        end_us=_last_moment_us(
            steps=measured_steps,
            arrivals=arrivals,
            present=present,
            finishes=finishes,
            stalls=stalls,
            controls=trace.controls,
            cpu=trace.cpu,
            end_missing=trace.problems.end_missing,
        ),
        demand=_demand(trace.header, measured_steps, finishes),
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


def _with_figures(steps: pl.DataFrame, exits: pl.DataFrame, context: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with the columns of ``EngineFrames.steps`` that a trace does not record.

    Args:
        steps: Steps of the trace without the warm-up.
        exits: Exits of all steps, with ``refusal``.
        context: ``context_tokens`` of all steps.
    """
    # With several steps in flight, a step can begin on the device when the output before it is back.
    back_us = pl.col("output_us").shift(1).fill_null(0)
    can_begin_us = pl.max_horizontal(pl.col("start_us") + pl.col("schedule_us"), back_us)
    tokens_by_kind = pl.col("prefill_tokens") + pl.col("decode_tokens")  # where no budget is recorded
    used = pl.coalesce(pl.col("token_budget") - pl.col("remaining_budget"), tokens_by_kind)
    waiting = pl.col("num_waiting_after")  # it tells the cause of a waiting loop without a recorded one
    nobody = pl.when(waiting == 0).then(pl.lit(str(Cause.QUEUE_EMPTY)))
    inferred = nobody.when(waiting > 0).then(pl.lit(str(Cause.OTHER)))
    return (
        _as_scheduled(steps, exits)
        .with_columns(
            end_us=pl.col("start_us") + pl.col("schedule_us"),
            used_tokens=used,
            use_frac=pl.when(pl.col("token_budget") > 0).then(used / pl.col("token_budget")),
            busy_us=pl.col("output_us") - can_begin_us,
            eligible_after=pl.max_horizontal(0, waiting - pl.col("num_not_ready_after")),
        )
        .pipe(with_execution_us)
        .join(context, on="step", how="left", maintain_order="left")
        .join(_waiting_ends(exits), on="step", how="left", maintain_order="left")
        .with_columns(
            pl.col("waiting_cause").fill_null(inferred), pl.col("waiting_via").fill_null("inferred")
        )
    )


def _last_moment_us(
    *,
    steps: pl.DataFrame,
    arrivals: pl.DataFrame,
    present: pl.DataFrame,
    finishes: pl.DataFrame,
    stalls: pl.DataFrame,
    controls: pl.DataFrame,
    cpu: pl.DataFrame,
    end_missing: bool = False,
) -> int:
    """Return the last moment that a trace covers, in microseconds; 0 for an empty trace.

    While requests are present, the times of the engine's threads and calls to the engine count as well,
    because a paused or hanging engine makes no steps. If later steps are missing (``end_missing``), the last
    recorded step is the end, because later states of requests are unknown.
    """
    updated = pl.col("output_us") + pl.col("update_us").fill_null(0)
    latest = pl.max_horizontal(pl.col("start_us").max(), pl.col("end_us").max(), updated.max())
    last_step_us = steps.select(latest).item()
    if end_missing:
        return int(last_step_us or 0)
    moments_us = [
        last_step_us,
        finishes["finished_us"].max(),
        arrivals["queued_us"].max(),
        stalls["until_us"].max(),
    ]
    request_ids = pl.concat([present["request_id"], arrivals["request_id"]])
    if not request_ids.is_in(finishes["request_id"].implode()).all():
        moments_us.append(cpu["at_us"].max())
        if not controls.is_empty():
            moments_us.append((controls["at_us"] + controls["took_us"].fill_null(0)).max())
    return max((int(us) for us in moments_us if us is not None), default=0)


def _demand(header: Header, steps: pl.DataFrame, finishes: pl.DataFrame) -> Demand:
    """Return the peak demand of the load in these steps."""
    there = pl.col("num_running_after") + pl.col("num_waiting_after").fill_null(0)
    ended = finishes.filter(pl.col("output_tokens") > 0)
    blocks, need = 0, kv_need(header)
    if need is not None and need.is_bounded and need.sequence(1) is not None:
        lengths = ended.group_by(pl.col("prompt_tokens") + pl.col("output_tokens")).len().drop_nulls()
        blocks = sum(count * sum(need.sequence(tokens) or ()) for tokens, count in lengths.iter_rows())
    return Demand(int(steps.select(there.max()).item() or 0), ended.height, blocks)


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


USUAL_STEPS = 9
"""Number of the latest steps without prefill whose median is the usual time of the next one."""
LATE_FROM = 1.5
"""Multiple of the usual time above which a step's end is assumed to have been noticed late."""


def with_execution_us(steps: pl.DataFrame) -> pl.DataFrame:
    """Add ``execution_us``: how long the worker was busy with each batch alone; ``busy_us`` if not recorded.

    With asynchronous scheduling, the worker takes the next batch before the current one has ended.
    ``execute_us`` begins at that moment, so it includes a wait. While the worker prepares a batch with
    prefill, it also notices the end of the previous batch late (on an H100, by 30 ms), so only the sum of
    both times is measured. This sum is divided anew, also in ``busy_us``, if the previous batch only decodes
    and took far longer than usual, or if the batch with prefill took less time than its decodes alone would.
    Each batch then gets the usual time of decodes, and a part of the rest in proportion to its prefill
    tokens. If both batches have prefill, these parts are a guess, and ``execution_us`` is null for both.
    """
    began = pl.col("start_us") + pl.col("execute_after_us")
    ended = began + pl.col("execute_us")
    free = ended.cum_max().forward_fill().shift(1).fill_null(0)
    alone = pl.coalesce((ended - pl.max_horizontal(began, free)).clip(0), "busy_us")
    prefill = pl.col("prefill_tokens").fill_null(0)
    next_prefill = prefill.shift(-1).fill_null(0)
    before_prefill = (next_prefill > 0) & (pl.col("step").shift(-1) == pl.col("step") + 1)
    decodes = (prefill == 0) & (pl.col("decode_tokens") > 0)
    usual, usual_decodes = (
        pl.when(decodes & ~before_prefill)
        .then(value)
        .rolling_median(USUAL_STEPS, min_samples=1)
        .forward_fill()
        for value in (alone, pl.col("decode_tokens"))
    )
    is_long = decodes & (alone > LATE_FROM * usual)
    decodes_frac = pl.min_horizontal(pl.col("decode_tokens").shift(-1) / usual_decodes, 1)
    next_is_short = alone.shift(-1) < usual * decodes_frac
    overlap = (ended - began.shift(-1)).fill_null(0).clip(0)
    rest = (alone + alone.shift(-1) - 2 * usual).clip(0)
    beyond = (alone - usual - rest * prefill / (prefill + next_prefill)).clip(0)
    is_late = before_prefill & (overlap > 0) & (is_long | next_is_short)
    late = pl.when(is_late).then(pl.min_horizontal(beyond, overlap)).fill_null(0).cast(pl.Int64)
    later = late.shift(1).fill_null(0) - late
    is_guess = (is_late & (prefill > 0)).fill_null(value=False)
    execution_us = pl.when(~(is_guess | is_guess.shift(1, fill_value=False))).then(alone + later)
    return steps.with_columns(execution_us=execution_us, busy_us=pl.col("busy_us") + later)


NO_PROGRESS_US = 10_000_000
"""Microseconds without an output after which a batch counts as stalled: the watchdog's default."""
LONGER = 5.0
"""Minimum ratio of a stalled batch's time to the time of any other batch."""


def _stalls(trace: Trace) -> pl.DataFrame:
    """Return the stalls; ``open`` states whether the trace ended before any progress."""
    later: list[Any] = [trace.cpu["at_us"].max(), trace.end.at_us if trace.end is not None else None]
    last_us: int = max((us for us in later if us is not None), default=0)
    stalls = trace.stalls
    if stalls["until_us"].null_count() == 0:
        stalls = pl.concat([stalls, _unanswered(trace, last_us)])
    ended = pl.col("until_us").is_null()
    until = pl.coalesce("until_us", pl.max_horizontal("at_us", pl.lit(last_us)))
    return stalls.with_columns(open=ended, until_us=until)


def _unanswered(trace: Trace, last_us: int) -> pl.DataFrame:
    """Return the stall of a batch whose output is long overdue, if no watchdog reported it."""
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
    """Return the steps with the token budget that ``schedule()`` used, if less than recorded.

    A user's own scheduler may lower the budget during a call and raise it again. In such a step,
    ``schedule()`` ends for lack of budget although the step's tokens leave some of the recorded budget.
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


def _with_step(trace: Trace, rows: pl.LazyFrame, column: str) -> pl.DataFrame:
    """Return rows that belong to steps, each with this column of its step."""
    beside = trace.steps.lazy().select("step", column)
    return rows.join(beside, on="step", how="left", maintain_order="left").collect()


def _waiting_ends(exits: pl.DataFrame) -> pl.DataFrame:
    """Return the exit of each step that shows why the waiting queue was not emptied."""
    columns = ("cause", "detail", "location", "via")
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
