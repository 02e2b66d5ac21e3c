"""Page of records with less data than a trace: what each shows, what it lacks, and what to run instead."""

from collections.abc import Iterator

from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.numbers import number, percent
from schedtrace.model.records import (
    ClientLatency,
    ConsoleSnapshots,
    EngineMetrics,
    Range,
    Records,
    ServerStart,
)
from schedtrace.model.say import say
from schedtrace.present.sections import (
    Commands,
    Content,
    Field,
    FindingSection,
    Headline,
    Note,
    Page,
    Section,
    Style,
    Styled,
    Table,
    figure_field,
    table,
)

CERTAINTIES = {"recorded": Style.INFO, "likely": Style.WARNING, "possible": Style.DIM}
MOST_ENGINES = 16


def records_page(records: Records) -> Page[Records]:
    """Return the page of all records, one after the other."""
    return Page(records, _sections)


def _sections(records: Records) -> Iterator[Section]:
    for record in records.records:
        source = f", {record.source}" if record.source else ""
        about = say("  {kind}{source}: shows less than a schedtrace trace", kind=record.kind, source=source)
        server = NOTHING if record.server is None else _server(record.server)
        lines: list[Content] = [server] if server else []
        yield Headline(say("{path:code}", path=record.path), about, lines, list(record.notices))
        if record.engines:
            yield _engines_table(record.engines)
        if record.metrics:
            yield table(record.metrics, METRICS, most=MOST_ENGINES)
        if record.latencies:
            yield _latencies_table(record.latencies)
        for statement in record.statements:
            yield FindingSection(
                Styled(statement.certainty, CERTAINTIES[statement.certainty]),
                statement.code,
                "" if statement.engine_rank is None else f"engine {statement.engine_rank}",
                [statement.text],
                statement.advice,
                engine_rank=statement.engine_rank or 0,
            )
        if record.commands:
            yield Note(record.cannot_tell)
            yield Commands("To find out more:", record.commands)


def _server(server: ServerStart) -> Message:
    parts = [
        say("[vLLM {vllm_version}]", server),
        say("[{model:code}]", server),
        say("[{setting:setting} {token_budget:n}]", server, setting="max_num_batched_tokens"),
        say("[{setting:setting} {max_num_seqs:n}]", server, setting="max_num_seqs"),
        say("[{setting:setting} {max_model_len:n}]", server, setting="max_model_len"),
        say("[KV cache {kv_cache_tokens:n token}]", server),
        say("[{kv_blocks:n KV block}]", server),
        say(
            "[room for {max_concurrency:n1} requests of {longest:setting} tokens]",
            server,
            longest="max_model_len",
        ),
    ]
    return joined(parts, ", ")


def _engines_table(engines: list[ConsoleSnapshots]) -> Table:
    fields: list[Field[ConsoleSnapshots]] = [
        figure_field(
            "engine",
            lambda engine: f"all {engine.engines}" if engine.engine_rank is None else str(engine.engine_rank),
        ),
        figure_field("snapshots", lambda engine: f"{engine.snapshots:,}"),
        figure_field("running", lambda engine: _extent(engine.running)),
        figure_field("waiting", lambda engine: _extent(engine.waiting)),
        figure_field("KV usage", lambda engine: _extent(engine.kv_cache_usage_frac, share=True)),
        figure_field("prompt\ntok/s", lambda engine: _extent(engine.prompt_tokens_per_s)),
        figure_field("output\ntok/s", lambda engine: _extent(engine.generation_tokens_per_s)),
        figure_field("hit rate", lambda engine: percent(engine.prefix_cache_hit_frac)),
    ]
    if any(engine.acceptance_frac for engine in engines):
        fields.append(
            figure_field("accepted\ndrafts", lambda engine: _extent(engine.acceptance_frac, share=True))
        )
    return table(engines, fields, most=MOST_ENGINES)


def _extent(extent: Range | None, *, share: bool = False) -> str:
    if extent is None:
        return number(None)
    low, high = (percent(value) if share else f"{value:,.0f}" for value in (extent.low, extent.high))
    return high if low == high else f"{low} - {high}"


def _latencies_table(latencies: list[ClientLatency]) -> Table:
    fields: list[Field[ClientLatency]] = [
        Field("latency, ms", lambda latency: latency.metric.upper()),
        figure_field("client\nmean", lambda latency: number(latency.mean_ms)),
        figure_field("client\np50", lambda latency: number(latency.p50_ms)),
        figure_field("client\np99", lambda latency: number(latency.p99_ms)),
    ]
    if any(latency.engine_p50_ms is not None for latency in latencies):
        fields += [
            figure_field("engine\np50", lambda latency: number(latency.engine_p50_ms)),
            figure_field("engine\np99", lambda latency: number(latency.engine_p99_ms)),
        ]
    return table(latencies, fields)


METRICS: list[Field[EngineMetrics]] = [
    figure_field("engine", lambda engine: engine.engine),
    figure_field("running", lambda engine: number(engine.running)),
    figure_field("waiting", lambda engine: number(engine.waiting)),
    figure_field("KV usage", lambda engine: percent(engine.kv_cache_usage_frac)),
    figure_field("finished", lambda engine: number(engine.totals.finished_requests)),
    figure_field("preemptions", lambda engine: number(engine.totals.preemptions)),
    figure_field("hit rate", lambda engine: percent(engine.totals.prefix_cache_hit_frac)),
    figure_field("tokens\na step", lambda engine: number(engine.totals.tokens_per_step)),
]
