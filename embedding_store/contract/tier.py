"""What every tier promises: rows as records of a fixed size, kept outside of the engine's memory. No versions."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import BadInput


@dataclass(frozen=True, slots=True)
class TierTable:
    """A table as a tier knows it.

    Attributes:
        name: Its name, any text.
        record_bytes: Bytes of every record, at least 1.
        description: What the engine wants to find again: kept as it is, and never read by the tier.
        first_bytes: How many bytes of a record are often read alone; 0: none. Only speed depends on it, and a tier may
            forget it: records can be read as narrow as one likes.
    """

    name: str
    record_bytes: int
    description: bytes = field(default=b"", repr=False)
    first_bytes: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise BadInput(f"the name of a table must be text, got {self.name!r}")
        if not 0 <= self.first_bytes <= self.record_bytes or self.record_bytes < 1:
            raise BadInput(
                f"table {self.name!r}: record_bytes must be at least 1, and first_bytes from 0 to that; got "
                f"{self.record_bytes} and {self.first_bytes}"
            )

    def require_scan(self, block_rows: int, width: int) -> None:
        """Raises `BadInput` where blocks of so many records, of so many bytes each, cannot be scanned."""
        if block_rows < 1 or not 0 <= width <= self.record_bytes:
            raise BadInput(
                f"table {self.name!r}: block_rows={block_rows} must be at least 1, and width={width} at most "
                f"{self.record_bytes}"
            )


@dataclass(frozen=True, slots=True)
class Records:
    """Records of one table, to be read or to be written.

    Attributes:
        table: Its name.
        ids: int64 `[n]`, each once; a tier that is not `far` may be asked for one twice.
        positions: int64 `[n]`: where the engine keeps each row, from 0 on. An id keeps its position until
            it is deleted. A tier keeps records by id or by position, whichever suits it.
        rows: uint8 `[n, record_bytes]`, C-contiguous. When read, it may be narrower: the first bytes of each record.
    """

    table: str
    ids: Int64
    positions: Int64
    rows: UInt8

    def require_fit(self, record_bytes: int, whole: bool) -> None:
        """Raises `BadInput` unless these are records of so many bytes; not `whole`: at most, to be read."""
        ids, positions, rows, n = self.ids, self.positions, self.rows, len(self.ids)
        typed = ids.dtype == positions.dtype == np.int64 and rows.dtype == np.uint8 and rows.flags.c_contiguous
        shaped = ids.shape == positions.shape == (n,) == rows.shape[:1] and rows.ndim == 2
        if not (typed and shaped) or (rows.shape[1] != record_bytes if whole else rows.shape[1] > record_bytes):
            raise BadInput(
                f"table {self.table!r}: ids are {ids.dtype} {ids.shape}, positions {positions.dtype} {positions.shape} "
                f"and rows {rows.dtype} {rows.shape}; they must be int64 [{n}] and C-contiguous uint8 "
                f"[{n}, {'' if whole else 'at most '}{record_bytes}]"
            )


class MappedRecords(NamedTuple):
    """Records of a table that lie in memory side by side, by position, in the form of `native/record_checks`.

    Attributes:
        file: uint8: what is mapped; empty: nothing is.
        begin: Where in it record 0 lies, in bytes.
        items: How many records there may be.
        first: Bytes of a record's first part, which a lookup needs.
        stride: Bytes from one record to the next.
    """

    file: UInt8
    begin: int
    items: int
    first: int
    stride: int


class Tier(Closing):
    """Records of tables. One process writes; `read` may run on several threads, also during one `write`.

    A tier has no transactions. Whatever was being written when the process died, may be there or not, row by row: the
    engine writes it again, from its log.

    Attributes:
        far: Whether a call is a round trip: the store then reads ahead, all tables at once, and keeps what it reads.
    """

    far = True

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the records are, for messages; without passwords."""

    @property
    @abstractmethod
    def keeps_positions(self) -> bool:
        """Whether records are kept by position: `scan` gives positions then, and these ids must get them again."""

    @abstractmethod
    def tables(self) -> dict[str, TierTable]:
        """Every table, by name.

        Raises:
            StoreBroken: part of a table is lost, or it is not what was written last; names it.
        """

    @abstractmethod
    def create(self, table: TierTable) -> None:
        """Adds an empty table. Raises `SpecConflict` where there is another one of its name."""

    @abstractmethod
    def drop(self, table: str) -> None:
        """Deletes a table with its records; nothing happens where there is none."""

    @abstractmethod
    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        """Reads records of several tables in one batch, into `rows` of each.

        Returns:
            For each table int64: the indices of ids that have no record. Their rows are left as they were.

        Raises:
            StoreBroken: part of a table is lost. An id that only has no record is no error.
            StoreFailed, Unavailable, DeadlineExceeded: nothing can be said; rows may be half read.
        """

    def mapped(self, table: str) -> MappedRecords | None:
        """Where lookups find a table's records in memory, so that they need not ask; None (inherited): nowhere.

        What is found there may be torn, or not there yet: then they ask after all. Raises as `read`.
        """
        return None

    @abstractmethod
    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        """Deletes records, then writes records; a record that is there is replaced.

        Args:
            changed: Records, whole.
            deleted: Table -> ids and positions, int64 `[n]` each; some may have no record. A position that is given
                to another id is also in `changed`.
            sequence: Number of the last log entry that these records include; never less than before.

        Raises:
            StoreFailed, Unavailable, DeadlineExceeded: some may have been written; repeat all of it.
            TakenOver: another process owns the tier now.
        """

    @property
    @abstractmethod
    def sequence(self) -> int:
        """The greatest `sequence` that any `write` began with, by any process; 0: there was none."""

    @abstractmethod
    def scan(self, table: str, block_rows: int = 65_536, width: int | None = None) -> Iterator[Records]:
        """Every record, in any order, in blocks of at most `block_rows`; nobody writes meanwhile.

        Args:
            table: Its name.
            block_rows: At least 1.
            width: Only the first bytes of each record; 0: ids and positions alone. None: whole records.

        Returns:
            Blocks whose arrays are the caller's. Positions are -1 unless `keeps_positions`.
        """

    def doubtful(self, table: str) -> Int64:
        """Ids, int64, whose records fail a check that the last `scan` made, and were not written or deleted since.

        What the scan gave as their rows means nothing. A record that `read` finds so is an error.
        """
        return np.empty(0, np.int64)

    @abstractmethod
    def state(self) -> bytes | None:
        """What `put_state` was last given; None: nothing yet.

        Raises:
            StoreBroken: it is corrupt.
        """

    @abstractmethod
    def put_state(self, state: bytes) -> None:
        """Keeps bytes of the engine in place of the last ones, whole or not at all.

        On return everything written before is as durable as this tier makes it, and `tables` finds out if it is lost.

        Raises:
            TakenOver: another process owns the tier now.
        """

    def other_writer(self) -> str | None:
        """`<host>:<process>` of another process that is connected to write; None: there is none, as far as one sees."""
        return None

    def take_over(self) -> None:
        """Makes this process the only one that can write. Taken again, it keeps even earlier connections out."""

    def require_owner(self) -> None:
        """Raises `TakenOver` where another process has taken over since."""
