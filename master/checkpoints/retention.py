"""Removes old checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastable.embedding_store.errors import CheckpointError
from elastable.master.checkpoints.checkpoint import open_named
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles
from elastable.master.checkpoints.storage.checkpoint_locations import checkpoint_names
from elastable.master.checkpoints.storage.checkpoint_names import version_named

__all__ = ["StoredCheckpoint", "remove_old", "to_remove"]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """One checkpoint of a directory.

    Attributes:
        name: Its folder.
        chain: The names of it and of what it builds upon, the newest first; empty: it cannot be restored.
        job: The job that wrote it.
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
        keep: How many stay.
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
