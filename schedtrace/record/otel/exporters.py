"""OTLP exporters of the OpenTelemetry SDK, chosen and configured by its standard variables.

``OTEL_EXPORTER_OTLP_ENDPOINT`` and its relatives are read by the exporters themselves. No provider is made
global: vLLM has its own.
"""

import os
from importlib import import_module
from typing import Any, Literal
from urllib.parse import urlsplit

from schedtrace.record.switches import NotUnderstoodError, environment_value
from schedtrace.version import __version__

Signal = Literal["METRICS", "TRACES"]
GRPC, HTTP = "grpc", "http/protobuf"
DEFAULT_ENDPOINTS = {GRPC: "http://localhost:4317", HTTP: "http://localhost:4318"}
MISSING = "OpenTelemetry is not installed: pip install 'schedtrace[otel]'"
CLOSE_MS = 2000
"""Milliseconds for the last export when an engine ends; a collector that is gone may not hold it up."""


def signal_variable(signal: Signal, name: str) -> str:
    """Return the value of a signal's own variable, or else of the variable for all signals."""
    own = environment_value(f"OTEL_EXPORTER_OTLP_{signal}_{name}")
    return own or environment_value(f"OTEL_EXPORTER_OTLP_{name}")


def protocol(signal: Signal) -> str:
    """Return the protocol of a signal: ``grpc``, as in vLLM, unless a variable says ``http/protobuf``.

    Raises:
        NotUnderstoodError: If a variable names another protocol.
    """
    text = signal_variable(signal, "PROTOCOL") or GRPC
    if text not in DEFAULT_ENDPOINTS:
        msg = f"OTEL_EXPORTER_OTLP_PROTOCOL={text}: expected {GRPC} or {HTTP}"
        raise NotUnderstoodError(msg)
    return text


def destination(signal: Signal) -> str:
    """Return the protocol and the endpoint of a signal, in words."""
    by = protocol(signal)
    return f"{signal_variable(signal, 'ENDPOINT') or DEFAULT_ENDPOINTS[by]} ({by})"


def span_exporter() -> Any:
    """Return an exporter of spans.

    Raises:
        NotUnderstoodError: If a variable is invalid.
        ImportError: If the SDK or its exporter is not installed.
    """
    return _exporter("TRACES", "trace_exporter", "OTLPSpanExporter")


def metric_exporter() -> Any:
    """Return an exporter of metrics.

    Raises:
        NotUnderstoodError: If a variable is invalid.
        ImportError: If the SDK or its exporter is not installed.
    """
    return _exporter("METRICS", "metric_exporter", "OTLPMetricExporter")


def _exporter(signal: Signal, module: str, name: str) -> Any:
    by = protocol(signal)
    package = "http" if by == HTTP else "grpc"
    try:
        exporter = getattr(import_module(f"opentelemetry.exporter.otlp.proto.{package}.{module}"), name)
    except ImportError as error:
        raise ImportError(MISSING) from error
    return exporter() if by == HTTP else exporter(insecure=_insecure(signal))


def _insecure(signal: Signal) -> bool | None:
    """Return True for ``grpc://``, which vLLM contacts without TLS; else None: the SDK decides."""
    without_tls = urlsplit(signal_variable(signal, "ENDPOINT")).scheme == "grpc"
    return True if without_tls and not signal_variable(signal, "INSECURE") else None


def sdk_resource() -> Any:
    """Return the resource of all signals, to which ``OTEL_RESOURCE_ATTRIBUTES`` adds."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"vllm.process_id": str(os.getpid()), "schedtrace.version": __version__})
