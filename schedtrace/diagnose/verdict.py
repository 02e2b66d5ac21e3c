"""Top of a report: the verdict on what limited a run, and the split of its requests' time.

The verdict states what limited the run, by how much, and which requests held it up; or that nothing did. If a
record lacks facts, it states what the record cannot show, what it shows, and what would show more. The parts
of the split add up to 100 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import polars as pl

from schedtrace.diagnose.offered_load import OfferedLoad, load_of_all, offered_load
from schedtrace.diagnose.root_causes import on_engine, quotes_share
from schedtrace.diagnose.rules import KINDS, RANK_RULES, RULES, client_limited, prefill_chunks
from schedtrace.diagnose.rules.allowed_settings import threshold
from schedtrace.diagnose.rules.prefill_starves_decode import CRITICAL_FROM_FRAC, StretchedDecodes
from schedtrace.diagnose.serving_metrics import first_token_wait
from schedtrace.model.causes import Cap, Cause, reason
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.report import EngineTime, Finding, NotJudged, RequestTime, TimePart
from schedtrace.model.say import say
from schedtrace.model.trace_facts import ALL_FACTS, SHOWS_LIMITS, Fact, fact_names
from schedtrace.timeline.charges import CHARGES, OF_KV
from schedtrace.timeline.engine_states import BUSY, STATES, with_engine_time
from schedtrace.timeline.events import DEVICE, INTERRUPTED, STARVED
from schedtrace.timeline.frames import RECORDED, missing_steps, missing_us
from schedtrace.timeline.pieces import NEXT_STEP
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.spans import LENGTH_US, merged, overlap_us, total_us, until
from schedtrace.timeline.step_time import median
from schedtrace.timeline.timeline import Timeline

MOST_STEPS = 3
"""Maximum number of steps with new requests that are named; further ones are only counted."""
RECORD_IT = say(
    "To know, record the engine: {attach:code} (a server that runs) or {run:code} (a benchmark).",
    attach="schedtrace attach --for 60s",
    run="schedtrace run",
)


def unjudged(facts: frozenset[Fact], engines: int) -> list[NotJudged]:
    """Return the rules that need facts that a record lacks."""
    rules = RULES | RANK_RULES if engines > 1 else RULES
    return [
        NotJudged(code=rule.code, missing=fact_names(rule.needs - facts))
        for rule in rules.values()
        if rule.needs - facts
    ]


def cannot_tell(facts: frozenset[Fact]) -> Message:
    """Name the missing facts that would show what limits the engine; return nothing if none is missing."""
    return say(
        "[This record cannot tell what limits the engine: it lacks {missing}.]",
        missing=", ".join(fact_names(SHOWS_LIMITS - facts)),
    )


def left_open(facts: frozenset[Fact]) -> Message:
    """Name the facts that rules need and the record lacks; return nothing if it has them all."""
    needed = frozenset[Fact]().union(*(rule.needs for rule in RULES.values()))
    return say(
        "[This record lacks {missing}: what these would show is not judged.]",
        missing=", ".join(fact_names(needed - facts)),
    )


def contents(timeline: Timeline) -> Message:
    """Return the sizes of steps, KV cache usage and admissions of one engine, as far as recorded."""
    steps = timeline.steps.filter(pl.col("total_requests") > 0)
    if steps.is_empty():
        return NOTHING
    requests, tokens = _ends(steps, "total_requests"), _ends(steps, "used_tokens")
    usage = None
    if "kv_cache_usage_frac" in steps.columns:
        usage = _ends(steps.with_columns(pl.col("kv_cache_usage_frac").round(2)), "kv_cache_usage_frac")
    sizes = say(
        "It shows {steps:n step}[ of {requests}][ and {tokens}][; KV cache usage {usage}].",
        steps=steps.height,
        requests=say("[{low:n} to ]{high:n request}", low=requests[0], high=requests[1])
        if requests
        else None,
        tokens=say("[{low:n} to ]{high:n token}", low=tokens[0], high=tokens[1]) if tokens else None,
        usage=say("[{low:%} to ]{high:%}", low=usage[0], high=usage[1]) if usage else None,
    )
    return joined([sizes, _admissions(steps)])


def _ends(steps: pl.DataFrame, column: str) -> tuple[float | None, float] | None:
    """Return the smallest value of a column (None if all are equal) and the largest; None if not recorded."""
    low, high = steps.select(low=pl.col(column).min(), high=pl.col(column).max()).row(0)
    return None if high is None else (low if low < high else None, high)


def _admissions(steps: pl.DataFrame) -> Message:
    """Describe the number of new requests that each step admitted; return nothing if not recorded."""
    admits = steps.filter(pl.col("num_new") > 0)
    if steps["num_new"].null_count() or admits.is_empty():
        return NOTHING
    each = [
        say("{num_new:n} in {step:step}[ ({used_tokens:n} of {token_budget:n token})]", **row)
        for row in admits.head(MOST_STEPS)
        .select("num_new", "step", "used_tokens", "token_budget")
        .iter_rows(named=True)
    ]
    rest = admits.slice(MOST_STEPS)
    each.append(say("[{new:n} in {steps:n later step}]", new=int(rest["num_new"].sum()), steps=rest.height))
    return say("New requests: {each}.", each=joined(each, ", "))


SAID_FROM_FRAC = 0.05
"""Minimum share of the requests' time at which the verdict names a part, or that a root cause's advice must
save to lead the verdict if nothing reaches its threshold."""
STAYS_FRAC = 0.5
EXPLAINS_FROM_FRAC = 0.10
"""Minimum share of the requests' time at which a finding without gain still explains the run."""
NEARLY = 0.8
PARTS = {
    "front_end": "the front end",
    "next_step": "waiting for the next step",
    "between_steps": "the engine between steps",
    "interrupted": "interruptions",
}


