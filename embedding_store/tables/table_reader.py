"""Reading a table in memory: ids to positions, positions to rows, and initial values for the rest."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt64
from elastable.embedding_store.contract.row_source import LookupRequest
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import IdOutOfRange
from elastable.embedding_store.native.range_pool import SERIAL, RangePool, WorkCounter
from elastable.embedding_store.native.row_fold import fold_bags, fold_bags_shared
from elastable.embedding_store.native.row_gather import (
    can_stream,
    gather,
    gather_apart,
    gather_marked,
    gather_shared,
    scatter_rows,
)
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables.checks import any_outside, require_ids
from elastable.embedding_store.tables.initial_values import write_initial_rows
from elastable.embedding_store.tables.lookups import require_width, rows_request


class FindsPositions(Protocol):
    """What is read of a `RowDirectory`."""

    @property
    def count(self) -> int: ...

    @property
    def marks(self) -> UInt64 | None: ...

    def find(self, ids: Int64, positions: Int64) -> int: ...


class ReadsRows(Protocol):
    """What is read of `TableRows` or `RowValues`."""

    @property
    def plain(self) -> Float32 | None: ...

    @property
    def framed(self) -> bool: ...

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None: ...


class TableReader:
    """Rows of one table. Ids handed in have been checked, unless it is said otherwise; callers do the locking.

    Args:
        spec: The table.
        directory: Where its rows lie.
        rows: The rows there.
    """

    def __init__(self, spec: TableSpec, directory: FindsPositions, rows: ReadsRows) -> None:
        self.spec = spec
        self.directory: FindsPositions = directory
        self.rows: ReadsRows = rows

    @property
    def checks_ids(self) -> bool:
        """Whether `read` looks by itself whether ids are in the vocabulary, at no cost."""
        return self.rows.plain is not None and self.directory.marks is not None

    @property
    def is_full(self) -> bool:
        """Whether every id has its row, float32, at its own position."""
        plain = self.rows.plain
        return plain is not None and self.directory.marks is not None and self.directory.count == len(plain)

    def read_together(self, ids: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        """As `read`, of ids that have not been checked, by all threads of a pool at once, where rows are `framed`.

        Returns:
            Whether every id has a row; if not, nothing has happened.

        Raises:
            IdOutOfRange: rows may have been written.
        """
        return False

    def read(self, ids: Int64, out: Float32, stream: bool = False) -> None:
        """Rows of `ids` int64 `[n]` into `out` float32 `[n, dim]`; writes nothing else.

        Rows of `out` may lie apart, columns may not. `stream`: past the caches, where `can_stream(out)`.

        Raises:
            IdOutOfRange: where `checks_ids`; rows may have been written.
        """
        plain, marks = self.rows.plain, self.directory.marks
        if marks is not None and self.directory.count == self.spec.vocabulary_size:
            # Every id has a row, at its own position.
            if plain is None:
                self.rows.read(ids, out, stream)
            elif gather(plain, ids, out, stream) < len(ids):
                require_ids(self.spec, ids)
            return
        positions = np.empty(len(ids), np.int64)
        if plain is not None and marks is not None:
            unseen = positions[: gather_marked(plain, marks, ids, out, positions, stream)]
            if len(unseen):
                require_ids(self.spec, ids[unseen])
        else:
            missing = self.directory.find(ids, positions)
            if plain is not None:
                gather(plain, positions, out, stream)
            elif missing < len(ids):
                self.rows.read(positions, out, stream)
            unseen = np.flatnonzero(positions < 0) if missing else positions[:0]
        if len(unseen):
            self._write_initial(ids[unseen], unseen, out)

    def read_apart(self, ids: Int64, places: Int64, out: Float32, stream: bool = False) -> None:
        """The row of `ids[i]` into `out[places[i]]`; other arguments as those of `read`.

        Args:
            places: int64 `[n]`, each once.
        """
        plain = self.rows.plain
        if plain is not None and self.is_full:
            gather_apart(plain, ids, places, out, stream)
            return
        if plain is None:
            rows = np.empty((len(ids), self.spec.dim), np.float32)
            self.read(ids, rows)
            scatter_rows(rows, places, out)
            return
        positions = np.empty(len(ids), np.int64)
        missing = self.directory.find(ids, positions)
        gather_apart(plain, positions, places, out, stream)
        if missing:
            unseen = np.flatnonzero(positions < 0)
            self._write_initial(ids[unseen], places[unseen], out)

    def fold(self, ids: Int64, offsets: Int64, weights: Float32 | None, combiner: str, out: Float32) -> None:
        """Bags of `ids` int64 `[n]` into `out` float32 `[bags, dim]`; other arguments as those of `fold_bags`.

        The ids have not been checked.

        Raises:
            IdOutOfRange: bags may have been written.
        """
        rows = self.rows.plain
        if rows is not None and self.is_full:
            if not fold_bags(rows, rows[:0], ids, offsets, weights, combiner, out):
                require_ids(self.spec, ids)
            return
        require_ids(self.spec, ids)
        positions = np.empty(len(ids), np.int64)
        missing = self.directory.find(ids, positions)
        fresh = np.empty((missing, self.spec.dim), np.float32)
        if missing:
            unseen = np.flatnonzero(positions < 0)
            self._write_initial(ids[unseen], np.arange(missing), fresh)
            positions[unseen] = ~np.arange(missing)
        if rows is None:
            rows = np.empty((len(ids), self.spec.dim), np.float32)
            self.rows.read(positions, rows)
            positions = np.where(positions < 0, positions, np.arange(len(ids)))
        fold_bags(rows, fresh, positions, offsets, weights, combiner, out)

    def _write_initial(self, ids: Int64, places: Int64, out: Float32) -> None:
        """What `ids[i]`, which has no row, reads, into `out[places[i]]`."""
        write_initial_rows(self.spec, ids, places, out)


# Lookups of rows and bags in tables that lie in memory, shared out over threads piece by piece


_PIECE = 1 << 20  # values of rows that a thread takes at a time: some tenths of a millisecond
_HELPED = 1 << 18  # values of rows that are worth waking a thread for
_LEAST_WIDTH = 32  # a shorter row costs as much: finding it, and its cache line
_STREAMED_BYTES = 8 << 20  # an output above this has left the caches before anyone reads it

_Piece = Callable[[int, int], None]


def answer_requests(tables: Sequence[TableReader], requests: Sequence[LookupRequest], pool: RangePool) -> None:
    """Writes the output of every request, which do not overlap.

    Args:
        tables: The table of each request.
        requests: Checked, but for the range of ids.
        pool: Threads to share the rows of all requests.

    Raises:
        SpecConflict: the table has another dim than when the request was made.
        IdOutOfRange: as `require_ids`; outputs may be half written then.
    """
    for table, request in zip(tables, requests, strict=True):
        if request.out.shape[1] != table.spec.dim:
            require_width(request, table.spec.dim)
    if len(requests) == 1:
        _answer_one(tables[0], requests[0], pool)
        return
    stream = sum(4 * request.out.size for request in requests) >= _STREAMED_BYTES
    works = [
        _rows(table, request, stream) if request.offsets is None else _bags(table, request)
        for table, request in zip(tables, requests, strict=True)
    ]
    widths = [max(_LEAST_WIDTH, table.spec.dim) for table in tables]
    ends = list(accumulate(length * width for (length, _), width in zip(works, widths, strict=True)))

    def span(first: int, last: int) -> None:
        begin = 0
        for (_, work), width, end in zip(works, widths, ends, strict=True):
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                # A unit belongs to the piece in which its first value lies.
                work(-(-(start - begin) // width), -(-(stop - begin) // width))
            begin = end

    if ends:
        pool.share(span, ends[-1], _PIECE)


def answer_in_order(
    lock: ReadersWriterLock, readers: Callable[[list[str]], Sequence[TableReader]], requests: Iterable[LookupRequest]
) -> Generator[None, None, None]:
    """As `RowSource.lookup_in_order`, by the caller's thread; the store is locked until the last is answered.

    Args:
        lock: Of the store.
        readers: The tables of these names; is called while the lock is held.
        requests: As those of `answer_requests`.
    """
    with lock.reading():
        found: dict[str, TableReader] = {}
        for request in requests:
            if request.table not in found:
                found[request.table] = readers([request.table])[0]
            answer_requests([found[request.table]], [request], SERIAL)
            yield


def look_up(tables: Sequence[TableReader], ids: Mapping[str, Int64], pool: RangePool) -> dict[str, Float32]:
    """Rows by table name, of ids whose tables are given in the same order."""
    requests = [rows_request(table.spec, of) for table, of in zip(tables, ids.values(), strict=True)]
    answer_requests(tables, requests, pool)
    return {request.table: request.out for request in requests}


def _answer_one(table: TableReader, request: LookupRequest, pool: RangePool) -> None:
    """As `answer_requests`, of one: by threads that share the work within kernels, if the table supports it."""
    ids, out, width = request.ids, request.out, max(_LEAST_WIDTH, table.spec.dim)
    stream = 4 * out.size >= _STREAMED_BYTES
    if request.places is None:
        sharing = pool if len(ids) * width >= _HELPED else SERIAL
        if table.is_full:
            _answer_shared(table, request, stream, sharing)
            return
        if request.offsets is None and table.rows.framed and table.read_together(ids, out, stream, sharing):
            return
    length, work = _rows(table, request, stream) if request.offsets is None else _bags(table, request)
    if length * width <= _PIECE:
        work(0, length)
    else:
        pool.share(work, length, max(1, _PIECE // width))


def _answer_shared(table: TableReader, request: LookupRequest, stream: bool, pool: RangePool) -> None:
    ids, out, plain, counter = request.ids, request.out, table.rows.plain, WorkCounter(pool.threads)
    assert plain is not None
    if request.offsets is None:
        work = partial(gather_shared, plain, ids, out, stream, counter)
    else:
        bags = request.offsets, request.weights, request.combiner
        work = partial(fold_bags_shared, plain, ids, *bags, out, counter)
    pool.together(work, counter)
    if counter.failed:
        require_ids(table.spec, ids)


def _rows(table: TableReader, request: LookupRequest, stream: bool) -> tuple[int, _Piece]:
    """The number of rows, and what reads those from `start` to `stop`."""
    stream = stream and can_stream(request.out)

    def work(start: int, stop: int) -> None:
        ids = request.ids[start:stop]
        if request.places is not None or not table.checks_ids:
            _refuse_outside(table, request, start, stop)
        if request.places is not None:
            table.read_apart(ids, request.places[start:stop], request.out, stream)
            return
        try:
            table.read(ids, request.out[start:stop], stream)
        except IdOutOfRange:
            require_ids(table.spec, request.ids)  # which names the position among all of them
            raise

    return len(request.ids), work


def _bags(table: TableReader, request: LookupRequest) -> tuple[int, _Piece]:
    """The ids and bags together, and what folds the bags that begin in a part of them."""
    offsets, weights = request.offsets, request.weights
    assert offsets is not None
    begins = offsets + np.arange(len(offsets))  # an empty bag takes room too, so that each begins somewhere else

    def work(start: int, stop: int) -> None:
        first, last = np.searchsorted(begins[:-1], (start, stop)).tolist()
        if first == last:
            return
        low, high = int(offsets[first]), int(offsets[last])
        factors = None if weights is None else weights[low:high]
        cuts = offsets[first : last + 1]
        try:
            table.fold(request.ids[low:high], cuts, factors, request.combiner, request.out[first:last])
        except IdOutOfRange:
            require_ids(table.spec, request.ids)  # which names the position among all of them
            raise

    return int(begins[-1]), work


def _refuse_outside(table: TableReader, request: LookupRequest, start: int, stop: int) -> None:
    size = table.spec.vocabulary_size
    if size is not None and any_outside(request.ids[start:stop], size):
        require_ids(table.spec, request.ids)  # which finds the first one of all
