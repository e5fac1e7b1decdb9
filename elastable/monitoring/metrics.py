"""Every metric of Elastable, and where its values come from: state that a process has anyway, read when asked."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from elastable.embedding_store.composite.composite_store import CompositeSource
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.measures import Counts, Durations, Histogram, LookupCounts
from elastable.embedding_store.shards.server_contract import ServerStatus
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.support.retry import RETRIES
from elastable.embedding_store.wire.server.connections import CountedPort, Standing
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.output.noted import CheckpointLog
from elastable.process.version import distribution_version

if TYPE_CHECKING:
    from elastable.master.api import StreamStatus
    from elastable.master.core.job_master import Master
    from elastable.worker.runtime.worker_measures import WorkerMeasures


class MetricKind(StrEnum):
    """What a value of a metric says."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, named as Prometheus' conventions want it.

    Attributes:
        name: Begins with `elastable_` and ends with its unit; counters end with `_total`.
        kind: Gauge, counter or histogram.
        unit: Of its values, in words.
        meaning: One phrase.
    """

    name: str
    kind: MetricKind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()

    def __call__(self, value: float | Histogram, *labels: str) -> "Sample":
        """A value of it, with a value for each of its labels."""
        assert len(labels) == len(self.labels), self.name
        return Sample(self, value, labels)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    metric: Metric
    value: float | Histogram
    labels: tuple[str, ...] = ()


Source = Callable[[], Iterable[Sample]]
"""Reads the current values of some metrics; called by one thread at a time, when somebody asks."""

METRICS: dict[str, Metric] = {}
"""By name, in the order of docs/reference.md, which is that of their definitions here."""


def _metric(kind: MetricKind, name: str, unit: str, meaning: str, *labels: str) -> Metric:
    metric = METRICS[name] = Metric(name, kind, unit, meaning, labels)
    return metric


_gauge = partial(_metric, MetricKind.GAUGE)
_counter = partial(_metric, MetricKind.COUNTER)
_histogram = partial(_metric, MetricKind.HISTOGRAM)


# A job, read from its master

STATES = ("waiting", "training", "evaluating", "stopping", "finished", "failed")

_JOB = _gauge("elastable_job_info", "1", "The job, its mode and its store.", "job", "mode", "store")
_STATE = _gauge("elastable_job_state", "0 or 1", "1 for the state that the job is in.", "state")
_JOB_VERSION = _gauge("elastable_job_version", "version", "Version that is current.")
_JOB_VERSIONS = _gauge("elastable_job_versions", "versions", "Versions of the whole job.")
_EPOCH = _gauge("elastable_job_epoch", "epoch", "Epoch that is current, counted from 1.")
_RECORDS = _counter("elastable_job_records_total", "records", "Records trained, earlier runs included.")
_EXPECTED = _gauge("elastable_job_expected_records", "records", "Records of all epochs.")
_METRIC = _gauge("elastable_job_metric", "as the metric", "Loss and metrics of the model.", "name")
_VERSION_S = _histogram("elastable_version_seconds", "seconds", "Time from one version to the next.")
_VERSION_PHASE_S = _histogram(
    "elastable_version_phase_seconds",
    "seconds",
    "The same by phase: wait (for workers), sum, dense, rows, callbacks.",
    "phase",
)
_WORKERS = _gauge("elastable_workers", "workers", "Workers: working (they hold micro-batches), idle, gone.", "state")
_LEASES = _gauge("elastable_leases", "micro-batches", "Micro-batches that workers hold.")
_JOINED = _counter("elastable_workers_joined_total", "sessions", "Sessions that workers opened.")
_LEFT = _counter("elastable_workers_left_total", "sessions", "Workers that left while there was work, or died.")
_FAILURES = _gauge("elastable_worker_failures", "workers", "Workers that said why they failed, by error.", "error")
_PUSHES = _counter("elastable_pushes_total", "pushes", "Pushes: accepted, duplicate, stale, skipped.", "outcome")
_REFUSED_PUSHES = _counter("elastable_refused_pushes_total", "pushes", "Pushes refused, by error.", "error")
_LAG_EVENTS = _gauge("elastable_stream_lag_events", "events", "Events of the stream that are in no version yet.")
_LAG_S = _gauge("elastable_stream_lag_seconds", "seconds", "Time since the first of them came, where that is known.")
_BAD_EVENTS = _counter("elastable_stream_bad_events_total", "events", "Events that could not be read, in all runs.")
_AWAY = _gauge("elastable_stream_away", "0 or 1", "Whether the stream cannot be asked.")


def job_source(master: "Master") -> Iterator[Sample]:
    """Of one job."""
    status, measures = master.status(), master.measures
    yield _JOB(1, status.job, status.mode, status.store)
    yield from (_STATE(state == status.state, state) for state in STATES)
    yield _JOB_VERSION(status.version)
    yield _JOB_VERSIONS(status.versions_total)
    yield _EPOCH(status.epoch + 1)
    yield _RECORDS(status.records_trained)
    yield _EXPECTED(status.records_total)
    yield from _by_label(_METRIC, status.metrics)
    yield from map(_VERSION_S, measures.versions.histograms().values())
    yield from _by_label(_VERSION_PHASE_S, measures.phases.histograms())
    working = sum(1 for worker in status.workers if worker.leases)
    states = {"working": working, "idle": len(status.workers) - working, "gone": len(status.gone)}
    yield from _by_label(_WORKERS, states)
    if status.stream is not None:
        yield from stream_source(status.stream)
    yield _LEASES(sum(worker.leases for worker in status.workers))
    yield _JOINED(measures.joined)
    yield _LEFT(measures.left)
    failures = Counter[str]()
    for refusal in status.refusals:
        failures[refusal.error] += refusal.count
    yield from _by_label(_FAILURES, failures)
    yield from _by_label(_PUSHES, measures.pushes.by_name())
    yield from _by_label(_REFUSED_PUSHES, measures.refused.by_name())


def stream_source(stream: "StreamStatus") -> Iterator[Sample]:
    """Of the stream of events that a job trains on."""
    yield _LAG_EVENTS(stream.lag_events)
    yield _LAG_S(stream.lag_s)
    yield _BAD_EVENTS(stream.bad_events)
    yield _AWAY(bool(stream.away))


def _by_label(metric: Metric, values: Mapping[str, float] | Mapping[str, Histogram]) -> Iterator[Sample]:
    """Values of a metric with one label."""
    for label, value in values.items():
        yield metric(value, label)


# Checkpoints of a job

_CHECKPOINTS = _counter("elastable_checkpoints_total", "checkpoints", "Checkpoints: written, failed.", "result")
_CHECKPOINT_VERSION = _gauge("elastable_checkpoint_version", "version", "Version of the newest checkpoint.")
_CHECKPOINT_TIME = _gauge(
    "elastable_checkpoint_timestamp_seconds", "Unix time", "When the newest checkpoint was written."
)
_CHECKPOINT_S = _gauge("elastable_checkpoint_duration_seconds", "seconds", "How long that took.")
_CHECKPOINT_BYTES = _gauge("elastable_checkpoint_bytes", "bytes", "Its size, where it is a local folder.")


def checkpoint_source(log: CheckpointLog) -> Iterator[Sample]:
    """Of the checkpoints that this process writes."""
    noted = log.noted()
    yield from _by_label(_CHECKPOINTS, {"written": log.written, "failed": log.failed})
    newest = next((each for each in reversed(noted) if each.error is None), None)
    if newest is None:
        return
    yield _CHECKPOINT_VERSION(newest.version)
    yield _CHECKPOINT_TIME(newest.at)
    if newest.seconds is not None:
        yield _CHECKPOINT_S(newest.seconds)
    if newest.bytes is not None:
        yield _CHECKPOINT_BYTES(newest.bytes)


# A store: its tables, commits, tier, log and pins

_READY = _gauge("elastable_store_ready", "0 or 1", "Whether the store answers and is this process's.")
_VERSION = _gauge("elastable_store_version", "version", "Version of the store.")
_ROWS = _gauge("elastable_table_rows", "rows", "Rows that hold a value.", "table")
_BYTES = _gauge("elastable_table_memory_bytes", "bytes", "Memory of a table's rows.", "table")
_EVICTED = _counter("elastable_table_evicted_rows_total", "rows", "Rows evicted.", "table")
_DELETED = _counter("elastable_table_deleted_rows_total", "rows", "Rows deleted by request.", "table")
_WRITTEN = _counter("elastable_table_written_rows_total", "rows", "Rows restored or imported.", "table")
_REFUSED = _counter(
    "elastable_table_refused_gradients_total", "gradients", "Gradients of ids that were not admitted yet.", "table"
)
_COMMIT_S = _histogram(
    "elastable_commit_phase_seconds",
    "seconds",
    "Commits of the store: prepare (checks, cold rows), apply (the optimizer), append (the log).",
    "phase",
)
_WANTED = _counter("elastable_tier_wanted_rows_total", "rows", "Rows asked of a store with a tier.", "table")
_READ = _counter("elastable_tier_read_rows_total", "rows", "Rows that were not in memory: read from the tier.", "table")
_LAG = _gauge("elastable_flush_lag_versions", "versions", "Versions that the tier is behind the store.")
_CHANGED = _gauge("elastable_flush_changed_rows", "rows", "Rows that are not in the tier as they are.")
_FAILING = _gauge("elastable_flush_failing", "0 or 1", "Whether the last write to the tier failed.")
_LOG = _gauge("elastable_log_bytes", "bytes", "Bytes of the log that the tier does not make superfluous.")
_WAITS = _counter("elastable_commit_waits_total", "commits", "Commits that waited for the tier.")
_WAITED = _counter("elastable_commit_wait_seconds_total", "seconds", "Time that commits waited for the tier.")
_PINS = _gauge("elastable_pins", "pins", "Pinned versions.")
_PINNED_ROWS = _gauge("elastable_pinned_rows", "rows", "Earlier values of rows kept for pins.")
_PINNED_BYTES = _gauge("elastable_pinned_bytes", "bytes", "Memory of rows kept for pins.")


def store_source(store: EmbeddingStore, not_ready: Callable[[], str | None]) -> Iterator[Sample]:
    """Of one store; no more than `_READY` while `not_ready` says why it cannot be asked."""
    ready = not_ready() is None
    yield _READY(ready)
    if not ready:
        return
    yield _VERSION(store.version())
    for name in store.specs():
        found = store.table_statistics(name)
        yield _ROWS(found.rows, name)
        if found.bytes is not None:
            yield _BYTES(found.bytes, name)
        yield _EVICTED(found.evicted, name)
        yield _DELETED(found.deleted, name)
        yield _WRITTEN(found.written, name)
        yield _REFUSED(found.refused, name)
    measures = store.measures()
    yield from _by_label(_COMMIT_S, measures.commits)
    yield from _by_label(_WANTED, measures.rows_wanted)
    yield from _by_label(_READ, measures.rows_read)
    if (flush := store.flush_status()) is not None:
        yield _LAG(flush.version - flush.flushed_version)
        yield _CHANGED(flush.changed_rows)
        yield _FAILING(flush.failure is not None)
        yield _LOG(flush.log_bytes)
        yield _WAITS(flush.waits)
        yield _WAITED(flush.waited_s)
    pins = store.pins()
    yield _PINS(len(pins))
    yield _PINNED_ROWS(sum(pin.rows for pin in pins))
    yield _PINNED_BYTES(sum(pin.bytes for pin in pins))


# A store server, by itself and as the master of its job sees it

_PUSHED = _gauge(
    "elastable_pushed_gradient_bytes",
    "bytes",
    "Gradients that a store server keeps for the next version, and its slice of dense variables.",
)
_CLAIMED = _gauge("elastable_store_server_claimed", "0 or 1", "Whether a master that is alive has claimed the server.")
_ANSWERS = _gauge("elastable_shard_answers", "0 or 1", "Whether a store server of the job answered last.", "shard")
_SHARD_VERSION = _gauge("elastable_shard_version", "version", "Version of a store server of the job.", "shard")
_SHARD_ROWS = _gauge("elastable_shard_rows", "rows", "Rows of a store server of the job.", "shard")
_SHARD_BYTES = _gauge(
    "elastable_shard_memory_bytes", "bytes", "Memory of the rows of a store server of the job.", "shard"
)
_SHARD_LAG = _gauge("elastable_shard_flush_lag_versions", "versions", "Versions that its tier is behind.", "shard")
_SHARD_WAITED = _gauge(
    "elastable_shard_wait_seconds", "seconds", "How long the job has been waiting for it now.", "shard"
)
_SHARD_WANTED = _counter(
    "elastable_shard_tier_wanted_rows_total", "rows", "Rows asked of it, if it has a tier.", "shard"
)
_SHARD_READ = _counter(
    "elastable_shard_tier_read_rows_total", "rows", "Rows that it had to read from its tier.", "shard"
)
_SHARD_LOG = _gauge(
    "elastable_shard_log_bytes", "bytes", "Bytes of its log that its tier does not make superfluous.", "shard"
)
_SHARD_COMMIT_S = _histogram(
    "elastable_shard_commit_phase_seconds", "seconds", "Its commits: prepare, apply, append.", "shard", "phase"
)
_SHARD_LOOKUPS = _counter(
    "elastable_shard_lookups_total", "lookups", "Lookups of this process at a store server.", "table", "shard"
)
_SHARD_LOOKED_UP = _counter("elastable_shard_lookup_rows_total", "rows", "Rows that these asked for.", "table", "shard")


def shard_source(shard: Shard) -> Iterator[Sample]:
    """Of one store server."""
    yield _PUSHED(shard.buffered_bytes)
    yield _CLAIMED(bool(shard.ownership.live_owner()))


def servers_source(statuses: Callable[[], Sequence[ServerStatus]]) -> Iterator[Sample]:
    """Of all store servers of a job; a server is named by its address."""
    for server in statuses():
        yield _ANSWERS(not server.failure, server.address)
        yield _SHARD_WAITED(server.waited_s, server.address)
        if (shard := server.shard) is not None:
            yield _SHARD_VERSION(shard.version, server.address)
            yield _SHARD_ROWS(shard.rows, server.address)
            yield _SHARD_BYTES(shard.bytes, server.address)
            yield _SHARD_LAG(shard.flush_lag, server.address)
            yield _SHARD_WANTED(shard.wanted_rows, server.address)
            yield _SHARD_READ(shard.read_rows, server.address)
            yield _SHARD_LOG(shard.log_bytes, server.address)
            for phase, took in shard.commits.items():
                yield _SHARD_COMMIT_S(took, server.address, phase)


def shard_lookups_source(source: object, servers: object) -> Iterator[Sample]:
    """Of the lookups of this process, where `source` splits them over the servers of the store `servers`."""
    if not isinstance(source, CompositeSource) or not isinstance(servers, StoreServers):
        return
    addresses = servers.addresses()
    for metric, counted in ((_SHARD_LOOKUPS, source.lookups.lookups), (_SHARD_LOOKED_UP, source.lookups.rows)):
        for (table, number), total in counted.totals().items():
            yield metric(total, table, addresses[int(number)])


# A gRPC server: its calls, and what is looked up in its tables

_CONNECTIONS = _gauge(
    "elastable_grpc_connections",
    "connections",
    "Connections to the gRPC port: known (by a token or certificate, or none is asked for), caller (answered without), "
    "silent (has asked for nothing but health).",
    "standing",
)
_CONNECTIONS_ENDED = _counter(
    "elastable_grpc_connections_ended_total", "connections", "Connections ended: too many, or silent for too long."
)
_CALLS = _counter("elastable_grpc_calls_total", "calls", "gRPC calls that have ended.", "method", "code")
_LOOKUPS = _counter("elastable_lookups_total", "lookups", "Lookups that asked for rows of a table.", "table")
_LOOKUP_ROWS = _counter("elastable_lookup_rows_total", "rows", "Rows that lookups asked for.", "table")


def server_sources(role: str, server: GrpcServer, lookups: LookupCounts) -> dict[str, Source]:
    """By name, the sources of a process that serves rows over gRPC."""
    return {
        "calls": partial(calls_source, server.calls),
        "connections": partial(connections_source, server.connections),
        "lookups": partial(lookups_source, lookups),
        "process": partial(process_source, role),
    }


def calls_source(calls: Counts) -> Iterator[Sample]:
    """Of calls by method and status code."""
    for (method, code), total in calls.totals().items():
        yield _CALLS(total, method, code)


def connections_source(connections: CountedPort) -> Iterator[Sample]:
    """Of the connections to a port."""
    for standing in Standing:
        yield _CONNECTIONS(connections.counted.get(standing, 0), standing.name.lower())
    yield _CONNECTIONS_ENDED(connections.ended)


def lookups_source(lookups: LookupCounts) -> Iterator[Sample]:
    """Of lookups over gRPC at a server, or of all lookups of a worker."""
    yield from _by_label(_LOOKUPS, lookups.lookups.by_name())
    yield from _by_label(_LOOKUP_ROWS, lookups.rows.by_name())


# A worker

_MICRO_BATCHES = _counter(
    "elastable_worker_micro_batches_total",
    "micro-batches",
    "Micro-batches computed: counted, or dropped because another worker was faster.",
    "kind",
    "outcome",
)
_WORKER_RECORDS = _counter("elastable_worker_records_total", "records", "Records trained that counted.")
_WORKER_PHASE_S = _histogram(
    "elastable_worker_phase_seconds",
    "seconds",
    "A micro-batch by phase: wait (for its version), lookup, compute, push.",
    "phase",
)
_SESSIONS = _counter("elastable_worker_sessions_total", "sessions", "Sessions opened with a master.")


def worker_source(measures: "WorkerMeasures") -> Iterator[Sample]:
    """Of one worker."""
    for (kind, outcome), total in measures.micro_batches.totals().items():
        yield _MICRO_BATCHES(total, kind, outcome)
    yield _WORKER_RECORDS(measures.records)
    yield from _by_label(_WORKER_PHASE_S, measures.phases.histograms())
    yield _SESSIONS(measures.sessions)


# A server of predictions

_PREDICTIONS = _counter(
    "elastable_prediction_requests_total", "requests", "Requests for predictions, by protocol and HTTP status.",
    "protocol", "status",
)  # fmt: skip
_PREDICTION_S = _histogram(
    "elastable_prediction_seconds", "seconds", "From a request's head to its answer, by protocol.", "protocol"
)
_SERVED_VERSION = _gauge("elastable_served_version", "version", "Version that predictions are of.")
_WAITING = _gauge("elastable_predictions_waiting", "requests", "Requests that wait for the model; 32 may.")
_BEHIND = _gauge("elastable_served_lag_versions", "versions", "Versions that it is behind the store that it follows.")


def prediction_source(
    requests: Counts, seconds: Durations, waiting: int, version: int, newest: int
) -> Iterator[Sample]:
    """Of a server of predictions."""
    yield _WAITING(waiting)
    for (protocol, status), total in requests.totals().items():
        yield _PREDICTIONS(total, protocol, status)
    yield from _by_label(_PREDICTION_S, seconds.histograms())
    yield _SERVED_VERSION(version)
    yield _BEHIND(max(0, newest - version))


# Any process of Elastable, next to `process_*` of prometheus_client (memory, processor time, files)

_BUILD = _gauge("elastable_build_info", "1", "Release of Elastable that runs, and its role.", "version", "role")
_THREADS = _gauge("elastable_threads", "threads", "Threads of the interpreter.")
_RETRIES = _counter(
    "elastable_retries_total", "calls", "Calls made again because the last try failed, by its error.", "error"
)
SOURCE_FAILED = _gauge(
    "elastable_metrics_source_failed",
    "0 or 1",
    "Whether metrics of this source are missing from this answer, because it failed.",
    "source",
)


def process_source(role: str) -> Iterator[Sample]:
    """Of this process, whose role is `role`."""
    yield _BUILD(1, distribution_version(), role)
    yield _THREADS(threading.active_count())
    yield from _by_label(_RETRIES, RETRIES.by_name())
