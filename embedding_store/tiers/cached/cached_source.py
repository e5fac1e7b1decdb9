"""Rows of any source, the hot ones of them in memory, never of a wrong version."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreFailed
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.embedding_store.native.row_gather import gather_apart
from elastable.embedding_store.optimizers.registry import follows_steps
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.support.row_budget import even_shares
from elastable.embedding_store.tables.base_store import BaseSource
from elastable.embedding_store.tables.grouping import Int32, unique_ids
from elastable.embedding_store.tiers.cached.cached_rows import CachedRows, cached_row_bytes
from elastable.embedding_store.tiers.cached.unpromoted_source import UnpromotedSource

__all__ = ["CachedSource"]

_ATTEMPTS = 4
_MOST_THREADS = 8
_ROWS_A_THREAD = 1 << 13
_READING_S = 600.0  # kernels are finite; this only keeps a dead thread from hanging its caller


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Rows of a table that were not held: `rows[inverse[i]]` is the row of `ids[i]`."""

    ids: Int64
    rows: Float32
    inverse: Int32


class CachedSource(BaseSource):
    """Keeps hot rows of a source that others change.

    All rows held are of one version. A lookup that names this version is
    answered from memory as far as it can be; one that names none asks the
    source for its version first. When the version has changed, everything is
    forgotten, unless `advance` said which rows it changed. So a row is right
    for the version that was asked for, as long as whoever changes rows without
    a commit (restore, import) declares a version, or `forget` is called.

    Lookups promote: rows that are asked for often are held from then on.
    `unpromoted` gives a source that leaves the cache as it is.

    Attributes:
        hits: Rows looked up that were held; with many threads about so many.
        misses: Rows looked up that were not.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        rows: int | None = None,
        bytes: int | None = None,  # noqa: A002 - as one says it
        threads: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Takes the source over: it is closed with this one.

        Args:
            source: Where rows come from.
            rows: Of each table, to hold at most; about, in sets of eight.
            bytes: Of memory for all tables together; instead of `rows`.
            threads: For large lookups; None: one a core, at most 8.
            timeout_s: Seconds that a lookup waits for a change of this
                process, or a change for lookups, before `DeadlineExceeded`.

        Raises:
            BadInput: neither rows nor bytes, both, or not above 0.
        """
        if (rows is None) == (bytes is None) or (rows or bytes or 0) < 1:
            raise BadInput(f"a cache needs either rows or bytes, above 0; got rows={rows}, bytes={bytes}")
        self.hits = self.misses = 0
        self._source = source
        self._most_rows, self._most_bytes = rows, bytes
        self._pool = RangePool(min(available_cores(), _MOST_THREADS) if threads is None else threads)
        self._beside = ThreadPoolExecutor(2, thread_name_prefix="held-rows")
        self._lock = ReadersWriterLock(timeout_s, "the cache")
        self._making = threading.Lock()
        self._caches: dict[str, CachedRows] = {}
        self._at: int | None = None
        self._epoch = 0  # counts changes of what may be held
        self._closed = False

    @property
    def held(self) -> dict[str, int]:
        """Rows held now, by table."""
        return {name: cache.count for name, cache in list(self._caches.items())}

    def specs(self) -> dict[str, TableSpec]:
        return self._source.specs()

    def version(self) -> int:
        return self._source.version()

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        return self._source.wait_for_version(version, timeout_s)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """As in `RowSource.lookup`; rows that are looked up often are held from then on."""
        return self._look_up(ids, version, promote=True)

    def lookup_when(self, ids: Mapping[str, Int64], version: int, wait_s: float) -> dict[str, Float32]:
        """As in `RowSource.lookup_when`; the source waits, where it knows a better way than asking again."""
        if self._at == version:
            return self.lookup(ids, version)
        with self._lock.reading():
            epoch = self._epoch
            rows = self._source.lookup_when(ids, version, wait_s)
        self._admit({name: _whole(ids[name], found) for name, found in rows.items()}, version, epoch)
        return rows

    def unpromoted(self) -> RowSource:
        """As in `RowSource.unpromoted`: what is held is used, and nothing gets hotter or is held by it."""
        return UnpromotedSource(self, partial(self._look_up, promote=False))

    def advance(self, version: int, changed: Mapping[str, Int64]) -> None:
        """Is told that version `version` is version - 1 with other rows of these ids, and of no others.

        Args:
            version: The version that stands now.
            changed: Table name -> int64 `[n]`. Of tables whose rows follow every
                step (`lazy=False`) all rows are forgotten.
        """
        with self._lock.writing():
            if self._at != version - 1:
                self._move(version)
            else:
                self._remove(changed)
                self._clear_followers()
                self._at = version

    def forget(self) -> None:
        """Holds nothing any more: rows were changed without a version, or the store is another one."""
        self._source.forget()
        with self._lock.writing():
            self._move(None)

    def close(self) -> None:
        """Closes the source, too. Closing twice is harmless."""
        with self._lock.writing():
            self._closed = True
            self._caches.clear()
        self._beside.shutdown()
        self._pool.close()
        self._source.close()

    def _look_up(self, ids: Mapping[str, Int64], version: int | None, promote: bool) -> dict[str, Float32]:
        for _ in range(_ATTEMPTS):
            with self._lock.reading():
                self._require_open()
                # Asked for in here: where only this process commits, no commit makes it stale before the rows are read.
                wanted = self._current() if version is None else version
                epoch = self._epoch
                try:
                    rows, fetched = self._look_up_at(ids, wanted, promote)
                except StaleVersion:
                    if version is not None:
                        raise
                    rows = None
            if rows is not None:
                if promote and fetched:
                    self._admit(fetched, wanted, epoch)
                return rows
            self._mistaken(wanted)
        return self._source.lookup(ids)  # versions come faster than lookups

    def _current(self) -> int:
        """The version that a lookup without one is answered at; by a holder of the lock."""
        return self._source.version()

    def _mistaken(self, version: int) -> None:
        """The version that was taken for the current one is past."""

    def _look_up_at(
        self, ids: Mapping[str, Int64], version: int, promote: bool
    ) -> tuple[dict[str, Float32], dict[str, _Fetched]]:
        """Rows at a version, and those of them that were not held; by a holder of the lock."""
        caches = {name: self._cache(name) for name in ids}
        if self._at == version and None not in caches.values():
            return self._look_up_held(ids, caches, version, promote)
        rows = self._source.lookup(ids, version)
        return rows, {name: _whole(ids[name], found) for name, found in rows.items()}

    def _look_up_held(
        self, ids: Mapping[str, Int64], caches: Mapping[str, CachedRows | None], version: int, counted: bool
    ) -> tuple[dict[str, Float32], dict[str, _Fetched]]:
        places = dict[str, tuple[Int64, Int64]]()
        rows, reads = dict[str, Float32](), list[tuple[CachedRows, Int64, Float32]]()
        for name, cache in caches.items():
            assert cache is not None
            wanted = require_ids(cache.spec, ids[name])
            rows[name] = np.empty((len(wanted), cache.spec.dim), np.float32)
            places[name] = cache.find(wanted, counted, self._pool)
            reads.append((cache, places[name][0], rows[name]))
        missing = {name: ids[name][at] for name, (_, at) in places.items() if len(at)}
        if counted:
            lacking = sum(map(len, missing.values()))
            self.misses += lacking
            self.hits += sum(map(len, rows.values())) - lacking
        fetched = self._fetch(missing, version, reads)
        for name, some in fetched.items():
            gather_apart(some.rows, some.inverse.astype(np.int64), places[name][1], rows[name], stream=False)
        return rows, fetched

    def _fetch(
        self, missing: Mapping[str, Int64], version: int, reads: Sequence[tuple[CachedRows, Int64, Float32]]
    ) -> dict[str, _Fetched]:
        """Asks the source for what is not held, and reads what is held meanwhile."""

        def read() -> None:
            for cache, frames, out in reads:
                self._pool.run(partial(_read_part, cache, frames, out), len(frames), _ROWS_A_THREAD)

        if not missing:
            read()
            return {}
        reading = self._beside.submit(read)
        try:
            unique = {name: unique_ids(ids) for name, ids in missing.items()}
            found = self._source.lookup({name: ids for name, (ids, _) in unique.items()}, version)
        finally:
            reading.result(timeout=_READING_S)  # rows may not move before
        return {name: _Fetched(missing[name], found[name], inverse) for name, (_, inverse) in unique.items()}

    def _admit(self, fetched: Mapping[str, _Fetched], version: int, epoch: int) -> None:
        """Holds what is hot of the rows of a version, unless anything has changed since `epoch`."""
        with self._lock.writing():
            if self._epoch != epoch or self._closed:
                return
            if self._at != version:
                if self._at is not None and version < self._at:
                    return
                self._move(version)
            for name, rows in fetched.items():
                cache = self._cache(name)
                if cache is not None:
                    cache.admit(rows.ids, rows.rows, rows.inverse)

    def _cache(self, name: str) -> CachedRows | None:
        """The table's cache, made at first where the source has such a table."""
        if name not in self._caches:
            with self._making:
                specs = {} if name in self._caches else self._source.specs()
                if name in specs:
                    # A new table takes of what the others have: all of them begin anew.
                    shares = self._rows_of(specs)
                    self._caches = {table: CachedRows(spec, shares[table]) for table, spec in specs.items()}
        return self._caches.get(name)

    def _rows_of(self, specs: Mapping[str, TableSpec]) -> dict[str, int]:
        """Rows that each table may hold."""
        if self._most_bytes is None:
            most = self._most_rows or 0
            return {name: min(most, spec.vocabulary_size or most) for name, spec in specs.items()}
        total = self._most_bytes
        needs = [min(total, (spec.vocabulary_size or total) * cached_row_bytes(spec)) for spec in specs.values()]
        shares = even_shares(needs, total)
        return {
            name: share // cached_row_bytes(spec) for (name, spec), share in zip(specs.items(), shares, strict=True)
        }

    def _move(self, version: int | None) -> None:
        """Forgets all rows, and what tables there are; from now on rows of `version` are held."""
        for cache in self._caches.values():
            cache.clear()
        self._at = version
        self._epoch += 1

    def _remove(self, changed: Mapping[str, Int64]) -> None:
        for name, ids in changed.items():
            if name in self._caches:
                self._caches[name].remove(ids)
        self._epoch += 1

    def _clear_followers(self) -> None:
        """A step has moved every row of some tables."""
        for cache in self._caches.values():
            if follows_steps(cache.spec.optimizer):
                cache.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreFailed("the cached store is closed")


def _read_part(cache: CachedRows, frames: Int64, out: Float32, start: int, stop: int) -> None:
    cache.read(frames[start:stop], out[start:stop])


def _whole(ids: Int64, rows: Float32) -> _Fetched:
    return _Fetched(ids, rows, np.arange(len(ids), dtype=np.int32))
