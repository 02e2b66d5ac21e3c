"""A real OTLP receiver gets an engine's metrics and its requests' states, as the trace has them."""

import hashlib
import time

import polars as pl
import pytest

pytest.importorskip("vllm")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("grpc")

from schedtrace.model.live import Health
from schedtrace.read.run import read_run
from schedtrace.record.disguise import RECORDERS
from schedtrace.record.metrics.engine_meter import EngineMeter
from schedtrace.record.metrics.families import FAMILIES
from schedtrace.record.metrics.measuring import EngineFacts
from schedtrace.record.otel.export import choice
from schedtrace.record.otel.spans import PARENT
from schedtrace.record.traced import traced_class
from schedtrace.simulate import Driver
from schedtrace.timeline.request_states import QUEUED
from schedtrace.timeline.timeline import make_timeline
from tests.contract.loads import FAMILIES as LOADS
from tests.contract.loads import make_script, play
from tests.otlp_receiver import attribute_values, http_receiver, receiver

pytestmark = pytest.mark.vllm

CLIENT = "00f067aa0ba902b7"
LLM_REQUEST = "00000000000000ab"
UNSAMPLED = "t1-1"


def trace_id(request_id):
    return hashlib.sha256(request_id.encode()).hexdigest()[:32]


def headers(request_id):
    """Every other request's front end has told the id of vLLM's own span."""
    sampled = "00" if request_id == UNSAMPLED else "01"
    told = {PARENT: LLM_REQUEST} if int(request_id.partition("-")[2]) % 2 else {}
    return {"traceparent": f"00-{trace_id(request_id)}-{CLIENT}-{sampled}", **told}


class Traced(Driver):
    """Its requests come with a trace context."""

    def add(self, request_id, *args, **options):
        return super().add(request_id, *args, trace_headers=headers(request_id), **options)


def meter_for(text):
    meter = EngineMeter(
        ("toy", "0"),
        by_priority=False,
        facts=lambda: EngineFacts(None, None, {"free": 7}),
        health=lambda: Health("busy"),
    )
    meter.send_otlp(choice(text))
    return meter


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """What a receiver got of a load with few KV blocks, the timeline of its trace, and its series."""
    with receiver() as (got, endpoint), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDTRACE_RUN_DIR", str(tmp_path_factory.mktemp("otlp") / "run"))
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        patch.setattr("schedtrace.record.metrics.serving.MULTIPROCESS", "NO_SUCH_VARIABLE")
        family = LOADS["tight_kv"]
        engine = Traced(traced_class, **family.engine)
        writer = RECORDERS.look_up(engine.scheduler).writer
        writer.measuring.meter = meter = meter_for("otlp,spans=all")
        play(engine, make_script(family, 1, 60))
        RECORDERS.look_up(engine.scheduler).close()
        meter.close()
        [trace] = read_run(writer.path.parent).traces
        return got, make_timeline(trace, None), trace.header, dict(meter._series.values)


def by_trace(spans):
    return {span.trace_id.hex(): span for span in spans}


def test_each_request_has_a_span_in_its_clients_trace(sent):
    got, timeline, *_ = sent
    roots = by_trace(got.spans_named("schedtrace.request"))
    requests = set(timeline.finishes["request_id"])
    assert {
        attribute_values(span.attributes)["schedtrace.request_id"] for span in roots.values()
    } == requests - {UNSAMPLED}
    for request_id in requests - {UNSAMPLED}:
        told = PARENT in headers(request_id)
        assert roots[trace_id(request_id)].parent_span_id.hex() == (LLM_REQUEST if told else CLIENT)


def test_states_are_child_spans_with_the_times_of_the_trace(sent):
    got, timeline, header, _ = sent
    roots = {span.span_id: span for span in got.spans_named("schedtrace.request")}
    spans = {}
    for span in got.spans:
        if span.parent_span_id in roots:
            about = attribute_values(span.attributes)
            state = span.name.removeprefix("schedtrace."), about.get("schedtrace.cause")
            times = span.start_time_unix_nano, span.end_time_unix_nano
            request_id = attribute_values(roots[span.parent_span_id].attributes)["schedtrace.request_id"]
            spans.setdefault(request_id, []).append((*times, *state))
    rows = timeline.request_states.filter(
        (pl.col("end_us") > pl.col("begin_us")) & (pl.col("request_id") != UNSAMPLED)
    )
    expected = {}
    for request_id, begin, end, *state in rows.select(
        "request_id", "begin_us", "end_us", "state", "cause"
    ).iter_rows():
        times = [(header.wall_anchor_us + us) * 1000 for us in (begin, end)]
        expected.setdefault(request_id, []).append((*times, *state))
    assert {name: sorted(states) for name, states in spans.items()} == expected
    assert any(state[2] == "preempted" for states in expected.values() for state in states)


