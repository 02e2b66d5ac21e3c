"""Statements about a server's log: its periodic lines, its failure, and its dumped step."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import mean, median

from schedtrace.diagnose.records.metrics import Moment, amount, extent, queue_statement
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.records import (
    ConsoleSnapshots,
    DumpedRequest,
    DumpedStep,
    Failure,
    ServerStart,
    Statement,
)
from schedtrace.model.say import say
from schedtrace.read.records.console_lines import EngineLines, PeriodicLine, elapsed_s
from schedtrace.read.records.failure_lines import UNNAMED
from schedtrace.read.records.vllm_log import ServerLog

LEAST_PACES = 2
"""Minimum number of snapshots with prompts, and of those without, for a comparison of the pace of decodes."""
SLOWED_FRAC = 0.7
"""Maximum pace of decodes with prompts, as a ratio to the pace without prompts, at which prompts count as
slowing decodes."""
STEADY = 2.0
"""Maximum ratio between the paces of snapshots without prompts at which the pace counts as steady; more
variation would hide the effect of prompts."""
SIMILAR = 1.5
"""Maximum ratio at which numbers of running requests, or intervals between lines, count as similar."""
SILENT = 2.5
"""Minimum silence after a line, in intervals between lines, at which vLLM counts as having stopped printing.
"""
UNEVEN = 1.5
"""Minimum ratio between the mean numbers of running requests at which ranks count as uneven."""
LEAST_UNEVEN = 4
"""Minimum difference between the mean numbers of running requests at which ranks count as uneven."""
VLLM_INTERVAL_S = 10.0
"""Seconds between periodic lines, unless ``VLLM_LOG_STATS_INTERVAL`` sets another interval."""


def console_snapshots(engine: EngineLines) -> ConsoleSnapshots:
    """Summarize the periodic lines of one engine."""
    lines = list(engine.snapshots)
    deferred = [line.deferred for line in lines if line.deferred is not None]
    usages = [line.kv_cache_usage_frac for line in lines if line.kv_cache_usage_frac is not None]
    preemptions = [line.preemptions for line in lines if line.preemptions is not None]
    return ConsoleSnapshots(
        engine_rank=engine.engine_rank,
        engines=engine.engines,
        snapshots=len(lines),
        span_s=span_s(lines),
        running=extent([line.running for line in lines]),
        waiting=extent([line.waiting for line in lines]),
        deferred=extent(deferred) if deferred else None,
        kv_cache_usage_frac=extent(usages) if usages else None,
        prompt_tokens_per_s=extent([line.prompt_tokens_per_s for line in lines]),
        generation_tokens_per_s=extent([line.generation_tokens_per_s for line in lines]),
        prefix_cache_hit_frac=lines[-1].prefix_cache_hit_frac,
        external_hit_frac=lines[-1].external_hit_frac,
        preemptions=sum(preemptions) if preemptions else None,
        acceptance_frac=engine.acceptance_frac,
    )


def span_s(lines: Sequence[PeriodicLine]) -> float | None:
    """Return the time from the first line to the last; None if a time is missing, or times decrease."""
    times = [line.at_s for line in lines]
    if len(times) < 2 or None in times:  # noqa: PLR2004  # for a span
        return None
    steps = [elapsed_s(before, after) for before, after in pairwise(times)]
    return None if None in steps else sum(step or 0.0 for step in steps)


def console_statements(log: ServerLog) -> Iterator[Statement]:
    """Yield the statements that each engine's periodic lines support, then those that compare engines."""
    several = len(log.engines) > 1
    for engine in log.engines:
        rank = engine.engine_rank if several else None
        lines = list(engine.snapshots)
        yield from _stall(lines, rank, log.last_s)
        yield from _queue(engine, lines, rank, log.start)
        yield from _slowed_decodes(lines, rank)
        yield from _counted(lines, rank)
    if several:
        yield from _uneven_ranks(log.engines)


def _queue(
    engine: EngineLines, lines: list[PeriodicLine], rank: int | None, start: ServerStart
) -> Iterator[Statement]:
    seats = None if start.max_num_seqs is None else start.max_num_seqs * engine.engines
    moments = [
        Moment(
            line.running,
            line.waiting_for_capacity,
            line.kv_cache_usage_frac,
            prompts=line.prompt_tokens_per_s > 0,
            is_idle=line.prompt_tokens_per_s == line.generation_tokens_per_s == 0,
        )
        for line in lines
        if line.waiting_for_capacity > 0
    ]
    most_running = max(line.running for line in lines)
    statement = queue_statement(
        moments, seats=seats, engine_rank=rank, of=len(lines), most_running=most_running
    )
    if statement is not None:
        yield statement
    elif any(line.running for line in lines):
        text = say(
            "No request waits for capacity at {snapshots}[, with {running}]: then neither "
            "seats, KV cache space nor the token budget kept a request in the queue at these times.",
            snapshots="the only snapshot"
            if len(lines) == 1
            else say("any of {count:n} snapshots", count=len(lines)),
            running=_running(lines),
        )
        yield Statement(
            code="no-queue",
            certainty="recorded",
            at=len(lines),
            snapshots=len(lines),
            engine_rank=rank,
            text=text,
        )


