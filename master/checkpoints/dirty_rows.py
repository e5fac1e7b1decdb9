"""Which rows changed since the last checkpoint: collected where every commit passes."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import TableStatistics, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.optimizers.registry import follows_steps
from elastable.embedding_store.shards.server_contract import ChangedTable

_MOST_BYTES = 1 << 30
_MOST_WAITING = 1 << 20  # ids of a table


class _Ids:
    """Ids that were added: of a fixed table a bit for every id, else an index, at most 33 bytes each.

    Those of an index are only appended at first, 8 bytes each, and go there when there are many, or when they are
    read: mostly by the thread that writes a checkpoint.
    """

    def __init__(self, held: RowDirectory, most_waiting: int) -> None:
        self._held, self._most_waiting = held, most_waiting
        self._waiting: list[Int64] = []
        self._waiting_ids = 0

    def add(self, ids: Int64) -> None:
        """Ids int64 `[n]`; they may be there."""
        self._waiting.append(ids.copy())
        self._waiting_ids += len(ids)
        if self._waiting_ids > self._most_waiting:
            self._take_in()

    @property
    def bytes(self) -> int:
        """Of memory."""
        return self._held.bytes + 8 * self._waiting_ids

    def __len__(self) -> int:
        self._take_in()
        return self._held.count

    def blocks(self, most: int) -> Iterator[Int64]:
        """All ids, at most so many at a time."""
        self._take_in()
        ids, _, cursor = self._held.scan(0, most)
        while len(ids):
            yield ids
            ids, _, cursor = self._held.scan(cursor, most)

    def _take_in(self) -> None:
        if self._waiting:
            add_ids(self._held, np.concatenate(self._waiting))
            self._waiting, self._waiting_ids = [], 0


def add_ids(held: RowDirectory, ids: Int64) -> None:
    """Adds ids int64 `[n]`; they may be there."""
    held.reserve(len(ids))
    held.claim(ids, np.empty(len(ids), np.int64))


@dataclass(slots=True)
class _Table:
    """What is known of one table: the ids that changed (None: too many to keep), and its statistics before."""

    spec: TableSpec
    ids: _Ids | None
    before: TableStatistics


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed since a checkpoint; `DirtyRows.take` made it.

    Attributes:
        tables: Table -> the ids whose rows changed; None: any may have.
        shrunk: Tables that gave up rows.
        known: Whether the checkpoint is the one that was asked for; else any row may have changed since that one.
    """

    tables: Mapping[str, _Ids | None]
    shrunk: frozenset[str]
    known: bool = True

    def described(self, table: str, rows: int) -> ChangedTable:
        """What changed of a table that has so many rows."""
        found = self._ids(table)
        return ChangedTable(rows) if found is None else ChangedTable(rows, len(found), table in self.shrunk)

    def ids(self, table: str, most: int) -> Iterator[Int64] | None:
        """The ids of a table whose rows changed, int64 `[n]`, at most so many at a time; None: any may have."""
        found = self._ids(table)
        return None if found is None else found.blocks(most)

    def _ids(self, table: str) -> _Ids | None:
        return self.tables.get(table) if self.known else None


class DirtyRows:
    """The ids of every update since the last checkpoint, table by table.

    Of a fixed table a bit of every id is kept, of a dynamic one an index, at most 33 bytes an id. If all together come
    to take more than `most_bytes`, the table that takes the most is given up until the next `take`: all of its rows
    count as changed.

    What is done to a table by hand and not by commits is seen in its statistics: rows put or forgotten make all of its
    rows count as changed, rows deleted make it a table that gave up rows, as rows evicted do. All rows of a table whose
    optimizer moves untouched rows (`lazy=False`) change with every commit.

    Each collection bears the mark of the checkpoint that is about to be written of it. What was taken for one that
    failed is in the next collection, too, as its base is an earlier mark then.

    `add` and `take` are called by the thread that commits; `forget` by any.

    Args:
        store: Whose commits these are.
        mark: Of the checkpoint that the store is equal to now; b"": there is none.
        most_bytes: Of memory for the ids.
    """

    def __init__(self, store: EmbeddingStore, mark: bytes = b"", most_bytes: int = _MOST_BYTES) -> None:
        self._store = store
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._tables = self._tables_now()
        self._mark = self._since = mark  # of the last collection, and where that began
        self._taken: Changes | None = None  # that itself, until it is known to be saved

    def add(self, updates: Mapping[str, TableUpdate]) -> None:
        """The updates of a commit that was made, or that is about to be."""
        with self._lock:
            for name, update in updates.items():
                table = self._tables.get(name)
                if table is not None and table.ids is not None:
                    table.ids.add(update.ids)
            while self._bytes() > self._most_bytes:
                most = max(self._tables.values(), key=lambda table: 0 if table.ids is None else table.ids.bytes)
                most.ids = None

    def take(self, mark: bytes, base: bytes) -> Changes:
        """What changed up to now; starts a new collection. What was taken before is not read any more, unless it is
        that of `base`.

        Args:
            mark: Of the checkpoint that is about to be written.
            base: Of the last one that was written; b"": there is none.
        """
        now = self._tables_now()
        with self._lock:
            changed: dict[str, _Ids | None] = {}
            shrunk = set()
            for name, table in now.items():
                known = self._tables.get(name)
                if known is None or known.spec != table.spec or known.before.written != table.before.written:
                    changed[name] = None
                    continue
                changed[name] = known.ids
                if (known.before.evicted, known.before.deleted) != (table.before.evicted, table.before.deleted):
                    shrunk.add(name)
            taken = Changes(changed, frozenset(shrunk))
            if self._taken is None or base == self._mark:
                self._since = self._mark
            else:
                taken = _joined(self._taken, taken)
            self._tables, self._mark, self._taken = now, mark, taken
            return replace(taken, known=base != b"" and base == self._since)

    def forget(self, mark: bytes) -> None:
        """The checkpoint of this mark is written: nobody will ask for what changed since an earlier one."""
        with self._lock:
            if mark == self._mark:
                self._taken = None

    @property
    def bytes(self) -> int:
        """Of memory that the ids take now."""
        with self._lock:
            return self._bytes()

    def _bytes(self) -> int:
        return sum(0 if table.ids is None else table.ids.bytes for table in self._tables.values())

    def _tables_now(self) -> dict[str, _Table]:
        return {
            name: _Table(spec, self._no_ids(spec), self._store.table_statistics(name))
            for name, spec in self._store.specs().items()
        }

    def _no_ids(self, spec: TableSpec) -> _Ids | None:
        if follows_steps(spec.optimizer):
            return None  # every step moves every row
        size = spec.vocabulary_size
        if size is not None and size // 8 <= self._most_bytes // 4:
            return _Ids(DirectRows(size), 0)
        return _Ids(IdIndex(), _MOST_WAITING)


def _joined(older: Changes, newer: Changes) -> Changes:
    tables: dict[str, _Ids | None] = {}
    for name, ids in newer.tables.items():
        before = older.tables.get(name)
        if before is None or ids is None:
            tables[name] = None
            continue
        for block in ids.blocks(1 << 20):
            before.add(block)
        tables[name] = before
    return Changes(tables, older.shrunk | newer.shrunk)
