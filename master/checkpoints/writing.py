"""Writes checkpoints while training continues, whole or not at all: the master its files, store servers theirs."""

import dataclasses
import json
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from elastable.embedding_store.composite.partitions import global_ids
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, CheckpointError, ElastableError
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.shards.server_contract import (
    ChangedTable,
    RowSave,
    SavedRows,
    SavedTable,
    ServedRows,
    TableSave,
    TakenChanges,
)
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.api import JobSpec, Tensor
from elastable.master.checkpoints.checkpoint import DENSE, Checkpoint, open_named
from elastable.master.checkpoints.dirty_rows import Changes
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles
from elastable.master.checkpoints.storage.checkpoint_locations import (
    checkpoint_name,
    checkpoint_names,
    files_at,
    version_named,
)
from elastable.master.checkpoints.storage.manifest import Base, Manifest, TableEntry
from elastable.master.checkpoints.storage.tensor_file import FileWriter
from elastable.master.tasks.progress import Progress


def write_checkpoint(
    directory: str | Path | CheckpointFiles,
    source: Snapshot,
    dense: Mapping[str, Tensor],
    job: JobSpec,
    progress: Progress,
    *,
    keep: int = 3,
    base: Checkpoint | None = None,
    changes: Changes | TakenChanges | None = None,
    mark: bytes = b"",
    whole: Collection[str] = (),
) -> str:
    """Writes one version; any thread may do so, and training may continue if `source` is a pin.

    What killed writers left in the directory is removed, so only one process at a time may write there.

    Args:
        directory: Where checkpoints lie side by side: a path, or a URL that fsspec knows; created if it does not exist.
        source: All of its tables are written: a pin, or a store to which nothing is committed meanwhile.
        dense: Dense variables, states and optimizer variables by key.
        progress: How far the job is; its version is the checkpoint's, and that of `source`.
        keep: How many of the job's newest whole checkpoints stay, with what they build upon; 0 keeps all.
        base: What to build upon, with `changes`; None: the checkpoint is full.
        changes: What changed since the version of `base` (`DirtyRows.take`; of store servers `take_changes`).
        mark: With which `changes` were taken.
        whole: Tables of which all rows are written all the same.

    Returns:
        The checkpoint's address.

    Raises:
        CheckpointError: the directory cannot be written, naming it; no earlier
            checkpoint has changed, and nothing is left of this one.
        BadInput: `source` is at another version.
        StaleVersion: the pin ended while it was read.
    """
    files = files_at(directory)
    _refuse_other_version(source, progress)
    draft, name = None, f"ckpt-{progress.version:010d}"
    try:
        if isinstance(source, ServedRows):
            stop_saving(source)  # of an attempt that was given up: its draft goes now
        for left in files.drafts():
            files.discard(left)
        name = checkpoint_name(progress.version, files.names())
        draft = files.begin(name)
        manifest = _write_files(files, draft, source, dense, job, progress, base, changes, mark, whole)
        _refuse_other_version(source, progress)
        source.renew()  # a store that was restarted while it was read has no tables, and does not know the pin
        files.commit(draft, name, [memoryview(manifest.to_json().encode())])
    except BaseException as error:
        if draft is not None:
            files.discard(draft)
        if isinstance(error, (OSError, TypeError)) and not isinstance(error, ElastableError):
            raise CheckpointError(f"checkpoint {files.at(name)} cannot be written: {error}") from error
        raise
    remove_old(files, name, keep)
    return files.at(name)


def write_tensors(
    directory: str | Path | CheckpointFiles,
    dense: Mapping[str, Tensor],
    job: JobSpec,
    progress: Progress,
    *,
    keep: int = 3,
) -> str:
    """`write_checkpoint` of a training without tables: the arguments, and what it returns and raises, are the same."""
    with MemoryStore() as no_tables:
        no_tables.reset_version(progress.version)
        return write_checkpoint(directory, no_tables, dense, job, progress, keep=keep)


