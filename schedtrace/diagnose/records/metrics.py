"""Statements about vLLM's metrics: values at a moment, totals since the start, and changes between dumps.

If metrics or console lines report a queue, ``queue_statement`` names the limit that requests probably wait
for: KV cache, seats, or unknown.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from schedtrace.model.message import NOTHING, Message, Worded
from schedtrace.model.records import Certainty, EngineMetrics, MetricsWindow, Range, Statement
from schedtrace.model.say import say
from schedtrace.read.records.metrics import EngineValues, MetricsDump

NEARLY_FULL = 0.9
"""Minimum KV cache usage at which the next request is probably refused for lack of blocks."""
HALF_FULL = 0.5
"""Maximum KV cache usage at which the cache is not the probable limit, because even a large request would
fit."""
NEARLY_ALL = 0.8
"""Minimum share of occupied seats at which all seats may have been taken: vLLM counts running requests after
finished requests have left."""
LEAST_EQUAL = 3
"""Minimum number of snapshots with a queue; if all show the same number of running requests, a limit on this
number is probable."""

Limit = Literal[
    "kv", "some_kv", "seats", "both", "prompts", "none_run", "between_steps", "several", "unknown"
]


class Moment(NamedTuple):
    """Moment at which requests wait for capacity."""

    running: int
    waiting: int
    kv_cache_usage_frac: float | None
    prompts: bool | None
    """Whether prompts were computed at about this moment; None if the record does not show it."""
    is_idle: bool
    """Whether no token was computed at about this moment, as far as the record shows."""


def queue_statement(
    moments: Sequence[Moment],
    *,
    seats: int | None,
    engine_rank: int | None,
    of: int,
    noun: str = "snapshot",
    most_running: int = 0,
) -> Statement | None:
    """Return a statement about what requests waited for at these moments; None if no request waited.

    Args:
        moments: Moments with waiting requests.
        seats: Limit on running requests, if the record has it.
        engine_rank: Engine that the statement names.
        of: Number of all moments, with a queue or without.
        noun: Noun for a moment.
        most_running: Largest number of running requests, with a queue or without.
    """
    if not moments:
        return None
    constant = len(moments) >= LEAST_EQUAL and len({moment.running for moment in moments}) == 1
    limits = Counter(_limit(moment, seats, constant=constant) for moment in moments)
    limit, at = limits.most_common(1)[0]
    if limit == "unknown" or 2 * at <= len(moments) or (limit == "prompts" and limits.keys() & _SURER):
        limit, at = "unknown", len(moments)
    candidates = _candidates(limit, moments, seats, max(most_running, *(each.running for each in moments)))
    if len(candidates) > 1:
        limit = "several"
    wording, showing = _WORDINGS[limit], _showing(limit, moments, at)
    values: dict[str, Worded] = {
        "counted": _counted(moments, of, noun),
        "shown": say("in {shown:n} of these {all:n}", shown=showing, all=len(moments))
        if showing < len(moments)
        else None,
        "seats": seats,
        "candidates": f"{', '.join(candidates[:-1])} or {candidates[-1]}" if candidates else None,
        "constant": None if seats is not None else max(moment.running for moment in moments),
        "setting": "max_num_seqs",
        "full": sum((moment.kv_cache_usage_frac or 0) >= NEARLY_FULL for moment in moments),
    }
    certainty = wording.certainty
    if limit == "seats" and seats is None and not any(moment.prompts for moment in moments):
        certainty = "possible"  # nothing shows that one request took the seat of another
    named = {name: value for name, value in values.items() if re.search(rf"\{{{name}\b", wording.template)}
    return Statement(
        code=wording.code,
        certainty=certainty,
        at=at,
        snapshots=len(moments),
        engine_rank=engine_rank,
        text=say(wording.template, **named),
        advice=wording.advice,
    )


def _counted(moments: Sequence[Moment], of: int, noun: str) -> Message:
    """Describe the queue, the running requests and the KV cache usage at these moments."""
    number = len(moments)
    is_all = 1 < number == of
    running = extent([moment.running for moment in moments])
    waiting = extent([moment.waiting for moment in moments])
    usages = [moment.kv_cache_usage_frac for moment in moments if moment.kv_cache_usage_frac is not None]
    return say(
        "in {queued} {noun}, {waiting} {verb} waiting[ and {running}][; KV cache usage is {usage}]",
        queued=say("all {total:n}", total=of)
        if is_all
        else say("{number:n} of {total:n}", number=number, total=of),
        noun=noun if of == 1 else f"{noun}s",
        waiting=amount(waiting),
        verb="is" if waiting.high == 1 else "are",
        running=say(
            "{running} {verb} running",
            running=amount(running, noun=""),
            verb="is" if running.high == 1 else "are",
        ),
        usage=_share(extent(usages)) if usages else None,
    )


_SURER: frozenset[Limit] = frozenset({"kv", "both"})
"""Limits that remain likely even while prompts are being computed."""


def _showing(limit: Limit, moments: Sequence[Moment], at: int) -> int:
    """Return the number of moments at which the fact in the sentence holds, even if another limit applied.

    Args:
        limit: Limit that the sentence names.
        moments: Moments with waiting requests.
        at: Number of moments that suggest this limit.
    """
    if limit == "kv":
        return sum((moment.kv_cache_usage_frac or 0) >= NEARLY_FULL for moment in moments)
    if limit == "prompts":
        return sum(bool(moment.prompts) for moment in moments)
    if limit in {"none_run", "between_steps"}:
        return sum(moment.running == 0 for moment in moments)
    return at


def _candidates(limit: Limit, moments: Sequence[Moment], seats: int | None, most_running: int) -> list[str]:
    """Return the causes of waiting that the moments suggest but do not prove.

    If the limit on running requests is unknown, the largest number of running requests seen stands in for it.
    """
    if limit not in {"some_kv", "prompts"}:
        return []
    has_little_room = any((moment.kv_cache_usage_frac or 0) >= HALF_FULL for moment in moments)
    candidates = ["KV cache space"] if limit == "some_kv" or has_little_room else []
    near = sum(moment.running >= NEARLY_ALL * (seats or most_running) for moment in moments)
    if 2 * near > len(moments):
        candidates.append("a seat")
    if any(moment.prompts is not False for moment in moments):
        candidates.append("the token budget")
    return candidates


def _limit(moment: Moment, seats: int | None, *, constant: bool) -> Limit:
    """Return the limit that requests probably wait for at a moment.

    vLLM checks for a free seat before it checks for KV blocks, so if all known seats are taken, no other
    limit refuses a request.
    """
    usage = moment.kv_cache_usage_frac
    if moment.running == 0:
        return "none_run" if moment.is_idle else "between_steps"
    if seats is not None and moment.running >= seats:
        return "seats"
    if usage is None:
        return "unknown"
    if seats is None and constant:
        return "seats" if usage < HALF_FULL else "both"
    if usage >= HALF_FULL:
        return "kv" if usage >= NEARLY_FULL else "some_kv"
    return "prompts" if moment.prompts else "unknown"


class _Wording(NamedTuple):
    """Code, certainty, sentence and advice for one limit."""

    code: str
    certainty: Certainty
    template: str
    advice: Message = NOTHING


_WORDINGS: dict[Limit, _Wording] = {
    "kv": _Wording(
        "kv-cache-full",
        "likely",
        "Requests are probably waiting for KV cache space: {counted}[ (90 % or more {shown})].",
        say(
            "If a recording confirms this, a higher {memory:setting} or {dtype:setting} gives the KV cache "
            "more room.",
            memory="--gpu-memory-utilization",
            dtype="--kv-cache-dtype fp8",
        ),
    ),
    "some_kv": _Wording(
        "kv-cache-possible",
        "possible",
        "Requests may be waiting for KV cache space: {counted}; the next request may need more blocks than "
        "are free.",
    ),
    "none_run": _Wording(
        "none-admitted",
        "likely",
        "Requests are waiting although none is running[ {shown}]: {counted}. Probably the first request can "
        "never be admitted, the scheduler is paused, or the requests wait for something else than capacity, "
        "such as a KV transfer.",
        say(
            "While it lasts, {queue:code} shows what each request waits for.",
            queue="schedtrace queue",
        ),
    ),
    "between_steps": _Wording(
        "unexplained-queue",
        "recorded",
        "Requests are waiting although none is running[ {shown}], and this record does not show why: "
        "{counted}. Either the next step admits them, or nothing does.",
        say(
            "If it stays so, {queue:code} shows what each request waits for.",
            queue="schedtrace queue",
        ),
    ),
    "seats": _Wording(
        "seats-taken",
        "likely",
        "Requests are probably waiting for a seat: [all {seats:n seat} ({setting:setting}) are taken]"
        "[the number of running requests stays at exactly {constant:n}, as under a limit ({setting:setting})]"
        "[ {shown}]; {counted}"
        "[. In {full:n} of them, the KV cache is nearly full, too: more seats alone would not help].",
        say("If a recording confirms this, raise {setting:setting}.", setting="--max-num-seqs"),
    ),
    "both": _Wording(
        "seats-or-kv-cache",
        "possible",
        "Requests are waiting for a seat or for KV cache space; this record does not show which: {counted}"
        "; the number of running requests stays at exactly {constant:n}, and the KV cache is at least half "
        "full[ {shown}].",
    ),
    "prompts": _Wording(
        "prompts-pending",
        "possible",
        "Prompts may be waiting for earlier prompts, that is, for token budget: {counted}; prompts are "
        "being computed[ {shown}], and nothing suggests another limit.",
    ),
    "several": _Wording(
        "several-limits",
        "possible",
        "Requests may wait for {candidates}, which this record cannot tell apart: {counted}.",
    ),
    "unknown": _Wording(
        "unexplained-queue",
        "recorded",
        "Requests are waiting, but this record does not show what for: {counted}.",
    ),
}


def extent(values: Sequence[float]) -> Range:
    """Return the smallest and the largest value."""
    return Range(min(values), max(values))


def amount(range_: Range, noun: str = "request") -> Message:
    """Return a range of counts as text, followed by ``requests`` unless ``noun`` is empty."""
    low, high = int(range_.low), int(range_.high)
    counted = say("{high:n request}", high=high) if noun else say("{high:n}", high=high)
    return counted if low == high else say("{low:n} to {counted}", low=low, counted=counted)


def _share(share: Range) -> Message:
    if round(share.low, 2) == round(share.high, 2):
        return say("{high:%}", high=share.high)
    return say("{low:%} to {high:%}", low=share.low, high=share.high)


QUEUE_FRAC = 0.1
"""Minimum share of the requests' time in the queue at which the statement's code is ``time-in-queue``."""

Values = dict[str, float]


def engine_metrics(dumps: Sequence[MetricsDump]) -> list[EngineMetrics]:
    """Return the metrics of each engine in the latest dump, with the window since the first dump."""
    first, last = dumps[0], dumps[-1]
    before = {(engine.engine, engine.model): engine for engine in first.engines} if first is not last else {}
    elapsed_s = None if first.at_s is None or last.at_s is None or first is last else last.at_s - first.at_s
    return [
        _metrics(engine, before.get((engine.engine, engine.model)), elapsed_s)
        for engine in sorted(
            last.engines, key=lambda engine: (engine.model or "", len(engine.engine), engine.engine)
        )
    ]


def is_window(dumps: Sequence[MetricsDump]) -> bool:
    """Return whether the dumps show the same engines after the same server start, the earlier dump first."""
    first, last = (
        {(each.engine, each.model): each.values for each in dump.engines} for dump in (dumps[0], dumps[-1])
    )
    return first.keys() == last.keys() and not any(_restarted(first[key], last[key]) for key in first)


def metrics_statements(dumps: Sequence[MetricsDump], engines: Sequence[EngineMetrics]) -> Iterator[Statement]:
    """Yield the statements that the metrics support, engine by engine."""
    for engine in engines:
        rank = int(engine.engine) if len(engines) > 1 and engine.engine.isdecimal() else None
        yield from _queue(dumps, engine, rank)
        yield from _pace(engine, rank)
        yield from _latencies(engine, rank)
        preemptions = engine.totals.preemptions
        if preemptions is not None:
            yield Statement(
                code="preemptions",
                certainty="recorded",
                engine_rank=rank,
                text=say(
                    "{preemptions} since the server started[, {lately:n} of them between the dumps].",
                    preemptions=say("{count:n preemption}", count=preemptions)
                    if preemptions
                    else "No preemption",
                    lately=engine.window.preemptions if engine.window is not None else None,
                ),
            )


def _metrics(engine: EngineValues, before: EngineValues | None, elapsed_s: float | None) -> EngineMetrics:
    values = engine.values
    usage = values.get("kv_cache_usage_perc", values.get("gpu_cache_usage_perc"))
    window = None
    if before is not None and not _restarted(before.values, values):
        window = _window(
            {name: value - before.values.get(name, 0.0) for name, value in values.items()}, elapsed_s
        )
    return EngineMetrics(
        engine=engine.engine,
        model=engine.model,
        running=_whole(values.get("num_requests_running")),
        waiting=_whole(values.get("num_requests_waiting")),
        waiting_for_capacity=_whole(values.get("waiting_capacity")),
        kv_cache_usage_frac=usage if usage is not None and usage <= 1 else None,
        totals=_window(values, None),
        window=window,
    )


def _restarted(before: Values, after: Values) -> bool:
    """Return whether the server restarted between dumps: a counter was created anew, or decreased."""
    if before.get("prompt_tokens_created") != after.get("prompt_tokens_created"):
        return True
    counters = [name for name in before if name.endswith(("_total", "_count", "_sum"))]
    return any(after.get(name, 0.0) < before[name] for name in counters)


def _window(values: Values, window_s: float | None) -> MetricsWindow:
    """Return counts and means of a window; a mean of no values is None."""

    def window_mean(name: str, factor: float = 1e3) -> float | None:
        count, total = values.get(f"{name}_count", 0.0), values.get(f"{name}_sum")
        return None if not count or total is None else factor * total / count

    caches = (
        [values.get(f"{cache}_{what}_total") for what in ("hits", "queries")]
        for cache in ("prefix_cache", "gpu_prefix_cache")
    )
    hits, queries = next((counts for counts in caches if None not in counts), (None, None))
    latency, queue = (
        values.get("e2e_request_latency_seconds_sum"),
        values.get("request_queue_time_seconds_sum"),
    )
    return MetricsWindow(
        finished_requests=_whole(values.get("e2e_request_latency_seconds_count")),
        preemptions=_whole(values.get("num_preemptions_total")),
        prompt_tokens=_whole(values.get("prompt_tokens_total")),
        generation_tokens=_whole(values.get("generation_tokens_total")),
        ttft_mean_ms=window_mean("time_to_first_token_seconds"),
        tpot_mean_ms=window_mean("request_time_per_output_token_seconds"),
        e2e_mean_ms=window_mean("e2e_request_latency_seconds"),
        queue_mean_ms=window_mean("request_queue_time_seconds"),
        queue_frac=None if not latency or queue is None else queue / latency,
        prefill_mean_ms=window_mean("request_prefill_time_seconds"),
        decode_mean_ms=window_mean("request_decode_time_seconds"),
        prefix_cache_hit_frac=None if not queries or hits is None else hits / queries,
        tokens_per_step=window_mean("iteration_tokens_total", 1.0),
        window_s=window_s,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _queue(dumps: Sequence[MetricsDump], engine: EngineMetrics, rank: int | None) -> Iterator[Statement]:
    """Report what requests wait for at the moments of the dumps.

    A single moment cannot show that the number of running requests is constant. If the KV cache has room,
    another limit applies, but the dump does not show which.
    """
    moments, seen, window = [], 0, engine.window
    is_idle = window is not None and window.generation_tokens == window.prompt_tokens == 0
    for dump in dumps:
        for values in (
            each.values for each in dump.engines if (each.engine, each.model) == (engine.engine, engine.model)
        ):
            waiting = values.get("waiting_capacity", values.get("num_requests_waiting"))
            running = values.get("num_requests_running")
            if waiting is None or running is None:
                continue
            seen += 1
            usage = values.get("kv_cache_usage_perc", values.get("gpu_cache_usage_perc"))
            if waiting:
                moments.append(
                    Moment(
                        round(running),
                        round(waiting),
                        usage,
                        prompts=None,
                        is_idle=is_idle,
                    )
                )
    statement = queue_statement(moments, seats=None, engine_rank=rank, of=seen, noun="dump")
    if statement is None:
        if engine.running and seen:
            text = say(
                "No request is waiting for capacity at the time of {dumps}.",
                dumps="the dump" if seen == 1 else "the dumps",
            )
            yield Statement(
                code="no-queue", certainty="recorded", engine_rank=rank, at=seen, snapshots=seen, text=text
            )
        return
    usages = [moment.kv_cache_usage_frac for moment in moments]
    runs = all(moment.running for moment in moments)
    has_room = runs and all(usage is not None and usage < HALF_FULL for usage in usages)
    if statement.code == "unexplained-queue" and has_room:
        statement.code, statement.certainty = "seats-or-budget", "likely"
        statement.text = say(
            "{waiting:n request} {verb} waiting for capacity while {running:n} {runs} running, and the KV "
            "cache has room (usage {usage:%}). The probable limit is a seat ({seats:setting}) or, while "
            "prompts are computed, the token budget. A paused scheduler looks the same.",
            waiting=moments[-1].waiting,
            verb="is" if moments[-1].waiting == 1 else "are",
            running=moments[-1].running,
            runs="is" if moments[-1].running == 1 else "are",
            usage=usages[-1],
            seats="max_num_seqs",
        )
        statement.advice = say(
            "Compare {seats:setting} with the number of running requests; a second dump under load shows "
            "whether that number stays the same.",
            seats="--max-num-seqs",
        )
    yield statement


def _pace(engine: EngineMetrics, rank: int | None) -> Iterator[Statement]:
    """Report the tokens of a window, which show whether running requests make progress."""
    window = engine.window
    if window is None or window.generation_tokens is None or window.prompt_tokens is None:
        return
    tokens = window.generation_tokens + window.prompt_tokens
    if tokens == 0 and engine.running:
        text = say(
            "{when} no token was computed, while {running:n request} {verb} running. A long prompt looks the "
            "same: vLLM counts its tokens at its end.",
            when=_when(window, lately=True),
            running=engine.running,
            verb="was" if engine.running == 1 else "were",
        )
        yield Statement(code="no-tokens", certainty="possible", engine_rank=rank, text=text)
    elif tokens and window.window_s:
        text = say(
            "{when} vLLM counted {prompt:n} prompt tokens/s and {output:n} output tokens/s.",
            when=_when(window, lately=True),
            prompt=window.prompt_tokens / window.window_s,
            output=window.generation_tokens / window.window_s,
        )
        yield Statement(code="throughput", certainty="recorded", engine_rank=rank, text=text)


def _latencies(engine: EngineMetrics, rank: int | None) -> Iterator[Statement]:
    """Report where finished requests spent their time: between the dumps, or else since the start."""
    lately = engine.window is not None and bool(engine.window.finished_requests)
    window = engine.window if engine.window is not None and lately else engine.totals
    if not window.finished_requests:
        return
    share = window.queue_frac
    text = say(
        "{when} {requests:n request} finished[: {e2e:ms} end to end on average][, of which {queue:ms}]"
        "[ ({share:%})][{queued:?} in the queue][, {prefill:ms} prefill][, {decode:ms} decode]. "
        "[On average, TTFT is {ttft:ms}[ and TPOT {tpot:ms}].]",
        when=_when(window, lately=lately),
        requests=window.finished_requests,
        e2e=window.e2e_mean_ms,
        queue=window.queue_mean_ms,
        share=share,
        queued=window.queue_mean_ms is not None,
        prefill=window.prefill_mean_ms,
        decode=window.decode_mean_ms,
        ttft=window.ttft_mean_ms,
        tpot=window.tpot_mean_ms,
    )
    code = "time-in-queue" if share is not None and share >= QUEUE_FRAC else "time-computing"
    yield Statement(code=code, certainty="recorded", engine_rank=rank, text=text)


def _when(window: MetricsWindow, *, lately: bool) -> Message | str:
    if not lately:
        return "Since the server started,"
    if window.window_s is None:
        return "Between the dumps,"
    return say("Within {window:s},", window=window.window_s)