def leading(findings: list[Finding], before: str = "") -> list[Finding]:
    """Return the root causes that the verdict names, the main one first; empty if nothing limited the run.

    Args:
        findings: Ranked findings.
        before: Code of the previous verdict's first finding, for a watched engine. This finding stays first
            while no other is more than twice as large and it has at least half of the share needed to lead,
            so that nearly equal findings do not alternate.
    """
    roots = [finding for finding in findings if finding.is_root]
    leads = [root for root in roots if root.leads or root.weight >= _from(root)]
    if leads:
        most = math.inf if leads[0].leads else max(root.weight for root in leads)
        leads = [root for root in roots if root in leads or _least_saved_frac(root) > most]
    if not any(root.leads for root in leads):
        most = max((root.weight for root in leads), default=0.0)
        stays = [r for r in roots if r.code == before and r.weight >= STAYS_FRAC * max(most, _from(r))][:1]
        leads = [*stays, *(root for root in leads if root not in stays)]
    if not leads:  # a run that a setting surely improves is not one that nothing limits
        leads = [root for root in roots if _least_saved_frac(root) >= SAID_FROM_FRAC][:1]
    if not leads:  # nothing can be gained, but something explains the run
        leads = [
            root
            for root in roots
            if (root.share_frac or 0.0) >= EXPLAINS_FROM_FRAC and not KINDS[root.code].only_if_avoidable
        ]
        leads = sorted(leads, key=lambda root: -(root.share_frac or 0.0))[:1]
    quiet = [
        (place, root) for root in roots if root.verdict and (place := KINDS[root.code].quiet) is not None
    ]
    return leads or [root for _, root in sorted(quiet, key=lambda entry: entry[0])][:1]


def lead_first(findings: list[Finding]) -> list[Finding]:
    """Return the findings with the verdict's finding first."""
    lead = leading(findings)[:1]
    return [*lead, *(finding for finding in findings if finding not in lead)]


@dataclass(frozen=True)
class Unlimited:
    """Facts for the verdict on an engine that nothing limits."""

    steps: int
    rank: int
    facts: frozenset[Fact]
    """Facts that the record contains; without ``SHOWS_LIMITS``, only ``contents`` is meaningful."""
    contents: Message
    """Message on the contents of a record that cannot show what limits the engine."""
    requests_us: int = 0
    busy_us: int = 0
    idle_us: int = 0
    missing_us: int = 0
    """Microseconds in which nothing is recorded."""
    missing_steps: int = 0
    length_us: int = 0
    """Length of the whole trace in microseconds."""
    capped: Message = NOTHING
    """Message on a threshold that held long prompts back, as it should; empty if none were held back."""
    nothing: Message = NOTHING
    load: OfferedLoad = field(default_factory=lambda: OfferedLoad("unknown", 0.0))
    stalled: Message = NOTHING
    """Sentence of the watchdog if the trace ends without progress; empty otherwise."""