def _write_files(
    files: CheckpointFiles,
    draft: str,
    source: Snapshot,
    dense: Mapping[str, Tensor],
    job: JobSpec,
    progress: Progress,
    base: Checkpoint | None,
    changes: Changes | TakenChanges | None,
    mark: bytes,
    whole: Collection[str],
) -> Manifest:
    note = {"elastable": "checkpoint", "version": str(progress.version), "job": job.job}
    with FileWriter(files, draft, note, background=source.pinned) as out:
        out.put(DENSE, {key: [tensor] for key, tensor in dense.items()})
        specs = dict(sorted(source.specs().items()))
        before = set() if base is None else set(base.manifest.tables).difference(whole)
        saves = [
            _table_save(name, f"table-{number:04d}", _changed(source, name, changes) if name in before else None)
            for number, name in enumerate(specs)
        ]
        states = {of.table: write_state(out, of.prefix, source, of.table) for of in saves}
        saved, known = SavedRows(), changes if isinstance(changes, Changes) else None
        if isinstance(source, ServedRows):
            theirs = [of for of in saves if source.saves(of.table)]
            saved = save_tables(out, files, draft, source, DENSE, theirs, mark)
        ours = [of for of in saves if not (isinstance(source, ServedRows) and source.saves(of.table))]
        written = {of.table: write_blocks(out, of, source, specs[of.table], known) for of in ours}
        saved = SavedRows({**saved.tables, **written}, saved.files)
        entries = {**out.entries(), **saved.files}
        tables = {of.table: _entry(specs[of.table], of, saved, states[of.table]) for of in saves}
    builds = base is not None and not all(entry.whole for entry in tables.values())
    return Manifest(
        progress.version,
        {**dataclasses.asdict(job), "store_url": redacted(job.store_url)},
        json.loads(progress.to_json()),
        tables,
        entries,
        Base(base.name, base.version, base.manifest.checksum) if base is not None and builds else None,
        datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    )


def _changed(source: Snapshot, table: str, changes: Changes | TakenChanges | None) -> ChangedTable | None:
    """What changed of a table since the base; None: that is not known."""
    if isinstance(changes, TakenChanges):
        return changes.tables.get(table) if isinstance(source, ServedRows) and source.saves(table) else None
    return None if changes is None else changes.described(table, source.row_count(table))


def _table_save(table: str, prefix: str, changed: ChangedTable | None) -> TableSave:
    """How a table is saved; whole, too, if half of its rows changed."""
    if changed is None or changed.changed is None or 2 * changed.changed > changed.rows:
        return TableSave(table, prefix)
    return TableSave(table, prefix, whole=False, live=changed.shrunk)


def _entry(spec: TableSpec, of: TableSave, saved: SavedRows, state: str | None) -> TableEntry:
    rows = saved.tables.get(of.table, SavedTable(0, 0, ()))
    return TableEntry(spec, rows.rows, rows.written, rows.files, of.whole, rows.live if of.live else None, state)


def _refuse_other_version(source: Snapshot, progress: Progress) -> None:
    if source.version() != progress.version:
        raise BadInput(
            f"a checkpoint of version {progress.version} cannot be written of rows that are at version "
            f"{source.version()}: pin them, or commit nothing meanwhile"
        )


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """One checkpoint of a directory.

    Attributes:
        chain: The names of it and of what it builds upon, the newest first; empty: it cannot be restored.
    """

    name: str
    chain: tuple[str, ...] = ()
    job: str = ""


def to_remove(standing: Sequence[StoredCheckpoint], written: str, keep: int) -> list[str]:
    """Names of checkpoints to remove, the newest first, so that whatever is left meanwhile can be restored.

    Of the job that wrote last, the newest `keep` that can be restored stay (0:
    all), with what they build upon. One of the same version as a newer one is
    not counted. Those of other jobs, and damaged ones, are left for a person to look at.

    Args:
        standing: All checkpoints of a directory, the oldest version first.
        written: The name of the one that was written last.
    """
    by_name = {one.name: one for one in standing}
    last = by_name.get(written, StoredCheckpoint(written))
    stay: set[str] = {written, *last.chain}
    versions: list[int | None] = []
    going: list[str] = []
    for one in reversed(standing):
        version = (version_named(one.name) or (None,))[0]
        if one.job != last.job or not one.chain:
            stay.update((one.name, *one.chain))
        elif version not in versions and (not keep or len(versions) < keep):
            versions.append(version)
            stay.update(one.chain)
        else:
            going.append(one.name)
    return [name for name in going if name not in stay]


