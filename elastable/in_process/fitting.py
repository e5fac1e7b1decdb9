"""`et.fit`: a whole job in the current process, with its own store."""

from collections.abc import Iterable, Mapping

import keras
import numpy as np

from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.in_process.fit_data import FitArguments, fit_data
from elastable.in_process.fit_seeds import fit_seeds
from elastable.in_process.in_process_job import FitSettings, backed_up_epoch, run_here
from elastable.in_process.in_process_stores import StoreGiven


def fit(
    model: keras.Model,
    x: object = None,
    y: object = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str | bool = "auto",
    callbacks: object = None,
    validation_split: float = 0.0,
    validation_data: object = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: object = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: object = 1,
    *,
    grads_to_wait: int | None = None,
    average: str = "mean",
    evaluate_every: int = 0,
    seed: int | None = None,
    store: StoreGiven = None,
    locations: LocationSettings | None = None,
    offload_embeddings_above: int = 0,
    lazy: bool | None = True,
    not_finite: str = "refuse",
) -> keras.callbacks.History:
    """Trains a compiled Keras model whose embedding tables live in a store, in this process.

    The arguments up to `validation_freq` are those of `model.fit`, in its order and with its meaning; docs/keras.md has
    a row for each. `model.fit` itself does the same, with `lazy=None` and the defaults of all others.

    Afterwards the model's layers read from the store: `predict`, `evaluate` and `save` work as usual. A second call
    continues from the first: to the bit, `epochs=4` is `epochs=2` followed by `epochs=4, initial_epoch=2`.

    Args:
        model: A compiled Keras model with `et.Embedding` layers.
        x: Data for `model.fit`, or a Reader. A stream without an end needs `steps_per_epoch` (`EndlessReader`). Without
            `y` also a tuple (x, y) or (x, y, sample_weight), or a dict with these keys.
        batch_size: Records in a micro-batch; None: a stream's own, else 32. A stream that ends is read once, cut anew.
        grads_to_wait: Micro-batches of one update; None: the optimizer's gradient_accumulation_steps, else 1.
        average: "mean": the numbers of plain Keras on one batch of all their records, or a refusal; "records": weighted
            by their records; "batches": equally, as with Keras' gradient_accumulation_steps; "sum": added.
        evaluate_every: Versions between further evaluations, within epochs; 0: none.
        seed: Of initial rows, the record order and dropout, as of `elastable train --seed`; dense variables are drawn
            before, with the model. None: as in plain Keras, by layers' seeds and `keras.utils.set_random_seed`.
        store: Where the tables live: a URL such as "redis://localhost:6379" or "file:///folder", a store, or None: in
            this process's memory. With `locations` it may be several: "memory", "file" or "redis" -> URL or store.
        locations: Which tables live where; None: all in the (first) store.
        offload_embeddings_above: Plain Keras embeddings of more elements move to the store, with their values; 0: none.
        lazy: Whether a step moves only the rows that its batch touches; False: momentum and decay move all rows, with
            the numbers of plain Keras (docs/fit.md); None: False for tables with `input_dim`, as `model.fit` does. A
            layer's own `lazy` takes precedence.
        not_finite: "refuse" gradients with NaN or Inf (an error), or "skip" them.

    Returns:
        `keras.callbacks.History`, with `val_...` entries for the validation data; its attribute `evaluations` is a list
        with a dict for each evaluation within an epoch: `version` and `val_...`.

    Raises:
        ElastableError: data, model, callbacks or settings that cannot be used.
    """
    callbacks = _callbacks(callbacks)
    initial_epoch = backed_up_epoch(callbacks, initial_epoch)
    given = FitArguments(
        x=x, y=y, sample_weight=sample_weight, class_weight=class_weight, batch_size=batch_size,
        validation_split=validation_split, validation_data=validation_data, steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps, validation_batch_size=validation_batch_size,
        grads_to_wait=grads_to_wait or 1, epochs=epochs, initial_epoch=initial_epoch, shuffle=_shuffles(shuffle),
    )  # fmt: skip
    settings = FitSettings(
        epochs=epochs, initial_epoch=initial_epoch, callbacks=callbacks, verbose=_verbosity(verbose),
        shuffle=_shuffles(shuffle), validation_freq=_frequency(validation_freq),
        seeds=fit_seeds(seed, model, initial_epoch), grads_to_wait=grads_to_wait, average=average,
        evaluate_every=evaluate_every, store=store, locations=locations,
        offload_embeddings_above=offload_embeddings_above, lazy=lazy, not_finite=not_finite,
    )  # fmt: skip
    return run_here(model, fit_data(given), settings)


def _callbacks(given: object) -> tuple[keras.callbacks.Callback, ...]:
    """Callbacks as Keras takes them: none, one, a list, or its own list of them."""
    if isinstance(given, keras.callbacks.CallbackList):
        return tuple(each for each in given.callbacks if not isinstance(each, keras.callbacks.History))
    return () if given is None else tuple(keras.tree.flatten(given))


def _verbosity(verbose: object) -> int:
    if verbose == "auto":
        return 1
    if verbose not in (0, 1, 2):
        raise BadInput(f'verbose={verbose!r}: need 0 (nothing), 1 or "auto" (progress), or 2 (a line for each epoch)')
    return int(verbose)


def _shuffles(shuffle: object) -> bool:
    if shuffle == "batch":
        raise Unsupported('shuffle="batch": records are shuffled one by one; use shuffle=True or False')
    return bool(shuffle)


def _frequency(validation_freq: object) -> int | tuple[int, ...]:
    message = f"validation_freq={validation_freq!r}: need a number of epochs, at least 1, or a list of epochs"
    if isinstance(validation_freq, Iterable) and not isinstance(validation_freq, str):
        epochs = tuple(validation_freq)
        if not all(isinstance(epoch, int | np.integer) for epoch in epochs):
            raise BadInput(message)
        return tuple(int(epoch) for epoch in epochs)
    if isinstance(validation_freq, bool) or not isinstance(validation_freq, int) or validation_freq < 1:
        raise BadInput(message)
    return validation_freq
