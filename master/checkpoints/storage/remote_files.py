"""Checkpoints on object stores and the like, through fsspec."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.checkpoints.storage.checkpoint_files import MANIFEST, CheckpointFiles, LocalFiles, Part
from elastable.master.checkpoints.storage.checkpoint_names import version_named

__all__ = ["RemoteFiles", "files_at_url"]


def files_at_url(url: str) -> CheckpointFiles:
    """The folder of checkpoints at a URL.

    Raises:
        BadInput: the kind of URL is unknown, its driver is not installed, or it cannot be read.
    """
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise BadInput(f"{redacted(url)}: its driver is not installed: {error}") from error
    except ValueError as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise BadInput(f"{redacted(url)}: {error}; known kinds: {known}") from error
    if isinstance(system, LocalFileSystem):
        return LocalFiles(Path(path))
    return RemoteFiles(system, path, redacted(url).rstrip("/"), url)


class RemoteFiles(CheckpointFiles):
    """A folder where nothing can be renamed in one step: a folder is a checkpoint once it has its manifest.

    Args:
        system: An fsspec file system.
        path: The folder, as the file system names it.
        address: The folder, as a person writes it.
        url: The folder, with whatever opens it; "": the address does.
    """

    def __init__(self, system: fsspec.AbstractFileSystem, path: str, address: str, url: str = "") -> None:
        self._system = system
        self._path = path.rstrip("/")
        self.address = address
        self._url = url or address

    @property
    def place(self) -> str:
        return self._url

    def names(self, folder: str = "") -> list[str]:
        return sorted(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        def listed() -> list[dict[str, str | int]]:
            try:
                # What another process wrote is not in what this one remembers.
                self._system.invalidate_cache(self._at(folder))
                found: list[dict[str, str | int]] = self._system.ls(self._at(folder), detail=True)
                return found
            except FileNotFoundError:
                return []

        at = self._at(folder).strip("/")
        with _as_os_errors(folder):
            entries = [(str(entry["name"]).strip("/"), int(entry.get("size") or 0)) for entry in listed()]
        # Some systems list a mark of the folder itself.
        return {name.rpartition("/")[2]: size for name, size in entries if name != at}

    def read(self, path: str) -> UInt8:
        with _as_os_errors(path):
            return np.frombuffer(self._system.cat_file(self._at(path)), np.uint8)

    def begin(self, name: str) -> str:
        with _as_os_errors(name):  # the draft is the checkpoint's own folder
            self._system.makedirs(self._at(name), exist_ok=True)
        return name

    def write(self, path: str, parts: Sequence[Part]) -> None:
        with _as_os_errors(path), self._system.open(self._at(path), "wb") as file:
            for part in parts:
                file.write(part)

    def commit(self, draft: str, name: str, manifest: Sequence[Part]) -> None:
        with _as_os_errors(name):
            # In one call: an upload that breaks off leaves no manifest, and not the beginning of one.
            self._system.pipe_file(self._at(f"{name}/{MANIFEST}"), b"".join(manifest))

    def remove(self, name: str) -> None:
        with _as_os_errors(name):
            self._system.rm_file(self._at(f"{name}/{MANIFEST}"))
        self._remove_files(name)

    def _remove_files(self, folder: str) -> None:
        with _as_os_errors(folder):
            self._system.rm(self._at(folder), recursive=True)

    def drafts(self) -> list[str]:
        return [name for name in self.names() if version_named(name) and MANIFEST not in self.names(name)]

    def discard(self, draft: str) -> None:
        try:
            # A manifest that was written although its writing failed goes first.
            self.remove(draft) if MANIFEST in self.names(draft) else self._remove_files(draft)
        except OSError:
            return

    def probe(self) -> None:
        path = self._at(f".probe-{uuid.uuid4().hex}")
        with _as_os_errors(path):
            self._system.pipe_file(path, b"probe")
            self._system.rm_file(path)

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}" if path else self._path


@contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
