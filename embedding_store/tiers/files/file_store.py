"""The store whose rows lie in files, for tables larger than memory; hot rows stay in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.memory_table import MemoryTable, StagedUpdate
from elastable.embedding_store.errors import BadInput, StoreBroken, StoreFailed
from elastable.embedding_store.log.folder_lock import FolderLock
from elastable.embedding_store.rows.commit_checks import require_version
from elastable.embedding_store.support.row_budget import RowBudget
from elastable.embedding_store.tables.lookup_request import LookupRequest
from elastable.embedding_store.tiers.files.file_manifest import (
    FileManifest,
    SavedTable,
    read_manifest,
    write_manifest,
)
from elastable.embedding_store.tiers.files.file_table import FileTable, SavedIds

__all__ = ["DEFAULT_BUDGET", "FileStore"]

DEFAULT_BUDGET = 1 << 30
"""Bytes of memory for rows, where nothing else is said."""

_ON_THE_WAY = 16  # one part in so many of the budget is for rows between files and memory
_SETTLE_AFTER = 1 << 12  # reads of rows outside of memory, until it is looked which of them are hot


class FileStore(MemoryStore):
    """As `MemoryStore`, with rows in files of a folder and the hot ones of them in memory.

    What was committed is durable at `flush` and `close`. A store that was
    closed cleanly opens again with its tables, rows, slots and version. One
    that was not is refused, as its files may hold any mixture of versions:
    restore a checkpoint. One process at a time has a folder.

    Where writing fails in the middle of a change (a disk that breaks; a full
    one is met before), the store is of no use any more and says so.
    """

    def __init__(
        self,
        folder: str | Path,
        memory_budget: int = DEFAULT_BUDGET,
        threads: int | None = None,
        *,
        unclean: str = "refuse",
        direct_bytes: int | None = None,
        before_image_bytes: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Opens the store in a folder, or begins one in an empty or missing folder.

        Args:
            folder: Its place; nothing else may lie there.
            memory_budget: Bytes of memory for rows of all tables together, with
                what it takes to find hot ones. The directory of ids lies beside it.
            threads: As for `MemoryStore`.
            unclean: What to do with a store that was not closed cleanly:
                "refuse" it, or "drop" all that it holds.
            direct_bytes: As for `MemoryStore`.
            before_image_bytes: As for `MemoryStore`; in memory, beside the budget.
            timeout_s: As for `MemoryStore`.

        Raises:
            BadInput: a budget below 1 MiB, or another word for `unclean`.
            StoreFailed: the folder is another store's, in use, unclean, or corrupt; names it.
        """
        if memory_budget < 1 << 20:
            raise BadInput(f"memory budget of a file store must be at least 1 MiB, got {memory_budget} bytes")
        if unclean not in ("refuse", "drop"):
            raise BadInput(f'unclean must be "refuse" or "drop", got {unclean!r}')
        super().__init__(threads, direct_bytes=direct_bytes, before_image_bytes=before_image_bytes, timeout_s=timeout_s)
        self.folder = Path(folder)
        self._budget = RowBudget(memory_budget - memory_budget // _ON_THE_WAY)
        self._folders: dict[str, str] = {}
        self._folder_lock = FolderLock(self.folder)
        try:
            self._open(unclean == "drop")
        except BaseException:
            self._close_files()
            raise

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        rows = super().lookup(ids, version)
        self._settle()
        return rows

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        super().lookup_into(requests, version, split)
        self._settle()

    def reset_version(self, version: int) -> None:
        require_version(version)
        with self._lock.writing():
            self._require_open()
            self._pins.refuse_change(f"the version cannot be reset to {version}")
            self._soil()
            self._version = version
            for table in self._tables.values():
                table.settle(version)
            self._changes += 1

    def drop_table(self, table: str) -> None:
        """As in `EmbeddingStore.drop_table`; the disk is given back."""
        with self._lock.writing():
            self._table(table)
            self._pins.refuse_change(f"table {table!r} cannot be dropped")
            self._soil()
            dropped = self._tables.pop(table)
            del self._folders[table]
            self._changes += 1
            assert isinstance(dropped, FileTable)
            dropped.remove_files()

    def flush(self, timeout_s: float = 600.0) -> None:
        """Returns once all that was committed is on the disk.

        Raises:
            StoreFailed: it cannot be written; nothing is lost while the store is open: make room, and repeat.
        """
        with self._lock.writing():
            self._require_open()
            self._flush()

    def close(self) -> None:
        """Makes everything durable and gives the folder back. Closing twice is harmless.

        Raises:
            StoreFailed: it cannot be made durable; the store is closed all the same.
        """
        with self._lock.writing():
            if self._closed:
                return
            try:
                if self._failed() is None:
                    self._flush()
            finally:
                self._close_files()
                self._closed = True
                self._pins.close()
                self._tables.clear()
        self._pool.close()

    def _open(self, drop_unclean: bool) -> None:
        manifest = read_manifest(self.folder)
        self._made, self._clean = manifest.made, False
        if not manifest.clean and not drop_unclean:
            raise StoreFailed(
                f"{self.folder} was not closed cleanly, so its rows may be of different versions: restore a "
                "checkpoint, into an empty folder or with unclean=drop, which drops what this one holds"
            )
        if not manifest.clean:
            for entry in self.folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
            write_manifest(self.folder, FileManifest(made=self._made))
        else:
            self._version = manifest.version
            for name, table in manifest.tables.items():
                self._tables[name] = self._file_table(table.spec, table.folder, table.ids)
                self._folders[name] = table.folder
        self._clean = True

    def _new_table(self, spec: TableSpec) -> FileTable:
        self._soil()
        self._made += 1
        name = f"{self._made:06d}"
        table = self._file_table(spec, name)
        self._folders[spec.name] = name
        return table

    def _file_table(self, spec: TableSpec, folder: str, saved: SavedIds | None = None) -> FileTable:
        return FileTable(spec, self._direct_bytes, self.folder / folder, self._budget, self._soil, saved)

    def _stage(self, commit: Commit) -> list[tuple[MemoryTable, StagedUpdate]]:
        self._require_open()
        return super()._stage(commit)

    def _finish(self, commit: Commit, staged: list[tuple[MemoryTable, StagedUpdate]]) -> None:
        self._soil()
        with self._all_or_broken():
            super()._finish(commit, staged)

    def _settle(self) -> None:
        """Lets rows that were read often stay in memory."""
        tables = [table for table in list(self._tables.values()) if isinstance(table, FileTable)]
        if sum(table.file_rows.missed for table in tables) < _SETTLE_AFTER:
            return
        with self._lock.writing(), self._all_or_broken():
            for table in tables:
                table.file_rows.settle(self._pool)

    def _soil(self) -> None:
        """Before the first change after a flush: whoever opens the folder is told that it is not as saved."""
        if self._clean:
            write_manifest(self.folder, FileManifest(False, self._version, {}, self._made))
            self._clean = False

    def _flush(self) -> None:
        if self._clean:
            return
        tables = {}
        for name, table in self._tables.items():
            assert isinstance(table, FileTable)
            tables[name] = SavedTable(table.spec, self._folders[name], table.save())
        write_manifest(self.folder, FileManifest(True, self._version, tables, self._made))
        self._clean = True

    def _close_files(self) -> None:
        for table in self._tables.values():
            table.close()
        self._folder_lock.release()

    @contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    def _failed(self) -> BaseException | None:
        """What broke in the middle of a change, if anything did."""
        failures = [self._failure, *(table.failure for table in self._tables.values() if isinstance(table, FileTable))]
        return next((failure for failure in failures if failure is not None), None)

    def _require_open(self) -> None:
        failure = self._failed()
        if failure is not None:
            raise StoreBroken(
                f"{self.folder} failed in the middle of a change; restore a checkpoint: {failure}"
            ) from failure
        if self._closed:
            raise StoreFailed(f"the file store {self.folder} is closed")
