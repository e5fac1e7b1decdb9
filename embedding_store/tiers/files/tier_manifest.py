"""The manifest of a file tier: its tables, and what the engine keeps beside them. Replaced in one step."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.errors import BadInput, StoreBroken, StoreFailed
from elastable.embedding_store.log.folder_lock import LOCK_NAME, sync_folder
from elastable.embedding_store.support.checked_files import open_regular
from elastable.embedding_store.tiers.files.table_files import MOST_POSITIONS

__all__ = ["MANIFEST_NAME", "NumberedTable", "TierManifest", "read_tier_manifest", "write_tier_manifest"]

MANIFEST_NAME = "tables"
_BESIDE = f"{MANIFEST_NAME}.new"
_FORMAT = "elastable-file-tier-1"
_NUMBER = re.compile(r"[0-9]{6,9}")
_NUMBER = re.compile(r"[0-9]{6,9}")
_MOST_RECORD_BYTES = 1 << 24
_MOST_BYTES = 1 << 32
_MOST_SEQUENCE = 1 << 63


@dataclass(frozen=True, slots=True)
class NumberedTable:
    """A table in a manifest.

    Attributes:
        table: The table.
        number: Name of its files, decimal digits.
        token: 16 bytes that its files hold.
        items: Positions that they had room for at the last save.
    """

    table: TierTable
    number: str
    token: bytes
    items: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.table.name, str):
            raise BadInput(f"the name of a table must be text, got {self.table.name!r}")
        if not 1 <= self.table.record_bytes <= _MOST_RECORD_BYTES:
            raise BadInput(
                f"record_bytes of table {self.table.name!r} must be from 1 to {_MOST_RECORD_BYTES}, "
                f"got {self.table.record_bytes}"
            )
        if not 0 <= self.table.first_bytes <= self.table.record_bytes:
            raise BadInput(
                f"first_bytes of table {self.table.name!r} must be from 0 to its record_bytes, "
                f"{self.table.record_bytes}; got {self.table.first_bytes}"
            )
        if not _NUMBER.fullmatch(self.number) or len(self.token) != 16 or not 0 <= self.items <= MOST_POSITIONS:
            raise BadInput(f"files {self.number!r} of table {self.table.name!r} cannot be")


@dataclass(frozen=True, slots=True)
class TierManifest:
    """What a folder holds.

    Attributes:
        tables: By name.
        save: How often `put_state` was called, and once more.
        sequence: Of the last write before the last save.
        state: What `put_state` was last given.
    """

    tables: dict[str, NumberedTable] = field(default_factory=dict)
    save: int = 1
    sequence: int = 0
    state: bytes | None = field(default=None, repr=False)


def read_tier_manifest(folder: Path) -> TierManifest | None:
    """The manifest of a folder; None: the folder is empty.

    Raises:
        StoreFailed: the folder holds something else, or cannot be read.
        StoreBroken: the manifest is corrupt.
    """
    path = folder / MANIFEST_NAME
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        _require_empty(folder)
        return None
    except OSError as error:
        raise StoreFailed(f"{path} cannot be read: {error.strerror}") from error
    try:
        with os.fdopen(fd, "rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError as error:
        raise StoreFailed(f"{path} cannot be read: {error.strerror}") from error
    body, check = content[:-4], content[-4:]
    if len(content) < 4 or zlib.crc32(body).to_bytes(4, "little") != check:
        raise StoreBroken(f"{path} is corrupt: its check does not fit; restore a checkpoint into an empty folder")
    text, _, state = body.partition(b"\n")
    try:
        fields = json.loads(text)
        if fields["format"] != _FORMAT:
            raise StoreFailed(f"{path} is of format {fields['format']!r}; this version reads {_FORMAT!r}")
        return _manifest(fields, state)
    except MALFORMED as error:
        raise StoreBroken(f"{path} is not the manifest of a file tier: {error}") from error


def write_tier_manifest(folder: Path, manifest: TierManifest, fsync: bool) -> None:
    """Replaces the manifest in one step; it is on the disk on return, with `fsync`.

    Raises:
        StoreFailed: it cannot be written; the one before stands.
    """
    tables = [
        {
            "name": saved.table.name,
            "record_bytes": saved.table.record_bytes,
            "first_bytes": saved.table.first_bytes,
            "description": base64.b64encode(saved.table.description).decode(),
            "number": saved.number,
            "token": saved.token.hex(),
            "items": saved.items,
        }
        for saved in manifest.tables.values()
    ]
    fields = {
        "format": _FORMAT,
        "save": manifest.save,
        "sequence": manifest.sequence,
        "state": manifest.state is not None,
        "tables": tables,
    }
    path, beside = folder / MANIFEST_NAME, folder / _BESIDE
    body = json.dumps(fields).encode() + b"\n" + (manifest.state or b"")
    if len(body) + 4 > _MOST_BYTES:
        raise StoreFailed(f"{path} cannot be written: {len(body)} bytes, at most {_MOST_BYTES - 4} are allowed")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
            file.write(body)
            file.write(zlib.crc32(body).to_bytes(4, "little"))
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        beside.replace(path)
        if fsync:
            sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise StoreFailed(f"{path} cannot be written: {error.strerror}") from error


def _manifest(fields: dict[str, object], state: bytes) -> TierManifest:
    """Raises `MALFORMED` and `BadInput`, which is one of them."""
    listed = fields["tables"]
    if not isinstance(listed, list):
        raise ValueError("its tables are no list")
    tables = [
        NumberedTable(
            TierTable(
                entry["name"],
                _integer(entry["record_bytes"]),
                base64.b64decode(entry["description"], validate=True),
                _integer(entry["first_bytes"]),
            ),
            _number(entry["number"]),
            bytes.fromhex(entry["token"]),
            _integer(entry["items"]),
        )
        for entry in listed
    ]
    by_name = {saved.table.name: saved for saved in tables}
    if len(by_name) < len(tables) or len({saved.number for saved in tables}) < len(tables):
        raise ValueError("two of its tables have one name or the same files")
    return TierManifest(
        by_name, _integer(fields["save"]), _integer(fields["sequence"]), state if fields["state"] else None
    )


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST_SEQUENCE:
        raise ValueError(f"{value!r} is not a number from 0 to {_MOST_SEQUENCE - 1}")
    return value


def _require_empty(folder: Path) -> None:
    try:
        found = sorted(entry.name for entry in folder.iterdir() if entry.name not in (LOCK_NAME, _BESIDE, "mark"))
    except OSError as error:
        raise StoreFailed(f"{folder} cannot be read: {error.strerror}") from error
    if found:
        raise StoreFailed(
            f"{folder} is no file tier: it holds {', '.join(found[:3])} but no {MANIFEST_NAME}; name an empty folder"
        )


def _number(value: object) -> str:
    """The number that the files of a table are named by; nothing else, as it becomes a part of their paths."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value) is None:
        raise ValueError(f"{value!r} is no number of a table's files")
    return value
