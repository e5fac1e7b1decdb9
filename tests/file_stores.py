"""Stores whose tables lie in files, as tests want them: little memory for rows, and no waiting for the disk."""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_tier import StoreTier
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.tiers.files.file_tier import FileTier


def quick_folder() -> Path:
    """A new folder, in memory where that poses as a disk, so that nobody waits for one."""
    return Path(tempfile.mkdtemp(prefix="files-of-tests-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


def file_store(folder: Path, budget: int = 1 << 20, threads: int = 1) -> MemoryStore:
    """The store in a folder, as `open_store` opens `file:///folder`; it may be opened again once it is closed."""
    with ExitStack() as opened:
        tier = opened.enter_context(FileTier(folder / "rows", fsync=False))
        log = opened.enter_context(FileLog(folder / "log", fsync="never"))
        store = opened.enter_context(MemoryStore(threads))
        store.keep_tier(StoreTier(tier, log, budget))
        opened.pop_all()  # the store closes them
    return store
