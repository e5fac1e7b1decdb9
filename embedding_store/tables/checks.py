"""Refuses ids, gradients, rows and commits that do not fit their table, by name and position."""

import math
import os
from numbers import Integral, Real

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import NEXT_VERSION, Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadGradient, BadIds, BadInput, IdOutOfRange, NotFinite, Unsupported
from elastable.embedding_store.measures import CLOCK
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.number_formats import mixed_bits
from elastable.embedding_store.optimizers.base import RowOptimizer

_FINITE_ROWS = "; a row holds finite numbers: leave the id out, and it reads its initial value"
_MOST_TIMES = 2**32 - 1
_BEYOND_FLOAT16 = np.float32(65520)  # nearer to infinity than to the largest number


def as_ids(values: npt.ArrayLike, table: str = "") -> Int64:
    """Integers of any dtype, or floats that are integers, as int64 ids of the same shape.

    Args:
        values: Array or nested sequence of integers; no booleans. A float is an id where its dtype holds every integer
            of that size (`first_inexact`).
        table: Named in errors.

    Raises:
        BadIds: not integers (NaN, a fraction, a null, a float too large to be exact), or unsigned ones above 2**63 - 1.
    """
    if type(values) is np.ndarray and values.dtype == np.int64:
        return values
    refuse_masked(values, f"{_table(table)}ids")
    try:
        ids = np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise BadIds(f"{_table(table)}ids must be integers of one shape: {error}") from error
    if ids.dtype == np.int64:
        return ids
    if ids.size == 0 and not isinstance(values, np.ndarray):
        return ids.astype(np.int64)  # an empty list has no own dtype
    if ids.dtype == object:
        ids = _of_objects(ids, table)
    if ids.dtype.kind == "f":
        position = first_inexact(ids)
        if position is not None:
            raise BadIds(f"{_table(table)}id {why_no_id(ids.ravel()[position])} (position {position})")
    elif ids.dtype.kind not in "iu":
        raise BadIds(f"{_table(table)}ids must be integers, got {ids.dtype}{_example(ids)}")
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.uint64(2**63 - 1):
        position = int(np.argmax(ids.ravel() > np.uint64(2**63 - 1)))
        raise BadIds(
            f"{_table(table)}id {ids.ravel()[position]} at position {position} is above 2**63 - 1, the largest id"
        )
    return ids.astype(np.int64)


