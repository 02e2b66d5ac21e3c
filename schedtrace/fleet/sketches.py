"""Latencies as sketches that merge: DDSketch, whose percentiles have a bounded relative error.

A percentile of a merged sketch is within ``ERROR_FRAC`` of the value at that rank of all values together.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from ddsketch import DDSketch
from ddsketch.ddsketch import BaseDDSketch
from ddsketch.mapping import LogarithmicMapping
from ddsketch.store import DenseStore

from schedtrace.model.fleet import FleetLatency, SummarySketch

ERROR_FRAC = 0.01
"""Relative error of a percentile."""


def sketch_of(metric: str, values_ms: Iterable[float]) -> SummarySketch | None:
    """Return the sketch of a latency; None without values.

    Args:
        metric: Name of the latency.
        values_ms: Values in milliseconds; one below 0, which two clocks may yield, counts as 0.
    """
    values = [max(0.0, value) for value in values_ms]
    if not values:
        return None
    bins = list(_bins(sorted(values)))
    return SummarySketch(
        metric=metric,
        keys=[key for key, _ in bins],
        counts=[float(count) for _, count in bins],
        zeros=float(len(values) - sum(count for _, count in bins)),
        sum_ms=sum(values),
        max_ms=max(values),
    )


def _bins(ascending: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield the key and the number of values of each bin: the keys of ascending values ascend as well."""
    mapping = LogarithmicMapping(ERROR_FRAC)
    begin = bisect_right(ascending, mapping.min_possible)
    while begin < len(ascending):
        key = mapping.key(ascending[begin])
        end = bisect_right(ascending, key, begin, key=mapping.key)
        yield key, end - begin
        begin = end


def _loaded(stored: SummarySketch) -> BaseDDSketch:
    positive = DenseStore()
    for key, count in zip(stored.keys, stored.counts, strict=True):
        positive.add(key, count)
    sketch = BaseDDSketch(LogarithmicMapping(ERROR_FRAC), positive, DenseStore(), stored.zeros)
    sketch._sum = stored.sum_ms  # noqa: SLF001  # the library reads sketches only from protobuf
    return sketch


def merged_latency(sketches: Sequence[SummarySketch]) -> FleetLatency | None:
    """Return the distribution of one latency over all engines; None without values."""
    merged = DDSketch(ERROR_FRAC)
    for stored in sketches:
        merged.merge(_loaded(stored))
    if not merged.count:
        return None
    p50, p90, p99 = (float(merged.get_quantile_value(part) or 0.0) for part in (0.5, 0.9, 0.99))
    return FleetLatency(
        metric=sketches[0].metric,
        count=round(merged.count),
        mean_ms=merged.sum / merged.count,
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=max(stored.max_ms for stored in sketches),
        error_frac=ERROR_FRAC,
    )


def percentile_ms(sketches: Sequence[SummarySketch], metric: str, part: float) -> float | None:
    """Return a percentile of one engine's latency; None if it has no values."""
    stored = next((sketch for sketch in sketches if sketch.metric == metric), None)
    value = None if stored is None else _loaded(stored).get_quantile_value(part)
    return None if value is None else float(value)
