"""Definitions of the metrics: names, units, labels, meanings, and values from an engine's totals.

``docs/metrics.md`` shows this table. Labels come from closed vocabularies: causes, states and uses that
schedtrace defines. An engine has at most ``MOST_SERIES`` series; further causes are counted under ``more``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from schedtrace.model.causes import CAUSES
from schedtrace.record.metrics.tally import NEXT_STEP, OTHER, Tally

PREFIX = "schedtrace_"
MOST_SERIES = 50
MORE = "more"
"""Label that stands for all causes for which an engine has no series left."""
US = 1e6
ENGINE_LABELS = ("model_name", "engine")
"""Labels of every series, named as vLLM names its own."""
_UNITS = {"seconds": "s", "stalled": "", "cause": ""}
"""Units by the last word of a metric's name; any other word names the things that are counted. A collector
would add ``_ratio`` to the name of a metric whose unit is ``1``."""


@dataclass(frozen=True)
class Family:
    """Definition of a metric.

    A counter's name lacks the ``_total`` that Prometheus adds.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    label: str | None = None
    """Name of the metric's label in addition to ``ENGINE_LABELS``."""
    values: tuple[str, ...] | None = None
    """All values of this label; None if they are causes, or if there is no label."""

    @property
    def full_name(self) -> str:
        """Name under which the metric is exposed."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def otlp_name(self) -> str:
        """Name of the instrument in OTLP: the exposed name without ``_total``, which a collector appends."""
        return self.full_name.removesuffix("_total")

    @property
    def unit(self) -> str:
        """Unit, which the name's last word states, in the notation of OpenTelemetry (UCUM)."""
        word = self.name.rpartition("_")[2]
        return _UNITS.get(word, f"{{{word.removesuffix('s')}}}")

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all labels: the engine's and the family's own."""
        return (*ENGINE_LABELS, self.label) if self.label else ENGINE_LABELS


_CAUSE = ("cause", None)
WAIT = Family("wait_seconds", "counter", "Time that requests spent in the waiting queue, by cause.", *_CAUSE)
STALL = Family(
    "stalled_request_seconds", "counter", "Time that running requests got no tokens, by cause.", *_CAUSE
)
HELD = Family(
    "held_seconds",
    "counter",
    "Time that requests held a seat or KV blocks: running, stalled (running without tokens), set_aside.",
    "holder_kind",
    ("running", "stalled", "set_aside"),
)
CLASS_WAIT = Family(
    "priority_wait_seconds",
    "counter",
    "Time that requests spent in the waiting queue, by class of priority; only with the priority policy.",
    "priority_class",
    ("urgent", "default", "background"),
)
REFUSALS = Family("refusals", "counter", "Refusals and skips of requests by schedule(), by cause.", *_CAUSE)
PREEMPTIONS = Family(
    "preemptions", "counter", "Preemptions, by reason.", "reason", ("kv_blocks", "itself", "cache_reset")
)
TOKENS = Family(
    "budget_tokens",
    "counter",
    "Tokens that steps scheduled, by use.",
    "use",
    ("prefill", "decode", "recompute"),
)
UNUSED = Family(
    "budget_unused_tokens",
    "counter",
    "Tokens of the budget that steps left, by the cause that ended their loop over the queue.",
    *_CAUSE,
)
STEPS = Family("steps", "counter", "Calls of schedule().")
DROPPED = Family("dropped_steps", "counter", "Steps that are in no total, because the recorder was behind.")
LOST_SPANS = Family(
    "lost_request_spans",
    "counter",
    "Sampled requests whose spans were dropped or not taken by the collector; only while spans are made.",
)
DEVICE = Family("device_seconds", "counter", "Time in which the device executed batches.")
HOST = Family("host_seconds", "counter", "Time with requests in which the device did not execute.")
IDLE = Family("idle_seconds", "counter", "Time in which no request was present and nothing was under way.")
WAITING = Family("waiting_requests", "gauge", "Requests in the waiting queue, by cause.", *_CAUSE)
KV_BLOCKS = Family(
    "kv_blocks",
    "gauge",
    "KV blocks: free, and held by running, waiting or finished requests (shared blocks count for each).",
    "holder_kind",
    ("free", "running", "waiting", "finished"),
)
STALLED = Family(
    "stalled",
    "gauge",
    "Whether the watchdog reports a stall of this kind (0 or 1).",
    "kind",
    ("scheduler", "worker", "ranks", "connector", "engine", "livelock"),
)
PROGRESS = Family(
    "last_progress_timestamp_seconds",
    "gauge",
    "Unix time at which the watchdog last saw progress or no work.",
)
LEADING = Family(
    "leading_cause", "gauge", "Whether most waiting of the last minute was for this cause (0 or 1).", *_CAUSE
)
FAMILIES = (
    WAIT, STALL, HELD, CLASS_WAIT, REFUSALS, PREEMPTIONS, TOKENS, UNUSED, STEPS, DROPPED, LOST_SPANS, DEVICE,
    HOST, IDLE, WAITING, KV_BLOCKS, STALLED, PROGRESS, LEADING,
)  # fmt: skip
_BY_CAUSE = [family for family in FAMILIES if family.label == "cause"]
_FIXED = sum(len(family.values or ("",)) for family in FAMILIES if family not in _BY_CAUSE)
MOST_BY_CAUSE = MOST_SERIES - _FIXED
"""Maximum number of series for causes, over all families together."""


def known_cause(cause: str) -> str:
    """Return a cause as a label; a word that only another package's scheduler uses becomes ``other``."""
    return str(cause) if cause in CAUSES or cause == NEXT_STEP else OTHER


