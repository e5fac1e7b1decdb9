"""Metrics of a gRPC server: its calls, and what is looked up in its tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from elastable.embedding_store.measures import Counts, LookupCounts
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.monitoring.metric import Sample, Source, counter
from elastable.monitoring.sources.process_source import process_source

__all__ = ["METRICS", "calls_source", "lookups_source", "server_sources"]

_CALLS = counter("elastable_grpc_calls_total", "calls", "gRPC calls that have ended.", "method", "code")
_LOOKUPS = counter("elastable_lookups_total", "lookups", "Lookups that asked for rows of a table.", "table")
_ROWS = counter("elastable_lookup_rows_total", "rows", "Rows that lookups asked for.", "table")

METRICS = (_CALLS, _LOOKUPS, _ROWS)


def server_sources(role: str, server: GrpcServer, lookups: LookupCounts) -> dict[str, Source]:
    """By name, the sources of a process that serves rows over gRPC."""
    return {
        "calls": partial(calls_source, server.calls),
        "lookups": partial(lookups_source, lookups),
        "process": partial(process_source, role),
    }


def calls_source(calls: Counts) -> Iterator[Sample]:
    """Of calls by method and status code."""
    for (method, code), total in calls.totals().items():
        yield _CALLS(total, method, code)


def lookups_source(lookups: LookupCounts) -> Iterator[Sample]:
    """Of lookups over gRPC at a server, or of all lookups of a worker."""
    for table, total in lookups.lookups.by_name().items():
        yield _LOOKUPS(total, table)
    for table, total in lookups.rows.by_name().items():
        yield _ROWS(total, table)
