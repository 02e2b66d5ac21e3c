"""``interruption``: the engine was paused, did something else, or took far too long for a step.

A reset of the prefix cache is also an interruption. Its cost is not its own length, but the time for which
the preempted requests waited and computed again.
"""

import re
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import polars as pl

from schedtrace.diagnose.excess_words import mark_clause
from schedtrace.diagnose.rule import Findings, Rule, Threshold, share_frac
from schedtrace.diagnose.rules.common import (
    advise,
    first_step,
    severity_by_weight,
    step_finding,
)
from schedtrace.diagnose.rules.front_end import NAMES
from schedtrace.diagnose.rules.slow_step_remedies import remedies
from schedtrace.diagnose.waits import totals
from schedtrace.model.message import NOTHING, Message, Number, Steps
from schedtrace.model.report import Advice, Evidence, Finding
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline import events
from schedtrace.timeline.charges import CACHE_RESET
from schedtrace.timeline.engine_states import starved_threads
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us, total_us
from schedtrace.timeline.timeline import Timeline

if TYPE_CHECKING:
    from schedtrace.diagnose.excess_features import SharedMark

LEAST_FRAC = 0.01
"""Minimum share of the requests' time; a smaller share does not affect latencies."""

WHOLE_FROM = 10.0
"""Factor from which on factors are written without a decimal."""

WHERE = {
    "device": "on the device",
    "schedule": "in schedule()",
    "update": "in update_from_output()",
    "host_gap": "in the engine process, between two steps",
}
"""Phrase for each part of a step in which an event may occur."""


class Kind(NamedTuple):
    """Sentences about one kind of event."""

    title: str
    what: str
    advice: str = ""
    """Advice; empty if the advice depends on the part of the step."""


STEP_PARTS = {"device": "execution", "host_gap": "between"}
"""Names that ``slow-steps`` gives to parts of a step, where its names differ from those used here."""

NOT_SLOW = (events.PAUSED, events.ASLEEP, events.CALLED, events.NO_CALL, events.HUNG, events.STALLED)
"""Kinds whose whole time counts, not only the time beyond the expected time."""
ASKED = "Send requests to another engine meanwhile: a client asked for it."
SLOW = Kind(
    "Slow steps now and then",
    "{times:n step}[{in_a_row:?} in a row] took {factor_of_work} times as long as the work explains {where}, "
    "{time_ms:ms} in total",
)
KINDS = {
    events.PAUSED: Kind(
        "The scheduler was paused",
        "The scheduler was paused[ {repeated:n time}] for {time_ms:ms}[{open:?} and had not been resumed "
        "when the trace ended], and {requests:n request} waited",
        "[{open:?}Resume the scheduler: the client that asked for the pause had not.]"
        "[{open:!}Nothing to tune: a client asked for the pause.]",
    ),
    events.ASLEEP: Kind(
        "The engine was asleep, or on its way",
        "The engine went to sleep or woke up[ {repeated:n time}], which took {time_ms:ms} while "
        "{requests:n request} waited",
        ASKED,
    ),
    events.CALLED: Kind(
        "Other calls kept the engine busy",
        "The engine's thread ran {call:code} for {time_ms:ms} instead of steps while {requests:n request} "
        "waited",
        ASKED,
    ),
    events.HUNG: Kind(
        "schedule() hung",
        "[{repeated:n call}][{repeated:!}One call] of schedule() did not return for {time_ms:ms}"
        "[{repeated:?} in total][{open:?}, and had not when the trace ended,] while {requests:n request} "
        "waited for it",
        "Look at what schedule() of {scheduler:code} does there: no setting changes it, and every request "
        "waits for it.",
    ),
    events.STALLED: Kind(
        "The engine stood still",
        "The engine made no step for {time_ms:ms}[ {repeated:n time}][{open:?}, until the trace ended,] "
        "while {requests:n request} waited",
    ),
    events.NO_CALL: Kind(
        "No schedule() call while requests waited",
        "The engine did not call schedule() for {time_ms:ms}[ {repeated:n time}] while {requests:n request} "
        "waited",
    ),
    events.FIRST: Kind(
        "The first steps are slow",
        "The first [{repeated:n step}][{repeated:!}step] took {time_ms:ms} longer {where} than the same work "
        "later, {factor_of_work} times as long",
        "Send a few requests as a warm-up before the load: first steps compile kernels, capture graphs or "
        "load code.",
    ),
    events.PERIODIC: Kind(
        "Periodic slow steps",
        "Every {period} one is slow {where}: {times:n step} took {factor_of_work} times as long as the work "
        "explains, {time_ms:ms} in total",
    ),
    events.EPISODE: Kind("Slow steps in a row", SLOW.what),
    events.STARVED: Kind(
        "The engine's processes had too few processors",
        "Processors were short for {short_ms:ms}: {thread} ran {ran_frac:%} of that time and waited for a "
        "processor {waited_frac:%}, which cost {times:n step} {time_ms:ms}",
        "Give the engine and its workers processors of their own: end or move what else runs on them, raise "
        "the container's CPU limit, or pin the processes to processors that nothing else uses.",
    ),
}


