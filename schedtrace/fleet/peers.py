"""Engines that differ from their peers, by cause.

Peers serve the same model on the same kind of device in the same role. An engine differs if a direct measure
of a cause lies far from the median of its peers, in robust standard deviations: its steps take longer for the
same work, it gets more load, it was interrupted, and so on. A long wait alone is not reported unless it is
extreme and nothing explains it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from schedtrace.fleet.summary import message_from
from schedtrace.model.causes import Cause
from schedtrace.model.fleet import EngineSummary, FaultKind, PeerDifference, PeerGroup, PeerMeasure
from schedtrace.model.message import NOTHING, Message
from schedtrace.model.say import say

FEWEST_PEERS = 5
"""Minimum number of engines in a group for a comparison."""
DEVIATIONS = 6.0
"""Minimum distance from the median, in robust standard deviations, of a measure that differs."""
LEAST_FRAC = 0.05
"""Minimum excess of a part's share of an engine's request time over the peers' median share."""
UNEXPLAINED_DEVIATIONS, UNEXPLAINED_FRAC = 10.0, 0.15
"""Stricter bounds for a wait without any other difference, because waits have long tails."""
SLOW_RATIO, LOAD_RATIO = 1.05, 1.25
"""Minimum ratios to the median: of step times, and of the rate of arrivals."""
SMALLER_FRAC = 0.95
"""Share of the usual limit below which a limit counts as smaller."""
QUIET_DEVIATIONS, QUIET_FRAC = 10.0, 0.05
"""Minimum deviations, and minimum share of the recording, of a time without arrivals."""
MAD_TO_SIGMA = 1.4826
FLOORS = {"share": 0.01, "step time": 0.01, "requests/s": 0.05, "tokens/s": 0.05, "arrivals": 1.0}
"""Minimum of the robust standard deviation, in the unit of each measure."""
FEWEST_ENGINES = 3
"""Minimum number of engines that must have done a class of work for it to be compared."""
INTERRUPTED = ("interrupted", None)
PAUSED = str(Cause.PAUSED)
HOST_WORK = ("between_steps", "front_end", "next_step")
"""Parts of the requests' time that processes on the host take."""
WAITS = ("waiting", "stalled")
LIMITS = {
    "max_num_seqs": "max_num_seqs",
    "token_budget": "max_num_batched_tokens",
    "kv_blocks": "KV blocks",
}
"""Name of the setting behind each cause of a wait; the summary has its value in a field named like the cause.
"""
Summaries = Mapping[str, EngineSummary]
Key = tuple[str, str | None]


@dataclass
class PeerComparison:
    """Groups of peers, their differences, and the relative step time of each engine."""

    groups: list[PeerGroup] = field(default_factory=list)
    differences: list[PeerDifference] = field(default_factory=list)
    step_ratios: dict[str, float] = field(default_factory=dict)
    """Step time of each engine, relative to its peers'."""


def compare_peers(fleet: Summaries) -> PeerComparison:
    """Compare each engine with its peers.

    Args:
        fleet: Summaries by the names of the engines.
    """
    groups: dict[tuple[str, str, str], dict[str, EngineSummary]] = defaultdict(dict)
    for name, summary in fleet.items():
        groups[summary.model, summary.device, summary.role][name] = summary
    comparison = PeerComparison()
    for (model, device, role), peers in sorted(groups.items()):
        ratios = step_time_ratios(peers)
        comparison.step_ratios |= ratios
        all_rates = {name: requests_per_s(summary) for name, summary in peers.items()}
        rates = {name: rate for name, rate in all_rates.items() if rate is not None}
        usual = median(rates.values()) if rates else None
        busiest = max(rates, key=lambda name: rates[name]) if rates else ""
        group = PeerGroup(
            model=model,
            device=device,
            role=role,
            engines=len(peers),
            compared=len(peers) >= FEWEST_PEERS,
            requests_per_s=usual,
            busiest=busiest,
            busiest_ratio=rates[busiest] / usual if usual else None,
        )
        comparison.groups.append(group)
        if group.compared:
            differences = PeerMeasures(peers, ratios).differences()
            comparison.differences += differences
            kinds = {kind for difference in differences for kind in (difference.kind, *difference.also)}
            group.even_load = "more-load" not in kinds
            group.even_capacity = not kinds & {"slow-steps", "slow-host-work", "smaller-limit"}
    return comparison


