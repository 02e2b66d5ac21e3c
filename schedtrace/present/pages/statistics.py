"""Figures beside the findings: latency by class, step and token times, engines, caches, drafts, outcomes."""

from collections.abc import Iterator

from schedtrace.model.message import Message, joined
from schedtrace.model.say import say
from schedtrace.model.statistics import ClassLatency, Distribution, EngineFigures, PrefixCacheUse, Statistics
from schedtrace.present.numbers import counted, integer, number, percent
from schedtrace.present.pages.report_tables import MOST_ROWS, p50, p50_p99
from schedtrace.present.sections import Fact, Facts, Field, Section, Table, figure, table


def _class(row: ClassLatency) -> str:
    if row.by == "priority":
        return f"priority {row.name}"
    if row.by == "lora":
        return f"adapter {row.name}" if row.name else "base model"
    return "all requests"


LATENCY: list[Field[ClassLatency]] = [
    Field("latency", _class),
    figure("done", lambda row: integer(row.finished)),
    figure("queued", lambda row: percent(row.waiting_frac)),
    figure("queue ms\np50 / p99", lambda row: p50_p99(row.queue_ms)),
    figure("TTFT ms\np50 / p99", lambda row: p50_p99(row.ttft_ms)),
    figure("TPOT ms\np50 / p99", lambda row: p50_p99(row.tpot_ms)),
    figure("E2E ms\np50", lambda row: p50(row.e2e_ms)),
]
"""One row per class of requests."""
DURATIONS: list[Field[tuple[str, Distribution]]] = [
    Field("ms", lambda row: row[0]),
    figure("count", lambda row: integer(row[1].count)),
    figure("mean", lambda row: number(row[1].mean)),
    figure("p50", lambda row: number(row[1].p50)),
    figure("p90", lambda row: number(row[1].p90)),
    figure("p99", lambda row: number(row[1].p99)),
    figure("max", lambda row: number(row[1].max)),
]
"""Step durations and times between tokens, each by its name."""
ENGINES: list[Field[EngineFigures]] = [
    Field("engine", lambda row: "all" if row.engine_rank is None else str(row.engine_rank)),
    figure("done", lambda row: integer(row.requests_finished)),
    figure("steps", lambda row: integer(row.steps)),
    figure("running\nmean", lambda row: number(row.mean_running, 1)),
    figure("waiting\nmean", lambda row: number(row.mean_waiting, 1)),
    figure("output\ntok/s", lambda row: integer(row.output_tokens_per_s)),
    figure("KV\nused", lambda row: percent(row.kv_used_frac)),
    figure("preempted", lambda row: integer(row.preemptions)),
    figure("dummy\nbatches", lambda row: integer(row.dummy_batches)),
    figure("stalled\nms", lambda row: number(row.stalled_ms)),
]
MOST_ENGINES = 16
"""Of more, those with the most and the fewest requests are shown."""


def statistics_sections(statistics: Statistics) -> Iterator[Section]:
    """Those that have something to show."""
    if statistics.latency:
        yield table(statistics.latency, LATENCY, most=MOST_ROWS)
    durations = statistics.durations
    named = [
        ("step on the device", durations.device_ms),
        ("step start to start", durations.start_to_start_ms),
        ("between tokens", durations.inter_token_ms),
    ]
    if known := [(name, times) for name, times in named if times is not None]:
        yield table(known, DURATIONS)
    if len(statistics.engines) > 1:
        yield engines_table(statistics.engines)
    if facts := [*_counts(statistics)]:
        yield Facts(facts)


def engines_table(engines: list[EngineFigures], most: int = MOST_ENGINES) -> Table:
    """Data-parallel engines side by side, and their sum; of many those with the most and the fewest requests.

    Args:
        engines: Each one, and the last for all.
        most: Rows, without that for all.
    """
    *each, whole = engines
    shown = each if len(each) <= most else _extremes(each, most)
    less = len(each) - len(shown)
    more = f"{counted(less, 'engine')} between these: --format json lists them" if less else ""
    return table([*shown, whole], ENGINES, more)


def _extremes(engines: list[EngineFigures], most: int) -> list[EngineFigures]:
    """Those with the most requests at a time and, of the rest, those with the fewest, in their order."""
    by_load = sorted(engines, key=lambda row: -((row.mean_running or 0) + (row.mean_waiting or 0)))
    kept = [*by_load[: most - most // 2], *by_load[len(by_load) - most // 2 :]]
    return [row for row in engines if row in kept]


def _counts(statistics: Statistics) -> Iterator[Fact]:
    """Prefix cache, drafts, and how requests ended."""
    if statistics.prefix_cache:
        yield Fact("cache", [_prefix_cache(statistics.prefix_cache)])
    if statistics.drafts:
        accepted = say(
            "{accepted:n} of {drafts:n draft token} accepted ({accepted_frac:%}"
            "[, {invalid:n} forbidden by a grammar]); rejected ones were {wasted_frac:%} of all scheduled "
            "tokens",
            statistics.drafts,
        )
        yield Fact("drafts", [accepted])
    if statistics.outcomes:
        ended = say(
            "[{there:n} were there, ]{arrived:n} arrived: {finished:n} finished, {aborted:n} aborted, "
            "{errored:n} ended otherwise[ ({by_scheduler:n} by the scheduler)], {unfinished:n} unfinished",
            statistics.outcomes,
            there=statistics.outcomes.present or 0,
        )
        yield Fact("requests", [ended])


def _prefix_cache(use: PrefixCacheUse) -> Message:
    sources = [
        say("{tokens:n} {source}", tokens=tokens, source=source)
        for tokens, source in ((use.local_tokens, "local"), (use.external_tokens, "external"))
        if tokens is not None
    ]
    return say(
        "{hit_tokens:n} of {prompt_tokens:n prompt token} ({hit_frac:%}[: {sources}]); {requests_with_hit:n} "
        "of {requests:n request} found some",
        use,
        sources=joined(sources, ", "),
    )
