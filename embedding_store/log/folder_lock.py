"""A folder that one process at a time may write."""

import fcntl
import os
from pathlib import Path

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.support.checked_files import store_failures

LOCK_NAME = "lock"


class FolderLock:
    """Held by one process at a time; the system takes it back when the process ends."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder where there is none, and takes the lock.

        Raises:
            StoreFailed: another process has it, or the folder cannot be used.
        """
        path = folder / LOCK_NAME
        with store_failures(folder, "cannot be used"):
            folder.mkdir(parents=True, exist_ok=True)
            # Not through a link: what it leads to would be emptied.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 20, 0).decode(errors="replace") or "unknown"
            os.close(self._fd)
            raise StoreFailed(f"{folder} is open already, in process {holder}: one process at a time has it") from error
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            os.close(self._fd)
            raise StoreFailed(f"{path} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Gives the lock back. Releasing twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sync_folder(folder: Path) -> None:
    """Returns once the names in a folder are on the disk. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
