"""One table in memory: its rows and their directory, what a commit does to them, and what a log keeps of that."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import (
    Commit,
    EvictionCut,
    RowBlock,
    StayingRows,
    TableState,
    TableStatistics,
    TableUpdate,
    UpdateBatch,
)
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.tier import Records, TierTable
from elastable.embedding_store.engine.before_images import PinnedTable, TableVersions
from elastable.embedding_store.engine.dense_replay import CatchUpOptimizer, DenseReplay, dense_replay
from elastable.embedding_store.engine.membership import RowMembership
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.engine.table_tier import TableTier
from elastable.embedding_store.engine.tiered.store_state import FlushedTable
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.log.changes import TableImages
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.range_pool import FOUND_A_THREAD, SERIAL, RangePool, find_all
from elastable.embedding_store.native.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.native.row_gather import scale_rows
from elastable.embedding_store.native.slab import Scratch, Slab, SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.checks import require_ids
from elastable.embedding_store.tables.row_dtypes import round_update
from elastable.embedding_store.tables.table_reader import TableReader

_FRESH_A_THREAD = 1 << 12
_COPIED_A_THREAD = 1 << 12
_NO_IDS: Int64 = np.empty(0, np.int64)


@dataclass(slots=True)
class StagedUpdate:
    """An update that cannot fail any more.

    Attributes:
        batch: The step on the rows that are admitted; their positions are known once they are claimed.
        block: New rows, where the optimizer is not fused and has run already.
        sighted: int64, the ids that a table with admission counts once more.
        refused: How many ids were left out, as they are not admitted yet.
    """

    batch: UpdateBatch
    block: RowBlock | None
    sighted: Int64 | None = None
    refused: int = 0


class MemoryTable(TableReader):
    """The rows of one table in memory. Ids handed in have been checked; callers do the locking.

    A commit calls `stage`, `claim`, `apply`, then `follow` or `stay`, and `evict`.

    Of a table with a tier, rows are brought into memory before a change and written behind after it. Where rows follow
    steps, cold ones come into memory while a commit may still fail; where all rows are in memory, they follow once the
    step is taken.

    A fixed table whose rows all fit into `direct_bytes` keeps row i at position i. Any other keeps rows in first-come
    order behind a hash index, so that memory grows with the rows that were touched and not with the pages that they
    would be strewn over.

    Attributes:
        directory: Where the rows lie.
        rows: The rows there.
        members: Which ids have rows: admission and eviction.
        optimizer: Of the table.
        replay: Its dense replay; None: only gradients move rows.
        slot_width: Slots of a row.
        tier: What it has in the tier; None: it has none.
        versions: Those that are pinned; whatever changes rows tells them before.
        removed: int64, ids of rows that the last eviction took.
    """

    directory: RowDirectory
    rows: TableRows
    _room: int  # rows that there is room for; 0: not known

    def __init__(
        self,
        spec: TableSpec,
        direct_bytes: int,
        new_slab: SlabMaker = anonymous_slab,
        new_tier: Callable[[TableSpec, Callable[[], Int64]], TableTier] | None = None,
    ) -> None:
        """An empty table.

        Args:
            spec: The table.
            direct_bytes: As of `MemoryStore`.
            new_slab: Holds its directory, and its rows while all of them have room.
            new_tier: Makes its part of a tier, of the spec and what gives `RowDirectory.row_ids`; None: it has none.

        Raises:
            BadSpec: an optimizer that is not known here.
        """
        self._new_slab = new_slab
        self.optimizer = row_optimizer(spec.optimizer)
        self.replay = dense_replay(spec, self.optimizer)
        self.slot_width = self.optimizer.slot_width(spec.dim)
        self._initial_slots = self.optimizer.initial_slots(spec.dim)
        kept_width = self.slot_width + (self.replay is not None)
        self._row_bytes = spec.weight_bytes + 4 * kept_width
        size = spec.vocabulary_size
        self._direct = size if size is not None and size * self._row_bytes <= direct_bytes else None
        # Of updates: they are claimed and applied one at a time.
        self._positions = Scratch(np.int64)
        self.removed: list[Int64] = []
        self._image_rows, self._image_slots = Scratch(np.float32), Scratch(np.float32)
        self._deleted = self._written = 0
        self.tier = None if new_tier is None else new_tier(spec, lambda: self.directory.row_ids)
        super().__init__(spec, *self._empty(spec))
        self.members = RowMembership(spec, self.directory.capacity, new_slab)
        steps = None if self.replay is None else self.replay.steps
        self.versions = TableVersions(spec, kept_width, steps, self._direct)

    @property
    def count(self) -> int:
        """Rows that were updated or put."""
        return self.directory.count

    @property
    def direct(self) -> bool:
        """Whether row i lies at position i; else an index says where."""
        return self._direct is not None

    def reading_slabs(self) -> tuple[tuple[Slab, ...], tuple[Slab, ...]] | None:
        """What `read` reads: the slabs of the directory and those of the weights; None: not only slabs."""
        values = self.rows.slabs()
        return None if values is None else (self.directory.slabs(), values)

    def at(self, version: int) -> PinnedTable:
        """The table as it was at a pinned version, to read before anything changes."""
        since = self.versions.since(version)
        rows = self.rows.as_of(self.versions.step(version))
        current = (self.directory, rows, self.members)
        return PinnedTable(self.spec, *current, since, self.versions.sequence, self._untouched_decay)

    def scan(self, cursor: int, limit: int) -> tuple[RowBlock, int]:
        """The next block of rows from `cursor` (first 0), and the next cursor; an empty block ends it."""
        ids, positions, cursor = self.directory.scan(cursor, limit)
        return RowBlock(ids, *self.rows.block(positions), self.members.touches(positions), trained=True), cursor

    def stored(self, ids: Int64) -> RowBlock:
        """Of `ids` int64 `[n]` the rows that hold a value of their own, in that order."""
        positions = self.directory.positions_of(ids)
        live = positions >= 0
        if not live.all():
            ids, positions = ids[live], positions[live]
        return RowBlock(ids, *self.rows.block(positions), self.members.touches(positions), trained=True)

    def statistics(self) -> TableStatistics:
        """Counts of rows, and bytes of the address space that they have come to use."""
        row_bytes = self._row_bytes + self.members.row_bytes
        held = self.directory.bytes + self.members.bytes + self.directory.positions_given * row_bytes
        gone = self.members.evicted, self._deleted
        return TableStatistics(self.count, held, self.members.refused, *gone, self._written)

    def state(self) -> TableState:
        """What the table keeps besides its rows."""
        return TableState(self.members.admission_counts(), self._untouched_decay(), self.members.touch_times())

    def _untouched_decay(self, step: int | None = None) -> float | None:
        return None if self.replay is None else self.replay.untouched_decay(step)

    def put_state(self, state: TableState) -> None:
        """Restores what `state` returned. Raises `BadInput`, and nothing has changed."""
        self.members.require_state(state)
        decay = state.untouched_decay
        if decay is not None:
            if self.replay is None:
                raise BadInput(f"table {self.spec.name!r} has lazy=True, so there is no decay of other rows to restore")
            self.replay.require_decay(decay)
            self.replay.steps.put_untouched(decay)
        if state.admission_counts is not None:
            self.versions.save_admission_counts(self.members)
        if state.touch_times is not None:
            self.versions.save_touch_times(self.members)
        self.members.put_state(state)

    # A commit, step by step

    def stage(self, update: TableUpdate, step: int, rate: float) -> StagedUpdate:
        """Does everything about an update that can fail, and changes no row.

        Raises:
            MemoryError: no room for new rows.
            Exception: whatever an optimizer that is not fused raises.
        """
        if self.tier is not None:
            self.rows.release()
        whole, sighted = len(update.ids), None
        if self.spec.admission is not None:
            update, sighted = self.members.screen(update, self.directory)
        ids, positions = update.ids, self._positions.take(len(update.ids))
        batch = UpdateBatch(ids, positions, update.gradients, step, rate, update.row_squares)
        block = None
        if not self.optimizer.fused:
            block = self._block(ids)
            self.optimizer.apply(block.weights, block.slots, batch.at(np.arange(len(ids))))
            round_update(self.spec, ids, step, block.weights)
        self.make_ready_to_put(ids)
        return StagedUpdate(batch, block, sighted, whole - len(ids))

    def claim(self, staged: StagedUpdate, pool: RangePool, version: int) -> None:
        """Gives every id of the update a row, with initial values where it is new; all are touched at `version`."""
        ids, positions = staged.batch.ids, staged.batch.positions
        self.make_room(ids)  # there is room already, unless the table was cleared since
        if self.directory.count == self._direct:
            staged.batch = staged.batch.at(positions := ids)  # every id has a row, at its own position
            fresh = ids[:0]
        else:
            fresh = self._places(ids, positions, pool)
        frames = self.rows.prepare(positions, fresh)
        if frames is not None:
            staged.batch = replace(staged.batch, frames=frames)
        if self.versions.pinned:
            self._save(staged, fresh, pool)
        if self.spec.admission is not None:
            self.members.count(staged.sighted, staged.refused)
        if self.spec.eviction is not None:
            self.members.touch(positions, fresh, version)
        if staged.block is None and len(fresh):
            fresh_ids, fresh_rows = ids[fresh], positions[fresh]

            def initialise(start: int, stop: int) -> None:
                self.rows.initialise(fresh_ids[start:stop], fresh_rows[start:stop])

            pool.run(initialise, len(fresh), _FRESH_A_THREAD)

    def apply(self, staged: StagedUpdate, start: int, stop: int) -> None:
        """Updates the claimed rows `start..stop` of the update; ranges may run on different threads."""
        batch = staged.batch if stop - start == len(staged.batch.ids) else staged.batch.part(start, stop)
        if staged.block is None:
            self.rows.update(batch)
        else:
            self.rows.write(batch.positions, staged.block.weights[start:stop], staged.block.slots[start:stop])

    def follow(self, step: int, learning_rate: float, ends_replay_epoch: bool) -> None:
        """Counts a step, for the rows that it did not update: one for every commit, whether it names the table or not.

        Args:
            step, ends_replay_epoch: As of `Commit`.
            learning_rate: Of the step.
        """
        if self.replay is not None:
            self.replay.steps.take(step, learning_rate, ends_replay_epoch)
            if self.rows.whole:
                self._sweep(self.replay)

    def stay(self, ends_replay_epoch: bool) -> None:
        """Counts no step: the table is frozen in this commit."""
        if self.replay is not None and ends_replay_epoch:
            self.replay.steps.end_replay_epoch()

    def make_ready_to_follow(self) -> None:
        """Does what can fail about `follow`; no bit of what is read changes.

        Raises:
            ElastableError: rows that are to follow cannot be read.
        """
        if self.replay is not None and not self.rows.whole:
            try:
                self._sweep(self.replay)
            finally:
                self.rows.release()

    def staying(self, commit: Commit, time: float) -> StayingRows:
        """The rows that a commit would leave, but for `max_rows`."""
        update = None if self.spec.name in commit.frozen else commit.updates.get(self.spec.name)
        return self.members.staying(commit.version, update, self.directory, time)

    def evict(self, version: int, time: float | None = None, cut: EvictionCut | None = None) -> None:
        """Lets go of rows, as the table's eviction says for this version; cannot fail.

        Args:
            version: That is being committed.
            time: When, as of `Commit`.
            cut: What goes for `max_rows`, as of `Commit`.
        """
        if self.spec.eviction is not None:
            self._evict(version, time, cut)
        if self.tier is not None:
            self.rows.release()

    def _evict(self, version: int, time: float | None, cut: EvictionCut | None) -> None:
        self.removed.clear()
        if self.versions.pinned:
            self.versions.save_touch_times(self.members)
            self._save_unsettled()
            if self.members.counts_anew(version):
                self.versions.save_frequencies(self.members, self.directory.positions_given)
        if self.tier is not None:
            self.tier.touched.note(version, self.members)
        self.members.evict(version, self.directory, self._remove, time, cut)

    # Changes by hand

    def make_ready_to_put(self, ids: Int64, loaded: bool = True) -> None:
        """Does what can fail about putting rows of `ids` int64 `[n]`, which may repeat; changes no row.

        `loaded`: False where they are overwritten next; a change that cannot be logged leaves them as they are.

        Raises:
            MemoryError, ElastableError: there is no room, or a row that is there cannot be read.
        """
        self.make_room(ids)
        if not self.rows.whole:
            strangers = self._bring(ids, loaded or bool(self.versions.pinned))
            self.rows.allocate(self.directory.places(strangers))

    def put(self, block: RowBlock) -> None:
        """Writes rows as they are. Raises `MemoryError` before anything is changed."""
        self.make_ready_to_put(block.ids, loaded=False)
        self._save_of(block.ids)
        positions = np.empty(len(block.ids), np.int64)
        self.directory.claim(block.ids, positions)
        self.rows.write(positions, block.weights, block.slots)
        self.members.put(positions, block.touches)
        self._written += len(block.ids)
        self.rows.release()

    def make_ready_to_delete(self, ids: Int64) -> None:
        """Does what can fail about deleting rows of `ids` int64 `[n]`, which may repeat; changes no row.

        Raises:
            ElastableError: a row that a pin needs cannot be read.
        """
        if self.versions.pinned and not self.rows.whole:
            self._bring(ids)

    def delete(self, ids: Int64) -> int:
        """Takes the rows of `ids` int64 `[n]` away; returns how many there were."""
        self._save_of(ids)
        self.members.forget(ids, self.directory)
        removed = self._take_away(ids)
        self._deleted += removed
        self.rows.release()
        return removed

    def clear(self) -> None:
        """Deletes every row and count, and frees their memory."""
        self._written = self.written_once_gone
        self.rows.close()
        if self.tier is not None:
            self.tier.begin_anew()
        if self.replay is not None:
            self.replay.begin_anew()
        self.directory, self.rows = self._empty(self.spec)
        self.members = RowMembership(self.spec, self.directory.capacity, self._new_slab)

    @property
    def written_once_gone(self) -> int:
        """`TableStatistics.written`, once all rows are forgotten."""
        return self._written + 1 + self.count

    def follow_gone(self, written: int) -> None:
        """There was a table of this name before: what `written_once_gone` of it was."""
        self._written += written

    def drop(self) -> None:
        """The table is gone from its store."""
        if self.tier is not None:
            self.tier.retire()
        self.rows.close()

    # What a log keeps of a commit, and the way back from there

    def images(self, update: UpdateBatch | None, counted: Int64 | None, pool: RangePool) -> TableImages:
        """What a commit has made of the table, once it is counted and rows are evicted; valid until the next call.

        Args:
            update: That was applied; None: none was.
            counted: int64, ids that the table's admission has counted.
            pool: Threads to work with.
        """
        removed = np.concatenate(self.removed) if self.removed else _NO_IDS
        ids, positions = (_NO_IDS, _NO_IDS) if update is None else (update.ids, update.positions)
        if len(removed):
            positions = self.directory.positions_of(ids)
            ids, positions = ids[positions >= 0], positions[positions >= 0]
        weights = self._image_rows.take(len(ids), self.spec.dim)
        slots = self._image_slots.take(len(ids), self.slot_width)

        def copy(start: int, stop: int) -> None:
            self.rows.copy(positions[start:stop], weights[start:stop], slots[start:stop])

        if self.rows.follows:
            weights[:], slots[:] = self.rows.block(positions)
        else:
            pool.run(copy, len(ids), _COPIED_A_THREAD)
        touches = self.members.touches(positions)
        counted = _NO_IDS if counted is None else counted
        return TableImages(self.spec.name, ids, weights, slots, touches, counted, removed, self.count)

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
        self.make_ready_to_put(ids, loaded=False)
        positions = np.empty(len(ids), np.int64)
        fresh = self.directory.claim(ids, positions)
        self.rows.prepare(positions, fresh)
        self.rows.write(positions, images.weights, images.slots)
        self.members.count(require_ids(self.spec, images.counted), 0)
        self.members.put(positions, images.touches)
        self.rows.release()

    def replay_step(self, step: int, rate: float, ends_replay_epoch: bool) -> None:
        """Counts a step again, as `follow` did."""
        if self.replay is not None:
            self.make_ready_to_follow()
            self.replay.steps.prepare(step, rate)
            self.follow(step, rate, ends_replay_epoch)

    def replay_eviction(self, version: int, removed: Int64 | None, time: float | None = None) -> None:
        """Takes the rows away that `evict` took at this version: `removed` int64 `[n]`; None: none.

        `time`: when the version was committed.
        """
        if removed is not None and len(removed):
            self.members.forget(removed, self.directory)
            self.members.evicted += self._take_away(require_ids(self.spec, removed))
        if self.tier is not None:
            self.tier.touched.note(version, self.members)
        self.members.end_eviction(version, self.directory, time)
        self.rows.release()

    # The tier behind

    def bring(self, ids: Int64) -> Records | None:
        """What to ask the tier for, so that the rows of `ids` int64 `[n]`, unchecked, are near; None: nothing."""
        if self.tier is None or self.rows.whole:
            return None
        cold = self.rows.cold(self.directory.positions_of(require_ids(self.spec, ids)))
        return self.tier.behind.wanted(cold, self.rows.layout.record_bytes) if len(cold) else None

    def read_together(self, ids: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        own = self.directory.marks is not None and self.directory.count == self.spec.vocabulary_size
        positions = ids if own else np.empty(len(ids), np.int64)  # each id at its own, or where the directory says
        if not own and self.find(require_ids(self.spec, ids), positions, pool):
            return False
        if not self.rows.read_together(positions, out, stream, pool):
            require_ids(self.spec, ids)
        return True

    def flushed(self, tier: TableTier) -> FlushedTable:
        """What to keep besides the rows, which are in the tier."""
        steps = None if self.replay is None else self.replay.steps.save()
        touched = tier.touched.copy(self.members.has_unsettled)
        return FlushedTable(self.spec, tier.behind.name, self.direct, self.state(), steps, touched, self.count)

    def load(self, saved: FlushedTable, known: TierTable | None) -> None:
        """Takes the rows of the tier, which are as of the saved state or newer; the table is empty.

        Raises:
            StoreBroken: the tier has no such table, or it has other records.
        """
        assert self.tier is not None
        self.tier.touched = saved.touched.copy()
        if known is not None:
            self.tier.load(known, self.directory, self.rows, self.members, self.direct)
        self.put_state(saved.state)
        if saved.steps is not None and self.replay is not None:
            self.replay.steps.restore(saved.steps)

    def _bring(self, ids: Int64, loaded: bool = True) -> Int64:
        """Brings the rows of `ids` int64 `[n]` into memory; returns the ids that have none."""
        positions = self.directory.positions_of(ids)
        self.rows.bring(positions[positions >= 0], loaded)
        return ids[positions < 0]

    # Shared by several of these

    def find(self, ids: Int64, positions: Int64, pool: RangePool) -> int:
        """`RowDirectory.find`, by all threads."""
        if len(ids) < FOUND_A_THREAD:
            return self.directory.find(ids, positions)
        return find_all(self.directory.find, ids, positions, pool)

    def make_room(self, ids: Int64) -> None:
        """Room for the rows of `ids`, whether they have one or not; nothing has changed when it fails."""
        if self._direct is not None and self._room:
            return
        self.directory.reserve(len(ids))
        if (rows := self.directory.capacity) != self._room:
            self._room = 0  # until all of it is there
            self.rows.grow(rows)
            self.members.grow(rows)
            self._room = rows

    def _take_away(self, ids: Int64) -> int:
        """The rows of `ids` int64 `[n]`, which may repeat or have none, are gone; returns how many there were."""
        if self.tier is not None:
            self.tier.take_away(ids, self.directory, self.rows)
        return self.directory.remove(ids)

    def _remove(self, ids: Int64) -> int:
        """Rows of `ids` int64 `[n]` are evicted; returns how many there were."""
        self._save_of(ids)
        self.removed.append(ids.copy())
        return self._take_away(ids)

    def _write_initial(self, ids: Int64, places: Int64, out: Float32) -> None:
        super()._write_initial(ids, places, out)
        scale_rows(out, places, self.rows.untouched)

    def _empty(self, spec: TableSpec) -> tuple[RowDirectory, TableRows]:
        new_slab, self._room = self._new_slab, 0
        directory = IdIndex(new_slab) if self._direct is None else DirectRows(self._direct, new_slab)
        return directory, self.new_rows(spec, directory.capacity, new_slab)

    def new_rows(self, spec: TableSpec, rows: int, new_slab: SlabMaker = anonymous_slab) -> TableRows:
        """Room for `rows` rows of the table, as it keeps them."""
        stored = None if self.tier is None else self.tier.behind
        if self.replay is None:
            return TableRows(spec, self.optimizer, rows, new_slab, stored)
        steps = self.replay.steps
        return TableRows(spec, CatchUpOptimizer(self.optimizer, steps), rows, new_slab, stored, steps)

    def _places(self, ids: Int64, positions: Int64, pool: RangePool) -> Int64:
        """`RowDirectory.claim`; ids that have a row, mostly all, are found by all threads."""
        strangers = np.flatnonzero(positions < 0) if self.find(ids, positions, pool) else positions[:0]
        if not len(strangers):
            return strangers
        places = np.empty(len(strangers), np.int64)
        fresh = strangers[self.directory.claim(ids[strangers], places)]
        positions[strangers] = places
        return fresh

    def _sweep(self, replay: DenseReplay) -> None:
        """Keeps the steps few that the table remembers, once another one is taken."""
        replay.sweep(self.directory, self.rows, self.members, self.versions)

    def _block(self, ids: Int64) -> RowBlock:
        """A copy of the rows of `ids`, initial ones for those that have none."""
        weights = np.empty((len(ids), self.spec.dim), np.float32)
        self.read(ids, weights)
        positions = self.directory.positions_of(ids)
        slots = np.tile(self._initial_slots, (len(ids), 1))
        live = positions >= 0
        slots[live] = self.rows.block(positions[live])[1]
        return RowBlock(ids, weights, slots)

    def _save(self, staged: StagedUpdate, fresh: Int64, pool: RangePool) -> None:
        """Before rows of an update are changed; those at `fresh` are new."""
        positions = staged.batch.positions
        if len(fresh):
            positions = positions.copy()
            positions[fresh] = -1
        self.versions.save(staged.batch.ids, positions, self.rows, self.members, pool)
        if staged.sighted is not None and len(staged.sighted):
            self.versions.save_admission_counts(self.members)

    def _save_of(self, ids: Int64) -> None:
        """Before rows of `ids` int64 `[n]`, which may repeat, are changed."""
        if self.versions.pinned:
            once = np.unique(ids)
            self.versions.save(once, self.directory.positions_of(once), self.rows, self.members, SERIAL)

    def _save_unsettled(self) -> None:
        """Before rows that were put without a version get this one."""
        ids = self.members.unsettled(self.directory)
        if ids is not None:
            self._save_of(ids)
