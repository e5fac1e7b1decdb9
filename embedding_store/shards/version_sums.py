"""The row gradient of a version: pushes checked, summed, measured without rounding, and clipped."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, NotFinite, TableNotFound
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.shards.server_contract import Measured, PushedCommit, RowSums, Slices, TableClip
from elastable.embedding_store.tables.checks import (
    MAX_VERSION,
    require_finite_of,
    require_gradients,
    require_ids,
)
from elastable.embedding_store.tables.grouping import coalesce_many

# Sums of squares without rounding: the same number however the values are ordered, and whoever holds which of them.
# The square of a float32 is an integer of 48 bits times a power of two, and at least 2**-298. Squares of one power are
# counted together, so that a sum is a few hundred integers, and then one of any size. A norm of it is rounded once.

UNIT = 2.0**-298
"""What an exact sum of squares is a multiple of: the square of the smallest float32."""

_UNITS_IN_ONE = 2**298
_POWERS = 254  # exponents of finite float32 values
_LOW_BITS = 24
_PIECE = 1 << 32  # values whose halves of 24 bits an uint64 has room for


def exact_squares(values: Float32) -> int | None:
    """The sum of all squares, as a multiple of `UNIT`; None: a value is NaN or infinite.

    Args:
        values: float32 of any shape.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    total = 0
    for start in range(0, len(flat), _PIECE):
        counts = np.zeros((_POWERS, 2), np.uint64)
        if not _count(flat[start : start + _PIECE], counts):
            return None
        for power in np.flatnonzero(counts.any(axis=1)):
            low, high = (int(count) for count in counts[power])
            total += (low + (high << _LOW_BITS)) << (2 * int(power))
    return total


def square_of(total: int) -> float:
    """The value of an exact sum, rounded once."""
    return total / _UNITS_IN_ONE  # of two integers: Python rounds correctly, whatever their size


@kernel
def _count(bits: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint64]) -> bool:
    """Adds the squares of values, given as their bits, to those of their power; False: one is not finite."""
    for i in range(len(bits)):
        exponent = (bits[i] >> np.uint32(23)) & np.uint32(255)
        if exponent == np.uint32(255):
            return False
        digits = np.uint64(bits[i] & np.uint32(0x7FFFFF))
        power = np.int64(0)
        if exponent > np.uint32(0):
            digits |= np.uint64(0x800000)
            power = np.int64(exponent) - 1
        square = digits * digits
        counts[power, 0] += square & np.uint64(0xFFFFFF)
        counts[power, 1] += square >> np.uint64(24)
    return True


Pushes = Mapping[int, Sequence[Mapping[str, Slices]]]
"""The parts of every push, by micro-batch (or sequence): table name -> gradient."""


def sum_pushes(sums: RowSums, pushes: Pushes) -> dict[str, TableUpdate]:
    """The gradient of a version by table, of those that have one; `sums`: what it is made of."""
    parts = [pushes[term.micro_batch][term.part] for term in sums.terms]
    for part in sums.rows_once:
        places = [place for place, term in enumerate(sums.terms) if term.part == part]
        for place, fresh in zip(places, each_row_once([parts[place] for place in places]), strict=True):
            parts[place] = fresh
    return table_updates(parts, [term.share for term in sums.terms], sums.frozen)


def each_row_once(parts: Sequence[Mapping[str, Slices]]) -> list[Mapping[str, Slices]]:
    """The slices without rows that an earlier push has: they are equal there, as all are of one version."""
    seen: dict[str, Int64] = {}
    kept: list[Mapping[str, Slices]] = []
    for part in parts:
        fresh = {}
        for table, slices in part.items():
            before = seen.get(table, np.zeros(0, np.int64))
            new = ~np.isin(slices.indices, before)
            seen[table] = np.concatenate([before, slices.indices[new]])
            fresh[table] = Slices(slices.indices[new], slices.values[new])
        kept.append(fresh)
    return kept


def table_updates(
    parts: Sequence[Mapping[str, Slices]], shares: Sequence[float], frozen: Collection[str] = ()
) -> dict[str, TableUpdate]:
    """The summed gradient of every table that has one.

    Args:
        parts: Table name -> gradient; in the order in which they are summed.
        shares: What each part is multiplied by.
        frozen: Tables that are left out.
    """
    terms: dict[str, list[tuple[Int64, Float32, float]]] = {}
    for part, share in zip(parts, shares, strict=True):
        for table, slices in part.items():
            if table not in frozen:
                terms.setdefault(table, []).append((slices.indices, slices.values, share))
    updates = {}
    for table in sorted(terms):  # the order in which a push happens to list its tables must not show
        update = coalesce_many(terms[table])
        if len(update.ids):
            updates[table] = update
    return updates