class Interruptions(Evidence, kw_only=True):
    """Interruptions of one kind."""

    kind: str
    """Kind of the interruptions, such as ``paused``."""
    first_step: int | None
    """First step of the range from the first interruption to the last."""
    last_step: int | None
    """Last step of the range from the first interruption to the last."""
    times: int
    """Number of interruptions."""
    time_ms: float
    """Total time of the interruptions."""
    requests_ms: float
    """Total time that requests lost to the interruptions."""
    requests: int
    """Number of requests that were open during the interruptions."""
    aborted: int
    """Number of open requests whose clients gave up during the interruptions."""
    longest_request: str
    """Request that lost the most time."""
    part: str
    """Part of the step that took most of the time."""
    factor: float | None
    """Median ratio of actual to expected time."""
    detail: str | None
    """State of the pause, or name of the call."""
    period_steps: float | None
    """Number of steps from one ``periodic`` interruption to the next."""
    period_ms: float | None
    """Time from one ``periodic`` interruption to the next."""
    open: bool = False
    """Whether the trace ends during an interruption; a ``hung`` or ``stalled`` one is then always reported,
    and first."""
    scheduler: str
    """The scheduler's class."""
    stacks: list[str] = msgspec.field(default_factory=list)
    """Stacks of the threads of the engine and the workers in the longest interruption, if ``hung`` or
    ``stalled``."""
    marked: int
    """Number of these slow steps that share a feature compared by ``slow-steps``; 0: they share none."""
    marked_of_all_frac: float | None
    """Share of all steps that have this feature."""
    short_ms: float | None
    """Time in which too few processors were free for the engine, if ``starved``."""
    role: str | None = None
    """Role of the thread that lost the most time, if ``starved``: ``engine`` or ``worker``."""
    pid: int | None = None
    """Id of that thread's process."""
    ran_frac: float | None = None
    """Share of ``short_ms`` in which that thread was on a processor."""
    waited_frac: float | None = None
    """Share of ``short_ms`` in which that thread was ready to run but had no processor."""

    @property
    def thread(self) -> str:
        """Thread that lost the most time, in words."""
        return NAMES.get(self.role or "", "")

    @property
    def repeated(self) -> int:
        """Number of interruptions if there are several; otherwise 0."""
        return self.times if self.times > 1 else 0

    @property
    def in_a_row(self) -> bool:
        """Whether the slow steps follow each other directly."""
        return self.kind == events.EPISODE

    @property
    def where(self) -> str:
        """Part of the step, in words."""
        return WHERE[self.part]

    @property
    def call(self) -> str:
        """Work that the engine did instead of steps."""
        return self.detail or "a call"

    @property
    def factor_of_work(self) -> Number:
        """Factor by which the time exceeds the expected time, with a decimal only if that matters."""
        factor = self.factor or 1.0
        return Number(factor, 0 if factor >= WHOLE_FROM else 1)

    @property
    def stretch(self) -> Steps:
        """Range of steps from ``first_step`` to ``last_step``."""
        return Steps(self.first_step or 0, self.last_step or 0)

    @property
    def period(self) -> Message:
        """Number of steps, or time, after which the interruption recurs."""
        if self.period_steps is not None:
            return say("{steps:n step}", steps=round(self.period_steps))
        return say("{time:ms}", time=self.period_ms or 0)


