"""Which store holds which part of which table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from elastable.embedding_store.composite.splits.partition import Partition
from elastable.embedding_store.contract.spec import TableSpec

__all__ = ["TableSplits"]


class TableSplits(ABC):
    """Decides how each table lies on several stores.

    Args:
        stores: What errors call each store, such as "shard 0 of 2".
    """

    def __init__(self, stores: Sequence[str]) -> None:
        self.stores = tuple(stores)

    @abstractmethod
    def plan(self, spec: TableSpec) -> Partition:
        """How a new table will be split.

        Raises:
            BadSpec: an optimizer that is not known here.
            Unsupported: the table cannot be split this way.
        """

    def owns(self, store: int, table: str) -> bool:
        """Whether a store may hold a part of a table of this name; what it holds under that name is ignored if not."""
        return True

    @abstractmethod
    def read(self, name: str, held: Sequence[TableSpec | None]) -> tuple[Partition, list[int]]:
        """How an existing table was split, and which stores lack their part of it.

        Args:
            name: Name of the table.
            held: Its spec on each store; None where the store does not have it. At least one has.

        Raises:
            StoreFailed: the table was not split over these stores in this order.
        """
