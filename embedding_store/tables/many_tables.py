"""Many tables at once: lookups, side by side in one buffer or each in separate memory, and updates."""

from collections.abc import Sequence
from typing import Literal, get_args, overload

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_source import LookupRequest
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import shared_pool
from elastable.embedding_store.tables.checks import array_kind, as_ids
from elastable.embedding_store.tables.lookups import Bags, lookup_request
from elastable.embedding_store.tables.table import EmbeddingTable
from elastable.embedding_store.tables.table_update import SparseGradient, TableSlices, apply_updates, check_updates

LookupStrategy = Literal["sequential", "one-thread-per-table", "preallocated"]

_Wanted = npt.ArrayLike | Bags


@overload
def lookup_many(
    tables: Sequence[EmbeddingTable],
    ids: Sequence[_Wanted] | npt.NDArray[np.generic],
    strategy: Literal["sequential", "one-thread-per-table"],
    out: Sequence[Float32] | None = None,
    *,
    axis: int | None = None,
    version: int | None = None,
) -> list[Float32]: ...


@overload
def lookup_many(
    tables: Sequence[EmbeddingTable],
    ids: Sequence[_Wanted] | npt.NDArray[np.generic],
    strategy: Literal["preallocated"] = "preallocated",
    out: Float32 | None = None,
    *,
    prepend_columns: int = 0,
    axis: int | None = None,
    version: int | None = None,
) -> Float32: ...


def lookup_many(
    tables: Sequence[EmbeddingTable],
    ids: Sequence[_Wanted] | npt.NDArray[np.generic],
    strategy: LookupStrategy = "preallocated",
    out: Float32 | Sequence[Float32] | None = None,
    *,
    prepend_columns: int = 0,
    axis: int | None = None,
    version: int | None = None,
) -> Float32 | list[Float32]:
    """What `table.lookup` gives for each table and its ids; the same numbers whatever the strategy.

    Args:
        tables: Of one store or of several; a table may be named more than once.
        ids: For each table ids `[n]`, or `Bags`; one n for all tables where the results are side by side. Or one array
            for all tables, such as the index matrix `[n, tables]` of a batch, one column a table.
        strategy: "preallocated": all results in one buffer; tables of a store are looked up together, at one version,
            their rows shared out over threads. "sequential": one table after the other, each on all threads.
            "one-thread-per-table": all tables at the same time.
        out: The buffer, float32 `[n, prepend_columns + sum of dims]`,
            C-contiguous; or, for the other strategies, an array for each table.
        prepend_columns: Columns left free before those of the first table, for the output of a dense network: as they
            were in `out`, zeros in a new buffer.
        axis: Of one array for all tables, the axis that counts tables: 1, as in `[n, tables]`; 0 for `[tables, n]`.
        version: When given, the version that must be current in every store.

    Returns:
        The buffer; or a list with the rows of each table.

    Raises:
        BadInput: another number of ids or outputs than of tables, or what
            `EmbeddingTable.lookup` refuses; nothing was looked up.
        StaleVersion, FutureVersion, StoreFailed, Unavailable: as `EmbeddingTable.lookup`.
    """
    if strategy not in get_args(LookupStrategy):
        raise BadInput(f"strategy {strategy!r}; known strategies are {', '.join(get_args(LookupStrategy))}")
    ids = _by_table(len(tables), ids, axis)
    if not tables or len(tables) != len(ids):
        raise BadInput(f"give ids for each table, and at least one table; got {len(tables)} tables, ids for {len(ids)}")
    if strategy == "preallocated":
        return _side_by_side(tables, ids, out, prepend_columns, version)
    if prepend_columns:
        raise BadInput(f"prepend_columns is for strategy 'preallocated'; got {prepend_columns} with {strategy!r}")
    if out is not None and (isinstance(out, np.ndarray) or len(out) != len(tables)):
        raise BadInput(f"out must be a sequence of {len(tables)} arrays, one for each table")
    outputs: Sequence[Float32 | None] = [None] * len(tables) if out is None else list(out)
    requests = [lookup_request(table.spec, of, to) for table, of, to in zip(tables, ids, outputs, strict=True)]
    _refuse_overlaps(requests)
    at_once = strategy == "one-thread-per-table"

    def look_up(start: int, stop: int) -> None:
        for number in range(start, stop):
            tables[number].store.lookup_into([requests[number]], version, split=not at_once)

    if at_once:
        shared_pool().share(look_up, len(tables), 1)
    else:
        look_up(0, len(tables))
    return [
        request.out if isinstance(of, Bags) else request.out.reshape(*np.shape(of), table.dim)
        for table, request, of in zip(tables, requests, ids, strict=True)
    ]


