"""The rows of a table by position: weights and slots side by side, wherever they lie."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.row_gather import can_stream, gather
from elastable.embedding_store.native.slab import Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.tables.row_dtypes import row_values


class TableRows(ABC):
    """Weights and slots at positions 0, 1, 2, ...

    Different positions may be read, written and updated from different
    threads. Positions are there once in each call that changes rows.
    """

    @property
    def plain(self) -> Float32 | None:
        """Weights float32 `[rows, dim]` as `RowValues.plain`; None where they do not lie so in memory."""
        return None

    @property
    def plain_slots(self) -> Float32 | None:
        """Slots float32 `[rows, slot_width]` next to `plain`; None where they do not lie so in memory."""
        return None

    @property
    def untouched(self) -> np.float32:
        """What the initial values of rows that were never updated are multiplied by."""
        return np.float32(1)

    def as_of(self, step: int | None) -> "TableRows":
        """The same rows, to be read as they were at a step (None: the present one)."""
        return self

    @abstractmethod
    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows. Raises `MemoryError`, and nothing has changed."""

    @abstractmethod
    def prepare(self, positions: Int64, fresh: Int64, pool: RangePool) -> Int64 | None:
        """Prepares for a change of rows, in one thread alone.

        Args:
            positions: int64 `[n]`, all of them.
            fresh: int64 `[m]`, indices in `positions` of those that hold no values yet.
            pool: Threads to work with.

        Returns:
            What `update` gets of these rows as `UpdateBatch.frames`, so that it need not look again.
        """

    @abstractmethod
    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        """As `RowValues.read`."""

    @abstractmethod
    def block(self, positions: Int64) -> tuple[Float32, Float32]:
        """Copies of weights float32 `[n, dim]` and slots float32 `[n, slot_width]`; no negative positions."""

    @abstractmethod
    def copy(self, positions: Int64, weights: Float32, slots: Float32, stream: bool = False) -> None:
        """Rows as they lie, into `weights` float32 `[n, dim]` and `slots` float32 `[n, kept_width]`, both contiguous.

        Rows of both at negative positions are left alone. `stream` as in `RowValues.read`, for the weights.
        """

    @property
    def follows(self) -> bool:
        """Whether steps without a gradient move rows, so that `copy` gives other rows than `block`."""
        return False

    def seen(self, weights: Float32, slots: Float32) -> tuple[Float32, Float32]:
        """Rows that `copy` gave, as `block` would have given them; the arrays may be changed and returned."""
        return weights, slots

    def slabs(self) -> tuple[Slab, ...] | None:
        """`RowValues.slabs`; None: these rows are not for other processes to read."""
        return None

    @abstractmethod
    def write(self, positions: Int64, weights: Float32, slots: Float32) -> None:
        """Weights float32 `[n, dim]` and slots float32 `[n, slot_width]` as they are."""

    @abstractmethod
    def initialise(self, ids: Int64, positions: Int64) -> None:
        """The weights and slots that `ids` int64 `[n]` have before their first update."""

    @abstractmethod
    def update(self, batch: UpdateBatch) -> None:
        """One step of the table's (fused) optimizer on the rows of a batch, which lie at `batch.positions`."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what is not memory."""


class ResidentRows(TableRows):
    """Rows in slabs, each at its position."""

    plain: Float32 | None = None

    def __init__(
        self, spec: TableSpec, optimizer: RowOptimizer, rows: int, new_slab: SlabMaker = anonymous_slab
    ) -> None:
        self._optimizer = optimizer
        self._initial_slots = optimizer.initial_slots(spec.dim)
        self._dim = spec.dim
        self._weights = row_values(spec, rows, new_slab)
        self._slots = new_slab("slots", rows, optimizer.slot_width(spec.dim))
        self.plain = self._weights.plain

    @property
    def plain_slots(self) -> Float32:
        slots: Float32 = self._slots.array
        return slots

    def grow(self, rows: int) -> None:
        self.plain = None  # a slab that nobody looks at grows where it is
        try:
            self._weights.grow(rows)
            self._slots.grow(rows)
        finally:
            self.plain = self._weights.plain

    def prepare(self, positions: Int64, fresh: Int64, pool: RangePool) -> Int64 | None:
        """All rows are in memory."""
        return None

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        self._weights.read(positions, out, stream)

    def block(self, positions: Int64) -> tuple[Float32, Float32]:
        weights = np.empty((len(positions), self._dim), np.float32)
        self._weights.read(positions, weights)
        return weights, self._slots.array[positions]

    def copy(self, positions: Int64, weights: Float32, slots: Float32, stream: bool = False) -> None:
        self._weights.read(positions, weights, stream)
        if slots.shape[1]:
            gather(self._slots.array, positions, slots, stream and can_stream(slots))

    def slabs(self) -> tuple[Slab, ...] | None:
        return self._weights.slabs()

    def write(self, positions: Int64, weights: Float32, slots: Float32) -> None:
        self._weights.write(positions, weights)
        self._slots.array[positions] = slots

    def initialise(self, ids: Int64, positions: Int64) -> None:
        self._weights.initialise(ids, positions)
        self._slots.array[positions] = self._initial_slots

    def update(self, batch: UpdateBatch) -> None:
        if self.plain is None:
            self._weights.update(self._optimizer, self._slots.array, batch)
        else:
            self._optimizer.apply(self.plain, self._slots.array, batch)

    def close(self) -> None:
        """There is nothing but memory."""


MakeRows = Callable[[TableSpec, RowOptimizer, int], TableRows]
"""Room for so many rows of a table."""


def resident_rows(new_slab: SlabMaker = anonymous_slab) -> MakeRows:
    """Rows in slabs of this kind."""
    return lambda spec, optimizer, rows: ResidentRows(spec, optimizer, rows, new_slab)
