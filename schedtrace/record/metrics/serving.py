"""Places where an engine's series appear: a server of its own, vLLM's own ``/metrics``, or Ray's metrics.

With several API servers, vLLM combines its metrics from files in ``PROMETHEUS_MULTIPROC_DIR``, which every
process writes; the engine's series appear there if this process also writes them. Otherwise the engine serves
``/metrics`` itself, with ``/health`` and ``/ready``, by default on loopback.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

from schedtrace.model.live import Health
from schedtrace.record.metrics.families import ENGINE_LABELS, FAMILIES, Family, Series

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


def in_vllms_metrics() -> bool:
    """Return whether metrics of this process appear on vLLM's own ``/metrics``."""
    return MULTIPROCESS in os.environ


class Instruments:
    """Counters and gauges with the interface of ``prometheus_client``.

    Args:
        labels: Values of ``ENGINE_LABELS``.
        counter: Function that makes a counter, given a name, a text and names of labels.
        gauge: The same for a gauge.
    """

    def __init__(
        self, labels: tuple[str, str], counter: Callable[..., Any], gauge: Callable[..., Any]
    ) -> None:
        self._labels = labels
        makers = {"counter": counter, "gauge": gauge}
        self._metrics = {
            family: makers[family.kind](family.full_name, family.help, family.labels) for family in FAMILIES
        }

    def add(self, family: Family, label: str, amount: float) -> None:
        """Add to a counter."""
        self._series(family, label).inc(amount)

    def set(self, family: Family, label: str, value: float) -> None:
        """Set a gauge to a value."""
        self._series(family, label).set(value)

    def _series(self, family: Family, label: str) -> Any:
        return self._metrics[family].labels(*self._labels, *([label] if family.label else []))


def shared_files(labels: tuple[str, str]) -> Instruments:
    """Return metrics of ``prometheus_client`` in multiprocess mode, which vLLM's API servers read."""
    from prometheus_client import CollectorRegistry, Counter, Gauge

    registry = CollectorRegistry()  # never the global one, which vLLM owns
    gauge = partial(Gauge, registry=registry, multiprocess_mode="livemostrecent")
    return Instruments(labels, partial(Counter, registry=registry), gauge)


def in_ray_actor() -> bool:
    """Return whether this process is a Ray actor, so that Ray collects its metrics; never import Ray."""
    ray = sys.modules.get("ray")
    try:
        return ray is not None and ray.is_initialized() and bool(ray.get_runtime_context().get_actor_id())
    except Exception:
        return False


def ray_metrics(labels: tuple[str, str]) -> Instruments:
    """Return metrics of ``ray.util.metrics``, made with the same classes as vLLM's own.

    Raises:
        ImportError: If this vLLM release lacks these classes.
    """
    from vllm.v1.metrics.ray_wrappers import RayCounterWrapper, RayGaugeWrapper

    def counter(name: str, *about: Any) -> Any:
        return RayCounterWrapper(name.removesuffix("_total"), *about)  # Ray adds it

    return Instruments(labels, counter, RayGaugeWrapper)


class OwnCollector:
    """Collector that gives a registry the series as they are at a scrape.

    Args:
        series: Series of the engine.
        labels: Values of ``ENGINE_LABELS``.
    """

    def __init__(self, series: Series, labels: tuple[str, str]) -> None:
        self._series, self._labels = series, labels

    def collect(self) -> Iterator[Any]:
        """Yield every family that has series."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.samples import Exemplar

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        by_family: dict[Family, dict[str, float]] = {}
        for (family, label), value in self._series.values.copy().items():
            by_family.setdefault(family, {})[label] = value
        for family, values in by_family.items():
            metric = kinds[family.kind](family.full_name, family.help, labels=family.labels)
            for label, value in values.items():
                labels = [*self._labels, *([label] if family.label else [])]
                example = self._series.exemplars.get((family, label))
                if example is None:
                    metric.add_metric(labels, value)
                else:  # shown in OpenMetrics only
                    trace = {"trace_id": example.trace_id}
                    exemplar = Exemplar(trace, example.value, example.unix_s)
                    metric.add_metric(labels, value, exemplar=exemplar)
            yield metric


def engine_labels(vllm_config: Any, rank: int) -> tuple[str, str]:
    """Return the values of ``ENGINE_LABELS``; vLLM's metrics have the same, so that both can be joined."""
    model = vllm_config.model_config
    name = getattr(model, "served_model_name", None) or model.model
    values = str(name[0] if isinstance(name, list) else name), str(rank)
    assert len(values) == len(ENGINE_LABELS)  # noqa: S101  # a label has a value
    return values


OK, UNAVAILABLE, NOT_FOUND = 200, 503, 404
READ_S = 5.0
"""Seconds after which a client that sends nothing is dropped."""


class MetricsServer:
    """Server of metrics and health on a port.

    Args:
        host: Address to bind.
        port: Port to bind; 0 for any free port.
        collector: Collector of ``prometheus_client``; None if the metrics appear elsewhere.
        health: Function that returns the engine's health.

    Raises:
        OSError: If the port cannot be bound.
    """

    def __init__(self, host: str, port: int, collector: Any, health: Callable[[], Health]) -> None:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        if collector is not None:
            registry.register(collector)
        handler = type("Handler", (_Handler,), {"health": staticmethod(health), "registry": registry})
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="schedtrace-metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Address in the form ``host:port``."""
        host, port = self._server.server_address[:2]
        return f"{host if isinstance(host, str) else host.decode()}:{port}"

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Handler of GET requests; nothing that a client sends reaches the engine."""

    health: ClassVar[Callable[[], Health]]
    registry: ClassVar[Any]
    timeout = READ_S

    def do_GET(self) -> None:  # name in http.server
        """Answer a request."""
        path = urlsplit(self.path).path
        try:
            if path == "/metrics":
                from prometheus_client.exposition import choose_encoder

                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(OK, content_type, encode(self.registry))
            elif path in {"/health", "/ready"}:
                health = type(self).health()
                fine = health.is_ready if path == "/ready" else health.is_alive
                body = {"state": health.state} | ({} if health.cause is None else {"cause": health.cause})
                text = json.dumps(body).encode() + b"\n"
                self._answer(OK if fine else UNAVAILABLE, "application/json", text)
            else:
                self._answer(NOT_FOUND, "text/plain; charset=utf-8", b"/metrics, /health or /ready\n")
        except (BrokenPipeError, ConnectionResetError):  # the client has gone
            return

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # name in http.server
        """Log nothing, because scrapes are routine."""