def series_totals(tally: Tally) -> Iterator[tuple[Family, str, float]]:
    """Yield the family, label and value of each counter."""
    for family, by_label in (
        (WAIT, tally.waits.us),
        (STALL, tally.stalled_us),
        (HELD, tally.held_us),
        *([] if tally.classes is None else [(CLASS_WAIT, tally.classes.us)]),
    ):
        for label in by_label if family.values is None else family.values:
            yield family, label, by_label[label] / US
    for family, numbers in (
        (REFUSALS, tally.refusals),
        (PREEMPTIONS, tally.preemptions),
        (TOKENS, tally.tokens),
        (UNUSED, tally.unused_tokens),
    ):
        for label in family.values or numbers:
            yield family, label, numbers[label]
    yield STEPS, "", tally.steps
    yield DROPPED, "", tally.dropped_steps
    yield DEVICE, "", tally.busy.device_us / US
    yield HOST, "", tally.busy.host_us(tally.clock_us) / US
    yield IDLE, "", tally.busy.idle_us(tally.clock_us) / US


class Exemplar(NamedTuple):
    """Request as an example of what a counter has counted."""

    trace_id: str
    value: float
    """Amount that the request added, in the counter's unit."""
    unix_s: float


class Sink(Protocol):
    """Place at which series appear."""

    def add(self, family: Family, label: str, amount: float) -> None:
        """Add to a counter; an amount of 0 makes the series appear."""

    def set(self, family: Family, label: str, value: float) -> None:
        """Set a gauge to a value."""


@dataclass
class Series:
    """All series of an engine; their number is limited, and counters never decrease.

    Args:
        sinks: Places at which the series appear.
    """

    sinks: list[Sink]
    values: dict[tuple[Family, str], float] = field(default_factory=dict)
    """Value of each series, by family and label (empty without a label)."""
    exemplars: dict[tuple[Family, str], Exemplar] = field(default_factory=dict)
    """Latest request whose spans were exported, for each counter that it increased."""
    _highest: dict[tuple[Family, str], float] = field(default_factory=dict)
    """Value of each counter by its original label, before labels are combined under ``more`` or ``other``."""

    def count(self, totals_now: Mapping[tuple[Family, str], float]) -> None:
        """Raise the counters to these totals."""
        for key, total in totals_now.items():
            highest = self._highest.get(key)
            if highest is not None and total <= highest:
                continue
            if highest is None and not total and key[0].label == "cause":
                continue
            self._highest[key] = total
            family, label = self._series(*key)
            amount = total - (highest or 0.0)
            self.values[family, label] = self.values.get((family, label), 0.0) + amount
            for sink in self.sinks:
                sink.add(family, label, amount)

    def gauge(self, family: Family, values: Mapping[str, float]) -> None:
        """Set a gauge's values; labels that had a value before but have none now are set to 0."""
        now = {shown: 0.0 for of, shown in self.values if of is family}
        for label, value in values.items():
            _, shown = self._series(family, label)
            now[shown] = now.get(shown, 0.0) + value
        for label, value in now.items():
            self.values[family, label] = value
            for sink in self.sinks:
                sink.set(family, label, value)

    def _series(self, family: Family, label: str) -> tuple[Family, str]:
        """Return the family and the label to count under: ``more`` if there are too many series by cause."""
        if family.label == "cause":
            label = known_cause(label)
            number = sum(series in _BY_CAUSE for series, _ in self.values)
            reserved = sum((by_cause, MORE) not in self.values for by_cause in _BY_CAUSE)
            if (family, label) not in self.values and number + reserved >= MOST_BY_CAUSE:
                label = MORE
        return family, label
