"""`model.fit` and `model.train_on_batch` of models with tables in a store."""

from collections.abc import Mapping

import keras

from elastable.in_process.fit_data import FitArguments, fit_data, is_fit_stream
from elastable.in_process.fitting import fit
from elastable.in_process.on_batch import train_batch
from elastable.worker.readers.records.reader import Reader


def model_fit(
    model: keras.Model,
    x: object = None,
    y: object = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str | bool = "auto",
    callbacks: object = None,
    validation_split: float = 0.0,
    validation_data: object = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: object = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: object = 1,
) -> keras.callbacks.History:
    """`model.fit` as a job in this process: `et.fit`, with what Keras means where that is another thing.

    Without `y` a tuple or a dict as `x` is features. Datasets come in their own order and their own batches. A table
    with `input_dim` has Keras' numbers in rows that a batch does not touch, too (`lazy=False`).

    Returns:
        `keras.callbacks.History`.

    Raises:
        ElastableError: what cannot be used, by name.
    """
    if is_fit_stream(x):
        batch_size = None
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


def model_train_on_batch(
    model: keras.Model,
    x: object,
    y: object = None,
    sample_weight: object = None,
    class_weight: Mapping[int, float] | None = None,
    return_dict: bool = False,
) -> float | list[float] | dict[str, float]:
    """`model.train_on_batch`: one step of the optimizer, for variables and tables; arguments as in Keras.

    Returns:
        Loss and metrics as Keras gives them: a number, a list of them, or with `return_dict` a dict.

    Raises:
        ElastableError: what cannot be used, by name.
    """
    if y is None and isinstance(x, tuple | Mapping):
        x, sample_weight = (x, None, sample_weight), None
    reader = fit_data(FitArguments(x=x, y=y, sample_weight=sample_weight, class_weight=class_weight)).train
    logs = train_batch(model, reader)
    return logs if return_dict else model._flatten_metrics_in_order(logs)
