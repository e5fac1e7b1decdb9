"""How a table's dtype keeps its weights: in 32, 16 or 8 bits, and how an update is rounded."""

import threading
from abc import ABC, abstractmethod

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8, UInt32
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.native.intrinsics import bits_of, float_of
from elastable.embedding_store.native.kernel import kernel, prefetch
from elastable.embedding_store.native.number_formats import (
    HALF_DTYPES,
    UInt16,
    gather_half,
    round_half,
    round_half_randomly,
    scatter_half,
    with_gaps,
)
from elastable.embedding_store.native.row_gather import gather
from elastable.embedding_store.native.slab import Scratch, Slab, SlabMaker
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.tables.initial_values import (
    initial_rows,
    philox_round,
    table_key,
    whole_ids,
    write_initial_rows,
)

# The weights of a table's rows in memory, by position; one class for each way to keep a number


class RowValues(ABC):
    """Weights at positions; callers see float32, however they are kept.

    Different positions may be read, written and updated from different threads.

    Attributes:
        plain: float32 `[rows, dim]` where the weights lie as they are, one row a position; None where they do not. To
            be read and not kept: `grow` puts another array in its place.
        framed: As of `TableRows`: no weights lie in frames here.
    """

    plain: Float32 | None = None
    framed = False

    def __init__(self, spec: TableSpec, slab: Slab) -> None:
        self._spec, self._slab = spec, slab

    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows. Raises `MemoryError`, and nothing has changed."""
        self._slab.grow(rows)

    @abstractmethod
    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        """Rows at `positions` int64 `[n]` into `out` float32 `[n, dim]`; rows at negative positions are left alone.

        `stream`: past the caches, where that is worth it; only where `can_stream(out)`.
        """

    def slabs(self) -> tuple[Slab, ...]:
        """What `read` reads; see `RowDirectory.slabs`."""
        return (self._slab,)

    @abstractmethod
    def write(self, positions: Int64, rows: Float32) -> None:
        """Rows float32 `[n, dim]` as they are, to `positions` int64 `[n]`, each once."""

    @abstractmethod
    def initialise(self, ids: Int64, positions: Int64) -> None:
        """The initial rows of `ids` int64 `[n]`, to `positions` int64 `[n]`, each once."""

    @abstractmethod
    def update(self, optimizer: RowOptimizer, slots: Float32, batch: UpdateBatch) -> None:
        """One step of a fused optimizer on the rows of the batch; `slots` as of `RowOptimizer.apply`."""


class Float32Rows(RowValues):
    """The numbers as they are."""

    def __init__(self, spec: TableSpec, slab: Slab) -> None:
        super().__init__(spec, slab)
        self.plain = slab.array

    def grow(self, rows: int) -> None:
        self.plain = None  # a slab that nobody looks at grows where it is
        try:
            super().grow(rows)
        finally:
            self.plain = self._slab.array

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        gather(self._slab.array, positions, out, stream)

    def write(self, positions: Int64, rows: Float32) -> None:
        self._slab.array[positions] = rows

    def initialise(self, ids: Int64, positions: Int64) -> None:
        write_initial_rows(self._spec, ids, positions, self._slab.array)

    def update(self, optimizer: RowOptimizer, slots: Float32, batch: UpdateBatch) -> None:
        optimizer.apply(self._slab.array, slots, batch)


# Weights kept in 16 bits: half the memory, rounded at every update so that small steps still count


_HALF_PIECE = 1 << 16  # float32 values that are worked on at a time: 256 KiB, for the processor's second cache


class _Scratch(threading.local):
    """Where a thread works on rows that it updates; used again by the next update."""

    def __init__(self) -> None:
        self.weights, self.bits = Scratch(np.float32), Scratch(np.uint32)


_of_thread = _Scratch()


class HalfRows(RowValues):
    """float16 or bfloat16 numbers, as uint16.

    Reading is exact. Writing rounds to nearest, so that rows read and written back are the same. An update computes in
    float32 and rounds randomly, by bits that belong to (seed, table, id, column, step): nearest rounding would lose
    every step smaller than half the distance to the next number.
    """

    def __init__(self, spec: TableSpec, slab: Slab) -> None:
        super().__init__(spec, slab)
        self._kind = HALF_DTYPES[spec.dtype]

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        gather_half(self._kind, self._slab.array, positions, out)

    def write(self, positions: Int64, rows: Float32) -> None:
        """Rounded to nearest."""
        scatter_half(self._kind, rows, None, self._slab.array, positions)

    def initialise(self, ids: Int64, positions: Int64) -> None:
        step = max(1, _HALF_PIECE // self._spec.dim)
        for start in range(0, len(ids), step):
            self.write(positions[start : start + step], initial_rows(self._spec, ids[start : start + step]))

    def update(self, optimizer: RowOptimizer, slots: Float32, batch: UpdateBatch) -> None:
        rows, dim = self._slab.array, self._spec.dim
        many = min(len(batch), max(1, _HALF_PIECE // dim))
        weights, order = _of_thread.weights.take(many, dim), np.arange(many)
        room = _of_thread.bits.take(rounding_words(self._spec, many))
        for start in range(0, len(batch), many):
            piece = batch.part(start, start + many)
            some = weights[: len(piece)]
            gather_half(self._kind, rows, piece.positions, some)
            optimizer.apply(some, slots, piece.at(piece.positions, order[: len(piece)]))
            bits = rounding_bits(self._spec, piece.ids, piece.step, room)
            scatter_half(self._kind, some, bits, rows, piece.positions)


# The bits that rows are rounded by: a pure function of (seed, table name, id, column, step)


_BLOCK = 8  # columns that one call of Philox serves


def rounding_bits(spec: TableSpec, ids: Int64, step: int, room: UInt32 | None = None) -> UInt16:
    """Random bits, one uint16 for each value of some rows.

    Args:
        spec: The table; its name, seed, dim and origin count.
        ids: int64 `[n]`.
        step: Optimizer steps taken before; the next 2**32 steps differ.
        room: uint32 `[rounding_words(spec, n)]` or more to work in; made if None.

    Returns:
        uint16 `[n, dim]`, rows C-contiguous; a view of `room`.
    """
    first = spec.origin.first_column
    start, blocks = _blocks(spec)
    words = room if room is not None else np.empty(rounding_words(spec, len(ids)), np.uint32)
    key = table_key(spec.seed, spec.name, b"rounding")
    count = len(ids) * blocks
    counters, words = words[: 3 * count].reshape(3, count), words[3 * count : 7 * count]
    _fill(whole_ids(spec.origin, ids), start, blocks, np.uint64(step & 0xFFFFFFFF), *key, counters, words)
    # Words are little-endian everywhere: the lower half is the earlier column.
    halves = words.astype("<u4", copy=False).view("<u2")
    bits: UInt16 = halves.reshape(len(ids), blocks * _BLOCK)
    skipped = first - start * _BLOCK
    return bits[:, skipped : skipped + spec.dim]


def rounding_words(spec: TableSpec, rows: int) -> int:
    """How many uint32 `rounding_bits` works in for so many rows."""
    return 7 * rows * _blocks(spec)[1]


def _blocks(spec: TableSpec) -> tuple[int, int]:
    """The first block of columns that the table has a part of, and how many there are."""
    first = spec.origin.first_column
    start = first // _BLOCK
    return start, -(-(first + spec.dim) // _BLOCK) - start


@kernel
def _fill(
    ids: Int64, start: int, blocks: int, step: np.uint64, k0: np.uint64, k1: np.uint64, counters: UInt32, words: UInt32
) -> None:
    """The counters of every block of every row, but for the step; and the bits that they give, four words each.

    All ten rounds are written out, and counters laid down before: an inner loop
    would keep the outer one from being vectorised.
    """
    for i in range(len(ids)):
        for k in range(blocks):
            at = i * blocks + k
            counters[0, at] = np.uint32(ids[i] & 0xFFFFFFFF)
            counters[1, at] = np.uint32((ids[i] >> 32) & 0xFFFFFFFF)
            counters[2, at] = np.uint32(start + k)
    for i in range(counters.shape[1]):
        a, b, c, d = np.uint64(counters[0, i]), np.uint64(counters[1, i]), np.uint64(counters[2, i]), step
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 0)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 1)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 2)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 3)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 4)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 5)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 6)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 7)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 8)
        a, b, c, d = philox_round(a, b, c, d, k0, k1, 9)
        words[4 * i] = a
        words[4 * i + 1] = b
        words[4 * i + 2] = c
        words[4 * i + 3] = d


_PIECE = 1 << 14  # values that are rounded at a time, for the cache


def row_values(spec: TableSpec, rows: int, new_slab: SlabMaker) -> RowValues:
    """Room for the weights of `rows` rows, kept as `spec.dtype` says."""
    if spec.dtype in HALF_DTYPES:
        return HalfRows(spec, new_slab("weights", rows, spec.dim, np.uint16))
    if spec.dtype == "int8":
        return Int8Rows(spec, new_slab("weights", rows, spec.weight_bytes, np.uint8))
    return Float32Rows(spec, new_slab("weights", rows, spec.dim))


def rounded_rows(dtype: str, weights: Float32) -> Float32:
    """Rows float32 `[n, dim]` rounded to nearest, as a table of that dtype takes them; itself, where nothing is."""
    if dtype not in HALF_DTYPES:
        return weights
    rounded = weights.copy()
    round_half(HALF_DTYPES[dtype], rounded, np.arange(len(rounded)))
    return rounded


def round_update(spec: TableSpec, ids: Int64, step: int, weights: Float32) -> None:
    """Rounds rows to the table's dtype as an update does, in place.

    For rows that were updated outside of their table: what `HalfRows.update`
    would have kept of them, to the bit. float32 rows stay as they are.

    Args:
        spec: The table.
        ids: int64 `[n]`.
        step: Of the update: optimizer steps taken before it.
        weights: float32 `[n, dim]`, C-contiguous.
    """
    if spec.dtype not in HALF_DTYPES:
        return
    many = max(1, _PIECE // spec.dim)
    for start in range(0, len(ids), many):
        piece = slice(start, start + many)
        round_half_randomly(HALF_DTYPES[spec.dtype], weights[piece], rounding_bits(spec, ids[piece], step))


# Weights kept in 8 bits, for serving: a quarter of the memory, quantised row by row


_AHEAD = 16


class Int8Rows(RowValues):
    """Each row as integers q from -127 to 127 and one scale: the row reads q * scale.

    The scale is the largest size in the row by 127, cut to 17 significant bits, so that q * scale is exact in float32:
    a row that is read and written back stays as it was. No value is off by more than half a scale. Rows lie as dim
    bytes of q and 4 bytes of scale, so that one miss of the cache fetches both.

    Such tables are not trained: `elastable.embedding_store.tables.checks.require_update` refuses it.
    """

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        gather_int8(self._slab.array, positions, out)

    def write(self, positions: Int64, rows: Float32) -> None:
        """Quantised; the numbers must be finite."""
        scatter_int8(rows, self._slab.array, positions)

    def initialise(self, ids: Int64, positions: Int64) -> None:
        """Raises `Unsupported`: rows of such a table begin with `write`."""
        raise self._untrained()

    def update(self, optimizer: RowOptimizer, slots: Float32, batch: UpdateBatch) -> None:
        """Raises `Unsupported`."""
        raise self._untrained()

    def _untrained(self) -> Unsupported:
        return Unsupported(f"table {self._spec.name!r}: int8 rows are for serving and cannot be trained")


def gather_int8(rows: UInt8, positions: Int64, out: Float32) -> None:
    """out[i] = the numbers of rows[positions[i]]; rows of `out` at negative positions are left alone.

    Args:
        rows: uint8 `[rows, dim + 4]`: dim bytes of q, two's complement, and the scale, a little-endian float32.
        positions: int64 `[n]`.
        out: float32 `[n, dim]`; rows may lie apart, columns may not.
    """
    _gather(rows, positions, with_gaps(out))


_EXACT = np.uint32(0xFFFFFF80)  # the 17 leading bits of a float32's 24
_LEAST_SCALE = np.float32(2.0**-110)  # smaller ones would have products that are not exact


@kernel
def _gather(rows: UInt8, positions: Int64, out: Float32) -> None:
    count, dim = len(positions), rows.shape[1] - 4
    for i in range(count):
        prefetch(rows, positions[min(i + _AHEAD, count - 1)])
        p = positions[i]
        if p >= 0:
            low = np.uint32(rows[p, dim]) | (np.uint32(rows[p, dim + 1]) << np.uint32(8))
            high = np.uint32(rows[p, dim + 2]) | (np.uint32(rows[p, dim + 3]) << np.uint32(8))
            scale = float_of(np.uint32(low | (high << np.uint32(16))))
            for j in range(dim):
                out[i, j] = np.float32(np.int8(rows[p, j])) * scale


@kernel
def scatter_int8(values: Float32, rows: UInt8, positions: Int64) -> None:
    """rows[positions[i]] = values[i] float32 `[n, dim]`, quantised; `positions` int64 `[n]`, each once."""
    count, dim = values.shape
    for i in range(count):
        p = positions[i]
        largest = np.float32(0)
        for j in range(dim):
            largest = max(largest, abs(values[i, j]))
        bits = np.uint32(bits_of(max(_LEAST_SCALE, largest / np.float32(127))) & _EXACT)
        scale = np.float64(float_of(bits))
        for j in range(dim):
            # In double, where the quotient cannot be rounded onto a tie that it is not.
            rows[p, j] = np.uint8(np.int8(np.rint(np.float64(values[i, j]) / scale)))
        for k in range(4):
            rows[p, dim + k] = np.uint8((bits >> np.uint32(8 * k)) & np.uint32(0xFF))
