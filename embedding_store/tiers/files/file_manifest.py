"""The manifest of a file store: what its folder holds, and whether it was closed cleanly."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.spec_json import spec_from_json, spec_to_json
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.log.folder_lock import LOCK_NAME, sync_folder
from elastable.embedding_store.tiers.files.file_table import SavedIds

__all__ = ["FileManifest", "SavedTable", "read_manifest", "write_manifest"]

_MANIFEST = "manifest.json"
_BESIDE = f"{_MANIFEST}.new"  # is all that a process leaves which dies while it writes the first one
_FORMAT = "elastable-file-store-1"


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table in a manifest: its spec, the name of its folder, and its ids."""

    spec: TableSpec
    folder: str
    ids: SavedIds


@dataclass(frozen=True, slots=True)
class FileManifest:
    """What a folder holds.

    Attributes:
        clean: Whether files are as the manifest says; False from the first change after a flush until the next.
        version: Of the store.
        tables: By name.
        made: Folders made so far, so that none is used twice.
    """

    clean: bool = True
    version: int = 0
    tables: Mapping[str, SavedTable] = field(default_factory=dict)
    made: int = 0


def read_manifest(folder: Path) -> FileManifest:
    """The manifest of a folder; of an empty one, an empty one.

    Raises:
        StoreFailed: the folder holds something else, or the manifest cannot be read.
    """
    path = folder / _MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        found = sorted(entry.name for entry in folder.iterdir() if entry.name not in (LOCK_NAME, _BESIDE))
        if found:
            raise StoreFailed(
                f"{folder} is no file store: it holds {', '.join(found[:3])} but no {_MANIFEST}; name an empty folder"
            ) from None
        return FileManifest()
    except OSError as error:
        raise StoreFailed(f"{path} cannot be read: {error.strerror}") from error
    text, _, check = content.rpartition(b"\n")
    if check != f"{zlib.crc32(text):08x}".encode():
        raise StoreFailed(f"{path} is corrupt: its check does not fit; restore a checkpoint into an empty folder")
    try:
        fields = json.loads(text)
        if fields["format"] != _FORMAT:
            raise StoreFailed(f"{path} is of format {fields['format']!r}; this version reads {_FORMAT!r}")
        tables = [
            SavedTable(spec_from_json(json.dumps(entry["spec"])), str(entry["folder"]), SavedIds(**entry["ids"]))
            for entry in fields["tables"]
        ]
        return FileManifest(
            bool(fields["clean"]),
            int(fields["version"]),
            {table.spec.name: table for table in tables},
            int(fields["made"]),
        )
    except MALFORMED as error:
        raise StoreFailed(f"{path} is not the manifest of a file store: {error}") from error


def write_manifest(folder: Path, manifest: FileManifest) -> None:
    """Replaces the manifest in one step; it is on the disk on return. Raises `StoreFailed`."""
    tables = [
        {"spec": json.loads(spec_to_json(table.spec)), "folder": table.folder, "ids": asdict(table.ids)}
        for table in manifest.tables.values()
    ]
    fields = {
        "format": _FORMAT,
        "clean": manifest.clean,
        "version": manifest.version,
        "made": manifest.made,
        "tables": tables,
    }
    text = json.dumps(fields, indent=1).encode()
    path, beside = folder / _MANIFEST, folder / _BESIDE
    try:
        with beside.open("wb") as file:
            file.write(text + b"\n" + f"{zlib.crc32(text):08x}".encode())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(folder)
    except OSError as error:
        raise StoreFailed(f"{path} cannot be written: {error.strerror}") from error
