"""Lists the checkpoints of a directory, intact or damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.checkpoints.checkpoint import Checkpoint, open_named
from elastable.master.checkpoints.storage.checkpoint_locations import checkpoint_names, files_at

__all__ = ["ListedCheckpoint", "list_checkpoints"]


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One checkpoint of a directory.

    Attributes:
        address: Where it is.
        checkpoint: Opened; None: it cannot be used.
        damage: Why not; "": it can.
    """

    address: str
    checkpoint: Checkpoint | None
    damage: str = ""


def list_checkpoints(directory: str | Path, verify: bool = False) -> list[ListedCheckpoint]:
    """All checkpoints in a directory, the oldest version first.

    Args:
        directory: A path, or a URL that fsspec knows; a run directory, too.
        verify: Whether every file is read and compared with its checksum; else
            files only have to be there and of the right size.

    Raises:
        CheckpointError: the directory cannot be read, or holds no checkpoint.
        BadInput: as `files_at`.
    """
    try:
        for folder in (str(directory).rstrip("/") or ".", f"{directory}/checkpoints"):
            files = files_at(folder)
            names = checkpoint_names(files)
            if names:
                break
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error
    if not names:
        raise CheckpointError(f"{redacted(str(directory))}: no checkpoint there; expected folders ckpt-<version>")
    found = []
    for name in names:
        try:
            checkpoint = open_named(files, name)
            if verify:
                checkpoint.read_all()
        except CheckpointError as error:
            found.append(ListedCheckpoint(files.at(name), None, str(error)))
        else:
            found.append(ListedCheckpoint(files.at(name), checkpoint))
    return found
