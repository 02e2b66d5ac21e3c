"""A step, explained: arrivals, tokens of each request, refusals and their cause, what else would have fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from schedtrace.errors import UsageError
from schedtrace.explain.request_rows import ending
from schedtrace.explain.sentences import step_facts, step_stops, victims
from schedtrace.explain.would_fit import known_need, what_if
from schedtrace.model.message import Message
from schedtrace.model.say import say
from schedtrace.model.story import Leaver, Newcomer, RankTurn, Scheduled, StepStory, Waiter, WhatIf
from schedtrace.model.trace_facts import Fact
from schedtrace.model.vocabulary import interruption
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.admission import AdmissionNeed
from schedtrace.timeline.computing import with_work
from schedtrace.timeline.engine_ranks import PASS, offset
from schedtrace.timeline.events import HUNG, STALLED
from schedtrace.timeline.queue_waits import waiting_after
from schedtrace.timeline.request_states import since_us
from schedtrace.timeline.timeline import Timeline, make_timeline

THIS_STEP_ALONE = say("this holds for this step alone: the change would alter later steps, too")
NO_CACHE_HITS = say(
    "a waiting prompt with prefix cache hits would have needed less; the trace does not record these hits"
)
LISTS = {"arrived", "finished", "preempted"}
"""Columns of a step that its story describes otherwise."""

Row = dict[str, Any]


def rank_turns(traces: Sequence[Trace], row: Row) -> list[RankTurn]:
    """Return a turn per rank, in their order; none with a single rank, or without a common step.

    Args:
        traces: Traces of all ranks.
        row: A step of one of them.
    """
    if len(traces) < 2 or any(row.get(name) is None for name in PASS):  # noqa: PLR2004  # ranks
        return []
    same = pl.all_horizontal(pl.col(name) == row[name] for name in PASS)
    turns = [_turn(trace, same, offset(trace.header, traces[0].header).us) for trace in traces]
    first_us = min(began_us for began_us, _ in turns if began_us is not None)
    for _, turn in turns:
        if turn.back_us is not None:
            turn.back_us -= first_us
    return [turn for _, turn in turns]


def _turn(trace: Trace, same: pl.Expr, offset_us: int) -> tuple[int | None, RankTurn]:
    """Return when a rank began, and its turn with the time of its output, on the first rank's clock."""
    turn = RankTurn(
        engine_rank=trace.header.engine_rank,
        step=None,
        dummy=None,
        requests=0,
        prefill_tokens=0,
        decode_tokens=0,
        num_running=None,
        num_waiting=None,
        back_us=None,
    )
    began_us = None
    # Before a dummy batch a rank may have called schedule(), which scheduled nothing.
    for row in trace.steps.filter(same).sort("total_requests").tail(1).to_dicts():
        turn.step, turn.dummy = row["step"], row["total_requests"] == 0
        turn.requests, turn.decode_tokens = row["total_requests"], row["decode_tokens"]
        turn.prefill_tokens = row["token_budget"] - row["remaining_budget"] - row["decode_tokens"]
        turn.num_running, turn.num_waiting = row["num_running_after"], row["num_waiting_after"]
        began_us, turn.back_us = row["start_us"], row["output_us"]
    if not turn.requests:
        for dummy in trace.dummies.filter(same).head(1).to_dicts():
            turn.dummy, began_us = True, dummy["began_us"]
            turn.back_us = dummy["began_us"] + dummy["took_us"]
    if turn.back_us is not None:
        turn.back_us += offset_us
    return None if began_us is None else began_us + offset_us, turn


def explain_step(run: Run, number: int, *, engine: int = 0) -> StepStory:
    """Return the story of one ``schedule()`` call.

    Args:
        run: A run.
        number: The step's number.
        engine: Data-parallel rank.

    Raises:
        UsageError: If there is no such step or engine, or the record does not tell enough.
    """
    trace = _trace(run, engine)
    trace.require(Fact.TIMES, "step")
    return StepStories(run, make_timeline(trace, run.manifest, whole=True)).story(number)


