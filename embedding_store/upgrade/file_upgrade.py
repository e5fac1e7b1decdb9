"""Rewrites a folder that an earlier release's file store wrote: a new folder next to it, which takes its place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.log.files.folder_lock import FolderLock, sync_folder
from elastable.embedding_store.tiers.files.earlier_files import EarlierFiles, is_earlier_folder
from elastable.embedding_store.upgrade.rewriting import EarlierTable, write_store

__all__ = ["refuse_earlier_folder", "upgrade_folder"]

_NEW, _OLD = ".upgrade", ".earlier"


def refuse_earlier_folder(folder: Path) -> None:
    """Raises `StoreFailed`, which says what to do, where a folder holds an earlier release's store."""
    if is_earlier_folder(folder) or (not folder.exists() and _beside(folder, _OLD).exists()):
        raise StoreFailed(
            f"{folder} holds a store of an earlier release: rewrite it once with `elastable store upgrade "
            f"file://{folder}`, or name another folder"
        )


def upgrade_folder(folder: Path, open_tier: Callable[[Path], Tier], wrote: Callable[[str, int], object]) -> bool:
    """Rewrites the store in a folder; killed at any moment, it is repeated. The disk has to hold both for a while.

    Args:
        folder: Of the store.
        open_tier: Begins a tier of this release in an empty folder.
        wrote: As of `write_store`.

    Returns:
        Whether there was anything to do.

    Raises:
        StoreFailed: the folder is in use, or cannot be written.
        StoreBroken: files are corrupt or missing, or the store was not closed cleanly. Nothing was removed.
    """
    new, old = _beside(folder, _NEW), _beside(folder, _OLD)
    earlier = folder.exists() and is_earlier_folder(folder)
    if not earlier and not old.exists():
        return False
    try:
        if earlier:
            _rewrite(folder, new, old, open_tier, wrote)
        elif not folder.exists():
            new.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old)
    except OSError as error:
        raise StoreFailed(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return True


def _rewrite(
    folder: Path, new: Path, old: Path, open_tier: Callable[[Path], Tier], wrote: Callable[[str, int], object]
) -> None:
    lock = FolderLock(folder)
    try:
        store = EarlierFiles(folder)
        tables = [
            EarlierTable(table.spec, table.rows, table.direct, table.state(), table.saved_steps())
            for table in store.tables.values()
        ]
        shutil.rmtree(new, ignore_errors=True)
        with open_tier(new) as tier:
            write_store(tier, store.version, None, tables, wrote)
        os.rename(folder, old)
        os.rename(new, folder)
    finally:
        lock.release()


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)