class CacheResets(Evidence, kw_only=True):
    """Resets of the prefix cache that preempted running requests (cause ``cache_reset``)."""

    resets: int
    """Number of resets that preempted a request."""
    requests: int
    """Number of requests that were preempted."""
    most_request: str
    """Request that was preempted most often."""
    most_times: int
    """Number of this request's preemptions."""
    lost_tokens: int
    """Number of computed tokens that the requests lost."""
    prefix_keys: int | None
    """Number of cached blocks that all resets dropped; None in older traces."""
    wait_ms: float
    """Time charged to the resets."""

    @property
    def repeated(self) -> bool:
        """Whether several resets preempted the same request."""
        return self.most_times > 1


def _find(timeline: Timeline) -> Findings:
    if not timeline.requests_us:
        return
    for rows in timeline.events.partition_by("kind", maintain_order=True):
        kind = rows["kind"][0]
        if _is_explained(timeline, kind, rows):
            continue
        finding = _finding(timeline, kind, rows)
        if finding.leads or (finding.share_frac or 0) >= LEAST_FRAC:
            yield finding
    yield from _cache_resets(timeline)


def _is_explained(timeline: Timeline, kind: str, rows: pl.DataFrame) -> bool:
    """Return whether ``slow-steps`` reports most of these steps, because they share a feature."""
    if kind not in (events.PERIODIC, events.SCATTERED, events.EPISODE, events.NO_CALL):
        return False
    from schedtrace.diagnose.excess import explained_steps  # noqa: PLC0415  # it loads SciPy

    return (
        2 * rows.filter(pl.col("step").is_in(pl.lit(explained_steps(timeline)).implode())).height
        > rows.height
    )


def _finding(timeline: Timeline, kind: str, rows: pl.DataFrame) -> Finding:
    lost_us = overlap_us(timeline.request_states, merged(rows))
    lost = timeline.request_states[["request_id"]].with_columns(us=lost_us).filter(pl.col("us") > 0)
    requests = totals(lost, "us")["request_id"]
    cost_us = events.cost_us(timeline.request_states, timeline.engine_states, rows)
    time_us = total_us(rows)
    share = min(1.0, cost_us / timeline.requests_us)
    cases = rows.drop_nulls("step").sort(LENGTH_US, "begin_us", descending=[True, False])
    cases = cases.with_columns(pl.col("begin_us") + timeline.offset_us, length_us=LENGTH_US)
    parts = (
        rows.group_by("part").agg(LENGTH_US.sum().alias("us")).sort("us", "part", descending=[True, False])
    )
    period_us = rows["period_us"].mean()
    starving = kind == events.STARVED
    shown = rows.unique("step", keep="first", maintain_order=True) if starving else rows
    mark = _shared_mark(timeline, kind, rows)
    evidence = Interruptions(
        kind=kind,
        marked=mark.inside if mark else 0,
        marked_of_all_frac=mark.all_frac if mark else None,
        first_step=rows["step"].min(),  # type: ignore[arg-type]  # of integers
        last_step=rows["step"].max(),  # type: ignore[arg-type]  # likewise
        times=shown.height,
        time_ms=time_us / 1e3,
        requests_ms=cost_us / 1e3,
        requests=requests.len(),
        aborted=_aborted(timeline, rows),
        longest_request=requests[0] if requests.len() else "",
        part=str(parts["part"][0]),
        factor=None if (factor := rows["factor"].median()) is None else float(factor),  # type: ignore[arg-type]  # floats
        detail=rows["detail"].drop_nulls().mode().sort().first(),  # type: ignore[arg-type]  # a string
        period_steps=rows["period_steps"].mean(),  # type: ignore[arg-type]  # of numbers
        period_ms=None if period_us is None else float(period_us) / 1e3,  # type: ignore[arg-type]  # integers
        open=bool(rows["open"].any()),
        scheduler=timeline.header.scheduler_class.rpartition(".")[2],
        stacks=_stacks(timeline, rows),
        **(_starving(timeline) if starving else {"short_ms": None}),
    )
    words = KINDS.get(kind, SLOW)
    clause = mark_clause(mark.term) if mark else NOTHING
    hangs = evidence.open and kind in (events.HUNG, events.STALLED)
    return step_finding(
        timeline,
        shown,
        evidence,
        title=words.title,
        verdict=words.what + ": {share:%} of the requests' time.[ {marked:n} of them are {clause}; only "
        "{marked_of_all_frac:%} of all steps are.]",
        values={"clause": clause},
        share_frac=share,
        severity="critical" if hangs else severity_by_weight(None, share),
        leads=hangs,
        holder=_place(evidence.stacks),
        cause=kind,
        message=_message(evidence, cases),
        advice=_advice(timeline, evidence, mark),
        example=None if starving else "{length_us:us}, {begin_us:us} into the recording ({at}).",
        cases=cases,
        cost_ms=evidence.time_ms,
        cost_frac=time_us / timeline.busy_us if timeline.busy_us else None,
    )


