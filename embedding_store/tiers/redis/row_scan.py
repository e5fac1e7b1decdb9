"""Every row of a table in Redis, partition by partition: as it is, or as it was at a pinned version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.tiers.redis.before_images import FIELD_BYTES, BeforeImage, Moment
from elastable.embedding_store.tiers.redis.catalog import Catalog, TableKeys
from elastable.embedding_store.tiers.redis.past_images import fetch_listed
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transactions import run_transactions

__all__ = ["ids_now", "ids_then", "in_blocks", "rows_then"]

_SCAN_BYTES = 1 << 22  # of one HSCAN reply, about
_PARTITIONS_AT_ONCE = 32  # whose ids and before-images are in memory together


def in_blocks(ids: Iterable[Int64], block_rows: int, read: Callable[[Int64], RowBlock | None]) -> Iterator[RowBlock]:
    """Blocks of at most `block_rows` rows.

    Args:
        ids: int64 arrays, of one partition after the other.
        block_rows: At most so many ids are read at once.
        read: Of some ids the rows that there are; None: there are none.
    """
    waiting = np.empty(0, np.int64)
    for more in ids:
        waiting = np.concatenate((waiting, more))
        while len(waiting) >= block_rows:
            block, waiting = read(waiting[:block_rows]), waiting[block_rows:]
            if block is not None:
                yield block
    block = read(waiting)
    if block is not None:
        yield block


def ids_now(topology: Topology, catalog: Catalog, table: TableKeys, seconds: float) -> Iterator[Int64]:
    """All ids of a table, each once, those of some partitions at a time. `seconds`: deadline of each round."""
    for chosen in _at_once(table):
        keys = [catalog.names[table.first + partition][0] for partition in chosen]
        yield np.concatenate(_scanned(topology, keys, table.spec.weight_bytes, seconds))


def ids_then(topology: Topology, catalog: Catalog, table: TableKeys, moment: Moment, seconds: float) -> Iterator[Int64]:
    """As `ids_now`, ids among which are all that had a row at a pinned moment.

    Rows that were deleted since are looked for last: what the scan did not find
    any more is there.
    """
    for chosen in _at_once(table):
        keys = [catalog.names[table.first + partition] for partition in chosen]
        present = _scanned(topology, [weights for weights, _, _ in keys], table.spec.weight_bytes, seconds)
        told = topology.call([(before, ("HKEYS", before)) for _, _, before in keys], Deadline(seconds))
        asked = [(p, name) for p, fields in zip(chosen, told, strict=True) for name in _beyond(fields, moment)]
        fetched = fetch_listed(topology, catalog, table, 0, asked, Deadline(seconds))
        gone = [image.ids[: image.held] for _, _, image in fetched if not image.left]
        yield np.unique(np.concatenate((*present, *gone)))


def _scanned(topology: Topology, keys: list[bytes], row_bytes: int, seconds: float) -> list[Int64]:
    """All ids of some partitions, each once: HSCAN may show one twice."""
    count = max(1, min(10_000, _SCAN_BYTES // row_bytes) // len(keys))
    fields: list[list[bytes]] = [[] for _ in keys]
    cursors = dict.fromkeys(range(len(keys)), b"0")
    while cursors:
        words = [(keys[place], ("HSCAN", keys[place], cursor, "COUNT", count)) for place, cursor in cursors.items()]
        replies = topology.call(words, Deadline(seconds))
        for place, (cursor, found) in zip(list(cursors), replies, strict=True):
            fields[place] += [field for field in found[::2] if len(field) == 8]
            cursors[place] = cursor
            if cursor == b"0":
                del cursors[place]
    return [np.unique(np.frombuffer(b"".join(some), "<i8").astype(np.int64)) for some in fields]


def _at_once(table: TableKeys) -> Iterator[range]:
    for start in range(0, table.partitions, _PARTITIONS_AT_ONCE):
        yield range(start, min(start + _PARTITIONS_AT_ONCE, table.partitions))


def rows_then(topology: Topology, catalog: Catalog, table: TableKeys, moment: Moment, seconds: float) -> int:
    """How many rows a table had at a pinned moment."""
    count = 0
    for chosen in _at_once(table):
        keys = [catalog.names[table.first + partition] for partition in chosen]
        # Rows now, and what was changed until now, in one moment.
        counted = [(weights, [("HLEN", weights), ("HKEYS", before)]) for weights, _, before in keys]
        told = run_transactions(topology, counted, Deadline(seconds))
        asked = [(p, name) for p, (_, fields) in zip(chosen, told, strict=True) for name in _beyond(fields, moment)]
        images = [image for _, _, image in fetch_listed(topology, catalog, table, 0, asked, Deadline(seconds))]
        count += sum(length - 1 for length, _ in told) + _gained(images)  # each holds its stamp, too
    return count


def _gained(images: list[BeforeImage]) -> int:
    """How many rows more there were before some changes, oldest first, than there were after them."""
    if not images:
        return 0
    ids = np.concatenate([image.ids for image in images])
    held = np.concatenate([np.arange(len(image.ids)) < image.held for image in images])
    left = np.concatenate([np.full(len(image.ids), image.left) for image in images])
    _, first = np.unique(ids, return_index=True)
    _, last = np.unique(ids[::-1], return_index=True)
    return int(held[first].sum()) - int(left[len(ids) - 1 - last].sum())


def _beyond(fields: list[bytes], moment: Moment) -> list[Moment]:
    return sorted(name for name in map(Moment.of_field, (f for f in fields if len(f) == FIELD_BYTES)) if name > moment)
