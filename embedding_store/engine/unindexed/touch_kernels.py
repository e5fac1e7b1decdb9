"""Passes over the touches of all rows in memory, as records hold them."""

from __future__ import annotations

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.engine.membership.stored_touches import FREQUENCY_BITS, UNSETTLED
from elastable.embedding_store.native.kernel import kernel

__all__ = ["collect_touched", "touched_versions"]

_TIMES = (1 << FREQUENCY_BITS) - 1


@kernel
def _version(kept: int, settled: Int64) -> int:
    """The version that last touched a row; `settled`: as of `StoredTouches`, and at last that of rows without one."""
    if kept < UNSETTLED:
        return kept
    return settled[min(kept - UNSETTLED, len(settled) - 1)]  # type: ignore[no-any-return]


@kernel
def collect_touched(
    touches: Int64, heat: UInt8, free: int, settled: Int64, counted: int, last: int, least_times: int, found: Int64
) -> int:
    """Positions of rows that were last touched at a version or before, or too seldom.

    Args:
        touches: int64 `[rows, 2]`, as records hold them.
        heat: uint8 `[rows]`, `free` where there is no row.
        free: See there.
        settled: int64, as of `_version`.
        counted: How many times the count of touches has begun anew.
        last: The version.
        least_times: How often rows must have been touched since.
        found: int64 `[n]`, gets the first n positions.

    Returns:
        How many there are.
    """
    count = 0
    for position in range(len(heat)):
        if heat[position] == free:
            continue
        times = 0
        if touches[position, 1] >> FREQUENCY_BITS >= counted:
            times = touches[position, 1] & _TIMES
        if times < least_times or _version(touches[position, 0], settled) <= last:
            if count < len(found):
                found[count] = position
            count += 1
    return count


@kernel
def touched_versions(touches: Int64, heat: UInt8, free: int, settled: Int64, versions: Int64) -> int:
    """Versions that last touched the rows in memory, into int64 `[rows]`; returns their number. Arguments as above."""
    count = 0
    for position in range(len(heat)):
        if heat[position] != free:
            versions[count] = _version(touches[position, 0], settled)
            count += 1
    return count
