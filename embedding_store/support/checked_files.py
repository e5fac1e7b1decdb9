"""Files opened with a check: secrets by their modes, regular files alone; a folder locked; failures by path."""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput, StoreFailed

_MOST_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)


def read_secret(path: str | os.PathLike[str], name: str) -> bytes:
    """The bytes of a file of a key, a token or a password.

    A file that everybody on the machine may read is warned of. It is not
    refused: secrets that are mounted into a container have such modes, and
    nobody else is there.

    Args:
        path: Of the file.
        name: What it is, for messages.

    Raises:
        BadInput: it cannot be read, is longer than any secret, or others may change it.
    """
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{name}: {str(path)!r} cannot be read: {error.strerror or error}") from error
    if len(text) > _MOST_BYTES:
        raise BadInput(f"{name}: {str(path)!r} is longer than {_MOST_BYTES} bytes, and so no secret")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BadInput(
            f"{name}: {str(path)!r} may be changed by others (mode {stat.S_IMODE(found.st_mode):04o}): "
            "`chmod 600` it, and put it where only you may write"
        )
    if found.st_mode & stat.S_IROTH:
        _LOG.warning(
            "%s: everybody on this machine may read %r (mode %04o); `chmod 600` it",
            name,
            str(path),
            stat.S_IMODE(found.st_mode),
        )
    return text


# Files opened to be read, where whoever made them may have put something else in their place


def open_regular(path: Path) -> int:
    """A descriptor to read: not through a link, and not of a pipe, for which opening would wait.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd


@contextmanager
def store_failures(path: Path, what: str) -> Iterator[None]:
    """Raises `StoreFailed` in place of an `OSError`: the path, what is not done there, and why."""
    try:
        yield
    except OSError as error:
        raise StoreFailed(f"{path} {what}: {reason_of(error)}") from error


def reason_of(error: OSError) -> str:
    """What the system said, and what to do where a disk is full."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"{error.strerror}{' (free space on its disk)' if full else ''}"


LOCK_NAME = "lock"


class OpenFile(Closing):
    """Has a file open.

    Attributes:
        fd: Its descriptor; -1: none is open.
    """

    fd = -1

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class FolderLock(OpenFile):
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
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self.fd, 20, 0).decode(errors="replace") or "unknown"
            os.close(self.fd)
            raise StoreFailed(f"{folder} is open already, in process {holder}: one process at a time has it") from error
        try:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            os.close(self.fd)
            raise StoreFailed(f"{path} cannot be written: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Returns once the names in a folder are on the disk. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
