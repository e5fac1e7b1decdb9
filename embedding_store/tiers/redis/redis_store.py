"""The store whose rows lie in Redis or Valkey, one server or a Cluster."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.pins import PinStatistics
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableStatistics
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec, refuse_conflict
from elastable.embedding_store.errors import DeadlineExceeded, StoreFailed, Unsupported
from elastable.embedding_store.optimizers.registry import follows_steps, row_optimizer
from elastable.embedding_store.rows.checks import require_block, require_block_rows, require_ids
from elastable.embedding_store.rows.commit_checks import require_version
from elastable.embedding_store.rows.row_blocks import joined_rows
from elastable.embedding_store.tables.base_store import BaseStore
from elastable.embedding_store.tiers.redis.catalog import Catalog, TableKeys
from elastable.embedding_store.tiers.redis.ledger import Ledger
from elastable.embedding_store.tiers.redis.outside_changes import delete_rows, put_rows
from elastable.embedding_store.tiers.redis.pin_registry import PinRegistry
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.redis_pin import RedisPin
from elastable.embedding_store.tiers.redis.redis_reader import RedisReader
from elastable.embedding_store.tiers.redis.registry import Registry, read_registry, version_of
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from elastable.embedding_store.tiers.redis.row_commits import RowCommits
from elastable.embedding_store.tiers.redis.row_scan import ids_now, in_blocks
from elastable.embedding_store.tiers.redis.row_update import block_with_slots, refuse_torn_rows
from elastable.embedding_store.tiers.redis.schema import owner_key
from elastable.embedding_store.tiers.redis.schema_1 import (
    STAMP_FIELD,
    TableRecord,
    before_ledger_key,
    records_key,
    tables_key,
    version_key,
)
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transactions import run_transactions
from elastable.embedding_store.tiers.redis.transfer import read_block
from elastable.embedding_store.tiers.redis.url import RedisUrl
from elastable.embedding_store.tiers.redis.writer import Writer

__all__ = ["RedisStore"]

_NEVER_CHANGED = bytes(8)  # the stamp 0


class RedisStore(RedisReader, BaseStore):
    """Embedding tables in Redis. One process writes; any number read.

    A commit reads the rows and slots it changes, but for those that it
    remembers from the commits before it (`held_bytes` of the URL), runs the
    same kernels on them as the memory store, writes each partition in one
    transaction, together with its version stamp and with the rows as they were
    before, and sets the store's version last, with the commit's record. So a
    commit that breaks off anywhere can be taken back: `recover` does, and so
    does the next commit of this process or of another one.

    The first change that a process makes takes the store over: from then on no
    other process that wrote before can change anything, not even one that was
    stopped in the middle of a commit and wakes up.
    """

    def __init__(self, url: str | RedisUrl) -> None:
        """Connects; raises as `RedisReader` does."""
        super().__init__(url)
        self._writing = threading.Lock()
        self._writer = Writer(self.url, self._topology, self._reload)
        self._commits = RowCommits(self._topology, self.url.namespace, self._writer, self.url.held_bytes)
        self._deleted: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self.pin_registry = PinRegistry(self._topology, self.url.namespace)

    def create_table(self, spec: TableSpec) -> bool:
        """As in `EmbeddingStore.create_table`; raises `BadSpec` for an unknown optimizer.

        An existing table keeps the number of partitions it was made with.
        Raises `Unsupported` for admission and eviction, and for `lazy=False`.
        """
        for part in ("admission", "eviction"):
            if getattr(spec, part) is not None:
                raise Unsupported(
                    f"table {spec.name!r}: redis has no {part}; keep the table in a store in memory, or leave "
                    f"{part} out and delete rows by their ids"
                )
        if follows_steps(spec.optimizer):
            raise Unsupported(
                f"table {spec.name!r}: redis has no rows that follow every step (lazy=False), as workers read weights "
                "alone there; keep the table in a store in memory or in files, or leave lazy=True"
            )
        row_optimizer(spec.optimizer)
        deadline = self.deadline()
        key, record = tables_key(self.url.namespace), TableRecord(spec, self.url.partitions)
        self._reload(deadline)
        created = False
        if spec.name not in self._catalog.tables:
            with self._alone(deadline):
                self._writer.require(deadline)
            # Stamps first: a table in the registry has all its partitions.
            names = Catalog.of(self.url.namespace, [record]).names
            stamps = [(weights, ("HSETNX", weights, STAMP_FIELD, _NEVER_CHANGED)) for weights, _, _ in names]
            self._writer.topology.call(stamps, deadline)
            words = ("HSETNX", key, spec.name, record.to_json())
            created = bool(self._writer.topology.call([(key, words)], deadline)[0])
            self._reload(deadline)
        refuse_conflict(self._catalog.table(spec.name).spec, spec)
        return created

    def commit(self, commit: Commit) -> None:
        """As in `EmbeddingStore.commit`, with what the class promises.

        Raises:
            StoreFailed: also when the connection broke in the middle: repeat the
                commit. Also when another process has taken the store over.
        """
        deadline = self.deadline()
        with self._alone(deadline):
            staged = self._commits.stage(commit, self._catalog_with(commit.updates, deadline), deadline)
            self._commits.finish(commit, staged, deadline)

    def stage(self, commit: Commit) -> Callable[[], None]:
        """As in `EmbeddingStore.stage`: rows are read and updated, and not written before the second half."""
        deadline = self.deadline()
        with self._alone(deadline):
            staged = self._commits.stage(commit, self._catalog_with(commit.updates, deadline), deadline)

        def finish() -> None:
            deadline = self.deadline()
            with self._alone(deadline):
                self._commits.finish(commit, staged, deadline)

        return finish

    @property
    def keeps_records(self) -> bool:
        """As in `EmbeddingStore.keeps_records`: True."""
        return True

    def record(self) -> bytes | None:
        """As in `EmbeddingStore.record`, in two round trips."""
        version, records = version_key(self.url.namespace), records_key(self.url.namespace)
        deadline = self.deadline()
        while True:
            current = self._topology.call([(version, ("GET", version))], deadline)[0]
            found, after = self._topology.call(
                [(version, ("HGET", records, version_of(current))), (version, ("GET", version))], deadline
            )
            if after == current:
                return bytes(found) if found is not None else None
            deadline.left(self.url)

    def other_writer(self) -> str | None:
        """As in `EmbeddingStore.other_writer`, from the names of the connections at every server."""
        return self._writer.ownership.other_writer(self.deadline())

    def require_owner(self) -> None:
        """As in `EmbeddingStore.require_owner`, by one read of the owner's key."""
        ownership = self._writer.ownership
        if ownership.owner is not None:
            key = owner_key(self.url.namespace)
            ownership.require(self._topology.call([(key, ("GET", key))], self.deadline())[0])

    def take_over(self) -> None:
        """Makes this process the only one that can write: others that did are kept from it, at every server.

        What the one before left half done is taken back. `recover` and the
        first change of every process do this by themselves.

        Raises:
            StoreFailed, Unavailable: as `recover`.
        """
        self.recover()

    def recover(self, version: int | None = None) -> int:
        """As in `EmbeddingStore.recover`; takes the store over, too, and may be repeated where it breaks off.

        Raises:
            StoreFailed: also where a before-image is lost: go back to a checkpoint.
        """
        deadline = self.deadline()
        with self._alone(deadline):
            taken = self._writer.recover(version, deadline)
            self._commits.forget()
            return taken

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """As in `EmbeddingStore.pin`: every process that reads the store sees the pin."""
        token, entry = self.pin_registry.take(version, lease_s, self.deadline())
        return RedisPin(self, token, entry)

    def pins(self) -> tuple[PinStatistics, ...]:
        """As in `EmbeddingStore.pins`, those of all processes."""
        deadline, ledger = self.deadline(), before_ledger_key(self.url.namespace)
        registry = read_registry(self._topology, self.url.namespace, deadline)
        kept = Ledger.of(self._topology.call([(ledger, ("HGETALL", ledger))], deadline)[0])
        standing = sorted(registry.standing().values(), key=lambda pin: pin.moment)
        return tuple(
            PinStatistics(pin.version, (pin.ends_ms - registry.now_ms) / 1000, *kept.beyond(pin.moment))
            for pin in standing
        )

    @contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        if not self._writing.acquire(timeout=deadline.seconds):
            raise DeadlineExceeded(f"another commit to {self.url} has not ended within {deadline.seconds:g} s")
        try:
            yield
        finally:
            self._writing.release()

    def reset_version(self, version: int) -> None:
        """As in `EmbeddingStore.reset_version`; every partition's stamp becomes 0, records are forgotten.

        Raises:
            BadInput: also while versions are pinned.
        """
        require_version(version)
        deadline = self.deadline()
        with self._alone(deadline), self._writer.outside_commits(deadline) as registry:
            registry.refuse_pins(f"the rows of {self.url} cannot be declared to be version {version}")
            names = self._reload(deadline).names
            fresh = [(w, [("HSET", w, STAMP_FIELD, _NEVER_CHANGED), ("UNLINK", before)]) for w, _, before in names]
            run_transactions(self._writer.topology, fresh, deadline)
            key, ledger, records = (of(self.url.namespace) for of in (version_key, before_ledger_key, records_key))
            words: list[Command] = [("SET", key, version), ("DEL", ledger, records)]
            run_transactions(self._writer.topology, [(key, words)], deadline)
            self._writer.load(deadline)
            self._commits.forget()

    def row_count(self, table: str) -> int:
        deadline = self.deadline()
        names = self._names(self._table(table, deadline))
        lengths: list[int] = self._topology.call([(key, ("HLEN", key)) for key, _, _ in names], deadline)
        if min(lengths) == 0:
            raise StoreFailed(f"redis at {self.url} has lost partition {lengths.index(0)} of table {table!r}")
        return sum(lengths) - len(names)  # each holds its stamp, too

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `EmbeddingStore.scan`; the deadline holds for each block by itself."""
        found = self._table(table, self.deadline())
        ids = ids_now(self._topology, self._catalog, found, self.url.deadline)
        return in_blocks(ids, require_block_rows(block_rows), lambda some: self._rows_of(table, some))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `EmbeddingStore.read_rows`, in one round trip."""
        found = self._table(table, self.deadline())
        rows = self._rows_of(table, require_ids(found.spec, ids))
        return joined_rows(found.spec, [] if rows is None else [rows])

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """As in `EmbeddingStore.put`, one block after another, the deadline for each by itself."""
        spec = self._table(table, self.deadline()).spec
        slot_width = row_optimizer(spec.optimizer).slot_width(spec.dim)
        for given in blocks:
            checked, deadline = require_block(spec, slot_width, given), self.deadline()
            with self._alone(deadline), self._writer.outside_commits(deadline) as registry:
                put_rows(self._topology, self._writer, self._catalog, table, checked, registry, deadline)
            self._written[table] += len(checked.ids)

    def delete(self, table: str, ids: Int64) -> int:
        """As in `EmbeddingStore.delete`, each partition at once or not at all; repeat it where it broke off."""
        deadline = self.deadline()
        checked = require_ids(self._table(table, deadline).spec, ids)
        with self._alone(deadline), self._writer.outside_commits(deadline) as registry:
            deleted = delete_rows(self._topology, self._writer, self._catalog, table, checked, registry, deadline)
        self._deleted[table] += deleted
        return deleted

    def table_statistics(self, table: str) -> TableStatistics:
        """As in `EmbeddingStore.table_statistics`; what other clients did is not counted."""
        return TableStatistics(self.row_count(table), deleted=self._deleted[table], written=self._written[table])

    def clear(self, table: str) -> None:
        """As in `EmbeddingStore.clear`, partition by partition.

        Raises:
            BadInput: versions are pinned.
        """
        deadline = self.deadline()
        names = self._names(self._table(table, deadline))
        with self._alone(deadline), self._writer.outside_commits(deadline) as registry:
            registry.refuse_pins(f"table {table!r} cannot be cleared")
            self._written[table] += 1
            stamp = STAMP_FIELD, _NEVER_CHANGED
            emptied = [(keys[0], [("UNLINK", *keys), ("HSET", keys[0], *stamp)]) for keys in names]
            run_transactions(self._writer.topology, emptied, deadline)

    def drop_table(self, table: str) -> None:
        """As in `EmbeddingStore.drop_table`.

        The registry forgets the table last: a drop that broke off is repeated,
        and no row of the old table shows up in a new one of its name.

        Raises:
            BadInput: versions are pinned.
        """
        deadline = self.deadline()
        names = self._names(self._table(table, deadline))
        with self._alone(deadline), self._writer.outside_commits(deadline) as registry:
            registry.refuse_pins(f"table {table!r} cannot be dropped")
            self._writer.topology.call([(keys[0], ("UNLINK", *keys)) for keys in names], deadline)
            key = tables_key(self.url.namespace)
            self._writer.topology.call([(key, ("HDEL", key, table))], deadline)
            self._reload(deadline)

    def close(self) -> None:
        """Closes the connections, and gives back the memory of rows that are held."""
        super().close()
        self._writer.ownership.close()
        if self._writing.acquire(blocking=False):  # else a commit of another thread is about to fail
            try:
                self._commits.close()
            finally:
                self._writing.release()

    def deadline(self) -> Deadline:
        """Of one operation that begins now."""
        return self._deadline()

    def where(self, table: str) -> tuple[Catalog, TableKeys, Topology, float]:
        """All tables, the table of that name, the servers, and the seconds of a deadline. Raises `TableNotFound`."""
        return self._catalog, self._table(table, self.deadline()), self._topology, self.url.deadline

    def registry(self) -> Registry:
        """Version, owner and pins, asked of the server."""
        return read_registry(self._topology, self.url.namespace, self.deadline())

    def _rows_of(self, table: str, ids: Int64) -> RowBlock | None:
        """Of some ids the rows that there are; None: there are none."""
        block = block_with_slots(self._catalog, {table: ids})
        read_block(self._topology, block, self.deadline())
        rows = block.tables[table]
        refuse_torn_rows(rows)
        kept = rows.no_weights == 0  # the table may have been cleared meanwhile
        return RowBlock(ids[kept], rows.weights[kept], rows.slots[kept]) if kept.any() else None

    def _table(self, name: str, deadline: Deadline) -> TableKeys:
        return self._catalog_with((name,), deadline).table(name)

    def _names(self, table: TableKeys) -> list[tuple[bytes, bytes, bytes]]:
        return list(self._catalog.names[table.first : table.first + table.partitions])
