"""Page of a fleet: engines that differ from their peers, where requests' time went, and all engines.

A fleet may add sections about its tenants, and about requests across prefill and decode engines.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterator

from schedtrace.model.disaggregated import (
    Disaggregated,
    TransferPair,
    TransferPart,
    TransferPartName,
    UnmatchedReason,
)
from schedtrace.model.fleet import (
    FaultKind,
    FleetEngine,
    FleetLatency,
    FleetReport,
    FleetRootCause,
    FleetTenant,
    FleetTenants,
    LeftOut,
    PeerDifference,
    SummaryTenantWait,
)
from schedtrace.model.message import NOTHING, Message, joined, plain
from schedtrace.model.numbers import integer, number, percent
from schedtrace.model.report import Report
from schedtrace.model.say import say
from schedtrace.present.pages.report import report_page, time_parts
from schedtrace.present.sections import (
    Bars,
    Commands,
    Content,
    Field,
    Headline,
    Note,
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
"""Number of engines per cause whose evidence is shown."""
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
    """Return the page of one engine's own report; if it is remote, without commands that read files."""
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
        yield Shares("Where the time of all requests went", time_parts(report.time_split, MOST_PARTS))
    if report.latencies:
        within = percent(report.latencies[0].error_frac)
        yield table(report.latencies, LATENCY, f"Percentiles within {within}.")
    if report.disaggregated is not None:
        yield from disaggregated_sections(report.disaggregated)
    if report.root_causes:
        yield table(report.root_causes, ROOT, most=MOST_ROOTS)
    if report.tenants is not None:
        yield from tenant_sections(report.tenants, len(report.engines))
    yield _engines_table(report.engines)
    yield basis_note("Clocks:", _clocks(report))
    engines = report.read.engines
    read = say(
        "{engines:n engine}, {files:n file}, {size:n} MB[; {cached:n} from the cache]"
        "[; {redone:n} read again because a process ended].",
        engines=len(engines),
        files=sum(engine.files for engine in engines),
        size=sum(engine.size_bytes for engine in engines) / 1e6,
        cached=sum(engine.cached for engine in engines),
        redone=report.read.redone,
    )
    yield basis_note("Read:", read)
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
        paragraphs: list[Content] = [
            say(
                "{engine:code}[ on {host}]: {message}[ {effect}][ Also: {also}.]",
                difference,
                host="" if difference.host in difference.engine else difference.host,
                effect=difference.effect if kind == "slow-steps" else NOTHING,
                also=", ".join(COLUMN_WORDS[also] for also in difference.also),
            )
            for difference in engines[:MOST_NAMED]
        ]
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


LATENCY: list[Field[FleetLatency]] = [
    Field("latency, ms", lambda latency: LATENCIES[latency.metric]),
    figure_field("requests", lambda latency: integer(latency.count)),
    figure_field("mean", lambda latency: number(latency.mean_ms)),
    figure_field("p50", lambda latency: number(latency.p50_ms)),
    figure_field("p90", lambda latency: number(latency.p90_ms)),
    figure_field("p99", lambda latency: number(latency.p99_ms)),
    figure_field("max", lambda latency: number(latency.max_ms)),
]
ROOT: list[Field[FleetRootCause]] = [
    Field("engines' own reports", lambda root: f"{plain(root.title)} ({root.code})"),
    figure_field("engines", lambda root: integer(root.engines)),
    figure_field("leads", lambda root: integer(root.leads)),
    figure_field("share of\nall time", lambda root: percent(root.share_frac)),
    figure_field("would\nsave", lambda root: percent(root.saved_frac)),
    Field("most in", lambda root: root.most),
]


