"""What is sent by OTLP, which requests are sampled, and how series appear on Ray and as exemplars."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from schedtrace.model.trace import Arrival, Finish
from schedtrace.record.metrics import families, serving
from schedtrace.record.metrics.families import Exemplar, Series
from schedtrace.record.otel import spans
from schedtrace.record.otel.export import (
    MISSING,
    Choice,
    MetricPush,
    Sampling,
    choice,
    destination,
    otlp_exporter,
    protocol,
)
from schedtrace.record.otel.histories import Histories, History, RequestState
from schedtrace.record.settings import Rules
from schedtrace.record.switches import NotUnderstoodError

TRACE = "0af7651916cd43dd8448eb211c80319c"
HOSTILE = 'x"\n\x00\ud800' + "y" * 5000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", Choice("1")),
        ("otlp", Choice("", otlp=True)),
        ("0.0.0.0:9000, OTLP", Choice("0.0.0.0:9000", otlp=True)),
        ("spans=1%", Choice("", sampling=Sampling(0.01))),
        ("on,otlp,spans=all", Choice("on", otlp=True, sampling=Sampling(1.0))),
        (
            "spans=0.5%,ttft>5s,spans=e2e>1m,otlp",
            Choice("", otlp=True, sampling=Sampling(0.005, Rules(ttft_s=5.0, e2e_s=60.0))),
        ),
    ],
)
def test_choices(text, expected):
    assert choice(text) == expected


@pytest.mark.parametrize(
    "text", ["spans=0%", "spans=101%", "spans=much", "spans=preemptions>3/10s", "spans="]
)
def test_what_samples_nothing_is_refused(text):
    with pytest.raises(NotUnderstoodError, match="SCHEDTRACE_METRICS"):
        choice(text)


def history(request_id="a", traceparent="", **finish):
    end = Finish(request_id, "STOPPED", 9_000_000, 10, 5, arrived_us=0, **finish)
    return History(Arrival(request_id, 0, 0, 10), {"traceparent": traceparent}, finish=end)


def test_requests_of_one_trace_are_sampled_alike_and_as_an_sdk_would():
    low, high = f"{TRACE[:16]}{'0' * 15}1", f"{TRACE[:16]}{'f' * 16}"
    half = Sampling(0.5)
    assert [half.sampling_reason(history(name, f"00-{low}-00f067aa0ba902b7-01")) for name in "ab"] == [
        "rate"
    ] * 2
    assert [half.sampling_reason(history(name, f"00-{high}-00f067aa0ba902b7-01")) for name in "ab"] == [
        None
    ] * 2
    sampled = sum(half.sampling_reason(history(f"r{number}")) is not None for number in range(1000))
    assert 400 < sampled < 600


def test_a_slow_request_is_sampled_whatever_the_rate():
    slow = Sampling(slow=Rules(ttft_s=5.0))
    assert slow.sampling_reason(history(first_token_us=6_000_000)) == "ttft>5s"
    assert slow.sampling_reason(history(first_token_us=4_000_000)) is None


def test_hostile_ids_and_headers_need_no_more_than_they_may():
    histories = Histories()
    histories.contexts.extend((f"{HOSTILE}{number}", {}) for number in range(20_000))
    assert len(histories.contexts) == 10_000
    assert Sampling(1.0).sampling_reason(history(HOSTILE, HOSTILE)) == "rate"


def test_the_protocol_is_the_signals_own_or_the_common_one(monkeypatch):
    for name in ("PROTOCOL", "TRACES_PROTOCOL", "ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    assert destination("METRICS") == "http://localhost:4317 (grpc)"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4317")
    assert destination("METRICS") == "http://localhost:4318 (http/protobuf)"
    assert destination("TRACES") == "http://collector:4317 (grpc)"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier pigeon")
    with pytest.raises(NotUnderstoodError, match="carrier pigeon"):
        protocol("METRICS")


def test_without_the_sdk_it_is_refused_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.metric_exporter", None)
    with pytest.raises(ImportError, match=r"pip install 'schedtrace\[otel\]'") as error:
        MetricPush(Series([]), ("m", "0"))
    assert str(error.value) == MISSING


@pytest.mark.parametrize(
    ("endpoint", "variable", "insecure"),
    [("grpc://a:4317", "", True), ("http://a:4317", "", None), ("grpc://a:4317", "false", None)],
)
def test_an_endpoint_of_grpc_has_no_tls_unless_a_variable_decides(endpoint, variable, insecure, monkeypatch):
    package = pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc").__name__
    made = []
    module = SimpleNamespace(OTLPSpanExporter=lambda **options: made.append(options))
    monkeypatch.setitem(sys.modules, f"{package}.trace_exporter", module)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", variable)
    otlp_exporter("TRACES")
    assert made == [{"insecure": insecure}]


def test_a_request_with_many_states_has_spans_of_the_longest_ones(monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setattr(spans, "MOST_STATES", 2)
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    times = [(0, 5), (5, 6), (6, 8), (8, 20)]
    states = [RequestState(begin, end, "decode", None, begin, None) for begin, end in times]
    request = spans.SampledRequest(history(), states, "rate", 0)
    spans.make_spans(provider.get_tracer("test"), request, ("m", "0"))
    *parts, root = made.get_finished_spans()
    assert [(span.start_time, span.end_time) for span in parts] == [(0, 5000), (8000, 20_000)]
    assert (root.start_time, root.end_time) == (0, 20_000)
    assert root.attributes["schedtrace.states_left_out"] == 2


def test_units_are_those_that_the_names_state():
    units = {family.name: family.unit for family in families.FAMILIES}
    assert units["wait_seconds"] == units["last_progress_timestamp_seconds"] == "s"
    assert (units["budget_tokens"], units["kv_blocks"], units["stalled"]) == ("{token}", "{block}", "")
    assert families.WAIT.otlp_name == "schedtrace_wait_seconds"


def test_openmetrics_shows_the_trace_of_a_request_that_waited():
    series = Series([])
    series.count({(families.WAIT, "kv_blocks"): 2.0, (families.WAIT, "max_num_seqs"): 1.0})
    series.exemplars[families.WAIT, "kv_blocks"] = Exemplar(TRACE, 1.5, 1000.0)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(serving.OwnCollector(series, ("m", "0")))
    [family] = text_string_to_metric_families(generate_latest(registry).decode())
    exemplars = {sample.labels["cause"]: sample.exemplar for sample in family.samples}
    assert exemplars["max_num_seqs"] is None
    assert exemplars["kv_blocks"].labels == {"trace_id": TRACE}
    assert (exemplars["kv_blocks"].value, float(exemplars["kv_blocks"].timestamp)) == (1.5, 1000.0)


class RayMetric:
    """Stand-in of vLLM's wrappers of ``ray.util.metrics``, with their interface."""

    made: list[tuple[str, tuple[str, ...]]]

    def __init__(self, name, _documentation="", labelnames=()):
        self.name, self.values = name, {}
        self.made.append(self)
        self.labelnames = labelnames

    def labels(self, *labels):
        assert len(labels) == len(self.labelnames)
        child = SimpleNamespace()
        child.inc = lambda value: self.values.update({labels: self.values.get(labels, 0) + value})
        child.set = lambda value: self.values.update({labels: value})
        return child