def _by_table(count: int, ids: Sequence[_Wanted] | npt.NDArray[np.generic], axis: int | None) -> Sequence[_Wanted]:
    """What is wanted of each table; a square matrix tells nobody by its shape which way it is meant."""
    if not hasattr(ids, "__array__"):
        if axis is not None:
            raise BadInput(f"axis={axis} is for one array of all tables' ids; got {type(ids).__name__}, ids by table")
        return ids
    matrix = np.asarray(ids)
    axis = 1 if axis is None else axis
    if axis not in (0, 1) or matrix.ndim < 2 or matrix.shape[axis] != count:
        raise BadInput(
            f"ids {list(matrix.shape)} for {count} tables: give [n, {count}], one column a table; or [{count}, n] with "
            f"axis=0; got axis={axis}"
        )
    return list(np.moveaxis(matrix, axis, 0))


def _side_by_side(
    tables: Sequence[EmbeddingTable],
    ids: Sequence[_Wanted],
    out: Float32 | Sequence[Float32] | None,
    prepend_columns: int,
    version: int | None,
) -> Float32:
    if prepend_columns < 0:
        raise BadInput(f"prepend_columns must not be negative, got {prepend_columns}")
    rows = [_row_count(table, of) for table, of in zip(tables, ids, strict=True)]
    if len(set(rows)) > 1:
        counts = ", ".join(f"{table.name!r}: {count}" for table, count in zip(tables, rows, strict=True))
        raise BadInput(f"results side by side need one number of rows; got {counts}")
    buffer = _buffer(rows[0], prepend_columns, sum(table.dim for table in tables), out)
    requests: dict[int, list[LookupRequest]] = {}
    stores: dict[int, EmbeddingStore] = {}
    column = prepend_columns
    for table, of in zip(tables, ids, strict=True):
        own = buffer[:, column : column + table.dim]
        column += table.dim
        stores[id(table.store)] = table.store
        requests.setdefault(id(table.store), []).append(lookup_request(table.spec, of, own, of_wider=True))
    for key, store in stores.items():
        store.lookup_into(requests[key], version)
    return buffer


def _row_count(table: EmbeddingTable, wanted: _Wanted) -> int:
    if not isinstance(wanted, Bags):
        shape = as_ids(wanted, table.name).shape
        if len(shape) != 1:
            raise BadInput(f"table {table.name!r}: rows side by side come from ids [n] or Bags, got ids {list(shape)}")
        return int(shape[0])
    if wanted.offsets is None:
        return len(np.atleast_1d(as_ids(wanted.ids, table.name)))
    offsets = wanted.offsets if isinstance(wanted.offsets, np.ndarray) else np.asarray(wanted.offsets, object)
    return len(np.atleast_1d(offsets)) - 1  # what they hold is looked at later


def _buffer(rows: int, free: int, width: int, out: object) -> Float32:
    shape = (rows, free + width)
    if out is None:
        buffer = np.empty(shape, np.float32)
        buffer[:, :free] = 0
        return buffer
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != shape:
        raise BadInput(
            f"out must be float32 {list(shape)}, {free} columns left free and {width} of tables; got {array_kind(out)}"
        )
    if not out.flags.writeable or not out.flags.c_contiguous:
        raise BadInput("out must be C-contiguous and writable")
    return out


def _refuse_overlaps(requests: Sequence[LookupRequest]) -> None:
    for number, request in enumerate(requests):
        for other in requests[:number]:
            if np.may_share_memory(request.out, other.out):
                raise BadInput(f"the outputs of tables {other.table!r} and {request.table!r} overlap")


def update_many(
    tables: Sequence[EmbeddingTable],
    optimizers: OptimizerSpec | Sequence[OptimizerSpec | None] | None,
    slices: Sequence[SparseGradient],
    *,
    step: int | None = None,
) -> list[int]:
    """`update_tables` for tables of any stores: all tables of one store in one commit.

    Everything is checked before anything is changed. A store that fails then
    leaves the tables of the stores after it as they were.

    Args:
        tables: The tables, each once.
        optimizers: One for all of them, or one each; None: the table's own.
        slices: The gradient of each, `values` and `indices` as of `IndexedSlices`.
        step: As of `update_tables`.

    Returns:
        For each table the version of its store that this made.

    Raises:
        BadInput: not as many optimizers or slices as tables; and as `update_tables`.
    """
    each = [optimizers] * len(tables) if optimizers is None or isinstance(optimizers, OptimizerSpec) else optimizers
    if not len(tables) == len(each) == len(slices):
        raise BadInput(
            f"update_many of {len(tables)} tables: got {len(each)} optimizers and {len(slices)} slices, want one each"
        )
    of_store: dict[int, list[int]] = {}
    for number, table in enumerate(tables):
        of_store.setdefault(id(table.store), []).append(number)
    updates = [TableSlices(*of) for of in zip([table.spec for table in tables], slices, each, strict=True)]
    checked = {key: check_updates([updates[number] for number in numbers]) for key, numbers in of_store.items()}
    made = {key: apply_updates(tables[numbers[0]].store, checked[key], step) for key, numbers in of_store.items()}
    return [made[id(table.store)] for table in tables]
