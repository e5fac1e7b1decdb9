"""Metrics of a store: its tables, commits, tier, log and pins."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.monitoring.metric import Sample, counter, gauge, histogram

__all__ = ["METRICS", "StoreSource"]

_READY = gauge("elastable_store_ready", "0 or 1", "Whether the store answers and is this process's.")
_VERSION = gauge("elastable_store_version", "version", "Version of the store.")
_ROWS = gauge("elastable_table_rows", "rows", "Rows that hold a value.", "table")
_BYTES = gauge("elastable_table_memory_bytes", "bytes", "Memory of a table's rows.", "table")
_EVICTED = counter("elastable_table_evicted_rows_total", "rows", "Rows evicted.", "table")
_DELETED = counter("elastable_table_deleted_rows_total", "rows", "Rows deleted by request.", "table")
_WRITTEN = counter("elastable_table_written_rows_total", "rows", "Rows restored or imported.", "table")
_REFUSED = counter(
    "elastable_table_refused_gradients_total", "gradients", "Gradients of ids that were not admitted yet.", "table"
)
_COMMIT = histogram(
    "elastable_commit_phase_seconds",
    "seconds",
    "Commits of the store: prepare (checks, cold rows), apply (the optimizer), append (the log).",
    "phase",
)
_WANTED = counter("elastable_tier_wanted_rows_total", "rows", "Rows asked of a store with a tier.", "table")
_READ = counter("elastable_tier_read_rows_total", "rows", "Rows that were not in memory: read from the tier.", "table")
_LAG = gauge("elastable_flush_lag_versions", "versions", "Versions that the tier is behind the store.")
_CHANGED = gauge("elastable_flush_changed_rows", "rows", "Rows that are not in the tier as they are.")
_FAILING = gauge("elastable_flush_failing", "0 or 1", "Whether the last write to the tier failed.")
_LOG = gauge("elastable_log_bytes", "bytes", "Bytes of the log that the tier does not make superfluous.")
_WAITS = counter("elastable_commit_waits_total", "commits", "Commits that waited for the tier.")
_WAITED = counter("elastable_commit_wait_seconds_total", "seconds", "Time that commits waited for the tier.")
_PINS = gauge("elastable_pins", "pins", "Pinned versions.")
_PINNED_ROWS = gauge("elastable_pinned_rows", "rows", "Earlier values of rows kept for pins.")
_PINNED_BYTES = gauge("elastable_pinned_bytes", "bytes", "Memory of rows kept for pins.")

_OF_TABLES = (_ROWS, _BYTES, _EVICTED, _DELETED, _WRITTEN, _REFUSED)
_OF_TIERS = (_WANTED, _READ, _LAG, _CHANGED, _FAILING, _LOG, _WAITS, _WAITED)
METRICS = (_READY, _VERSION, *_OF_TABLES, _COMMIT, *_OF_TIERS, _PINS, _PINNED_ROWS, _PINNED_BYTES)


class StoreSource:
    """Of one store.

    Args:
        store: Whose state is read.
        not_ready: Why the store cannot be asked now; None: it can.
    """

    def __init__(self, store: EmbeddingStore, not_ready: Callable[[], str | None]) -> None:
        self._store, self._not_ready = store, not_ready

    def __call__(self) -> Iterator[Sample]:
        ready = self._not_ready() is None
        yield _READY(ready)
        if not ready:
            return
        yield _VERSION(self._store.version())
        yield from self._tables()
        yield from self._measures()
        if (flush := self._store.flush_status()) is not None:
            yield from _flush(flush)
        pins = self._store.pins()
        yield _PINS(len(pins))
        yield _PINNED_ROWS(sum(pin.rows for pin in pins))
        yield _PINNED_BYTES(sum(pin.bytes for pin in pins))

    def _tables(self) -> Iterator[Sample]:
        for name in self._store.specs():
            found = self._store.table_statistics(name)
            yield _ROWS(found.rows, name)
            if found.bytes is not None:
                yield _BYTES(found.bytes, name)
            yield _EVICTED(found.evicted, name)
            yield _DELETED(found.deleted, name)
            yield _WRITTEN(found.written, name)
            yield _REFUSED(found.refused, name)

    def _measures(self) -> Iterator[Sample]:
        measures = self._store.measures()
        for phase, observed in measures.commits.items():
            yield _COMMIT(observed, phase)
        for table, rows in measures.rows_wanted.items():
            yield _WANTED(rows, table)
        for table, rows in measures.rows_read.items():
            yield _READ(rows, table)


def _flush(flush: FlushStatus) -> Iterator[Sample]:
    yield _LAG(flush.version - flush.flushed_version)
    yield _CHANGED(flush.changed_rows)
    yield _FAILING(flush.failure is not None)
    yield _LOG(flush.log_bytes)
    yield _WAITS(flush.waits)
    yield _WAITED(flush.waited_s)