@pytest.fixture
def actor(monkeypatch):
    """This process is a Ray actor, as far as can be seen; the metrics that are made in it."""
    actor_id = ["0123"]
    context = SimpleNamespace(get_actor_id=lambda: actor_id[0])
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    wrappers = ModuleType("ray_wrappers")
    made = []
    for name in ("RayCounterWrapper", "RayGaugeWrapper"):
        setattr(wrappers, name, type(name, (RayMetric,), {"made": made}))
    monkeypatch.setitem(sys.modules, "ray", ray)
    for parent in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.ray_wrappers", wrappers)
    return actor_id, made


def test_on_a_ray_actor_the_series_are_rays(actor):
    actor_id, made = actor
    assert serving.in_ray_actor()
    series = Series([serving.ray_metrics(("m", "0"))])
    series.count({(families.WAIT, "kv_blocks"): 2.0, (families.STEPS, ""): 3})
    series.count({(families.WAIT, "kv_blocks"): 5.0, (families.STEPS, ""): 3})
    series.gauge(families.WAITING, {"kv_blocks": 4})
    values = {metric.name: metric.values for metric in made if metric.values}
    assert values == {
        "schedtrace_wait_seconds": {("m", "0", "kv_blocks"): 5.0},
        "schedtrace_steps": {("m", "0"): 3},
        "schedtrace_waiting_requests": {("m", "0", "kv_blocks"): 4},
    }
    actor_id[0] = None
    assert not serving.in_ray_actor()