def clipped_update(update: TableUpdate, clip: TableClip) -> TableUpdate:
    """The gradient of a table, clipped."""
    gradients = update.gradients
    if clip.scale != 1.0:
        gradients = gradients * np.float32(clip.scale)
    if clip.bound is not None:
        gradients = np.clip(gradients, np.float32(-clip.bound), np.float32(clip.bound))
    return TableUpdate(update.ids, gradients)


def measured(updates: Mapping[str, TableUpdate]) -> Measured:
    """What whoever clips has to know of a gradient."""
    squares = {table: exact_squares(update.gradients) for table, update in updates.items()}
    finite = {table: square for table, square in squares.items() if square is not None}
    return Measured(finite, tuple(table for table in squares if table not in finite))


def commit_of(pushed: PushedCommit, updates: Mapping[str, TableUpdate]) -> Commit:
    """The commit of rows that a commit of pushes comes to, given their sums by table."""
    clipped = dict(updates)
    for table, clip in pushed.clips.items():
        if table in clipped:
            clipped[table] = clipped_update(clipped[table], clip)
    return Commit(
        pushed.version,
        clipped,
        pushed.step,
        pushed.learning_rates,
        pushed.record,
        pushed.ends_replay_epoch,
        pushed.sums.frozen,
        pushed.time,
        pushed.cuts,
    )


def is_made(store: EmbeddingStore, commit: Commit) -> bool:
    """Whether the store has made this very commit: of an attempt before, only the answer may have been lost.

    A version of the same number and another record is of another owner, which took the store over.
    """
    return store.version() == commit.version and (not store.keeps_records or store.record() == commit.record)


# How a push may be named, and what it may hold


_MOST_AHEAD = 1 << 32  # pushes that a sender may have made since the last one that is known of it
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def require_sequence(sender: str, sequence: int, last: int) -> None:
    """Refuses the sequence of an asynchronous push, or one of a client, that its sender cannot have got to.

    Args:
        sender: Its name.
        sequence: Of the push.
        last: The last one that is known of the sender; 0: none is.

    Raises:
        BadInput: it is below 1, or absurdly far ahead.
    """
    if not 1 <= sequence <= min(last + _MOST_AHEAD, MAX_VERSION):
        raise BadInput(
            f"push {sequence} of {sender!r}, whose last one was {last}: a sender, unique to a run of its program, "
            "numbers its pushes 1, 2, 3, ..., each after the answer to the one before"
        )


def require_finite_sums(specs: Mapping[str, TableSpec], parts: Sequence[Mapping[str, Slices]]) -> None:
    """Refuses a push whose values are finite, and those of a row together are not.

    Args:
        specs: Of the tables that there are.
        parts: Of the push, which fit them.

    Raises:
        NotFinite: names table, id and column.
    """
    most: dict[str, float] = {}
    for part in parts:
        for table, slices in part.items():
            largest = max(slices.values.max(initial=0), -slices.values.min(initial=0))
            most[table] = most.get(table, 0.0) + len(slices.indices) * float(largest)
    for table in (table for table, bound in most.items() if bound > _FLOAT32_MAX):
        those = [{table: part[table]} for part in parts if table in part]
        with np.errstate(over="ignore", invalid="ignore"):
            update = table_updates(those, [1.0] * len(those))[table]
        ids = (
            update.ids * specs[table].origin.id_stride + specs[table].origin.id_offset
        )  # as the job's workers number them
        require_finite_of(table, ids, update.gradients, "summed gradient")


def check_parts(specs: Mapping[str, TableSpec], parts: Iterable[Mapping[str, Slices]], finite: bool) -> None:
    """Refuses gradients that do not fit their tables.

    Args:
        specs: Of the tables that there are.
        parts: Of a push.
        finite: Whether NaN and Inf are refused, too.

    Raises:
        BadGradient, BadIds, IdOutOfRange, TableNotFound, NotFinite: names the table.
    """
    for part in parts:
        for table, slices in part.items():
            if table not in specs:
                known = ", ".join(sorted(specs)) or "none"
                raise TableNotFound(f"gradient for table {table!r}, which is not there (tables: {known})")
            _check_slices(specs[table], slices, finite)


def _check_slices(spec: TableSpec, slices: Slices, finite: bool) -> None:
    require_gradients(spec, len(require_ids(spec, slices.indices)), slices.values)
    if not finite:
        return
    try:
        require_finite_of(spec.name, slices.indices, slices.values)
    except NotFinite:
        # Named as the job's workers number its rows, and not as this shard of the table does.
        whole = slices.indices * spec.origin.id_stride + spec.origin.id_offset
        require_finite_of(spec.name, whole, slices.values)
        raise
