"""What a read or a write has to do with each partition of a table. Pure planning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.tiers.redis.records.record_decoder import NO_STAMP
from elastable.embedding_store.tiers.redis.records.record_requests import PART, Parts
from elastable.embedding_store.tiers.redis.records.record_tables import RecordTable
from elastable.embedding_store.tiers.redis.redis_kernels import grouped_by_partition

__all__ = ["Batch"]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one table to read or to write, by partition.

    Attributes:
        table: The table.
        parts: `PART`, one for each partition that has something to do.
        ids: int64 `[n]`, those of partition 0 first.
        positions: int64 `[n]`: the record of `ids[i]` is `rows[positions[i]]`.
        gone: int64: ids to delete, in the same order.
        rows: uint8 `[n, w]`: whole records to write; or, to be read, their first bytes.
        missing: uint8 `[n]`, of a read: becomes 1 where there is no record.
        stamps: int64 `[parts]`, of a read: becomes what each partition's stamp is.
        known: int64 `[partitions]`: stamps that no partition may be behind.
    """

    table: RecordTable
    parts: Parts
    ids: Int64
    positions: Int64
    gone: Int64
    rows: UInt8
    missing: UInt8
    stamps: Int64
    known: Int64

    @classmethod
    def of(cls, table: RecordTable, ids: Int64, rows: UInt8, gone: Int64, known: Int64, whole: bool) -> Self:
        """Groups ids by partition.

        Args:
            table: The table.
            ids: int64 `[n]`, each once.
            rows: uint8 `[n, w]`.
            gone: int64: ids to delete.
            known: int64 `[partitions]`; it is copied.
            whole: Whether rows must be whole records, to be written.

        Raises:
            BadInput: rows of another number or width.
        """
        width = table.table.record_bytes
        fits = rows.dtype == np.uint8 and rows.ndim == 2 and len(rows) == len(ids) and rows.flags.c_contiguous
        if not fits or (rows.shape[1] != width if whole else rows.shape[1] > width):
            raise BadInput(
                f"table {table.table.name!r}: rows are {rows.dtype} {rows.shape} for {len(ids)} ids; they must be "
                f"C-contiguous uint8 [{len(ids)}, {'' if whole else 'at most '}{width}]"
            )
        grouped, positions, counts = grouped_by_partition(np.ascontiguousarray(ids, np.int64), table.partitions)
        gone_ids, _, gone_counts = grouped_by_partition(np.ascontiguousarray(gone, np.int64), table.partitions)
        held = np.flatnonzero(counts + gone_counts)
        parts = np.zeros(len(held), PART)
        parts["partition"] = held
        parts["rows"], parts["gone"] = counts[held], gone_counts[held]
        parts["row_at"] = np.cumsum(parts["rows"]) - parts["rows"]
        parts["gone_at"] = np.cumsum(parts["gone"]) - parts["gone"]
        missing = np.zeros(0 if whole else len(ids), np.uint8)
        stamps = np.full(len(parts), NO_STAMP, np.int64)
        return cls(table, parts, grouped, positions, gone_ids, rows, missing, stamps, known.copy())

    @classmethod
    def to_read(cls, table: RecordTable, ids: Int64, rows: UInt8, known: Int64) -> Self:
        """As `of`."""
        return cls.of(table, ids, rows, _NONE, known, whole=False)

    @classmethod
    def to_write(cls, table: RecordTable, ids: Int64, rows: UInt8, gone: Int64, known: Int64) -> Self:
        """As `of`."""
        return cls.of(table, ids, rows, gone, known, whole=True)