def refuse_masked(values: object, where: str) -> None:
    """Raises `BadIds` for a NumPy array with masked values: as an array it would be what lies beneath the mask."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        position = int(np.argmax(np.ma.getmaskarray(values).ravel()))
        raise BadIds(f"{where}: the value at position {position} is masked: fill it (values.filled(...)) or drop it")


def _of_objects(values: npt.NDArray[np.object_], table: str) -> Int64:
    for position, value in enumerate(values.flat):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not -(2**63) <= value < 2**63:
            raise BadIds(
                f"{_table(table)}ids must be integers of 64 bits, got {value!r}, a {type(value).__name__}, at position "
                f"{position}"
            )
    return values.astype(np.int64)


def first_inexact(values: npt.NDArray[np.floating]) -> int | None:
    """The flat position of the first float that is no id; None: all are.

    An id is finite, has no fraction, and is below the power of two from which the dtype rounds integers: 2**53 for
    float64, 2**24 for float32, 2**11 for float16. At that power itself two integers share one float.
    """
    exact = 2.0 ** min(np.finfo(values.dtype).nmant + 1, 62)
    flat = values.ravel()
    with np.errstate(invalid="ignore"):
        good = (np.abs(flat) < exact) & (np.trunc(flat) == flat)
    return None if good.all() else int(np.argmin(good))


def why_no_id(value: np.floating) -> str:
    """The value, and why `first_inexact` takes it for none."""
    if not np.isfinite(value):
        return f"{value} is no integer: fill or drop it (a null makes floats of a column of integers, and is NaN there)"
    if np.trunc(value) != value:
        return f"{value} is no integer"
    kind = value.dtype.name
    return (
        f"{int(value)} may have been rounded: {kind} holds every integer only below 2**{np.finfo(kind).nmant + 1}; "
        "give ids as int64"
    )


def require_ids(spec: TableSpec, ids: Int64) -> Int64:
    """The ids, C-contiguous, once they are known to fit the table.

    Args:
        spec: The table.
        ids: int64 `[n]`.

    Raises:
        BadIds: another dtype (`as_ids` converts integers) or shape.
        IdOutOfRange: an id outside a fixed table; names table, id, position.
    """
    if type(ids) is not np.ndarray or ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        ids = require_id_array(spec, ids)
    size = spec.vocabulary_size
    if size is not None and any_outside(ids, size):
        position = int(np.argmax((ids < 0) | (ids >= size)))
        raise IdOutOfRange(
            f"table {spec.name!r}: id {ids[position]} at position {position} is outside 0 <= id < {size}"
        )
    return ids


def require_id_array(spec: TableSpec, ids: Int64) -> Int64:
    """As `require_ids`, whatever the ids' values.

    Raises:
        BadIds: another dtype (`as_ids` converts integers) or shape.
    """
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        raise BadIds(f"table {spec.name!r}: ids must be int64 [n], got {array_kind(ids)}{_example(ids)}")
    return np.ascontiguousarray(ids)


def require_gradients(spec: TableSpec, count: int, gradients: Float32) -> Float32:
    """The gradients, C-contiguous, once they are known to fit `count` ids of the table.

    Raises:
        BadGradient: anything but float32 `[count, dim]`.
    """
    if type(gradients) is not np.ndarray or gradients.dtype != np.float32 or gradients.shape != (count, spec.dim):
        _require_float32(spec, "gradient", gradients, count, spec.dim, BadGradient)
    return np.ascontiguousarray(gradients)


def require_finite_of(table: str, ids: Int64, values: Float32, what: str = "gradient", advice: str = "") -> None:
    """Refuses NaN and Inf.

    Args:
        table: Its name.
        ids: int64 `[n]`.
        values: float32 `[n, dim]`.
        what: They are, for the message.
        advice: At the end of the message.

    Raises:
        NotFinite: names table, id and column of the first such value.
    """
    if _all_finite(np.ascontiguousarray(values).ravel()):
        return
    row, column = np.argwhere(~np.isfinite(values))[0]
    raise NotFinite(
        f"table {table!r}: the {what} of id {ids[row]} (position {row}) is {values[row, column]} in column "
        f"{column}{advice}"
    )


def require_update(spec: TableSpec, update: TableUpdate) -> TableUpdate:
    """The update, C-contiguous, once it is known to fit; that each id occurs once is trusted (see `commit_checks`).

    Raises:
        BadIds, IdOutOfRange, BadGradient: as `require_ids`, `require_gradients`.
        Unsupported: the table's dtype is one for serving alone.
    """
    if spec.dtype == "int8":
        raise Unsupported(
            f"table {spec.name!r} keeps int8 weights, which are for serving and cannot be trained: train it in "
            "float32, bfloat16 or float16 and convert it (embedding_store.convert_table)"
        )
    ids = require_ids(spec, update.ids)
    gradients, squares = require_gradients(spec, len(ids), update.gradients), update.row_squares
    if squares is None:
        return TableUpdate(ids, gradients)
    if not isinstance(squares, np.ndarray) or squares.dtype != np.float32 or squares.shape != (len(ids),):
        raise BadGradient(f"table {spec.name!r}: row_squares must be float32 [{len(ids)}], got {array_kind(squares)}")
    return TableUpdate(ids, gradients, np.ascontiguousarray(squares))


def require_block_rows(block_rows: int) -> int:
    """`block_rows` itself. Raises `BadInput` unless it is a number of rows that a block can have."""
    if not isinstance(block_rows, (int, np.integer)) or block_rows < 1:
        raise BadInput(f"block_rows must be an integer of at least 1, got {block_rows!r}")
    return int(block_rows)


def require_block(spec: TableSpec, optimizer: RowOptimizer, block: RowBlock) -> RowBlock:
    """The block, C-contiguous, once it is known to fit the table and its optimizer.

    Raises:
        BadIds, IdOutOfRange: as `require_ids`, and for an id that appears twice.
        BadInput: weights, slots or touches of another dtype or shape, weights that
            the table's dtype cannot hold, or a negative sum of squares.
        NotFinite: a weight or slot that is NaN or infinite, unless training made it so (`block.trained`).
    """
    ids = require_ids(spec, block.ids)
    _require_once(spec.name, ids)
    _require_float32(spec, "weights", block.weights, len(ids), spec.dim, BadInput)
    _require_float32(spec, "slots", block.slots, len(ids), optimizer.slot_width(spec.dim), BadInput)
    weights, slots = np.ascontiguousarray(block.weights), np.ascontiguousarray(block.slots)
    finite = not block.trained or spec.dtype == "int8"
    if finite:
        require_finite_of(spec.name, ids, weights, "weight", _FINITE_ROWS)
    _require_slots(spec, optimizer, ids, slots, finite)
    _require_holdable(spec, ids, weights)
    touches = block.touches
    if touches is not None and (
        not isinstance(touches, np.ndarray) or touches.dtype != np.int64 or touches.shape != (len(ids), 2)
    ):
        raise BadInput(f"table {spec.name!r}: touches must be int64 [{len(ids)}, 2], got {array_kind(touches)}")
    if touches is not None and len(touches):
        _require_touches(spec, ids, touches)
    return RowBlock(ids, weights, slots, touches, block.trained)


def _require_slots(spec: TableSpec, optimizer: RowOptimizer, ids: Int64, slots: Float32, finite: bool) -> None:
    begin, named = 0, finite and not _all_finite(slots.ravel())
    for slot in optimizer.slots:
        end = begin + (spec.dim if slot.columns is None else slot.columns)
        if named:
            require_finite_of(spec.name, ids, slots[:, begin:end], f"slot {slot.name!r}", _FINITE_ROWS)
        if slot.squares and (negative := slots[:, begin:end] < 0).any():  # which NaN is not: training may make it
            row, column = np.argwhere(negative)[0]
            raise BadInput(
                f"table {spec.name!r}: the slot {slot.name!r} of id {ids[row]} (position {row}) is "
                f"{slots[row, begin + column]} in column {column}: it sums squares or sizes, and is 0 or more; "
                "fresh_rows makes the slots of new rows"
            )
        begin = end


def _require_touches(spec: TableSpec, ids: Int64, touches: Int64) -> None:
    """Refuses versions and frequencies that no row can have: kernels use both as they are."""
    versions, times = touches[:, 0], touches[:, 1]
    wrong = (versions < 0) | (versions > NEXT_VERSION) | (times < 0) | (times > _MOST_TIMES)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadInput(
            f"table {spec.name!r}: touches of id {ids[row]} (position {row}) are {touches[row].tolist()}; a version "
            f"lies from 0 to {NEXT_VERSION}, and how often a row was touched from 0 to {_MOST_TIMES}"
        )


def _require_float32(
    spec: TableSpec, what: str, values: object, rows: int, columns: int, error: type[BadInput]
) -> None:
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.shape != (rows, columns):
        raise error(f"table {spec.name!r}: {what} must be float32 [{rows}, {columns}], got {array_kind(values)}")


def _require_holdable(spec: TableSpec, ids: Int64, weights: Float32) -> None:
    """Refuses what a narrow dtype would turn into something else than a rounded number."""
    if spec.dtype == "float16" and (beyond := np.isfinite(weights) & (np.abs(weights) >= _BEYOND_FLOAT16)).any():
        row, column = np.argwhere(beyond)[0]
        raise BadInput(
            f"table {spec.name!r}: the weight of id {ids[row]} (position {row}) is {weights[row, column]} in column "
            f"{column}; float16 tables hold numbers up to 65504"
        )


def _table(name: str) -> str:
    return f"table {name!r}: " if name else ""


def array_kind(value: object) -> str:
    """What an error names in place of an array: its dtype and shape, or the type of what is none."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def _example(values: object) -> str:
    return f" ({values.ravel()[0]!s}, ...)" if isinstance(values, np.ndarray) and values.size else ""


