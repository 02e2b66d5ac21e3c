"""Connection between a writer and the receiver of its totals; the receiver may change at any time."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from schedtrace.record.log import logger
from schedtrace.record.metrics.tally import Tally
from schedtrace.record.otel.histories import Histories

if TYPE_CHECKING:
    from schedtrace.record.assemble import Assembler


class Meter(Protocol):
    """Receiver of an engine's totals, on the writer's thread."""

    @property
    def histories(self) -> Histories | None:
        """Histories of requests, for spans; None if no spans are made."""

    def new_tally(self) -> Tally:
        """Return totals for a recording that begins."""

    def publish(self, tally: Tally) -> None:
        """Take the totals after a round of the writer; they are complete up to their clock."""


class EngineFacts(NamedTuple):
    """Facts about an engine that no step contains."""

    stall_kind: str | None
    """Kind of the stall that the watchdog reports."""
    progress_unix_s: float | None
    """Time at which the watchdog last saw progress; None without a watchdog."""
    kv_blocks: Mapping[str, int]
    """KV blocks by holder; empty if they cannot be read."""


class Measuring:
    """Metrics of one writer.

    Args:
        assembler: The writer's assembler.
    """

    def __init__(self, assembler: "Assembler") -> None:
        self.meter: Meter | None = None
        """Receiver of the totals, which any thread may set; None if metrics are off."""
        self.begun: Callable[[], Any] = lambda: None
        """Function that returns the capture of the latest call, which may still be under way."""
        self.assembled: Any = None
        """Latest capture that has been assembled."""
        self._assembler = assembler
        self._current: Meter | None = None
        self._followed: Histories | None = None

    def begin_round(self) -> None:
        """Begin new totals if the receiver has changed."""
        meter = self.meter
        if meter is not self._current:
            self._current = meter
            self._assembler.count_with(None if meter is None else meter.new_tally())
        histories = None if meter is None else meter.histories
        if histories is not self._followed:
            self._followed = histories
            self._assembler.follow_with(histories)

    def keep_trace_context(self, request: Any) -> None:
        """Keep the trace context of a request that arrives, if spans are made (on the engine's thread)."""
        meter = self.meter
        histories = None if meter is None else meter.histories
        if histories is not None and (headers := getattr(request, "trace_headers", None)):
            histories.contexts.append((request.request_id, headers))

    def end_round(self, now_us: int, since_anchor: Callable[[int], int], *, complete: bool) -> None:
        """Pass on the totals; never raise an error.

        Args:
            now_us: Current time of the trace's clock.
            since_anchor: Function that converts monotonic nanoseconds to microseconds of that clock.
            complete: Whether the totals contain everything up to now, except a call under way.
        """
        meter, tally = self._current, self._assembler.tally
        if meter is None or tally is None:
            return
        try:
            if complete:
                call = self.begun()
                began_ns = None if call is self.assembled else getattr(call, "start_ns", None)
                until_us = now_us if began_ns is None else min(now_us, since_anchor(began_ns))
                tally.advance_to(max(tally.clock_us, until_us))
            meter.publish(tally)
        except Exception as error:
            self.meter = None
            logger.warning("schedtrace: metrics stopped: {!r}", error)
