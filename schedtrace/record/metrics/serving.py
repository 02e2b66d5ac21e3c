"""HTTP server of an engine's process: ``/metrics``, ``/health`` and ``/ready``, by default on loopback."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

from schedtrace.model.live import Health

OK, UNAVAILABLE, NOT_FOUND = 200, 503, 404
READ_S = 5.0
"""Seconds after which a client that sends nothing is dropped."""


class MetricsServer:
    """Server of metrics and health on a port.

    Args:
        host: Address to bind.
        port: Port to bind; 0 for any free one.
        collector: Collector of ``prometheus_client``; None if the metrics appear elsewhere.
        health: Function that returns the engine's health.

    Raises:
        OSError: If the port cannot be bound.
    """

    def __init__(self, host: str, port: int, collector: Any, health: Callable[[], Health]) -> None:
        handler = type(
            "Handler", (_Handler,), {"health": staticmethod(health), "registry": _registry(collector)}
        )
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


def _registry(collector: Any) -> Any:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    if collector is not None:
        registry.register(collector)
    return registry


class _Handler(BaseHTTPRequestHandler):
    """Answers to GET; nothing that a client sends reaches the engine."""

    health: ClassVar[Callable[[], Health]]
    registry: ClassVar[Any]
    timeout = READ_S

    def do_GET(self) -> None:  # name in http.server
        """Answer a request."""
        path = urlsplit(self.path).path
        try:
            if path == "/metrics":
                self._metrics()
            elif path in {"/health", "/ready"}:
                self._health(ready=path == "/ready")
            else:
                self._answer(NOT_FOUND, "text/plain; charset=utf-8", b"/metrics, /health or /ready\n")
        except (BrokenPipeError, ConnectionResetError):  # the client has gone
            return

    def _metrics(self) -> None:
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer(OK, content_type, encode(self.registry))

    def _health(self, *, ready: bool) -> None:
        health = type(self).health()
        fine = health.is_ready if ready else health.is_alive
        body = {"state": health.state} | ({} if health.cause is None else {"cause": health.cause})
        self._answer(OK if fine else UNAVAILABLE, "application/json", json.dumps(body).encode() + b"\n")

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # name in http.server
        """Log nothing: a scrape is no news."""
