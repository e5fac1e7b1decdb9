"""The weights that a job ends with: the best version's, kept whole meanwhile, or their moving averages (`use_ema`).

Keras copies all weights whenever an epoch was the best so far, and puts them back in the end. With
`EarlyStopping(restore_best_weights=True)` it is shown the dense weights alone here; the rows of the tables, of any
number, are kept in a checkpoint of that version.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import keras
import numpy as np

from elastable.callbacks.callback_state import named
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import CheckpointError, Unsupported
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.restoring import restore_weights
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.model.dense import DenseModel
from elastable.master.model.wrapping_optimizers import rows_become_averages
from elastable.master.tasks.progress import Progress
from elastable.worker.keras.keras_methods import rows_unlisted

RowsChanged = Callable[[Mapping[str, TableUpdate]], None]
"""Called with rows that were written."""

_HOOKS = ("on_epoch_end", "on_train_end")  # where EarlyStopping reads and assigns weights
_KEPT_IN_A_JOB = 3  # it may be resumed from before the newest of them


class BestVersions:
    """Follows the callbacks that restore best weights, and does for tables what they do for dense weights.

    Args:
        directory: Where checkpoints of best versions go, for a job that may be resumed; None: a temporary folder.
        rows_changed: Called with rows that were put back.

    Raises:
        Unsupported: a job that would be resumed from its store, whose record holds the last version and not the best.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        store: EmbeddingStore,
        dense: DenseModel,
        job: JobSpec,
        progress: Callable[[], Progress],
        directory: str | Path | None = None,
        rows_changed: RowsChanged = lambda updates: None,
    ) -> None:
        self._followed = {}
        for name, callback in named(callbacks):
            if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
                self._followed[name] = callback
        if self._followed and directory is not None and store.keeps_records:
            raise Unsupported(
                f"callback {next(iter(self._followed))}(restore_best_weights=True): the store keeps a record of its "
                "last version, which a resumed job would go on from, with other rows; leave it False and take the "
                "checkpoint of the best version, or keep the tables in a store without a log (--store memory)"
            )
        for callback in self._followed.values():
            for hook in _HOOKS:
                setattr(callback, hook, rows_unlisted()(getattr(callback, hook)))
        self._store, self._dense, self._job, self._progress = store, dense, job, progress
        self._directory, self._rows_changed = directory, rows_changed
        self._temporary: str | None = None
        self._seen: dict[str, object] = {}
        self._noted: dict[str, str] = {}

    def noted(self) -> dict[str, str]:
        """The checkpoint of each callback's best version, by name, for a job that goes on."""
        return dict(self._noted)

    def begin(self, noted: Mapping[str, str]) -> None:
        """A job goes on with what `noted()` said.

        Raises:
            CheckpointError: a best version is not there any more.
        """
        for name, checkpoint in noted.items():
            if name in self._followed:
                try:
                    weights = list(self._dense.weights(self._open(name, checkpoint).dense()).values())
                except CheckpointError as error:
                    raise CheckpointError(
                        f"callback {name}(restore_best_weights=True) cannot go on without the best version: {error}"
                    ) from error
                self._followed[name].best_weights = weights
                self._seen[name], self._noted[name] = weights, checkpoint

    def look(self) -> None:
        """Call it after the callbacks' `on_epoch_end`.

        Raises:
            CheckpointError: a best version cannot be written.
        """
        for name, callback in self._followed.items():
            if callback.best_weights is None or callback.best_weights is self._seen.get(name):
                continue
            if self._directory is None and self._temporary is None:
                self._temporary = tempfile.mkdtemp(prefix="elastable-best-")
            keep = 1 if self._directory is None else _KEPT_IN_A_JOB
            place = (self._home(name), self._store, self._dense.tensors(), self._job, self._progress())
            self._noted[name] = write_checkpoint(*place, keep=keep).rpartition("/")[2]
            self._seen[name] = callback.best_weights

    def end(self) -> None:
        """Call it after the callbacks' `on_train_end`: they have restored dense weights.

        Raises:
            CheckpointError: the best version cannot be read.
        """
        # Each restores over the one before: the last counts.
        for name, callback in reversed(self._followed.items()):
            if callback.best_weights is not None:
                restore_weights(self._open(name, self._noted[name]), self._store, _report_rows(self._rows_changed))
                return

    def close(self) -> None:
        """Takes temporary files away, and lets the callbacks see all weights again."""
        for callback in self._followed.values():
            for hook in _HOOKS:
                delattr(callback, hook)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _open(self, name: str, checkpoint: str) -> Checkpoint:
        return open_checkpoint(f"{self._home(name)}/{Path(checkpoint).name}")

    def _home(self, name: str) -> str:
        return f"{self._temporary or self._directory}/{name.replace(' ', '-')}"


# Moving averages: what becomes of them at the end of training, and where they are refused


def finalize_averages(
    dense: DenseModel,
    store: EmbeddingStore,
    tables: Mapping[str, TableSpec],
    rows_changed: RowsChanged = lambda updates: None,
) -> None:
    """Training has ended: variables and rows that are trained become their moving averages, as in Keras.

    Doing it again changes nothing.

    Args:
        store: Holds the tables; nobody commits to it meanwhile.
        rows_changed: Called with rows that were written.
    """
    dense.finalize_averages()
    trained = sorted(set(tables) - set(dense.frozen_tables))
    rows_become_averages(store, trained, _report_rows(rows_changed))


def _report_rows(rows_changed: RowsChanged) -> Callable[[str, Int64], None]:
    """Calls `rows_changed` with an update without gradients for the table and the ids that it gets."""
    return lambda table, ids: rows_changed({table: TableUpdate(ids, np.zeros((len(ids), 0), np.float32))})
