"""The rows of one table as files: all of them, or those that changed and the ids of all that there are."""

from collections.abc import Iterable, Iterator

import numpy as np

from elastable.embedding_store.composite.partitions import global_ids
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.shards.server_contract import SavedTable, TableSave
from elastable.master.api import Tensor
from elastable.master.checkpoints.dirty_rows import Changes
from elastable.master.checkpoints.storage.tensor_file import FileWriter

_FILE_BYTES = 32 << 20
_BLOCK_BYTES = 4 << 20
_IDS_A_FILE = 1 << 22


def write_blocks(
    out: FileWriter, of: TableSave, source: Snapshot, spec: TableSpec, changes: Changes | None
) -> SavedTable:
    """Hands the rows of one table over, by the ids of the whole table where `source` is a shard of it.

    Args:
        of: What is saved of it.
        changes: Whose rows are written where it is not saved whole.
    """
    row_bytes = 8 + 4 * (spec.dim + row_optimizer(spec.optimizer).slot_width(spec.dim))
    block_rows = max(1, _BLOCK_BYTES // row_bytes)
    ids = None if of.whole or changes is None else changes.ids(spec.name, block_rows)
    blocks = source.scan(spec.name, block_rows) if ids is None else _changed(source, spec.name, ids)
    files, written = [], 0
    for number, group in enumerate(_groups(blocks, _FILE_BYTES // row_bytes)):
        file = f"{of.prefix}-{number:05d}.safetensors"
        parts: dict[str, list[Tensor]] = {
            "ids": [_whole_ids(spec, block.ids) for block in group],
            "weights": [block.weights for block in group],
            "slots": [block.slots for block in group],
        }
        touches: list[Tensor] = [block.touches for block in group if block.touches is not None]
        out.put(file, {**parts, "touches": touches} if touches else parts)
        files.append(file)
        written += sum(len(block.ids) for block in group)
    names = _write_live(out, of.prefix, source, spec, block_rows) if of.live else ()
    return SavedTable(source.row_count(spec.name), written, tuple(files), names)


def _whole_ids(spec: TableSpec, ids: Int64) -> Int64:
    """The ids of the table that was split into shards, of which this is one; else the same."""
    of = spec.origin
    if of.table is None:
        return ids
    whole = of.table.origin
    stride, offset = of.id_stride // whole.id_stride, (of.id_offset - whole.id_offset) // whole.id_stride
    return ids if stride == 1 else global_ids(ids, stride, offset)


def _changed(source: Snapshot, table: str, ids: Iterable[Int64]) -> Iterator[RowBlock]:
    for some in ids:
        yield source.read_rows(table, some)


def _groups(blocks: Iterable[RowBlock], most: int) -> Iterator[list[RowBlock]]:
    """Blocks that make one file together."""
    group: list[RowBlock] = []
    rows = 0
    for block in blocks:
        if group and rows + len(block.ids) > most:
            yield group
            group, rows = [], 0
        if len(block.ids):
            group.append(block)
            rows += len(block.ids)
    if group:
        yield group


def _write_live(out: FileWriter, prefix: str, source: Snapshot, spec: TableSpec, block_rows: int) -> tuple[str, ...]:
    files: list[str] = []
    group: list[Int64] = []

    def write() -> None:
        files.append(f"{prefix}-live-{len(files):05d}.safetensors")
        out.put(files[-1], {"ids": group})

    for block in source.scan(spec.name, block_rows):
        group.append(_whole_ids(spec, block.ids))
        if sum(map(len, group)) >= _IDS_A_FILE:
            write()
            group = []
    if group:
        write()
    return tuple(files)


def write_state(out: FileWriter, prefix: str, source: Snapshot, table: str) -> str | None:
    """Hands over what a table keeps besides its rows; the name of its file, None where there is nothing."""
    state = source.table_state(table)
    if not state:
        return None
    tensors: dict[str, list[Tensor]] = {}
    if state.admission_counts is not None:
        tensors["admission_counts"] = [state.admission_counts]
    if state.untouched_decay is not None:
        tensors["untouched_decay"] = [np.array([state.untouched_decay], np.float64)]
    if state.touch_times is not None:
        tensors["touch_times"] = [state.touch_times]
    file = f"{prefix}-state.safetensors"
    out.put(file, tensors)
    return file
