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

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORT_S = 5.0  # of one export; also how long the end of a process may wait for a collector that is away


@contextmanager
def exporting_traces(url: str, service: str = "elastable") -> Iterator[None]:
    """While the block runs, spans of this process are sent to a collector; those that wait at its end, too.

    Every version that `et.fit`, `model.fit` or a job of this process makes is a trace (docs/operating.md).

    What the process does never waits for the collector: where that is away, spans are dropped, and the log says so.

    Args:
        url: `http://host:port` where an OTLP collector listens for gRPC; `https://` with TLS.
        service: What spans call this process, unless `OTEL_SERVICE_NAME` is set.

    Raises:
        BadInput: no such URL can be, or the environment asks for another protocol.
        NotInstalled: the extra "traces" is not installed.
    """
    said = next((name for name in _PROTOCOL_VARIABLES if os.environ.get(name)), None)
    if said is not None and os.environ[said] != "grpc":
        raise BadInput(f"{said}={os.environ[said]}: traces are exported by OTLP over grpc")
    _require_endpoint(url)
    with needs("--traces", "traces"):
        from elastable.monitoring.opentelemetry_tracer import OpenTelemetryTracer
    tracer = OpenTelemetryTracer.exporting(url, service, _EXPORT_S)
    try:
        with traced_by(tracer):
            yield
    finally:
        tracer.close()


def _require_endpoint(url: str) -> None:
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is none
        known = False
    if not known or parts.username is not None:
        shown = url if parts.username is None else "with a login"
        raise BadInput(
            f"--traces {shown}: write http://HOST:4317, where an OTLP collector listens for gRPC; https:// with "
            "TLS. Headers for it are given in OTEL_EXPORTER_OTLP_HEADERS"
        )
