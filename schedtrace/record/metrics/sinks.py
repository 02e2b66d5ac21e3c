"""Places where an engine's series appear: a registry of its own, or vLLM's own ``/metrics``.

With several API servers, vLLM puts its metrics together from files in ``PROMETHEUS_MULTIPROC_DIR``, which
every process writes; the engine's series appear there if this process writes them, too. Otherwise the engine
serves them itself (``serving.py``).
"""

import os
from collections.abc import Iterator
from typing import Any

from schedtrace.record.metrics.families import ENGINE_LABELS, FAMILIES, Family, Series

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


def in_vllms_metrics() -> bool:
    """Return whether metrics of this process appear on vLLM's own ``/metrics``."""
    return MULTIPROCESS in os.environ


class SharedFiles:
    """Metrics of ``prometheus_client`` in multiprocess mode, which vLLM's API servers read.

    Args:
        labels: Values of ``ENGINE_LABELS``.
    """

    def __init__(self, labels: tuple[str, str]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self._labels = labels
        registry = CollectorRegistry()  # never the global one, which vLLM owns
        self._metrics: dict[Family, Any] = {}
        for family in FAMILIES:
            about = (family.full_name, family.help, family.labels)
            if family.kind == "counter":
                self._metrics[family] = Counter(*about, registry=registry)
            else:
                self._metrics[family] = Gauge(*about, registry=registry, multiprocess_mode="livemostrecent")

    def add(self, family: Family, label: str, amount: float) -> None:
        """Add to a counter."""
        self._series(family, label).inc(amount)

    def set(self, family: Family, label: str, value: float) -> None:
        """Set a gauge to a value."""
        self._series(family, label).set(value)

    def _series(self, family: Family, label: str) -> Any:
        return self._metrics[family].labels(*self._labels, *([label] if family.label else []))


class OwnCollector:
    """Collector of a registry, with the series as they are at a scrape.

    Args:
        series: Series of the engine.
        labels: Values of ``ENGINE_LABELS``.
    """

    def __init__(self, series: Series, labels: tuple[str, str]) -> None:
        self._series, self._labels = series, labels

    def collect(self) -> Iterator[Any]:
        """Yield every family that has series."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        by_family: dict[Family, dict[str, float]] = {}
        for (family, label), value in self._series.values.copy().items():
            by_family.setdefault(family, {})[label] = value
        for family, values in by_family.items():
            metric = kinds[family.kind](family.full_name, family.help, labels=family.labels)
            for label, value in values.items():
                metric.add_metric([*self._labels, *([label] if family.label else [])], value)
            yield metric


def engine_labels(vllm_config: Any, rank: int) -> tuple[str, str]:
    """Return the values of ``ENGINE_LABELS``: those of vLLM's own metrics, so that both can be joined."""
    model = vllm_config.model_config
    name = getattr(model, "served_model_name", None) or model.model
    values = str(name[0] if isinstance(name, list) else name), str(rank)
    assert len(values) == len(ENGINE_LABELS)  # noqa: S101  # a label has a value
    return values
