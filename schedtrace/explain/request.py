"""History of a request: its events in order, its states, and the time between its outputs.

Everything is derived from the request's rows in the trace (``RequestRows``). ``explain_request`` is the entry
point; ``find_request`` finds the request that a user's text names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import SimpleNamespace

import msgspec
import polars as pl

from schedtrace.errors import UsageError
from schedtrace.explain.step import MISSES, Row, ending, fact_entries, preempted_for
from schedtrace.model.causes import interruption
from schedtrace.model.message import NOTHING, Count, Duration, Message, Number, Request, joined
from schedtrace.model.printable import capped, hashed, kept_prefix, visible
from schedtrace.model.say import say
from schedtrace.model.story import MOST_GAPS, Gap, Life, LifeEvent, LifeState
from schedtrace.model.trace_facts import Fact
from schedtrace.read.run import Run
from schedtrace.read.trace import Trace
from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.frames import offset
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.timeline import Timeline, make_timeline

_TIMES = ("arrived_us", "queued_us", "scheduled_us", "first_token_us", "last_token_us", "finished_us")
"""Fields of a finish that are times."""


@dataclass(frozen=True)
class RequestRows:
    """Rows of a request; times are in microseconds of the trace's clock."""

    timeline: Timeline
    request_id: str
    arrival: Row | None
    present: Row | None
    """State when the trace began; None if the request arrived later, or at an unknown time."""
    finish: Row | None
    scheduled: list[Row]
    """Rows of the steps that scheduled the request, with ``work``, ``lost_tokens``, ``start_us``,
    ``output_us`` and ``outputs`` (whether the step produced a token, because no other tokens were left to
    compute)."""
    preemptions: list[Row]
    """Preemptions of the request, with ``start_us`` of their steps."""
    set_aside: list[Row]
    """Steps that set the request aside, with their ``start_us``."""
    states: list[Row]
    """The request's ``interrupted_states``, in order of time, with the engine's time in each."""
    caps: dict[int, list[str]]
    """Limits that made the request's chunk smaller, by step."""

    @property
    def begin_us(self) -> int:
        """Arrival at the front end in microseconds or, if not recorded, the first recorded time."""
        arrival, gone = self.arrival or self.present or {}, self.finish or {}
        times = [arrival.get("arrived_us"), arrival.get("queued_us"), *(gone.get(name) for name in _TIMES)]
        times += [row["start_us"] for row in (*self.scheduled, *self.preemptions)]
        return min(
            [int(us) for us in times if us is not None] + [int(row["begin_us"]) for row in self.states[:1]]
        )

    @property
    def end_us(self) -> int | None:
        """Time at which the request left the scheduler; None if it did not leave."""
        if self.finish is None:
            return None
        return max([int(self.finish["finished_us"]), *(int(row["end_us"]) for row in self.states[-1:])])

    @property
    def first_token_us(self) -> int | None:
        """Time at which the output with the request's first token came back."""
        recorded = self.finish["first_token_us"] if self.finish else None
        # Otherwise it may have got tokens in steps that are missing.
        seen = self.scheduled if self.scheduled and self.scheduled[0]["phase"] == "new" else []
        outputs = (row["output_us"] for row in seen if row["outputs"])
        return recorded if recorded is not None else next(outputs, None)

    def life_states(self) -> list[LifeState]:
        """Return the request's states, with times in milliseconds since the request's arrival."""
        states = []
        if self.present is not None and self.present["at_us"] > self.begin_us:
            unrecorded = LifeState(
                state="unrecorded",
                cause=None,
                from_ms=0.0,
                to_ms=self.since_us(self.present["at_us"]),
                first_step=None,
                last_step=None,
                tokens=0,
                device_ms=0.0,
            )
            states.append(unrecorded)
        for row in self.states:
            tokens, first, last = row["tokens"], row["begin_step"], row["end_step"]
            if tokens is None:  # a part of a state
                inside = (own for own in self.scheduled if first is not None and first <= own["step"] <= last)
                tokens = sum(own["scheduled_tokens"] for own in inside)
            state = LifeState(
                state=row["state"],
                cause=row["cause"],
                from_ms=self.since_us(row["begin_us"]),
                to_ms=self.since_us(row["end_us"]),
                first_step=first,
                last_step=last,
                tokens=int(tokens),
                device_ms=row["device_us"] / 1e3,
                of_state=row["of_state"],
            )
            states.append(state)
        return states

    def since_us(self, us: int) -> float:
        """Return the time from the request's arrival to a time of the trace, in milliseconds."""
        return (us - self.begin_us) / 1e3

    def event(self, us: int, what: str, sentence: Message, step: int | None = None) -> LifeEvent:
        """Return an event at a time of the trace's clock."""
        return LifeEvent(at_ms=self.since_us(us), what=what, step=step, last_step=step, message=sentence)


