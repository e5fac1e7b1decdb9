"""Rows of a table in files, the hot ones of them in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.native.ids.hot_set import BYTES_A_FRAME, HotSet
from elastable.embedding_store.native.ids.hot_set_kernels import WAYS
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.native.row_gather import can_stream
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.support.row_budget import RowBudget
from elastable.embedding_store.tiers.files.lookup_sampling import LookupSampling
from elastable.embedding_store.tiers.files.row_file import RowFile
from elastable.embedding_store.tiers.files.row_frames import Frames, Scratches

__all__ = ["FileRows"]

_ROWS_A_THREAD = 1 << 10
_READS_A_THREAD = 1 << 8  # of weights alone, where threads are awake
_MOST_MISSED = 1 << 20  # positions that wait to be counted; more are forgotten
_READS_ONLY = 20  # reads, per frame, without a change: from then on frames hold no slots
_CARRIED = 1 << 16  # rows that keep frames where the number of frames changes

_Places = tuple[Int64, Int64, Int64]
"""Of some positions: indices and frames of the rows in memory, indices of the others."""


class FileRows(TableRows):
    """Rows as records in files, one file a part, and frames in memory that hold the hot ones.

    A row in a frame is read and changed there, and written to its file when it
    gives way, or at `flush`. Any other row is read from the file and, changed,
    written to it. Rows get frames by what `HotSet` counts: in `prepare`, and in
    `settle` for those that were read.

    A table that is only read holds weights alone in its frames, so that more
    rows fit; such a frame is never changed. The first change ends this.
    """

    def __init__(
        self, spec: TableSpec, optimizer: RowOptimizer, rows: int, folder: Path, budget: RowBudget, fresh: bool
    ) -> None:
        """Opens or makes the files.

        Args:
            spec: The table.
            optimizer: Its optimizer.
            rows: Room for so many, at first.
            folder: Of the files; it is there.
            budget: Shares memory out among tables.
            fresh: Whether to begin with empty files.

        Raises:
            StoreFailed: a file cannot be made, or is not this table's.
        """
        self._spec, self._optimizer = spec, optimizer
        self._budget, self._rows = budget, rows
        self._lock = threading.Lock()
        self._missed: list[Int64] = []
        self._reads = 0
        self._sampling = LookupSampling()
        self._read_only = True
        self._files: dict[str, RowFile] = {}
        sizes = Frames(spec, optimizer, WAYS).row_bytes()
        self._row_bytes, self._slot_bytes = sum(sizes.values()), sizes.get("slots", 0)
        self._scratches = Scratches(spec, optimizer, self._row_bytes)
        try:
            for part, size in sizes.items():
                self._files[part] = RowFile(folder / f"{part}.rows", spec.name, part, size, fresh)
        except BaseException:
            self.close()
            raise
        self._hot, self._frames = self._new_frames(WAYS)
        budget.declare(self, self._need(), self._resize)

    def grow(self, rows: int) -> None:
        """As in `TableRows.grow`; the table's share of memory may grow, and others' shrink."""
        if rows > self._rows:
            self._rows = rows
            self._budget.declare(self, self._need(), self._resize)

    def allocate(self, positions: Int64) -> None:
        """As in `TableRows.allocate`: blocks of the files."""
        for file in self._files.values():
            file.allocate(positions)

    def adopt(self, positions: Int64) -> None:
        """Is told that rows at `positions` were written before. Raises `StoreFailed` for files cut short."""
        for file in self._files.values():
            file.adopt(positions)

    def prepare(self, positions: Int64, fresh: Int64, pool: RangePool) -> None:
        """As in `TableRows.prepare`: the hot ones of the rows get frames."""
        self._reads = 0
        if self._read_only:
            self._read_only = False
            self._budget.declare(self, self._need(), self._resize)
        frames, cold = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        cold = cold[: self._hot.find(positions, frames, cold)]
        known = np.ones(len(positions), np.bool_)
        known[fresh] = False
        self._admit(positions[cold], known[cold], pool)

    def settle(self, pool: RangePool) -> None:
        """Gives frames to rows that were read often; in one thread alone."""
        with self._lock:
            missed, self._missed = self._missed, []
        if not self._read_only and self._reads > _READS_ONLY * self._hot.frames and self._slot_bytes:
            self._read_only = True
            self._budget.declare(self, self._need(), self._resize)
        if missed:
            positions = np.concatenate(missed)
            self._admit(positions, np.ones(len(positions), np.bool_), pool)

    @property
    def missed(self) -> int:
        """Reads of rows without a frame since `settle`."""
        return sum(map(len, self._missed))

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        frames, cold = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        cold = cold[: self._hot.find(positions, frames, cold)]
        self._frames.rows.read(frames, out, stream)
        self._reads += len(positions)
        if not len(cold):
            return
        absent = positions[cold]
        if self._spec.dtype == "float32" and out.flags.c_contiguous:
            self._files["weights"].load(absent, out, cold)
        else:
            for piece, scratch in self._scratched(absent, cold, slots=False):
                rows = np.empty((len(piece), self._spec.dim), np.float32)
                scratch.rows.read(np.arange(len(piece)), rows)
                out[piece] = rows
        self._note_missed(absent)

    def read_together(self, positions: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        """As `read`, by all threads of a pool; False, and nothing happened, where rows or `out` do not lie so."""
        rows = self._frames.rows.plain
        if rows is None or not out.flags.c_contiguous:
            return False
        counted = self._sampling.counts(len(positions))
        cold = self._hot.read(positions, rows, out, stream and can_stream(out), pool, counted)
        self._reads += len(positions)
        self._sampling.found(len(positions), len(cold))
        absent, file = positions[cold], self._files["weights"]
        if len(cold):
            pool.run(lambda a, b: file.load(absent[a:b], out, cold[a:b]), len(cold), _READS_A_THREAD)
        if counted:
            self._note_missed(absent)
        return True

    def _note_missed(self, positions: Int64) -> None:
        """Rows that were read and have no frame are counted in `settle`."""
        with self._lock:
            if len(positions) and self.missed < _MOST_MISSED:
                self._missed.append(positions)

    def block(self, positions: Int64) -> tuple[Float32, Float32]:
        """As in `TableRows.block`; nothing gets hotter by it."""
        width = self._optimizer.slot_width(self._spec.dim)
        weights = np.empty((len(positions), self._spec.dim), np.float32)
        slots = np.empty((len(positions), width), np.float32)
        here, frames, cold = self._places(positions)
        if self._read_only:
            here, frames, cold = cold[:0], cold[:0], np.arange(len(positions))
        weights[here], slots[here] = self._frames.rows.block(frames)
        for piece, scratch in self._scratched(positions[cold], cold):
            weights[piece], slots[piece] = scratch.rows.block(np.arange(len(piece)))
        return weights, slots

    def write(self, positions: Int64, weights: Float32, slots: Float32) -> None:
        if self._read_only:
            self._hot.remove(positions)
        here, frames, cold = self._places(positions)
        self._frames.rows.write(frames, weights[here], slots[here])
        self._hot.marks[frames] = 1
        for piece, scratch in self._scratched(positions[cold], cold, loaded=False, stored=True):
            scratch.rows.write(np.arange(len(piece)), weights[piece], slots[piece])

    def initialise(self, ids: Int64, positions: Int64) -> None:
        here, frames, cold = self._places(positions)
        self._frames.rows.initialise(ids[here], frames)
        self._hot.marks[frames] = 1
        for piece, scratch in self._scratched(positions[cold], cold, loaded=False, stored=True):
            scratch.rows.initialise(ids[piece], np.arange(len(piece)))

    def update(self, batch: UpdateBatch) -> None:
        here, frames, cold = self._places(batch.positions)
        self._hot.marks[frames] = 1
        if not len(cold):
            self._frames.rows.update(batch.at(frames))
            return
        self._frames.rows.update(batch.chosen(here, frames))
        for piece, scratch in self._scratched(batch.positions[cold], cold, stored=True):
            scratch.rows.update(batch.chosen(piece, np.arange(len(piece))))

    def flush(self) -> None:
        """Writes every changed row to its file. Raises `StoreFailed`."""
        positions, frames = self._hot.marked()
        order = np.argsort(positions)
        self._store(self._frames, positions[order], frames[order])
        self._hot.marks[frames] = 0

    def sync(self) -> None:
        """Returns once the files are on the disk. Raises `StoreFailed`."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Closes the files as they are, and gives the memory back."""
        self._budget.withdraw(self)
        for file in self._files.values():
            file.close()

    def _frame_bytes(self) -> int:
        return self._row_bytes - (self._slot_bytes if self._read_only else 0) + BYTES_A_FRAME

    def _need(self) -> int:
        return self._rows * self._frame_bytes()

    def _resize(self, share: int) -> None:
        """Takes as many frames as fit into `share` bytes; only the hottest rows keep theirs."""
        wanted = max(WAYS, min(share // self._frame_bytes(), self._rows))
        if 0.75 * self._hot.frames <= wanted <= 1.1 * self._hot.frames and self._slots_held is not self._read_only:
            return
        self.flush()
        kept = self._hot.hottest(min(wanted, _CARRIED))
        del self._hot, self._frames  # before there is memory for others
        self._hot, self._frames = self._new_frames(wanted)
        self._admit(kept, np.ones(len(kept), np.bool_), SERIAL)

    def _new_frames(self, wanted: int) -> tuple[HotSet, Frames]:
        hot = HotSet(wanted, dense=True)
        self._slots_held = not self._read_only
        return hot, Frames(self._spec, self._optimizer, hot.frames)

    def _admit(self, positions: Int64, known: npt.NDArray[np.bool_], pool: RangePool) -> None:
        """Gives frames to those of the positions that are hot; what was known of them is loaded."""
        frames, gone, lost = (np.empty(len(positions), np.int64) for _ in range(3))
        count = self._hot.admit(positions, frames, gone, lost)
        self._spread(pool, count, lambda a, b: self._store(self._frames, gone[a:b], lost[a:b]))
        chosen = np.flatnonzero((frames >= 0) & known)
        some, places = positions[chosen], frames[chosen]
        held = self._slots_held
        self._spread(pool, len(chosen), lambda a, b: self._load(self._frames, some[a:b], places[a:b], held))

    def _spread(self, pool: RangePool, count: int, work: Callable[[int, int], None]) -> None:
        if count:
            pool.run(work, count, _ROWS_A_THREAD)

    def _places(self, positions: Int64) -> _Places:
        frames, cold = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        cold = cold[: self._hot.find(positions, frames, cold, counted=False)]
        if not len(cold):
            return np.arange(len(positions)), frames, cold
        here = np.flatnonzero(frames >= 0)
        return here, frames[here], cold

    def _scratched(
        self, positions: Int64, indices: Int64, loaded: bool = True, stored: bool = False, slots: bool = True
    ) -> Iterator[tuple[Int64, Frames]]:
        """Rows `positions` of the files, some at a time, in the first rows of a scratch.

        Gives the part of `indices` that belongs to them, and the scratch.
        """
        with self._scratches.one() as scratch:
            for start in range(0, len(positions), self._scratches.rows):
                some = positions[start : start + self._scratches.rows]
                order = np.arange(len(some))
                if loaded:
                    self._load(scratch, some, order, slots)
                yield indices[start : start + self._scratches.rows], scratch
                if stored:
                    self._store(scratch, some, order)

    def _load(self, into: Frames, positions: Int64, frames: Int64, slots: bool = True) -> None:
        for part, file in self._files.items():
            if part == "slots" and not slots:
                continue
            file.load(positions, into.parts[part].array, frames)

    def _store(self, of: Frames, positions: Int64, frames: Int64) -> None:
        for part, file in self._files.items():
            file.store(positions, of.parts[part].array, frames)
