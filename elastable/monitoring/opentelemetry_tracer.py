"""Spans by OpenTelemetry's SDK."""

import hashlib
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc import exporter as grpc_exporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from elastable.embedding_store.measures import TRACE_KEY, VersionTrace

T = TypeVar("T")

_VERSION = "version"
_MOST_TRACES, _MOST_SPANS = (1 << 128) - 1, (1 << 64) - 1
_TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")

# It draws the pauses between attempts from the random numbers of the program, which may have seeded them.
setattr(grpc_exporter, "random", random.SystemRandom())  # noqa: B010 - the module's own name of another kind


class OpenTelemetryTracer:
    """A `Tracer` of OpenTelemetry.

    The ids of a version's trace, and of the span that it consists of, are a hash of the job and the version: workers
    find the trace without a message, and all processes take the same versions where a sampler takes only some
    (`OTEL_TRACES_SAMPLER`).

    Args:
        exporter: Where spans go; closed with this.
        service: What spans call this process, unless `OTEL_SERVICE_NAME` is set.
    """

    def __init__(self, exporter: SpanExporter, service: str) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service}
        resource = Resource.create({**named, "host.name": socket.gethostname(), "process.pid": os.getpid()})
        self._ids = _TraceIds()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("elastable")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def exporting(cls, url: str, service: str, timeout_s: float) -> Self:
        """Exports by OTLP over gRPC.

        Args:
            url: Of the collector; http: without TLS.
            service: As of the class.
            timeout_s: Of one export, repeats included, unless the environment says how long that may take.
        """
        timeout = None if any(os.environ.get(name) for name in _TIMEOUT_VARIABLES) else timeout_s
        return cls(OTLPSpanExporter(endpoint=url, insecure=url.startswith("http:"), timeout=timeout), service)

    def close(self) -> None:
        """Exports what waits, and ends."""
        self._provider.shutdown()

    @contextmanager
    def version(self, version: VersionTrace, begun: float) -> Iterator[None]:
        attributes: dict[str, str | int] = {"elastable.job": version.job, "elastable.version": version.version}
        start_ns = time.time_ns() - int((time.monotonic() - begun) * 1e9)
        with self._ids.of(*_ids_of(version)):
            span = self._tracer.start_span(_VERSION, Context(), attributes=attributes, start_time=start_ns)
        with _current(span):
            yield

    def span(
        self, name: str, version: VersionTrace | None, attributes: dict[str, str | int]
    ) -> AbstractContextManager[None]:
        if version is None and not trace.get_current_span().is_recording():
            return nullcontext()
        within = None if version is None else self._within(version)
        named = {f"elastable.{key}": value for key, value in attributes.items()}
        return _current(self._tracer.start_span(name, within, attributes=named))

    def ended(self, name: str, seconds: float) -> None:
        if trace.get_current_span().is_recording():
            now_ns = time.time_ns()
            self._tracer.start_span(name, start_time=now_ns - int(seconds * 1e9)).end(now_ns)

    def parent(self) -> str | None:
        if not trace.get_current_span().get_span_context().is_valid:
            return None
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get(TRACE_KEY)

    def serving(self, method: str, parent: str) -> AbstractContextManager[None]:
        return _current(self._served(method, parent))

    def begin_serving(self, method: str, parent: str) -> Callable[[], None]:
        return self._served(method, parent).end

    def carried(self, call: Callable[[], T]) -> Callable[[], T]:
        carried = contexts.get_current()

        def within() -> T:
            token = contexts.attach(carried)
            try:
                return call()
            finally:
                contexts.detach(token)

        return within

    def _served(self, method: str, parent: str) -> Span:
        service, _, call = method.rpartition("/")
        within = self._propagator.extract({TRACE_KEY: parent}, Context())
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": call}
        return self._tracer.start_span(call, within, kind=SpanKind.SERVER, attributes=attributes)

    def _within(self, version: VersionTrace) -> Context:
        """The context of a version's own span, which the master makes."""
        trace_id, span_id = _ids_of(version)
        sampled = self._provider.sampler.should_sample(None, trace_id, _VERSION).decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        of = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
        return trace.set_span_in_context(NonRecordingSpan(of), Context())


class _TraceIds(IdGenerator):
    """Random ids, except those that a block names for the span that it starts.

    The system's random numbers, and not those of `random`: programs seed these, so that several workers would make the
    same ids, and what a program draws would depend on whether it is traced.
    """

    def __init__(self) -> None:
        self._named = threading.local()

    @contextmanager
    def of(self, trace_id: int, span_id: int) -> Iterator[None]:
        """The ids of the next span of this thread."""
        self._named.ids = trace_id, span_id
        try:
            yield
        finally:
            self._named.ids = None

    def generate_trace_id(self) -> int:
        ids = getattr(self._named, "ids", None)
        return 1 + secrets.randbelow(_MOST_TRACES) if ids is None else int(ids[0])

    def generate_span_id(self) -> int:
        ids = getattr(self._named, "ids", None)
        return 1 + secrets.randbelow(_MOST_SPANS) if ids is None else int(ids[1])


def _ids_of(version: VersionTrace) -> tuple[int, int]:
    """The ids of a version's trace and of the version's own span; neither is 0."""
    digest = hashlib.sha256(f"{version.version} {version.job}".encode()).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1


@contextmanager
def _current(span: Span) -> Iterator[None]:
    """The span is current in the block, which it ends with; an error in the block is the span's status."""
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=True):
        yield
