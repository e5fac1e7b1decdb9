"""Records of a table in Redis by their ranks: the lowest ones, and ranks of records that were written without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.connections.topology import Topology
from elastable.embedding_store.tiers.redis.records.record_scan import scanned
from elastable.embedding_store.tiers.redis.records.record_tables import RecordTable
from elastable.embedding_store.tiers.redis.records.record_transfer import LostPartition
from elastable.embedding_store.tiers.redis.redis_kernels import grouped_by_partition
from elastable.embedding_store.tiers.redis.schema import STAMP, STAMP_RANK

__all__ = ["empty_ranks", "lowest_ranks", "put_ranks"]

_AT_ONCE = 1 << 16  # members of all replies to one request, about
_SPARE = 16  # members of a partition that are asked for above its share
_TRIES, _PAUSE_S = 5, 0.01  # a partition may be written between two commands
_FLIP = np.int64(2**63 - 1)
_NONE: Int64 = np.empty(0, np.int64)

_Ranked = tuple[Int64, Int64]
"""Ids and ranks, int64 `[n]` each."""


def empty_ranks(writing: Topology, table: RecordTable, deadline: Deadline) -> None:
    """Begins the ranks of a ranked table; nothing happens for any other."""
    if table.table.ranked:
        asked: list[tuple[bytes, Command]] = []
        for key in table.rank_names:
            asked += [(key, ("UNLINK", key)), (key, ("ZADD", key, STAMP_RANK, STAMP))]
        writing.call(asked, deadline)


def put_ranks(
    topology: Topology,
    writing: Callable[[Deadline], Topology],
    table: RecordTable,
    ranks_of: Callable[[Records], Int64],
    seconds: float,
) -> None:
    """Writes the ranks of all records of a table anew, which becomes a ranked one; `seconds`: of each request."""
    empty_ranks(writing(Deadline(seconds)), table, Deadline(seconds))
    for block in scanned(topology, table, _AT_ONCE, table.table.record_bytes, seconds):
        ids, positions, counts = grouped_by_partition(block.ids, table.partitions)
        members = (ids ^ _FLIP).astype(">i8").tobytes()
        ranks = ranks_of(block)[positions].tolist()
        asked: list[tuple[bytes, Command]] = []
        start = 0
        for partition, count in enumerate(counts.tolist()):
            if count:
                words: list[bytes | int] = []
                for row in range(start, start + count):
                    words += [ranks[row], members[8 * row : 8 * row + 8]]
                key = table.rank_names[partition]
                asked.append((key, ("ZADD", key, *words)))
            start += count
        deadline = Deadline(seconds)
        writing(deadline).call(asked, deadline)


def lowest_ranks(
    topology: Topology, table: RecordTable, low: int, high: int, most: int | None, seconds: float
) -> _Ranked:
    """As `IndexedTier.lowest`; `seconds`: deadline of each request. Raises `LostPartition`."""
    counts = _counts(topology, table, low, high, seconds)
    wanted = int(counts.sum()) if most is None else min(most, int(counts.sum()))
    share = -(-wanted // table.partitions)
    limits = np.minimum(counts, wanted if wanted == counts.sum() else 2 * share + _SPARE)
    found: dict[int, _Ranked] = {}
    ids = ranks = _NONE
    stale = np.flatnonzero(limits)
    while len(stale):
        found |= _fetched(topology, table, stale, limits[stale], low, high, seconds)
        ids, ranks = _in_order(list(found.values()))
        # A partition of which not everything was taken may hold more of what goes before the last one that is wanted.
        cut_off = np.flatnonzero(limits < counts).tolist()
        stale = np.array([p for p in cut_off if _may_hold_more(found[p], ids, ranks, wanted)], np.int64)
        limits[stale] = np.minimum(2 * limits[stale], counts[stale])
    return ids[:wanted], ranks[:wanted]


def _counts(topology: Topology, table: RecordTable, low: int, high: int, seconds: float) -> Int64:
    """int64 `[partitions]`: members between two ranks. Raises `LostPartition` where ranks are lost."""
    asked: list[tuple[bytes, Command]] = []
    for rows, ranks in zip(table.names, table.rank_names, strict=True):
        asked += [(rows, ("HLEN", rows)), (ranks, ("ZCARD", ranks)), (ranks, ("ZCOUNT", ranks, low, f"({high}"))]
    for tried in range(1, _TRIES + 1):
        replies = np.array(topology.call(asked, Deadline(seconds)), np.int64).reshape(-1, 3)
        differ = np.flatnonzero((replies[:, 0] != replies[:, 1]) | (replies[:, 1] == 0))
        if not len(differ):
            return replies[:, 2].copy()
        time.sleep(_PAUSE_S * tried)
    partition = int(differ[0])
    fields, members = replies[partition, :2].tolist()
    how = f"its hash has {fields} fields, and {members} of them have ranks"
    raise LostPartition(topology.url, table.table.name, partition, how)


def _fetched(
    topology: Topology, table: RecordTable, partitions: Int64, limits: Int64, low: int, high: int, seconds: float
) -> dict[int, _Ranked]:
    """Of each partition the members of lowest rank, as many as its limit says."""
    found: dict[int, _Ranked] = {}
    after = np.cumsum(limits)
    for some in np.split(np.arange(len(partitions)), np.flatnonzero(np.diff(after // _AT_ONCE)) + 1):
        asked: list[tuple[bytes, Command]] = []
        for at in some.tolist():
            key = table.rank_names[int(partitions[at])]
            words = ("ZRANGE", key, low, f"({high}", "BYSCORE", "LIMIT", 0, int(limits[at]), "WITHSCORES")
            asked.append((key, words))
        for at, reply in zip(some.tolist(), topology.call(asked, Deadline(seconds)), strict=True):
            found[int(partitions[at])] = _decoded(table, reply)
    return found


def _decoded(table: RecordTable, reply: Sequence[bytes]) -> _Ranked:
    try:
        ids = np.frombuffer(b"".join(reply[::2]), ">i8").astype(np.int64) ^ _FLIP
        ranks = np.array(reply[1::2], "S").astype(np.float64).astype(np.int64)
        if len(ids) != len(ranks):
            raise ValueError(f"{len(ids)} ids of {len(ranks)} records")
    except ValueError as error:
        name = table.table.name
        raise StoreBroken(f"table {name!r} in Redis holds ranks that another program wrote: {error}") from error
    return ids, ranks


def _in_order(found: Sequence[_Ranked]) -> _Ranked:
    ids = np.concatenate([ids for ids, _ in found])
    ranks = np.concatenate([ranks for _, ranks in found])
    order = np.lexsort((~ids, ranks))
    return ids[order], ranks[order]


def _may_hold_more(found: _Ranked, ids: Int64, ranks: Int64, wanted: int) -> bool:
    """Whether what follows the last member of a partition may come before the last of all that is wanted."""
    if len(ids) < wanted or not len(found[0]):
        return True
    last = int(found[1][-1]), -int(found[0][-1])
    return last < (int(ranks[wanted - 1]), -int(ids[wanted - 1]))
