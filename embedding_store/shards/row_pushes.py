"""Row gradients that workers push to store servers, and how a master has them summed, clipped and committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import EvictionCut

__all__ = [
    "Committed",
    "Measured",
    "PushedCommit",
    "RowOffer",
    "RowOffers",
    "RowPush",
    "RowPushOutcome",
    "RowSums",
    "Slices",
    "SumTerm",
    "TableClip",
]


@dataclass(frozen=True, slots=True)
class Slices:
    """Gradient of a table: int64 `indices[n]`, float32 `values[n, dim]`; duplicates are summed."""

    indices: Int64
    values: Float32


@dataclass(frozen=True, slots=True)
class RowPush:
    """The rows' part of the gradient of one micro-batch, or as much of it as one store server holds.

    Attributes:
        job: The job it was computed for.
        version: Computed on.
        micro_batch: Number within the job. The same name stands for the same bits, whoever computed them. Of an
            asynchronous job: the sequence of its sender.
        parts: Of each part of the loss that is divided alike: table name -> gradient, by the ids of the
            store that it goes to.
        sender: Incarnation of the worker that made it, in an asynchronous job: it sends one push after the other, and
            each in place of the one before. "": the job is synchronous.
    """

    job: str
    version: int
    micro_batch: int
    parts: tuple[Mapping[str, Slices], ...]
    sender: str = ""


class RowPushOutcome(StrEnum):
    """What a store server did with a push."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class SumTerm:
    """One part of one push in the sum of a version, and the share that its gradient is multiplied by."""

    micro_batch: int
    part: int
    share: float


@dataclass(frozen=True, slots=True)
class RowSums:
    """Which pushes make the row gradient of a version.

    Attributes:
        version: That is updated; synchronous pushes were computed on it.
        terms: In the order in which they are summed.
        rows_once: Parts of which each row counts once, in the first push that has it.
        frozen: Tables that take no step.
        sender: As of `RowPush`, of all of them.
    """

    version: int
    terms: tuple[SumTerm, ...] = ()
    rows_once: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    sender: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a master needs of row gradients that it does not see, to clip them.

    Attributes:
        squares: Table name -> the exact sum of all squares of its gradient, as a multiple of
            `elastable.embedding_store.shards.sums.exact_squares.UNIT`.
        not_finite: Tables whose gradient holds NaN or Inf.
        missing: Micro-batches whose pushes are not there; then nothing else is set.
    """

    squares: Mapping[str, int] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TableClip:
    """How the summed gradient of a table is clipped: multiplied by `scale`, then cut to [-bound, bound]."""

    scale: float = 1.0
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class PushedCommit:
    """The step from version `sums.version` to the one after it. Fields that are not told here are those of `Commit`.

    Attributes:
        sums: What the gradient is made of.
        clips: Table name -> how its gradient is clipped; absent: not at all.
        dropped: Whether the gradient overflowed, and is left out for that.
        cuts: As of `Commit`; `ShardedStore` decides them.
    """

    sums: RowSums
    step: int
    learning_rates: Mapping[str, float]
    clips: Mapping[str, TableClip] = field(default_factory=dict)
    record: bytes | None = None
    ends_chapter: bool = False
    dropped: bool = False
    time: float | None = None
    cuts: Mapping[str, EvictionCut] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The version that stands once this is committed."""
        return self.sums.version + 1


@dataclass(frozen=True, slots=True)
class Committed:
    """What came of a commit of pushes.

    Attributes:
        missing: Micro-batches whose pushes are not there; none: the version is committed, else nothing has changed.
        tables: That had a gradient; none where the version was made before.
        repeated: Whether it was.
    """

    missing: tuple[int, ...] = ()
    tables: tuple[str, ...] = ()
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class RowOffer:
    """What a store server has of a table whose `max_rows` is for the rows of all servers, were a version committed.

    Attributes:
        rows: That would stay but for `max_rows`.
        touched: The versions that last touched them, the oldest first and no more than asked for, and how many rows
            each touched.
        ids: Of the whole table: those asked for.
    """

    rows: int
    touched: tuple[tuple[int, int], ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowOffers:
    """The offers of a store server by table; `missing`: as of `Measured`."""

    tables: Mapping[str, RowOffer] = field(default_factory=dict)
    missing: tuple[int, ...] = ()
