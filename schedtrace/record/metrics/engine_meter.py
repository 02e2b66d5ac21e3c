"""Metrics of one engine's process: totals of its recordings, facts of its watchdog, and their export."""

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from schedtrace.model.causes import Cause, reason_text
from schedtrace.model.live import Health
from schedtrace.record.log import logger
from schedtrace.record.metrics import families
from schedtrace.record.metrics.families import Family, Series, known_cause, series_totals
from schedtrace.record.metrics.measuring import EngineFacts
from schedtrace.record.metrics.serving import (
    MetricsServer,
    OwnCollector,
    in_ray_actor,
    in_vllms_metrics,
    ray_metrics,
    shared_files,
)
from schedtrace.record.metrics.tally import NEXT_STEP, Tally
from schedtrace.record.otel.export import Choice, OtlpExport
from schedtrace.record.otel.histories import Histories
from schedtrace.record.switches import METRICS, NO, YES, NotUnderstoodError

LOOPBACK = "127.0.0.1"
PORT = 9415
"""Port for rank 0, to which each rank adds its number."""
_ADDRESS = re.compile(r"(?:([\w.-]+|\[[0-9a-fA-F:.]+\]):)?(\d{1,5})")
EXPECTED = "expected on, off, a port, an address with a port (0.0.0.0:9415), otlp, or spans=1%"
MOST_PORT = 65535
EVERY_S = 1.0
"""Seconds between two reads of the watchdog and the block tables."""
MINUTE_S = 60.0
JUDGED_EVERY_S = 5.0
"""Seconds between two determinations of the leading cause."""
LEAST_WAITING = 0.5
"""Minimum mean number of waiting requests over the last minute for a cause to lead."""


class Address(NamedTuple):
    """Address at which an engine serves its metrics."""

    host: str
    port: int
    asked: bool
    """Whether a user named the address; otherwise it is not used if vLLM's ``/metrics`` or Ray has the
    series."""


def metrics_address(text: str) -> Address | None:
    """Return the address that a value of ``SCHEDTRACE_METRICS`` names; None if metrics are off.

    Raises:
        NotUnderstoodError: If the value is not an address.
    """
    if text.lower() in NO | {""}:
        return None
    if text.lower() in YES:
        return Address(LOOPBACK, PORT, asked=False)
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= MOST_PORT:
        msg = f"{METRICS}={text}: {EXPECTED}"
        raise NotUnderstoodError(msg)
    return Address((match[1] or LOOPBACK).strip("[]"), int(match[2]), asked=True)


