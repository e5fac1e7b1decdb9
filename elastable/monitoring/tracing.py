"""Traces of a process, made by OpenTelemetry and exported by OTLP while a block runs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.measures import traced_by
from elastable.embedding_store.support.extras import needs

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own, in the order in which they count."""

_OF_TRACES, _OF_ALL = ENDPOINT_VARIABLES
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GRPC, _HTTP = "grpc", "http/protobuf"
_HTTP_PATH = "/v1/traces"
_EXPORT_S = 5.0  # of one export; also how long the end of a process may wait for a collector that is away


@contextmanager
def exporting_traces(url: str, service: str = "elastable") -> Iterator[None]:
    """While the block runs, spans of this process are sent to a collector; those that wait at its end, too.

    Every version that `et.fit`, `model.fit` or a job of this process makes is a trace (docs/operating.md).

    What the process does never waits for the collector: where that is away, spans are dropped, and the log says so.

    Args:
        url: `http://host:port` of an OTLP collector; `https://` with TLS. Over gRPC, unless
            `OTEL_EXPORTER_OTLP_PROTOCOL` is `http/protobuf`; then a path may follow, in place of `/v1/traces`.
        service: What spans call this process, unless `OTEL_SERVICE_NAME` is set.

    Raises:
        BadInput: no such URL can be, or the environment asks for another protocol.
        NotInstalled: the extra "traces" is not installed.
    """
    said = next((name for name in _PROTOCOL_VARIABLES if os.environ.get(name)), None)
    protocol = _GRPC if said is None else os.environ[said]
    if protocol not in (_GRPC, _HTTP):
        raise BadInput(f"{said}={protocol}: traces are exported by OTLP over {_GRPC} or {_HTTP}")
    _require_endpoint(url, protocol)
    with needs("--traces", "traces"):
        from elastable.monitoring.opentelemetry_tracer import OpenTelemetryTracer
    if protocol == _HTTP:
        # As OpenTelemetry says, the variable for all signals is a base, and others are whole.
        is_base = not os.environ.get(_OF_TRACES) and os.environ.get(_OF_ALL) == url
        whole = urlsplit(url).path.rstrip("/") and not is_base
        url = url if whole else url.rstrip("/") + _HTTP_PATH
    tracer = OpenTelemetryTracer.exporting(url, service, _EXPORT_S, protocol == _HTTP)
    try:
        with traced_by(tracer):
            yield
    finally:
        tracer.close()


def _require_endpoint(url: str, protocol: str) -> None:
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is none
        known = False
    if not known or parts.username is not None:
        shown = url if parts.username is None else "with a login"
        port, way = ("4318", "HTTP") if protocol == _HTTP else ("4317", "gRPC")
        raise BadInput(
            f"--traces {shown}: write http://HOST:{port}, where an OTLP collector listens for {way}; https:// with "
            "TLS. Headers for it are given in OTEL_EXPORTER_OTLP_HEADERS"
        )
