"""The contract of one version of a store, readable: its rows, their slots, and what its tables keep besides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.row_source import RowSource

__all__ = ["Snapshot"]


class Snapshot(RowSource):
    """One version of a store. Checkpoints, evaluations and exports read from here and from nowhere else.

    `EmbeddingStore.pin` returns one that stays exactly as it is until it is closed or its lease ends, whatever is
    committed meanwhile. A store is itself the snapshot of its current version, valid until the next change.

    A pinned version can also be looked up at the store, or at any reader of it, by its number. While it is the current
    version, such a lookup sees rows that were put or deleted by hand since the pin; the pin does not.

    Every read of a pin raises `StaleVersion` once it is gone: closed, not renewed within its lease, or given up because
    its before-images would take more memory than the store allows.
    """

    @property
    def pinned(self) -> bool:
        """Whether the version stays readable while commits continue; False for a store."""
        return True

    @abstractmethod
    def renew(self, lease_s: float | None = None) -> None:
        """Restarts the lease, for `lease_s` seconds (None: as long as before). A store has no lease and does nothing.

        Raises:
            StaleVersion: the pin is gone.
        """

    @abstractmethod
    def row_count(self, table: str) -> int:
        """Rows of the table that hold a value of their own. Raises `TableNotFound`."""

    @abstractmethod
    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Every row that holds a value of its own, once, in blocks of at most `block_rows`, in any order.

        A store that changes during the scan shows the change in later blocks; a pin does not.

        Raises:
            TableNotFound: there is no table of that name.
            BadInput: `block_rows` is below 1.
        """

    @abstractmethod
    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """Rows with their slots: of `ids` int64 `[n]`, each once, those that hold a value of their own, in that order.

        Raises:
            TableNotFound, BadIds, IdOutOfRange: as `lookup`.
        """

    def table_state(self, table: str) -> TableState:
        """What the table keeps besides its rows; arrays are copies.

        Raises:
            TableNotFound: there is no table of that name.
        """
        return TableState()
