"""Explanation of a step: arrivals, requests' tokens, refusals and causes, and what else would have fitted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import polars as pl

from schedtrace.errors import UsageError
from schedtrace.explain.would_fit import known_need, what_if
from schedtrace.model.causes import interruption, reason
from schedtrace.model.message import (
    NOTHING,
    Count,
    Duration,
    Message,
    Number,
    Request,
    Requests,
    Value,
    joined,
)
from schedtrace.model.say import say
from schedtrace.model.story import (
    Leaver,
    Newcomer,
    RankTurn,
    Scheduled,
    StepStory,
    Stop,
    Victim,
    Waiter,
)
from schedtrace.model.trace import Header
from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.events import HUNG, STALLED
from schedtrace.timeline.frames import offset
from schedtrace.timeline.passes import PASS
from schedtrace.timeline.queue_waits import AdmissionNeed, waiting_after
from schedtrace.timeline.request_states import waiting_since
from schedtrace.timeline.timeline import Timeline, make_timeline

THIS_STEP_ALONE = say("this holds for this step alone: the change would alter later steps, too")
NO_CACHE_HITS = say(
    "a waiting prompt with prefix cache hits would have needed less; the trace does not record these hits"
)
LISTS = {"arrived", "finished", "preempted"}
"""Columns of a step that its story describes in another form."""

Row = dict[str, Any]


def rank_turns(traces: Sequence[Trace], row: Row) -> list[RankTurn]:
    """Return each rank's work in the pass that contains a step, in the order of the ranks.

    The list is empty for a single rank, or if the step belongs to no common pass.

    Args:
        traces: Traces of all ranks.
        row: A step of one of these traces.
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
    """Return a rank's turn, on the first rank's clock, with the time at which the rank began the step."""
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
        number: Number of the step.
        engine: Data-parallel rank.

    Raises:
        UsageError: If there is no such step or engine, or the record lacks facts.
    """
    by_rank = {trace.header.engine_rank: trace for trace in run.traces}
    if engine not in by_rank:
        msg = f"--engine {engine}: {run.path} has engine {', '.join(map(str, by_rank))}"
        raise UsageError(msg)
    trace = by_rank[engine]
    trace.require(Fact.TIMES, "step")
    return StepStories(run, make_timeline(trace, run.manifest, whole=True)).story(number)


@dataclass
class StepStories:
    """Stories of an engine's steps; data that they share is computed once."""

    run: Run
    timeline: Timeline
    """Timeline of the whole trace."""

    @cached_property
    def _need(self) -> AdmissionNeed | None:
        return known_need(self.timeline)

    @cached_property
    def _wrong(self) -> frozenset[int]:
        """Steps whose reconstructed queue contradicts the recorded length."""
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
        admitted = {request_id for answer in answers for request_id in answer.request_ids}
        assumptions = [THIS_STEP_ALONE]
        if timeline.header.enable_prefix_caching and not admitted.isdisjoint(
            request.request_id for request in waiting
        ):
            assumptions.append(NO_CACHE_HITS)
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
            what_if_assumes=assumptions if answers else [],
            facts=[*_refusals(timeline, row), *_hits(timeline, row), *_step_columns(row)],
            ranks=rank_turns(run.traces, row),
            problems=timeline.missing,
        )


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
    """Return the requests that reached the scheduler between the previous step and this one."""
    arrivals = _since_last(timeline, row, timeline.new_requests, "queued_us")
    on_its_way = (pl.col("queued_us") - pl.col("arrived_us")).alias("on_its_way_us")
    columns = ["request_id", "prompt_tokens", "max_tokens", "queued_us"]
    return [Newcomer(**request) for request in arrivals.select(*columns, on_its_way).to_dicts()]


def _finished(timeline: Timeline, row: Row) -> list[Leaver]:
    """Return the requests that left the scheduler between the previous step and this one."""
    gone = _since_last(timeline, row, timeline.finishes, "finished_us")
    rows = gone.with_columns(status=ending()).select(*Leaver.__struct_fields__)
    return [Leaver(**request) for request in rows.to_dicts()]


