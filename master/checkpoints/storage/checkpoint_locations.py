"""Where checkpoints are: folders and URLs, and the names of checkpoints in them."""

import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.errors import BadInput, CheckpointError, StoreFailed
from elastable.embedding_store.support.checked_files import FolderLock
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.checkpoints.storage.checkpoint_files import (
    MANIFEST,
    CheckpointFiles,
    LocalFiles,
    Part,
    refuse_more,
)
from elastable.master.checkpoints.storage.manifest import Manifest

_log = logging.getLogger(__name__)


def files_at(place: str | Path | CheckpointFiles) -> CheckpointFiles:
    """The folder of checkpoints at a path of this machine, or at a URL that fsspec knows.

    Raises:
        BadInput: a URL of a kind that is unknown here, or whose driver is not installed.
    """
    if isinstance(place, CheckpointFiles):
        return place
    if isinstance(place, Path) or "://" not in place:
        return LocalFiles(Path(place))
    try:
        system, path = url_to_fs(place)
    except ImportError as error:
        raise BadInput(f"{redacted(place)}: its driver is not installed: {error}") from error
    except ValueError as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise BadInput(f"{redacted(place)}: {error}; known kinds: {known}") from error
    if isinstance(system, LocalFileSystem):
        return LocalFiles(Path(path))
    return RemoteFiles(system, path, redacted(place).rstrip("/"), place)


def require_writable_checkpoints(place: str | Path) -> None:
    """Makes sure that checkpoints can be written there."""
    try:
        files_at(place).probe()
    except OSError as error:
        raise BadInput(f"checkpoints cannot be written to {redacted(str(place))}: {error}") from error


@contextmanager
def claimed_checkpoints(place: str | Path) -> Iterator[None]:
    """Within the block no other job may begin to write checkpoints there; at a URL that is not known."""
    files = files_at(place)
    if not isinstance(files, LocalFiles):
        yield
        return
    try:
        lock = FolderLock(Path(files.place))
    except StoreFailed as error:
        raise BadInput(
            f"another job that runs now writes its checkpoints there: {error}; give this one another directory, let it "
            "write next to them with --overwrite, or take the job over with --take-over"
        ) from error
    with lock:
        yield


def checkpoint_names(files: CheckpointFiles) -> list[str]:
    """The checkpoints in a folder by name, the oldest version first; where folders are not renamed into their
    place, only those with a manifest."""
    drafts = set(files.drafts())
    found = [(order, name) for name in files.names() if (order := version_named(name)) and name not in drafts]
    return [name for _, name in sorted(found)]


def newest_checkpoint(place: str | Path) -> str | None:
    """The address of the checkpoint at `place`, or of the newest one in it; None where there is none.

    Where several jobs have written, it is the newest of the job that wrote last, and a warning says so.

    Raises:
        CheckpointError: the place cannot be read.
    """
    found = located(place)
    return None if found is None else found[0].at(found[1])


def located(place: str | Path) -> tuple[CheckpointFiles, str] | None:
    """The folder and the name of the checkpoint that `newest_checkpoint` finds."""
    text = str(place).rstrip("/") or "."
    try:
        for folder in (text, f"{text}/checkpoints"):
            files = files_at(folder)
            if MANIFEST in files.names():
                return _in_its_folder(folder)
            names = checkpoint_names(files)
            if names:
                return files, _of_last_job(files, names)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {error}") from error
    return None


def _of_last_job(files: CheckpointFiles, names: list[str]) -> str:
    """Of the checkpoints of a folder, the oldest version first, the newest one of the job that wrote last."""
    manifests = {name: found for name in names if (found := _readable(files, name)) is not None}
    if names[-1] not in manifests:
        return names[-1]  # whoever opens it says what is wrong with it
    last = max(names, key=lambda name: (manifests[name].written if name in manifests else "", names.index(name)))
    jobs = {name: str(found.job.get("job", "")) for name, found in manifests.items()}
    newest = next(name for name in reversed(names) if jobs.get(name) == jobs[last])
    others = sorted({*jobs.values()} - {jobs[last]})
    if others:
        _log.warning(
            "%s holds checkpoints of several jobs: taken is %s of job %s, which wrote last, and none of %s",
            redacted(files.address),
            newest,
            jobs[last],
            ", ".join(others),
        )
    return newest


_LARGEST_MANIFEST = 256 << 20  # a million files, or the incarnations of an asynchronous job, take a good part of it


def read_manifest(files: CheckpointFiles, name: str) -> Manifest:
    """The manifest of a checkpoint. Raises `OSError`, `CheckpointError`."""
    return Manifest.from_json(files.read(f"{name}/{MANIFEST}", _LARGEST_MANIFEST).tobytes())


def _readable(files: CheckpointFiles, name: str) -> Manifest | None:
    try:
        return read_manifest(files, name)
    except (OSError, CheckpointError):
        return None


def _in_its_folder(checkpoint: str) -> tuple[CheckpointFiles, str]:
    if "://" in checkpoint:
        home, _, name = checkpoint.rpartition("/")
        return files_at(home), name
    # The link runs/latest has a name, but a checkpoint's neighbours are those of the folder that it links to.
    path = Path(checkpoint)
    if path.is_symlink() or not path.name or path.name == "..":
        path = path.resolve()
    return LocalFiles(path.parent), path.name


_NAME = re.compile(r"ckpt-(\d{10,})(?:-(\d+))?")


def checkpoint_name(version: int, taken: list[str]) -> str:
    """A name for a checkpoint of this version that sorts behind those of the same version in `taken`."""
    plain = f"ckpt-{version:010d}"
    again = [int(found[2] or 1) for name in taken if (found := _NAME.fullmatch(name)) and int(found[1]) == version]
    return f"{plain}-{max(again) + 1}" if again else plain


def version_named(name: str) -> tuple[int, int] | None:
    """(version, which one of this version) that the name of a checkpoint says; None: it is none of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 1))


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

    def read(self, path: str, most: int | None = None) -> UInt8:
        with _as_os_errors(path):
            content = self._system.cat_file(self._at(path), end=None if most is None else most + 1)
        refuse_more(path, len(content), most)
        return np.frombuffer(content, np.uint8)

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