def requests_per_s(summary: EngineSummary) -> float | None:
    """Return the rate of arrivals between the first and the last; None with fewer than two arrivals."""
    return None if not summary.arrivals_us else (summary.requests - 1) * 1e6 / summary.arrivals_us


def step_time_ratios(peers: Summaries) -> dict[str, float]:
    """Return each engine's step time relative to its peers', for the same work.

    A class of work counts if several engines did it. An engine's ratio is the geometric mean over classes,
    weighted by the engine's time in each class.
    """
    medians: dict[str, list[float]] = defaultdict(list)
    for summary in peers.values():
        for pace in summary.paces:
            medians[pace.work].append(pace.median_us)
    usual = {work: median(values) for work, values in medians.items() if len(values) >= FEWEST_ENGINES}
    ratios = {}
    for name, summary in peers.items():
        compared = [pace for pace in summary.paces if pace.work in usual]
        weight = sum(pace.steps * pace.median_us for pace in compared)
        if weight:
            logarithms = (
                pace.steps * pace.median_us * math.log(pace.median_us / usual[pace.work]) for pace in compared
            )
            ratios[name] = math.exp(sum(logarithms) / weight)
    return ratios


def request_time_shares(summary: EngineSummary) -> dict[Key, float]:
    """Return those shares of an engine's request time that are compared with its peers', by part and cause.

    Waiting and stalling for the same cause count together, and a pause counts as an interruption.
    """
    sums: dict[Key, float] = defaultdict(float)
    for time in summary.times:
        if time.part in WAITS and time.cause != PAUSED:
            sums["waiting", time.cause] += time.us
        elif time.part == "interrupted" or time.cause == PAUSED:
            sums[INTERRUPTED] += time.us
        elif time.part in {*HOST_WORK, "recompute"}:
            sums[time.part, None] += time.us
    whole = sum(time.us for time in summary.times)
    return {key: us / whole for key, us in sums.items()} if whole else {}


def peer_measures(name: str, values: Mapping[str, float], floor: float) -> dict[str, PeerMeasure]:
    """Return each engine's distance from the median of all engines, in robust standard deviations.

    Args:
        name: Name of the measure.
        values: Value of each engine.
        floor: Smallest standard deviation.
    """
    if not values:
        return {}
    middle = median(values.values())
    sigma = max(floor, MAD_TO_SIGMA * median(abs(value - middle) for value in values.values()))
    return {
        engine: PeerMeasure(name=name, value=value, median=middle, deviations=(value - middle) / sigma)
        for engine, value in values.items()
    }


def _ratio_measure(name: str, values: Mapping[str, float]) -> dict[str, PeerMeasure]:
    """Return the measures of the values above 0, with the deviations of their logarithms."""
    positive = {engine: value for engine, value in values.items() if value > 0}
    logarithms = {engine: math.log(value) for engine, value in positive.items()}
    measures = peer_measures(name, logarithms, FLOORS[name])
    middle = median(positive.values()) if positive else 0.0
    for engine, each in measures.items():
        each.value, each.median = positive[engine], middle
    return measures


@dataclass(frozen=True)
class _Evidence:
    """Cause that applies to an engine."""

    kind: FaultKind
    message: Message
    measures: list[PeerMeasure]
    effect_frac: float | None = None