def gather_rows(timeline: Timeline, request_id: str) -> RequestRows:
    """Gather a request's rows from a timeline of the whole trace."""
    its = pl.col("request_id") == request_id
    times = timeline.steps.select(pl.col("step").cast(pl.Int64), "start_us", "output_us")
    scheduled = timeline.with_work(timeline.requests_of(its).drop("start_us"))
    lost, prompt = pl.col("lost_tokens"), pl.col("prompt_tokens")
    tokens = pl.max_horizontal(
        prompt, pl.when(lost >= prompt).then(lost + 1)
    )  # one was sampled, not computed
    scheduled = scheduled.join(times, on="step", how="left", maintain_order="left").with_columns(
        outputs=pl.col("computed_tokens") + pl.col("scheduled_tokens") >= tokens
    )
    caps: dict[int, list[str]] = {}
    for cap in timeline.caps.filter(its).to_dicts():
        caps.setdefault(cap["step"], []).append(cap["cap"])
    arrivals = timeline.arrivals.filter(its & ~pl.col("streaming_update")).to_dicts()
    went = timeline.finishes.filter(its).with_columns(status=ending()).to_dicts()
    return RequestRows(
        timeline=timeline,
        request_id=request_id,
        arrival=arrivals[0] if arrivals else None,
        present=next(iter(timeline.present.filter(its).to_dicts()), None),
        finish=went[-1] if went else None,
        scheduled=scheduled.to_dicts(),
        preemptions=timeline.preemptions.filter(its).sort("step").to_dicts(),
        set_aside=timeline.set_aside.filter(its).join(times, on="step").sort("step").to_dicts(),
        states=with_engine_time(timeline.interrupted_states.filter(its), timeline.engine_states).to_dicts(),
        caps=caps,
    )


@dataclass(frozen=True)
class WaitedFor:
    """Cause of a part of a wait."""

    cause: str
    steps: int
    wait_ms: float
    interrupted: bool
    """Whether the cause is a kind of interruption, in which nothing refused the request."""


@dataclass(frozen=True)
class Wait:
    """Stay of a request in the waiting queue."""

    from_ms: float
    since_step: int | None
    """First step that refused the request; None if the first possible step scheduled it."""
    left_step: int | None
    """Step that scheduled the request; None if no step did."""
    wait_ms: float
    before_step_ms: float
    """Part of the wait until the first step that could schedule the request."""
    causes: list[WaitedFor]
    """Causes of the remaining wait, the longest first."""


def queue_stays(states: list[LifeState]) -> list[Wait]:
    """Return each stay in the queue, even if the first possible step ended it."""
    queue_waits = []
    by_place = groupby(enumerate(states), key=lambda entry: (entry[1].of_state or entry[1].state) in QUEUED)
    for is_queued, group in by_place:
        places, stay = zip(*group, strict=True)
        if not is_queued:
            continue
        by_cause: dict[tuple[str | None, bool], list[LifeState]] = {}
        for state in stay:
            if state.cause != NEXT_STEP:
                by_cause.setdefault((state.cause, state.of_state is not None), []).append(state)
        causes = [
            WaitedFor(
                cause or "",
                sum(run.step_count for run in runs),
                sum(run.to_ms - run.from_ms for run in runs),
                interrupted,
            )
            for (cause, interrupted), runs in by_cause.items()
        ]
        refused = (state.first_step for state in stay if state.cause != NEXT_STEP)
        wait_ms = stay[-1].to_ms - stay[0].from_ms
        after = states[places[-1] + 1 :]
        queue_waits.append(
            Wait(
                from_ms=stay[0].from_ms,
                since_step=next((step for step in refused if step is not None), None),
                left_step=after[0].first_step if after else None,
                wait_ms=wait_ms,
                before_step_ms=wait_ms - sum(cause.wait_ms for cause in causes),
                causes=sorted(causes, key=lambda cause: -cause.wait_ms),
            )
        )
    return queue_waits


