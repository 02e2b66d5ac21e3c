"""Metrics by OTLP: observable instruments that read an engine's series whenever the SDK exports them."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from schedtrace.record.metrics.families import FAMILIES, Family, Series
from schedtrace.record.otel.exporters import CLOSE_MS, destination, metric_exporter, sdk_resource
from schedtrace.version import __version__


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
        exporter = metric_exporter()
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