def test_exits_are_events_with_cause_limit_and_holder(sent):
    got, *_ = sent
    events = [event for span in got.spans for event in span.events]
    assert {event.name for event in events} == {"schedtrace.exit"}
    exits = [attribute_values(event.attributes) for event in events]
    blocks = [about for about in exits if about["schedtrace.cause"] == "kv_blocks"]
    assert all(about["schedtrace.limit"] for about in blocks)
    assert any(about.get("schedtrace.holder") for about in blocks)
    assert all(":" in about["schedtrace.location"] for about in blocks)
    for span in got.spans:
        for event in span.events:
            assert event.time_unix_nano == span.start_time_unix_nano


def test_the_whole_says_how_long_it_waited_for_what(sent):
    got, timeline, *_ = sent
    waited = (
        timeline.request_states.filter(pl.col("state").is_in(QUEUED) & (pl.col("cause") == "kv_blocks"))
        .group_by("request_id")
        .agg(us=(pl.col("end_us") - pl.col("begin_us")).sum())
    )
    expected = {name: us / 1e6 for name, us in waited.iter_rows() if us and name != UNSAMPLED}
    said = {}
    for span in got.spans_named("schedtrace.request"):
        about = attribute_values(span.attributes)
        if "schedtrace.wait.kv_blocks" in about:
            said[about["schedtrace.request_id"]] = about["schedtrace.wait.kv_blocks"]
    assert said == pytest.approx(expected)


def test_metrics_have_the_names_units_and_values_of_prometheus(sent):
    got, _, _, values = sent
    assert values
    sent_values = {}
    for (name, labels), value in got.values.items():
        about = dict(labels)
        assert (about.pop("model_name"), about.pop("engine")) == ("toy", "0")
        [family] = [family for family in FAMILIES if family.otlp_name == name]
        sent_values[family, "".join(about.values())] = value
    assert sent_values == pytest.approx(values)
    assert (got.metrics["schedtrace_wait_seconds"].unit, got.metrics["schedtrace_refusals"].unit) == (
        "s",
        "{refusal}",
    )
    assert got.metrics["schedtrace_wait_seconds"].sum.is_monotonic
    assert got.values_of("schedtrace_kv_blocks", "holder_kind") == {"free": 7}


def test_http_with_protobuf_carries_the_same(recording, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setattr("schedtrace.record.metrics.serving.MULTIPROCESS", "NO_SUCH_VARIABLE")
    with http_receiver() as (got, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        engine = Traced(traced_class)
        writer = RECORDERS.look_up(engine.scheduler).writer
        writer.measuring.meter = meter = meter_for("otlp,spans=all")
        engine.add("t0-0", 40, 4)
        engine.add("t0-1", 40, 4)
        while engine.scheduler.requests:
            engine.step()
        RECORDERS.look_up(engine.scheduler).close()
        meter.close()
    roots = by_trace(got.spans_named("schedtrace.request"))
    assert roots.keys() == {trace_id("t0-0"), trace_id("t0-1")}
    assert {
        attribute_values(span.attributes)["schedtrace.request_id"]: span.parent_span_id.hex()
        for span in roots.values()
    } == {"t0-0": CLIENT, "t0-1": LLM_REQUEST}
    (steps,) = got.values_of("schedtrace_steps", "engine").values()
    assert steps == read_run(recording).traces[0].steps.height


def test_a_collector_that_is_gone_loses_spans_and_counts_them(recording, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    engine = Traced(traced_class)
    writer = RECORDERS.look_up(engine.scheduler).writer
    writer.measuring.meter = meter = meter_for("spans=all")
    engine.add("t0-0", 40, 4)
    while engine.scheduler.requests:
        engine.step()
    engine.step()
    until = time.monotonic() + 10
    lost = {}
    while not lost and time.monotonic() < until:
        time.sleep(0.1)
        lost = {
            family.name: value
            for (family, _), value in meter._series.values.items()
            if value and "lost" in family.name
        }
    RECORDERS.look_up(engine.scheduler).close()
    meter.close()
    assert lost == {"lost_request_spans": 1}
    assert list(recording.iterdir())
