"""Export of an engine's metrics, and of spans of sampled requests, over OTLP.

``SCHEDTRACE_METRICS`` chooses what is sent (``choice``), and which requests are sampled. The exporters are
those of OpenTelemetry's SDK, which read ``OTEL_EXPORTER_OTLP_ENDPOINT`` and related variables themselves. No
provider is made global: vLLM has its own.
"""

import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from schedtrace.record.log import logger
from schedtrace.record.metrics import families
from schedtrace.record.metrics.families import FAMILIES, Exemplar, Family, Series
from schedtrace.record.otel.histories import Histories, History
from schedtrace.record.otel.spans import QUEUED, SampledRequest, make_spans
from schedtrace.record.settings import NO_RULES, Rules, rules
from schedtrace.record.switches import METRICS, NotUnderstoodError, environment_value
from schedtrace.version import __version__

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
    """Objectives; a request that violates one of them is sampled regardless of the rate."""

    def sampling_reason(self, history: History) -> str | None:
        """Return the reason for sampling a request that has ended; None if it is not sampled."""
        slow = self.slow.broken_by(history.finish)
        if slow is not None:
            return slow
        # A number below MOST_SHARE, equal for all requests of a trace, as SDKs sample them.
        match = _TRACE_ID.fullmatch(history.headers.get("traceparent", ""))
        if match is not None:
            share = int(match[1][16:], 16)
        else:
            request_id = history.arrival.request_id.encode(errors="surrogatepass")
            share = int.from_bytes(hashlib.blake2b(request_id, digest_size=8).digest(), "big")
        return "rate" if share < self.rate * MOST_SHARE else None


class Choice(NamedTuple):
    """Parsed value of ``SCHEDTRACE_METRICS``."""

    address: str
    """Rest of the value: whether and where to serve metrics."""
    otlp: bool = False
    """Whether to send metrics by OTLP."""
    sampling: Sampling | None = None
    """Rules for sampling the requests whose states are sent as spans; None if no spans are sent."""


def choice(text: str) -> Choice:
    """Parse a value of ``SCHEDTRACE_METRICS``.

    Raises:
        NotUnderstoodError: If the part about spans is invalid.
    """
    invalid = NotUnderstoodError(f"{METRICS}={text}: {EXPECTED}")
    rest: list[str] = []
    objectives: list[str] = []
    otlp, sampling = False, None
    for part in map(str.strip, text.split(",")):
        begins = part.lower().startswith(SPANS)
        value = part[len(SPANS) :] if begins else part
        if part.lower() == OTLP:
            otlp = True
        elif not begins and (sampling is None or ">" not in part):
            rest.append(part)
        elif (match := _RATE.fullmatch(value)) is not None or value.lower() == "all":
            rate = 1.0 if match is None else float(match[1]) / 100
            if not 0 < rate <= 1:
                raise invalid
            sampling = replace(sampling or Sampling(), rate=rate)
        else:
            sampling = sampling or Sampling()
            objectives.append(value)
    if sampling is not None and objectives:
        try:
            slow = rules(",".join(objectives))
        except ValueError:
            raise invalid from None
        if not slow or slow.preemptions is not None:
            raise invalid
        sampling = replace(sampling, slow=slow)
    return Choice(",".join(rest), otlp, sampling)


Signal = Literal["METRICS", "TRACES"]
GRPC, HTTP = "grpc", "http/protobuf"
DEFAULT_ENDPOINTS = {GRPC: "http://localhost:4317", HTTP: "http://localhost:4318"}
MISSING = "OpenTelemetry is not installed: pip install 'schedtrace[otel]'"
_EXPORTERS: dict[Signal, tuple[str, str]] = {
    "METRICS": ("metric_exporter", "OTLPMetricExporter"),
    "TRACES": ("trace_exporter", "OTLPSpanExporter"),
}
"""Module and class of each signal's exporter in the SDK's packages."""
CLOSE_MS = 2000
"""Milliseconds for the last export of metrics, so that an absent collector does not delay an engine's end."""
MOST_QUEUED = 1000
"""Maximum number of sampled requests that wait for export; further ones are dropped and counted."""
MOST_TOGETHER = 50
"""Number of requests whose spans are exported together."""
EVERY_S = 1.0
"""Seconds between two exports of spans."""
CLOSE_S = 2.0
"""Maximum seconds for the export of the waiting spans when an engine ends."""


def signal_variable(signal: Signal, name: str) -> str:
    """Return the value of a signal's own variable, or else of the variable for all signals."""
    own = environment_value(f"OTEL_EXPORTER_OTLP_{signal}_{name}")
    return own or environment_value(f"OTEL_EXPORTER_OTLP_{name}")


def protocol(signal: Signal) -> str:
    """Return the protocol of a signal: ``grpc``, as in vLLM, unless a variable selects ``http/protobuf``.

    Raises:
        NotUnderstoodError: If a variable names any other protocol.
    """
    text = signal_variable(signal, "PROTOCOL") or GRPC
    if text not in DEFAULT_ENDPOINTS:
        msg = f"OTEL_EXPORTER_OTLP_PROTOCOL={text}: expected {GRPC} or {HTTP}"
        raise NotUnderstoodError(msg)
    return text


def destination(signal: Signal) -> str:
    """Describe a signal's protocol and endpoint."""
    by = protocol(signal)
    return f"{signal_variable(signal, 'ENDPOINT') or DEFAULT_ENDPOINTS[by]} ({by})"


