"""One engine's trace as the rules see it: warm-up left out, the waiting loop's end beside each step."""

from dataclasses import dataclass, field
from functools import cached_property

import polars as pl

from schedtrace.model.causes import NOT_A_REFUSAL, Cause
from schedtrace.model.facts import ALL_FACTS, Fact
from schedtrace.model.manifest import OFFLINE, Manifest
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Control
from schedtrace.read.columns import cpu_times
from schedtrace.read.run import FrontEnd
from schedtrace.read.schema import schema_of
from schedtrace.read.trace import Trace, all_rows, rows_between, rows_of
from schedtrace.timeline.demand import Demand, demand
from schedtrace.timeline.per_step import context_tokens
from schedtrace.timeline.pieces import LENGTH_US
from schedtrace.timeline.step_time import StepTime, busy_us, fit_step_time

WARMUP_TRIAL = 0
FACTS = ("admitted", "refusals", "kv_loads", "grammars", "set_aside")


@dataclass
class Timeline:
    """What findings and metrics are computed from.

    ``steps`` has the columns of ``model.trace.Step`` and

    * ``end_us``: when ``schedule()`` returned,
    * ``used_tokens``: tokens scheduled (null: the record does not tell), and ``use_frac``: their share of the
      token budget,
    * ``busy_us``: from when the step could begin on the device to its output, ``context_tokens``: what its
      requests had computed before it (``step_time.py``),
    * ``eligible_after``: waiting requests that are not known to wait for something else,
    * ``waiting_cause``, ``waiting_request``, ``waiting_detail``, ``waiting_guard``, ``waiting_location``,
      ``waiting_via``: the exit with which the loop over the waiting queue ended or, where it went through
      the queue and skipped everybody who is left there, the most frequent of those skips.
    """

    header: Header
    steps: pl.DataFrame
    stretches: pl.LazyFrame
    """What requests got, as stretches of steps (``read/stretches.py``)."""
    arrivals: pl.DataFrame
    finishes: pl.DataFrame
    preemptions: pl.DataFrame
    exits: pl.DataFrame
    """One row per recorded exit; ``refusal``: somebody was refused or skipped by it."""
    caps: pl.DataFrame
    """One row per limit that made a chunk smaller, with the step's ``remaining_budget``."""
    warmup_steps: int
    warmup_requests: pl.Series
    """Ids of requests that are left out; steps after the warm-up may still have scheduled some of them."""
    closed_workload: bool = False
    """All requests of a trial are handed to one engine at once; False also where that is unknown."""
    facts: frozenset[Fact] = ALL_FACTS
    """What the record can tell at all; an empty frame means "none" only if its fact is among them."""
    lists: dict[str, pl.LazyFrame] = field(default_factory=dict)
    """The trace's lists of facts beside the decisions, by name: ``model/trace_facts.py``."""
    cpu: pl.DataFrame = field(default_factory=lambda: cpu_times([]))
    """Processor times of threads (``read/columns.py``)."""
    controls: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=schema_of(Control)))
    """What was asked of the engine beside requests, in order of time: of the whole trace."""
    front_end: FrontEnd | None = None
    """What the front ends of the run recorded, for all its engines."""
    missing: list[Message] = field(default_factory=list)
    """What the trace lacks before its end."""
    requests_missing: bool = False
    """There may be requests that the trace does not hold."""
    is_window: bool = False
    """Cut to a part of its trace (``timeline/window.py``)."""

    @cached_property
    def waits(self) -> pl.DataFrame:
        """Each time that a request was in the waiting queue (``timeline/queue_waits.py``)."""
        from schedtrace.timeline.queue_waits import waits  # noqa: PLC0415  # it reads a timeline itself

        return waits(self)

    @cached_property
    def request_states(self) -> pl.DataFrame:
        """Every moment of every request (``timeline/request_states.py``)."""
        from schedtrace.timeline.request_states import request_states  # noqa: PLC0415  # likewise

        return request_states(self)

    @cached_property
    def engine_states(self) -> pl.DataFrame:
        """Every moment of the engine (``timeline/engine_states.py``)."""
        from schedtrace.timeline.engine_states import engine_states  # noqa: PLC0415  # likewise

        return engine_states(self)

    @cached_property
    def charges(self) -> pl.DataFrame:
        """What every wait is charged to (``timeline/charges.py``)."""
        from schedtrace.timeline.charges import charges  # noqa: PLC0415  # likewise

        return charges(self)

    @cached_property
    def events(self) -> pl.DataFrame:
        """Interruptions (``timeline/events.py``)."""
        from schedtrace.timeline.events import events  # noqa: PLC0415  # likewise

        return events(self)

    @cached_property
    def requests_us(self) -> int:
        """All requests' time added up: what shares of it are of."""
        return int(self.request_states.select(LENGTH_US.sum()).item() or 0)

    @cached_property
    def end_us(self) -> int:
        """The last thing that the trace knows of; 0 for an empty one."""
        updated = pl.col("output_us") + pl.col("update_us").fill_null(0)
        times = self.steps.select(
            pl.max_horizontal(pl.col("start_us").max(), pl.col("end_us").max(), updated.max())
        ).item()
        known = [times, self.finishes["finished_us"].max(), self.arrivals["queued_us"].max()]
        return max((int(us) for us in known if us is not None), default=0)

    @cached_property
    def step_time(self) -> StepTime | None:
        """The model of step times, for estimates of cost; None where too few steps tell theirs."""
        return fit_step_time(self.steps)

    @cached_property
    def demand(self) -> Demand:
        """What the load asks for at once; that of a window is that of the whole timeline."""
        return demand(self)

    @cached_property
    def admitted(self) -> pl.DataFrame:
        """The rows of ``requests`` with which a request began to run or came back."""
        return self.requests_of(pl.col("phase") != "running")

    @property
    def requests(self) -> pl.LazyFrame:
        """One row per step and scheduled request: far too many to be collected as a whole."""
        return all_rows(self.stretches, self.steps)

    def requests_of(self, wanted: pl.Expr) -> pl.DataFrame:
        """The rows of the stretches for which this is true."""
        return rows_of(self.stretches.filter(wanted), self.steps)

    def requests_in(self, step: int) -> pl.DataFrame:
        """The rows of one step."""
        return rows_between(self.stretches, self.steps, step, step)

    @cached_property
    def busy_us(self) -> int:
        """The engine's time without what it was idle: what shares of the run are of."""
        busy = self.engine_states.filter(pl.col("state") != "idle")
        return int(busy.select(LENGTH_US.sum()).item())

    @cached_property
    def set_aside(self) -> pl.DataFrame:
        """Requests that their scheduler took out of the running ones without preempting them.

        Columns: ``step``, ``trial``, ``request_id``, ``wanted_tokens`` and ``blocks_held``.
        """
        columns = {"step": pl.Int64, "trial": pl.Int64, "request_id": pl.String}
        columns |= {"wanted_tokens": pl.Int64, "blocks_held": pl.Int64}
        if "set_aside" not in self.lists:
            return pl.DataFrame(schema=columns)
        told = self.lists["set_aside"].select(pl.col(name).cast(kind) for name, kind in columns.items())
        return told.collect()

    @cached_property
    def sessions(self) -> pl.Series:
        """Ids of streaming sessions: between two parts they wait in the queue and keep their blocks."""
        parts = self.arrivals.filter("streaming_update")["request_id"]
        paused = self.exits.filter(pl.col("cause") == str(Cause.STREAMING_INPUT_PENDING))["request_id"]
        return pl.concat([parts, paused]).drop_nulls().unique()

    @property
    def active_limit(self) -> int | None:
        """``max_num_active_seqs`` (vLLM 0.31 and newer), where it is set."""
        limit = self.header.scheduler_config.get("max_num_active_seqs")
        return limit if isinstance(limit, int) else None

    @property
    def seats(self) -> int:
        """How many requests may run at once; 0 where the record does not tell."""
        return self.active_limit or self.header.max_num_running_reqs or 0

    @property
    def token_budget(self) -> int:
        """Tokens that a step may schedule; 0 where the record does not tell."""
        return self.header.token_budget or 0

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return self.header.engine_rank

    def trials(self) -> list[int | None]:
        """The trials in their order; a trace without trials is one, None."""
        found = self.steps["trial"].unique(maintain_order=True).to_list()
        return [trial for trial in found if trial is not None] or [None]

    @property
    def whole_trials(self) -> bool:
        """Whether it has trials, whose begin and end are those of a workload."""
        return not self.is_window and self.trials() != [None]

    def of_trial(self, frame: pl.DataFrame, trial: int | None) -> pl.DataFrame:
        """The rows of one trial; all rows for None."""
        return frame if trial is None else frame.filter(pl.col("trial") == trial)


