"""Keras callbacks on replicas: which are supported, and what replicas must agree on."""

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.replicas.groups.group import ReplicaGroup
from elastable.worker.keras.keras_callbacks import require_callback, sees_batches

_TEST_BATCHES = ("on_test_batch_begin", "on_test_batch_end")


class ReplicaCallbacks:
    """Calls each replica's callbacks, with logs that are the same on all of them.

    Args:
        callbacks, model: This replica's.
        group: All replicas; each creates this.
        verbose: 0: silent; otherwise rank 0 prints a line per epoch.

    Attributes:
        list: The callbacks, to be called as Keras calls them.
        sees_batches: Whether a callback of any replica handles batches.

    Raises:
        Unsupported: a callback that replicas cannot support; names it.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        group: ReplicaGroup,
        epochs: int,
        steps: int,
        verbose: int,
    ) -> None:
        for callback in callbacks:
            _refuse_unsupported(callback)
        self.model, self._group = model, group
        self.sees_batches = self._anyone(sees_batches(callbacks))
        shown = bool(verbose) and group.rank == 0
        self.list = keras.callbacks.CallbackList(
            list(callbacks),
            add_history=True,
            add_progbar=shown,
            model=model,
            epochs=epochs,
            steps=steps,
            verbose=2 if shown else 0,
        )

    def end_batch(self, step: int, logs: Mapping[str, float]) -> bool:
        """Whether a callback of any replica stops training."""
        self.list.on_train_batch_end(step, dict(logs))
        return self._anyone(bool(self.model.stop_training))

    def end_epoch(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """Whether a callback of any replica stops training."""
        self.list.on_epoch_end(epoch, dict(logs))
        return self._anyone(bool(self.model.stop_training))

    def agree(self, learning_rate: float) -> None:
        """Raises BadInput if the replicas' learning rates differ; every replica calls it."""
        rates = self._group.all_gather(np.array(learning_rate, np.float64))
        for rank, rate in enumerate(rates):
            if rate != rates[0] and not np.isnan([rate, rates[0]]).all():
                raise BadInput(
                    f"rank {rank} continues at learning rate {rate:g}, and rank 0 at {rates[0]:g}: give a "
                    "callback that sets it to every replica"
                )

    def _anyone(self, here: bool) -> bool:
        return bool(self._group.all_reduce(np.array([here], np.uint8), "max")[0])


def _refuse_unsupported(callback: keras.callbacks.Callback) -> None:
    kinds, name = keras.callbacks, require_callback(callback)
    if isinstance(callback, kinds.BackupAndRestore):
        raise Unsupported(
            f"callback {name} saves the optimizer's state as one replica holds it; use ReplicaTrainer.save and load"
        )
    if isinstance(callback, kinds.SwapEMAWeights):
        raise Unsupported(
            f"callback {name} needs whole moving averages, of which replicas may hold parts; leave it out"
        )
    if type(callback).__module__.split(".")[0] != "keras":
        for hook in _TEST_BATCHES:
            if getattr(type(callback), hook) is not getattr(kinds.Callback, hook):
                raise Unsupported(
                    f"callback {name} has {hook}, and replicas evaluate the batches of a validation by themselves: use "
                    "on_test_begin and on_test_end, whose logs are of all of them"
                )
    if isinstance(callback, kinds.ModelCheckpoint) and not callback.save_weights_only:
        raise Unsupported(
            f"callback {name} saves the optimizer's state as one replica holds it; give save_weights_only=True, or use "
            "ReplicaTrainer.save"
        )
