"""Checkpoints: one version of everything, in safetensors files and a manifest.

    DIR/ckpt-0000000120/manifest.json        what is in it, with sha256 of every file
                       /dense.safetensors    dense variables, states, optimizer variables
                       /table-0003-00000.safetensors   ids, weights, slots, touches of one block of rows
                       /table-0003-sightings.safetensors   of a table with admission: how often ids were seen

A checkpoint is written beside its place and renamed into it, so that a
directory by that name is always whole. Nothing is ever pickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from embedding_store.errors import CheckpointError
from embedding_store.redis.url import redacted
from embedding_store.spec_json import spec_from_json, spec_to_json
from embedding_store.store import EmbeddingStore, RowBlock
from master.api import JobSpec, Tensor
from master.progress import Progress

__all__ = ["Checkpoint", "find_checkpoint", "open_checkpoint", "restore_tables", "write_checkpoint"]

_FORMAT = 1
_BLOCK_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest has been read and whose files are whole.

    Attributes:
        path: Its directory.
        version: The version it holds.
        manifest: The manifest as written.
    """

    path: Path
    version: int
    manifest: Mapping[str, Any]

    def dense(self) -> dict[str, Tensor]:
        """Dense variables, states and optimizer variables by key."""
        return _load(self.path / "dense.safetensors")

    def rows(self, table: str) -> Iterator[RowBlock]:
        """The rows of a table in blocks."""
        for file in self.manifest["tables"][table]["files"]:
            block = _load(self.path / file)
            yield RowBlock(block["ids"], block["weights"], block["slots"], block.get("touches"))

    def sightings(self, table: str) -> Tensor | None:
        """The sketch of a table with admission, uint8 `[counters]`."""
        file = self.manifest["tables"][table].get("sightings")
        return None if file is None else _load(self.path / file)["sightings"]

    def progress(self) -> Progress:
        """The place of the job that wrote it."""
        return Progress.from_json(json.dumps(self.manifest["progress"]))

    @property
    def job(self) -> Mapping[str, Any]:
        """The description of the job that wrote it."""
        return dict(self.manifest["job"])


def write_checkpoint(
    directory: str | Path,
    store: EmbeddingStore,
    dense: Mapping[str, Tensor],
    job: JobSpec,
    progress: Progress,
    keep: int = 3,
) -> Path:
    """Writes one version; nothing may be committed while it runs.

    Args:
        directory: Where checkpoints lie side by side; made if need be.
        store: All of its tables are written.
        dense: Dense variables, states and optimizer variables by key.
        job: What it is of.
        progress: The place of the job; its version is the checkpoint's.
        keep: How many of the newest checkpoints stay; 0 keeps all.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: the directory cannot be written, naming it.
    """
    home = Path(directory)
    place = home / f"ckpt-{progress.version:010d}"
    # The dot hides unfinished ones from `find_checkpoint`.
    draft = home / f".writing-{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)
        manifest = _write_files(draft, store, dense, job, progress)
        _write_text(draft / "manifest.json", json.dumps(manifest, indent=1))
        if place.exists():
            shutil.rmtree(place)
        draft.rename(place)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"checkpoint {place} cannot be written: {error}") from error
    if keep:
        for old in sorted(home.glob("ckpt-*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return place


def _write_files(
    draft: Path, store: EmbeddingStore, dense: Mapping[str, Tensor], job: JobSpec, progress: Progress
) -> dict[str, Any]:
    save_file({key: tensor.copy(order="C") for key, tensor in dense.items()}, str(draft / "dense.safetensors"))
    tables: dict[str, Any] = {}
    for number, (name, spec) in enumerate(sorted(store.specs().items())):
        files, rows = [], 0
        for part, block in enumerate(store.scan(name, _BLOCK_ROWS)):
            file = f"table-{number:04d}-{part:05d}.safetensors"
            parts = {"ids": block.ids, "weights": block.weights, "slots": block.slots}
            save_file(parts if block.touches is None else {**parts, "touches": block.touches}, str(draft / file))
            files.append(file)
            rows += len(block.ids)
        tables[name] = {"spec": json.loads(spec_to_json(spec)), "rows": rows, "files": files}
        counters = store.sightings(name)
        if counters is not None:
            tables[name]["sightings"] = f"table-{number:04d}-sightings.safetensors"
            save_file({"sightings": counters}, str(draft / tables[name]["sightings"]))
    checksums = {file.name: _sha256(file) for file in sorted(draft.glob("*.safetensors"))}
    return {
        "format": _FORMAT,
        "version": progress.version,
        "progress": json.loads(progress.to_json()),
        "job": {**dataclasses.asdict(job), "store_url": redacted(job.store_url)},
        "tables": tables,
        "sha256": checksums,
    }


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint at `path`, or the newest of those side by side in it.

    Raises:
        CheckpointError: there is none.
    """
    home = Path(path)
    if (home / "manifest.json").is_file():
        return home
    found = sorted(home.glob("ckpt-*")) or sorted(home.glob("checkpoints/ckpt-*"))
    if not found:
        raise CheckpointError(f"{path}: no checkpoint there; expected a directory ckpt-<version> with manifest.json")
    return found[-1]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads the manifest of a checkpoint and verifies every file.

    Raises:
        CheckpointError: a missing, truncated or changed file, by name.
    """
    place = find_checkpoint(path)
    try:
        manifest = json.loads((place / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place / 'manifest.json'}: cannot be read: {error}") from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{place}: format {manifest.get('format')!r}; this version reads format {_FORMAT}")
    for name, checksum in manifest["sha256"].items():
        if not (place / name).is_file():
            raise CheckpointError(f"{place / name}: missing")
        if _sha256(place / name) != checksum:
            raise CheckpointError(f"{place / name}: its bytes are not the ones that were written")
    return Checkpoint(place, int(manifest["version"]), manifest)


def restore_tables(checkpoint: Checkpoint, store: EmbeddingStore) -> None:
    """Makes the tables of a checkpoint in the store, as they were.

    Rows that the store holds of a table by the same name are forgotten.

    Raises:
        SpecConflict: a table by the same name has another spec.
    """
    for name, entry in checkpoint.manifest["tables"].items():
        store.create_table(spec_from_json(json.dumps(entry["spec"])))
        store.clear(name)
        store.put(name, checkpoint.rows(name))
        counters = checkpoint.sightings(name)
        if counters is not None:
            store.put_sightings(name, counters)
    store.reset_version(checkpoint.version)


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(str(file)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_text(file: Path, text: str) -> None:
    with file.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