def _interruptions(timeline: Timeline, row: Row) -> list[Message]:
    """Return the interruptions between the start of the previous step and the start of the next step."""
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
        if own and not (event["kind"] in {HUNG, STALLED} and event["begin_us"] >= row["end_us"]):
            where = "before it" if event["end_us"] <= row["start_us"] else "in it"
        elif not own and event["begin_us"] < row["start_us"]:
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
    """Return the requests that arrived before the step's output, but too late to be scheduled in the step."""
    later = timeline.steps.filter(pl.col("step") > row["step"]).head(1).to_dicts()
    if not later or row["output_us"] is None:
        return []
    return [
        request
        for request in _arrived(timeline, later[0])
        if request.on_its_way_us is not None and request.queued_us - request.on_its_way_us <= row["output_us"]
    ]


def _since_last(timeline: Timeline, row: Row, frame: pl.DataFrame, time: str) -> pl.DataFrame:
    """Return a step's events: those in its line, or those since the previous step's start."""
    before = timeline.steps.filter(pl.col("step") < row["step"])["start_us"].max()
    after = pl.lit(value=True) if before is None else pl.col(time) > before
    between = pl.col("step").is_null() & after & (pl.col(time) <= row["start_us"])
    return frame.filter((pl.col("step") == row["step"]) | between).sort(time, maintain_order=True)


def _scheduled(timeline: Timeline, number: int) -> list[Scheduled]:
    """Return each scheduled request with its tokens and the limits that made its chunk smaller."""
    caps: dict[str, list[Row]] = {}
    for cap in timeline.caps.filter(pl.col("step") == number).to_dicts():
        caps.setdefault(cap["request_id"], []).append(cap)
    rows = timeline.with_work(timeline.requests_in(number)).to_dicts()
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
    """Return the requests of ``queue`` that waited after the step, with their waiting time at its end."""
    since = waiting_since(timeline, timeline.request_states, row["end_us"], queue["request_id"])
    rows = queue.join(since, on="request_id", how="left", maintain_order="left").with_columns(
        waited_ms=(row["end_us"] - pl.col("since_us")) / 1e3
    )
    return [Waiter(**request) for request in rows.select(*Waiter.__struct_fields__).to_dicts()]


_ACTIONS = {"gate": "was not entered", "continue": "skipped a request"}
"""Description of each kind of exit; any other exit ended its loop."""
SAME_STOP = ("loop", "kind", "cause", "detail", "location", "guard", "via")

Values = dict[str, Value]


def step_stops(timeline: Timeline, number: int) -> list[Stop]:
    """Return a step's exits in order; consecutive exits of the same kind are one entry."""
    rows = stop_rows(timeline.exits.filter(pl.col("step") == number)).to_dicts()
    own = set(Stop.__struct_fields__) - {"message"}
    return [
        Stop(
            **{name: row[name] for name in own}, message=stop_message(timeline.header, row, stop_values(row))
        )
        for row in rows
    ]


def stop_rows(exits: pl.DataFrame) -> pl.DataFrame:
    """Merge consecutive exits of the same kind, with the columns of ``Stop``, ``step`` and ``guard``.

    Args:
        exits: Rows of ``timeline.exits``, in their order.
    """
    named = pl.col("request_id").filter(pl.col("request_id").is_not_null() & (pl.col("request_id") != ""))
    return (
        exits.group_by(pl.struct("step", *SAME_STOP).rle_id().alias("run"), maintain_order=True)
        .agg(
            pl.col("step", *SAME_STOP, "budget_left", "blocks_needed", "blocks_free").first(),
            pl.col("count").sum(),
            values=pl.when(pl.col("values").n_unique() == 1).then(pl.col("values").first()),
            request_ids=named.unique(maintain_order=True),
        )
        .drop("run")
    )


def stop_values(row: Row) -> Values:
    """Return the values in which exits of the same kind may differ, from a row of ``stop_rows``."""
    return {
        "requests": Requests(row["request_ids"], row["count"]),
        "needed": Count(row["blocks_needed"] or 0, "block"),
        "free": Number(row["blocks_free"]),
        "left": Count(row["budget_left"], "token"),
    }


