"""Frames of one engine's trace without the warm-up: the plain data beneath all of ``timeline/``.

The tables of ``timeline/tables.py`` are built from ``EngineFrames``, each by a function in a separate module.
"""

from dataclasses import dataclass, field
from functools import cached_property

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.kv_need import kv_need
from schedtrace.model.message import Message
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import ALL_FACTS, Control, Fact
from schedtrace.read.columns import cpu_times, present_in, stalls_in
from schedtrace.read.gaps import GAP_SCHEMA
from schedtrace.read.run import FrontEndRecord
from schedtrace.read.tables import schema_of
from schedtrace.read.trace import all_rows, rows_between, rows_of


@dataclass(frozen=True)
class Demand:
    """Peak load of an engine, as far as it was recorded."""

    requests: int = 0
    """Most requests in the scheduler after a step."""
    ended: int = 0
    """Requests that produced tokens and ended."""
    blocks: int = 0
    """Sum of the most KV blocks that each of these requests held; 0 if they cannot be counted."""

    def __add__(self, later: "Demand") -> "Demand":
        return Demand(
            max(self.requests, later.requests), self.ended + later.ended, self.blocks + later.blocks
        )

    @property
    def blocks_each(self) -> float | None:
        """Mean number of KV blocks of a request; None if unknown."""
        return self.blocks / self.ended if self.blocks else None


