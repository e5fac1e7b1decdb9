"""Finds the files of a data set: files, globs and folders, on this machine or behind a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as arrow_fs
from fsspec.core import url_to_fs
from fsspec.utils import glob_translate

from elastable.embedding_store.errors import BadInput, Unavailable

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
        place = _place(os.fspath(path), filesystem, kind)
        try:
            found.extend(_files_at(place, kind, suffixes))
        except BadInput:
            raise
        except Exception as error:
            # fsspec's file systems raise whatever their libraries do.
            raise BadInput(f"{kind}: {place}: cannot be listed: {error}") from error
    for file in found:
        if kind == "CSV" and file.path.endswith(_COMPRESSED):
            raise BadInput(f"{file}: is compressed, and records are fetched by number: decompress it, or write Parquet")
    return found


def _place(text: str, filesystem: FileSystem | None, kind: str) -> DataFile:
    """A path that the user gave, a file or not, on Arrow's file system or on fsspec's wrapped by Arrow."""
    if filesystem is not None:
        return DataFile(_as_arrow(filesystem), text, text)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return DataFile(arrow_fs.LocalFileSystem(), str(Path(text).expanduser().absolute()), text)
    try:
        if scheme in _ARROW_SCHEMES:
            return DataFile(*_arrow_from_url(text), text)
        opened, path = url_to_fs(text)
    except (ValueError, ImportError, OSError, pa.ArrowException) as error:
        raise BadInput(f"{kind}: {text}: no file system opens this URL: {error}") from error
    return DataFile(_as_arrow(opened), path, text)


def _as_arrow(filesystem: FileSystem) -> arrow_fs.FileSystem:
    if isinstance(filesystem, arrow_fs.FileSystem):
        return filesystem
    if not hasattr(filesystem, "open") or not hasattr(filesystem, "find"):
        raise BadInput(f"filesystem={filesystem!r}: give a pyarrow.fs.FileSystem or an fsspec file system")
    return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(filesystem))


def _files_at(place: DataFile, kind: str, suffixes: Sequence[str]) -> list[DataFile]:
    """The place itself, or what its folder or glob holds."""
    path = place.path.rstrip("/")
    # A web server's folder looks like a file, unless its URL ends in "/".
    is_folder = place.path.endswith("/") and isinstance(place.filesystem, arrow_fs.PyFileSystem)
    found = arrow_fs.FileType.Directory if is_folder else place.filesystem.get_file_info(path or "/").type
    if found is arrow_fs.FileType.File:
        return [replace(place, path=path)]
    if _WILD.search(path):
        if not (matching := _matching(place)):
            raise BadInput(f"{kind}: {place}: no file matches")
        return matching
    if found is not arrow_fs.FileType.Directory:
        raise BadInput(f"{kind}: {place}: no such file")
    inside = [below for below in _below(place, path) if not _HIDDEN.search(_relative(below.path, path))]
    for file in inside:
        if not file.path.endswith(tuple(suffixes)):
            raise BadInput(
                f"{kind}: {place}: {_relative(file.path, path)} in this folder does not end in "
                f"{' or '.join(suffixes)}; say which files by a glob, as {place.name.rstrip('/')}/**/*{suffixes[0]}"
            )
    if not inside:
        raise BadInput(f"{kind}: {place}: an empty folder")
    return inside


def files_matching(glob: str, filesystem: FileSystem | None = None) -> list[DataFile]:
    """The files that match a glob now, if any, sorted by path; else as `find_files`."""
    place = _place(glob, filesystem, "files")
    try:
        return _matching(place)
    except Exception as error:  # as in find_files
        raise Unavailable(f"{place}: cannot be listed: {error}") from error


def _matching(place: DataFile) -> list[DataFile]:
    parts = place.path.split("/")
    fixed = next(number for number, part in enumerate(parts) if _WILD.search(part))
    folder = "/".join(parts[:fixed])
    wild = "/".join(parts[fixed:])
    pattern, asked = re.compile(glob_translate(wild)), _HIDDEN.search(wild)
    found = [(file, _relative(file.path, folder)) for file in _below(place, folder)]
    return [file for file, name in found if pattern.fullmatch(name) and (asked or not _HIDDEN.search(name))]


def _below(place: DataFile, folder: str) -> list[DataFile]:
    """All files of a folder, in the order of their paths."""
    selector = arrow_fs.FileSelector(folder or "/", recursive=True, allow_not_found=True)
    paths = sorted(entry.path for entry in place.filesystem.get_file_info(selector) if entry.is_file)
    scheme, url, _ = place.name.partition("://")
    found = []
    for path in paths:
        name = f"{scheme}://{path.lstrip('/')}" if url and "://" not in path else path
        folders = _relative(path, folder).split("/")[:-1]
        found.append(DataFile(place.filesystem, path, name, tuple(_partitions(folders))))
    return found


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