def otlp_exporter(signal: Signal) -> Any:
    """Return an exporter of metrics or of spans.

    Raises:
        NotUnderstoodError: If a variable is invalid.
        ImportError: If the SDK or its exporter is not installed.
    """
    by = protocol(signal)
    package = "http" if by == HTTP else "grpc"
    module, name = _EXPORTERS[signal]
    try:
        exporter = getattr(import_module(f"opentelemetry.exporter.otlp.proto.{package}.{module}"), name)
    except ImportError as error:
        raise ImportError(MISSING) from error
    if by == HTTP:
        return exporter()
    without_tls = urlsplit(signal_variable(signal, "ENDPOINT")).scheme == "grpc"  # vLLM contacts it so
    insecure = True if without_tls and not signal_variable(signal, "INSECURE") else None  # the SDK decides
    return exporter(insecure=insecure)


def sdk_resource() -> Any:
    """Return the resource of all signals, including the attributes in ``OTEL_RESOURCE_ATTRIBUTES``."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"vllm.process_id": str(os.getpid()), "schedtrace.version": __version__})


class MetricPush:
    """Periodic export of an engine's series, on a thread of the SDK.

    Args:
        series: Series of the engine.
        labels: Values of ``families.ENGINE_LABELS``.

    Raises:
        NotUnderstoodError: If a variable of the exporter is invalid.
        ImportError: If the SDK or its exporter is not installed.
    """

    def __init__(self, series: Series, labels: tuple[str, str]) -> None:
        exporter = otlp_exporter("METRICS")
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        self._series, self._labels = series, labels
        self.destination = f"OTLP to {destination('METRICS')}"
        reader = PeriodicExportingMetricReader(exporter)  # each OTEL_METRIC_EXPORT_INTERVAL
        self._provider = MeterProvider([reader], resource=sdk_resource(), shutdown_on_exit=False)
        meter = self._provider.get_meter("schedtrace", __version__)
        makers = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for family in FAMILIES:
            observe = partial(self._observe, family)
            makers[family.kind](family.otlp_name, [observe], unit=family.unit, description=family.help)

    def _observe(self, family: Family, _options: Any) -> Iterable[Any]:
        """Return the values of a family's series."""
        from opentelemetry.metrics import Observation

        return [
            Observation(value, dict(zip(family.labels, (*self._labels, label), strict=False)))
            for (of, label), value in self._series.values.copy().items()
            if of is family
        ]

    def close(self) -> None:
        """Export for the last time, and stop."""
        self._provider.shutdown(timeout_millis=CLOSE_MS)


class SpanExport:
    """Thread that makes spans of sampled requests and exports them.

    Args:
        labels: Values of ``families.ENGINE_LABELS``.
        exported: Function that is called with a request and its trace id when its spans have been sent.

    Raises:
        NotUnderstoodError: If a variable of the exporter is invalid.
        ImportError: If the SDK or its exporter is not installed.
    """

    def __init__(self, labels: tuple[str, str], exported: Callable[[SampledRequest, str], None]) -> None:
        self._exporter = otlp_exporter("TRACES")
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.destination = f"spans to {destination('TRACES')}"
        self.lost = 0
        """Number of requests whose spans were dropped, or could not be exported."""
        self._labels, self._exported = labels, exported
        self._made = InMemorySpanExporter()
        provider = TracerProvider(resource=sdk_resource(), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._made))
        self._tracer = provider.get_tracer("schedtrace", __version__)
        self._queue: deque[SampledRequest] = deque()
        self._closing = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="schedtrace-spans", daemon=True)
        self._thread.start()

    def queue_spans(self, request: SampledRequest) -> None:
        """Queue a request's spans for export; drop them if too many wait."""
        if len(self._queue) < MOST_QUEUED:
            self._queue.append(request)
        else:
            self.lost += 1

    def close(self) -> None:
        """Export the waiting spans, but for no longer than ``CLOSE_S``."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(EVERY_S)
            while self._queue:
                together = [self._queue.popleft() for _ in range(min(len(self._queue), MOST_TOGETHER))]
                try:
                    self._export(together)
                except Exception as error:
                    self._fail(len(together), repr(error))

    def _export(self, requests: Sequence[SampledRequest]) -> None:
        trace_ids = []
        for request in requests:
            trace_ids.append(make_spans(self._tracer, request, self._labels))
            time.sleep(0)  # let the engine's thread have the interpreter
        spans = self._made.get_finished_spans()
        self._made.clear()
        if spans and self._exporter.export(spans).name != "SUCCESS":
            self._fail(len(requests), "the collector does not take them")
            return
        for request, trace_id in zip(requests, trace_ids, strict=True):
            if trace_id is not None:
                self._exported(request, trace_id)

    def _fail(self, number: int, why: str) -> None:
        self._made.clear()
        self.lost += number
        if not self._warned:
            self._warned = True
            logger.warning("schedtrace: spans are lost: {}", why)


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
        """Queue the spans of sampled requests that have ended; return how many requests' spans were lost."""
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
        """Store the request as the latest example of each cause that it waited for."""
        now_s = time.time()
        for cause, seconds in request.seconds_by_cause(QUEUED).items():
            self._series.exemplars[families.WAIT, cause] = Exemplar(trace_id, seconds, now_s)