def unlimited(timeline: Timeline) -> Unlimited:
    """Return the facts for the verdict on an engine that nothing limits."""
    steps, rank, facts = timeline.steps.height, timeline.rank, timeline.facts
    if not facts >= SHOWS_LIMITS:
        return Unlimited(steps, rank, facts, contents(timeline))
    idle = timeline.engine_states.filter(pl.col("state") == "idle")
    return Unlimited(
        steps=steps,
        rank=rank,
        facts=facts,
        contents=NOTHING,
        requests_us=timeline.requests_us,
        busy_us=timeline.busy_us,
        idle_us=total_us(idle),
        missing_us=missing_us(timeline),
        missing_steps=missing_steps(timeline),
        length_us=timeline.end_us - min([timeline.begin_us, *timeline.gaps["from_us"]]),
        capped=_capped(timeline),
        nothing=_nothing(timeline),
        load=offered_load(timeline),
        stalled=_stalled(timeline),
    )


def verdict(
    engines: Sequence[Unlimited], findings: list[Finding], split: list[TimePart], before: str = ""
) -> list[Message]:
    """Return at most three sentences on what limits the run, then one on steps and time not recorded.

    Sentences on engines that made no progress when their traces ended come before all others.

    Args:
        engines: ``unlimited`` of each engine.
        findings: Ranked findings of all engines.
        split: ``time_split`` of all engines.
        before: As for ``leading``.
    """
    several = len(engines) > 1
    stalled = [
        on_engine(engine.rank, engine.stalled) if several else engine.stalled
        for engine in engines
        if engine.stalled
    ]
    if not any(engine.steps or engine.requests_us for engine in engines):
        return [*stalled, say("No step was recorded: nothing to judge.")]
    sentences = [*stalled, *_verdict(engines, findings, split, before)]
    steps, us = (sum(getattr(engine, name) for engine in engines) for name in ("missing_steps", "missing_us"))
    if steps or us:
        sentences.append(
            say(
                "Not recorded, and in none of these shares: {steps:n step} in {us:us} of {whole:us}.",
                steps=steps,
                us=us,
                whole=sum(engine.length_us for engine in engines),
            )
        )
    return sentences


def _verdict(
    engines: Sequence[Unlimited], findings: list[Finding], split: list[TimePart], before: str
) -> list[Message]:
    leads = leading(findings, before)
    main = max(engines, key=lambda engine: engine.requests_us)
    quiet = bool(leads) and leads[0].code in RULES and KINDS[leads[0].code].quiet is not None
    facts = ALL_FACTS.intersection(*(engine.facts for engine in engines))
    if not leads or (quiet and leads[0].weight < _from(leads[0])):
        if facts >= SHOWS_LIMITS:
            return _nothing_leads(engines, leads, split, left_open(facts), _stretched_decodes(findings))
        longest = max(engines, key=lambda engine: engine.steps)
        shown = on_engine(longest.rank, longest.contents) if len(engines) > 1 else longest.contents
        return [sentence for sentence in (cannot_tell(facts), shown, RECORD_IT) if sentence]
    first, *following = leads
    equal = [root for root in following if root.weight >= NEARLY * first.weight and not first.leads]
    also = say("[Nearly as much: {title}.]", title=_lowered(equal[0].title) if equal else None)
    holder = first.holder
    if len(engines) > 1 and not first.of_ranks and quotes_share(first):  # that share is of all engines
        holder = on_engine(first.engine_rank, holder)
    grows = main.load.summary if main.load.grows and len(engines) == 1 else NOTHING
    few_clients = client_limited.RULE.code in {root.code for root in findings if root is not first}
    # Where the engine keeps up, the clients set the throughput, whatever the first cause costs in latency.
    is_paced = few_clients or (main.load.pace == "clock" and not first.leads)
    pace = main.load.throughput_note if is_paced and not grows and len(engines) == 1 else NOTHING
    open_ = left_open(facts)
    idle = _idle(engines) if quiet else NOTHING
    return [sentence for sentence in (first.verdict, grows, pace, holder, open_, also, idle) if sentence][:3]


