"""How one table is divided over several stores: which rows and columns each of them holds.

Token: the row of id i is row `i // n` of shard `i mod n`. Division and modulo are Python's, so every int64 id, also a
negative one, has exactly one shard. Encoding: every shard holds `ceil(dim / n)` columns of every row; the last shards
hold fewer, and no padding is stored. Whole: one store holds all of the table. A shard without a row or column does not
hold the table.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate
from elastable.embedding_store.contract.row_source import LookupRequest
from elastable.embedding_store.contract.spec import ShardOrigin, TableSpec
from elastable.embedding_store.errors import BadSpec, StoreFailed, Unsupported
from elastable.embedding_store.native.intrinsics import copy_row
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_gather import gather
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.optimizers.fused import row_squares
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.support.store_url import STRATEGIES
from elastable.embedding_store.tables.table import deliver


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one shard holds of some ids.

    Attributes:
        shard: Number of the shard.
        ids: int64 `[m]`, the shard's own ids.
        places: int64 `[m]`, their positions in the ids handed in; None: all of them, in order.
    """

    shard: int
    ids: Int64
    places: Int64 | None


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One table on several stores; made by `partition`, `partition_of_shards` or `whole_table`.

    Attributes:
        spec: The whole table.
        strategy: "token", "encoding" or "whole".
        shards: The table that every shard holds; None: nothing.
        columns: Which of the table's columns every shard holds.
        slot_columns: int64 `[w]`: which of the whole row's slots those of a shard's row are. A slot that is one for the
            whole row is on every shard.
    """

    spec: TableSpec
    strategy: str
    shards: tuple[TableSpec | None, ...]
    columns: tuple[slice, ...]
    slot_columns: tuple[Int64, ...]

    @property
    def holders(self) -> tuple[int, ...]:
        """The shards that hold something of the table."""
        return tuple(number for number, spec in enumerate(self.shards) if spec is not None)

    @property
    def whole_rows(self) -> bool:
        """Whether each row is on one shard."""
        return self.strategy != "encoding"

    def parts(self, ids: Int64) -> list[Part]:
        """Who is asked for `ids` int64 `[n]`, which have been checked; shards with none of them are left out."""
        if self.strategy != "token" or len(self.shards) == 1:
            return [Part(number, ids, None) for number in self.holders]
        local, places, ends = split_ids(ids, len(self.shards))
        starts = (0, *ends[:-1])
        return [
            Part(number, local[start:end], places[start:end])
            for number, (start, end) in enumerate(zip(starts, ends, strict=True))
            if start < end
        ]

    def update(self, part: Part, update: TableUpdate, squares: Float32 | None) -> TableUpdate:
        """The shard's share of an update; `squares` are those of `row_squares`."""
        gradients = self.cut(part, update.gradients)
        if squares is not None and part.places is not None:
            squares = squares[part.places]
        return TableUpdate(part.ids, gradients, squares)

    def row_squares(self, update: TableUpdate) -> Float32 | None:
        """What an optimizer that looks across columns must know of whole rows, once they are apart."""
        if update.row_squares is not None or self.whole_rows or not row_optimizer(self.spec.optimizer).cross_column:
            return update.row_squares
        return row_squares(np.ascontiguousarray(update.gradients))

    def block(self, part: Part, block: RowBlock) -> RowBlock:
        """The shard's share of a block of rows."""
        slots, touches = block.slots, block.touches
        if part.places is not None:
            slots, touches = slots[part.places], None if touches is None else touches[part.places]
        if not self.whole_rows:
            slots = slots[:, self.slot_columns[part.shard]]
        return RowBlock(part.ids, self.cut(part, block.weights), slots, touches, block.trained)

    def whole_ids(self, shard: int, ids: Int64) -> Int64:
        """The table's ids of a shard's ids."""
        return global_ids(ids, len(self.shards), shard) if self.strategy == "token" else ids

    def joined(self, blocks: Sequence[RowBlock]) -> RowBlock:
        """One block of the same ids from every holder, side by side; encoding only."""
        rows = len(blocks[0].ids)
        weights = np.empty((rows, self.spec.dim), np.float32)
        slots = np.empty((rows, row_optimizer(self.spec.optimizer).slot_width(self.spec.dim)), np.float32)
        for number, block in zip(self.holders, blocks, strict=True):
            weights[:, self.columns[number]] = block.weights
            slots[:, self.slot_columns[number]] = block.slots
        return RowBlock(blocks[0].ids, weights, slots, blocks[0].touches, blocks[0].trained)

    def cut(self, part: Part, rows: Float32) -> Float32:
        """The shard's share of rows float32 `[n, dim]`."""
        if part.places is not None:
            return gather_rows(np.ascontiguousarray(rows), part.places)
        return cut_columns(rows, self.columns[part.shard])