@kernel
def any_outside(ids: Int64, size: int) -> bool:
    """Whether an id is not in `0 <= id < size`. One comparison an id: as unsigned, negative ones are above all."""
    outside = 0
    for i in range(len(ids)):
        outside += 1 if np.uint64(ids[i]) >= np.uint64(size) else 0
    return outside > 0


@kernel
def _all_finite(values: Float32) -> bool:
    """x - x is 0 for finite x and NaN for the rest; no branch, so it runs vectorised."""
    bad = 0
    for i in range(len(values)):
        bad += 1 if values[i] - values[i] != 0 else 0
    return bad == 0


# Refusing commits that no store may begin to apply, before anything of them is applied


MAX_VERSION = 2**53
"""The last version, and the last step, that there can be: a double holds all numbers up to it."""

_LAST_SECOND = 2.0**40
_MOST_AHEAD_S = 7_200.0  # of a time that a client says; more is no clock that is a little wrong
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def require_version(version: int) -> None:
    """Raises `BadInput` for a version that no store can be at."""
    if not 0 <= version <= MAX_VERSION:
        raise BadInput(f"a version must not be negative or above 2**53, got {version}")


def require_numbers(commit: Commit) -> None:
    """Checks version, step, time and learning rates.

    Raises:
        BadInput: a number out of its range; names it, and the table of a learning rate.
    """
    if not 1 <= commit.version <= MAX_VERSION:
        raise BadInput(f"a commit makes a version from 1 to 2**53, got {commit.version}")
    if not isinstance(commit.step, Integral) or not 0 <= commit.step < MAX_VERSION:
        raise BadInput(f"the commit of version {commit.version}: its step lies from 0 to 2**53 - 1, got {commit.step}")
    if commit.time is not None and not 0 <= commit.time < _LAST_SECOND:
        raise BadInput(
            f"the commit of version {commit.version}: its time must be seconds since 1970, from 0 to 2**40, got "
            f"{commit.time}"
        )
    for table, rate in commit.learning_rates.items():
        if not isinstance(rate, Real) or not (math.isfinite(rate) and abs(rate) <= _FLOAT32_MAX):
            raise BadInput(
                f"the commit of version {commit.version}: the learning rate of table {table!r} must be a finite "
                f"float32, got {rate!r}"
            )


