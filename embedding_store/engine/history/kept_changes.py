"""What a store asks of whatever keeps its changes outside its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.history.replaying import ReplayedTables
from elastable.embedding_store.log.changes import Change

__all__ = ["KeptChanges"]


class KeptChanges(Protocol):
    """A log, and what the log begins with."""

    @property
    def place(self) -> str:
        """Where everything is, for messages."""

    @property
    def keeps_entries(self) -> bool:
        """Whether what is appended is kept; if not, it is only counted, and need not be made."""

    @property
    def wants_base(self) -> bool:
        """Whether a new base should be written."""

    def append(self, change: Change, version: int) -> None:
        """Appends a change, after which the store has this version.

        Raises:
            StoreFailed: it could not be written; nothing has changed.
            StoreBroken: nothing can be written any more.
            TakenOver: another process owns the store now.
        """

    def refresh(self) -> None:
        """Makes sure that no change is there whose `append` failed."""

    def replay(self, tables: ReplayedTables) -> None:
        """Brings empty tables to the last version.

        Raises:
            StoreBroken: something is corrupt or lost.
        """

    def take_back(self, version: int) -> int:
        """Takes the changes after a version back: `replay` brings empty tables to that version then.

        Returns:
            How many rows these changes had written.

        Raises:
            StaleVersion: that is not possible any more.
        """

    def begin_base(self, snapshot: Snapshot, specs: Sequence[TableSpec], record: bytes | None) -> None:
        """Writes a base from a pinned version, on a thread of its own, and closes the snapshot.

        Args:
            snapshot: As of the last change.
            specs: Of its tables.
            record: `Commit.record` of its version.
        """

    def abandon_base(self) -> None:
        """Stops writing a base, if one is being written, and waits until its pin is released."""

    def close(self) -> None:
        """Frees what is held. Closing twice is harmless."""
