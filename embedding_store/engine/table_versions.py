"""The pinned versions of one table: what is kept of each, and what is not needed any more."""

from __future__ import annotations

from collections.abc import Callable

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.image_rows import ImageRows, first_bytes
from elastable.embedding_store.engine.membership.row_membership import RowMembership
from elastable.embedding_store.engine.row_images import BeforeImages
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps

__all__ = ["MAX_BYTES", "MakeRoom", "TableVersions"]

MakeRoom = Callable[[int], None]
"""Gives pins up, the oldest first, until so many bytes more may be taken; `MAX_BYTES` gives all of them up."""

MAX_BYTES = 1 << 62
_BESIDE = 65  # bytes of an image beside its row, at most


class TableVersions:
    """Before-images of one table, by pinned version. Callers do the locking.

    A row is saved for the newest pinned version, once; a version reads what
    was saved for it, else what was saved for the next one, and at last the
    table itself.

    Attributes:
        sequence: Counts changes of rows of which images were taken.
    """

    def __init__(
        self, spec: TableSpec, slot_width: int, steps: TableSteps | None = None, direct: int | None = None
    ) -> None:
        """`slot_width`: slots as rows are kept; `steps`: of a table whose rows follow them; `direct`: its size, where
        row i lies at position i.
        """
        self.sequence = 0
        self._steps = steps
        self._spec, self._slot_width, self._direct = spec, slot_width, direct
        self._spare: ImageRows | None = None  # memory that was used before, for the next version
        self._images: dict[int, BeforeImages] = {}  # oldest version first
        self._make_room: MakeRoom = lambda size: None

    def __bool__(self) -> bool:
        """Whether any version is pinned."""
        return bool(self._images)

    def begin(self, version: int, count: int, make_room: MakeRoom) -> None:
        """The current version is pinned, newer than all that are: the table has `count` rows."""
        self._images[version] = BeforeImages(self._memory, count, self._steps)
        self._make_room = make_room

    def end(self, version: int) -> None:
        """Nobody needs the version any more.

        Raises:
            MemoryError: what the version before it needs cannot be kept; nothing has changed.
        """
        older = [other for other in self._images if other < version]
        if older:
            self._images[older[-1]].take_over(self._images[version])
        memory = self._images.pop(version).memory
        if memory is not None and self._spare is None:
            memory.clear()
            self._spare = memory

    def forget(self) -> None:
        """Nobody needs any version any more."""
        self._images.clear()
        self._spare = None

    def drop_spare(self) -> None:
        """Gives memory back that is kept for the next version."""
        self._spare = None

    def size(self, version: int) -> tuple[int, int]:
        """Rows and bytes that are kept for a version."""
        images = self._images.get(version)
        return (0, 0) if images is None else (images.rows, images.bytes)

    def step(self, version: int) -> int | None:
        """The step that rows of a pinned version have followed; None: rows follow none."""
        return self._images[version].step

    def oldest_step(self) -> int | None:
        """The oldest step that what is kept may refer to."""
        return min((images.oldest_step for images in self._images.values() if images.oldest_step), default=None)

    def since(self, version: int) -> list[BeforeImages]:
        """What a pinned version reads, one after the other, before the table itself."""
        return [images for other, images in self._images.items() if other >= version]

    def save(self, ids: Int64, positions: Int64, rows: TableRows, members: RowMembership, pool: RangePool) -> None:
        """Is told of rows that are about to change. Never fails: pins are given up, where there is no memory.

        Args:
            ids: int64 `[n]`, each once.
            positions: int64 `[n]`, where their rows lie; -1: there is none.
            rows: The table's.
            members: The table's.
            pool: Threads to work with.
        """
        self.sequence += 1
        try:
            images = self._newest()
            if images is None or not len(chosen := images.strangers(ids, pool)):
                return
            if len(chosen) < len(ids):
                ids, positions = ids[chosen], positions[chosen]
            self._make_room(self._room(images, len(ids)))
            if self._newest() is not images:
                return  # there is no pin any more
            touches = members.touches(positions)
            images.add(ids, positions, self.sequence, rows, touches, pool)
        except MemoryError:
            self._make_room(MAX_BYTES)

    def save_admission_counts(self, members: RowMembership) -> None:
        """The table's admission sketch is about to change. Never fails, as `save`."""
        images = self._newest()
        if images is None or images.admission_counts is not None or not members.bytes:
            return
        try:
            self._make_room(members.bytes)
            images.admission_counts = members.admission_counts()
        except MemoryError:
            self._make_room(MAX_BYTES)

    def save_touch_times(self, members: RowMembership) -> None:
        """The times of the table's versions are about to change: some kilobytes, of tables whose rows go with time."""
        images = self._newest()
        if images is not None and images.touch_times is None:
            images.touch_times = members.touch_times()

    def save_frequencies(self, members: RowMembership, high: int) -> None:
        """Is told that touches of the rows below position `high` are about to be counted anew. Never fails."""
        images = self._newest()
        if images is None or images.frequencies is not None:
            return
        self.sequence += 1
        try:
            self._make_room(4 * high)
            frequencies = members.frequencies(high)
            images.frequencies = None if frequencies is None else (self.sequence, frequencies)
        except MemoryError:
            self._make_room(MAX_BYTES)

    def _room(self, images: BeforeImages, more: int) -> int:
        """Bytes that `more` further images take at most."""
        held = images.memory or self._spare
        if held is not None:
            return held.room(more)
        return first_bytes(self._direct) + more * (4 * (self._spec.dim + self._slot_width) + _BESIDE)

    def _memory(self) -> ImageRows:
        spare, self._spare = self._spare, None
        return spare or ImageRows(self._spec, self._slot_width, self._direct)

    def _newest(self) -> BeforeImages | None:
        return next(reversed(self._images.values()), None)