def stop_message(header: Header, row: Row, values: Values) -> Message:
    """Return a sentence about one exit, or about several equal exits.

    Args:
        header: Header of the trace.
        row: Row of ``stop_rows``; it determines the sentence.
        values: ``stop_values`` of a row, or placeholders for them.
    """
    skips, named = row["kind"] == "continue", bool(row["request_ids"])
    counted = skips and (named or row["count"] > 1)
    return say(
        "The {loop} loop {action}[ {requests}{counted:?}][ at {location:code}][ (inferred){inferred:?}]: "
        "{reason}[ ({needed} needed, {free} free){lacked:?}][ ({guard:code}[, where {compared:code}])]; "
        "[{requests} next in line, {waited:?}][at {requests}, {ran:?}]{left} of budget left.",
        SimpleNamespace(**row),
        action="skipped" if counted else _ACTIONS.get(row["kind"], "ended"),
        counted=counted,
        inferred=row["via"] == "inferred",
        reason=reason(header, loop=row["loop"], cause=row["cause"], detail=row["detail"]),
        lacked=row["blocks_needed"] is not None and row["blocks_free"] is not None,
        compared=row["values"],
        waited=named and not skips and row["loop"] == "waiting",
        ran=named and not skips and row["loop"] != "waiting",
        **values,
    )


def victims(timeline: Timeline, number: int) -> list[Victim]:
    """Return the requests that lost their KV blocks in a step."""
    own = set(Victim.__struct_fields__) - {"message"}
    lost = timeline.preemptions.filter(pl.col("step") == number).to_dicts()
    return [
        Victim(**{name: row[name] for name in own}, message=preemption_message(row, victim_values(row)))
        for row in lost
    ]


def victim_values(row: Row) -> Values:
    """Return the values in which preemptions may differ, from a row of ``timeline.preemptions``."""
    return {
        "victim": Request(row["request_id"]),
        "for": Request(row["for_request_id"] or ""),
        "lost": Count(row["lost_tokens"], "computed token"),
        "needed": Count(row["blocks_needed"] or 0, "more KV block"),
        "freed": Count(row["blocks_freed"] or 0, "block"),
        "times": Number(row["num_preemptions"]),
    }


def preemption_message(row: Row, values: Values) -> Message:
    """Return a sentence about a preemption.

    Args:
        row: Row of ``timeline.preemptions``; it determines the sentence.
        values: ``victim_values`` of a row, or placeholders for them.
    """
    return say(
        "vLLM preempted {victim} {reason}[, which needed {needed}{asked:?}]: {victim} lost {lost}"
        "[ and freed {freed} at once{gave:?}][ (preempted {times} times so far){again:?}].",
        SimpleNamespace(**values),
        reason=preempted_for(row, values["for"]),
        asked=row["blocks_needed"] is not None and row["for_request_id"] != row["request_id"],
        gave=row["blocks_freed"] is not None,
        again=(row["num_preemptions"] or 0) > 1,
    )


def preempted_for(row: Row, request: Value) -> Message:
    """Return why, or for which request, a preemption happened (a row of ``timeline.preemptions``)."""
    if not row["in_schedule"]:
        return say("outside schedule(), in a reset of the prefix cache")
    if row["for_request_id"] == row["request_id"]:
        return say("because it needed blocks itself and no other request was left to preempt")
    if row["for_request_id"]:
        return say("for {request}", request=request)
    return say("for a request that is not recorded")


def ending() -> pl.Expr:
    """Return an expression for how a request ended; unrequested aborts are the scheduler's own."""
    by_scheduler = pl.col("in_schedule") & pl.col("abort_us").is_null()
    return pl.when(by_scheduler).then(pl.col("status") + " by the scheduler").otherwise("status")


MOST_NAMED = 5
MISSES = {
    "skipped": "vLLM does not look up such a request",
    "short": "no longer than one block",
    "not_cached": "no other request has the first block",
    "other_group": "only some cache groups have the first block",
}
"""Reasons why a look-up in the prefix cache found nothing; ``unknown`` is not among them."""


def fact_entries(timeline: Timeline, name: str, which: pl.Expr) -> list[Row]:
    """Return the entries of one of the trace's lists of facts that meet the condition ``which``."""
    table = timeline.lists.get(name)
    return [] if table is None else table.filter(which).collect().to_dicts()