def remove_old(files: CheckpointFiles, written: str, keep: int) -> None:
    """Removes what `to_remove` names; what cannot be removed is retried after the next checkpoint."""
    try:
        standing = [_standing(files, name) for name in checkpoint_names(files)]
        for name in to_remove(standing, written, keep):
            files.remove(name)
    except OSError:
        return


def _standing(files: CheckpointFiles, name: str) -> StoredCheckpoint:
    try:
        found = open_named(files, name)
    except CheckpointError:
        return StoredCheckpoint(name)
    return StoredCheckpoint(name, tuple(one.name for one in found.chain()), str(found.job.get("job", "")))


# The rows of one table as files: all of them, or those that changed and the ids of all that there are


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
    blocks = source.scan(spec.name, block_rows) if ids is None else (source.read_rows(spec.name, some) for some in ids)
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
    decay = None if state.untouched_decay is None else np.array([state.untouched_decay], np.float64)
    parts = {"admission_counts": state.admission_counts, "untouched_decay": decay, "touch_times": state.touch_times}
    tensors: dict[str, list[Tensor]] = {name: [part] for name, part in parts.items() if part is not None}
    if not tensors:
        return None
    file = f"{prefix}-state.safetensors"
    out.put(file, tensors)
    return file


# Rows that store servers write: where, and whether all is there


_SEEN_WITHIN_S = 60.0  # shared file systems show files of other hosts late
_LOOK_EVERY_S = 0.5
_PROBE = "probe.safetensors"


def stop_saving(source: ServedRows) -> None:
    """Returns once no server writes into a draft any more."""
    source.save_rows(RowSave(uuid.uuid4().bytes))


def require_reached(files: CheckpointFiles, source: ServedRows, version: int) -> None:
    """Raises `CheckpointError` where a store server cannot write to the folder of checkpoints, naming both."""
    stop_saving(source)
    draft = None
    try:
        draft = files.begin(checkpoint_name(version, files.names()))
        with FileWriter(files, draft, {}) as out:
            out.put(_PROBE, {"probe": [np.zeros(1, np.uint8)]})
            size = out.entries()[_PROBE].bytes
        saved = source.save_rows(RowSave(uuid.uuid4().bytes, files.place, draft, _PROBE, size, probe="probe"))
        _require_seen(files, draft, saved)
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written to {files.address}: {error}") from error
    finally:
        if draft is not None:
            files.discard(draft)


def save_tables(
    out: FileWriter,
    files: CheckpointFiles,
    draft: str,
    source: ServedRows,
    known: str,
    saves: Sequence[TableSave],
    mark: bytes,
) -> SavedRows:
    """Has every server write its rows.

    Args:
        out: Writes files of the master's own; the file `known` has been handed to it.
        known: A file of the draft, by which the servers know it.
        saves: What is saved.
        mark: Of the changes, where a table is not saved whole.
    """
    size = out.entries()[known].bytes
    save = RowSave(uuid.uuid4().bytes, files.place, draft, known, size, tuple(saves), mark, out.note)
    saved = source.save_rows(save)
    _require_seen(files, draft, saved)
    return saved


def _require_seen(files: CheckpointFiles, draft: str, saved: SavedRows) -> None:
    """Waits until the files of the servers are here as they wrote them.

    Raises:
        CheckpointError: they are not: the servers write somewhere else.
    """
    give_up = time.monotonic() + _SEEN_WITHIN_S
    while True:
        sizes = files.sizes(draft)
        missing = [name for name, file in saved.files.items() if sizes.get(name) != file.bytes]
        if not missing:
            return
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"{files.at(f'{draft}/{missing[0]}')} was written by a store server and is not there, or not whole: "
                "give --checkpoint-dir a folder that all servers share, or a URL such as s3://bucket/job"
            )
        time.sleep(_LOOK_EVERY_S)
