"""Frames of one engine's trace without the warm-up: the plain data on which all of ``timeline/`` is based.

``EngineFrames.gaps`` lists the gaps in the trace. In a gap, a request's state is ``NOT_RECORDED``; the
end of a request that is not recorded after the gap is unknown.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import polars as pl

from schedtrace.model.causes import Cause
from schedtrace.model.message import Message
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import ALL_FACTS, Control, Fact, KvSend
from schedtrace.read.problems import DROPPED, GAP_SCHEMA
from schedtrace.read.run import FrontEndRecord
from schedtrace.read.tables import (
    all_rows,
    cpu_times,
    present_in,
    rows_between,
    rows_of,
    schema_of,
    stalls_in,
)

BEFORE = -1
"""Step number, or place of a step, for the time before the first step."""


@dataclass(frozen=True)
class Demand:
    """Peak load of an engine, as far as recorded."""

    requests: int = 0
    """Maximum number of requests in the scheduler after a step."""
    ended: int = 0
    """Number of requests that produced tokens and ended."""
    blocks: int = 0
    """Sum, over the ended requests, of the most KV blocks that each held; 0 if blocks cannot be counted."""

    def __add__(self, later: "Demand") -> "Demand":
        return Demand(
            max(self.requests, later.requests), self.ended + later.ended, self.blocks + later.blocks
        )

    @property
    def blocks_each(self) -> float | None:
        """Mean number of KV blocks per request; None if unknown."""
        return self.blocks / self.ended if self.blocks else None


@dataclass(eq=False)
class EngineFrames:
    """Frames of one engine's trace, and values that follow from them alone.

    ``steps`` has the columns of ``model.trace.Step`` and

    * ``token_budget`` and ``remaining_budget`` as ``schedule()`` used them (``timeline.py``),
    * ``end_us``: when ``schedule()`` returned,
    * ``used_tokens``: tokens scheduled (null if not recorded), and ``use_frac``: their share of the budget,
    * ``busy_us``: time from the moment at which the step could begin on the device to its output,
    * ``execution_us``: time that the worker spent on its batch alone (``timeline.with_execution_us``); null
      also if only the sum with a neighbour's time is known,
    * ``context_tokens``: tokens that the step's requests had computed before it (``step_time.py``),
    * ``eligible_after``: number of waiting requests that, as far as known, wait only for a limit,
    * ``waiting_cause``, ``waiting_request``, ``waiting_detail``, ``waiting_location``, ``waiting_via``:
      the exit that ended the loop over the waiting queue. If the loop reached the end of the
      queue and skipped every remaining request, this is the most frequent of those skips.
    """

    header: Header
    steps: pl.DataFrame
    stretches: pl.LazyFrame
    """Stretches of steps in which requests were scheduled (``read/tables.py``)."""
    arrivals: pl.DataFrame
    """Requests that arrived; requests present when the trace began are in ``present``."""
    finishes: pl.DataFrame
    preemptions: pl.DataFrame
    exits: pl.DataFrame
    """Table with a row per recorded exit; ``refusal`` states whether the exit refused or skipped a request.
    """
    caps: pl.DataFrame
    """Table with a row per limit that made a chunk smaller, with the step's ``remaining_budget``."""
    begin_us: int
    """Start of the first step; 0 if there is none."""
    end_us: int
    """Last moment that the trace covers."""
    demand: Demand
    """Peak demand of the load; a window keeps that of the whole timeline."""
    there_first: pl.DataFrame
    """Rows of ``present`` for the requests that were present when the trace began."""
    warmup_steps: int
    warmup_requests: pl.Series
    """Ids of warm-up requests, which are left out even if steps after the warm-up scheduled some of them."""
    present: pl.DataFrame = field(default_factory=lambda: present_in([]))
    """Requests whose arrival is not recorded, because they were present when the trace began or after a gap
    (``read/tables.py``)."""
    closed_workload: bool = False
    """Whether all requests of a trial are sent to one engine at once; False if unknown."""
    facts: frozenset[Fact] = ALL_FACTS
    """Facts that the trace records; only for these does an empty frame mean that nothing happened."""
    lists: dict[str, pl.LazyFrame] = field(default_factory=dict)
    """Tables of facts other than decisions, by name (``model/trace_facts.py``)."""
    cpu: pl.DataFrame = field(default_factory=lambda: cpu_times([]))
    """Processor times of threads (``read/tables.py``)."""
    controls: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=schema_of(Control)))
    """Calls to the engine other than requests, in order of time, over the whole trace."""
    kv_sends: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=schema_of(KvSend)))
    """Blocks that finished requests keep for sending, in order of time, over the whole trace."""
    stalls: pl.DataFrame = field(default_factory=lambda: stalls_in([]).with_columns(open=pl.lit(value=True)))
    """Periods without progress that the engine's watchdog reported (``read/tables.py``). ``open`` states
    whether the trace ends within the stall, in which case ``until_us`` is the last recorded moment."""
    front_end: FrontEndRecord | None = None
    """Record of the run's front ends, which is common to all its engines."""
    gaps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=GAP_SCHEMA))
    """Periods for which nothing is recorded (``read/problems.py``)."""
    there_after: pl.DataFrame = field(
        default_factory=lambda: present_in([]).with_columns(next_step=pl.lit(None, pl.Int64))
    )
    """Requests present after gaps, as far as recorded: one row per request and gap, with ``next_step``, the
    first step after the gap.
    """
    missing: list[Message] = field(default_factory=list)
    """Sentences about parts that are missing before the end of the trace."""
    requests_missing: bool = False
    """Whether the trace may lack requests."""
    offset_us: int = 0
    """Microseconds to add to times of this trace to convert them to the clock of the run's first trace."""
    is_window: bool = False
    """Whether the frames are cut to a part of the trace (``timeline/timeline.py``)."""

    @cached_property
    def admitted(self) -> pl.DataFrame:
        """Rows of ``requests`` in which a request began to run or resumed."""
        return self.requests_of(pl.col("phase") != "running")

    @property
    def measured_stretches(self) -> pl.LazyFrame:
        """Stretches without those of warm-up requests, which steps after the warm-up may schedule."""
        if self.warmup_requests.is_empty():
            return self.stretches
        warmup = self.warmup_requests.to_frame().lazy()
        return self.stretches.join(warmup, on="request_id", how="anti", maintain_order="left")

    @property
    def requests(self) -> pl.LazyFrame:
        """Table with a row per step and scheduled request, which is too large to be collected as a whole."""
        return all_rows(self.stretches, self.steps)

    def requests_of(self, wanted: pl.Expr) -> pl.DataFrame:
        """Return the rows of ``requests`` in the stretches that meet this condition."""
        return rows_of(self.stretches.filter(wanted), self.steps)

    def requests_in(self, step: int) -> pl.DataFrame:
        """Return the rows of ``requests`` in one step."""
        return rows_between(self.stretches, self.steps, step, step)

    @cached_property
    def new_requests(self) -> pl.DataFrame:
        """Arrivals without the later parts of streaming sessions."""
        if self.arrivals["streaming_update"].not_().all(ignore_nulls=False):
            return self.arrivals
        return self.arrivals.filter(~pl.col("streaming_update"))

    @cached_property
    def first_arrivals(self) -> pl.DataFrame:
        """First arrival of each request, in order, without the later parts of streaming sessions."""
        return self.new_requests.unique("request_id", keep="first", maintain_order=True)

    @cached_property
    def prompt_lengths(self) -> pl.DataFrame:
        """``request_id`` and ``prompt_tokens`` of each request, once."""
        lengths = [
            self.present[["request_id", "prompt_tokens"]],
            self.new_requests[["request_id", "prompt_tokens"]],
            self.finishes[["request_id", "prompt_tokens"]],
        ]
        return pl.concat(lengths).unique("request_id", keep="first")

    @cached_property
    def known_requests(self) -> pl.DataFrame:
        """Table with a row per request whose properties are known: requests in ``present``, and arrivals.

        It has the columns of ``arrivals``; ``queued_us`` may be null for requests in ``present``.
        """
        if self.present.is_empty():
            return self.arrivals.unique("request_id", keep="first", maintain_order=True)
        there = self.present.select(name for name in self.arrivals.columns if name in self.present.columns)
        there = there.with_columns(streaming_update=pl.lit(value=False))
        return pl.concat([there, self.arrivals], how="diagonal").unique(
            "request_id", keep="first", maintain_order=True
        )

    @cached_property
    def started_requests(self) -> pl.DataFrame:
        """``known_requests`` without the streaming sessions of which only a later part is known."""
        return self.known_requests.filter(~pl.col("streaming_update"))

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
    def losses(self) -> pl.DataFrame:
        """``request_id``, ``step`` and ``lost_tokens``: the most tokens that a preemption so far discarded.

        Rows are in the order of the steps. A loss before the trace began has the step ``BEFORE``; a loss in a
        gap has the first step after the gap.
        """
        there = [
            rows.select("request_id", step=step, lost_tokens=known_loss()).filter(pl.col("lost_tokens") > 0)
            for rows, step in (
                (self.there_first, pl.lit(BEFORE, pl.Int64)),
                (self.there_after, pl.col("next_step")),
            )
            if not rows.is_empty()
        ]
        losses = pl.concat([*there, self.preemptions[["request_id", "step", "lost_tokens"]]])
        if losses.is_empty():
            return losses
        return (
            losses.sort("step", maintain_order=True)
            .with_columns(pl.col("lost_tokens").cum_max().over("request_id"))
            .unique(["request_id", "step"], keep="last", maintain_order=True)
        )

    def with_work(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add ``prompt_tokens``, ``lost_tokens`` and ``work`` to rows of ``requests``.

        ``lost_tokens`` is the largest number of tokens that a preemption before or in that step discarded, if
        known. ``work`` is ``recompute`` while fewer tokens than that are computed, ``prefill`` while fewer
        than the prompt's are, else ``decode``; null if the prompt's length is unknown.
        """
        computed, lost = pl.col("computed_tokens"), pl.col("lost_tokens").fill_null(0)
        return (
            rows.join(self.prompt_lengths, on="request_id", how="left", maintain_order="left")
            .sort("step", maintain_order=True)
            .join_asof(self.losses, on="step", by="request_id", check_sortedness=False)
            .with_columns(
                lost_tokens=lost,
                work=pl.when(computed < lost)
                .then(pl.lit("recompute"))
                .when(computed < pl.col("prompt_tokens"))
                .then(pl.lit("prefill"))
                .when(pl.col("prompt_tokens").is_not_null())
                .then(pl.lit("decode")),
            )
        )

    @cached_property
    def step_begins(self) -> pl.DataFrame:
        """``begin_us`` and ``next_step`` of each step, in order of time."""
        return self.steps.select(begin_us="start_us", next_step="step").sort("begin_us")

    @cached_property
    def sessions(self) -> pl.Series:
        """Ids of streaming sessions, which wait in the queue and keep their blocks between two inputs."""
        parts = self.arrivals["request_id"].filter(self.arrivals["streaming_update"])
        pauses = self.exits["cause"] == str(Cause.STREAMING_INPUT_PENDING)
        paused = self.exits["request_id"].filter(pauses)
        return pl.concat([parts, paused]).drop_nulls().unique()

    @property
    def begins(self) -> bool:
        """Whether the trace may begin with the engine's first step, because no request was present before."""
        return not (self.header.attached or self.header.first_step) and self.there_first.is_empty()

    @property
    def active_limit(self) -> int | None:
        """Value of ``max_num_active_seqs`` (vLLM 0.31 and newer), if set."""
        limit = self.header.scheduler_config.get("max_num_active_seqs")
        return limit if isinstance(limit, int) else None

    @property
    def seats_name(self) -> str:
        """Name of the setting that limits how many requests run at once."""
        return "max_num_active_seqs" if self.active_limit else "max_num_seqs"

    @property
    def by_priority(self) -> bool:
        """Whether the scheduler orders requests by priority; otherwise it is first come, first served."""
        return self.header.scheduler_config.get("policy") == "priority"

    @property
    def seats(self) -> int:
        """Maximum number of running requests; 0 if not recorded."""
        return self.active_limit or self.header.max_num_running_reqs or 0

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens in a step; 0 if not recorded."""
        return self.header.token_budget or 0

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        return self.header.engine_rank

    def trials(self) -> list[int | None]:
        """Return the trials in order; [None] for a trace without trials."""
        numbers = self.steps["trial"]
        if numbers.null_count() == numbers.len():
            return [None]
        return numbers.drop_nulls().unique(maintain_order=True).to_list()

    @property
    def whole_trials(self) -> bool:
        """Whether the timeline consists of whole trials, which begin and end with a workload."""
        return not self.is_window and self.trials() != [None]

    def trial_rows(self, frame: pl.DataFrame, trial: int | None) -> pl.DataFrame:
        """Return the rows of one trial; all rows for None."""
        return frame if trial is None else frame.filter(pl.col("trial") == trial)


NOT_RECORDED = "not_recorded"
"""State of a request, and of the engine, in a gap."""
RECORDED = pl.col("state") != NOT_RECORDED
"""Expression for the rows of ``request_states`` or ``engine_states`` outside of gaps."""


def missing_us(frames: EngineFrames) -> int:
    """Return the length of all gaps, in microseconds."""
    return int(frames.gaps.select((pl.col("to_us") - pl.col("from_us")).sum()).item() or 0)


def missing_steps(frames: EngineFrames) -> int:
    """Count the steps that lie in gaps."""
    missing = pl.col("last_step") - pl.col("first_step") + 1
    return int(frames.gaps.select(missing.clip(0).sum()).item() or 0)


def make_gone(frames: EngineFrames) -> pl.DataFrame:
    """Return the requests that may have left in a gap, because they are not recorded after it.

    Columns: ``request_id``; ``gone_us``, from which nothing is known; ``gone_step``, the first step after the
    gap.
    """
    gaps = frames.gaps
    if not gaps.is_empty():
        gaps = gaps.filter(pl.col("kind") != DROPPED).sort("next_step")
    if gaps.is_empty():
        return pl.DataFrame(schema={"request_id": pl.String, "gone_us": pl.Int64, "gone_step": pl.Int64})
    signs = [
        frames.stretches.select("request_id", step=pl.col("last_step")).collect(),
        _numbered(frames, frames.arrivals, "queued_us"),
        frames.arrivals[["request_id", "step"]].drop_nulls(),
        _numbered(frames, frames.present, "at_us"),
        frames.preemptions[["request_id", "step"]],
        frames.exits[["request_id", "step"]].drop_nulls(),
        frames.there_after.select("request_id", step="next_step"),
    ]
    last = (
        pl.concat([sign.cast({"step": pl.Int64}) for sign in signs])
        .group_by("request_id")
        .agg(pl.col("step").max())
    )
    return (
        last.join(frames.finishes[["request_id"]], on="request_id", how="anti")
        .sort("step")
        .join_asof(
            gaps.select(gone_step="next_step", gone_us="from_us"),
            left_on=pl.col("step") + 1,
            right_on="gone_step",
            strategy="forward",
            coalesce=False,
        )
        .drop_nulls("gone_us")
        .select("request_id", "gone_us", "gone_step")
    )


def _numbered(frames: EngineFrames, rows: pl.DataFrame, moment: str) -> pl.DataFrame:
    """Return the last step that had begun at each row's moment: ``request_id`` and ``step`` (-1: none)."""
    numbers = frames.steps.sort("step")["step"]
    places = (
        frames.steps.sort("step")["start_us"].search_sorted(rows[moment], side="right").cast(pl.Int64) - 1
    )
    step = pl.select(pl.when(places >= 0).then(numbers.gather(places.clip(0)))).to_series().fill_null(-1)
    return rows[["request_id"]].with_columns(step=step)


def without_gaps(spans: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Remove the time within gaps from spans (``begin_us``, ``end_us``, other columns)."""
    columns = {"state": pl.String, "cause": pl.String, "begin_step": pl.Int64, "end_step": pl.Int64}
    missing = [pl.lit(None, kind).alias(name) for name, kind in columns.items() if name not in spans.columns]
    cut = cut_by_gaps(spans.with_columns(*missing, tokens=pl.lit(0)), gaps)
    return cut.filter(pl.col("state").ne_missing(NOT_RECORDED)).select(spans.columns)


def after_gaps(frames: EngineFrames) -> pl.Series:
    """Return the numbers of steps that follow missing steps, which may have admitted requests."""
    follows = (pl.col("step") == pl.col("step").shift(1) + 1).fill_null(frames.header.first_step == 0)
    return frames.steps.select(pl.col("step").filter(~follows))["step"]


def next_steps(frames: EngineFrames, rows: pl.DataFrame, moment: str) -> pl.DataFrame:
    """Sort rows by ``moment``; add the first step that begins afterwards: ``next_step``, ``begin_us``."""
    return rows.sort(moment, maintain_order=True).join_asof(
        frames.step_begins,
        left_on=moment,
        right_on="begin_us",
        strategy="forward",
        coalesce=False,
        check_sortedness=False,
    )


def was_preempted() -> pl.Expr:
    """Return an expression for requests in ``present`` that were preempted and returned to the queue."""
    return (pl.col("state") == "preempted") & (pl.col("computed_tokens") == 0)


def known_loss() -> pl.Expr:
    """Return an expression for the tokens that a preemption discarded, if a row of ``Present`` shows them.

    A request with output tokens had computed all but the last of them. The loss of a request without output
    is unknown.
    """
    sampled = pl.col("prompt_tokens") + pl.col("output_tokens") - 1
    again = (pl.col("output_tokens") > 0) & (pl.col("computed_tokens") < sampled)
    return pl.max_horizontal("lost_tokens", pl.when(again).then(sampled))


def cut_by_gaps(states: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Return states, cut at gaps; the parts in gaps are ``NOT_RECORDED``, without steps, tokens or cause.

    Args:
        states: ``begin_us``, ``end_us``, ``state``, ``cause``, ``begin_step``, ``end_step`` and ``tokens``.
        gaps: ``EngineFrames.gaps``.
    """
    if not gaps.is_empty():
        gaps = gaps.filter(pl.col("to_us") > pl.col("from_us")).sort("from_us")
    if gaps.is_empty() or states.is_empty():
        return states
    first = gaps["to_us"].search_sorted(states["begin_us"], side="right").cast(pl.Int64)
    after_last = gaps["from_us"].search_sorted(states["end_us"], side="left").cast(pl.Int64)
    numbered = states.with_row_index("span").with_columns(first=first, count=(after_last - first).clip(0))
    whole, hit = numbered.filter(pl.col("count") == 0), numbered.filter(pl.col("count") > 0)
    inside = hit.with_columns(gap=pl.int_ranges("first", pl.col("first") + pl.col("count"))).explode("gap")
    inside = inside.with_columns(
        begin_us=pl.max_horizontal("begin_us", pl.lit(gaps["from_us"].gather(inside["gap"]))),
        end_us=pl.min_horizontal("end_us", pl.lit(gaps["to_us"].gather(inside["gap"]))),
        state=pl.lit(NOT_RECORDED),
        tokens=pl.lit(0, states.schema["tokens"]),
        **{name: pl.lit(None, states.schema[name]) for name in ("cause", "begin_step", "end_step")},
    ).filter(pl.col("end_us") > pl.col("begin_us"))
    last = pl.col("first") + pl.col("count")
    between = hit.with_columns(gap=pl.int_ranges("first", last + 1)).explode("gap")
    before = (between["gap"] - 1).clip(0)
    following = between["gap"].clip(None, gaps.height - 1)
    is_first, is_last = pl.col("gap") == pl.col("first"), pl.col("gap") == last
    between = between.with_columns(
        begin_us=pl.when(is_first).then("begin_us").otherwise(pl.lit(gaps["to_us"].gather(before))),
        end_us=pl.when(is_last).then("end_us").otherwise(pl.lit(gaps["from_us"].gather(following))),
        begin_step=pl.when(is_first).then("begin_step").otherwise(pl.lit(gaps["next_step"].gather(before))),
        end_step=pl.when(is_last)
        .then("end_step")
        .otherwise(pl.lit(gaps["first_step"].gather(following)) - 1),
    )
    recorded = between.filter(pl.col("end_us") > pl.col("begin_us"))
    steps_known = pl.col("begin_step") <= pl.col("end_step")
    recorded = recorded.with_columns(
        tokens=pl.when(pl.int_range(pl.len()).over("span") == 0).then("tokens").otherwise(0),
        **{name: pl.when(steps_known).then(name) for name in ("begin_step", "end_step")},
    )
    columns = [*states.columns, "span"]
    return (
        pl.concat([part.select(columns) for part in (whole, inside, recorded)])
        .sort("span", "begin_us", "end_us", maintain_order=True)
        .drop("span")
    )


class Offset(NamedTuple):
    """Offset that converts times of one trace to another trace's clock, in microseconds."""

    us: int
    uncertainty_us: int | None
    """Maximum error of the offset; None if unknown, because the wall clock of a host may be wrong."""


def offset(of: Header, to: Header) -> Offset:
    """Return the offset from the clock of the trace with header ``of`` to that with header ``to``.

    Processes of one machine read the same monotonic clock, so the offset is exact. Otherwise, it is derived
    from wall clocks, with the uncertainties of both readings and, on different hosts, the error that NTP
    leaves on each.
    """
    if (
        of.clock_id is not None
        and of.clock_id == to.clock_id
        and of.monotonic_anchor_us is not None
        and to.monotonic_anchor_us is not None
    ):
        return Offset(of.monotonic_anchor_us - to.monotonic_anchor_us, 0)
    parts = [of.wall_uncertainty_us, to.wall_uncertainty_us]
    if of.host != to.host:
        parts += [of.wall_max_error_us, to.wall_max_error_us]
    known_parts = [part for part in parts if part is not None]
    return Offset(
        of.wall_anchor_us - to.wall_anchor_us, sum(known_parts) if len(known_parts) == len(parts) else None
    )
