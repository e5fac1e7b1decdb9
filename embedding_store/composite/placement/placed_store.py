"""Several stores as one, with each table in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastable.embedding_store.composite.coordinator.composite_store import CompositeStore
from elastable.embedding_store.composite.splits.partition import Partition, whole_table
from elastable.embedding_store.composite.splits.table_splits import TableSplits
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput

__all__ = ["PlacedStore"]


class PlacedStore(CompositeStore):
    """Tables in different kinds of stores, at one version.

    Args:
        stores: Location -> the store there; closed with this one.
        places: Table name -> its location.
        default: The location of tables that `places` does not name.
        timeout_s: As of `CompositeStore`.

    Raises:
        BadInput: a location without a store, or a store that is given twice.
    """

    def __init__(
        self, stores: Mapping[str, EmbeddingStore], places: Mapping[str, str], default: str, timeout_s: float = 60.0
    ) -> None:
        for place in {*places.values(), default}:
            if place not in stores:
                raise BadInput(f"no store for the place {place!r}; stores are given for {', '.join(sorted(stores))}")
        order = sorted(stores, key=lambda place: (place == "memory", place))  # a store that keeps records comes first
        self._tables = _PlacedTables(order, places, default)
        super().__init__([stores[place] for place in order], self._tables, timeout_s)

    def place(self, table: str) -> str:
        """The location of a table of this name."""
        return self._tables.place(table)


class _PlacedTables(TableSplits):
    """Every table as a whole in one store."""

    def __init__(self, order: Sequence[str], places: Mapping[str, str], default: str) -> None:
        super().__init__([f"the {place} store" for place in order])
        self._numbers = {place: number for number, place in enumerate(order)}
        self._places = dict(places)
        self._default = default

    def place(self, table: str) -> str:
        return self._places.get(table, self._default)

    def owns(self, store: int, table: str) -> bool:
        return self._numbers[self.place(table)] == store

    def plan(self, spec: TableSpec) -> Partition:
        return whole_table(spec, self._numbers[self.place(spec.name)], len(self.stores))

    def read(self, name: str, held: Sequence[TableSpec | None]) -> tuple[Partition, list[int]]:
        (spec,) = (spec for spec in held if spec is not None)
        return self.plan(spec), []
