"""Finds the files of a data set: files, globs and folders, on this machine or behind a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as arrow_fs
from fsspec.core import url_to_fs
from fsspec.utils import glob_translate

from elastable.embedding_store.errors import BadInput

if TYPE_CHECKING:
    import fsspec

FileSystem: TypeAlias = "arrow_fs.FileSystem | fsspec.AbstractFileSystem"
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: Schemes that Arrow opens itself; fsspec opens every other.
_ARROW_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
_WILD = re.compile(r"[*?\[]")
#: A name that begins with "." or "_", like those that Spark and Hive write next to data.
_HIDDEN = re.compile(r"(^|/)[._]")
_COMPRESSED = (".gz", ".bz2", ".zst", ".xz", ".lz4", ".zip")
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a data set.

    Attributes:
        filesystem: A `pyarrow.fs.FileSystem`.
        path: Its path there.
        name: Its name in errors: the path or URL.
        partitions: (key, value) of each `key=value` folder it lies in, outermost first; None is Hive's null.
    """

    filesystem: arrow_fs.FileSystem
    path: str
    name: str
    partitions: tuple[tuple[str, str | None], ...] = ()

    def open(self) -> pa.NativeFile:
        """Opens the file for reading at any position.

        Raises:
            BadInput: it cannot be opened.
        """
        try:
            return self.filesystem.open_input_file(self.path)
        except (OSError, pa.ArrowException) as error:
            raise BadInput(f"{self.name}: cannot be read: {error}") from error

    def __str__(self) -> str:
        return self.name