def make_timeline(
    trace: Trace,
    manifest: Manifest | None = None,
    *,
    whole: bool = False,
    front_end: FrontEnd | None = None,
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
    trial_of = trace.arrivals.select("request_id", "trial").unique("request_id")
    finishes = trace.finishes.join(
        trial_of, on="request_id", how="left", maintain_order="left", suffix="_of_arrival"
    )
    if "trial_of_arrival" in finishes.columns:  # of those that came before the trace began: when they went
        finishes = finishes.with_columns(trial=pl.coalesce("trial_of_arrival", "trial")).drop(
            "trial_of_arrival"
        )
    exits = _exits(trace)
    kept = (
        steps.filter(measured)
        .with_columns(
            end_us=pl.col("start_us") + pl.col("schedule_us"),
            used_tokens=_used(),
            use_frac=pl.when(pl.col("token_budget") > 0).then(_used() / pl.col("token_budget")),
            busy_us=busy_us(),
            eligible_after=pl.max_horizontal(0, pl.col("num_waiting_after") - pl.col("num_not_ready_after")),
        )
        .join(context_tokens(trace.stretches(), steps), on="step", how="left", maintain_order="left")
        .join(_waiting_ends(exits), on="step", how="left", maintain_order="left")
        .with_columns(_told(pl.col("waiting_cause")), pl.col("waiting_via").fill_null("inferred"))
    )
    return Timeline(
        header=trace.header,
        steps=kept,
        stretches=trace.stretches().filter(measured),
        arrivals=trace.arrivals.filter(measured),
        finishes=finishes.filter(measured),
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
        front_end=front_end,
        missing=[say("{problem}", problem=text) for text in trace.problems.missing(trace.path)],
        requests_missing=trace.problems.requests_missing,
    )


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
