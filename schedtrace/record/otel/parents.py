"""Ids of vLLM's ``llm_request`` spans, chosen in the front end when a request begins: engines know them.

vLLM makes this span when the request has ended, and the SDK then draws its id. While spans are on, the front
end draws the id when the request begins and sends it to the engine beside the client's trace context; vLLM's
propagator reads only the headers that it knows. Nothing else about vLLM's span changes.
"""

import contextlib
import os
import threading
from typing import Any

from schedtrace.record.hooks import Method, wrap

PARENT = "schedtrace-llm-request"
"""Key, among a request's trace headers, of the id of its ``llm_request``: 16 hex digits."""
_next = threading.local()


def choose_span_ids() -> None:
    """Install the wrappers; a process that is not a front end never calls the wrapped methods."""
    from vllm.v1.engine.output_processor import OutputProcessor

    wrap(OutputProcessor, "add_request", _add_request)
    wrap(OutputProcessor, "do_tracing", _trace)


class ChosenIds:
    """Generator of ids whose next span id may have been chosen.

    Args:
        original: Generator of the SDK's provider.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def generate_span_id(self) -> int:
        """Return the chosen id, once, or else one that the SDK draws."""
        chosen, _next.span_id = getattr(_next, "span_id", None), None
        return int(self._original.generate_span_id() if chosen is None else chosen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _add_request(original: Method, processor: Any, request: Any, *args: object, **kwargs: object) -> Any:
    with contextlib.suppress(Exception):
        if processor.tracing_enabled and request.trace_headers and _takes_ids():
            span_id = int.from_bytes(os.urandom(8), "big") or 1
            request.trace_headers = {**request.trace_headers, PARENT: f"{span_id:016x}"}
    return original(processor, request, *args, **kwargs)


def _trace(original: Method, processor: Any, output: Any, *args: object, **kwargs: object) -> Any:
    with contextlib.suppress(Exception):
        _next.span_id = int(output.trace_headers[PARENT], 16)
    try:
        return original(processor, output, *args, **kwargs)
    finally:
        _next.span_id = None


def _takes_ids() -> bool:
    """Have vLLM's provider take chosen ids; return whether it does."""
    from opentelemetry.trace import get_tracer_provider

    provider = get_tracer_provider()
    original = getattr(provider, "id_generator", None)
    if original is None:
        return False
    if not isinstance(original, ChosenIds):
        provider.id_generator = ChosenIds(original)
    return True
