"""The weights of a table's rows in memory, by position; one class for each way to keep a number."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.row_gather import gather
from elastable.embedding_store.native.slab import Slab, SlabMaker
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.rows.initial_values import write_initial_rows

__all__ = ["Float32Rows", "RowValues"]


class RowValues(ABC):
    """Weights at positions; callers see float32, however they are kept.

    Different positions may be read, written and updated from different threads.
    """

    @property
    def plain(self) -> Float32 | None:
        """float32 `[rows, dim]` where the weights lie as they are, one row a position; None where they do not.

        To be read and not kept: `grow` may put another array in its place.
        """
        return None

    @abstractmethod
    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows. Raises `MemoryError`, and nothing has changed."""

    @abstractmethod
    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        """Rows at `positions` int64 `[n]` into `out` float32 `[n, dim]`; rows at negative positions are left alone.

        `stream`: past the caches, where that is worth it; only where `can_stream(out)`.
        """

    @abstractmethod
    def slabs(self) -> tuple[Slab, ...]:
        """What `read` reads, in the order in which the constructor asks for it; see `RowDirectory.slabs`."""

    @abstractmethod
    def write(self, positions: Int64, rows: Float32) -> None:
        """Rows float32 `[n, dim]` as they are, to `positions` int64 `[n]`, each once."""

    @abstractmethod
    def initialise(self, ids: Int64, positions: Int64) -> None:
        """The initial rows of `ids` int64 `[n]`, to `positions` int64 `[n]`, each once."""

    @abstractmethod
    def update(self, optimizer: RowOptimizer, slots: Float32, batch: UpdateBatch) -> None:
        """One step of a fused optimizer on the rows of the batch; `slots` as of `RowOptimizer.apply`."""


class Float32Rows(RowValues):
    """The numbers as they are."""

    def __init__(self, spec: TableSpec, rows: int, new_slab: SlabMaker) -> None:
        self._spec = spec
        self._slab = new_slab("weights", rows, spec.dim)

    @property
    def plain(self) -> Float32:
        return self._slab.array

    def grow(self, rows: int) -> None:
        self._slab.grow(rows)

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        gather(self._slab.array, positions, out, stream)

    def slabs(self) -> tuple[Slab, ...]:
        return (self._slab,)

    def write(self, positions: Int64, rows: Float32) -> None:
        self._slab.array[positions] = rows

    def initialise(self, ids: Int64, positions: Int64) -> None:
        write_initial_rows(self._spec, ids, positions, self._slab.array)

    def update(self, optimizer: RowOptimizer, slots: Float32, batch: UpdateBatch) -> None:
        optimizer.apply(self._slab.array, slots, batch)
