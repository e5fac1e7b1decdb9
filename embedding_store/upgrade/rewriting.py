"""Writes the tables of an earlier release into an empty tier, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.spec_json import spec_to_json
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.engine.dense_replay.table_replay import dense_replay
from elastable.embedding_store.engine.frames.record_layout import RecordLayout, RowParts
from elastable.embedding_store.engine.membership.stored_touches import StoredTouches
from elastable.embedding_store.engine.table_rows import resident_rows
from elastable.embedding_store.engine.tiered.kept_table import KeptTable
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.native.slab import anonymous_slab
from elastable.embedding_store.optimizers.registry import row_optimizer

__all__ = ["EarlierRows", "EarlierTable", "described_store", "write_store"]

EarlierRows = Iterator[tuple[Int64, Int64, UInt8]]
"""ids int64 `[n]`, positions int64 `[n]`, and uint8 `[n, bytes]`: weights, slots, touches."""


@dataclass(frozen=True, slots=True)
class EarlierTable:
    """A table to be written anew.

    Attributes:
        spec: The table.
        rows: Reads all of its rows.
        direct: Whether row i lies at position i.
        state: What it kept besides rows.
        steps: `TableSteps.save`, of a table whose rows follow steps.
    """

    spec: TableSpec
    rows: Callable[[], EarlierRows] = field(repr=False)
    direct: bool = False
    state: TableState = field(default_factory=TableState)
    steps: bytes | None = None


def described_store(version: int, record: bytes | None, tables: Iterable[EarlierTable]) -> StoreState:
    """The state of the store that `write_store` writes."""
    saved = [
        KeptTable(table.spec, table.spec.name, table.direct, table.state, table.steps, StoredTouches())
        for table in tables
    ]
    return StoreState(version, 0, record, saved)


def write_store(
    tier: Tier, version: int, record: bytes | None, tables: Iterable[EarlierTable], wrote: Callable[[str, int], object]
) -> None:
    """Writes tables to a tier that holds no store; its state is written last. May be repeated where it broke off.

    Args:
        tier: Whose tables of these names are replaced.
        version: Of the store.
        record: `Commit.record` of that version.
        tables: To write.
        wrote: Is told the table and how many rows of it were written, block by block.

    Raises:
        StoreBroken: rows are not as long as the table's spec says.
        ElastableError: as `Tier.write`, and what reading the tables raises.
    """
    written = list(tables)
    known = tier.tables()
    for table in written:
        name, layout = table.spec.name, _layout(table.spec)
        if name in known:
            tier.drop(name)
        fields = {"spec": json.loads(spec_to_json(table.spec)), "record": layout.described()}
        description = json.dumps(fields, sort_keys=True).encode()
        tier.create(TierTable(name, layout.record_bytes, description))
        for ids, positions, rows in table.rows():
            if rows.shape != (len(ids), layout.record_bytes):
                raise StoreBroken(
                    f"rows of table {name!r} have {rows.shape[1]} bytes, where {layout.record_bytes} are those of its "
                    "spec: go on from a checkpoint"
                )
            tier.write([Records(name, ids, positions, np.ascontiguousarray(rows))], {}, 0)
            wrote(name, len(ids))
    tier.put_state(described_store(version, record, written).to_bytes())


def _layout(spec: TableSpec) -> RecordLayout:
    parts = RowParts(anonymous_slab)
    optimizer = row_optimizer(spec.optimizer)
    replay, make = dense_replay(spec, optimizer), resident_rows(parts)
    if replay is not None:
        make = replay.rows(make)
    make(spec, optimizer, 1)
    return RecordLayout(parts.slabs, spec.eviction is not None)
