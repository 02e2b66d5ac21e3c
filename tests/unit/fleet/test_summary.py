"""Percentiles of merged sketches against exact ones."""

import random

import polars as pl
import pytest

from schedtrace.diagnose.serving_metrics import request_latencies
from schedtrace.fleet.summary import ERROR_FRAC, merged_latency, percentile_ms, sketch_of
from schedtrace.read.run import read_run
from schedtrace.timeline.timeline import make_timeline
from tests.samples import FINDINGS


def exact(values, part):
    """The value at the rank that the sketch is asked for."""
    return sorted(values)[int(part * (len(values) - 1))]


@pytest.mark.parametrize("seed", range(5))
def test_merged_percentiles_are_within_the_stated_error(seed):
    rng = random.Random(seed)  # noqa: S311  # no secret
    engines = [
        [rng.lognormvariate(rng.uniform(-3, 6), 2) for _ in range(rng.randrange(1, 400))] for _ in range(7)
    ]
    merged = merged_latency([sketch_of("ttft", values) for values in engines])
    together = [value for values in engines for value in values]
    for name, part in {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}.items():
        assert getattr(merged, name) == pytest.approx(exact(together, part), rel=ERROR_FRAC)
    assert merged.count == len(together)
    assert merged.mean_ms == pytest.approx(sum(together) / len(together))
    assert merged.max_ms == max(together)


@pytest.mark.parametrize("sample", ["kv-bound", "max-num-seqs-bound", "preemption"])
def test_percentiles_of_recorded_requests_are_within_the_stated_error(sample):
    timeline = make_timeline(read_run(FINDINGS / sample / "shows").traces[0])
    for metric in ("ttft", "tpot", "e2e"):
        values = request_latencies(timeline)[f"{metric}_us"].drop_nulls().cast(pl.Float64) / 1e3
        sketch = sketch_of(metric, values.to_list())
        for part in (0.5, 0.9, 0.99):
            assert percentile_ms([sketch], metric, part) == pytest.approx(
                exact(values.to_list(), part), rel=ERROR_FRAC
            )


def test_no_value_has_no_sketch_and_zero_counts():
    assert sketch_of("queue", []) is None
    merged = merged_latency([sketch_of("queue", [0.0, 0.0, -3.0, 8.0])])
    assert (merged.count, merged.p50_ms, merged.max_ms) == (4, 0.0, 8.0)
