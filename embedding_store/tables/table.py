"""One table of a store, as whoever uses it without a cluster holds it; and what sources and stores of tables share."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableStatistics
from elastable.embedding_store.contract.row_source import LookupRequest, RowSource
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, TableNotFound
from elastable.embedding_store.native.row_fold import fold_bags
from elastable.embedding_store.native.row_gather import scatter_rows
from elastable.embedding_store.tables.checks import as_ids, require_gradients
from elastable.embedding_store.tables.lookups import Bags, lookup_request, require_width
from elastable.embedding_store.tables.table_update import (
    IndexedSlices,
    SparseGradient,
    TableSlices,
    apply_updates,
    check_updates,
    commit_next,
)


class EmbeddingTable:
    """A view of one table of any store; rows lie in the store. `EmbeddingStore.table` makes one.

    Attributes:
        store: Where the table is.
        spec: What it is.
    """

    def __init__(self, store: EmbeddingStore, name: str) -> None:
        """Raises `TableNotFound` where the store has no table of that name."""
        specs = store.specs()
        if name not in specs:
            raise TableNotFound(f"no table {name!r}; tables here: {', '.join(sorted(specs)) or 'none'}")
        self.store = store
        self.spec: TableSpec = specs[name]

    @property
    def name(self) -> str:
        """Unique in the store."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """Values in a row."""
        return self.spec.dim

    def lookup(
        self,
        ids: npt.ArrayLike | Bags,
        out: Float32 | None = None,
        *,
        combiner: str | None = None,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        version: int | None = None,
    ) -> Float32:
        """The rows of ids, or of bags of ids with a combiner.

        A row that was never updated reads its initial value, and reading it writes nothing. A bag is summed in float32
        in the order of its ids, beginning with zero, whatever the store and its threads; an empty bag gives zeros.

        Args:
            ids: Integers: of any shape without a combiner; `[n, bag]` or, with
                offsets, `[m]` with one. Or `Bags`, which hold the next three.
            out: float32 to write into, C-contiguous, of the shape returned.
            combiner: "sum", "mean" or "sqrtn", as in `Bags`; None: a row an id.
            offsets: Integers `[n + 1]`, as in `Bags`.
            weights: float32 of the ids' shape, as in `Bags`.
            version: When given, the version to read: the current one, or one that is pinned.

        Returns:
            float32, ids' shape + `[dim]` or `[n, dim]`: `out`, if it was given.

        Raises:
            BadIds, IdOutOfRange: naming table, id and position.
            BadInput: combiner, weights or `out` that cannot be, named.
            StaleVersion, FutureVersion: another version is current, and this one is not pinned.
            StoreFailed, Unavailable: the backend failed.
        """
        if not (combiner is None and offsets is None and weights is None):
            ids = self._wanted(ids, combiner, offsets, weights)
        request = lookup_request(self.spec, ids, out)
        self.store.lookup_into([request], version)
        if out is not None:
            return out
        return request.out if isinstance(ids, Bags) else request.out.reshape(*np.shape(ids), self.spec.dim)

    def lookup_gradient(
        self,
        ids: npt.ArrayLike | Bags,
        gradient: npt.ArrayLike,
        *,
        combiner: str | None = None,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
    ) -> IndexedSlices:
        """The gradient of the rows, given that of what a lookup returned: for `update`.

        Of a bag each row gets the bag's gradient times its weight, divided as
        the combiner divides; a bag whose divisor is zero gives zeros.

        Args:
            ids, combiner, offsets, weights: As of the lookup.
            gradient: float32, of the shape that the lookup returned.

        Returns:
            values float32 `[m, dim]` and indices int64 `[m]`, one for each id in its order; ids may repeat.

        Raises:
            BadGradient: a gradient of another dtype or shape.
            BadIds, BadInput: as `lookup`.
        """
        wanted, given = self._wanted(ids, combiner, offsets, weights), np.asarray(gradient)
        request = lookup_request(self.spec, wanted)
        if not isinstance(wanted, Bags) and given.ndim:
            given = given.reshape(-1, given.shape[-1]) if given.size else np.empty((0, self.dim), given.dtype)
        rows = len(request.ids if request.offsets is None else request.out)
        return IndexedSlices(_spread(request, require_gradients(self.spec, rows, given)), request.ids)

    def update(self, optimizer: OptimizerSpec | None, slices: SparseGradient, *, step: int | None = None) -> int:
        """One optimizer step on the rows of a gradient, which are written in one commit.

        Gradients of one id are summed in their order, then the id takes one step. Nothing of the size of the gradient
        is allocated once batches have settled.

        Args:
            optimizer: The table's own, perhaps with another learning rate; None: as the table has it.
            slices: `IndexedSlices`: values float32 `[n, dim]`, indices integers `[n]`.
            step: Optimizer steps taken before this one (Keras' `iterations`);
                None: as many as the store has versions.

        Returns:
            The version of the store that this made.

        Raises:
            BadInput: another optimizer than the table's.
            BadIds, IdOutOfRange, BadGradient: indices or values that do not fit.
            Whatever else `EmbeddingStore.commit` raises; no row has changed then.
        """
        return apply_updates(self.store, check_updates([TableSlices(self.spec, slices, optimizer)]), step)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim): of a fixed table all rows; of a table of any ids those that hold a value."""
        size = self.spec.vocabulary_size
        return self.row_count if size is None else size, self.dim

    @property
    def row_count(self) -> int:
        """Rows that hold a value."""
        return self.store.row_count(self.name)

    def __len__(self) -> int:
        return self.row_count

    def scan(self, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Every row that holds a value, in blocks, in any order."""
        return self.store.scan(self.name, block_rows)

    def put(self, blocks: Iterable[RowBlock]) -> None:
        """Writes rows and their slots as they are.

        Raises:
            Whatever `EmbeddingStore.put` raises.
        """
        self.store.put(self.name, (replace(block, trained=False) for block in blocks))

    def delete(self, ids: npt.ArrayLike) -> int:
        """Takes rows away by their ids, as in `EmbeddingStore.delete`; returns how many there were."""
        return self.store.delete(self.name, as_ids(ids, self.name).reshape(-1))

    def statistics(self) -> TableStatistics:
        return self.store.table_statistics(self.name)

    def clear(self) -> None:
        """Forgets every row; they read their initial values again."""
        self.store.clear(self.name)

    def _wanted(
        self,
        ids: npt.ArrayLike | Bags,
        combiner: str | None,
        offsets: npt.ArrayLike | None,
        weights: npt.ArrayLike | None,
    ) -> npt.ArrayLike | Bags:
        """Ids, or bags where there is a combiner. Raises `BadInput` for what belongs to bags without any."""
        if combiner is not None and not isinstance(ids, Bags):
            return Bags(ids, combiner, offsets, weights)
        if not (combiner is None and offsets is None and weights is None):
            reason = "Bags hold" if isinstance(ids, Bags) else "a combiner is needed for"
            raise BadInput(f"table {self.name!r}: {reason} offsets, weights and how they are combined")
        return ids

    def __repr__(self) -> str:
        size = "dynamic" if self.spec.vocabulary_size is None else f"{self.spec.vocabulary_size} rows"
        return f"<EmbeddingTable {self.name!r}: {size} x {self.dim} {self.spec.dtype} in {type(self.store).__name__}>"


def size(table: EmbeddingTable) -> tuple[int, int]:
    """(rows, dim) of a table, as `EmbeddingTable.shape`."""
    return table.shape


def _spread(request: LookupRequest, upstream: Float32) -> Float32:
    """float32 `[m, dim]`: what of the gradient of each bag goes to each of its ids."""
    if request.offsets is None:
        return upstream
    divisors = _divisors(request)
    if divisors is not None:
        known = divisors != 0  # else the bag is zeros, whatever its rows are
        upstream = np.divide(upstream, divisors[:, None], out=np.zeros_like(upstream), where=known[:, None])
    values: Float32 = np.repeat(upstream, np.diff(request.offsets), axis=0)
    if request.weights is not None:
        values *= request.weights[:, None]
    return values


def _divisors(request: LookupRequest) -> Float32 | None:
    """float32 `[bags]`: what the sum of each bag is divided by; None: by nothing."""
    if request.combiner == "sum" or request.offsets is None:
        return None
    sizes = np.diff(request.offsets)
    totals: Float32 = sizes.astype(np.float32)
    if request.weights is not None:
        terms = request.weights if request.combiner == "mean" else np.square(request.weights)
        full = sizes > 0
        totals = np.zeros(len(sizes), np.float32)
        if full.any():
            totals[full] = np.add.reduceat(terms, request.offsets[:-1][full])
    return totals if request.combiner == "mean" else np.sqrt(totals)


class BaseSource(RowSource):
    """A source that answers requests by its plain `lookup`, one for all of them."""

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        parts: dict[str, list[Int64]] = {}
        for request in requests:
            parts.setdefault(request.table, []).append(request.ids)
        wanted = dict[str, Int64]()
        for name, ids in parts.items():
            wanted[name] = np.concatenate(ids) if len(ids) > 1 else ids[0]
        rows = self.lookup(wanted, version)
        begin = dict.fromkeys(parts, 0)
        for request in requests:
            start = begin[request.table]
            begin[request.table] = stop = start + len(request.ids)
            deliver(request, rows[request.table][start:stop])


class BaseStore(BaseSource, EmbeddingStore):
    """A store whose tables are `EmbeddingTable`s."""

    update = commit_next

    def table(self, of: TableSpec | str) -> EmbeddingTable:
        if isinstance(of, TableSpec):
            self.create_table(of)
        return EmbeddingTable(self, of.name if isinstance(of, TableSpec) else of)


def deliver(request: LookupRequest, rows: Float32) -> None:
    """Writes a request's output from the rows float32 `[m, dim]` of its ids."""
    if request.out.shape[1] != rows.shape[1]:
        require_width(request, rows.shape[1])
    if request.offsets is None:
        if request.places is None:
            request.out[...] = rows
        else:
            scatter_rows(np.ascontiguousarray(rows), request.places, request.out)
        return
    rows = np.ascontiguousarray(rows)
    order = np.arange(len(rows))
    fold_bags(rows, rows[:0], order, request.offsets, request.weights, request.combiner, request.out)
