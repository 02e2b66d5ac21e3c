"""Report of a fleet, made from the summaries of its engines."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from schedtrace.fleet.disaggregated import disaggregated
from schedtrace.fleet.engines import FleetSummaries
from schedtrace.fleet.peers import WAITS, PeerComparison, Summaries, compare_peers, requests_per_s
from schedtrace.fleet.summary import merged_latency, message_from, percentile_ms
from schedtrace.fleet.tenants import fleet_tenants
from schedtrace.model.fleet import (
    ClockSpread,
    EngineSummary,
    FaultKind,
    FleetEngine,
    FleetHost,
    FleetReport,
    FleetRootCause,
    FleetTimePart,
    PeerGroup,
    SummaryFinding,
)
from schedtrace.model.message import Message, joined
from schedtrace.model.say import say

LOADS = ("requests/s", "tokens/s")
METRICS = ("queue", "ttft", "tpot", "e2e")
TOUCHES_FROM_FRAC = 0.01
"""Share of an engine's request time above which the engine counts as affected by a part."""
NAMED_FROM_FRAC = 0.05
"""Share of the fleet's request time above which the verdict names a wait."""
KIND_WORDS: dict[FaultKind, str] = {
    "interrupted": "{n:n} {were} interrupted",
    "slow-steps": "{n:n} {have} slow steps",
    "slow-host-work": "{n:n} {have} slow host work",
    "smaller-limit": "{n:n} {have} a smaller limit",
    "more-load": "{n:n} {get} more load",
    "no-arrivals": "{n:n} got no requests for a while",
    "unexplained": "{n:n} {wait} longer for no reason that shows",
}
CAPACITY: frozenset[FaultKind] = frozenset({"slow-steps", "slow-host-work", "smaller-limit"})


def fleet_report(
    fleet: FleetSummaries,
    paths: Sequence[str] = (),
    window: str = "",
    price_per_gpu_hour: float | None = None,
) -> FleetReport:
    """Return the report of a fleet.

    Args:
        fleet: Summaries of the engines, and the record of inputs.
        paths: Paths and addresses as on the command line.
        window: Part of the recordings, in words.
        price_per_gpu_hour: Price of a GPU hour, for the costs of tenants; None for no costs.
    """
    engines = fleet.by_name
    comparison = compare_peers(engines)
    split = list(_time_split(engines))
    roots = sorted(_root_causes(engines), key=lambda root: (-root.share_frac, root.code))
    by_metric = [
        [sketch for summary in engines.values() for sketch in summary.sketches if sketch.metric == metric]
        for metric in METRICS
    ]
    latencies = [merged_latency(sketches) for sketches in by_metric if sketches]
    verdict, across = list(_verdict(engines, comparison, split)), disaggregated(engines)
    if across is not None and across.verdict:
        verdict.append(across.verdict)
    return FleetReport(
        paths=list(paths),
        window=window,
        verdict=verdict,
        differences=comparison.differences,
        groups=comparison.groups,
        time_split=split,
        latencies=[latency for latency in latencies if latency is not None],
        root_causes=roots,
        hosts=_hosts(engines, comparison),
        engines=_engine_rows(engines, comparison),
        tenants=fleet_tenants(engines, price_per_gpu_hour),
        clocks=_clocks(engines),
        disaggregated=across,
        read=fleet.read,
    )


def _time_split(engines: Summaries) -> Iterator[FleetTimePart]:
    """Yield the parts of all requests' time, the largest first."""
    sums: dict[tuple[str, str | None], dict[str, int]] = defaultdict(dict)
    for name, summary in engines.items():
        for time in summary.times:
            sums[time.part, time.cause][name] = time.us
    whole_of = {name: sum(time.us for time in summary.times) for name, summary in engines.items()}
    whole = sum(whole_of.values())
    ordered = sorted(sums.items(), key=lambda entry: (-sum(entry[1].values()), str(entry[0])))
    for (part, cause), by_engine in ordered:
        fracs = {name: us / whole_of[name] for name, us in by_engine.items() if whole_of[name]}
        most = max(fracs, key=lambda name: fracs[name])
        total = sum(by_engine.values())
        yield FleetTimePart(
            part=part,
            cause=cause,
            time_ms=total / 1e3,
            share_frac=total / whole,
            engines=sum(frac >= TOUCHES_FROM_FRAC for frac in fracs.values()),
            most=most,
            most_frac=fracs[most],
        )


