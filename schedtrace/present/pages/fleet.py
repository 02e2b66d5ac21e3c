"""A fleet: engines that differ from their peers by cause, where all requests' time went, and all engines."""

import shlex
from collections import defaultdict
from collections.abc import Iterator

from schedtrace.model.fleet import (
    FaultKind,
    FleetEngine,
    FleetLatency,
    FleetReport,
    FleetRootCause,
    LeftOut,
    PeerDifference,
)
from schedtrace.model.message import NOTHING, Message, joined
from schedtrace.model.printable import integer, number, percent
from schedtrace.model.report import Report
from schedtrace.model.say import say
from schedtrace.present.pages.disaggregated import disaggregated_sections
from schedtrace.present.pages.report import report_page
from schedtrace.present.pages.tenants import tenant_sections
from schedtrace.present.phrases import plain, time_part
from schedtrace.present.sections import (
    Bars,
    Commands,
    Content,
    Field,
    Headline,
    Page,
    Part,
    RootCauseSection,
    Section,
    Shares,
    Style,
    Styled,
    Table,
    answer_note,
    basis_note,
    figure_field,
    table,
)

MOST_PARTS, MOST_ROOTS, MOST_ENGINES, MOST_LEFT_OUT = 7, 6, 12, 8
MOST_NAMED = 3
"""Engines of one cause whose evidence is shown."""
NAMED_FROM_FRAC = 0.01
SHOWS_BY_FRAC = 0.02
"""Difference from its peers' step time from which a ratio is coloured."""
LATENCIES = {"queue": "queue", "ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
TITLES: dict[FaultKind, str] = {
    "interrupted": "Interrupted",
    "slow-steps": "Slow steps",
    "slow-host-work": "Slow work on the host",
    "smaller-limit": "A smaller limit than its peers",
    "more-load": "More load than its peers",
    "no-arrivals": "No requests for a while",
    "unexplained": "Longer waits for no reason that shows",
}
ADVICE: dict[tuple[FaultKind, str], str] = {
    ("interrupted", "engine"): "Its own report names the steps; ask who paused or stopped it.",
    (
        "slow-steps",
        "host",
    ): "Compare the host with others: clocks, power and heat of its devices, other work.",
    ("slow-steps", "engine"): "Compare its device with others: clocks, power, heat, other processes on it.",
    ("slow-host-work", "engine"): "Look at the processors of its host: other work, limits of a container.",
    ("smaller-limit", "engine"): "Start it with the settings of its peers.",
    ("more-load", "router"): "Look at the router: sessions or prefixes that stick to this engine.",
    ("no-arrivals", "client"): "Look at its clients, and at what the router knew of it at that time.",
    ("unexplained", "engine"): "Read its own report.",
}
COLUMN_WORDS: dict[FaultKind, str] = {
    "interrupted": "interrupted",
    "slow-steps": "slow steps",
    "slow-host-work": "slow host",
    "smaller-limit": "small limit",
    "more-load": "more load",
    "no-arrivals": "no arrivals",
    "unexplained": "long waits",
}


def fleet_page(report: FleetReport) -> Page[FleetReport]:
    """Return the page of a fleet."""
    return Page(report, _sections)


def engine_page(report: Report) -> Page[Report]:
    """Return the page of one engine's own report; a remote trace has no next commands, which read files."""
    page = report_page(report)
    is_remote = any("://" in run.path for run in report.runs)
    if not is_remote:
        return page
    return Page(report, lambda _: (each for each in page.sections if not isinstance(each, Commands)))


def _sections(report: FleetReport) -> Iterator[Section]:
    yield _headline(report)
    yield answer_note(joined(report.verdict))
    yield from _differences(report)
    if report.time_split:
        yield Shares("Where the time of all requests went", _parts(report))
    if report.latencies:
        yield _latencies_table(report.latencies)
    if report.disaggregated is not None:
        yield from disaggregated_sections(report.disaggregated)
    if report.root_causes:
        yield _roots_table(report.root_causes)
    if report.tenants is not None:
        yield from tenant_sections(report.tenants, len(report.engines))
    yield _engines_table(report.engines)
    yield basis_note("Clocks:", _clocks(report))
    yield basis_note("Read:", _read(report))
    if report.read.left_out:
        fields: list[Field[LeftOut]] = [
            Field("left out", lambda each: each.path),
            Field("why", lambda each: each.why),
        ]
        yield table(report.read.left_out, fields, most=MOST_LEFT_OUT)
    first = report.engines[0].engine
    yield Commands(
        "More:",
        [shlex.join(["schedtrace", "fleet", *report.paths, "--engine", first])] if report.paths else [],
    )


def _headline(report: FleetReport) -> Headline:
    hosts = len(report.hosts)
    title = say("{engines:n engine} on {hosts:n host}", engines=len(report.engines), hosts=hosts)
    groups = [
        say("{engines:n engine} of {model:code} on {device}[ ({role})]", group) for group in report.groups
    ]
    requests = say("{requests:n request}", requests=sum(engine.requests for engine in report.engines))
    problems = [engine for engine in report.read.engines if engine.problems]
    warnings: list[Message] = []
    if report.read.left_out:
        warnings.append(
            say("{left_out:n input} could not be used; see below.", left_out=len(report.read.left_out))
        )
    if problems:
        first = problems[0]
        warnings.append(
            say(
                "{problems:n trace} {have} problems; {engine:code}: {problem}",
                problems=len(problems),
                have="has" if len(problems) == 1 else "have",
                engine=first.engine,
                problem=first.problems[0],
            )
        )
    about = say("[  {window:code}]", window=report.window)
    return Headline(title, about, [joined([*groups, requests], ", ")], list(warnings))


def _differences(report: FleetReport) -> Iterator[RootCauseSection]:
    by_cause: dict[tuple[FaultKind, str], list[PeerDifference]] = defaultdict(list)
    for difference in report.differences:
        by_cause[difference.kind, difference.where].append(difference)
    for place, ((kind, where), engines) in enumerate(by_cause.items(), 1):
        paragraphs: list[Content] = [_evidence(difference) for difference in engines[:MOST_NAMED]]
        if more := engines[MOST_NAMED:]:
            names = joined([say("{name:code}", name=difference.engine) for difference in more], ", ")
            paragraphs.append(say("Likewise {names}.", names=names))
        hosts = {difference.host for difference in engines} if where == "host" else ()
        yield RootCauseSection(
            place,
            Styled(TITLES[kind], Style.WARNING),
            say(
                "{engines:n engine}[ on {hosts:n host}]: look at the {where}",
                engines=len(engines),
                hosts=len(hosts),
                where=where,
            ),
            paragraphs,
            [ADVICE[kind, where]],
        )


def _evidence(difference: PeerDifference) -> Message:
    also = ", ".join(COLUMN_WORDS[kind] for kind in difference.also)
    return say(
        "{engine:code}[ on {host}]: {message}[ {effect}][ Also: {also}.]",
        difference,
        host="" if difference.host in difference.engine else difference.host,
        effect=difference.effect if difference.kind == "slow-steps" else NOTHING,
        also=also,
    )


def _parts(report: FleetReport) -> list[Part]:
    shown = [part for part in report.time_split if part.share_frac >= NAMED_FROM_FRAC][:MOST_PARTS]
    parts = []
    for part in shown:
        label, style = time_part(part.part, part.cause)
        parts.append(Part(label, part.share_frac, style, part.cause or part.part))
    rest = sum(part.share_frac for part in report.time_split) - sum(part.share_frac for part in shown)
    return [*parts, *([Part("other", rest, Style.DIM)] if rest >= NAMED_FROM_FRAC else [])]


def _latencies_table(latencies: list[FleetLatency]) -> Table:
    fields: list[Field[FleetLatency]] = [
        Field("latency, ms", lambda latency: LATENCIES[latency.metric]),
        figure_field("requests", lambda latency: integer(latency.count)),
        figure_field("mean", lambda latency: number(latency.mean_ms)),
        figure_field("p50", lambda latency: number(latency.p50_ms)),
        figure_field("p90", lambda latency: number(latency.p90_ms)),
        figure_field("p99", lambda latency: number(latency.p99_ms)),
        figure_field("max", lambda latency: number(latency.max_ms)),
    ]
    return table(latencies, fields, f"Percentiles within {percent(latencies[0].error_frac)}.")


def _roots_table(roots: list[FleetRootCause]) -> Table:
    fields: list[Field[FleetRootCause]] = [
        Field("engines' own reports", lambda root: f"{plain(root.title)} ({root.code})"),
        figure_field("engines", lambda root: integer(root.engines)),
        figure_field("leads", lambda root: integer(root.leads)),
        figure_field("share of\nall time", lambda root: percent(root.share_frac)),
        figure_field("would\nsave", lambda root: percent(root.saved_frac)),
        Field("most in", lambda root: root.most),
    ]
    return table(roots, fields, most=MOST_ROOTS)


def _engines_table(engines: list[FleetEngine]) -> Table:
    most = max((count for engine in engines for count in engine.arrivals), default=0) or 1
    fields: list[Field[FleetEngine]] = [
        Field("engine", lambda engine: engine.engine),
        Field("differs", _kind_cell),
        figure_field("req/s", lambda engine: number(engine.requests_per_s)),
        figure_field("step\ntime", _step_time_cell),
        figure_field("wait-\ning", lambda engine: percent(engine.waiting_frac)),
        figure_field("TTFT\np99 ms", lambda engine: number(engine.ttft_p99_ms)),
        Field(
            "arrivals",
            lambda engine: Bars([count / most for count in engine.arrivals], Style.INFO),
        ),
    ]
    return table(engines, fields, most=MOST_ENGINES)


def _kind_cell(engine: FleetEngine) -> Content:
    if not engine.kinds:
        return ""
    return Styled(COLUMN_WORDS[engine.kinds[0]], Style.WARNING)


def _step_time_cell(engine: FleetEngine) -> Content:
    ratio = engine.step_time_ratio
    if ratio is None:
        return number(None)
    return Styled(f"x {number(ratio, 2)}", Style.BAD if "slow-steps" in engine.kinds else None)


def _clocks(report: FleetReport) -> Message:
    clocks = report.clocks
    if clocks.virtual == len(report.engines):
        return say("All traces have the virtual clock of a simulation.")
    apart = say("[differ by up to {apart_us:us}]", clocks) if clocks.apart_us is not None else NOTHING
    return say(
        "Times of engines on {hosts:n host} {apart}[ ({unknown:n trace} without the error of its clock)]. "
        "{figures} compares times of two hosts.",
        clocks,
        figures="Only the time to first token across engines"
        if report.disaggregated is not None
        else "No figure here",
        apart=apart or ("agree exactly" if clocks.apart_us == 0 else "differ by an unknown time"),
    )


def _read(report: FleetReport) -> Message:
    engines = report.read.engines
    return say(
        "{engines:n engine}, {files:n file}, {size:n} MB[; {cached:n} from the cache]"
        "[; {redone:n} read again because a process ended].",
        engines=len(engines),
        files=sum(engine.files for engine in engines),
        size=sum(engine.size_bytes for engine in engines) / 1e6,
        cached=sum(engine.cached for engine in engines),
        redone=report.read.redone,
    )
