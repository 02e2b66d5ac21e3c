"""OTLP exporters of OpenTelemetry's SDK, configured by standard variables, and periodic metrics.

``OTEL_EXPORTER_OTLP_ENDPOINT`` and its relatives are read by the exporters themselves. No provider is made
global: vLLM has its own.
"""

import os
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import Any, Literal
from urllib.parse import urlsplit

from schedtrace.record.metrics.families import FAMILIES, Family, Series
from schedtrace.record.switches import NotUnderstoodError, environment_value
from schedtrace.version import __version__

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
"""Milliseconds for the last export when an engine ends, which an absent collector must not delay."""


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