@dataclass
class StepStories:
    """Stories of an engine's steps, with their shared data computed once."""

    run: Run
    timeline: Timeline
    """Timeline of the whole trace."""

    @cached_property
    def _need(self) -> AdmissionNeed | None:
        return known_need(self.timeline)

    @cached_property
    def _wrong(self) -> frozenset[int]:
        """Steps whose queue could not be rebuilt as it was recorded."""
        return frozenset(self.timeline.mismatches["step"])

    def story(self, number: int) -> StepStory:
        """Return the story of one step.

        Raises:
            UsageError: If there is no such step.
        """
        run, timeline = self.run, self.timeline
        row = _row(run, timeline, number)
        agrees = number not in self._wrong
        waiting = _waiters(timeline, waiting_after(timeline.waits, number), row)
        scheduled, ended = _scheduled(timeline, number), step_stops(timeline, number)
        answers = what_if(
            timeline,
            row,
            need=self._need,
            waiting=waiting if agrees and not timeline.header.foreign_queues else [],
            scheduled=scheduled,
            stops=ended,
        )
        return StepStory(
            path=str(run.path),
            label=run.label,
            engine_rank=timeline.rank,
            **{name: row[name] for name in set(StepStory.__struct_fields__) & row.keys() - LISTS},
            into_recording_us=row["start_us"] + offset(timeline.header, run.traces.headers[0]).us,
            seats=timeline.seats,
            token_budget_set=timeline.token_budget if row["token_budget"] < timeline.token_budget else None,
            arrived=_arrived(timeline, row),
            finished=_finished(timeline, row),
            interruptions=_interruptions(timeline, row),
            late=_late(timeline, row),
            scheduled=scheduled,
            preempted=victims(timeline, number),
            stops=ended,
            waiting=waiting,
            waiting_agrees=agrees,
            what_if=answers,
            what_if_assumes=_assumptions(timeline, answers, waiting),
            facts=step_facts(timeline, row),
            ranks=rank_turns(run.traces, row),
            problems=timeline.missing,
        )


def _trace(run: Run, engine: int) -> Trace:
    by_rank = {trace.header.engine_rank: trace for trace in run.traces}
    if engine not in by_rank:
        msg = f"--engine {engine}: {run.path} has engine {', '.join(map(str, by_rank))}"
        raise UsageError(msg)
    return by_rank[engine]


def _row(run: Run, timeline: Timeline, number: int) -> Row:
    rows = timeline.steps.filter(pl.col("step") == number).to_dicts()
    if rows:
        return rows[0]
    numbers = timeline.steps["step"].to_list()
    if not numbers:
        msg = f"step {number}: no step was recorded in {run.path}"
        raise UsageError(msg)
    gaps = ", with gaps" if len(numbers) < numbers[-1] - numbers[0] + 1 else ""
    msg = f"step {number}: {run.path} has the steps {numbers[0]} to {numbers[-1]}{gaps}"
    raise UsageError(msg)


def _arrived(timeline: Timeline, row: Row) -> list[Newcomer]:
    """Return requests that reached the scheduler since the step before ``row`` of ``timeline.steps``."""
    arrivals = _since_last(timeline, row, timeline.arrivals.filter(~pl.col("streaming_update")), "queued_us")
    on_its_way = (pl.col("queued_us") - pl.col("arrived_us")).alias("on_its_way_us")
    columns = ["request_id", "prompt_tokens", "max_tokens", "queued_us"]
    return [Newcomer(**request) for request in arrivals.select(*columns, on_its_way).to_dicts()]


def _finished(timeline: Timeline, row: Row) -> list[Leaver]:
    """Return requests that left the scheduler since the step before ``row``."""
    gone = _since_last(timeline, row, timeline.finishes, "finished_us")
    rows = gone.with_columns(status=ending()).select(*Leaver.__struct_fields__)
    return [Leaver(**request) for request in rows.to_dicts()]