def partition(spec: TableSpec, strategy: str, shards: int) -> Partition:
    """How a table is divided over `shards` stores.

    Raises:
        BadSpec: no such strategy, no shards, or an optimizer that is not known here.
        Unsupported: the table cannot be split so; named are the table and why.
    """
    if strategy not in STRATEGIES:
        raise BadSpec(f"table {spec.name!r}: strategy {strategy!r}; known strategies are {', '.join(STRATEGIES)}")
    if shards < 1:
        raise BadSpec(f"table {spec.name!r}: it needs at least one shard, got {shards}")
    optimizer = row_optimizer(spec.optimizer)
    if strategy == "token":
        specs, columns = _token_specs(spec, shards), [slice(0, spec.dim)] * shards
    else:
        _refuse_encoding(spec, optimizer, shards)
        columns = encoding_columns(spec.dim, shards)
        specs = [_encoding_spec(spec, part, shards) for part in columns]
    slots = [_slot_columns(optimizer, spec.dim, part) for part in columns]
    return Partition(spec, strategy, tuple(specs), tuple(columns), tuple(slots))


def whole_table(spec: TableSpec, shard: int, shards: int) -> Partition:
    """All of a table on one of `shards` stores.

    Raises:
        BadSpec: its optimizer is not known here.
    """
    specs = tuple(spec if number == shard else None for number in range(shards))
    slots = np.arange(row_optimizer(spec.optimizer).slot_width(spec.dim))
    return Partition(spec, "whole", specs, (slice(0, spec.dim),) * shards, (slots,) * shards)