LEAST_FRAC = 0.01
"""Share of a request's time below which an interruption is not listed."""
SHORTEST_WAIT_MS = 0.05
"""Milliseconds below which a wait is not listed, because the next step scheduled the request."""


def life_events(rows: RequestRows, waited: list[Wait]) -> list[LifeEvent]:
    """Return all events from arrival to end; consecutive decodes form one event."""
    events = [
        *_arrival(rows),
        *request_facts(rows),
        *_computing(rows, waited),
        *_interruptions(rows, waited),
    ]
    if rows.finish is not None:
        sentence = say("{status:code} with {output_tokens:n output token}", SimpleNamespace(**rows.finish))
        events.append(rows.event(rows.finish["finished_us"], "finished", sentence))
    return sorted(events, key=lambda event: event.at_ms)


def _arrival(rows: RequestRows) -> Iterator[LifeEvent]:
    first = rows.arrival or rows.present
    if first is None:
        return
    most = first["max_tokens"]
    about = say(
        "{prompt_tokens:n prompt token}[, at most {most} to generate][, priority {priority:n}]"
        "[, LoRA {lora:code}]",
        SimpleNamespace(**first),
        most=None if most is None else Number(most),
    )
    if first["arrived_us"] is not None:
        yield rows.event(first["arrived_us"], "arrived", say("at the front end: {about}", about=about))
    if rows.arrival is None:
        sentence = say(
            "present when the recording began, {state}[, {computed_tokens:n token} computed]"
            "[, {output_tokens:n} generated][, {num_preemptions:n time} preempted]; "
            "what happened before is not known",
            SimpleNamespace(**first),
            state={"preempted": "waiting again"}.get(first["state"], first["state"]),
        )
        yield rows.event(first["at_us"], "present", sentence)
    elif first["arrived_us"] is not None:
        yield rows.event(first["queued_us"], "queued", say("in the scheduler's queue"))
    else:
        yield rows.event(first["queued_us"], "queued", say("in the scheduler's queue: {about}", about=about))


def _computing(rows: RequestRows, waited: list[Wait]) -> Iterator[LifeEvent]:
    """Yield admissions, chunks of prefill, the first token, and series of decodes."""
    waits = {wait.left_step: wait for wait in waited}
    first_token = rows.first_token_us
    if first_token is not None:
        step = next((row["step"] for row in rows.scheduled if row["output_us"] == first_token), None)
        yield rows.event(first_token, "first_token", say("first token back"), step)
    # Decodes in a row are one event, until the next preemption.
    by_work = groupby(rows.scheduled, key=lambda row: (row["work"] or "decode", row["lost_tokens"]))
    for (work, _), group in by_work:
        run = list(group)
        first = run[0]
        if first["phase"] != "running":
            again = first["phase"] == "resumed"
            sentence = _admitted(rows, waits.get(first["step"]), again=again)
            yield rows.event(first["start_us"], "resumed" if again else "scheduled", sentence, first["step"])
        if work == "decode":
            yield _decodes(rows, run)
        else:
            for row in run:
                yield rows.event(row["start_us"], "chunk", _chunk(rows, row), row["step"])


def _chunk(rows: RequestRows, row: Row) -> Message:
    start, end = row["computed_tokens"], row["computed_tokens"] + row["scheduled_tokens"]
    lost, caps = row["lost_tokens"], rows.caps.get(row["step"], [])
    work = row["work"] or "computation"
    described = say("{work} of {tokens:n token}", work=work, tokens=row["scheduled_tokens"])
    if work == "recompute" and end > lost and lost < (row["prompt_tokens"] or 0):
        described = say(
            "recompute of {again:n} and prefill of {tokens:n token}", again=lost - start, tokens=end - lost
        )
    return say(
        "{work}, to {end:n} of {whole:n}[, {cached:n} found in a cache][, cut by {caps}]",
        work=described,
        end=end,
        whole=max(row["prompt_tokens"] or 0, lost, end),
        cached=start if row["phase"] != "running" else 0,
        caps=joined([say("{cap:cause}", cap=cap) for cap in caps], ", "),
    )


