"""Files that appear in a folder, as a stream."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.master.api import BadEvent, Span, Waiting
from elastable.worker.readers.batch.pytrees import gathered
from elastable.worker.readers.batch.reader import Batch, ModelInputs, Reader
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.data_files import DataFile, FileSystem, files_matching
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from elastable.worker.readers.streams.event_reader import EventReader

_OPEN = 4  # readers of files that are kept
_POSITION = re.compile(r"([0-9]{1,19})(?:/([0-9]{1,19}))?")
_PARQUET = (".parquet", ".parq", ".pq")


class FolderReader(EventReader):
    """Parquet or CSV files that appear in a folder, such as one an hour, in the order of their paths.

    A file is complete when it is there: write it under a name that the pattern does not match, and rename it. Files are
    partitions; positions are numbers of records, with those of the whole file: `32/50`. A file that comes late is
    trained when it comes; files may be deleted once they are trained. One that the job has seen, or is to end in, and
    that is deleted or changed before it is trained ends the job. There are no bad events: a file or record that cannot
    be read ends the job, by name. The position of every file is in every version: prefer few large files.

    Args:
        path: A folder, of this machine or behind a URL.
        pattern: Glob of the files in it; what ends in `.parquet` is Parquet, anything else CSV.
        steps_per_epoch: Versions in an epoch.
        filesystem: As of `et.ParquetReader`.
        options: Further ones of `et.ParquetReader` or `et.CsvReader`, such as `label`.

    Raises:
        BadInput: options that cannot be.
    """

    look_s = 1.0  # a look lists the folder

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str = "*.parquet",
        steps_per_epoch: int = 1_000,
        *,
        filesystem: FileSystem | None = None,
        **options: Any,
    ) -> None:
        self._glob = f"{os.fspath(path).rstrip('/')}/{pattern}"
        super().__init__(f"et.FolderReader({self._glob!r})", steps_per_epoch)
        if not set("*?[") & set(pattern):
            raise BadInput(f"{self._name}: pattern={pattern!r}: write a glob, such as '*.parquet'")
        self._kind = ParquetReader if pattern.endswith(_PARQUET) else CsvReader
        self._filesystem, self._options, self._inputs = filesystem, options, ModelInputs()
        self._readers: OrderedDict[str, Reader] = OrderedDict()
        self._counts: dict[str, tuple[object, int]] = {}  # name -> time and size of the file, and its records

    def for_inputs(self, inputs: ModelInputs) -> Self:
        other = copy(self)
        other._inputs, other._readers = inputs, OrderedDict()
        return other

    def ahead(self, positions: Mapping[str, str], most: int, until: Mapping[str, str] | None) -> Mapping[str, Waiting]:
        found: dict[str, Waiting] = {}
        files, (listed, last) = self._files(), (0, "")
        for name in {**positions, **(until or {})}:
            done, seen = self._parsed(positions.get(name, "0"))
            whole = seen or 0 if until is None else self._record(until.get(name, "0"))
            if name not in files and done < whole:
                raise BadInput(
                    f"{self._name}: there is no file {name!r}, of which the records from {done} to {whole} are not "
                    "trained; bring it back, or begin a new job (names are whole paths: the first file is "
                    f"{next(iter(files), '')!r})"
                )
        for name, file in files.items():
            start, seen = self._parsed(positions.get(name, "0"))
            if start and start == seen:
                continue
            end = count = self._count(file)
            if seen not in (None, count):
                raise BadInput(
                    f"{self._name}: {name!r} has {count} records, and had {seen} when {start} of them were planned: "
                    "files are not changed once they are there; bring it back as it was, or begin a new job"
                )
            if until is not None and (end := self._record(until.get(name, "0"))) > count:
                raise BadInput(f"{self._name}: {name!r} has {count} records: no job on it can end at record {end}")
            if start >= end:
                continue
            if listed >= most:  # those after it are asked for once it is planned
                found[last] = replace(found[last], more=True, lag=found[last].lag + end - start)
                continue
            stops = [f"{record}/{count}" for record in range(start + 1, min(end, start + most) + 1)]
            found[name] = Waiting(f"{start}/{count}", stops, start + most < end, end - start, _changed(file))
            listed, last = listed + len(stops), name
        return found

    def ends(self, before: float | None = None) -> Mapping[str, str]:
        found = {}
        for name, file in self._files().items():
            changed = None if before is None else _changed(file)
            if before is not None and changed is None:
                raise BadInput(
                    f"{self._name}: its file system does not say when {name!r} was written: end at positions, or "
                    "at the end (--until)"
                )
            if before is None or (changed is not None and changed < before):
                found[name] = str(self._count(file))
        return found

    def take(self, indices: Int64) -> Batch:
        first = next(iter(self._files()), None)
        if first is None:
            raise self.empty()
        return self._reader(first).take(indices)

    def read(self, spans: Sequence[Span]) -> tuple[Batch | None, tuple[BadEvent, ...]]:
        taken = []
        for span in spans:
            rows = np.arange(self._record(span.start), self._record(span.stop), dtype=np.int64)
            taken.append(self._reader(span.partition).take(rows))
        if len(taken) == 1:
            return taken[0], ()
        counts = [span.events for span in spans]
        places = np.concatenate([np.arange(count) for count in counts])
        return cast("Batch", gathered(np.repeat(np.arange(len(spans)), counts), places, taken.__getitem__)), ()

    def _files(self) -> dict[str, DataFile]:
        """Those that are there, by name."""
        return {file.name: file for file in files_matching(self._glob, self._filesystem)}

    def _reader(self, name: str) -> Reader:
        if name not in self._readers:
            made: Reader = self._kind(name, filesystem=self._filesystem, **self._options)
            self._readers[name] = made.for_inputs(self._inputs)
            while len(self._readers) > _OPEN:
                self._readers.popitem(last=False)
        self._readers.move_to_end(name)
        return self._readers[name]

    def _count(self, file: DataFile) -> int:
        info = file.filesystem.get_file_info(file.path)
        known, stamp = self._counts.get(file.name), (info.mtime_ns, info.size)
        if known is None or known[0] != stamp:
            known = stamp, len(self._kind(file.name, filesystem=self._filesystem, **self._options))
            self._counts[file.name] = known
        return known[1]

    def _parsed(self, position: str) -> tuple[int, int | None]:
        """The number of records, and how many the file had, where the position says so."""
        if not (found := _POSITION.fullmatch(position)):
            raise BadInput(f"{self._name}: position {position[:60]!r}: write a number of records, such as 4711")
        return int(found[1]), None if found[2] is None else int(found[2])

    def _record(self, position: str) -> int:
        return self._parsed(position)[0]


def _changed(file: DataFile) -> float | None:
    """Unix time; None: the file system does not say."""
    nanoseconds = file.filesystem.get_file_info(file.path).mtime_ns
    return None if nanoseconds is None else nanoseconds / 1e9
