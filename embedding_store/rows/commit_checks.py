"""Refusing commits that no store may begin to apply, before anything of them is applied.

What a store cannot know of a commit that its own process made (that ids were
coalesced, gradients looked at) is checked by `require_from_outside`, where the
commit came over a wire. The numbers beside the gradients are checked by every store.
"""

from __future__ import annotations

import math
import os
from numbers import Integral, Real

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.errors import BadGradient, BadIds, BadInput, NotFinite
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.numbers.number_bits import mixed_bits
from elastable.embedding_store.rows.checks import require_finite_of

__all__ = ["MAX_VERSION", "require_from_outside", "require_numbers", "require_version"]

MAX_VERSION = 2**53
"""The last version, and the last step, that there can be: a double holds all numbers up to it."""

_LAST_SECOND = 2.0**40
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


def require_from_outside(commit: Commit) -> None:
    """Checks what another process says it has coalesced: each id once, every number finite.

    Raises:
        BadIds: an id that stands twice; names both positions.
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


def require_rows_once(table: str, block: RowBlock) -> None:
    """Checks rows that a program writes: each id once, every weight and slot finite.

    Raises:
        BadIds: an id that stands twice; names both positions.
        NotFinite: names table, id, and column.
    """
    ids = np.ascontiguousarray(block.ids)
    _require_once(table, ids)
    for what, values in (("weight", block.weights), ("slot", block.slots)):
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            raise NotFinite(
                f"table {table!r}: the {what} of id {ids[row]} (position {row}) is {values[row, column]} in column "
                f"{column}"
            )


def _require_once(table: str, ids: Int64) -> None:
    first, again = _repeated(ids, np.uint64(int.from_bytes(os.urandom(8), "little")))
    if again:
        raise BadIds(
            f"table {table!r}: id {ids[again]} stands at positions {first} and {again}; each id may stand once"
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
