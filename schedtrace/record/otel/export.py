"""Export of an engine's metrics, and of spans of sampled requests, over OTLP.

``SCHEDTRACE_METRICS`` chooses what is sent (``choice``), and which requests are sampled.
"""

import hashlib
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from schedtrace.record.metrics import families
from schedtrace.record.metrics.families import Exemplar, Family, Series
from schedtrace.record.otel.exporters import MetricPush
from schedtrace.record.otel.histories import Histories, History
from schedtrace.record.otel.spans import QUEUED, SampledRequest, SpanExport
from schedtrace.record.settings import NO_RULES, Rules, rules
from schedtrace.record.switches import METRICS, NotUnderstoodError

OTLP, SPANS = "otlp", "spans="
EXPECTED = "expected spans=RATE, such as spans=1% or spans=all, or spans=ttft>5s,e2e>60s"
_RATE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%")
_TRACE_ID = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*", re.DOTALL)
MOST_SHARE = 1 << 64


@dataclass(frozen=True)
class Sampling:
    """Rules for sampling the requests whose states become spans; a request is judged when it ends."""

    rate: float = 0.0
    """Share of all requests, from 0 to 1."""
    slow: Rules = NO_RULES
    """Objectives; a request that violates one is sampled whatever the rate."""

    def sampling_reason(self, history: History) -> str | None:
        """Return the reason for sampling a request that has ended; None if it is not sampled."""
        slow = self.slow.broken_by(history.finish)
        if slow is not None:
            return slow
        return "rate" if _share(history) < self.rate * MOST_SHARE else None


def _share(history: History) -> int:
    """Return a number below ``MOST_SHARE``, equal for all requests of a trace, as SDKs sample them."""
    match = _TRACE_ID.fullmatch(history.headers.get("traceparent", ""))
    if match is not None:
        return int(match[1][16:], 16)
    request_id = history.arrival.request_id.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(request_id, digest_size=8).digest(), "big")


class Choice(NamedTuple):
    """Parsed value of ``SCHEDTRACE_METRICS``."""

    address: str
    """Rest of the value: whether and where to serve metrics."""
    otlp: bool = False
    """Whether to send metrics by OTLP."""
    sampling: Sampling | None = None
    """Sampling of the requests whose states to send as spans; None for no spans."""

    @property
    def is_sent(self) -> bool:
        """Whether anything is sent by OTLP."""
        return self.otlp or self.sampling is not None


def choice(text: str) -> Choice:
    """Parse a value of ``SCHEDTRACE_METRICS``.

    Raises:
        NotUnderstoodError: If the part about spans is invalid.
    """
    rest: list[str] = []
    otlp, sampling, broken_by = False, None, []
    for part in map(str.strip, text.split(",")):
        begins = part.lower().startswith(SPANS)
        value = part[len(SPANS) :] if begins else part
        if part.lower() == OTLP:
            otlp = True
        elif not begins and (sampling is None or ">" not in part):
            rest.append(part)
        elif value.lower() == "all" or _RATE.fullmatch(value):
            sampling = replace(sampling or Sampling(), rate=_rate(value, text))
        else:
            sampling = sampling or Sampling()
            broken_by.append(value)
    if sampling is not None and broken_by:
        sampling = replace(sampling, slow=_slow(",".join(broken_by), text))
    return Choice(",".join(rest), otlp, sampling)


def _rate(value: str, text: str) -> float:
    match = _RATE.fullmatch(value)
    rate = 1.0 if match is None else float(match[1]) / 100
    if not 0 < rate <= 1:
        msg = f"{METRICS}={text}: {EXPECTED}"
        raise NotUnderstoodError(msg)
    return rate


def _slow(value: str, text: str) -> Rules:
    try:
        slow = rules(value)
    except ValueError:
        slow = NO_RULES
    if not slow or slow.preemptions is not None:
        msg = f"{METRICS}={text}: {EXPECTED}"
        raise NotUnderstoodError(msg)
    return slow


class OtlpExport:
    """Metrics and spans of one engine.

    Args:
        series: Series of the engine.
        labels: Values of ``families.ENGINE_LABELS``.
    """

    def __init__(self, series: Series, labels: tuple[str, str]) -> None:
        self._series, self._labels = series, labels
        self._push: MetricPush | None = None
        self._spans: SpanExport | None = None
        self._sampling = Sampling()
        self._lost_before = 0
        self.histories: Histories | None = None
        """Histories of requests; None if spans are off."""

    @property
    def destinations(self) -> list[str]:
        """Description of the places to which data is sent."""
        return [sender.destination for sender in (self._push, self._spans) if sender is not None]

    def send(self, chosen: Choice) -> None:
        """Begin to send the chosen signals; signals that are already being sent continue.

        Raises:
            NotUnderstoodError: If a variable of an exporter is invalid.
            ImportError: If the SDK or an exporter is not installed.
        """
        if chosen.otlp and self._push is None:
            self._push = MetricPush(self._series, self._labels)
        if chosen.sampling is not None:
            self._sampling = chosen.sampling
            if self._spans is None:
                self._spans, self.histories = SpanExport(self._labels, self._note_exemplars), Histories()

    def publish(self, *, last: bool = False) -> dict[tuple[Family, str], float]:
        """Hand on the requests that have ended since the last call; return the totals of what was lost."""
        histories, spans = self.histories, self._spans
        if histories is None or spans is None:
            return {}
        for history in histories.take_ended(last=last):
            reason = self._sampling.sampling_reason(history)
            if reason is not None:
                states = histories.states(history)
                spans.queue_spans(SampledRequest(history, states, reason, histories.wall_anchor_us))
        return {(families.LOST_SPANS, ""): float(self._lost_before + spans.lost)}

    def close(self) -> None:
        """Send the remaining data, and stop."""
        with suppress(Exception):  # the writer's thread may still add lines
            self.publish(last=True)
        push, self._push = self._push, None
        spans, self._spans, self.histories = self._spans, None, None
        if spans is not None:
            spans.close()
            self._lost_before += spans.lost
        if push is not None:
            push.close()

    def _note_exemplars(self, request: SampledRequest, trace_id: str) -> None:
        """Store the request as an example of waiting for its causes."""
        now_s = time.time()
        for cause, seconds in request.seconds_by_cause(QUEUED).items():
            self._series.exemplars[families.WAIT, cause] = Exemplar(trace_id, seconds, now_s)