@dataclass(eq=False)
class EngineFrames:
    """Frames of one engine's trace, and values that follow from them alone.

    ``steps`` has the columns of ``model.trace.Step`` and

    * ``token_budget`` and ``remaining_budget`` as ``schedule()`` worked with them (``timeline.py``), *
    ``end_us``: when ``schedule()`` returned, * ``used_tokens``: tokens scheduled (null if not recorded), and
    ``use_frac``: their share of the token budget, * ``busy_us``: time from the moment at which the step could
    begin on the device to its output, ``context_tokens``: tokens that its requests had computed before it
    (``step_time.py``), * ``eligible_after``: waiting requests that are not known to wait for something else,
    * ``waiting_cause``, ``waiting_request``, ``waiting_detail``, ``waiting_guard``, ``waiting_location``,
    ``waiting_via``: the exit that ended the loop over the waiting queue or, if the loop reached the end of
    the queue and skipped every remaining request, the most frequent of those skips.
    """

    header: Header
    steps: pl.DataFrame
    stretches: pl.LazyFrame
    """Stretches of steps in which requests were scheduled (``read/tables.py``)."""
    arrivals: pl.DataFrame
    """Requests that arrived; those that were there when the trace began are in ``present``."""
    finishes: pl.DataFrame
    preemptions: pl.DataFrame
    exits: pl.DataFrame
    """Table with a row per recorded exit; ``refusal``: whether it refused or skipped a request."""
    caps: pl.DataFrame
    """Table with a row per limit that made a chunk smaller, with the step's ``remaining_budget``."""
    begin_us: int
    """Start of the first step; 0 if there is none."""
    end_us: int
    """Last moment that the trace covers (``last_moment_us``)."""
    demand: Demand
    """Peak demand of the load; a window has that of the whole timeline."""
    there_first: pl.DataFrame
    """Rows of ``present`` of requests that were there when the trace began, not only after a gap."""
    warmup_steps: int
    warmup_requests: pl.Series
    """Ids of requests that are left out, even if steps after the warm-up scheduled some of them."""
    present: pl.DataFrame = field(default_factory=lambda: present_in([]))
    """Requests there when the trace began, or after a gap, without an arrival (``read/columns.py``)."""
    closed_workload: bool = False
    """Whether all requests of a trial are sent to one engine at once; also False if unknown."""
    facts: frozenset[Fact] = ALL_FACTS
    """Facts that the record holds; an empty frame means "none" only if its fact is among them."""
    lists: dict[str, pl.LazyFrame] = field(default_factory=dict)
    """Tables of facts other than decisions, by name (``model/trace_facts.py``)."""
    cpu: pl.DataFrame = field(default_factory=lambda: cpu_times([]))
    """Processor times of threads (``read/columns.py``)."""
    controls: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=schema_of(Control)))
    """Calls to the engine other than requests, in order of time, over the whole trace."""
    stalls: pl.DataFrame = field(default_factory=lambda: stalls_in([]).with_columns(open=pl.lit(value=True)))
    """Periods without progress that the engine's watchdog saw (``read/columns.py``). ``open``: whether the
    trace ends in the period; ``until_us`` is then the last moment of the trace.
    """
    front_end: FrontEndRecord | None = None
    """Records of the run's front ends, for all its engines."""
    gaps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=GAP_SCHEMA))
    """Periods without a record (``read/gaps.py``)."""
    there_after: pl.DataFrame = field(default_factory=lambda: present_in([]))
    """Requests present after gaps, as far as they are recorded: a row for each gap."""
    missing: list[Message] = field(default_factory=list)
    """Parts that the trace lacks before its end."""
    requests_missing: bool = False
    """Whether the trace may lack requests."""
    offset_us: int = 0
    """Offset that turns times of this trace into those of the recording, the clock of the run's first
    trace.
    """
    is_window: bool = False
    """Whether it is cut to a part of its trace (``timeline/window.py``)."""

    @cached_property
    def admitted(self) -> pl.DataFrame:
        """The rows of ``requests`` with which a request began to run or came back."""
        return self.requests_of(pl.col("phase") != "running")

    @property
    def requests(self) -> pl.LazyFrame:
        """Table with a row per step and scheduled request: far too many to be collected as a whole."""
        return all_rows(self.stretches, self.steps)

    def requests_of(self, wanted: pl.Expr) -> pl.DataFrame:
        """Return the rows of the stretches that meet this condition."""
        return rows_of(self.stretches.filter(wanted), self.steps)

    def requests_in(self, step: int) -> pl.DataFrame:
        """Return the rows of one step."""
        return rows_between(self.stretches, self.steps, step, step)

    @cached_property
    def first_arrivals(self) -> pl.DataFrame:
        """Table with a row per arrival, in their order, without the later parts of streaming sessions."""
        return self.arrivals.filter(~pl.col("streaming_update")).unique(
            "request_id", keep="first", maintain_order=True
        )

    @cached_property
    def prompt_lengths(self) -> pl.DataFrame:
        """``request_id`` and ``prompt_tokens`` of each request, once."""
        lengths = [
            self.present.select("request_id", "prompt_tokens"),
            self.arrivals.filter(~pl.col("streaming_update")).select("request_id", "prompt_tokens"),
            self.finishes.select("request_id", "prompt_tokens"),
        ]
        return pl.concat(lengths).unique("request_id", keep="first")

    @cached_property
    def known_requests(self) -> pl.DataFrame:
        """Table with a row per request and its demand: requests present when the trace began, and arrivals.

        It has the columns of ``arrivals``; ``queued_us`` may be null for requests that were there.
        """
        if self.present.is_empty():
            return self.arrivals.unique("request_id", keep="first", maintain_order=True)
        there = self.present.select(name for name in self.arrivals.columns if name in self.present.columns)
        there = there.with_columns(streaming_update=pl.lit(value=False))
        return pl.concat([there, self.arrivals], how="diagonal").unique(
            "request_id", keep="first", maintain_order=True
        )

    @cached_property
    def set_aside(self) -> pl.DataFrame:
        """Requests that their scheduler removed from the running list without preempting them.

        Columns: ``step``, ``trial``, ``request_id``, ``wanted_tokens`` and ``blocks_held``.
        """
        columns = {"step": pl.Int64, "trial": pl.Int64, "request_id": pl.String}
        columns |= {"wanted_tokens": pl.Int64, "blocks_held": pl.Int64}
        if "set_aside" not in self.lists:
            return pl.DataFrame(schema=columns)
        rows = self.lists["set_aside"].select(pl.col(name).cast(kind) for name, kind in columns.items())
        return rows.collect()

    @cached_property
    def sessions(self) -> pl.Series:
        """Ids of streaming sessions, which wait in the queue and keep their blocks between two inputs."""
        parts = self.arrivals.filter("streaming_update")["request_id"]
        paused = self.exits.filter(pl.col("cause") == str(Cause.STREAMING_INPUT_PENDING))["request_id"]
        return pl.concat([parts, paused]).drop_nulls().unique()

    @property
    def begins(self) -> bool:
        """Whether its first steps may be the engine's first: not attached to, and no request present."""
        return not (self.header.attached or self.header.first_step) and self.there_first.is_empty()

    @property
    def active_limit(self) -> int | None:
        """``max_num_active_seqs`` (vLLM 0.31 and newer), if set."""
        limit = self.header.scheduler_config.get("max_num_active_seqs")
        return limit if isinstance(limit, int) else None

    @property
    def seats_name(self) -> str:
        """Name of the setting that limits how many requests run at once."""
        return "max_num_active_seqs" if self.active_limit else "max_num_seqs"

    @property
    def by_priority(self) -> bool:
        """Whether the scheduler's policy is priority, not first come, first served."""
        return self.header.scheduler_config.get("policy") == "priority"

    @property
    def seats(self) -> int:
        """Requests that may run at once; 0 if not recorded."""
        return self.active_limit or self.header.max_num_running_reqs or 0

    @property
    def token_budget(self) -> int:
        """Tokens that a step may schedule; 0 if not recorded."""
        return self.header.token_budget or 0

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return self.header.engine_rank

    def trials(self) -> list[int | None]:
        """Return the trials in order; [None] for a trace without trials."""
        trials = self.steps["trial"].unique(maintain_order=True).to_list()
        return [trial for trial in trials if trial is not None] or [None]

    @property
    def whole_trials(self) -> bool:
        """Whether it has trials, which begin and end with a workload."""
        return not self.is_window and self.trials() != [None]

    def trial_rows(self, frame: pl.DataFrame, trial: int | None) -> pl.DataFrame:
        """Return the rows of one trial; all rows for None."""
        return frame if trial is None else frame.filter(pl.col("trial") == trial)


def first_moment_us(steps: pl.DataFrame) -> int:
    """Return the start of the first step; 0 if there is none."""
    return int(steps.select(pl.col("start_us").min()).item() or 0)


def last_moment_us(
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
    because a paused or hanging engine makes no step. If later steps are missing (``end_missing``), the last
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
        calls = controls.select((pl.col("at_us") + pl.col("took_us").fill_null(0)).max()).item()
        moments_us += [calls, cpu["at_us"].max()]
    return max((int(us) for us in moments_us if us is not None), default=0)


def demand_of(header: Header, steps: pl.DataFrame, finishes: pl.DataFrame) -> Demand:
    """Return the peak demand of the load in these steps."""
    there = pl.col("num_running_after") + pl.col("num_waiting_after").fill_null(0)
    ended = finishes.filter(pl.col("output_tokens") > 0)
    blocks, need = 0, kv_need(header)
    if need is not None and need.is_bounded and need.sequence(1) is not None:
        lengths = ended.group_by(pl.col("prompt_tokens") + pl.col("output_tokens")).len().drop_nulls()
        blocks = sum(count * sum(need.sequence(tokens) or ()) for tokens, count in lengths.iter_rows())
    return Demand(int(steps.select(there.max()).item() or 0), ended.height, blocks)
