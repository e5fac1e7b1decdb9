"""Rows of a table as they were at one version: those that have changed since."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.engine.image_rows import ImageRows
from elastable.embedding_store.engine.membership.row_touches import UInt32
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.row_gather import can_stream, gather
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps

__all__ = ["BeforeImages"]

_FOUND_A_THREAD = 1 << 14
_COPIED_A_THREAD = 1 << 12
_POSITION, _SEQUENCE = 0, 1


class BeforeImages:
    """What of a table has changed since a version was pinned, as it was then. Callers do the locking.

    An image is a row with its slots and touches, or that there was none. It is
    taken at the first change, and stays as long as this does.

    Attributes:
        count: Rows that the table had at that version.
        tells_of_none: Whether any image says that there was no row.
        step: The step that rows had followed then, and oldest_step the oldest one that images may refer to, of a
            table whose rows follow steps.
        admission_counts: The table's admission sketch as it was; None: as it is now.
        touch_times: When versions were committed, of a table whose rows go with time; None: as it is now.
        frequencies: How often rows were touched, by position, before an
            eviction last began to count anew, and the number of that change in
            the table's sequence; None: no eviction has.
    """

    def __init__(
        self,
        memory: Callable[[], ImageRows],
        count: int,
        steps: TableSteps | None = None,
    ) -> None:
        """`memory`: makes room, empty, when the first image is taken; the others as the attributes."""
        self.count = count
        self.tells_of_none = False
        self.step = None if steps is None else steps.now
        self.oldest_step = None if steps is None else steps.first
        self.admission_counts: UInt8 | None = None
        self.touch_times: Int64 | None = None
        self.frequencies: tuple[int, UInt32] | None = None
        self._memory = memory
        self._rows: ImageRows | None = None

    @property
    def rows(self) -> int:
        """Images."""
        return 0 if self._rows is None else self._rows.count

    @property
    def memory(self) -> ImageRows | None:
        """Where the images lie; None: there are none."""
        return self._rows

    def begun(self) -> ImageRows:
        """As `memory`, made where there is none. Raises `MemoryError`."""
        if self._rows is None:
            self._rows = self._memory()
        return self._rows

    @property
    def bytes(self) -> int:
        """Bytes of memory that this takes."""
        apart = 0 if self.admission_counts is None else self.admission_counts.nbytes
        apart += 0 if self.frequencies is None else self.frequencies[1].nbytes
        return apart if self._rows is None else apart + self._rows.bytes

    @property
    def ids(self) -> Int64:
        """int64 `[rows]`, of every image, in the order in which they were taken. A view, to read."""
        return np.empty(0, np.int64) if self._rows is None else self._rows.ids

    @property
    def positions(self) -> Int64:
        """int64 `[rows]`: where scans of the table came upon the row; -1: there was none. A view, to read."""
        return np.empty(0, np.int64) if self._rows is None else self._rows.origins.array[: self.rows, _POSITION]

    @property
    def sequences(self) -> Int64:
        """int64 `[rows]`: the number in the table's sequence of changes of the row's first one. A view, to read."""
        return np.empty(0, np.int64) if self._rows is None else self._rows.origins.array[: self.rows, _SEQUENCE]

    @property
    def touches(self) -> Int64:
        """int64 `[rows, 2]`, `RowBlock.touches` of a table with eviction. A view, to read."""
        return np.empty((0, 2), np.int64) if self._rows is None else self._rows.touches.array[: self.rows]

    def find(self, ids: Int64, places: Int64) -> int:
        """Writes which image is each id's into `places` int64 `[n]`, -1 for none; returns how many have none."""
        if self._rows is None:
            places[:] = -1
            return len(ids)
        return self._rows.find(ids, places)

    def strangers(self, ids: Int64, pool: RangePool) -> Int64:
        """int64: indices of those of `ids` int64 `[n]` that have no image."""
        if self._rows is None:
            return np.arange(len(ids))
        places, missing = np.empty(len(ids), np.int64), list[int]()

        def find(start: int, stop: int) -> None:
            missing.append(self.find(ids[start:stop], places[start:stop]))

        pool.run(find, len(ids), _FOUND_A_THREAD)
        return np.flatnonzero(places < 0) if any(missing) else places[:0]

    def add(self, ids: Int64, positions: Int64, sequence: int, rows: TableRows, touches: Int64 | None,
            pool: RangePool) -> None:  # fmt: skip
        """Takes images.

        Args:
            ids: int64 `[n]`, each once, none with an image.
            positions: int64 `[n]`, where their rows lie; -1: there is none.
            sequence: Number of the change that is about to happen.
            rows: The table's.
            touches: int64 `[n, 2]`, of tables with eviction.
            pool: Threads to work with.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        held = self.begun()
        start, stop = held.add(ids)
        self.tells_of_none |= bool((positions < 0).any())
        held.origins.array[start:stop, _POSITION] = positions
        held.origins.array[start:stop, _SEQUENCE] = sequence
        if touches is not None:
            held.touches.array[start:stop] = touches
        weights, slots = held.weights.array[start:stop], held.slots.array[start:stop]
        stream = can_stream(weights)

        def copy(begin: int, end: int) -> None:
            rows.copy(positions[begin:end], weights[begin:end], slots[begin:end], stream)

        pool.run(copy, stop - start, _COPIED_A_THREAD)

    def read(self, places: Int64, out: Float32, stream: bool = False) -> None:
        """Weights of images into `out` float32 `[n, dim]`; rows of `out` at negative places are left alone."""
        if self._rows is not None:
            gather(self._rows.weights.array, places, out, stream)

    def block(self, places: Int64) -> tuple[Float32, Float32]:
        """Copies of images, as `TableRows.copy` gave them."""
        held = self.begun()
        return held.weights.array[places], held.slots.array[places]

    def take_over(self, newer: BeforeImages) -> None:
        """Is told that the pin after this one is gone: images that only it has are needed here.

        Raises:
            MemoryError: there is no room; nothing has changed.
        """
        if newer.rows:
            places = np.empty(newer.rows, np.int64)
            self.find(newer.ids, places)
            chosen = np.flatnonzero(places < 0)
            held, theirs_held = self.begun(), newer.begun()
            start, stop = held.add(newer.ids[chosen])
            for ours, theirs in zip(held.slabs, theirs_held.slabs, strict=True):
                np.take(theirs.array, chosen, axis=0, out=ours.array[start:stop], mode="clip")
            self.tells_of_none |= newer.tells_of_none
        if self.admission_counts is None:
            self.admission_counts = newer.admission_counts
        if self.touch_times is None:
            self.touch_times = newer.touch_times
        if self.frequencies is None:
            self.frequencies = newer.frequencies