def _running(lines: list[PeriodicLine]) -> Message:
    return say("{requests} running", requests=amount(extent([line.running for line in lines])))


def _slowed_decodes(lines: list[PeriodicLine], rank: int | None) -> Iterator[Statement]:
    """Compare the output tokens/s per running request between snapshots with and without prompts.

    Lines with far fewer or more running requests are left out, because the size of the batch also changes the
    pace. A request that begins or ends within an interval gets fewer tokens. With a queue, this cannot be the
    reason for a slower pace, because another request takes the seat at once. Without a queue, intervals that
    begin idle are left out.
    """
    steady = [line for line in _begun_busy(lines) if line.running > 0 and line.generation_tokens_per_s > 0]
    if not steady:
        return
    usual = median(line.running for line in steady)
    steady = [line for line in steady if usual / SIMILAR <= line.running <= usual * SIMILAR]
    alone = [line.generation_tokens_per_s / line.running for line in steady if line.prompt_tokens_per_s == 0]
    beside = [line.generation_tokens_per_s / line.running for line in steady if line.prompt_tokens_per_s > 0]
    if min(len(alone), len(beside)) < LEAST_PACES or max(beside) >= min(alone):
        return
    if max(alone) > STEADY * min(alone):
        return
    if median(beside) > SLOWED_FRAC * median(alone):
        return
    is_queued = all(line.waiting_for_capacity > 0 for line in steady)
    text = say(
        "Prefills {may} slow down decodes: a running request gets {beside_low:n} to {beside_high:n} output "
        "tokens/s in {with_prompts:n snapshot} with prompts, and {alone_low:n} to {alone_high:n} in "
        "{without:n} without[{may_differ:?}. Requests that begin or end within an interval look the same].",
        may="probably" if is_queued else "may",
        may_differ=not is_queued,
        beside_low=min(beside),
        beside_high=max(beside),
        with_prompts=len(beside),
        alone_low=min(alone),
        alone_high=max(alone),
        without=len(alone),
    )
    yield Statement(
        code="decodes-slowed-by-prefills",
        certainty="likely" if is_queued else "possible",
        at=len(beside),
        snapshots=len(beside) + len(alone),
        engine_rank=rank,
        text=text,
        advice=say(
            "A smaller {budget:setting} shortens the steps that contain prompts, at the cost of the time to "
            "first token.",
            budget="--max-num-batched-tokens",
        ),
    )


def _begun_busy(lines: list[PeriodicLine]) -> Iterator[PeriodicLine]:
    """Yield the first line, the lines with a queue, and those whose interval began with running requests."""
    longest = SIMILAR * min(intervals_s(lines), default=VLLM_INTERVAL_S)
    yield from lines[:1]
    for before, line in pairwise(lines):
        elapsed = elapsed_s(before.at_s, line.at_s)
        is_next = elapsed is None or elapsed <= longest
        if line.waiting_for_capacity > 0 or (is_next and before.running > 0):
            yield line


def _stall(lines: list[PeriodicLine], rank: int | None, last_s: float | None) -> Iterator[Statement]:
    """Report intervals in which requests ran but got no token.

    vLLM stops printing periodic lines after the second interval without tokens, whether or not requests run,
    so silence after such a line is a sign of a stall. A prompt that takes longer than an interval looks the
    same: its tokens are counted when the last one is computed.
    """
    idle = [
        place
        for place, line in enumerate(lines)
        if line.running and not line.prompt_tokens_per_s and not line.generation_tokens_per_s
    ]
    if not idle:
        return
    interval = min(intervals_s(lines), default=VLLM_INTERVAL_S)  # pauses lengthen the rest
    silences = []
    for place in idle:
        later = lines[place + 1].at_s if place + 1 < len(lines) else last_s
        silence = elapsed_s(lines[place].at_s, later)
        if silence is not None and silence >= SILENT * interval:
            silences.append(silence)
    text = say(
        "Running requests got no token in {idle:n} of {snapshots:n snapshot}: {running} in the last of them"
        "[. Then vLLM printed no such line for {silence:s}, as it does while no token is computed]. A prompt "
        "that takes longer than the interval looks the same: vLLM counts its tokens at its end.",
        idle=len(idle),
        snapshots=len(lines),
        running=_running([lines[idle[-1]]]),
        silence=max(silences, default=None),
    )
    yield Statement(
        code="no-tokens",
        certainty="likely" if silences else "possible",
        at=len(idle),
        snapshots=len(lines),
        engine_rank=rank,
        text=text,
        advice=say(
            "While it lasts, {queue:code} shows what the engine does and what each request waits for.",
            queue="schedtrace queue",
        ),
    )