def _shared_mark(timeline: Timeline, kind: str, rows: pl.DataFrame) -> "SharedMark | None":
    """Return the mark that slow steps share, if few other steps have it."""
    if kind not in (events.PERIODIC, events.SCATTERED, events.EPISODE):
        return None
    from schedtrace.diagnose.excess_features import shared_mark  # noqa: PLC0415  # it loads NumPy

    return shared_mark(timeline, rows["step"].unique())


def _cache_resets(timeline: Timeline) -> Findings:
    """Yield the finding about resets of the prefix cache, if they preempted running requests."""
    preempted = timeline.preemptions.filter(~pl.col("in_schedule"))
    if preempted.is_empty():
        return
    each = (
        preempted.group_by("step", "trial")
        .agg(preempted=pl.len(), lost_tokens=pl.col("lost_tokens").sum())
        .sort("lost_tokens", "step", descending=[True, False])
    )
    often = preempted["request_id"].value_counts().sort("count", "request_id", descending=[True, False])
    resets = timeline.controls.filter((pl.col("control") == "reset_prefix_cache") & ~pl.col("failed"))
    keys = resets["prefix_keys"].drop_nulls()
    time_us = int(spans_of_kind(timeline, CACHE_RESET)["time_us"].sum())
    evidence = CacheResets(
        resets=each.height,
        requests=often.height,
        most_request=str(often["request_id"][0]),
        most_times=int(often["count"][0]),
        lost_tokens=int(preempted["lost_tokens"].sum()),
        prefix_keys=int(keys.sum()) if keys.len() else None,
        wait_ms=time_us / 1e3,
    )
    yield step_finding(
        timeline,
        each,
        evidence,
        title="Resets of the prefix cache",
        verdict="{resets:n reset} of the prefix cache took the KV blocks of running requests, which then "
        "spent {share:%} of the requests' time on computing {lost_tokens:n token} again.",
        share_frac=time_us / timeline.requests_us,
        cause=CACHE_RESET,
        tokens=evidence.lost_tokens,
        message="{resets:n reset} preempted {requests:n request}"
        "[{repeated:?}, {most_request:id} most often ({most_times:n time})]; waiting for the blocks and "
        "computing again took them {wait_ms:ms}.[ The resets dropped {prefix_keys:n cached block} that later "
        "prompts could have found.]",
        advice=[
            advise(
                "Reset the cache while nothing runs, or without reset_running_requests: it then refuses "
                "as long as requests hold blocks."
            )
        ],
        example="before {at} a reset preempted {preempted:n request}.",
        cases=each,
        cost_ms=evidence.wait_ms,
    )


def spans_of_kind(timeline: Timeline, kind: str) -> pl.DataFrame:
    """Return the spans of one kind of interruption; for cache resets, the waits charged to them."""
    if kind == CACHE_RESET:
        return timeline.charges.filter(pl.col("charge") == CACHE_RESET)
    return timeline.events.filter(pl.col("kind") == kind)


def _aborted(timeline: Timeline, rows: pl.DataFrame) -> int:
    """Return the number of requests whose clients gave up during, and thus because of, interruptions."""
    given_up = timeline.finishes.filter((pl.col("status") == "ABORTED") & ~pl.col("in_schedule")).select(
        begin_us=pl.coalesce("abort_us", "finished_us")
    )
    moments = given_up.drop_nulls().with_columns(
        end_us=pl.col("begin_us") + 1, begin_us=pl.col("begin_us") - 1
    )
    return int((overlap_us(moments, merged(rows)) > 0).sum())


