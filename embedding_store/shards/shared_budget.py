"""A budget of rows (`max_rows`) over store servers: what each of them offers, and which rows of all of them go."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from elastable.embedding_store.contract.row_data import EvictionCut, StayingRows
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.shards.row_pushes import RowOffer

__all__ = ["FEW_VERSIONS", "cut_of", "offer_of"]

FEW_VERSIONS = 4096
"""Of how many versions servers are asked at first."""

_MORE = 16  # times as many, where those were not enough
_MOST_VERSIONS = 1 << 30
_NEVER = 1 << 63

Ask = Callable[[int, tuple[int, int] | None], Sequence[RowOffer]]
"""(most versions, which ids) -> the offers of all servers; as of `ShardServer.offer_rows`."""


def offer_of(rows: StayingRows, most: int, ids: tuple[int, int] | None) -> RowOffer:
    """What a server offers of its rows; `most`, `ids`: as of `ShardServer.offer_rows`."""
    versions, counts = np.unique(rows.versions, return_counts=True)
    touched = tuple(zip(versions[:most].tolist(), counts[:most].tolist(), strict=True))
    greatest: tuple[int, ...] = ()
    if ids is not None:
        version, n = ids
        greatest = tuple(heapq.nlargest(n, rows.ids[rows.versions == version].tolist()))
    return RowOffer(len(rows.ids), touched, greatest)


def cut_of(max_rows: int, offers: Sequence[RowOffer], ask: Ask) -> EvictionCut:
    """Which rows go so that `max_rows` of all servers' stay: those touched last, and of equal ones the smaller ids.

    Args:
        max_rows: Of the table.
        offers: Of all servers, with `FEW_VERSIONS` versions.
        ask: Asks all servers again.

    Raises:
        StoreFailed: a server does not say what it has.
    """
    most = FEW_VERSIONS
    goes = sum(offer.rows for offer in offers) - max_rows
    if goes <= 0:
        return EvictionCut(0)
    while (found := _nth_oldest(offers, goes)) is None:
        most *= _MORE
        if most > _MOST_VERSIONS:
            raise StoreFailed(f"{goes} rows go for max_rows={max_rows}, and store servers do not list that many")
        offers = ask(most, None)
    version, of_it, all_of_it = found
    if of_it == all_of_it:
        return EvictionCut(version + 1)
    ids = heapq.nlargest(of_it, (number for offer in ask(0, (version, of_it)) for number in offer.ids))
    if len(ids) < of_it:
        raise StoreFailed(f"store servers list {len(ids)} of {of_it} rows that were last touched at version {version}")
    return EvictionCut(version, ids[-1])


def _nth_oldest(offers: Sequence[RowOffer], n: int) -> tuple[int, int, int] | None:
    """The version of the n-th oldest row, how many rows of it are among the n oldest, and how many there are.

    None: the servers have listed too few versions to tell.
    """
    counts: dict[int, int] = {}
    for offer in offers:
        for version, count in offer.touched:
            counts[version] = counts.get(version, 0) + count
    cut_short = [offer for offer in offers if sum(count for _, count in offer.touched) < offer.rows]
    limit = min((offer.touched[-1][0] if offer.touched else -1 for offer in cut_short), default=_NEVER)
    for version in sorted(counts):
        if version > limit:
            return None
        if counts[version] >= n:
            return version, n, counts[version]
        n -= counts[version]
    return None
