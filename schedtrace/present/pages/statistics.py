"""Figures beside the findings: latency by class, step and token times, engines, caches, drafts, outcomes."""

from collections.abc import Iterator

from schedtrace.model.message import Message, joined
from schedtrace.model.say import say
from schedtrace.model.statistics import (
    ClassLatency,
    Distribution,
    DraftUse,
    EngineFigures,
    Outcomes,
    PrefixCacheUse,
    Statistics,
)
from schedtrace.present.numbers import counted, integer, milliseconds, number, percent
from schedtrace.present.pages.report_tables import MOST_ROWS, left_out
from schedtrace.present.sections import Cell, Column, Fact, Facts, Section, Table, Text


def statistics_sections(statistics: Statistics) -> Iterator[Section]:
    """Those that have something to show."""
    if statistics.latency:
        yield latency_table(statistics.latency)
    if (durations := durations_table(statistics)).rows:
        yield durations
    if len(statistics.engines) > 1:
        yield engines_table(statistics.engines)
    if (facts := counts(statistics)).facts:
        yield facts


def latency_table(classes: list[ClassLatency]) -> Table:
    """One row per class of requests."""
    columns = [
        Column("latency"),
        Column("done", numeric=True),
        Column("queued", numeric=True),
        Column("queue ms\np50 / p99", numeric=True),
        Column("TTFT ms\np50 / p99", numeric=True),
        Column("TPOT ms\np50 / p99", numeric=True),
        Column("E2E ms\np50", numeric=True),
    ]
    rows: list[list[Cell]] = [
        [
            _class(row),
            integer(row.finished),
            percent(row.waiting_frac),
            *(_p50_p99(times) for times in (row.queue_ms, row.ttft_ms, row.tpot_ms)),
            milliseconds(row.e2e_ms.p50) if row.e2e_ms else "-",
        ]
        for row in classes[:MOST_ROWS]
    ]
    return Table(columns, rows, left_out(len(classes)))


def _class(row: ClassLatency) -> Text:
    if row.by == "priority":
        return f"priority {row.name}"
    if row.by == "lora":
        return f"adapter {row.name}" if row.name else "base model"
    return "all requests"


def _p50_p99(times: Distribution | None) -> str:
    return f"{milliseconds(times.p50)} / {milliseconds(times.p99)}" if times else "-"


def durations_table(statistics: Statistics) -> Table:
    """Step durations and times between tokens."""
    durations = statistics.durations
    named = [
        ("step on the device", durations.device_ms),
        ("step start to start", durations.start_to_start_ms),
        ("between tokens", durations.inter_token_ms),
    ]
    columns = [
        Column("ms"),
        *(Column(name, numeric=True) for name in ("count", "mean", "p50", "p90", "p99", "max")),
    ]
    rows: list[list[Cell]] = [
        [
            name,
            integer(times.count),
            *(milliseconds(value) for value in (times.mean, times.p50, times.p90, times.p99, times.max)),
        ]
        for name, times in named
        if times is not None
    ]
    return Table(columns, rows)


MOST_ENGINES = 16
"""Of more, those with the most and the fewest requests are shown."""


def engines_table(engines: list[EngineFigures], most: int = MOST_ENGINES) -> Table:
    """Data-parallel engines side by side, and their sum; of many those with the most and the fewest requests.

    Args:
        engines: Each one, and the last for all.
        most: Rows, without that for all.
    """
    columns = [
        Column("engine"),
        Column("done", numeric=True),
        Column("steps", numeric=True),
        Column("running\nmean", numeric=True),
        Column("waiting\nmean", numeric=True),
        Column("output\ntok/s", numeric=True),
        Column("KV\nused", numeric=True),
        Column("preempted", numeric=True),
        Column("dummy\nbatches", numeric=True),
        Column("stalled\nms", numeric=True),
    ]
    *each, whole = engines
    shown = each if len(each) <= most else _extremes(each, most)
    less = len(each) - len(shown)
    more = f"{counted(less, 'engine')} between these: --format json lists them" if less else ""
    rows: list[list[Cell]] = [
        [
            "all" if row.engine_rank is None else str(row.engine_rank),
            integer(row.requests_finished),
            integer(row.steps),
            number(row.mean_running, 1),
            number(row.mean_waiting, 1),
            integer(row.output_tokens_per_s),
            percent(row.kv_used_frac),
            integer(row.preemptions),
            integer(row.dummy_batches),
            milliseconds(row.stalled_ms),
        ]
        for row in [*shown, whole]
    ]
    return Table(columns, rows, more)


def _extremes(engines: list[EngineFigures], most: int) -> list[EngineFigures]:
    """Those with the most requests at a time and, of the rest, those with the fewest, in their order."""
    by_load = sorted(engines, key=lambda row: -((row.mean_running or 0) + (row.mean_waiting or 0)))
    kept = [*by_load[: most - most // 2], *by_load[len(by_load) - most // 2 :]]
    return [row for row in engines if row in kept]


def counts(statistics: Statistics) -> Facts:
    """Prefix cache, drafts, and how requests ended."""
    facts: list[Fact] = []
    if statistics.prefix_cache:
        facts.append(Fact("cache", [_prefix_cache(statistics.prefix_cache)]))
    if statistics.drafts:
        facts.append(Fact("drafts", [_drafts(statistics.drafts)]))
    if statistics.outcomes:
        facts.append(Fact("requests", [_outcomes(statistics.outcomes)]))
    return Facts(facts)


def _prefix_cache(use: PrefixCacheUse) -> Message:
    sources = [
        say("{tokens:n} {source}", tokens=tokens, source=source)
        for tokens, source in ((use.local_tokens, "local"), (use.external_tokens, "external"))
        if tokens is not None
    ]
    return say(
        "{hits:n} of {prompt:n prompt token} ({share:%}{sources}); {with_hit:n} of "
        "{requests:n request} found some",
        hits=use.hit_tokens,
        prompt=use.prompt_tokens,
        share=use.hit_frac,
        sources=say(": {each}", each=joined(sources, ", ")) if sources else "",
        with_hit=use.requests_with_hit,
        requests=use.requests,
    )


def _drafts(use: DraftUse) -> Message:
    invalid = ""
    if use.invalid:
        invalid = f", {integer(use.invalid)} forbidden by a grammar"
    return say(
        "{accepted:n} of {drafts:n draft token} accepted ({share:%}{invalid}); rejected ones "
        "were {wasted:%} of all scheduled tokens",
        accepted=use.accepted,
        drafts=use.drafts,
        share=use.accepted_frac,
        invalid=invalid,
        wasted=use.wasted_frac,
    )


def _outcomes(outcomes: Outcomes) -> Message:
    return say(
        "{arrived:n} arrived: {finished:n} finished, {aborted:n} aborted, {errored:n} ended "
        "otherwise{itself}, {open:n} unfinished",
        arrived=outcomes.arrived,
        finished=outcomes.finished,
        aborted=outcomes.aborted,
        errored=outcomes.errored,
        itself=say(" ({count:n} by the scheduler)", count=outcomes.by_scheduler)
        if outcomes.by_scheduler
        else "",
        open=outcomes.unfinished,
    )