def find_files(
    paths: Paths, kind: str, suffixes: Sequence[str], filesystem: FileSystem | None = None
) -> list[DataFile]:
    """The files that `paths` name, in that order; those of a folder or a glob sorted by path.

    Args:
        paths: A file, a glob (`*`, `?`, `[...]` within a folder's name, `**` for folders of any depth), a folder with
            all its files, or several of these. Paths of this machine, or URLs.
        kind: "Parquet" or "CSV", for messages.
        suffixes: Allowed endings of file names in a folder.
        filesystem: A `pyarrow.fs.FileSystem` or an fsspec file system that all paths are of; None: this machine's, or
            that of a path's URL.

    Raises:
        BadInput: no path, no such file, a folder with files of another kind, a URL that nothing opens, a compressed
            file.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise BadInput(f"{kind}: no files given")
    found: list[DataFile] = []
    for path in given:
        opened = _Opened.of(path, filesystem, kind)
        try:
            found.extend(opened.files(kind, suffixes))
        except (OSError, pa.ArrowException) as error:
            raise BadInput(f"{kind}: {opened.name}: cannot be listed: {error}") from error
    for file in found:
        if kind == "CSV" and file.path.endswith(_COMPRESSED):
            raise BadInput(f"{file}: is compressed, and records are fetched by number: decompress it, or write Parquet")
    return found


@dataclass(frozen=True, slots=True)
class _Opened:
    """A path with its file system: Arrow's, or fsspec's wrapped by Arrow."""

    arrow: arrow_fs.FileSystem
    fsspec: fsspec.AbstractFileSystem | None
    path: str
    name: str

    @classmethod
    def of(cls, path: str | os.PathLike[str], filesystem: FileSystem | None, kind: str) -> _Opened:
        text = os.fspath(path)
        if filesystem is not None:
            return cls._on(filesystem, text, text)
        scheme, separator, _ = text.partition("://")
        if not separator:
            return cls(arrow_fs.LocalFileSystem(), None, str(Path(text).expanduser().absolute()), text)
        try:
            if scheme in _ARROW_SCHEMES:
                opened, place = _arrow_from_url(text)
                return cls(opened, None, place, text)
            opened, place = url_to_fs(text)
            return cls._on(opened, place, text)
        except (ValueError, ImportError, OSError, pa.ArrowException) as error:
            raise BadInput(f"{kind}: {text}: no file system opens this URL: {error}") from error

    @classmethod
    def _on(cls, filesystem: FileSystem, path: str, name: str) -> _Opened:
        if isinstance(filesystem, arrow_fs.FileSystem):
            return cls(filesystem, None, path, name)
        if not hasattr(filesystem, "open") or not hasattr(filesystem, "find"):
            raise BadInput(f"filesystem={filesystem!r}: give a pyarrow.fs.FileSystem or an fsspec file system")
        return cls(arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(filesystem)), filesystem, path, name)

    def files(self, kind: str, suffixes: Sequence[str]) -> list[DataFile]:
        found = self._kind()
        if found is arrow_fs.FileType.File:
            return [DataFile(self.arrow, self.path, self.name)]
        if _WILD.search(self.path):
            return self._matching(kind)
        if found is not arrow_fs.FileType.Directory:
            raise BadInput(f"{kind}: {self.name}: no such file")
        folder = self.path.rstrip("/")
        inside = [path for path in self._below(folder) if not _HIDDEN.search(_relative(path, folder))]
        for path in inside:
            if not path.endswith(tuple(suffixes)):
                raise BadInput(
                    f"{kind}: {self.name}: {_relative(path, folder)} in this folder does not end in "
                    f"{' or '.join(suffixes)}; say which files by a glob, as {self.name.rstrip('/')}/**/*{suffixes[0]}"
                )
        if not inside:
            raise BadInput(f"{kind}: {self.name}: an empty folder")
        return [self._file(path, folder) for path in inside]

    def _matching(self, kind: str) -> list[DataFile]:
        parts = self.path.split("/")
        fixed = next(place for place, part in enumerate(parts) if _WILD.search(part))
        folder = "/".join(parts[:fixed])
        pattern = re.compile(glob_translate("/".join(parts[fixed:])))
        matching = [path for path in self._below(folder) if pattern.fullmatch(_relative(path, folder))]
        if not matching:
            raise BadInput(f"{kind}: {self.name}: no file matches")
        return [self._file(path, folder) for path in matching]

    def _file(self, path: str, folder: str) -> DataFile:
        name = path
        if "://" in self.name:
            name = path if "://" in path else f"{self.name.partition('://')[0]}://{path.lstrip('/')}"
        return DataFile(self.arrow, path, name, tuple(_partitions(_relative(path, folder).split("/")[:-1])))

    def _below(self, folder: str) -> list[str]:
        if self.fsspec is not None:
            return sorted(self.fsspec.find(folder + "/"))
        inside = self.arrow.get_file_info(arrow_fs.FileSelector(folder or "/", recursive=True, allow_not_found=True))
        return sorted(entry.path for entry in inside if entry.is_file)

    def _kind(self) -> arrow_fs.FileType:
        if self.fsspec is None:
            return self.arrow.get_file_info(self.path.rstrip("/")).type
        if not self.path.endswith("/") and not _WILD.search(self.path) and self.fsspec.isfile(self.path):
            return arrow_fs.FileType.File
        if _WILD.search(self.path) or not self.fsspec.isdir(self.path):
            return arrow_fs.FileType.NotFound
        return arrow_fs.FileType.Directory


def _arrow_from_url(url: str) -> tuple[arrow_fs.FileSystem, str]:
    """Arrow's file system of a URL. Glob characters are not valid in a URL, so they are removed while it is parsed."""
    place, question, options = url.partition("?")
    if question and "=" not in options:  # a glob's question mark
        place, question, options = url, "", ""
    wild = _WILD.search(place)
    cut = len(place) if wild is None else place.rindex("/", 0, wild.start()) + 1
    opened, base = arrow_fs.FileSystem.from_uri(place[:cut] + question + options)
    return opened, base if wild is None else f"{base.rstrip('/')}/{place[cut:]}"


def _relative(path: str, folder: str) -> str:
    """The part of a path below a folder; for a web server without URL escapes."""
    below = path[len(folder) :].lstrip("/")
    return unquote(below) if path.startswith(("http://", "https://")) else below


def _partitions(folders: Iterable[str]) -> Iterable[tuple[str, str | None]]:
    for folder in folders:
        key, equals, value = folder.partition("=")
        if equals and key:
            yield unquote(key), None if value == _NULL_PARTITION else unquote(value)
