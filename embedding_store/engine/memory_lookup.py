"""Lookups of rows and bags in tables that lie in memory, shared out over threads piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from elastable.embedding_store.errors import IdOutOfRange
from elastable.embedding_store.native.range_pool import SERIAL, RangePool, WorkCounter
from elastable.embedding_store.native.row_gather import can_stream
from elastable.embedding_store.rows.checks import any_outside, require_ids
from elastable.embedding_store.tables.lookup_request import LookupRequest, require_width
from elastable.embedding_store.tables.table_reader import TableReader

__all__ = ["answer_requests"]

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
        require_width(request, table.spec.dim)
    stream = sum(4 * request.out.size for request in requests) >= _STREAMED_BYTES
    if len(requests) == 1 and requests[0].places is None and _answered_together(tables[0], requests[0], stream, pool):
        return
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


def _answered_together(table: TableReader, request: LookupRequest, stream: bool, pool: RangePool) -> bool:
    """Answers a request by threads that share the work within kernels, if the table supports it."""
    ids, out = request.ids, request.out
    helped = len(ids) * max(_LEAST_WIDTH, table.spec.dim) >= _HELPED
    if table.all_at_hand:
        _answer_shared(table, request, stream, pool if helped else SERIAL)
        return True
    return request.offsets is None and table.read_together(ids, out, stream, pool if helped else SERIAL)


def _answer_shared(table: TableReader, request: LookupRequest, stream: bool, pool: RangePool) -> None:
    ids, out, counter = request.ids, request.out, WorkCounter(pool.threads)
    if request.offsets is None:
        work = partial(table.read_shared, ids, out, stream, counter)
    else:
        work = partial(table.fold_shared, ids, request.offsets, request.weights, request.combiner, out, counter)
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
