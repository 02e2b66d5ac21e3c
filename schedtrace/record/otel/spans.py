"""Spans with the states of sampled requests, under the trace context that the client sent.

vLLM makes one span per request, ``llm_request``, in its front end when the request has ended, and the SDK
then draws its id. While spans are on, the front end draws the id when the request begins and sends it to the
engine beside the client's trace context (``choose_span_ids``); vLLM's propagator reads only the headers that
it knows, and nothing else about vLLM's span changes. With this id, ``schedtrace.request`` becomes a child
of ``llm_request``; without it, they are siblings under the client's ``traceparent``.
``gen_ai.request.id`` is the same in both.
"""

import contextlib
import os
import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedtrace.model.causes import Cause, entries
from schedtrace.record.hooks import Method, wrap
from schedtrace.record.metrics.families import known_cause
from schedtrace.record.otel.histories import History, RequestState, StepRefusals

MOST_STATES = 100
"""Maximum number of state spans per request; beyond it, only the longest states get a span."""
LONGEST_TRACESTATE = 512
"""Maximum number of characters of ``tracestate`` that is passed on; a longer one is left out."""
QUEUED = ("waiting", "preempted", "set_aside")
"""States of a request that is in the waiting queue."""
_RANDOMIZED = re.compile(r"(.+)-[0-9a-f]{8}", re.DOTALL)
"""Pattern of an id that vLLM's front end has made from the client's id."""

Attributes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """Request whose states become spans."""

    history: History
    states: Sequence[RequestState]
    reason: str
    """Reason why the request is sampled."""
    wall_anchor_us: int

    def unix_ns(self, us: int) -> int:
        """Return a time of the trace's clock as Unix time in nanoseconds."""
        return (self.wall_anchor_us + us) * 1000

    def seconds_by_cause(self, names: Sequence[str]) -> dict[str, float]:
        """Return the seconds spent in the states with these names, by cause."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for state in self.states:
            if state.name in names and state.cause is not None:
                seconds[known_cause(state.cause)] += (state.end_us - state.begin_us) / 1e6
        return seconds


def make_spans(tracer: Any, request: SampledRequest, labels: tuple[str, str]) -> str | None:
    """Make the spans of a request; return its trace id (None if its client does not sample the trace).

    Args:
        tracer: Tracer of the OpenTelemetry SDK.
        request: The request.
        labels: Values of ``families.ENGINE_LABELS``.
    """
    from opentelemetry.trace import set_span_in_context

    states, attributes = request.states, _request_attributes(request, labels)
    if len(states) > MOST_STATES:
        attributes["schedtrace.states_left_out"] = len(states) - MOST_STATES
        longest = sorted(states, key=lambda state: state.begin_us - state.end_us)[:MOST_STATES]
        states = sorted(longest, key=lambda state: state.begin_us)
    whole = request.states or [RequestState(0, 0, "waiting", None, -1, None)]
    root = tracer.start_span(
        "schedtrace.request",
        context=_parent_context(request.history.headers),
        start_time=request.unix_ns(whole[0].begin_us),
        attributes=attributes,
    )
    within = set_span_in_context(root)
    for state in states:
        about: Attributes = {"schedtrace.step": state.step} if state.step >= 0 else {}
        if state.cause is not None:
            about["schedtrace.cause"] = known_cause(state.cause)
        begin_ns = request.unix_ns(state.begin_us)
        span = tracer.start_span(
            f"schedtrace.{state.name}", context=within, start_time=begin_ns, attributes=about
        )
        if state.refusal is not None and state.cause is not None:
            exits = exit_attributes(state, state.refusal, request.history.arrival.request_id)
            span.add_event("schedtrace.exit", exits, timestamp=begin_ns)
        span.end(request.unix_ns(state.end_us))
    root.end(request.unix_ns(whole[-1].end_us))
    context = root.get_span_context()
    return f"{context.trace_id:032x}" if context.trace_flags.sampled else None


def _request_attributes(request: SampledRequest, labels: tuple[str, str]) -> Attributes:
    finish, request_id = request.history.finish, request.history.arrival.request_id
    attributes: Attributes = {
        "gen_ai.request.model": labels[0],
        "schedtrace.engine": labels[1],
        "schedtrace.request_id": request_id,
        "schedtrace.sampled": request.reason,
    }
    if (match := _RANDOMIZED.fullmatch(request_id)) is not None:
        attributes["gen_ai.request.id"] = match[1]
    if finish is not None:
        attributes |= {
            "schedtrace.status": finish.status,
            "gen_ai.usage.prompt_tokens": finish.prompt_tokens,
            "gen_ai.usage.completion_tokens": finish.output_tokens,
            "schedtrace.cached_tokens": finish.cached_tokens,
        }
        if finish.num_preemptions is not None:
            attributes["schedtrace.preemptions"] = finish.num_preemptions
    for cause, seconds in request.seconds_by_cause(QUEUED).items():
        attributes[f"schedtrace.wait.{cause}"] = round(seconds, 6)
    for cause, seconds in request.seconds_by_cause(("stalled",)).items():
        attributes[f"schedtrace.stall.{cause}"] = round(seconds, 6)
    return attributes


def _parent_context(headers: Mapping[str, str]) -> Any:
    """Return the context of vLLM's own span if its id is known; otherwise that of the client's."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        INVALID_SPAN_CONTEXT,
        NonRecordingSpan,
        SpanContext,
        get_current_span,
        set_span_in_context,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    state = headers.get("tracestate", "")
    carrier = {"traceparent": headers.get("traceparent", "")}
    if state and len(state) <= LONGEST_TRACESTATE:
        carrier["tracestate"] = state
    context = TraceContextTextMapPropagator().extract(carrier, Context())
    client = get_current_span(context).get_span_context()
    own = headers.get(PARENT, "")
    if client == INVALID_SPAN_CONTEXT or not re.fullmatch("[0-9a-f]{16}", own):
        return context
    parent = SpanContext(
        client.trace_id, int(own, 16), True, client.trace_flags, client.trace_state  # is remote
    )  # fmt: skip
    return set_span_in_context(NonRecordingSpan(parent), Context())


