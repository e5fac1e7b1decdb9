"""OTLP collectors in the process of a test: over gRPC, and over HTTP."""

import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ExportedSpan:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[ExportedSpan] = []
        self.url = ""
        self.paths = set[str]()

    def Export(  # noqa: N802 - as the service calls it
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.keep(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def keep(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        for of_process in request.resource_spans:
            said = {each.key: each.value.string_value for each in of_process.resource.attributes}
            for scope in of_process.scope_spans:
                found = [
                    ExportedSpan(
                        said["service.name"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        {each.key: each.value.string_value or each.value.int_value for each in span.attributes},
                        span.status.code == span.status.STATUS_CODE_ERROR,
                    )
                    for span in scope.spans
                ]
                with self._lock:
                    self._spans += found

    def spans(self) -> list[ExportedSpan]:
        with self._lock:
            return list(self._spans)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that is served while the block runs."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait(60)


@contextmanager
def collecting_posts() -> Iterator[Collector]:
    """A collector to which spans are posted while the block runs; its `paths` are where."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = zlib.decompress(body, wbits=31)
            collector.paths.add(self.path)
            collector.keep(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join(60)
