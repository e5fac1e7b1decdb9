"""The checkpoints of one job: full ones, and increments based on them."""

import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.embedding_store.shards.server_contract import ShardStore, TakenChanges
from elastable.master.api import JobSpec, Tensor
from elastable.master.checkpoints.checkpoint import Checkpoint, open_named
from elastable.master.checkpoints.dirty_rows import Changes, DirtyRows
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles
from elastable.master.checkpoints.storage.checkpoint_locations import checkpoint_names, files_at
from elastable.master.checkpoints.writing import require_reached, write_checkpoint
from elastable.master.tasks.progress import Progress


class CheckpointSeries:
    """Writes the checkpoints of a job.

    An increment holds the dense part, and the rows that changed since the checkpoint before. It is written unless every
    `full_every`-th is due, nothing is known of what changed, or the checkpoint before is not there any more.

    Args:
        directory: Where they lie side by side: a path, or a URL that fsspec knows.
        keep: See `write_checkpoint`.
        full_every: Every so many checkpoints one is full; 1: all are, and nothing is collected.
        resumed: The checkpoint from which the store was restored and that it is equal to, if any.

    Raises:
        BadInput: `full_every` is below 1, `keep` below 0, or the URL is of an unknown kind.
    """

    def __init__(
        self,
        directory: str | Path | CheckpointFiles,
        store: EmbeddingStore,
        *,
        keep: int = 3,
        full_every: int = 5,
        resumed: Checkpoint | None = None,
    ) -> None:
        if full_every < 1 or keep < 0:
            raise BadInput(f"full_every must be at least 1 and keep must not be negative, got {full_every} and {keep}")
        self._files = files_at(directory)
        self._keep = keep
        self._full_every = full_every
        self._writing = threading.Lock()
        self._base = resumed if resumed is not None and resumed.home.address == self._files.address else None
        self._store = store
        self._dirty: DirtyRows | None = None  # of rows that store servers keep, those know what changed
        self._mark = self._written = uuid.uuid4().bytes  # of the checkpoints begun last and written last
        self._evicting = {name for name, spec in store.specs().items() if spec.eviction is not None}
        self._noting = threading.Lock()  # of the mark, and of what was frozen
        self._frozen = set[str]()  # of those with eviction, since the last checkpoint
        if full_every > 1 and isinstance(store, ShardStore):
            store.take_changes(self._mark, b"")
        elif full_every > 1:
            self._dirty = DirtyRows(store, self._mark)

    def standing(self, job: str, most: int) -> list[Checkpoint]:
        """The newest checkpoints of a job that are there, the oldest first; those that cannot be used are left out."""
        found: list[Checkpoint] = []
        with suppress(OSError):
            for name in reversed(checkpoint_names(self._files)):
                with suppress(CheckpointError):
                    found += [one] if (one := open_named(self._files, name)).job.get("job") == job else []
                if len(found) == most:
                    break
        return found[::-1]

    def require_reached(self, version: int) -> None:
        """Raises `CheckpointError` where a store server of the job cannot write here, naming both."""
        if isinstance(self._store, ShardStore):
            require_reached(self._files, self._store, version)

    def committed(self, updates: Mapping[str, TableUpdate], frozen: Collection[str] = ()) -> None:
        """Collects what a commit changed. Called by the thread that commits, for every commit.

        Args:
            updates: As of `Commit`; nothing where store servers have seen them.
            frozen: As of `Commit`. A table with eviction that was frozen is saved whole: its rows have not aged as
                versions passed.
        """
        self.rows_changed(updates)
        with self._noting:
            self._frozen |= self._evicting.intersection(frozen)

    def rows_changed(self, updates: Mapping[str, TableUpdate]) -> None:
        """Collects rows that were changed besides commits, between two of them."""
        if self._dirty is not None:
            self._dirty.add(updates)

    def begin(
        self, source: Snapshot, dense: Mapping[str, Tensor], job: JobSpec, progress: Progress
    ) -> Callable[[], str]:
        """Starts the checkpoint of the current version: takes what changed since the previous one.

        Called by the thread that commits. The function it returns writes the checkpoint; any thread calls it, once, and
        calls of others wait meanwhile. If it raises, the next checkpoint also holds the changes of this one.

        Args:
            source: A pin of the version, or the store if nothing is committed until all is written.
            dense: See `write_checkpoint`; unchanged until all is written.
            job: See `write_checkpoint`.

        Returns:
            Writes, and returns the address; raises as `write_checkpoint`.
        """
        mark, base_mark = uuid.uuid4().bytes, self._mark
        changes = self._taken(mark, base_mark, progress.version)
        with self._noting:
            self._mark = mark
            frozen, self._frozen = self._frozen, set[str]()

        def write() -> str:
            with self._writing:
                # One that was begun before and has failed since took changes that these lack.
                base = self._usable_base() if changes is not None and base_mark == self._written else None
                try:
                    address = write_checkpoint(
                        self._files,
                        source,
                        dense,
                        job,
                        progress,
                        keep=self._keep,
                        base=base,
                        changes=changes,
                        mark=mark,
                        whole=frozen,
                    )
                    self._base, self._written = open_named(self._files, address.rpartition("/")[2]), mark
                except BaseException:
                    with self._noting:
                        self._mark = base_mark if self._mark == mark else self._mark
                        self._frozen |= frozen
                    raise
                if self._dirty is not None:
                    self._dirty.forget(mark)
                return address

        return write

    def _taken(self, mark: bytes, base: bytes, version: int) -> Changes | TakenChanges | None:
        """What changed since the last checkpoint; None: nothing is collected."""
        if self._dirty is not None:
            return self._dirty.take(mark, base)
        if self._full_every == 1 or not isinstance(self._store, ShardStore):
            return None
        taken = self._store.take_changes(mark, base)
        if taken.version != version:
            raise CheckpointError(f"the store servers are at version {taken.version}, and not at {version}")
        return taken

    def _usable_base(self) -> Checkpoint | None:
        if self._base is None or len(self._base.chain()) >= self._full_every:
            return None
        try:
            found = open_named(self._files, self._base.name)
        except CheckpointError:
            return None
        return found if found.manifest.checksum == self._base.manifest.checksum else None