def require_not_ahead(time: float, what: str) -> None:
    """Raises `BadInput` for a time of what a client sent, in seconds since 1970, by which rows would go, or never."""
    if (ahead := time - CLOCK.now()) > _MOST_AHEAD_S:
        raise BadInput(
            f"{what}: its time, {time:.0f}, is {ahead:,.0f} s ahead of the clock of this server, and may be "
            f"{_MOST_AHEAD_S:,.0f} s: rows expire by it; set the clocks, or leave the time to the server"
        )


def require_from_outside(commit: Commit) -> None:
    """Checks what another process says it has coalesced: each id once, every number finite.

    Raises:
        BadIds: an id that occurs twice; names both positions.
        BadGradient: arrays of different lengths, or squares that are negative.
        NotFinite: NaN or infinity; names table, id and column.
        BadInput: as `require_numbers`.
    """
    require_numbers(commit)
    for table, update in commit.updates.items():
        if update.gradients.ndim != 2 or len(update.gradients) != len(update.ids):
            raise BadGradient(f"table {table!r}: {len(update.ids)} ids, gradient of {list(update.gradients.shape)}")
        require_finite_of(table, update.ids, update.gradients)
        _require_squares(table, update)
        _require_once(table, np.ascontiguousarray(update.ids))


def _require_once(table: str, ids: Int64) -> None:
    first, again = _repeated(ids, np.uint64(int.from_bytes(os.urandom(8), "little")))
    if again:
        raise BadIds(
            f"table {table!r}: id {ids[again]} appears at positions {first} and {again}; each id may appear once"
        )


def _require_squares(table: str, update: TableUpdate) -> None:
    squares = update.row_squares
    if squares is None or not len(squares):
        return
    if not np.isfinite(squares).all():
        position = int(np.argmin(np.isfinite(squares)))
        raise NotFinite(f"table {table!r}: row_squares of id {update.ids[position]} are {squares[position]}")
    if squares.min() < 0:
        raise BadGradient(f"table {table!r}: row_squares of id {update.ids[squares.argmin()]} are {squares.min()}")


@kernel
def _repeated(ids: Int64, seed: np.uint64) -> tuple[int, int]:
    """Two positions of the same id, or 0 and 0. The seed is new each time: nobody can send ids that fall together."""
    size = 16
    while size < 2 * len(ids):
        size *= 2
    mask = np.uint64(size - 1)
    places = np.full(size, -1, np.int64)
    for i in range(len(ids)):
        h = mixed_bits(np.uint64(ids[i]) ^ seed) & mask
        while places[h] >= 0:
            if ids[places[h]] == ids[i]:
                return places[h], i
            h = (h + np.uint64(1)) & mask
        places[h] = i
    return 0, 0