def intervals_s(lines: Sequence[PeriodicLine]) -> list[float]:
    """Return the times between consecutive lines that both have a time stamp."""
    return [step for before, after in pairwise(lines) if (step := elapsed_s(before.at_s, after.at_s))]


def _counted(lines: list[PeriodicLine], rank: int | None) -> Iterator[Statement]:
    """Report the counts that the lines themselves contain: preemptions and deferred requests."""
    preempting = [line.preemptions for line in lines if line.preemptions]
    if preempting:
        yield Statement(
            code="preemptions",
            certainty="recorded",
            at=len(preempting),
            snapshots=len(lines),
            engine_rank=rank,
            text=say(
                "{preemptions:n preemption} in {at:n} of {snapshots:n interval}.",
                preemptions=sum(preempting),
                at=len(preempting),
                snapshots=len(lines),
            ),
        )
    deferred = [line.deferred for line in lines if line.deferred]
    if deferred:
        yield Statement(
            code="deferred",
            certainty="recorded",
            at=len(deferred),
            snapshots=len(lines),
            engine_rank=rank,
            text=say(
                "Up to {most:n request} {verb} for something other than capacity in {at:n} of "
                "{snapshots:n snapshot}: a KV transfer, a grammar or a limit on LoRA adapters.",
                most=max(deferred),
                verb="is waiting" if max(deferred) == 1 else "are waiting",
                at=len(deferred),
                snapshots=len(lines),
            ),
        )


def _uneven_ranks(engines: list[EngineLines]) -> Iterator[Statement]:
    """Compare the mean loads of ranks if their numbers of lines are nearly equal, so that the times match."""
    ranks = [engine for engine in engines if engine.engine_rank is not None]
    counts = {engine.lines for engine in ranks}
    if len(ranks) < 2 or max(counts) > 1.1 * min(counts):  # noqa: PLR2004  # two to compare, of the same times
        return
    loads = {engine.engine_rank: mean(line.running for line in engine.snapshots) for engine in ranks}
    queues = {
        engine.engine_rank: mean(line.waiting_for_capacity for line in engine.snapshots) for engine in ranks
    }
    fullest, emptiest = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
    if loads[fullest] < UNEVEN * loads[emptiest] or loads[fullest] - loads[emptiest] < LEAST_UNEVEN:
        return
    text = say(
        "Ranks are unevenly loaded: engine {fullest} has {most:n1} running requests on average"
        "[ and {queued:n1} waiting], engine {emptiest} {least:n1}[ and {queued_least:n1} waiting].",
        fullest=str(fullest),
        most=loads[fullest],
        queued=queues[fullest],
        emptiest=str(emptiest),
        least=loads[emptiest],
        queued_least=queues[emptiest],
    )
    yield Statement(code="uneven-ranks", certainty="recorded", snapshots=min(counts), text=text)


_ADVICE = {
    "No available memory for the cache blocks": say(
        "Raise {memory:setting}; it must cover the model's weights and leave room for the KV cache.",
        memory="--gpu-memory-utilization",
    ),
    "To serve at least one request with the model": say(
        "Lower {length:setting} or raise {memory:setting}.",
        length="--max-model-len",
        memory="--gpu-memory-utilization",
    ),
    "Free memory on device": say(
        "Another process uses the GPU: end it, or lower {memory:setting}.", memory="--gpu-memory-utilization"
    ),
    "out of memory": say(
        "Lower {memory:setting}, {budget:setting} or {seats:setting}.",
        memory="--gpu-memory-utilization",
        budget="--max-num-batched-tokens",
        seats="--max-num-seqs",
    ),
    "RPC call to": say(
        "A worker process did not finish its part of a step in time: it hangs, or computes a very long step."
    ),
    UNNAMED: say("Give the complete log: it has the first error, often in the lines of another process."),
    "ddress already in use": say(
        "Another process has the port: choose another {port:setting}.", port="--port"
    ),
}
"""Advice for error messages that contain each of these texts."""
NEXT_PROMPT = 1
"""Number of tokens that a decode computes, apart from drafts."""