def _engines_table(engines: list[FleetEngine]) -> Table:
    most = max((count for engine in engines for count in engine.arrivals), default=0) or 1
    fields: list[Field[FleetEngine]] = [
        Field("engine", lambda engine: engine.engine),
        Field(
            "differs",
            lambda engine: Styled(COLUMN_WORDS[engine.kinds[0]], Style.WARNING) if engine.kinds else "",
        ),
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


MOST_TENANTS, MOST_WAITS = 10, 8


def tenant_sections(tenants: FleetTenants, engines: int) -> Iterator[Section]:
    """Yield the usage of a fleet by tenant, and which tenants waited for which.

    Args:
        tenants: Usage by tenant.
        engines: Number of engines.
    """
    fields: list[Field[FleetTenant]] = [
        Field("tenant", lambda tenant: tenant.tenant),
        figure_field("req.", lambda tenant: integer(tenant.requests)),
        figure_field("waiting\ns", lambda tenant: number(tenant.waiting_us / 1e6)),
        figure_field("running\ns", lambda tenant: number(tenant.running_us / 1e6)),
        figure_field("prompt\ntokens", lambda tenant: integer(tenant.prompt_tokens)),
        figure_field("output\ntokens", lambda tenant: integer(tenant.output_tokens)),
        figure_field("recom-\nputed", lambda tenant: integer(tenant.recomputed_tokens)),
        figure_field("device\ns", lambda tenant: number(tenant.device_us / 1e6)),
        figure_field("share", lambda tenant: percent(tenant.device_frac)),
    ]
    if tenants.price_per_gpu_hour is not None:
        fields.append(figure_field("cost", lambda tenant: number(tenant.cost)))
    yield table(tenants.tenants, fields, most=MOST_TENANTS)
    division = say(
        "named by {key:code}; device time is divided {way}.[ {cost}]",
        key=tenants.key,
        way=_way(tenants.by_model, engines),
        cost=_idle(tenants),
    )
    yield basis_note("Tenants:", division)
    if tenants.waits:
        whole = sum(wait.us for wait in tenants.waits)
        wait_fields: list[Field[SummaryTenantWait]] = [
            Field("requests of", lambda wait: wait.waiter),
            Field("waited for what was held by", lambda wait: wait.holder),
            figure_field("s", lambda wait: number(wait.us / 1e6)),
            figure_field("share", lambda wait: percent(wait.us / whole)),
        ]
        yield table(tenants.waits, wait_fields, most=MOST_WAITS)


def _way(by_model: int, engines: int) -> Message:
    if by_model in (0, engines):
        return say("by the scheduled tokens") if not by_model else say("by a fitted step-time model")
    return say(
        "by a fitted step-time model on {by_model:n engine}, by the scheduled tokens on {rest:n}",
        by_model=by_model,
        rest=engines - by_model,
    )


def _idle(tenants: FleetTenants) -> Message | str:
    if tenants.price_per_gpu_hour is None:
        return ""
    if tenants.idle_cost is None:
        return say("The GPUs of some engines are not recorded, so their cost is unknown.")
    return say(
        "The time in which no batch ran costs {idle:n} more, at {price:n2} per GPU hour.",
        idle=tenants.idle_cost,
        price=tenants.price_per_gpu_hour,
    )


MOST_PAIRS, MOST_HELD = 6, 3
HELD_FROM_FRAC = 0.1
"""Share of an engine's blocks above which the blocks that transfers hold are shown."""
LABELS: dict[TransferPartName, tuple[str, Style]] = {
    "prefill_queue": ("queue at prefill", Style.WARNING),
    "prefill": ("prefill", Style.PREFILL),
    "handover": ("handover (router)", Style.INFO),
    "decode_queue": ("queue at decode, before", Style.WARNING),
    "transfer": ("KV transfer", Style.BAD),
    "decode_requeue": ("queue at decode, after", Style.WARNING),
    "first_step": ("first decode step", Style.DECODE),
}


def disaggregated_sections(across: Disaggregated) -> Iterator[Section]:
    """Yield the sections about requests that one engine prefills and another decodes."""
    if across.parts:
        yield Shares(
            "Time to first token across prefill and decode engines",
            [
                Part(LABELS[part.part][0], part.share_frac, LABELS[part.part][1])
                for part in across.parts
                if part.share_frac is not None
            ],
        )
        yield table(across.parts, PART)
        yield table(across.pairs, PAIR, most=MOST_PAIRS)
    large = [
        held
        for held in across.held
        if held.blocks_total is not None and held.blocks >= HELD_FROM_FRAC * held.blocks_total
    ]
    for held in large[:MOST_HELD]:
        yield Note(held.message, "Held blocks:")
    yield basis_note("Matched:", _matched(across))
    if clocks := _clock_offsets(across.pairs):
        yield basis_note("Clocks of these engines:", clocks)


def _ahead(pair: TransferPair) -> str:
    """Return how far the decode engine's clock is ahead: ``same``, a range, a bound, or unknown."""
    least, most = (number(bound) for bound in (pair.ahead_least_ms, pair.ahead_most_ms))
    if pair.clock == "same":
        return "same clock"
    if pair.ahead_least_ms is None:
        return "not known" if pair.ahead_most_ms is None else f"at most {most}"
    return f"at least {least}" if pair.ahead_most_ms is None else f"{least} to {most}"


PART: list[Field[TransferPart]] = [
    Field("time to first token, ms", lambda part: LABELS[part.part][0]),
    figure_field("requests", lambda part: integer(part.times.count if part.times else 0)),
    figure_field("mean", lambda part: number(part.times.mean if part.times else None)),
    figure_field("p50", lambda part: number(part.times.p50 if part.times else None)),
    figure_field("p90", lambda part: number(part.times.p90 if part.times else None)),
    figure_field("p99", lambda part: number(part.times.p99 if part.times else None)),
    figure_field("max", lambda part: number(part.times.max if part.times else None)),
    figure_field("clock\nerror", lambda part: number(part.uncertain_ms) if part.times else "not known"),
]
PAIR: list[Field[TransferPair]] = [
    Field("prefill", lambda pair: pair.prefill),
    Field("decode", lambda pair: pair.decode),
    figure_field("requests", lambda pair: integer(pair.requests)),
    figure_field("mean ms", lambda pair: number(pair.mean_ms)),
    Field("most of it", lambda pair: f"{LABELS[pair.leading][0]} {percent(pair.leading_frac)}"),
    Field("clock ahead, ms", _ahead),
]


UNMATCHED: dict[UnmatchedReason, str] = {
    "no_prefill": "{requests:n request} without a prefill in these traces ({example:id})",
    "no_decode": "{requests:n request} without a decode in these traces ({example:id})",
    "ambiguous": "{requests:n request} whose id others share ({example:id})",
    "incomplete": "{requests:n request} for which a time is missing ({example:id})",
}


def _matched(across: Disaggregated) -> Message:
    keys = [
        say("[{n:n} by the id on the prefill engine]", n=across.by_remote_id),
        say("[{n:n} by the transfer's id]", n=across.by_transfer_id),
        say("[{n:n} by the request's id]", n=across.by_request_id),
    ]
    how = joined([key for key in keys if key], ", ")
    left_out = joined([say(UNMATCHED[each.reason], each) for each in across.unmatched], "; ")
    return say(
        "{matched:n request}[: {how}][; {without_transfer:n} of them without a recorded transfer].[ Not in "
        "these figures: {left_out}.][{sampled:?} These are a sample: more requests than a summary holds.]",
        across,
        how=how,
        left_out=left_out,
    )


def _clock_offsets(pairs: list[TransferPair]) -> Message:
    """Return the known offsets between the clocks of different hosts."""
    apart = [pair for pair in pairs if pair.clock != "same"]
    if not apart:
        return NOTHING
    wrong = [pair for pair in apart if pair.out_of_order]
    example = NOTHING
    if wrong:
        first: TransferPair = wrong[0]
        ahead, behind = first.ahead_least_ms or 0, -(first.ahead_most_ms or 0)
        if ahead > 0 or behind > 0:  # otherwise no offset fits all events
            example = say(
                "that of {decode:code} is at least {least:ms} {direction} that of {prefill:code}",
                first,
                least=ahead if ahead > 0 else behind,
                direction="ahead of" if ahead > 0 else "behind",
            )
    return say(
        "Only parts with a clock error compare times of two hosts.[ For {unknown:n pair} of engines they "
        "are not known, because nothing bounds the offset of their clocks.][ The clocks of "
        "{wrong:n pair} contradict the order of events[: {example}].]",
        unknown=sum(pair.ahead_least_ms is None or pair.ahead_most_ms is None for pair in apart),
        wrong=len(wrong),
        example=example,
    )