def _stacks(timeline: Timeline, rows: pl.DataFrame) -> list[str]:
    """Return the stacks that the watchdog recorded in the longest interruption; empty if it recorded none."""
    longest = rows.filter(pl.col("kind").is_in([events.HUNG, events.STALLED])).sort(
        LENGTH_US, descending=True
    )
    for begin_us, end_us in longest[["begin_us", "end_us"]].head(1).iter_rows():
        meanwhile = (pl.col("since_us") < end_us) & (pl.col("until_us") > begin_us)
        for stall in timeline.stalls.filter(meanwhile).head(1).iter_rows(named=True):
            return stall["stacks"] or []
    return []


_FRAME = re.compile(r'File "(?:.*/)?([^/"]+)", line (\d+) in (\S+)')
MOST_FRAMES = 3


def _place(stacks: list[str]) -> Message:
    """Name the innermost functions in which the engine's thread was."""
    main = takewhile(lambda line: not line.startswith("Thread 0x"), stacks[1:])
    theirs = [line for line in main if "/schedtrace/record/" not in line]
    frames = [f"{match[1]}:{match[2]} {match[3]}" for line in theirs if (match := _FRAME.search(line))]
    return say(
        "[The engine's thread was in {frames:code}.]", frames=", called by ".join(frames[:MOST_FRAMES])
    )


def _starving(timeline: Timeline) -> dict[str, Any]:
    """Return the evidence about the lack of processors, and about the thread that lost the most time."""
    in_window = timeline.starved.with_columns(
        pl.col("begin_us", "end_us").clip(timeline.begin_us, timeline.end_us)
    )
    most = starved_threads(timeline.tables.thread_times, timeline.starved).row(0, named=True)
    fracs = {name: most[f"{name[:-5]}_us"] / most["us"] for name in ("ran_frac", "waited_frac")}
    return {"short_ms": total_us(in_window) / 1e3, "role": most["role"], "pid": most["pid"], **fracs}


def _message(evidence: Interruptions, cases: pl.DataFrame) -> Message:
    longest = NOTHING
    if evidence.kind == events.STARVED:
        longest = say(" It happened in {stretch}, process {pid}.", evidence, pid=str(evidence.pid))
    elif cases.height:
        if evidence.kind in (events.HUNG, events.STALLED):
            place = "after" if cases["open"][0] or evidence.kind == events.STALLED else "in"
        else:
            place = "before" if evidence.kind in NOT_SLOW else "in"
        longest = say(
            " The longest took {length_us:us}[{slow:?} more than expected], {place} {at}."
            "[{went_on:?} Requests that ran went on; new ones were not admitted.]",
            length_us=cases["length_us"][0],
            at=first_step(cases),
            slow=evidence.kind not in NOT_SLOW,
            place=place,
            went_on=evidence.kind == events.PAUSED and evidence.detail == "PAUSED_NEW",
        )
    return say(
        "{requests:n request} lost {requests_ms:ms} in total, {longest_request:id} the most"
        "[; clients gave up {aborted:n} of them meanwhile].{longest}",
        evidence,
        aborted=evidence.aborted or None,
        longest=longest,
    )


def _advice(timeline: Timeline, evidence: Interruptions, mark: "SharedMark | None") -> list[Advice]:
    """Return advice for the feature that slow steps share, else for their kind, else on what to examine."""
    part = STEP_PARTS.get(evidence.part, evidence.part)
    if mark and (shared := remedies(timeline, part, [mark.term])):
        return shared
    words = KINDS.get(evidence.kind, SLOW).advice
    if not words and evidence.kind == events.STALLED:
        words = "Look at the stacks (--details), and at the processes that the engine waits for."
    elif not words and evidence.part != "device":
        words = (
            "Sample the stacks of the engine process while it runs (for instance with py-spy): the trace "
            "does not record what it does {where}."
        )
    elif not words and evidence.kind == events.PERIODIC:
        words = "Profile one of these steps on the device; look for what else uses it."
    elif not words:
        words = "Profile one of these steps: the trace does not see inside a step."
    return [advise(words, evidence)]


RULE = Rule(
    code="interruption",
    summary="the scheduler was paused, the engine did something else, some steps took far too long, or "
    "resets of the prefix cache preempted requests; one per kind",
    needs=frozenset({Fact.TIMES, Fact.REQUESTS, Fact.LIVES, Fact.QUEUE}),
    find=_find,
    specific=True,
    threshold=Threshold(LEAST_FRAC, share_frac),
)
