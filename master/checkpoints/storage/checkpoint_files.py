"""The file system that checkpoints are stored on: the interface, and the one of this machine."""

import errno
import os
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.support.checked_files import open_regular

Part = memoryview
"""Contiguous bytes that are written one after the other."""

MANIFEST = "manifest.json"

_DRAFT, _GOING = ".writing-", ".removing-"
_MOST_AT_ONCE = 16 << 20


class CheckpointFiles(ABC):
    """A folder in which checkpoints lie side by side, each a folder of files.

    Names and paths are relative to it, with "/" between. Whatever fails raises
    `OSError`. Any number of threads may write files of one draft.
    """

    address: str
    """The folder, as a person writes it."""

    @property
    def place(self) -> str:
        """The folder, as a process of any host opens it: a path from the root, or a URL, which may hold a password."""
        return self.address

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Sorted names of the files in a folder; none where there is no such folder."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Name -> bytes of every file in a folder; none where there is no such folder."""

    @abstractmethod
    def read(self, path: str, most: int | None = None) -> UInt8:
        """A file, uint8 `[bytes]`; what is no file there, a link for instance, or has more than `most` bytes, is not
        read."""

    @abstractmethod
    def begin(self, name: str) -> str:
        """A new folder for the checkpoint `name`, which counts as one only after `commit`."""

    @abstractmethod
    def write(self, path: str, parts: Sequence[Part]) -> None:
        """Writes a file that was not there; once this returns it survives a loss of power."""

    @abstractmethod
    def commit(self, draft: str, name: str, manifest: Sequence[Part]) -> None:
        """Writes the manifest, the last file of a draft: it becomes the checkpoint `name` in one step."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a checkpoint; if it is interrupted, what is left does not count as one."""

    @abstractmethod
    def drafts(self) -> list[str]:
        """Names of folders that a writer or remover left when it was killed."""

    @abstractmethod
    def discard(self, draft: str) -> None:
        """Removes a draft; missing ones, and those that cannot be removed, are skipped."""

    @abstractmethod
    def probe(self) -> None:
        """Makes the folder, and writes a file there that is gone afterwards."""

    def at(self, path: str) -> str:
        """A path below the folder, as a person writes it."""
        return f"{self.address}/{path}"


def refuse_more(path: str, size: int, most: int | None) -> None:
    """Raises `OSError` for a file of more than `most` bytes."""
    if most is not None and size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes or more, and may have {most:,}", path)


class LocalFiles(CheckpointFiles):
    """A folder of this machine's file system: files are fsynced, and a draft is renamed into its place.

    Args:
        home: The folder; made by the first `begin`.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self.address = str(home)

    @property
    def place(self) -> str:
        return str(self._home.absolute())

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._home / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(self._home / folder) as found:
                return {entry.name: entry.stat().st_size for entry in found}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def read(self, path: str, most: int | None = None) -> UInt8:
        with open(open_regular(self._home / path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            refuse_more(path, size, most)
            content = np.empty(size, np.uint8)
            done = 0
            # Pages that are new are zeroed first: by pieces they are still in the cache when they are filled.
            while got := file.readinto(content.data[done : done + _MOST_AT_ONCE]):
                done += got
            return content[:done]

    def begin(self, name: str) -> str:
        draft = f"{_DRAFT}{uuid.uuid4().hex}"
        (self._home / draft).mkdir(parents=True)
        return draft

    def write(self, path: str, parts: Sequence[Part]) -> None:
        number = os.open(self._home / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for part in parts:
                done = 0
                while done < len(part):
                    done += self._put(number, part[done : done + _MOST_AT_ONCE])
            self._sync(number)
        finally:
            os.close(number)

    def commit(self, draft: str, name: str, manifest: Sequence[Part]) -> None:
        self.write(f"{draft}/{MANIFEST}", manifest)
        self._sync_folder(draft)
        self._rename(draft, name)
        self._sync_folder("")

    def remove(self, name: str) -> None:
        going = f"{_GOING}{uuid.uuid4().hex}"
        self._rename(name, going)
        self._delete(going)

    def drafts(self) -> list[str]:
        return [name for name in self.names() if name.startswith((_DRAFT, _GOING))]

    def discard(self, draft: str) -> None:
        going = f"{_GOING}{uuid.uuid4().hex}"
        try:
            # A writer that is not dead after all finds nothing to rename into its place, rather than a half of it.
            self._rename(draft, going)
        except OSError:
            return
        self._delete(going)

    def probe(self) -> None:
        self._home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._home):
            return

    def _delete(self, folder: str) -> None:
        shutil.rmtree(self._home / folder, ignore_errors=True)

    def _put(self, number: int, part: Part) -> int:
        return os.write(number, part)

    def _sync(self, number: int) -> None:
        os.fsync(number)

    def _rename(self, old: str, new: str) -> None:
        (self._home / old).rename(self._home / new)

    def _sync_folder(self, folder: str) -> None:
        number = os.open(self._home / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._sync(number)
        finally:
            os.close(number)
