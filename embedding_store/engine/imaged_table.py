"""The part of a table in memory that a log needs: what a commit has made of its rows, and the way back from there."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.engine.table_contents import TableContents
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.log.changes import TableImages
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.rows.checks import require_ids

__all__ = ["ImagedTable"]

_COPIED_A_THREAD = 1 << 12
_NO_IDS: Int64 = np.empty(0, np.int64)


class ImagedTable(TableContents):
    """What `MemoryTable` does for the log of its store."""

    def images(self, update: UpdateBatch | None, counted: Int64 | None, pool: RangePool) -> TableImages:
        """What a commit has made of the table, once it is counted and rows are evicted; valid until the next call.

        Args:
            update: That was applied; None: none was.
            counted: int64, ids that the table's admission has counted.
            pool: Threads to work with.
        """
        removed = np.concatenate(self._removed) if self._removed else _NO_IDS
        ids, positions = (_NO_IDS, _NO_IDS) if update is None else (update.ids, update.positions)
        if len(removed):
            positions = np.empty(len(ids), np.int64)
            self._directory.find(ids, positions)
            ids, positions = ids[positions >= 0], positions[positions >= 0]
        weights = self._image_rows.take(len(ids), self.spec.dim)
        slots = self._image_slots.take(len(ids), self.slot_width)

        def copy(start: int, stop: int) -> None:
            self._rows.copy(positions[start:stop], weights[start:stop], slots[start:stop])

        if self._rows.follows:
            weights[:], slots[:] = self._rows.block(positions)
        else:
            pool.run(copy, len(ids), _COPIED_A_THREAD)
        touches = self._members.touches(positions)
        counted = _NO_IDS if counted is None else counted
        return TableImages(self.spec.name, ids, weights, slots, touches, counted, removed, self.count)

    @property
    def evicted_now(self) -> bool:
        """Whether the last `evict` took rows away."""
        return bool(self._removed)

    def put_images(self, images: TableImages, version: int) -> None:
        """Makes of the table what a commit had made of it, but for what is evicted; its step is counted already.

        Raises:
            BadInput: the images are not of this table.
        """
        ids = require_ids(self.spec, images.ids)
        shapes = images.weights.shape, images.slots.shape
        if shapes != ((len(ids), self.spec.dim), (len(ids), self.slot_width)):
            raise BadInput(f"table {self.spec.name!r}: images of shapes {shapes} are not those of {len(ids)} rows")
        if (images.touches is None) != (self.spec.eviction is None):
            raise BadInput(f"table {self.spec.name!r}: images say when rows were touched only of tables with eviction")
        self._reserve(ids, loaded=False)
        positions = np.empty(len(ids), np.int64)
        fresh = self._directory.claim(ids, positions)
        self._rows.prepare(positions, fresh, SERIAL)
        self._rows.write(positions, images.weights, images.slots)
        self._members.count(require_ids(self.spec, images.counted), 0)
        self._members.put(positions, images.touches)

    def replay_eviction(self, version: int, removed: Int64 | None, time: float | None = None) -> None:
        """Takes the rows away that `evict` took at this version: `removed` int64 `[n]`; None: none.

        `time`: when the version was committed.
        """
        if removed is not None and len(removed):
            self._members.forget(removed, self._directory)
            self._members.evicted += self._take_away(require_ids(self.spec, removed))
        self._members.end_eviction(version, self._directory, time)