class EngineMeter:
    """Metrics of one engine, over all its recordings.

    Args:
        labels: Values of ``families.ENGINE_LABELS``.
        by_priority: Whether the scheduler's policy is priority.
        facts: Function that returns facts about the engine; it may be called on any thread.
        health: Function that returns the engine's health; it may be called on any thread.
    """

    def __init__(
        self,
        labels: tuple[str, str],
        *,
        by_priority: bool,
        facts: Callable[[], EngineFacts],
        health: Callable[[], Health],
    ) -> None:
        self._by_priority, self._facts, self._health, self._labels = by_priority, facts, health, labels
        self._shared = in_vllms_metrics()
        self._in_ray = not self._shared and in_ray_actor()
        sinks = [shared_files(labels)] if self._shared else [ray_metrics(labels)] if self._in_ray else []
        self._series = Series([*sinks])
        self._otlp = OtlpExport(self._series, labels)
        self._server: MetricsServer | None = None
        self._before: Counter[tuple[Family, str]] = Counter()
        """Totals of recordings that have ended."""
        self._tally: Tally | None = None
        self._looked_s = 0.0
        self._leading = LeadingCause()

    @property
    def published_on(self) -> str:
        """Description of the places where the series appear."""
        own = [] if self._server is None else [f"http://{self._server.address}/metrics"]
        shared = ["vLLM's own /metrics"] if self._shared else ["Ray's metrics"] if self._in_ray else []
        return " and ".join(shared + own + self._otlp.destinations)

    @property
    def histories(self) -> Histories | None:
        """Histories of requests for spans; None if spans are off."""
        return self._otlp.histories

    def send_otlp(self, chosen: Choice) -> None:
        """Send metrics and spans by OTLP as chosen.

        Raises:
            NotUnderstoodError: If a variable of an exporter is invalid.
            ImportError: If OpenTelemetry is not installed.
        """
        self._otlp.send(chosen)

    def serve(self, asked: Address, rank: int) -> None:
        """Serve the metrics if a user named the address or neither vLLM nor Ray does; ignore further calls.

        Raises:
            OSError: If the port cannot be bound.
        """
        if self._server is None and (asked.asked or not (self._shared or self._in_ray)):
            collector = OwnCollector(self._series, self._labels)
            self._server = MetricsServer(asked.host, asked.port + rank, collector, self._health)

    def close(self) -> None:
        """Stop serving and sending metrics."""
        self._otlp.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def new_tally(self) -> Tally:
        """Return the totals of a recording that begins; the totals of earlier recordings are kept."""
        if self._tally is not None:
            self._before.update(_by_series(self._tally))
        self._tally = Tally(by_priority=self._by_priority)
        return self._tally

    def publish(self, tally: Tally) -> None:
        """Raise the counters to the totals, and set the gauges."""
        now = _by_series(tally)
        now = {key: self._before[key] + now.get(key, 0.0) for key in {*self._before, *now}}
        self._series.count(now | self._otlp.publish())
        self._series.gauge(families.WAITING, tally.queue_causes)
        now_s = time.monotonic()
        if now_s - self._looked_s >= EVERY_S:
            self._looked_s = now_s
            facts = self._facts()
            if facts.progress_unix_s is not None:
                self._series.gauge(families.PROGRESS, {"": facts.progress_unix_s})
                kinds = families.STALLED.values or ()
                self._series.gauge(families.STALLED, {kind: kind == facts.stall_kind for kind in kinds})
            self._series.gauge(families.KV_BLOCKS, facts.kv_blocks)
            waits = {label: value for (family, label), value in now.items() if family is families.WAIT}
            self._series.gauge(families.LEADING, self._leading.gauge_values(now_s, waits))


def _by_series(tally: Tally) -> dict[tuple[Family, str], float]:
    return {(family, str(label)): value for family, label, value in series_totals(tally)}


class LeadingCause:
    """Cause of the most waiting time in the last minute, except ``next_step``; changes are logged."""

    def __init__(self) -> None:
        self._waited: deque[tuple[float, dict[str, float]]] = deque()
        """Waiting seconds by cause, with the time at which they were read."""
        self._cause: str | None = None

    def gauge_values(self, now_s: float, waits: Mapping[str, float]) -> dict[str, float]:
        """Return the leading cause as a gauge's values; log the cause if it has changed.

        Args:
            now_s: Time of a monotonic clock in seconds.
            waits: Waiting seconds by cause so far.
        """
        waited = self._waited
        if not waited or now_s - waited[-1][0] >= JUDGED_EVERY_S:
            waited.append((now_s, dict(waits)))
            while len(waited) > 1 and now_s - waited[1][0] >= MINUTE_S:
                waited.popleft()
            if len(waited) > 1:
                self._judge()
        return {} if self._cause is None else {known_cause(self._cause): 1.0}

    def _judge(self) -> None:
        (begin_s, before), (end_s, after) = self._waited[0], self._waited[-1]
        spent = {cause: seconds - before.get(cause, 0.0) for cause, seconds in after.items()}
        whole_s, span_s = sum(spent.values()), end_s - begin_s
        refused = {cause: seconds for cause, seconds in spent.items() if cause != NEXT_STEP}
        leading = max(refused, key=lambda cause: refused[cause], default=None)
        if whole_s < LEAST_WAITING * span_s or leading is None or not refused[leading]:
            leading = None
        if leading == self._cause:
            return
        self._cause = leading
        if leading is None:
            logger.info("schedtrace: in the last {:.0f} s, hardly any request waited", span_s)
            return
        share = f"{refused[leading] / whole_s:.0%}".replace("%", " %")
        # The reason is that of the table of causes, without figures.
        why = reason_text(leading, None, "waiting") or reason_text(str(Cause.OTHER), None, "waiting")
        why = why.replace(" {seats_setting} {seats}", " max_num_seqs").replace(" of {token_budget}", "")
        logger.info(
            "schedtrace: in the last {:.0f} s, {} of waiting time ({:,.1f} of {:,.1f} s) was for {}: {}",
            span_s, share, refused[leading], whole_s, leading, why.replace("`", ""),
        )  # fmt: skip