def failure_statements(log: ServerLog) -> Iterator[Statement]:
    """Yield statements about why the server failed and which step it was computing."""
    if log.failure is not None:
        yield _failure(log.failure)
    if log.worker_waits:
        yield Statement(
            code="processes-waiting",
            certainty="recorded",
            text=say(
                "vLLM reported {times:n time} that one of its processes waited a long time for another: the "
                "other process hangs, is busy for a long time (for example, compiling), or is idle.",
                times=log.worker_waits,
            ),
        )
    if log.step is not None:
        yield _step(log.step)
        if preempted := log.step.preempted_requests:
            yield Statement(
                code="preempted-in-step",
                certainty="recorded",
                text=say(
                    "The dumped step preempts {requests:n request}, such as {first:id}.",
                    requests=len(preempted),
                    first=preempted[0],
                ),
            )


def _failure(failure: Failure) -> Statement:
    during = {"start": "The server failed to start", "serving": "The engine failed while it served requests"}
    worker = failure.worker_died
    text = say(
        "{during}[: {reason:code} (line {line:n})][. Worker process {worker:code} died, which ended the "
        "engine: look for the cause in the lines before this message].",
        during=during[failure.stage],
        reason=None if worker is not None and worker in failure.reason else failure.reason,
        line=failure.line,
        worker=worker,
    )
    advice = next((advice for part, advice in _ADVICE.items() if part in failure.reason), NOTHING)
    code = "start-failed" if failure.stage == "start" else "engine-failed"
    return Statement(code=code, certainty="recorded", text=text, advice=advice)


def _step(step: DumpedStep) -> Statement:
    prompts = [request for request in step.requests if is_prefill(request)]
    decodes = [request for request in step.requests if not is_prefill(request)]
    load = None
    if step.running is not None:
        load = say(
            "{running:n request} {runs} running and {waiting} {waits} waiting[; KV cache usage is {usage:%}]",
            running=step.running,
            runs="is" if step.running == 1 else "are",
            waiting="none" if not step.waiting else say("{waiting:n}", waiting=step.waiting),
            waits="is" if (step.waiting or 0) <= 1 else "are",
            usage=step.kv_cache_usage_frac,
        )
    text = say(
        "[The dumped step has {tokens:n token}[: {mix}][{both:?}. ]][{alone:?}At the failure, ][{load}]"
        "[{cut:?}vLLM dumped the step at which the engine failed, but this log has only a part of the dump].",
        tokens=step.scheduled_tokens,
        both=step.running is not None,
        alone=step.scheduled_tokens is None and step.running is not None,
        cut=step.scheduled_tokens is None and step.running is None,
        mix=_mix(prompts, decodes),
        load=load,
    )
    return Statement(code="dumped-step", certainty="recorded", text=text)


def is_prefill(request: DumpedRequest) -> bool:
    """Return whether the step computes a part of the request's prompt, as far as the dump shows."""
    if request.prompt_tokens is not None and request.computed_tokens is not None:
        return request.computed_tokens < request.prompt_tokens
    return request.scheduled_tokens - request.draft_tokens > NEXT_PROMPT


def _mix(prompts: list[DumpedRequest], decodes: list[DumpedRequest]) -> Message | None:
    if not prompts and not decodes:
        return None
    drafts = sum(request.draft_tokens for request in decodes)
    contexts = [request.computed_tokens for request in decodes if request.computed_tokens is not None]
    single = prompts[0] if len(prompts) == 1 and prompts[0].prompt_tokens is not None else None
    return say(
        "[{prefill:n} for {request:id} (its prompt has {prompt:n})]"
        "[{prefills:n} for {prompts:n prompt}]"
        "[{both:?} and ]"
        "[{decode:n}][ ({drafts:n} of them drafts)][ for {decodes}][ with {low:n}][ to {high:n}]"
        "[{context:?} tokens of context]",
        prefill=None if single is None else single.scheduled_tokens,
        prompt=None if single is None else single.prompt_tokens,
        request="" if single is None else single.request_id,
        prefills=None if single is not None else sum(request.scheduled_tokens for request in prompts),
        prompts=len(prompts),
        both=bool(prompts and decodes),
        decode=sum(request.scheduled_tokens for request in decodes),
        decodes="a decode" if len(decodes) == 1 else say("[{decodes:n decode}]", decodes=len(decodes)),
        drafts=drafts,
        low=min(contexts, default=None),
        high=max(contexts) if len(set(contexts)) > 1 else None,
        context=bool(contexts),
    )
