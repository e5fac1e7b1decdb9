"""A sketch of fixed size that counts how often each id was seen: it decides which ids get a row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.spec import AdmissionSpec, TableSpec
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel, prefetch
from elastable.embedding_store.native.number_formats import mixed_bits
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.rows.initial_values import table_key, whole_ids

__all__ = ["AdmissionSketch"]

_PLACES = 4
_AHEAD = 8
_MOST = 255  # that a counter counts


class AdmissionSketch:
    """A count-min sketch with conservative update (Estan, Varghese: SIGCOMM 2002) in counters of one byte.

    Each id has four counters; its count is the smallest, and counting raises only the smallest. A count is therefore
    never too small, and too large only if all four counters are shared with more frequent ids.

    Ids of a shard are counted by their ids in the whole table, so that the sketches of shards can be joined by taking
    the larger counter of each pair.
    """

    def __init__(self, table: TableSpec, admission: AdmissionSpec, new_slab: SlabMaker = anonymous_slab) -> None:
        """All counts are 0. Raises `MemoryError`."""
        low, high = table_key(table.seed, table.name)
        self._key = np.uint64(low) | np.uint64(high) << np.uint64(32)
        self._table = table.name
        self._origin = table.origin
        self._admitted_at = admission.sightings
        self._counters = new_slab("admission_counts", 1 << (admission.counters - 1).bit_length(), 1, np.uint8)

    @property
    def bytes(self) -> int:
        """Bytes of memory, one a counter."""
        return len(self._counters.array)

    def admits(self, ids: Int64) -> npt.NDArray[np.bool_]:
        """bool `[n]`: whether each of `ids` int64 `[n]` is admitted when it is seen once more."""
        counts = np.empty(len(ids), np.uint8)
        _counts(self._counters.array, self._key, whole_ids(self._origin, ids), counts)
        admitted: npt.NDArray[np.bool_] = counts >= self._admitted_at - 1
        return admitted

    def count(self, ids: Int64) -> None:
        """Counts each of `ids` int64 `[n]` once."""
        _count(self._counters.array, self._key, whole_ids(self._origin, ids))

    def read(self) -> UInt8:
        """uint8 `[counters]`, a copy."""
        return self._counters.array[:, 0].copy()

    def write(self, counters: UInt8) -> None:
        """Restores what `read` returned."""
        self._counters.array[:, 0] = counters

    def require(self, counters: UInt8) -> None:
        """Raises `BadInput` unless `counters` has the size and dtype of `read`."""
        size = len(self._counters.array)
        if not isinstance(counters, np.ndarray) or counters.dtype != np.uint8 or counters.shape != (size,):
            got = f"{counters.dtype} {list(counters.shape)}" if isinstance(counters, np.ndarray) else type(counters)
            raise BadInput(f"table {self._table!r}: admission counts must be uint8 [{size}], got {got}")


@kernel
def _first_and_step(wanted: int, key: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Where the counters of an id begin, and how far they lie apart: splitmix64's finalizer, halved."""
    h = mixed_bits(np.uint64(wanted) ^ key)
    return h, (h >> np.uint64(32)) | np.uint64(1)


@kernel
def _counts(counters: UInt8, key: np.uint64, ids: Int64, counts: UInt8) -> None:
    mask = np.uint64(len(counters) - 1)
    for i in range(len(ids)):
        place, step = _first_and_step(ids[min(i + _AHEAD, len(ids) - 1)], key)
        for _ in range(_PLACES):
            prefetch(counters, place & mask)
            place += step
        place, step = _first_and_step(ids[i], key)
        least = np.uint8(_MOST)
        for _ in range(_PLACES):
            least = min(least, counters[place & mask, 0])
            place += step
        counts[i] = least


@kernel
def _count(counters: UInt8, key: np.uint64, ids: Int64) -> None:
    mask = np.uint64(len(counters) - 1)
    for i in range(len(ids)):
        first, step = _first_and_step(ids[i], key)
        place, least = first, np.uint8(_MOST)
        for _ in range(_PLACES):
            least = min(least, counters[place & mask, 0])
            place += step
        if least == _MOST:
            continue
        place = first
        for _ in range(_PLACES):
            if counters[place & mask, 0] == least:
                counters[place & mask, 0] = least + np.uint8(1)
            place += step