def _nothing_leads(
    engines: Sequence[Unlimited],
    findings: list[Finding],
    split: list[TimePart],
    open_: Message,
    stretched: Message,
) -> list[Message]:
    """State that no setting limits the engines, and what explains the run or took the requests' time.

    Args:
        engines: ``unlimited`` of each engine.
        findings: Findings that lead the verdict.
        split: ``time_split`` of all engines.
        open_: ``left_open`` of the facts that all engines record.
        stretched: ``_stretched_decodes`` of all findings.
    """
    main = max(engines, key=lambda engine: engine.requests_us)
    loads = [engine.load for engine in engines]
    load = loads[0].summary if len(loads) == 1 else load_of_all(loads)
    if load and main.load.grows:
        return [say("The engine is the limit: no setting held requests back for long."), load]
    is_too_low = any(finding.code == prefill_chunks.CAPPED_PREFILL_RULE.code for finding in findings)
    capped = NOTHING if is_too_low else main.capped
    explained = capped or (findings[0].verdict if findings else NOTHING)
    parts = [
        say("{share:%} {part}", share=part.share_frac, part=PARTS.get(part.part, part.part))
        for part in split
        if part.share_frac >= SAID_FROM_FRAC
    ]
    spent = say("[The requests' time: {parts}.]", parts=joined(parts, ", "))
    sentences = [explained] if explained else [main.nothing, stretched or spent]
    of_client = findings and findings[0].code == client_limited.RULE.code and not capped
    last = open_ or (NOTHING if of_client else load or _idle(engines))
    return [sentence for sentence in (*sentences, last) if sentence]


def _stretched_decodes(findings: list[Finding]) -> Message:
    """State the share of the time between tokens that prefills took, if it is large; else, return nothing."""
    for finding in chain(findings, *(root.symptoms for root in findings)):
        evidence = finding.evidence
        if isinstance(evidence, StretchedDecodes) and evidence.stretch_frac >= CRITICAL_FROM_FRAC:
            return say(
                "But {stretch_frac:%} of the time between tokens passed because the decodes' steps also "
                "prefilled: by {mean_stretch_us:us} a step[, where a step with decodes only takes "
                "{median_decode_step_us:us}].",
                stretch_frac=evidence.stretch_frac,
                mean_stretch_us=evidence.mean_stretch_us,
                median_decode_step_us=evidence.median_decode_step_us,
            )
    return NOTHING


def _stalled(timeline: Timeline) -> Message:
    for stall in timeline.stalls.filter("open").tail(1).iter_rows(named=True):
        return say(
            "When this trace ends, no step has made progress for {time:us}: {sentence}.[ {waiting:n request} "
            "had reached the engine's process, but no step had seen them: no figure here includes them.]",
            time=stall["until_us"] - stall["since_us"],
            sentence=stall["sentence"],
            waiting=stall["input_requests"],
        )
    return NOTHING


def _least_saved_frac(root: Finding) -> float:
    """Return the share of the requests' time that a finding's advice saves at least; 0.0 if unknown."""
    gain = root.gain
    if gain is None or gain.low_frac is None or gain.high_frac is None or gain.low_frac * gain.high_frac <= 0:
        return 0.0
    return gain.saved_frac * min(abs(gain.low_frac), abs(gain.high_frac)) / abs(gain.change_frac)


def _from(root: Finding) -> float:
    rule = KINDS[root.code]
    nothing_helps = rule.only_if_avoidable and root.gain is None and bool(root.refuted)
    return math.inf if nothing_helps else rule.leads_from_frac


def _lowered(title: Message) -> Message:
    """Return a title in lower case for the middle of a sentence; abbreviations keep their capitals."""
    template = title.template
    if template[1:2].islower():
        template = template[0].lower() + template[1:]
    return Message(template, title.arguments)


def _nothing(timeline: Timeline) -> Message:
    working = timeline.steps.filter(pl.col("total_requests") > 0)
    if working.is_empty():
        return say("No step scheduled anything.")
    ran = float(working["num_running_after"].mean() or 0)  # type: ignore[arg-type]  # a column of integers
    waits = timeline.request_states.filter(pl.col("state").is_in(QUEUED))
    each = waits.group_by("request_id").agg(LENGTH_US.sum().alias("us"))
    longest = int(each["us"].max() or 0)  # type: ignore[arg-type]  # likewise
    step_us = float(working.select((pl.col("output_us") - pl.col("start_us")).median()).item() or 0)
    within = say("{longest:us} in the queue", longest=longest)
    if longest <= step_us:
        within = say("a step ({step:us})", step=step_us)
    wait = first_token_wait(timeline)
    why = reason(timeline.header, loop="waiting", cause=wait.cause, detail=None) if wait else None
    return say(
        "Nothing limits this engine: [{all_there:?}the first step of each trial had all of its requests, ]"
        "on average {ran:n1}[ of {seats:n seat}] were taken, and no request waited longer than {within}."
        "[ But {share:%} of the mean time to the first token ({mean:us}) passed because {why} "
        "({cause:cause}).]",
        timeline,
        share=wait and wait.share_frac,
        mean=wait and wait.mean_us,
        why=why,
        cause=wait and wait.cause,
        all_there=timeline.closed_workload and _all_there(timeline, working),
        ran=ran,
        within=within,
    )


