"""Everything that an engine sends by OTLP: its metrics, and spans of sampled requests."""

import time
from contextlib import suppress

from schedtrace.record.metrics import families
from schedtrace.record.metrics.families import Exemplar, Family, Series
from schedtrace.record.otel.histories import Histories
from schedtrace.record.otel.metric_push import MetricPush
from schedtrace.record.otel.sampling import Choice, Sampling
from schedtrace.record.otel.spans import QUEUED, SampledRequest, SpanExport


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
        """Histories of requests; None if there are no spans."""

    @property
    def destinations(self) -> list[str]:
        """Places to which something is sent, in words."""
        return [sender.destination for sender in (self._push, self._spans) if sender is not None]

    def send(self, chosen: Choice) -> None:
        """Send what is chosen; what is sent already goes on.

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
            reason = self._sampling.reason(history)
            if reason is not None:
                states = histories.states(history)
                spans.put(SampledRequest(history, states, reason, histories.wall_anchor_us))
        return {(families.LOST_SPANS, ""): float(self._lost_before + spans.lost)}

    def close(self) -> None:
        """Send what waits, and stop."""
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
        """Note the request as an example of waiting for its causes."""
        now_s = time.time()
        for cause, seconds in request.seconds_by_cause(QUEUED).items():
            self._series.exemplars[families.WAIT, cause] = Exemplar(trace_id, seconds, now_s)
