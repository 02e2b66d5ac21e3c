"""``front-end``: requests spend much of the time to first token on their way to the engine."""

import msgspec
import polars as pl

from schedtrace.diagnose.rule import Findings, Rule
from schedtrace.diagnose.rules.common import (
    advise,
    severity_by_weight,
    share_of_requests,
    step_finding,
)
from schedtrace.model.manifest import OFFLINE_CONTEXT
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.report import Advice, Evidence
from schedtrace.model.say import say
from schedtrace.model.trace_facts import Fact
from schedtrace.timeline.engine_states import with_engine_time
from schedtrace.timeline.spans import LENGTH_US, total_us, united
from schedtrace.timeline.timeline import Timeline

FEWER_INPUTS = (
    "Send fewer or smaller images and other inputs, or their embeddings: vLLM's front end prepares them "
    "before a request reaches the engine."
)


def is_offline(timeline: Timeline) -> bool:
    """Return whether ``LLM(...)`` passes on whole batches, for which throughput counts and not TTFT."""
    configured = timeline.front_end.configured if timeline.front_end else None
    return timeline.closed_workload or (
        configured is not None and configured.usage_context == OFFLINE_CONTEXT
    )


def ways_to_engine(timeline: Timeline) -> pl.DataFrame:
    """Return a row per request whose arrival at the front end and first token are recorded.

    Columns, in microseconds:

    * ``request_id``, ``trial``, ``begin_us``: the request's arrival at the front end,
    * ``end_us``: when the request had been prepared for the engine or, if that is not recorded, the earliest
      possible moment: the beginning of the step after which the engine took it,
    * ``before_us``: from ``begin_us`` until the engine's input thread took it; if that is not recorded, until
      the earliest possible moment as above,
    * ``prepare_us``: in that thread (block hashes, grammar); null: not recorded,
    * ``input_queue_us``: from ``end_us`` until the engine took it between two steps; null: not recorded,
    * ``ttft_us``: from ``begin_us`` to the first token's output in the engine.
    """
    first_tokens = timeline.finishes[["request_id", "first_token_us"]].drop_nulls()
    prepared = pl.coalesce("input_queue_us", "taken_us")
    arrivals = timeline.first_arrivals.filter(pl.col("arrived_us").is_not_null())
    return (
        _with_step_under_way(timeline, arrivals)
        .join(first_tokens.unique("request_id"), on="request_id", maintain_order="left")
        .select(
            "request_id",
            "trial",
            begin_us="arrived_us",
            end_us=pl.max_horizontal(prepared, "arrived_us"),
            before_us=(pl.coalesce("received_us", "taken_us") - pl.col("arrived_us")).clip(0),
            prepare_us=(pl.col("input_queue_us") - pl.col("received_us")).clip(0),
            input_queue_us=(pl.col("queued_us") - pl.col("input_queue_us")).clip(0),
            ttft_us=pl.col("first_token_us") - pl.col("arrived_us"),
        )
        .filter(pl.col("ttft_us") > 0)
    )


def _with_step_under_way(timeline: Timeline, arrivals: pl.DataFrame) -> pl.DataFrame:
    """Return arrivals with ``taken_us``, the time from which each request waits for the engine to take it.

    The engine takes requests between two steps; an idle engine takes each request at once.
    """
    begins = timeline.steps.select(begin_us="start_us").sort("begin_us")
    rows = arrivals.sort("queued_us").join_asof(
        begins, left_on="queued_us", right_on="begin_us", allow_exact_matches=False, coalesce=False
    )
    under_way = rows.with_columns(
        begin_us=pl.max_horizontal(pl.coalesce("begin_us", "queued_us"), "arrived_us"), end_us="queued_us"
    )
    timed = with_engine_time(under_way, timeline.engine_states)
    is_idle = pl.col("idle_us") > 0
    taken = pl.when(is_idle).then("queued_us").otherwise(pl.min_horizontal("begin_us", "queued_us"))
    return timed.with_columns(taken_us=taken).drop("begin_us", "end_us")


FOUND_FROM_FRAC = 0.15
"""Minimum share of the time to first token or, offline, of the run; every request spends some time on its
way."""
NOTICED_MS = 50
"""Minimum median time, in milliseconds, that requests to a server need to reach its engine; users do not
notice less."""
STARVED_FRAC = 0.10
"""Minimum share of its ready time that a thread must wait for a processor to explain a delay."""
SATURATED_FRAC = 0.90
"""Minimum share of the time on a processor at which a thread counts as saturated."""
MOST_THREADS = 3
"""Maximum number of threads that a sentence names."""
NAMES = {
    "engine": "the engine's thread",
    "worker": "the worker's main thread",
    "front_end": "the front end's main thread",
}
SERVER_CONTEXT = "OPENAI_API_SERVER"