def _decodes(rows: RequestRows, run: list[Row]) -> LifeEvent:
    first, last = run[0], run[-1]
    drafts = sum(row["draft_tokens"] for row in run)
    steps = rows.timeline.steps.filter(
        (pl.col("step") >= first["step"]) & (pl.col("step") <= last["step"]) & (pl.col("total_requests") > 0)
    ).height
    causes = NOTHING
    if steps > len(run):  # the running loop skipped the request
        skips = rows.timeline.exits.filter(
            (pl.col("request_id") == rows.request_id)
            & (pl.col("loop") == "running")
            & pl.col("step").is_between(first["step"], last["step"])
        ).unique(["step", "cause"])
        counts = skips.group_by("cause").len().sort("len", "cause", descending=[True, False])
        causes = joined(
            [say("{count:n} {cause:cause}", cause=cause, count=count) for cause, count in counts.iter_rows()],
            ", ",
        )
    sentence = say(
        "decoded in {steps:n step}, {tokens:n token} scheduled[, {drafts:n} of them drafts]"
        "[; {without:n step} between went without it][ ({causes})]",
        steps=len(run),
        tokens=sum(row["scheduled_tokens"] for row in run),
        drafts=drafts,
        without=max(0, steps - len(run)),
        causes=causes,
    )
    event = rows.event(first["start_us"], "decode", sentence, first["step"])
    return msgspec.structs.replace(event, last_step=last["step"])


def _admitted(rows: RequestRows, wait: Wait | None, *, again: bool) -> Message:
    begun = rows.present is not None and wait and wait.from_ms == rows.since_us(rows.present["at_us"])
    waited = wait if wait and (wait.wait_ms >= SHORTEST_WAIT_MS or begun) else None
    return say(
        "scheduled [again {again:?}][at once{waited:!}][after {waited:ms} in the queue][ since the recording "
        "began{begun:?}][: {causes}]",
        again=again,
        begun=bool(begun),
        waited=waited.wait_ms if waited else None,
        causes=_causes_of(waited) if waited else NOTHING,
    )


def _causes_of(wait: Wait) -> Message:
    """Describe a wait's causes, as ``3 steps kv_blocks (9 ms)``; empty if it has none."""
    if not wait.causes:
        return NOTHING
    parts = [
        say("{what} ({wait_ms:ms})", cause, what=interruption(cause.cause))
        if cause.interrupted
        else say("{steps:n step} {cause:cause} ({wait_ms:ms})", cause)
        for cause in wait.causes
    ]
    if wait.before_step_ms >= SHORTEST_WAIT_MS:
        parts.append(say("{before_step_ms:ms} until a step began", wait))
    return joined(parts, ", ")


def _interruptions(rows: RequestRows, waited: list[Wait]) -> Iterator[LifeEvent]:
    """Yield preemptions, steps that set the request aside, interruptions, and waits that never ended."""
    for row in rows.preemptions:
        sentence = say(
            "preempted {reason}: {lost:n computed token} lost",
            reason=preempted_for(row, Request(row["for_request_id"] or "")),
            lost=row["lost_tokens"],
        )
        yield rows.event(row["start_us"], "preempted", sentence, row["step"])
    for row in rows.set_aside:
        held = row["blocks_held"]
        sentence = say(
            "set aside by its scheduler[: it keeps {held}]",
            held=None if held is None else Count(held, "KV block"),
        )
        yield rows.event(row["start_us"], "set_aside", sentence, row["step"])
    whole = sum(row["end_us"] - row["begin_us"] for row in rows.states)
    for row in rows.states:
        took = row["end_us"] - row["begin_us"]
        # Interruptions of a wait are among its causes.
        if row["of_state"] is None or row["of_state"] in QUEUED or took < LEAST_FRAC * whole:
            continue
        sentence = say("{what} for {took:us}", what=interruption(row["cause"]), took=took)
        yield rows.event(row["begin_us"], "interrupted", sentence)
    for wait in waited:
        # The request was aborted meanwhile, or the trace ends.
        if wait.left_step is None and wait.causes:
            sentence = say(
                "waited {wait_ms:ms} and was not scheduled[: {causes}]", wait, causes=_causes_of(wait)
            )
            yield rows.event(rows.begin_us + round(1e3 * wait.from_ms), "waited", sentence, wait.since_step)


