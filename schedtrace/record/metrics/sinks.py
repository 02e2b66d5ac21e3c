"""Places where an engine's series appear: a registry of its own, or vLLM's own ``/metrics``.

With several API servers, vLLM puts its metrics together from files in ``PROMETHEUS_MULTIPROC_DIR``, which
every process writes; the engine's series appear there if this process writes them, too. Otherwise the engine
serves them itself (``serving.py``).
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from schedtrace.record.metrics.families import ENGINE_LABELS, FAMILIES, Family, Series

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


def in_vllms_metrics() -> bool:
    """Return whether metrics of this process appear on vLLM's own ``/metrics``."""
    return MULTIPROCESS in os.environ


class Instruments:
    """Counters and gauges with the interface of ``prometheus_client``.

    Args:
        labels: Values of ``ENGINE_LABELS``.
        counter: Function that makes a counter of a name, a text and names of labels.
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
    """Return whether this process is a Ray actor, whose metrics Ray collects; import nothing."""
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
    """Return the values of ``ENGINE_LABELS``: those of vLLM's own metrics, so that both can be joined."""
    model = vllm_config.model_config
    name = getattr(model, "served_model_name", None) or model.model
    values = str(name[0] if isinstance(name, list) else name), str(rank)
    assert len(values) == len(ENGINE_LABELS)  # noqa: S101  # a label has a value
    return values
