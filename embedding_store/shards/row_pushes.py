"""Row gradients that workers push to store servers, how a master has them summed and clipped, and which rows go."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import EvictionCut, StayingRows
from elastable.embedding_store.errors import StoreFailed

__all__ = [
    "FEW_VERSIONS",
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
    "cut_of",
    "offer_of",
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
            `elastable.embedding_store.shards.version_sums.UNIT`.
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
    ends_replay_epoch: bool = False
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


# A budget of rows (`max_rows`) over store servers: what each of them offers, and which rows of all of them go


FEW_VERSIONS = 4096
"""Of how many versions servers are asked at first."""

_MORE = 16  # times as many, where those were not enough
_MOST_VERSIONS = 1 << 30
_NEVER = 1 << 63

Ask = Callable[[int, tuple[int, int] | None], Sequence[RowOffer]]
"""(most versions, which ids) -> the offers of all servers; as of `ShardServer.offer_rows`."""


def offer_of(rows: StayingRows, most: int, ids: tuple[int, int] | None) -> RowOffer:
    """What a server offers of its rows; `most`, `ids`: as of `ShardServer.offer_rows`."""
    versions, counts = np.unique(rows.versions, return_counts=True)
    touched = tuple(zip(versions[:most].tolist(), counts[:most].tolist(), strict=True))
    greatest: tuple[int, ...] = ()
    if ids is not None:
        version, n = ids
        greatest = tuple(heapq.nlargest(n, rows.ids[rows.versions == version].tolist()))
    return RowOffer(len(rows.ids), touched, greatest)


def cut_of(max_rows: int, offers: Sequence[RowOffer], ask: Ask) -> EvictionCut:
    """Which rows go so that `max_rows` of all servers' stay: those touched last, and of equal ones the smaller ids.

    Args:
        max_rows: Of the table.
        offers: Of all servers, with `FEW_VERSIONS` versions.
        ask: Asks all servers again.

    Raises:
        StoreFailed: a server does not say what it has.
    """
    most = FEW_VERSIONS
    goes = sum(offer.rows for offer in offers) - max_rows
    if goes <= 0:
        return EvictionCut(0)
    while (found := _nth_oldest(offers, goes)) is None:
        most *= _MORE
        if most > _MOST_VERSIONS:
            raise StoreFailed(f"{goes} rows go for max_rows={max_rows}, and store servers do not list that many")
        offers = ask(most, None)
    version, of_it, all_of_it = found
    if of_it == all_of_it:
        return EvictionCut(version + 1)
    ids = heapq.nlargest(of_it, (number for offer in ask(0, (version, of_it)) for number in offer.ids))
    if len(ids) < of_it:
        raise StoreFailed(f"store servers list {len(ids)} of {of_it} rows that were last touched at version {version}")
    return EvictionCut(version, ids[-1])


def _nth_oldest(offers: Sequence[RowOffer], n: int) -> tuple[int, int, int] | None:
    """The version of the n-th oldest row, how many rows of it are among the n oldest, and how many there are.

    None: the servers have listed too few versions to tell.
    """
    counts: dict[int, int] = {}
    for offer in offers:
        for version, count in offer.touched:
            counts[version] = counts.get(version, 0) + count
    cut_short = [offer for offer in offers if sum(count for _, count in offer.touched) < offer.rows]
    limit = min((offer.touched[-1][0] if offer.touched else -1 for offer in cut_short), default=_NEVER)
    for version in sorted(counts):
        if version > limit:
            return None
        if counts[version] >= n:
            return version, n, counts[version]
        n -= counts[version]
    return None