def _root_causes(engines: Summaries) -> Iterator[FleetRootCause]:
    """Yield each root cause in the engines' own reports, with its share of the fleet's request time."""
    whole = sum(summary.requests_us for summary in engines.values())
    by_code: dict[str, list[tuple[str, EngineSummary, SummaryFinding]]] = defaultdict(list)
    for name, summary in engines.items():
        for finding in summary.findings:
            by_code[finding.code].append((name, summary, finding))
    for code, named in by_code.items():
        first: dict[str, tuple[str, EngineSummary, SummaryFinding]] = {}
        for entry in named:  # several of one code on an engine: the first weighs most
            first.setdefault(entry[0], entry)
        most, _, finding = max(first.values(), key=lambda entry: _weight(entry[2]) * entry[1].requests_us)
        saved = [
            each.saved_frac * summary.requests_us for _, summary, each in named if each.saved_frac is not None
        ]
        explained = sum((entry[2].share_frac or 0.0) * entry[1].requests_us for entry in named)
        yield FleetRootCause(
            code=code,
            engines=len(first),
            leads=len({name for name, _, each in named if each.leads}),
            share_frac=explained / whole if whole else 0.0,
            saved_frac=sum(saved) / whole if saved and whole else None,
            most=most,
            title=message_from(finding.title),
            holder=message_from(finding.holder),
        )


def _weight(finding: SummaryFinding) -> float:
    return finding.saved_frac if finding.saved_frac is not None else finding.share_frac or 0.0


def _hosts(engines: Summaries, comparison: PeerComparison) -> list[FleetHost]:
    """Return the hosts, the slowest first."""
    on_host: dict[str, list[str]] = defaultdict(list)
    for name, summary in engines.items():
        on_host[summary.host].append(name)
    slow = {each.engine for each in comparison.differences if "slow-steps" in {each.kind, *each.also}}
    hosts = []
    for host, names in on_host.items():
        ratios = [comparison.step_ratios[name] for name in names if name in comparison.step_ratios]
        hosts.append(
            FleetHost(
                host=host,
                engines=len(names),
                step_time_ratio=median(ratios) if ratios else None,
                is_slow=all(name in slow for name in names),
            )
        )
    return sorted(hosts, key=lambda host: (-(host.step_time_ratio or 0.0), host.host))


def _engine_rows(engines: Summaries, comparison: PeerComparison) -> list[FleetEngine]:
    """Return a row for each engine: first those that differ, in their order, then by waiting share."""
    differs = {each.engine: each for each in comparison.differences}
    rows = []
    for name, summary in engines.items():
        difference = differs.get(name)
        whole = sum(time.us for time in summary.times)
        waited = sum(time.us for time in summary.times if time.part in WAITS)
        rows.append(
            FleetEngine(
                engine=name,
                host=summary.host,
                requests=summary.requests,
                requests_per_s=requests_per_s(summary),
                output_tokens_per_s=summary.output_tokens_per_s,
                step_time_ratio=comparison.step_ratios.get(name),
                waiting_frac=waited / whole if whole else 0.0,
                ttft_p99_ms=percentile_ms(summary.sketches, "ttft", 0.99),
                kinds=[difference.kind, *difference.also] if difference is not None else [],
                finding=next((finding.code for finding in summary.findings if finding.leads), ""),
                arrivals=summary.arrivals,
            )
        )
    place = {name: at for at, name in enumerate(differs)}
    return sorted(rows, key=lambda row: (place.get(row.engine, len(place)), -row.waiting_frac))


