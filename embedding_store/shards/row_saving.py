"""Rows of store servers saved where their job keeps its checkpoints, by the servers themselves and all at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot

__all__ = [
    "ChangedTable",
    "RowSave",
    "RowSaver",
    "SavedFile",
    "SavedRows",
    "SavedTable",
    "ServedRows",
    "TableSave",
    "TakenChanges",
]


@dataclass(frozen=True, slots=True)
class ChangedTable:
    """What changed of one table since a checkpoint.

    Attributes:
        rows: That hold a value of their own.
        changed: How many of them may have changed; None: any may have.
        shrunk: Whether rows were given up.
    """

    rows: int
    changed: int | None = None
    shrunk: bool = False


@dataclass(frozen=True, slots=True)
class TakenChanges:
    """What changed up to `version`, by table."""

    version: int
    tables: Mapping[str, ChangedTable]


@dataclass(frozen=True, slots=True)
class TableSave:
    """What is saved of a table.

    Attributes:
        table: Its name.
        prefix: The names of its files begin so.
        whole: Whether all rows are saved; else those that changed.
        live: Whether the ids of all rows are saved, too.
    """

    table: str
    prefix: str
    whole: bool = True
    live: bool = False


@dataclass(frozen=True, slots=True)
class RowSave:
    """One attempt to save rows.

    Attributes:
        save: 16 bytes that name it.
        place: The folder or URL where checkpoints lie side by side.
        draft: The folder in there that is to become one.
        known: A file that the caller has written into the draft, by which a server knows that it reaches the very same.
        known_bytes: Its size.
        tables: What is saved; none: only what an earlier attempt began is given up.
        mark: Of the changes (`ShardStore.take_changes`), where a table is not saved whole.
        note: Goes into every file.
        probe: Where it is set, a small file whose name begins so is written, too.
    """

    save: bytes
    place: str = ""
    draft: str = ""
    known: str = ""
    known_bytes: int = 0
    tables: tuple[TableSave, ...] = ()
    mark: bytes = b""
    note: Mapping[str, str] = field(default_factory=dict)
    probe: str = ""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file as it was written: its sha256 in hexadecimal, and its bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class SavedTable:
    """What was saved of a table: its rows, those in `files`, and files of the ids of all rows."""

    rows: int
    written: int
    files: tuple[str, ...]
    live: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedRows:
    """What was saved, by table, and the files by name."""

    tables: Mapping[str, SavedTable] = field(default_factory=dict)
    files: Mapping[str, SavedFile] = field(default_factory=dict)


class ServedRows(ABC):
    """Rows that store servers save: of their current version, or of one that is pinned on each of them."""

    @abstractmethod
    def save_rows(self, save: RowSave) -> SavedRows:
        """Has every server save its rows, and waits for all of them.

        Raises:
            CheckpointError: a server cannot write there; names the server and the place.
            StaleVersion: the pin is gone.
            StoreFailed, Unavailable: a server does not answer.
        """


class RowSaver(ABC):
    """What a store server saves its rows with. Safe to use from many threads."""

    @abstractmethod
    def rows_changed(self, updates: Mapping[str, TableUpdate]) -> None:
        """Notes the rows of a commit that is about to be made."""

    @abstractmethod
    def take(self, mark: bytes, base: bytes) -> TakenChanges:
        """What changed since the checkpoint of mark `base`, up to now; of no commit that is under way.

        Args:
            mark: 16 bytes: of the checkpoint that is about to be written.
            base: Of the last one that was written; b"": there is none.
        """

    @abstractmethod
    def save(self, save: RowSave, source: Snapshot, wait_s: float) -> SavedRows | None:
        """Begins to save, or goes on waiting for what this call began before; None: it is not done yet.

        Raises:
            BadInput: a place, a name or a table that cannot be.
            CheckpointError: the rows cannot be written.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Gives up what is being saved, and returns once nothing is written any more."""
