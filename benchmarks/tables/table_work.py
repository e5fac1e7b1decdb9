"""What benchmarks of tables share: filling all rows, looking them up and committing to them, copies as references."""

from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np

from benchmarks.harness import Work
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.table import EmbeddingTable

_BLOCK = 1 << 16


def fill(
    store: EmbeddingStore, spec: TableSpec, ids: Int64 | None = None, random: np.random.Generator | None = None
) -> EmbeddingTable:
    """Makes a table in which each id has a row, with the first slots of its optimizer.

    Args:
        store: Where it is made.
        spec: The table.
        ids: int64 `[n]`, each once; None: all of a fixed table.
        random: Draws the weights; None: they are ones.
    """
    table: EmbeddingTable = store.table(spec)
    slots = row_optimizer(spec.optimizer).initial_slots(spec.dim)
    ids = np.arange(spec.vocabulary_size or 0) if ids is None else ids
    store.put(spec.name, _blocks(ids, spec.dim, slots, random))
    return table


def _blocks(ids: Int64, dim: int, slots: Float32, random: np.random.Generator | None) -> Iterator[RowBlock]:
    for start in range(0, len(ids), _BLOCK):
        some = ids[start : start + _BLOCK]
        shape = len(some), dim
        weights = np.ones(shape, np.float32) if random is None else random.standard_normal(shape, np.float32)
        yield RowBlock(some, weights, np.tile(slots, (len(some), 1)))


def look_up(table: EmbeddingTable, batches: Sequence[Int64], outputs: int = 0, combiner: str | None = None) -> Work:
    """One lookup a call, of the next batch.

    Args:
        table: Any.
        batches: int64 `[n]` each; with a combiner `[n, bag]`.
        outputs: How many the rows go into, in turn, so that none is in a cache; 0: into new memory each time.
        combiner: As of `EmbeddingTable.lookup`.
    """
    turns = cycle(batches)
    outs = cycle([np.ones((len(batches[0]), table.dim), np.float32) for _ in range(outputs)] or [None])
    return lambda: table.lookup(next(turns), next(outs), combiner=combiner)


def updates_of(batches: Sequence[Int64], gradients: Float32) -> list[TableUpdate]:
    """An update of each batch's different ids; `gradients` are float32 `[n, dim]`, n at least the ids of a batch."""
    return [TableUpdate(ids, gradients[: len(ids)]) for ids in map(np.unique, batches)]


def commit(store: EmbeddingStore, *updates: Sequence[TableUpdate], record: bytes | None = None) -> Work:
    """One commit a call, of the next update of each table; the sequences are those of the store's tables, in order."""
    turns = [(name, cycle(of)) for name, of in zip(store.specs(), updates, strict=True)]

    def work() -> None:
        version = store.version()
        store.commit(Commit(version + 1, {name: next(of) for name, of in turns}, version, {}, record))

    return work


def copy(values: int, pool: RangePool, sources: int = 4, targets: int = 1) -> Work:
    """Copies so many float32 on the threads of a pool, from the next source to the next target: memory's own pace."""
    arrays = [cycle([np.ones(values, np.float32) for _ in range(count)]) for count in (sources, targets)]

    def work() -> None:
        source, target = map(next, arrays)
        pool.run(lambda start, stop: np.copyto(target[start:stop], source[start:stop]), values, 1)

    return work


def take(rows: Float32, batches: Sequence[Int64], pool: RangePool, outputs: int = 1) -> Work:
    """NumPy's lookup into place, on the threads of a pool."""
    turns, outs = cycle(batches), cycle([np.ones((len(batches[0]), rows.shape[1]), np.float32) for _ in range(outputs)])

    def work() -> None:
        ids, out = next(turns), next(outs)

        def some(start: int, stop: int) -> None:
            np.take(rows, ids[start:stop], axis=0, out=out[start:stop], mode="clip")  # other modes fill a buffer first

        pool.run(some, len(ids), 1)

    return work
