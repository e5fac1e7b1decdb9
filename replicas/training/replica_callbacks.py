"""Keras callbacks on replicas: which can be honoured, and what all replicas have to agree upon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.replicas.groups.group import ReplicaGroup
from elastable.worker.keras.keras_callbacks import history_of, require_callback, sees_batches

__all__ = ["ReplicaCallbacks"]


class ReplicaCallbacks:
    """Calls each replica's callbacks, with logs that are the same on all of them.

    Args:
        callbacks: This replica's.
        model: This replica's.
        group: All replicas; each makes this.
        epochs: Of the training.
        steps: Of an epoch.
        verbose: 0: nothing is shown; else rank 0 shows a line an epoch.

    Attributes:
        sees_batches: Whether a callback of any replica looks at batches.

    Raises:
        Unsupported: a callback that cannot be honoured, by name.
    """

    def __init__(
        self, callbacks: Sequence[Any], model: Any, group: ReplicaGroup, epochs: int, steps: int, verbose: int
    ) -> None:
        for callback in callbacks:
            _refuse_unsupported(callback)
        self._model, self._group = model, group
        self.sees_batches = self._anyone(sees_batches(callbacks))
        shown = bool(verbose) and group.rank == 0
        self._list = keras.callbacks.CallbackList(
            list(callbacks),
            add_history=True,
            add_progbar=shown,
            model=model,
            epochs=epochs,
            steps=steps,
            verbose=2 if shown else 0,
        )

    @property
    def history(self) -> Any:
        """Keras' `History`."""
        return history_of(self._list)

    def begin(self) -> None:
        """Training begins."""
        self._model.stop_training = False
        self._list.on_train_begin()

    def begin_epoch(self, epoch: int) -> None:
        """An epoch, counted from 0, begins."""
        self._list.on_epoch_begin(epoch)

    def begin_batch(self, step: int) -> None:
        """A batch begins; only where `sees_batches`."""
        self._list.on_train_batch_begin(step)

    def end_batch(self, step: int, logs: Mapping[str, float]) -> bool:
        """A batch is over; only where `sees_batches`. True if training is to stop, on every replica."""
        self._list.on_train_batch_end(step, dict(logs))
        return self._anyone(bool(self._model.stop_training))

    def end_epoch(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """An epoch is over and evaluated; True if training is to stop, on every replica."""
        self._list.on_epoch_end(epoch, dict(logs))
        return self._anyone(bool(self._model.stop_training))

    def end(self, logs: Mapping[str, float]) -> None:
        """Training is over."""
        self._list.on_train_end(dict(logs))

    def agree(self, learning_rate: float) -> None:
        """Refuses replicas that go on at different learning rates; every replica calls it.

        Raises:
            BadInput: naming both.
        """
        rates = self._group.all_gather(np.array(learning_rate, np.float64))
        for rank, rate in enumerate(rates):
            if rate != rates[0] and not np.isnan([rate, rates[0]]).all():
                raise BadInput(
                    f"rank {rank} goes on at learning rate {rate:g}, and rank 0 at {rates[0]:g}: a callback that sets "
                    "it has to be given to every replica"
                )

    def _anyone(self, here: bool) -> bool:
        return bool(self._group.all_reduce(np.array([here], np.uint8), "max")[0])


def _refuse_unsupported(callback: Any) -> None:
    kinds, name = keras.callbacks, require_callback(callback)
    if isinstance(callback, kinds.BackupAndRestore):
        raise Unsupported(
            f"callback {name} saves the optimizer's state as one replica holds it; use ReplicaTrainer.save and load"
        )
    if isinstance(callback, kinds.SwapEMAWeights):
        raise Unsupported(
            f"callback {name} needs whole moving averages, of which replicas may hold parts; leave it out"
        )
    if isinstance(callback, kinds.ModelCheckpoint) and not callback.save_weights_only:
        raise Unsupported(
            f"callback {name} saves the optimizer's state as one replica holds it; give save_weights_only=True, or use "
            "ReplicaTrainer.save"
        )
