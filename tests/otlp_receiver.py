"""An OTLP receiver: the gRPC services of ``opentelemetry-proto``, which keep what they get."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_service


def plain(attributes):
    """Attributes as a dict of Python's values."""

    def value(any_value):
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(entry) for entry in any_value.array_value.values]
        return getattr(any_value, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


class Receiver:
    """Keeps spans and the latest value of each series."""

    def __init__(self):
        self.spans, self.values, self.metrics = [], {}, {}

    def spans_named(self, name):
        return [span for span in self.spans if span.name == name]

    def values_of(self, name, key):
        """The latest values of a metric by one of its attributes."""
        return {dict(labels)[key]: value for (metric, labels), value in self.values.items() if metric == name}


class _Traces(trace_service.TraceServiceServicer):
    def __init__(self, receiver):
        self.receiver = receiver

    def Export(self, request, _context):  # noqa: N802  # the protocol's
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.receiver.spans += scope.spans
        return traces.ExportTraceServiceResponse()


class _Metrics(metrics_service.MetricsServiceServicer):
    def __init__(self, receiver):
        self.receiver = receiver

    def Export(self, request, _context):  # noqa: N802  # the protocol's
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.receiver.metrics[metric.name] = metric
                    kind = metric.WhichOneof("data")
                    for point in getattr(metric, kind).data_points:
                        key = metric.name, tuple(sorted(plain(point.attributes).items()))
                        self.receiver.values[key] = getattr(point, point.WhichOneof("value"))
        return metrics.ExportMetricsServiceResponse()


@contextlib.contextmanager
def receiver():
    """Start a receiver; gives it and its endpoint."""
    kept = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service.add_TraceServiceServicer_to_server(_Traces(kept), server)
    metrics_service.add_MetricsServiceServicer_to_server(_Metrics(kept), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield kept, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