def request_facts(rows: RequestRows) -> Iterator[LifeEvent]:
    """Yield events for the recorded facts about the request, as far as the trace has them."""
    its = pl.col("request_id") == rows.request_id
    arrival = rows.arrival
    if arrival is not None and arrival["received_us"] is not None and arrival["input_queue_us"] is not None:
        sentence = say(
            "received by the engine: {prepared:us} to prepare, {lay:us} in its input queue",
            prepared=arrival["input_queue_us"] - arrival["received_us"],
            lay=max(0, arrival["queued_us"] - arrival["input_queue_us"]),
        )
        yield rows.event(arrival["received_us"], "received", sentence)
    first = arrival or rows.present
    if first is not None and (features := list(_features(first))):
        at_us = first["queued_us"] if arrival is not None else first["at_us"]
        yield rows.event(at_us, "asked", say("asks for {features}", features=joined(features, ", ")))
    for grammar in fact_entries(rows.timeline, "grammars", its):
        submitted_us, started_us = grammar["submitted_us"], grammar["started_us"]
        sentence = say(
            "its grammar {outcome} in {took:us}[, after {waited} of waiting for a thread]",
            outcome="failed to compile" if grammar["failed"] else "was compiled",
            took=grammar["compiled_us"] - started_us,
            waited=None if submitted_us is None else Duration(max(0, started_us - submitted_us)),
        )
        yield rows.event(grammar["compiled_us"], "grammar", sentence)
    for load in fact_entries(rows.timeline, "kv_loads", its):
        held = Count(sum(load["blocks"]), "KV block") if load["blocks"] else None
        sentence = say("KV load from elsewhere {event}[, holding {held}]", event=load["event"], held=held)
        yield rows.event(load["at_us"], "kv_load", sentence)
    for send in rows.timeline.kv_sends.filter(its).to_dicts():
        held = Count(sum(send["blocks"]), "KV block") if send["blocks"] else None
        sentence = say("KV transfer to elsewhere {event}[, holding {held}]", event=send["event"], held=held)
        yield rows.event(send["at_us"], "kv_send", sentence)
    for admitted in fact_entries(rows.timeline, "admitted", its):
        if sentence := _cached(admitted):
            yield rows.event(admitted["start_us"], "cached", sentence, admitted["step"])
    gone = rows.finish
    if gone is not None and gone["abort_us"] is not None:
        yield rows.event(gone["abort_us"], "abort", say("its client's abort reached the engine"))
    if gone is not None and gone["drafts"]:
        sentence = say(
            "{drafts_accepted:n} of {drafts:n draft token} accepted"
            "[, {drafts_invalid:n} forbidden by the grammar]",
            SimpleNamespace(**gone),
        )
        yield rows.event(gone["finished_us"], "drafts", sentence)


def _features(arrival: Row) -> Iterator[Message]:
    if arrival["structured"]:
        yield say("structured output")
    for column, where in (("logprobs", "output"), ("prompt_logprobs", "prompt")):
        if arrival[column] is not None:
            yield say("{count:n} logprobs per {where} token", count=arrival[column], where=where)
    if arrival["min_tokens"]:
        yield say("at least {tokens:n token}", tokens=arrival["min_tokens"])
    if arrival["logit_bias"]:
        yield say("a bias on {tokens:n token}", tokens=arrival["logit_bias"])


def _cached(admitted: Row) -> Message:
    """Describe the cache hits at admission, unless the chunk's event already states them."""
    return say(
        "[found nothing in the prefix cache: {reason}][found {external_tokens:n token} through a KV connector"
        "[, {local_tokens:n} in the prefix cache]{reason:!}]",
        SimpleNamespace(**admitted),
        reason=MISSES.get(admitted["miss"]),
    )


MOST_LISTED = 8


