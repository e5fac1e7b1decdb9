"""What stores are given and give: blocks of rows, gradients of tables, commits, statistics."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.errors import BadInput


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """The coalesced gradient of one table; made by `embedding_store.coalesce`.

    Attributes:
        ids: int64 `[u]`, each id once.
        gradients: float32 `[u, dim]`, the summed gradient of each id.
        row_squares: float32 `[u]`, the mean of g² over each row, where the table holds only some columns of rows
            (encoding partition) and its optimizer looks across columns; None: the table's rows are whole.
    """

    ids: Int64
    gradients: Float32
    row_squares: Float32 | None = None


@dataclass(frozen=True, slots=True)
class EvictionCut:
    """Which rows of all shards of a table go for its `max_rows`.

    Attributes:
        version: Rows that were last touched before this version go.
        least_id: So do those that were touched at this version, of this id of the whole table or a greater one; None:
            none of them.
    """

    version: int
    least_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StayingRows:
    """The rows of a shard that a commit would leave, but for `max_rows`.

    Attributes:
        versions: int64 `[n]`, that last touched them.
        ids: int64 `[n]`, of the whole table.
    """

    versions: Int64
    ids: Int64


@dataclass(frozen=True, slots=True)
class Commit:
    """The step from version `version - 1` to `version`.

    Attributes:
        version: The version that this makes.
        updates: Table name -> its gradient. Tables may be missing.
        step: Optimizer steps taken before this one (Keras' `iterations`).
        learning_rates: Table name -> learning rate of this step; without one: of the table's own optimizer spec.
        record: What else belongs to this version (dense variables, progress of the job), for a store that keeps
            records (`EmbeddingStore.keeps_records`): it becomes readable when the version does.
        ends_replay_epoch: Whether rows with `lazy=False` count as replayed up to this version, as from a checkpoint of
            it.
        frozen: Tables that take no step: their rows and slots stay, with `lazy=False` too, and none is evicted.
        time: Seconds since 1970 (UTC), for tables whose rows go with time (`EvictionSpec.ttl`). It is decided once,
            by who makes the commit, and kept with it. None: by the store that is committed to.
        cuts: Table name -> what goes for its `max_rows`, of every table that shares its budget of rows with other
            stores (`TableSpec.shares_budget`), and of no other.
    """

    version: int
    updates: Mapping[str, TableUpdate]
    step: int
    learning_rates: Mapping[str, float]
    record: bytes | None = None
    ends_replay_epoch: bool = False
    frozen: tuple[str, ...] = ()
    time: float | None = None
    cuts: Mapping[str, EvictionCut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if both := sorted({*self.updates}.intersection(self.frozen)):
            raise BadInput(f"a commit updates tables that it says are frozen: {', '.join(map(repr, both))}")


NEXT_VERSION = 2**62
"""In `RowBlock.touches`: put without a version, it gets that of the next commit in which the table takes part."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Some rows of a table, whole.

    Attributes:
        ids: int64 `[n]`, each id once.
        weights: float32 `[n, dim]`.
        slots: float32 `[n, slot_width]`: the optimizer's slots side by side.
        touches: int64 `[n, 2]`, of tables with eviction: the version that last touched a row, and how often it was
            since the last look at rows; None: once, at the version committed next.
        trained: Whether a store or checkpoint held them: training may have made them infinite, and they stay so.
    """

    ids: Int64
    weights: Float32
    slots: Float32
    touches: Int64 | None = None
    trained: bool = False


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """What a table holds, and what it gave up since the store was opened.

    Attributes:
        rows: That hold a value.
        bytes: Of memory that they take, with their directory; None: unknown here.
        refused: Gradients that were dropped, as their ids were not admitted yet.
        evicted, deleted: Rows that were evicted; that `delete` took away.
        written: Rows that `put` wrote, and that `clear` forgot, with one for each call of it. It goes on, as though the
            table had been cleared, where it was dropped and made again, and where the store went back to its log.
    """

    rows: int
    bytes: int | None = None
    refused: int = 0
    evicted: int = 0
    deleted: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TableState:
    """One record of a table at one version. Two are equal when they are equal to the bit; an empty one is false.

    Attributes:
        admission_counts: uint8 `[counters]`, the sketch in which a table with admission counts its ids; None: the
            table has no admission.
        untouched_decay: How far weight decay has shrunk rows that were never updated, where it reaches them
            (`lazy=False`): the natural logarithm of the factor. None: it does not reach them.
        touch_times: int64 `[k, 3]`, of a table whose rows go with time: the last of some consecutive versions, and when
            the first and the last of them were committed, in milliseconds since 1970. None: rows do not go with time.
    """

    admission_counts: UInt8 | None = None
    untouched_decay: float | None = None
    touch_times: Int64 | None = None

    def __bool__(self) -> bool:
        return any(part is not None for part in (self.admission_counts, self.untouched_decay, self.touch_times))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableState) and self._bits() == other._bits()

    def __hash__(self) -> int:
        return hash(self._bits())

    def _bits(self) -> tuple[bytes | None, ...]:
        counts, decay, times = self.admission_counts, self.untouched_decay, self.touch_times
        return (
            None if counts is None else counts.tobytes(),
            None if decay is None else struct.pack("<d", decay),
            None if times is None else times.tobytes(),
        )


@dataclass(frozen=True, slots=True)
class FlushStatus:
    """How far the tier is behind the store.

    Attributes:
        version: The store's.
        flushed_version: Of which the tier has every row.
        changed_rows: Rows that are not in the tier as they are.
        log_bytes: Bytes that the log takes.
        waits: Commits so far that had to wait for the tier.
        waited_s: Seconds that they waited, together.
        failure: Why the last attempt to write failed; None: it did not.
    """

    version: int
    flushed_version: int
    changed_rows: int
    log_bytes: int
    waits: int
    waited_s: float
    failure: str | None

    @classmethod
    def of_all(cls, of_each: "Sequence[FlushStatus | None]") -> "FlushStatus | None":
        """Of several stores together: sums, and the earliest versions; None where no store has a tier."""
        there = [status for status in of_each if status is not None]
        if not there:
            return None
        return cls(
            min(one.version for one in there),
            min(one.flushed_version for one in there),
            sum(one.changed_rows for one in there),
            sum(one.log_bytes for one in there),
            sum(one.waits for one in there),
            sum(one.waited_s for one in there),
            next((one.failure for one in there if one.failure is not None), None),
        )


# One optimizer step on some rows of a table, as it travels from a commit to the kernel that does it


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The rows, their gradients, and the scalars of the step.

    Attributes:
        ids: int64 `[u]`, each id once.
        positions: int64 `[u]`, where each id's row is: its slots, and its weights unless `weights_at` differs. Each
            once; trusted.
        gradients: float32 `[u, dim]`, C-contiguous, summed per id.
        step: Optimizer steps taken before this one (Keras' `iterations`).
        rate: Learning rate of this step.
        squares: float32 `[u]`, the mean of g² over each whole row (`TableUpdate.row_squares`), where `gradients` holds
            only some of its columns; None: rows are whole. Only `cross_column` optimizers read it.
        weights_at: int64 `[u]`, where the weights are if not at `positions`. Each once; trusted.
        frames: int64 `[u]`, what `TableRows.prepare` said of these positions; None: nothing.
    """

    ids: Int64
    positions: Int64
    gradients: Float32
    step: int
    rate: float
    squares: Float32 | None = None
    weights_at: Int64 | None = None
    frames: Int64 | None = None

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def weight_positions(self) -> Int64:
        """int64 `[u]`: where the weights are."""
        return self.positions if self.weights_at is None else self.weights_at

    def arrays(self, weights: Float32, slots: Float32) -> tuple[Float32, Int64, Float32, Int64, Float32]:
        """The first arguments of every kernel: weights, where they are, slots, where they are, gradients."""
        lie = self.positions if self.weights_at is None else self.weights_at
        return weights, lie, slots, self.positions, self.gradients

    def part(self, start: int, stop: int) -> "UpdateBatch":
        """The rows from `start` to `stop`; arrays are views."""
        if start == 0 and stop >= len(self.positions):
            return self
        piece = slice(start, stop)
        squares = None if self.squares is None else self.squares[piece]
        weights_at = None if self.weights_at is None else self.weights_at[piece]
        frames = None if self.frames is None else self.frames[piece]
        ids, positions, gradients = self.ids[piece], self.positions[piece], self.gradients[piece]
        return UpdateBatch(ids, positions, gradients, self.step, self.rate, squares, weights_at, frames)

    def chosen(self, indices: Int64, positions: Int64) -> "UpdateBatch":
        """The rows at `indices` int64 `[n]`, which are at `positions` int64 `[n]`."""
        squares = None if self.squares is None else self.squares[indices]
        return UpdateBatch(self.ids[indices], positions, self.gradients[indices], self.step, self.rate, squares)

    def at(self, positions: Int64, weights_at: Int64 | None = None) -> "UpdateBatch":
        """The same rows at other positions."""
        return replace(self, positions=positions, weights_at=weights_at, frames=None)