def _clocks(engines: Summaries) -> ClockSpread:
    real = [summary for summary in engines.values() if summary.clock != "virtual"]
    errors: dict[str, int] = {}
    unknown = sum(summary.clock_error_us is None for summary in real)
    for summary in real:
        errors[summary.host] = max(errors.get(summary.host, 0), summary.clock_error_us or 0)
    largest = sorted(errors.values(), reverse=True)[:2]
    return ClockSpread(
        hosts=len({summary.host for summary in engines.values()}),
        unknown=unknown,
        apart_us=None if unknown else sum(largest) if len(largest) > 1 else 0,
        virtual=len(engines) - len(real),
    )


def _verdict(
    engines: Summaries, comparison: PeerComparison, split: Sequence[FleetTimePart]
) -> Iterator[Message]:
    """Yield sentences on differing engines, uneven load, the largest wait, and what is not compared."""
    compared = sum(group.engines for group in comparison.groups if group.compared)
    if comparison.differences:
        counts = Counter(difference.kind for difference in comparison.differences)
        parts = []
        for kind, count in counts.items():
            single, words = count == 1, KIND_WORDS[kind]
            verbs = {"were": "was" if single else "were", "have": "has" if single else "have"}
            verbs |= {"get": "gets" if single else "get", "wait": "waits" if single else "wait"}
            used = {verb: form for verb, form in verbs.items() if f"{{{verb}}}" in words}
            parts.append(say(words, n=count, **used))
        single = len(comparison.differences) == 1
        yield say(
            "{differ:n} of {compared:n engine} {verb} from {their} peers: {parts}.",
            differ=len(comparison.differences),
            compared=compared,
            verb="differs" if single else "differ",
            their="its" if single else "their",
            parts=joined(parts, ", "),
        )
    elif compared:
        yield say("None of {compared:n engine} differs from its peers.", compared=compared)
    yield from _load_or_capacity([group for group in comparison.groups if group.compared], comparison)
    waits = [part for part in split if part.part in WAITS and part.share_frac >= NAMED_FROM_FRAC]
    if waits:
        yield say(
            "Over all engines, {share_frac:%} of the requests' time is waiting for {cause:cause}; the most, "
            "{most_frac:%}, in {most:code}.",
            waits[0],
        )
    if alone := len(engines) - compared:
        have = "has" if alone == 1 else "have"
        yield say("{alone:n engine} {have} too few peers to be compared.", alone=alone, have=have)


def _load_or_capacity(groups: Sequence[PeerGroup], comparison: PeerComparison) -> Iterator[Message]:
    """Yield whether the load (the router), the capacity (the engines) or both are uneven."""
    if not groups:
        return
    group = max(groups, key=lambda each: each.busiest_ratio or 0.0)
    more = next((each for each in comparison.differences if "more-load" in {each.kind, *each.also}), None)
    if more is not None:
        load = next(measure for measure in more.measures if measure.name in LOADS)
        yield say(
            "The load is uneven (router): {engine:code} gets {ratio:n2} times the median of {median:n} "
            "{unit}.",
            engine=more.engine,
            ratio=load.value / load.median,
            median=load.median,
            unit=load.name,
        )
    elif group.busiest_ratio:
        yield say(
            "The load is even: the busiest engine gets {busiest_ratio:n2} times the median of "
            "{requests_per_s:n} requests/s.",
            group,
        )
    else:
        yield say("No engine has enough arrivals to judge the load.")
    if all(group.even_capacity for group in groups):
        return
    differ = [each.engine for each in comparison.differences if CAPACITY & {each.kind, *each.also}]
    yield say(
        "The capacity is uneven (engines): {n:n engine} can do less than {their} peers.",
        n=len(differ),
        their="its" if len(differ) == 1 else "their",
    )