class PeerMeasures:
    """Measures of a group of peers.

    Args:
        peers: Summaries by the names of the engines.
        step_ratios: Step time of each engine, relative to its peers'.
    """

    def __init__(self, peers: Summaries, step_ratios: Mapping[str, float]) -> None:
        self._peers = peers
        own = {name: request_time_shares(summary) for name, summary in peers.items() if summary.requests_us}
        keys = sorted({key for each in own.values() for key in each}, key=str)
        self._shares = {
            key: peer_measures(
                f"share of {key[0]} {key[1] or ''}".rstrip(),
                {name: each.get(key, 0.0) for name, each in own.items()},
                FLOORS["share"],
            )
            for key in keys
        }
        self._steps = _ratio_measure("step time", step_ratios)
        rates = {name: requests_per_s(summary) or 0.0 for name, summary in peers.items()}
        tokens = {
            name: rates[name] * summary.arrived_tokens / max(1, summary.requests)
            for name, summary in peers.items()
        }
        self._load = [_ratio_measure("requests/s", rates), _ratio_measure("tokens/s", tokens)]
        self._quiet = peer_measures(
            "arrivals", {name: quietness(summary) for name, summary in peers.items()}, FLOORS["arrivals"]
        )
        self._slow = {
            name
            for name, each in self._steps.items()
            if each.deviations >= DEVIATIONS and each.value >= SLOW_RATIO * each.median
        }

    def differences(self) -> list[PeerDifference]:
        """Return the engines that differ, grouped by cause, with the largest deviations first."""
        rules = (
            self._interrupted,
            self._slow_steps,
            self._slow_host_work,
            self._smaller_limit,
            self._more_load,
            self._no_arrivals,
        )
        differences = []
        for name, summary in self._peers.items():
            causes = [evidence for rule in rules if (evidence := rule(name)) is not None]
            if not causes and (evidence := self._unexplained(name)) is not None:
                causes = [evidence]
            if not causes:
                continue
            first = causes[0]
            difference = PeerDifference(
                engine=name,
                host=summary.host,
                kind=first.kind,
                also=[each.kind for each in causes[1:]],
                where=self._where(name, first.kind),
                message=first.message,
                effect=say("[{frac:%} of its requests' time beyond its peers'.]", frac=first.effect_frac),
                measures=[each for evidence in causes for each in evidence.measures],
            )
            differences.append(difference)
        kinds = list(FaultKind.__args__)  # type: ignore[attr-defined]  # of a Literal
        return sorted(
            differences,
            key=lambda each: (kinds.index(each.kind), -max(abs(m.deviations) for m in each.measures)),
        )

    def _where(self, name: str, kind: FaultKind) -> Literal["host", "engine", "router", "client"]:
        if kind == "more-load":
            return "router"
        if kind == "no-arrivals":
            return "client"
        host = self._peers[name].host
        on_host = [peer for peer, summary in self._peers.items() if summary.host == host]
        is_host = kind == "slow-steps" and len(on_host) > 1 and all(peer in self._slow for peer in on_host)
        return "host" if is_host else "engine"

    def _excess(self, name: str, key: Key) -> PeerMeasure | None:
        """Return the engine's share of a part if it is far above its peers' shares; otherwise None."""
        each = self._shares.get(key, {}).get(name)
        if each is None or each.deviations < DEVIATIONS or each.value - each.median < LEAST_FRAC:
            return None
        return each

    def _interrupted(self, name: str) -> _Evidence | None:
        each: PeerMeasure | None = self._excess(name, INTERRUPTED)
        if each is None:
            return None
        titles = [f.title for f in self._peers[name].findings if f.code in {"interruption", "stall"}]
        sentence = say(
            "[{title}: ]interruptions take {value:%} of its requests' time, its peers' {median:%}.",
            each,
            title=message_from(titles[0]) if titles else NOTHING,
        )
        return _Evidence("interrupted", sentence, [each], each.value - each.median)

    def _slow_steps(self, name: str) -> _Evidence | None:
        if name not in self._slow:
            return None
        each = self._steps[name]
        computing = {"prefill", "decode", "recompute"}
        times = self._peers[name].times
        whole = sum(time.us for time in times)
        computed = sum(time.us for time in times if time.part in computing)
        ratio = each.value / each.median
        sentence = say(
            "Its steps take {ratio:n2} times as long as its peers' for the same work.", ratio=ratio
        )
        return _Evidence(
            "slow-steps", sentence, [each], computed * (1 - 1 / ratio) / whole if whole else None
        )

    def _slow_host_work(self, name: str) -> _Evidence | None:
        parts = {part: each for part in HOST_WORK if (each := self._excess(name, (part, None))) is not None}
        if not parts:
            return None
        words = {"between_steps": "the engine's work between steps", "front_end": "the front end"}
        part = max(parts, key=lambda part: parts[part].value - parts[part].median)
        most: PeerMeasure = parts[part]
        sentence = say(
            "Its requests spend {value:%} of their time on {part}, its peers' {median:%}.",
            most,
            part=words.get(part, "the way to the next step"),
        )
        return _Evidence("slow-host-work", sentence, list(parts.values()), most.value - most.median)

    def _smaller_limit(self, name: str) -> _Evidence | None:
        for limit, setting in LIMITS.items():
            each = self._excess(name, ("waiting", limit))
            value = getattr(self._peers[name], limit)
            limits = [
                peer for summary in self._peers.values() if (peer := getattr(summary, limit)) is not None
            ]
            usual = Counter(limits).most_common(1)[0][0] if limits else None
            if each is None or value is None or usual is None or value >= SMALLER_FRAC * usual:
                continue
            sentence = say(
                "{setting}: {value:n}, its peers' {usual:n}. Its requests wait for it {share:%} of their "
                "time, its peers' {median:%}.",
                setting=setting,
                value=value,
                usual=usual,
                share=each.value,
                median=each.median,
            )
            return _Evidence("smaller-limit", sentence, [each], each.value - each.median)
        return None

    def _more_load(self, name: str) -> _Evidence | None:
        high = [
            each
            for measures in self._load
            if (each := measures.get(name)) is not None
            and each.deviations >= DEVIATIONS
            and each.value >= LOAD_RATIO * each.median
        ]
        if not high:
            return None
        first: PeerMeasure = high[0]
        sentence = say(
            "It gets {value:n} {unit}, {ratio:n2} times the median of its peers.",
            first,
            unit=first.name,
            ratio=first.value / first.median,
        )
        return _Evidence("more-load", sentence, high)

    def _no_arrivals(self, name: str) -> _Evidence | None:
        each = self._quiet[name]
        summary: EngineSummary = self._peers[name]
        if each.deviations < QUIET_DEVIATIONS or summary.quiet_us < QUIET_FRAC * summary.length_us:
            return None
        rate = _rate_otherwise(summary)
        sentence = say(
            "No request came for {quiet_us:us} from {begin:n} s into its recording; at its rate otherwise, "
            "{expected:n} would have.",
            summary,
            begin=summary.quiet_begin_us / 1e6,
            expected=round(rate * summary.quiet_us),
        )
        return _Evidence("no-arrivals", sentence, [each])

    def _unexplained(self, name: str) -> _Evidence | None:
        waits = [
            each
            for key in self._shares
            if key[0] in {"waiting", "recompute"}
            and (each := self._excess(name, key)) is not None
            and each.deviations >= UNEXPLAINED_DEVIATIONS
            and each.value - each.median >= UNEXPLAINED_FRAC
        ]
        if not waits:
            return None
        most: PeerMeasure = max(waits, key=lambda each: each.value - each.median)
        sentence = say(
            "Its {name} is {value:%}, its peers' {median:%}; its load, steps and limits are like theirs.",
            most,
        )
        return _Evidence("unexplained", sentence, waits, most.value - most.median)


def _rate_otherwise(summary: EngineSummary) -> float:
    """Return the arrivals per microsecond outside the longest time without arrivals."""
    rest_us = summary.arrivals_us - summary.quiet_us
    return (summary.requests - 2) / rest_us if summary.requests > 2 and rest_us > 0 else 0.0  # noqa: PLR2004  # ends of the gap


def quietness(summary: EngineSummary) -> float:
    """Return the longest time without arrivals, standardized to have a median of about 0.4 by chance.

    In a Poisson process with ``n`` gaps, the longest gap times the rate, minus ``log(n)``, follows the Gumbel
    distribution, with a median of 0.37 and a standard deviation of 1.28 at any rate.
    """
    rate = _rate_otherwise(summary)
    return rate * summary.quiet_us - math.log(summary.requests - 1) if rate else 0.0