def find_request(run: Run, text: str) -> tuple[Trace, str]:
    """Return the trace that contains the request, and the request's whole id.

    The first of these rules that matches an id decides:

    1. it equals ``text``: as it is, as it is printed, or as the trace writes it (cut or hashed);
    2. it begins or ends with ``text`` at a dash (``t1-1`` matches ``t1-1-99fdf569``, not ``t1-12-...``);
    3. it begins or ends with ``text``;
    4. it is cut, and ``text`` has the same beginning. (vLLM appends to a client's id, so the hash differs.)

    Raises:
        UsageError: If no request matches, or several do.
    """
    ids: dict[str, Trace] = {}
    for trace in run.traces:
        scheduled = trace.stretches().select("request_id").unique(maintain_order=True).collect()
        frames = [frame.select("request_id") for frame in (trace.present, trace.arrivals, trace.finishes)]
        ids |= dict.fromkeys(pl.concat([*frames, scheduled])["request_id"].unique(maintain_order=True), trace)
    written = {hashed(text) if trace.header.hashed_ids else capped(text) for trace in run.traces}
    rules: list[Callable[[str], bool]] = [
        lambda whole: text in {whole, visible(whole)} or whole in written,
        lambda whole: any(
            name.startswith(f"{text}-") or name.endswith(f"-{text}") for name in {whole, visible(whole)}
        ),
        lambda whole: any(name.startswith(text) or name.endswith(text) for name in {whole, visible(whole)}),
        lambda whole: (prefix := kept_prefix(whole)) is not None and text.startswith(prefix),
    ]
    for matches in rules:
        matching = [whole for whole in ids if text and matches(whole)]
        if len(matching) == 1:
            return ids[matching[0]], matching[0]
        if matching:
            more = f" and {len(matching) - MOST_LISTED} more" if len(matching) > MOST_LISTED else ""
            listed = ", ".join(matching[:MOST_LISTED])
            msg = f"request {capped(text)}: {len(matching)} requests match: {listed}{more}"
            raise UsageError(msg)
    listed = f"such as {', '.join(list(ids)[:3])}" if ids else "none at all"
    msg = f"request {capped(text)}: no request of {run.path} matches; it has {len(ids):,} requests, {listed}"
    raise UsageError(msg)


def explain_request(run: Run, text: str) -> Life:
    """Return the history of the request that ``text`` names.

    Args:
        run: A run.
        text: Id of the request, or its beginning or end.

    Raises:
        UsageError: If no request matches, or several do, or the record lacks facts.
    """
    for trace in run.traces:
        for fact in (Fact.REQUESTS, Fact.TIMES):
            trace.require(fact, "request")
    trace, request_id = find_request(run, text)
    return request_life(run, make_timeline(trace, run.manifest, whole=True), request_id)


def request_life(run: Run, timeline: Timeline, request_id: str) -> Life:
    """Return the history of the request with this id, from a timeline of the whole trace.

    The timeline may be reused for several requests.
    """
    rows = gather_rows(timeline, request_id)
    states, gaps = rows.life_states(), _gaps(rows)
    arrival, gone = rows.arrival or rows.present or {}, rows.finish or {}
    first_token = rows.first_token_us
    return Life(
        path=str(run.path),
        label=run.label,
        engine_rank=timeline.rank,
        request_id=request_id,
        trial=arrival.get("trial"),
        into_recording_ms=(rows.begin_us + offset(timeline.header, run.traces.headers[0]).us) / 1e3,
        prompt_tokens=arrival.get("prompt_tokens", gone.get("prompt_tokens")),
        max_tokens=arrival.get("max_tokens"),
        output_tokens=gone.get("output_tokens"),
        cached_tokens=next((row["computed_tokens"] for row in rows.scheduled if row["phase"] == "new"), None),
        num_preemptions=sum(preemption["in_schedule"] for preemption in rows.preemptions),
        num_cache_resets=sum(not preemption["in_schedule"] for preemption in rows.preemptions),
        status=gone.get("status"),
        e2e_ms=None if rows.end_us is None else rows.since_us(rows.end_us),
        ttft_ms=None if first_token is None else rows.since_us(first_token),
        states=states,
        events=life_events(rows, queue_stays(states)),
        outputs=len(gaps) + 1 if first_token is not None or (rows.present and gaps) else 0,
        mean_gap_ms=sum(gap.gap_ms for gap in gaps) / len(gaps) if gaps else None,
        gaps=sorted(gaps, key=lambda gap: -gap.gap_ms)[:MOST_GAPS],
        problems=timeline.missing,
    )


def _gaps(rows: RequestRows) -> list[Gap]:
    """Return the times between consecutive outputs."""
    back = [row for row in rows.scheduled if row["outputs"] and row["output_us"] is not None]
    return [
        Gap(
            step=after["step"],
            gap_ms=(after["output_us"] - before["output_us"]) / 1e3,
            preempted=any(before["step"] <= lost["step"] <= after["step"] for lost in rows.preemptions),
        )
        for before, after in pairwise(back)
    ]
