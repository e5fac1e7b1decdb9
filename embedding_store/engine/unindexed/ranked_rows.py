"""The rows of a table by the version that last touched them, as its tier ranks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int64
from elastable.embedding_store.contract.spec import EvictionSpec
from elastable.embedding_store.contract.tier import IndexedTier, Records
from elastable.embedding_store.engine.membership.stored_touches import UNSETTLED, StoredTouches
from elastable.embedding_store.engine.unindexed.unindexed_rows import touches_in
from elastable.embedding_store.errors import Unsupported

__all__ = ["RankedRows", "is_ranked", "ranks_of"]

_WAITING = 1 << 52  # ranks from here on: rows that were put without a version
_SPARE = 64  # records that are asked for besides, as some are of rows in memory


def is_ranked(rule: EvictionSpec | None) -> bool:
    """Whether a table with this eviction asks for the rows that were not touched for longest."""
    return rule is not None and any(bound is not None for bound in (rule.max_age, rule.max_rows, rule.ttl))


def ranks_of(records: Records) -> Int64:
    """Ranks of whole records: by the versions that last touched them, int64 `[n]`."""
    versions = touches_in(records.rows)[:, 0]
    return np.where(versions >= UNSETTLED, versions - UNSETTLED + _WAITING, np.minimum(versions, _WAITING - 1))


class RankedRows:
    """Cold rows of a ranked table, those that were not touched for longest first.

    A row that was put without a version has the rank of its `StoredTouches.settled`, which says the version.

    Args:
        tier: The tier.
        name: Of the table there.
        touched: How to read its touches.
        version: That is to be committed: rows that have no version yet get this one.
        cold: bool `[n]` of ids int64 `[n]`: which have rows that are not in memory.

    Raises:
        Unsupported: ranks do not tell versions as late as this apart.
    """

    def __init__(
        self, tier: IndexedTier, name: str, touched: StoredTouches, version: int, cold: Callable[[Int64], Bools]
    ) -> None:
        if version >= _WAITING:
            raise Unsupported(
                f"version {version}: in {tier.place} table {name!r} tells rows by when they were touched up to version "
                "2**52 - 1, and no later (index=redis); keep the index in memory"
            )
        self._tier, self._name, self._cold = tier, name, cold
        self._settled = np.array([*touched.settled, version], np.int64)

    def before(self, version: int) -> tuple[Int64, Int64]:
        """All that were last touched before a version: ids, and versions that last touched them, int64 `[n]` each."""
        found = [self._all(0, min(version, _WAITING))] if version > 0 else []
        settled = np.flatnonzero(self._settled < version)
        for run in np.split(settled, np.flatnonzero(np.diff(settled) > 1) + 1):
            if len(run):
                found.append(self._all(_WAITING + int(run[0]), _WAITING + int(run[-1]) + 1))
        return _joined(found)

    def oldest(self, count: int, without: Callable[[Int64], Bools]) -> tuple[Int64, Int64]:
        """As `before`, with the `count` oldest among them, of equal ones the greater ids; not in order.

        `without`: bool `[n]` of ids int64 `[n]`, which of them do not count.
        """
        return _joined([self._first(low, high, count, without) for low, high in self._in_order()])

    def _in_order(self) -> Iterator[tuple[int, int]]:
        """Bounds of ranks between which greater ones are of later versions."""
        yield 0, _WAITING
        falls = np.flatnonzero(np.diff(self._settled) <= 0) + 1
        for run in np.split(np.arange(len(self._settled)), falls):
            yield _WAITING + int(run[0]), _WAITING + int(run[-1]) + 1

    def _all(self, low: int, high: int) -> tuple[Int64, Int64]:
        ids, ranks = self._tier.lowest(self._name, low, high)
        cold = self._cold(ids)
        return ids[cold], self._versions(ranks[cold])

    def _first(self, low: int, high: int, count: int, without: Callable[[Int64], Bools]) -> tuple[Int64, Int64]:
        most = count + _SPARE
        while True:
            ids, ranks = self._tier.lowest(self._name, low, high, most)
            some = self._cold(ids) & ~without(ids)
            if np.count_nonzero(some) >= count or len(ids) < most:
                return ids[some][:count], self._versions(ranks[some][:count])
            most *= 2

    def _versions(self, ranks: Int64) -> Int64:
        """The versions that last touched rows of these ranks."""
        versions = ranks.copy()
        waiting = np.flatnonzero(ranks >= _WAITING)
        versions[waiting] = self._settled[np.minimum(ranks[waiting] - _WAITING, len(self._settled) - 1)]
        return versions


def _joined(found: list[tuple[Int64, Int64]]) -> tuple[Int64, Int64]:
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    ids, versions = zip(*[nothing, *found], strict=True)
    return np.concatenate(ids), np.concatenate(versions)
