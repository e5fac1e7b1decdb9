"""Every record of a table in Redis, a bounded piece at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.topology import Topology
from elastable.embedding_store.tiers.redis.records.record_tables import RecordTable
from elastable.embedding_store.tiers.redis.records.record_transfer import LostPartition
from elastable.embedding_store.tiers.redis.schema import STAMP

__all__ = ["scanned"]

_PIECE_BYTES = 8 << 20  # of all replies to one request, about
_FIELD_BYTES = 32  # of an id and what frames a field
_AT_ONCE = 32  # partitions

_Found = tuple[Int64, UInt8]
"""Ids and the first bytes of their records."""


def scanned(topology: Topology, table: RecordTable, block_rows: int, width: int, seconds: float) -> Iterator[Records]:
    """Blocks of at most `block_rows` records, as `Tier.scan` gives them; `seconds`: deadline of each request."""
    waiting: list[_Found] = []
    count = 0
    for found in _found(topology, table, width, seconds):
        waiting.append(found)
        count += len(found[0])
        while count >= block_rows:
            ids, rows = _joined(waiting, width)
            yield _block(table, ids[:block_rows], rows[:block_rows])
            waiting = [(ids[block_rows:], rows[block_rows:])]
            count -= block_rows
    if count:
        yield _block(table, *_joined(waiting, width))


def _joined(found: Sequence[_Found], width: int) -> _Found:
    ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in found)])
    return ids, np.concatenate([np.empty((0, width), np.uint8), *(rows for _, rows in found)])


def _block(table: RecordTable, ids: Int64, rows: UInt8) -> Records:
    return Records(table.table.name, ids.copy(), np.full(len(ids), -1, np.int64), rows.copy())


def _found(topology: Topology, table: RecordTable, width: int, seconds: float) -> Iterator[_Found]:
    """Ids, each once, with the first bytes of their records."""
    lengths = _lengths(topology, table, seconds)
    field_bytes = _FIELD_BYTES + (table.table.record_bytes if width else 0)
    for start in range(0, table.partitions, _AT_ONCE):
        partitions = range(start, min(start + _AT_ONCE, table.partitions))
        small = [p for p in partitions if lengths[p] * field_bytes <= _PIECE_BYTES // _AT_ONCE]
        if small:
            yield _whole(topology, table, small, width, seconds)
        for partition in set(partitions).difference(small):
            yield from _pieces(topology, table, partition, width, seconds)


def _lengths(topology: Topology, table: RecordTable, seconds: float) -> list[int]:
    """Fields of each partition, its stamp included. Raises `LostPartition`."""
    lengths: list[int] = topology.call([(name, ("HLEN", name)) for name in table.names], Deadline(seconds))
    if 0 in lengths:
        raise LostPartition(topology.url, table.table.name, lengths.index(0), "its hash is gone")
    return lengths


def _whole(topology: Topology, table: RecordTable, partitions: Sequence[int], width: int, seconds: float) -> _Found:
    """Small partitions, a command each."""
    names = [table.names[p] for p in partitions]
    replies = topology.call([(name, ("HGETALL" if width else "HKEYS", name)) for name in names], Deadline(seconds))
    parts = [_taken(table, reply if width else [x for key in reply for x in (key, b"")], width) for reply in replies]
    return _joined(parts, width)


def _pieces(topology: Topology, table: RecordTable, partition: int, width: int, seconds: float) -> Iterator[_Found]:
    """A large partition. HSCAN may show an id twice while the hash grows or shrinks: it is given once."""
    name, cursor, seen = table.names[partition], b"0", np.empty(0, np.int64)
    count = max(1, _PIECE_BYTES // (_FIELD_BYTES + table.table.record_bytes))
    while True:
        words = "HSCAN", name, cursor, "COUNT", count
        ((cursor, pairs),) = topology.call([(name, words)], Deadline(seconds))
        ids, rows = _taken(table, pairs, width)
        ids, first = np.unique(ids, return_index=True)
        new = np.isin(ids, seen, assume_unique=True, invert=True)
        yield ids[new], rows[first[new]]
        if cursor == b"0":
            return
        seen = np.union1d(seen, ids[new])


def _taken(table: RecordTable, pairs: list[bytes], width: int) -> _Found:
    """Ids and the first bytes of records, from fields and values in turn."""
    fields, values = pairs[::2], pairs[1::2]
    while STAMP in fields:  # HSCAN may show a field twice
        at = fields.index(STAMP)
        del fields[at], values[at]
    record_bytes = table.table.record_bytes
    text = b"".join(fields)
    if len(text) != 8 * len(fields) or (width and any(len(value) != record_bytes for value in values)):
        raise StoreBroken(
            f"table {table.table.name!r} in Redis holds fields that are no ids, or values that are no records of "
            f"{record_bytes} bytes: another program wrote them"
        )
    ids = np.frombuffer(text, "<i8").astype(np.int64)
    rows = np.frombuffer(b"".join(values), np.uint8).reshape(len(ids), record_bytes) if width else None
    return ids, np.empty((len(ids), 0), np.uint8) if rows is None else rows[:, :width]