def _interruptions(timeline: Timeline, row: Row) -> list[Message]:
    """Return interruptions between the starts of the step before and of the step after."""
    starts = timeline.steps.select("step", "start_us").drop_nulls()
    before = starts.filter(pl.col("step") < row["step"])["start_us"].max()
    after = starts.filter(pl.col("step") > row["step"])["start_us"].min()
    events = timeline.events.filter(
        pl.col("end_us") > (timeline.begin_us if before is None else before),
        pl.col("begin_us") < (timeline.end_us if after is None else after),
    )
    sentences = []
    for event in events.to_dicts():
        own = event["step"] == row["step"]
        where = "right after it"
        if own and event["kind"] in {HUNG, STALLED} and event["begin_us"] >= row["end_us"]:
            where = "right after it"
        elif own:
            where = "before it" if event["end_us"] <= row["start_us"] else "in it"
        elif event["begin_us"] < row["start_us"]:
            where = "meanwhile"
        sentences.append(
            say(
                "{what}[ ({detail:code})] for {took:us}, {where}[; it had not ended when the recording did"
                "{unended:?}]",
                what=interruption(event["kind"]),
                detail=event["detail"],
                took=event["end_us"] - event["begin_us"],
                where=where,
                unended=bool(event["open"]),
            )
        )
    return sentences


def _late(timeline: Timeline, row: Row) -> list[Newcomer]:
    """Return requests that reached the front end before the step's output, but the scheduler too late."""
    later = timeline.steps.filter(pl.col("step") > row["step"]).head(1).to_dicts()
    if not later or row["output_us"] is None:
        return []
    return [
        request
        for request in _arrived(timeline, later[0])
        if request.on_its_way_us is not None and request.queued_us - request.on_its_way_us <= row["output_us"]
    ]


def _since_last(timeline: Timeline, row: Row, frame: pl.DataFrame, time: str) -> pl.DataFrame:
    """Return events of this step's line, or between the starts of the step before and of this step."""
    before = timeline.steps.filter(pl.col("step") < row["step"])["start_us"].max()
    after = pl.lit(value=True) if before is None else pl.col(time) > before
    between = pl.col("step").is_null() & after & (pl.col(time) <= row["start_us"])
    return frame.filter((pl.col("step") == row["step"]) | between).sort(time, maintain_order=True)


def _scheduled(timeline: Timeline, number: int) -> list[Scheduled]:
    """Return the tokens of each scheduled request, and what made its chunk smaller."""
    caps: dict[str, list[Row]] = {}
    for cap in timeline.caps.filter(pl.col("step") == number).to_dicts():
        caps.setdefault(cap["request_id"], []).append(cap)
    rows = with_work(timeline, timeline.requests_in(number)).to_dicts()
    own = set(Scheduled.__struct_fields__) - {"wanted_tokens", "caps"}
    return [
        Scheduled(
            **{name: row[name] for name in own},
            wanted_tokens=caps[row["request_id"]][0]["wanted_tokens"] if row["request_id"] in caps else None,
            caps=[cap["cap"] for cap in caps.get(row["request_id"], [])],
        )
        for row in rows
    ]


def _waiters(timeline: Timeline, queue: pl.DataFrame, row: Row) -> list[Waiter]:
    """Return the requests of ``queue`` that waited after the step, with their waiting time when it ended."""
    since = since_us(timeline, timeline.request_states, row["end_us"], queue["request_id"])
    rows = queue.join(since, on="request_id", how="left", maintain_order="left").with_columns(
        waited_ms=(row["end_us"] - pl.col("since_us")) / 1e3
    )
    return [Waiter(**request) for request in rows.select(*Waiter.__struct_fields__).to_dicts()]


def _assumptions(timeline: Timeline, answers: list[WhatIf], waiting: list[Waiter]) -> list[Message]:
    named = {request_id for answer in answers for request_id in answer.request_ids}
    admitted = named & {request.request_id for request in waiting}
    hits = [NO_CACHE_HITS] if admitted and timeline.header.enable_prefix_caching else []
    return [THIS_STEP_ALONE, *hits] if answers else []