OFFLINE = (
    "Not the scheduler: for {share:%} of the run the engine was idle while the front end still prepared and "
    "sent requests (p50 {way_ms_p50:ms} each)."
)
SERVED = (
    "Not the scheduler: {share:%} of the time to first token is over before a request is ready for the "
    "engine (front end: tokenizing and sending, p50 {way_ms_p50:ms})."
)
OFFLINE_TAKEN = (
    "Not the scheduler: for {share:%} of the run the engine was idle while requests had arrived at the front "
    "end and not in the scheduler (front end, sending and waking the engine, p50 {way_ms_p50:ms} each)."
)
"""Phrase for a record without the input thread, in which the way and an idle engine's wake-up look alike."""
SERVED_TAKEN = (
    "Not the scheduler: {share:%} of the time to first token is over before the engine takes a request "
    "(front end: tokenizing and sending; and waking an idle engine; p50 {way_ms_p50:ms})."
)


class ThreadShare(msgspec.Struct, kw_only=True):
    """A thread, from the first to the last time that the trace saw it."""

    role: str
    """``engine``, ``worker`` or ``front_end``."""
    ran_frac: float
    """Share of the time that the thread was on a processor. The report names a front end's thread
    from 0.90 on."""
    waited_frac: float
    """Share of the thread's ready time in which no processor was free. The report names a thread from
    0.10 on."""


class FrontEndTime(Evidence, kw_only=True):
    """The requests' way to the engine."""

    offline: bool
    """Whether ``LLM(...)`` handed over whole batches."""
    way_ms_p50: float
    """Median time from a request's arrival at the front end until the request was prepared for the engine."""
    before_ms_p50: float
    """Median time from a request's arrival at the front end until the engine's input thread took it. If that
    is not recorded: until the scheduler received it, without the step in progress."""
    prepare_ms_p50: float | None
    """Median time in the engine's input thread, for block hashes and the grammar; None: not recorded."""
    input_queue_ms_p50: float | None
    """Median time from then until the step in progress ended; not included in any share here. None: not
    recorded."""
    queue_empty_frac: float | None
    """Share of the steps with work after which no request waited."""
    threads: list[ThreadShare]
    """Main threads of the engine, the workers and the front end that the trace recorded at least twice during
    the run; empty if the system does not count the time of threads."""


def _find(timeline: Timeline) -> Findings:
    ways = ways_to_engine(timeline)
    found_frac, share_frac = _shares(timeline, ways)
    if found_frac < FOUND_FROM_FRAC:
        return
    evidence = _evidence(timeline, ways)
    unnoticed = not evidence.offline and evidence.way_ms_p50 < NOTICED_MS
    has_parts = evidence.input_queue_ms_p50 is not None
    offline, served = (OFFLINE, SERVED) if has_parts else (OFFLINE_TAKEN, SERVED_TAKEN)
    yield step_finding(
        timeline,
        ways,
        evidence,
        severity="info" if unnoticed else severity_by_weight(None, share_frac),
        title="Requests are slow to reach the engine",
        verdict=offline if evidence.offline else served,
        values={"share": found_frac},
        share_frac=share_frac,
        holder=_holder(evidence),
        steps=[],
        message=_parts(evidence),
        advice=_advice(timeline, evidence),
        example="{request_id:id} was prepared for the engine {way_us:us} after its arrival, and had its "
        "first token after {ttft_us:us}.",
        cases=ways.with_columns(way_us=LENGTH_US).sort("way_us", "request_id", descending=[True, False]),
    )


def _shares(timeline: Timeline, ways: pl.DataFrame) -> tuple[float, float]:
    """Return the share that the finding's threshold applies to, and the share of all requests' time.

    Offline, all requests of a batch exist from the start: their way to the engine costs something only while
    the engine has nothing else to do, and then it costs all of them that time.
    """
    if is_offline(timeline):
        began = timeline.steps.select(pl.col("start_us").min()).item()
        if ways.is_empty() or began is None:
            return 0.0, 0.0
        spans = united(ways)
        before_first = (pl.min_horizontal("end_us", pl.lit(began)) - pl.col("begin_us")).clip(0)
        idle = with_engine_time(spans, timeline.engine_states)["idle_us"].sum()
        idle_us = int(idle + spans.select(before_first.sum()).item())
        frac = idle_us / (idle_us + timeline.busy_us) if idle_us else 0.0
        return frac, frac
    way_us, ttft_us = total_us(ways), int(ways["ttft_us"].sum())
    return (way_us / ttft_us if ttft_us else 0.0), share_of_requests(timeline, way_us) or 0.0


def _evidence(timeline: Timeline, ways: pl.DataFrame) -> FrontEndTime:
    working = timeline.steps.filter(pl.col("total_requests") > 0)
    empty = working.select((pl.col("num_waiting_after") == 0).mean()).item()
    way_us, *parts = ways.select(
        LENGTH_US.median().alias("way"), pl.col("before_us", "prepare_us", "input_queue_us").median()
    ).row(0)
    before, prepare, input_queue = (None if us is None else us / 1e3 for us in parts)
    return FrontEndTime(
        offline=is_offline(timeline),
        way_ms_p50=way_us / 1e3,
        before_ms_p50=before or 0.0,
        prepare_ms_p50=prepare,
        input_queue_ms_p50=input_queue,
        queue_empty_frac=empty,
        threads=thread_shares(timeline),
    )