def _refusals(timeline: Timeline, row: Row) -> Iterator[Message]:
    for refusal in fact_entries(timeline, "refusals", pl.col("step") == row["step"]):
        by_group, free = refusal["blocks_needed"], refusal["blocks_free"]
        if (needed := sum(by_group)) and free is not None:
            kinds = [group.kind for group in timeline.header.cache_groups]
            groups = NOTHING
            if len(kinds) == len(by_group) > 1:
                pairs = zip(kinds, by_group, strict=True)
                groups = joined(
                    [say("{kind:code} {blocks:n}", kind=kind, blocks=blocks) for kind, blocks in pairs], ", "
                )
            yield say(
                "{request_id:id} needs {needed:n KV block}[ ({groups})], {blocks_free:n} free.",
                SimpleNamespace(**refusal),
                needed=needed,
                groups=groups,
            )
        yield from _holders(timeline, refusal)


def _holders(timeline: Timeline, refusal: Row) -> Iterator[Message]:
    """Yield a sentence that names the holders of KV blocks, the largest first."""
    held = [sum(blocks) for blocks in zip(*(group for group in refusal["held"] if group), strict=True)]
    if not held:
        return
    finished = set(refusal["finished_holders"])
    named = [
        say(
            "{holder:id} {blocks:n}[ (finished){done:?}]",
            holder=holder,
            blocks=blocks,
            done=holder in finished,
        )
        for holder, blocks in list(zip(refusal["holders"], held, strict=True))[:MOST_NAMED]
    ]
    if unnamed := refusal["other_holders"] + len(held[MOST_NAMED:]):
        rest = sum(refusal["other_held"]) + sum(held[MOST_NAMED:])
        named.append(say("{others:n more request} {rest:n}", others=unnamed, rest=rest))
    holders = len(held) + refusal["other_holders"]
    yield say(
        "{holders:n request} {hold} {blocks:n block}[ (shared blocks count for each){shared:?}]: {named}.",
        holders=holders,
        hold="holds" if holders == 1 else "hold",
        blocks=sum(held) + sum(refusal["other_held"]),
        shared=timeline.header.enable_prefix_caching,
        named=joined(named, ", "),
    )


def _hits(timeline: Timeline, row: Row) -> Iterator[Message]:
    admitted = fact_entries(timeline, "admitted", pl.col("step") == row["step"])
    local = sum(request["local_tokens"] or 0 for request in admitted)
    external = sum(request["external_tokens"] or 0 for request in admitted)
    if local or external:
        yield say(
            "New requests found {local:n token} in the prefix cache[, a KV connector brought {external:n}].",
            local=local,
            external=external,
        )
    for miss, why in MISSES.items():
        missed = sum(request["miss"] == miss for request in admitted)
        if missed:
            yield say(
                "{requests:n new request} found nothing in the prefix cache: {reason}.",
                requests=missed,
                reason=why,
            )


_OF_COLUMNS = (
    "[The worker began to execute it {execute_after} after the step began and took {execute}.]",
    "[{finished_holding:n finished request} kept KV blocks, for a transfer or a batch in flight.]",
    "[{deferred_free_blocks:n KV block} cannot be freed until a batch in flight is back.]",
    "[{kv_loads_parked:n request} waited for KV blocks from elsewhere.]",
    "[{sessions_paused:n streaming session} waited for input.]",
    "[The encoder cache had room for {encoder_free}, {encoder_freeable} with those that no request uses.]",
    "[This rank ran {dummy_batches:n dummy batch/dummy batches} before it, {dummy_us:us} in total.]",
    "[Wave {wave} of the data-parallel ranks, pass {counter}.]",
)
"""Sentences for columns of a step; empty if a column is unknown, or a count is 0."""
_COUNTS = (
    *("finished_holding", "deferred_free_blocks", "kv_loads_parked", "sessions_paused"),
    *("dummy_batches", "dummy_us"),
)


def _step_columns(row: Row) -> Iterator[Message]:
    def known(column: str, kind: Callable[[Any], Value]) -> Value | None:
        return None if row.get(column) is None else kind(row[column])

    columns = SimpleNamespace(
        **{column: row.get(column) for column in _COUNTS},
        execute_after=known("execute_after_us", Duration),
        execute=known("execute_us", Duration),
        encoder_free=known("encoder_slots_free", lambda free: Count(free, "embedding")),
        encoder_freeable=known("encoder_slots_freeable", Number),
        wave=known("wave", Number),
        counter=Number(row.get("step_counter")),
    )
    yield from filter(None, (say(template, columns) for template in _OF_COLUMNS))
