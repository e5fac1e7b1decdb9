"""`model.fit` and `model.train_on_batch` of models with tables in a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from elastable.embedding_store.errors import Unsupported
from elastable.fit_streams import is_fit_stream
from elastable.in_process import fit
from elastable.worker.readers import Reader

__all__ = ["model_fit", "model_train_on_batch"]


def model_fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str | bool = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[Any, Any] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    """`model.fit` as a job in this process: `et.fit`, with what Keras means where that is another thing.

    Without `y` a tuple or a dict as `x` is features. Datasets come in their own
    order and their own batches. A table with `input_dim` has Keras' numbers in
    rows that a batch does not touch, too (`lazy=False`).

    Returns:
        `keras.callbacks.History`.

    Raises:
        ElastableError: what cannot be used, by name.
    """
    if is_fit_stream(x):
        batch_size, shuffle = None, False
    elif y is None and not isinstance(x, Reader) and isinstance(x, tuple | Mapping):
        x, sample_weight = (x, None, sample_weight), None
    if isinstance(validation_data, Mapping):
        validation_data = (validation_data,)
    return fit(
        model, x, y, batch_size=batch_size, epochs=epochs, verbose=verbose, callbacks=callbacks,
        validation_split=validation_split, validation_data=validation_data, shuffle=shuffle, class_weight=class_weight,
        sample_weight=sample_weight, initial_epoch=initial_epoch, steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps, validation_batch_size=validation_batch_size,
        validation_freq=validation_freq, lazy=None,
    )  # fmt: skip


def model_train_on_batch(model: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to train on one batch.

    Raises:
        Unsupported: always.
    """
    raise Unsupported(
        f"model {model.name!r}: train_on_batch cannot train tables that live in a store; use model.fit(x, y, "
        "batch_size=len(y), shuffle=False), which goes on from where the last call ended"
    )