def _parts(evidence: FrontEndTime) -> str:
    """Describe the parts of the way, and the engine's queue during it."""
    if evidence.input_queue_ms_p50 is None:
        parts = (
            "Front end, transport and waking an idle engine took p50 {before_ms_p50:ms}, without the "
            "step in progress; this record does not separate them."
        )
    else:
        parts = "Front end and transport to the engine took p50 {before_ms_p50:ms}"
        if evidence.prepare_ms_p50 is not None:
            parts += ", block hashes and grammar in the engine's input thread {prepare_ms_p50:ms}"
        parts += "; then {input_queue_ms_p50:ms} until the current step ended."
    if evidence.queue_empty_frac is not None:
        parts += " The engine's queue was empty after {queue_empty_frac:%} of the steps."
    return parts


def _holder(evidence: FrontEndTime) -> Message:
    """Describe what occupied the front end's threads; if unknown, what the engine's process cannot see."""
    ran_frac = max((share.ran_frac for share in evidence.threads if share.role == "front_end"), default=0.0)
    saturated = NOTHING
    if ran_frac >= SATURATED_FRAC:
        saturated = say("The front end's main thread ran {share:%} of the time.", share=min(1.0, ran_frac))
    threads = joined([saturated, starved_thread_names(evidence.threads)])
    return threads or say(
        "Whether tokenizing, other work of the front end or the transport took it cannot be seen from the "
        "engine's process; a profile of the front end's process would show it."
    )


def _advice(timeline: Timeline, evidence: FrontEndTime) -> list[Advice]:
    """Return advice: more processors, threads or front-end processes, and less work for the front end."""
    pieces, settings = [], timeline.header.settings
    short = bool(starved_thread_names(evidence.threads))
    if short:
        pieces.append(advise("Give engine, workers and front end a processor core each."))
    configured = timeline.front_end.configured if timeline.front_end else None
    if configured is not None and configured.usage_context == SERVER_CONTEXT:
        renderers = settings.get("model_config.renderer_num_workers")
        # Only vLLMs with this option have it; for pooling models with images it does not help.
        if isinstance(renderers, int) and settings.get("model_config.runner_type") == "generate":
            pieces.append(
                advise(
                    "Tokenize in more threads: {option} (now {renderers:n}).",
                    renderers=renderers,
                    setting="renderer_num_workers",
                    costs="They share the front end's processor cores.",
                )
            )
        if not short:
            pieces.append(
                advise(
                    "Run more front-end processes: {option:setting} (now {clients:n}).",
                    option="--api-server-count",
                    clients=timeline.arrivals["client_index"].drop_nulls().n_unique() or 1,
                    costs="Each needs a processor core and memory of its own.",
                )
            )
    slots = "encoder_slots_freeable"  # they change where the encoder's cache is used
    encodes = slots in timeline.steps.columns and timeline.steps[slots].drop_nulls().n_unique() > 1
    tokens = "Send token ids instead of text where the client can tokenize."
    return [*pieces, advise(FEWER_INPUTS if encodes else tokens)]


def thread_shares(timeline: Timeline) -> list[ThreadShare]:
    """Return the threads that ran between the first step and the end, in descending order of waiting.

    A thread that was recorded only once in this time is left out.
    """
    began = timeline.steps.select(pl.col("start_us").min()).item()
    seen = timeline.cpu.filter(pl.col("at_us").is_between(began, timeline.end_us)).sort("at_us")
    span, ran, waited = (
        pl.col(name).last() - pl.col(name).first() for name in ("at_us", "ran_us", "waited_us")
    )
    shares = (
        seen.group_by("role", "pid", "tid", maintain_order=True)
        .agg(span=span, ran=ran, waited=waited)
        .filter((pl.col("span") > 0) & (pl.col("ran") > 0))
        .select(
            "role",
            ran_frac=pl.col("ran") / pl.col("span"),
            waited_frac=pl.col("waited") / (pl.col("ran") + pl.col("waited")),
        )
        .sort("waited_frac", descending=True, maintain_order=True)
    )
    return [ThreadShare(**share) for share in shares.to_dicts()]


def starved_thread_names(shares: list[ThreadShare]) -> Message:
    """Return the names of the threads that waited long for a processor, the longest wait first."""
    short = [share for share in shares if share.waited_frac >= STARVED_FRAC]
    if not short:
        return NOTHING
    rest = [
        say("{thread} {waited_frac:%}", share, thread=NAMES[share.role]) for share in short[1:MOST_THREADS]
    ]
    return say(
        "Processors were short: {thread} waited for one {waited_frac:%} of the time that it was "
        "ready to run[, {others}].",
        short[0],
        thread=NAMES[short[0].role],
        others=joined(rest, ", "),
    )


RULE = Rule(
    code="front-end",
    summary="requests spent much of their time to first token on their way to the engine",
    needs=frozenset({Fact.TIMES, Fact.QUEUE, Fact.LIVES}),
    find=_find,
)
