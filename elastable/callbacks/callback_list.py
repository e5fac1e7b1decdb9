"""Keras callbacks in a job: which can be honoured, and when they are called."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import keras

from elastable.callbacks.callback_state import restore_states, states_of
from elastable.callbacks.final_weights import BestVersions
from elastable.callbacks.freezing import Freezing
from elastable.embedding_store.contract.malformed import Document, DocumentFields
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import Unsupported
from elastable.master.api import JobSpec
from elastable.master.model.dense import DenseModel
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.worker.keras.keras_methods import history_of, require_callback, sees_batches, test_hooks
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.rows.saved_rows import require_matrix

_LOG = logging.getLogger(__name__)

# Among what callbacks remember; no class of a callback has such a name.
_TRAINABLE, _BEST = "trainable", "best versions"
_EPOCH, _STEP = "epoch begun", "step begun"


class JobCallbacks:
    """Calls Keras callbacks for the epochs and versions of a job, in the caller's thread.

    A step is what Keras calls a batch: one version, or as many as `steps_per_execution`.

    Attributes:
        model: The model that is trained.
        schedule: Of the job.
        best: The versions that callbacks would restore; close it after training.
        sees_versions: Whether a callback hears of every version.
        history: Keras' `History` of the job.

    Args:
        model: The master's model; it holds the dense variables of the version.
        dense: Its dense part.
        store, job, progress, directory, rows_changed: As of `BestVersions`.
        of: As of `Freezing`.
        in_job: Whether this is a job, which is resumed by its own means.
        verbose: The `verbose` that callbacks see.

    Raises:
        Unsupported: a callback that would move the dense variables and leave the tables, by name.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        dense: DenseModel,
        store: EmbeddingStore,
        job: JobSpec,
        progress: Callable[[], Progress],
        *,
        of: str = "fit",
        directory: str | None = None,
        rows_changed: Callable[[Mapping[str, TableUpdate]], None] = lambda updates: None,
        in_job: bool = True,
        verbose: int = 0,
    ) -> None:
        for callback in callbacks:
            _refuse_unsupported(callback, model, in_job)
        self.model, self._given, self.schedule = model, tuple(callbacks), Schedule(job)
        self._freezing, self._dense = Freezing(model, dense, of), dense if in_job else None
        self.best = BestVersions(callbacks, store, dense, job, progress, directory, rows_changed)
        self._warned = False
        self._epoch: object = None
        self._step: object = None
        # Metrics of every version are computed only if somebody looks at them.
        self.sees_versions = sees_batches(callbacks)
        self._list = keras.callbacks.CallbackList(
            list(callbacks),
            add_history=True,
            add_progbar=False,
            model=model,
            epochs=job.epochs,
            steps=self.schedule.steps_per_epoch,
            verbose=verbose,
        )
        self.history = history_of(self._list)

    def begin(self, states: DocumentFields | None = None) -> None:
        """Training begins, or goes on with what callbacks remembered (`states`)."""
        states = dict(states or {})
        self.model.stop_training = False
        self._freezing.begin(states.pop(_TRAINABLE, ""))
        best = states.pop(_BEST, {})
        self._epoch, self._step = states.pop(_EPOCH, None), states.pop(_STEP, None)
        with self._only_once(again=self._epoch is not None):
            self._list.on_train_begin()
        if states:
            restore_states(self._given, states)
        self.best.begin(best)

    def states(self) -> Document:
        """What callbacks remember now, as JSON can hold it. Raises `BadInput` where it cannot."""
        kept = {_TRAINABLE: self._freezing.state(), _BEST: self.best.noted(), _EPOCH: self._epoch, _STEP: self._step}
        return {**states_of(self._given), **kept}

    def begin_epoch(self, epoch: int) -> None:
        """An epoch, counted from 0, begins, or goes on after a resume."""
        with self._only_once(again=epoch == self._epoch):
            self._list.on_epoch_begin(epoch)
        self._freezing.look()
        if epoch != self._epoch:
            self._epoch, self._step = epoch, None

    def begin_step(self, version: int) -> None:
        """The step that trains on a version begins: what callbacks assign now is trained with.

        With `compile(steps_per_execution=)` only the first of so many is a batch that begins, as in Keras.
        """
        if not self.sees_versions or (step := self.schedule.step(version)) % self._together:
            return
        with self._only_once(again=step == self._step):
            self._list.on_train_batch_begin(step)
        self._freezing.look()
        self._step = step

    def version(self, version: int, logs: Mapping[str, float], last: bool = True) -> bool:
        """A version is committed; True if training is to stop.

        Args:
            logs: Metrics of the epoch so far.
            last: Whether it ends its epoch.
        """
        if not self.sees_versions:
            return bool(self.model.stop_training)
        step = self.schedule.step(version - 1)  # its place in its epoch, counted from 0
        place = step % self._together
        if place < self._together - 1 and not last:
            return False
        self._list.on_train_batch_end(step - place + self._together - 1, logs)
        self._freezing.look()
        return bool(self.model.stop_training)

    def end_epoch(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """An epoch is over and evaluated; True if training is to stop."""
        if self._given and not self._warned and any(name.startswith("val_") for name in logs):
            self._warned = True
            for callback in self._given:
                if names := test_hooks(callback):
                    _LOG.warning(
                        "callback %s: the validation data is evaluated by workers, without %s; use on_epoch_end, "
                        "whose logs hold the results as val_...",
                        type(callback).__name__,
                        ", ".join(names),
                    )
        self._list.on_epoch_end(epoch, dict(logs))
        self.best.look()
        return bool(self.model.stop_training)

    def end(self, logs: Mapping[str, float]) -> None:
        """Training is over."""
        self._list.on_train_end(dict(logs))
        self.best.end()

    @property
    def _together(self) -> int:
        """Steps that callbacks see as one."""
        return int(getattr(self.model, "steps_per_execution", 1))

    @contextmanager
    def _only_once(self, again: bool) -> Iterator[None]:
        """Around a hook that is called again in a job that goes on: what it assigns it had assigned before."""
        kept = self._dense.tensors() if again and self._dense is not None else None
        yield
        if self._dense is not None and kept is not None:
            self._dense.restore(kept)


def _refuse_unsupported(callback: keras.callbacks.Callback, model: keras.Model, in_job: bool) -> None:
    kinds, name = keras.callbacks, require_callback(callback)
    if in_job and isinstance(callback, kinds.BackupAndRestore):
        raise Unsupported(
            f"callback {name}: a job is backed up and resumed by --checkpoint-dir and --resume; leave it out"
        )
    if isinstance(callback, kinds.SwapEMAWeights):
        raise Unsupported(
            f"callback {name} would give dense variables their moving averages and leave the rows of tables; leave it "
            "out: with use_ema all become their averages at the end of training, and with ema_overwrite_frequency "
            "meanwhile"
        )
    if isinstance(callback, kinds.TensorBoard) and callback.histogram_freq:
        for layer in store_layers(model):  # it would fail at the end of an epoch, as it reads a table's rows
            try:
                require_matrix(layer)
            except Unsupported as error:
                raise Unsupported(f"callback TensorBoard(histogram_freq={callback.histogram_freq}): {error}") from error