def _all_there(timeline: Timeline, working: pl.DataFrame) -> bool:
    """Return whether all requests were present at the first step of each trial."""
    for trial in timeline.trials():
        steps = timeline.trial_rows(working, trial).sort("step")
        arrived = timeline.trial_rows(timeline.arrivals, trial).height
        if steps.is_empty() or steps["total_requests"][0] < arrived:
            return False
    return True


def _capped(timeline: Timeline) -> Message:
    capped = timeline.caps.filter(pl.col("cap") == Cap.LONG_PREFILL)
    if capped.is_empty():
        return NOTHING
    held = (
        capped.group_by("request_id")
        .agg(pl.col("step").n_unique().alias("steps"))
        .sort("steps", "request_id", descending=[True, False])
    )
    first = timeline.finishes.select(
        "request_id", ttft=pl.col("first_token_us") - pl.coalesce("arrived_us", "queued_us")
    ).drop_nulls()
    rest = first.join(held, on="request_id", how="anti")
    own = first.filter(pl.col("request_id") == held["request_id"][0])["ttft"]
    if rest.is_empty() or own.is_empty():
        return NOTHING
    return say(
        "Nothing to fix: {others:n other request} had their first token after {p50:us} "
        "(p50). {setting:setting} held {request:id}[ to {chunk:n token}] in {steps:n step}; "
        "its first token came after {own:us}.",
        others=rest.height,
        p50=median(rest["ttft"]),
        setting="--long-prefill-token-threshold",
        request=str(held["request_id"][0]),
        chunk=threshold(timeline) or None,
        steps=int(held["steps"][0]),
        own=int(own[0]),
    )


def _idle(engines: Sequence[Unlimited]) -> Message:
    idle = sum(engine.idle_us for engine in engines)
    whole = idle + sum(engine.busy_us for engine in engines)
    if not whole or idle / whole < EXPLAINS_FROM_FRAC:
        return NOTHING
    return say("Idle {idle:us} of {whole:us}.", idle=idle, whole=whole)


COMPUTING = ("prefill", "decode", "recompute")


def time_split(engines: Sequence[pl.DataFrame]) -> list[TimePart]:
    """Return the parts of all requests' time, the largest first; empty without requests.

    Args:
        engines: ``engine_split`` of each engine.
    """
    rows = pl.concat(engines)
    total = int(rows["us"].sum())
    if not total:
        return []
    sums = rows.group_by("part", "cause").agg(pl.col("us").sum()).filter(pl.col("us") > 0)
    ordered = sums.sort("us", "part", "cause", descending=[True, False, False], nulls_last=True)
    return [
        TimePart(part=part, cause=cause, time_ms=us / 1e3, share_frac=us / total)
        for part, cause, us in ordered.iter_rows()
    ]


