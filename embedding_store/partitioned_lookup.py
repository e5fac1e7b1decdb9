"""Lookups in tables that lie on several stores: every shard's rows are written where they belong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from embedding_store.lookup_request import LookupRequest
from embedding_store.partition import Part, Partition
from embedding_store.plain_lookup import deliver
from embedding_store.range_pool import RangePool
from embedding_store.scratch import Scratch
from embedding_store.shard_calls import ShardCalls
from embedding_store.store import Float32, Int64, RowSource
from embedding_store.token_split import scatter_rows

__all__ = ["Answers", "Task", "answer_by_shard", "answer_in_memory"]

_PIECE_VALUES = 1 << 18
"""Values of a piece: 1 MiB of rows, which are still in the cache when they are put into their places."""

_FEW_VALUES = 1 << 14  # which are looked up before a thread has started


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What one shard does for one request.

    Attributes:
        shard: Its number.
        request: With the shard's own ids. Its output is where the rows belong,
            unless there are places.
        places: int64 `[m]`: the rows of `target` that the shard's rows become.
        target: float32 `[n, dim]`.
    """

    shard: int
    request: LookupRequest
    places: Int64 | None = None
    target: Float32 | None = None


class Answers:
    """Requests split over shards, and what is left to do once all rows are there."""

    def __init__(self, tables: Sequence[Partition], requests: Sequence[LookupRequest]) -> None:
        """`tables`: that of each request, whose ids have been checked."""
        self.tasks: list[Task] = []
        self._folds: list[tuple[LookupRequest, Float32]] = []
        for table, request in zip(tables, requests, strict=True):
            parts = table.parts(request.ids)
            if all(part.places is None for part in parts) and parts:
                self.tasks += [_columns(table, part, request) for part in parts]
                continue
            rows = request.out
            if request.offsets is not None:
                # Sums of parts of a bag would be rounded otherwise than the bag's own.
                rows = np.empty((len(request.ids), table.spec.dim), np.float32)
                self._folds.append((request, rows))
            self.tasks += [
                Task(part.shard, LookupRequest(request.table, part.ids, rows[:0]), part.places, rows) for part in parts
            ]

    def finish(self) -> None:
        """Folds bags whose rows came from several shards."""
        for request, rows in self._folds:
            deliver(request, rows)


def answer_by_shard(
    tasks: Sequence[Task],
    sources: Sequence[RowSource],
    calls: ShardCalls,
    version: int | None,
    split: bool,
    together: bool = True,
) -> None:
    """One call to every shard, all at the same time; a shard with nothing to do is asked for its version alone."""
    of: dict[int, list[Task]] = {} if version is None else {shard: [] for shard in range(len(sources))}
    for task in tasks:
        of.setdefault(task.shard, []).append(task)

    def ask(shard: int, mine: Sequence[Task]) -> None:
        requests = [task.request if task.places is None else _own_rows(task) for task in mine]
        sources[shard].lookup_into(requests, version, split)
        for task, request in zip(mine, requests, strict=True):
            if task.places is not None and task.target is not None:
                scatter_rows(request.out, task.places, task.target)

    calls.run({shard: partial(ask, shard, mine) for shard, mine in of.items()}, together)


def answer_in_memory(
    tasks: Sequence[Task],
    sources: Sequence[RowSource],
    calls: ShardCalls,
    pool: RangePool,
    version: int | None,
) -> None:
    """As `answer_by_shard`, for shards that lie in memory.

    Columns are written into place by the shards themselves. Rows that are
    strewn over the output are fetched in pieces that stay in the cache until
    they are in their places; threads take pieces of any shard as they come free.
    """
    columns = [task for task in tasks if task.places is None]
    large = sum(task.request.out.size for task in columns) > _FEW_VALUES
    answer_by_shard(columns, sources, calls, version, pool.threads > 1, large)
    works: list[Callable[[], None]] = []
    scratches = threading.local()
    for task in tasks:
        if task.places is not None:
            step = max(1, _PIECE_VALUES // task.request.out.shape[1])
            pieces = (slice(start, start + step) for start in range(0, len(task.request.ids), step))
            works += [partial(_piece, sources[task.shard], task, rows, version, scratches) for rows in pieces]

    def run(first: int, last: int) -> None:
        for work in works[first:last]:
            work()

    pool.share(run, len(works), 1)


def _columns(table: Partition, part: Part, request: LookupRequest) -> Task:
    """The shard's columns of every row, written straight into the output; bags are folded at the shard."""
    return Task(part.shard, replace(request, ids=part.ids, out=request.out[:, table.columns[part.shard]]))


def _own_rows(task: Task) -> LookupRequest:
    return replace(task.request, out=np.empty((len(task.request.ids), task.request.out.shape[1]), np.float32))


def _piece(source: RowSource, task: Task, rows: slice, version: int | None, scratches: threading.local) -> None:
    scratch: Scratch | None = getattr(scratches, "own", None)
    if scratch is None:
        scratch = scratches.own = Scratch(np.float32)
    assert task.places is not None
    assert task.target is not None
    ids = task.request.ids[rows]
    out = scratch.take(len(ids), task.target.shape[1])
    source.lookup_into([replace(task.request, ids=ids, out=out)], version, False)
    scatter_rows(out, task.places[rows], task.target)