def exit_attributes(state: RequestState, refusal: StepRefusals, request_id: str) -> Attributes:
    """Return the attributes of a ``schedtrace.exit`` event: cause, limit, and holders of missing KV blocks.

    Args:
        state: State in which the request got no tokens.
        refusal: Exits of the step that began the state.
        request_id: Id of the request.
    """
    loop, cause = "running" if state.name == "stalled" else "waiting", str(state.cause)
    attributes: Attributes = {"schedtrace.cause": known_cause(cause), "schedtrace.loop": loop}
    exits = [exit_ for exit_ in refusal.exits if exit_.cause == cause and exit_.loop == loop]
    exit_ = next(
        (
            each
            for each in exits
            if request_id in {each.request_id, *(skipped.request_id for skipped in each.also)}
        ),
        exits[0] if exits else None,
    )
    detail = None
    if exit_ is not None:
        detail = exit_.detail
        for name in ("kind", "detail", "location", "blocks_needed", "blocks_free"):
            if (value := getattr(exit_, name)) is not None:
                attributes[f"schedtrace.{name}"] = value
    setting = next((entry.setting for entry in entries(cause, detail) if entry.setting), "")
    if setting:
        attributes["schedtrace.limit"] = setting
        values = {
            "max_num_seqs": refusal.max_num_running_reqs,
            "max_num_batched_tokens": refusal.token_budget,
        }
        if setting in values:
            attributes["schedtrace.limit.value"] = values[setting]
    if cause == Cause.MAX_NUM_SEQS:
        attributes["schedtrace.running"] = refusal.running
    elif cause == Cause.KV_BLOCKS and refusal.head is not None and refusal.head.holders:
        attributes["schedtrace.holder"] = tuple(refusal.head.holders)
    return attributes


PARENT = "schedtrace-llm-request"
"""Key in a request's trace headers under which the id of its ``llm_request`` is sent: 16 hex digits."""
_chosen = threading.local()


def choose_span_ids() -> None:
    """Install the wrappers; a process that is not a front end never calls the wrapped methods."""
    from vllm.v1.engine.output_processor import OutputProcessor

    wrap(OutputProcessor, "add_request", _add_request)
    wrap(OutputProcessor, "do_tracing", _trace)


class ChosenIds:
    """Generator of ids that can be told the next span id.

    Args:
        original: Generator of the SDK's provider.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def generate_span_id(self) -> int:
        """Return the chosen id once; otherwise, an id that the SDK draws."""
        chosen, _chosen.span_id = getattr(_chosen, "span_id", None), None
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
        _chosen.span_id = int(output.trace_headers[PARENT], 16)
    try:
        return original(processor, output, *args, **kwargs)
    finally:
        _chosen.span_id = None


def _takes_ids() -> bool:
    """Make vLLM's provider accept chosen ids; return whether it does."""
    from opentelemetry.trace import get_tracer_provider

    provider = get_tracer_provider()
    original = getattr(provider, "id_generator", None)
    if original is None:
        return False
    if not isinstance(original, ChosenIds):
        provider.id_generator = ChosenIds(original)
    return True
