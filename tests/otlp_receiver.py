"""OTLP receivers that keep what they get: by gRPC and by HTTP, messages of ``opentelemetry-proto``."""

import contextlib
import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_service


def attribute_values(attributes):
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

    def take_traces(self, request):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return traces.ExportTraceServiceResponse()

    def take_metrics(self, request):
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.metrics[metric.name] = metric
                    kind = metric.WhichOneof("data")
                    for point in getattr(metric, kind).data_points:
                        key = metric.name, tuple(sorted(attribute_values(point.attributes).items()))
                        self.values[key] = getattr(point, point.WhichOneof("value"))
        return metrics.ExportMetricsServiceResponse()


class _Traces(trace_service.TraceServiceServicer):
    def __init__(self, receiver):
        self.receiver = receiver

    def Export(self, request, _context):  # noqa: N802  # the protocol's
        return self.receiver.take_traces(request)


class _Metrics(metrics_service.MetricsServiceServicer):
    def __init__(self, receiver):
        self.receiver = receiver

    def Export(self, request, _context):  # noqa: N802  # the protocol's
        return self.receiver.take_metrics(request)


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


@contextlib.contextmanager
def http_receiver():
    """Start a receiver for ``http/protobuf``; gives it and its endpoint."""
    kept = Receiver()
    paths = {
        "/v1/traces": (traces.ExportTraceServiceRequest, kept.take_traces),
        "/v1/metrics": (metrics.ExportMetricsServiceRequest, kept.take_metrics),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # Python's
            kind, take = paths[self.path]
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["Content-Type"] == "application/x-protobuf"
            answer = take(kind.FromString(body)).SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield kept, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