def encoding_columns(dim: int, shards: int) -> list[slice]:
    """The columns of every shard: `ceil(dim / shards)` each, fewer or none on the last ones."""
    width = -(-dim // shards)
    return [slice(min(dim, width * shard), min(dim, width * (shard + 1))) for shard in range(shards)]


def partition_of_shards(name: str, held: Sequence[TableSpec | None]) -> tuple[Partition, list[int]]:
    """How a table was split over stores, and which of them lack their part.

    Args:
        name: Of the table.
        held: Its spec on every store, in order; None where it has none.

    Raises:
        StoreFailed: what they hold was not split over these stores in this order.
    """
    shard, first = next((number, spec) for number, spec in enumerate(held) if spec is not None)
    whole, count = first.origin.table, first.origin.shards
    if whole is None:
        raise StoreFailed(f"shard {shard} of {len(held)} holds a table {name!r} that was not split over shards")
    if count != len(held):
        raise StoreFailed(
            f"table {name!r} was split over {count} shards, and {len(held)} are given; "
            "elastable.embedding_store.composite.moving moves it to another number"
        )
    by_token = count == 1 or first.origin.id_stride != whole.origin.id_stride
    found = partition(whole, "token" if by_token else "encoding", count)
    for number, (wanted, spec) in enumerate(zip(found.shards, held, strict=True)):
        if spec is not None and spec != wanted:
            raise StoreFailed(
                f"shard {number} of {count} holds another part of table {name!r} than belongs there: "
                "were the shards given in another order?"
            )
    return found, [number for number in found.holders if held[number] is None]


def _token_specs(spec: TableSpec, shards: int) -> list[TableSpec | None]:
    specs: list[TableSpec | None] = []
    for shard in range(shards):
        size = None if spec.vocabulary_size is None else -(-(spec.vocabulary_size - shard) // shards)
        of = spec.origin
        stride, offset = of.id_stride * shards, of.id_offset + shard * of.id_stride
        origin = ShardOrigin(stride, offset, of.first_column, spec, shards)
        specs.append(None if size is not None and size < 1 else replace(spec, vocabulary_size=size, origin=origin))
    return specs


def _encoding_spec(spec: TableSpec, columns: slice, shards: int) -> TableSpec | None:
    of = spec.origin
    if columns.start == columns.stop:
        return None
    origin = ShardOrigin(of.id_stride, of.id_offset, of.first_column + columns.start, spec, shards)
    return replace(spec, dim=columns.stop - columns.start, origin=origin)


def _slot_columns(optimizer: RowOptimizer, dim: int, columns: slice) -> Int64:
    parts, start = [np.empty(0, np.int64)], 0
    for slot in optimizer.slots:
        width = dim if slot.columns is None else slot.columns
        parts.append(np.arange(start, start + width)[columns if slot.columns is None else slice(None)])
        start += width
    return np.concatenate(parts)


def _refuse_encoding(spec: TableSpec, optimizer: RowOptimizer, shards: int) -> None:
    if shards == 1:
        return
    if optimizer.whole_rows or not (optimizer.fused or _declares_columns(optimizer)):
        reason = "updates whole rows" if optimizer.whole_rows else "does not say whether it does (`whole_rows`)"
        raise Unsupported(
            f"table {spec.name!r}: the encoding partition splits rows, which needs an optimizer that updates columns "
            f"apart, and {optimizer.shown_name!r} {reason}; use the token partition"
        )
    if spec.dtype == "int8":
        raise Unsupported(
            f"table {spec.name!r}: int8 rows have one scale a row, so they cannot be split by the encoding "
            "partition; use the token partition"
        )


def _declares_columns(optimizer: RowOptimizer) -> bool:
    """Whether the class of an optimizer declares that it updates columns separately."""
    classes = [kind for kind in type(optimizer).__mro__ if kind is not RowOptimizer]
    return any("whole_rows" in vars(owner) for owner in (optimizer, *classes))


_BELOW_32_BITS = 1 << 31


def split_ids(ids: Int64, shards: int) -> tuple[Int64, Int64, list[int]]:
    """Ids sorted by shard, in their order within each.

    Args:
        ids: int64 `[n]`, C-contiguous.
        shards: n; id i is id `i // n` of shard `i mod n`.

    Returns:
        local: int64 `[n]`, the shards' own ids, shard after shard.
        places: int64 `[n]`, the position of each in `ids`.
        ends: Where in both each shard's ids end.
    """
    local, places = np.empty_like(ids), np.empty_like(ids)
    ends = np.zeros(shards, np.int64)
    bits = shards.bit_length() - 1 if shards & (shards - 1) == 0 else -1
    _split(ids, shards, bits, np.empty(len(ids), np.int32), np.empty_like(ids), local, places, ends)
    return local, places, ends.tolist()


def global_ids(ids: Int64, shards: int, shard: int) -> Int64:
    """The ids of the whole table that `ids` int64 `[n]` of one shard are."""
    return ids * np.int64(shards) + np.int64(shard)


def cut_columns(rows: Float32, columns: slice) -> Float32:
    """A contiguous copy of `rows[:, columns]`, made without holding the GIL; `rows` itself if that is all of it."""
    part = rows[:, columns]
    if part.flags.c_contiguous:
        return part
    out = np.empty(part.shape, np.float32)
    _copy(part, out)
    return out


def gather_rows(rows: Float32, places: Int64) -> Float32:
    """`rows[places]`, float32 `[m, columns]`, without holding the GIL."""
    out = np.empty((len(places), rows.shape[1]), np.float32)
    gather(rows, places, out, False)
    return out


@kernel
def _split(
    ids: Int64, shards: int, bits: int, shard_of: npt.NDArray[np.int32], quotients: Int64, local: Int64,
    places: Int64, ends: Int64,
) -> None:  # fmt: skip
    """A counting sort; `bits` is the logarithm of `shards` where that is a power of two, else -1."""
    for i in range(len(ids)):
        if bits >= 0:
            # Shift and mask are floor division and modulo, for negative ids too.
            quotient = ids[i] >> bits
        elif 0 <= ids[i] < _BELOW_32_BITS:
            quotient = np.int64(np.uint32(ids[i]) // np.uint32(shards))  # of 32 bits: a third of the time
        else:
            quotient = ids[i] // shards
        shard = ids[i] - quotient * shards
        quotients[i] = quotient
        shard_of[i] = shard
        ends[shard] += 1
    start = 0
    for shard in range(shards):
        count = ends[shard]
        ends[shard] = start
        start += count
    for i in range(len(ids)):
        at = ends[shard_of[i]]
        local[at] = quotients[i]
        places[at] = i
        ends[shard_of[i]] = at + 1


@kernel
def _copy(rows: Float32, out: Float32) -> None:
    for i in range(len(rows)):
        copy_row(out, i, rows, i)


class TableSplits(ABC):
    """Decides how each table is divided over several stores.

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


class SplitLookup:
    """Requests for whole tables, split into requests for stores; `finish` completes them once those are answered.

    Attributes:
        asked: Shard -> its requests. Their outputs are parts of those of the whole requests.
    """

    def __init__(self, tables: Sequence[Partition], requests: Sequence[LookupRequest]) -> None:
        """`tables`: that of each request, whose ids have been checked."""
        self.asked: dict[int, list[LookupRequest]] = {}
        self._folds: list[tuple[LookupRequest, Float32]] = []
        for table, request in zip(tables, requests, strict=True):
            if table.strategy == "whole":
                self.asked.setdefault(table.holders[0], []).append(request)
            elif table.strategy == "token":
                self._split_rows(table, request)
            else:
                self._split_columns(table, request)

    @property
    def values(self) -> int:
        """How many values the shards have to write, about."""
        return sum(len(request.ids) * request.out.shape[1] for of in self.asked.values() for request in of)

    def finish(self) -> None:
        """Folds bags whose rows came from several shards."""
        for request, rows in self._folds:
            deliver(request, rows)

    def _split_columns(self, table: Partition, request: LookupRequest) -> None:
        """Bags are folded at the shards: columns do not meet there."""
        for part in table.parts(request.ids):
            columns = table.columns[part.shard]
            self.asked.setdefault(part.shard, []).append(replace(request, out=request.out[:, columns]))

    def _split_rows(self, table: Partition, request: LookupRequest) -> None:
        out, given = request.out, request.places
        if request.offsets is not None:
            # Sums of parts of a bag would be rounded otherwise than the bag's own.
            out = np.empty((len(request.ids), table.spec.dim), np.float32)
            self._folds.append((request, out))
        for part in table.parts(request.ids):
            places = part.places
            if given is not None:  # a shard that is split again
                places = given if places is None else given[places]
            self.asked.setdefault(part.shard, []).append(LookupRequest(request.table, part.ids, out, places=places))