def engine_split(timeline: Timeline) -> pl.DataFrame:
    """Return one row per ``part`` and ``cause`` with its ``us``; waits are listed by their charges.

    The host's time is a separate part, not included in the others.
    """
    states = with_engine_time(timeline.recorded_states, timeline.engine_states)
    computing = pl.col("state").is_in(COMPUTING)
    next_step = pl.col("cause").eq_missing(pl.lit(NEXT_STEP))
    own = computing | next_step
    taken = pl.when(own).then(overlap_us(states, timeline.host_spans))
    on_its_way = pl.col("state") == "front_end"
    delayed = pl.when(on_its_way).then(overlap_us(_at_the_engine(timeline, states), timeline.host_spans))
    waited_for_processor = merged(timeline.events.filter(kind=STARVED, part=DEVICE))
    starved = pl.when(own).then(overlap_us(states, waited_for_processor)).otherwise(0)
    states = states.with_columns(lost_us=pl.coalesce(taken, delayed, 0), starved_us=starved)
    host = pl.when(computing).then(pl.max_horizontal("host_us", "lost_us")).otherwise(0)
    none = pl.lit(None, pl.String)
    rest = states.filter(next_step | ~pl.col("state").is_in([*QUEUED, "stalled"]))
    charged = timeline.charges.filter(pl.col("state") != "recompute")
    of_charge = pl.when(pl.col("charge").is_in([*CHARGES])).then("cause").otherwise("charge")
    interrupted = pl.col("charge") == INTERRUPTED
    of_charge = pl.when(interrupted).then(pl.lit(None, pl.String)).otherwise(of_charge)
    of_kv = pl.col("cause").is_in([str(cause) for cause in OF_KV])
    parts = [
        charged.with_columns(cause=of_charge).select(
            part=pl.when(pl.col("charge") == INTERRUPTED)
            .then(pl.lit(INTERRUPTED))
            .when(pl.col("state") == "stalled")
            .then("state")
            .otherwise(pl.lit("waiting")),
            cause=pl.when(of_kv).then(pl.lit(str(Cause.KV_BLOCKS))).otherwise("cause"),
            us="time_us",
        ),
        rest.select(
            part=pl.when(next_step).then("cause").otherwise("state"),
            cause=none,
            us=LENGTH_US - pl.max_horizontal(host, "lost_us") - pl.col("starved_us"),
        ),
        states.filter(computing).select(
            part=pl.lit("between_steps"), cause=none, us=host - pl.col("lost_us")
        ),
        states.select(part=pl.lit(INTERRUPTED), cause=none, us=pl.col("lost_us") + pl.col("starved_us")),
    ]
    rows = pl.concat([part.cast({"us": pl.Int64}) for part in parts])
    return rows.group_by("part", "cause").agg(pl.col("us").sum())


def _at_the_engine(timeline: Timeline, states: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, each cut to begin when the engine's process received the request.

    If that moment is not recorded, the row has no length.
    """
    received = timeline.first_arrivals[["request_id", "received_us"]]
    begin = pl.max_horizontal("begin_us", pl.min_horizontal("received_us", "end_us"))
    received_states = states.join(received, on="request_id", how="left", maintain_order="left")
    return received_states.select(begin_us=begin, end_us="end_us")


STRIP_CELLS = 40


def request_time(timeline: Timeline) -> list[RequestTime]:
    """Return the time of all requests by state and cause, the longest first; interruptions are separate."""
    states = timeline.interrupted_states.filter(RECORDED)
    total = total_us(states)
    if not total:
        return []
    starts = timeline.steps["start_us"].drop_nulls().to_list()
    cells = min(STRIP_CELLS, len(starts))  # equal parts of the run's steps
    moments = [starts[cell * len(starts) // cells] for cell in range(cells)] + [timeline.end_us]
    everything = _between(states, moments)
    times = []
    for rows in states.partition_by("state", "cause", maintain_order=True):
        time_us = total_us(rows)
        parts = zip(_between(rows, moments), everything, strict=True)
        times.append(
            RequestTime(
                engine_rank=timeline.rank,
                state=rows["state"][0],
                cause=rows["cause"][0],
                time_ms=time_us / 1e3,
                share_frac=time_us / total,
                requests=rows["request_id"].n_unique(),
                strip=[part / whole if whole else 0.0 for part, whole in parts],
            )
        )
    return sorted(times, key=lambda share: (-share.time_ms, share.state, share.cause or ""))


def engine_time(timeline: Timeline) -> list[EngineTime]:
    """Return the time of the engine in each state that occurred, in the order of ``STATES``."""
    spent = dict(timeline.engine_states.group_by("state").agg(LENGTH_US.sum().alias("us")).iter_rows())
    busy = sum(us for state, us in spent.items() if state in BUSY)
    return [
        EngineTime(
            engine_rank=timeline.rank,
            state=state,
            time_ms=spent[state] / 1e3,
            busy_frac=spent[state] / busy if state in BUSY else None,
        )
        for state in STATES
        if spent.get(state)
    ]


def _between(rows: pl.DataFrame, moments: list[int]) -> list[float]:
    return [after - before for before, after in pairwise(until(rows, moments))]
