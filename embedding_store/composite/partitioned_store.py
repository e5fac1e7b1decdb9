"""Tables split over several stores, by id or by column, or each table in one of them."""

from collections.abc import Mapping, Sequence

from elastable.embedding_store.composite.composite_store import CompositeSnapshot, CompositeSource, CompositeStore
from elastable.embedding_store.composite.partitions import (
    Partition,
    TableSplits,
    partition,
    partition_of_shards,
    whole_table,
)
from elastable.embedding_store.composite.store_group import StoreGroup
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, BadSpec, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.support.store_url import STRATEGIES


class PartitionedSource(CompositeSource[RowSource]):
    """Rows of tables that are split over several sources. How a table was split is read from them.

    Args:
        shards: In the order in which the tables were split; closed with this source.
        timeout_s: As of `StoreGroup`.

    Raises:
        BadInput: there are no shards, or one is given twice.
    """

    def __init__(self, shards: Sequence[RowSource], timeout_s: float = 60.0) -> None:
        super().__init__(StoreGroup(shards, _SplitTables(len(shards), sums_apart=None), timeout_s))


class PartitionedSnapshot(CompositeSnapshot):
    """Rows of tables that are split over several snapshots of one version.

    Args:
        shards, timeout_s: As of `PartitionedSource`.
        version: Of all of them.
    """

    def __init__(self, shards: Sequence[Snapshot], version: int, timeout_s: float = 60.0) -> None:
        super().__init__(shards, _SplitTables(len(shards), sums_apart=None), version, timeout_s)


class PartitionedStore(CompositeStore):
    """Embedding tables split over several stores, each shard a store of any kind.

    A commit that broke off may be repeated by this process or by another one.

    Args:
        stores: The shards, in the order in which existing tables were split; closed with this store.
        strategy: How tables that are created here are split: "token" (ids) or "encoding" (columns). Existing tables
            record how they were split.
        strategies: Table name -> strategy, for tables that are split otherwise.
        timeout_s: As of `StoreGroup`.
        sums_apart: Whether gradients are summed where the shards are, which then keep to budgets of rows (`max_rows`)
            together.

    Raises:
        BadSpec: an unknown strategy; the known ones are listed.
        BadInput: there are no stores, or one is given twice.
        Unavailable, StoreFailed: as the stores.
    """

    def __init__(
        self,
        stores: Sequence[EmbeddingStore],
        strategy: str = "token",
        *,
        strategies: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        sums_apart: bool = False,
    ) -> None:
        for table, name in (("", strategy), *(strategies or {}).items()):
            if name not in STRATEGIES:
                where = f"table {table!r}: " if table else ""
                raise BadSpec(f"{where}strategy {name!r}; known strategies are {', '.join(STRATEGIES)}")
        splits = _SplitTables(len(stores), strategy, strategies or {}, sums_apart)
        super().__init__(stores, splits, timeout_s, repairs_unknown=True)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.group.sources)


class _SplitTables(TableSplits):
    """Every table on all shards, by a strategy; `sums_apart` as of `PartitionedStore`, None of what is only read."""

    def __init__(
        self, shards: int, strategy: str = "token", strategies: Mapping[str, str] = {}, sums_apart: bool | None = False
    ) -> None:
        super().__init__([f"shard {number} of {shards}" for number in range(shards)])
        self._strategy = strategy
        self._strategies = dict(strategies)
        self._sums_apart = sums_apart

    def plan(self, spec: TableSpec) -> Partition:
        return self._checked(partition(spec, self._strategies.get(spec.name, self._strategy), len(self.stores)))

    def read(self, name: str, held: Sequence[TableSpec | None]) -> tuple[Partition, list[int]]:
        found, lacking = partition_of_shards(name, held)
        return self._checked(found), lacking

    def _checked(self, table: Partition) -> Partition:
        optimizer = row_optimizer(table.spec.optimizer)
        if self._sums_apart and len(self.stores) > 1 and not table.whole_rows and optimizer.cross_column:
            raise Unsupported(
                f"table {table.spec.name!r}: {optimizer.shown_name!r} needs gradients of whole rows, and store servers "
                "sum columns apart; use the token partition, which splits by id"
            )
        rule, parts = table.spec.eviction, [spec for spec in table.shards if spec is not None]
        split = rule is not None and rule.max_rows is not None and any(spec.shares_rows for spec in parts)
        if split and self._sums_apart is False:
            raise Unsupported(
                f"table {table.spec.name!r}: eviction by max_rows needs all rows in one place, and the token partition "
                "puts them on several shards; use store servers (--stores), which decide together, max_age or "
                "min_frequency, or the encoding partition"
            )
        return table


class PlacedStore(CompositeStore):
    """Tables in different kinds of stores, at one version.

    Args:
        stores: Location -> the store there; closed with this one.
        places: Table name -> its location.
        default: The location of tables that `places` does not name.
        timeout_s: As of `StoreGroup`.

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
