"""What of a model is trained: Keras' `trainable`, as a job holds to it.

Keras reads `trainable` when it traces its train function: at the first batch after `compile`, and again after
`make_train_function(force=True)`. What was read is in force until then, whatever the flags of layers say meanwhile. A
job does the same, so the flags that are in force are kept beside the model, and put on it while a step is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras

from elastable.embedding_store.errors import ModelError
from elastable.worker.keras.seeds import layers_of
from elastable.worker.rows.store_layer import StoreLayer

__all__ = ["frozen_tables", "imposed", "is_trained", "put_trainable", "read_trainable"]


def read_trainable(model: keras.Model) -> bytes:
    """A byte, 0 or 1, for each layer of the model and then for each of its weights, in model order."""
    flags = [layer.trainable for layer in layers_of(model)]
    return bytes([*flags, *(weight.trainable for weight in model.weights)])


@contextmanager
def imposed(model: keras.Model, trainable: bytes) -> Iterator[None]:
    """While the block runs the model has these flags (`put_trainable`); b"": its own."""
    before = read_trainable(model)
    if not trainable or trainable == before:
        yield
        return
    put_trainable(model, trainable)
    try:
        yield
    finally:
        put_trainable(model, before)


def put_trainable(model: keras.Model, trainable: bytes) -> None:
    """Gives a model the flags that `read_trainable` read from it, or from an equal one.

    Raises:
        ModelError: they are of another model.
    """
    layers, weights = layers_of(model), model.weights
    if len(trainable) != len(layers) + len(weights):
        raise ModelError(
            f"model {model.name!r} has {len(layers)} layers and {len(weights)} weights, and was told which of "
            f"{len(trainable)} are trained: run the same model file everywhere"
        )
    # Past Keras' setters, which pass a layer's flag on to all below it.
    for layer, flag in zip(layers, trainable, strict=False):
        layer._trainable = bool(flag)
    for weight, flag in zip(weights, trainable[len(layers) :], strict=True):
        weight.trainable = bool(flag)


def is_trained(model: keras.Model, layer: StoreLayer) -> bool:
    """Whether the table of a store-backed layer is trained by the flags as they are.

    As a Keras weight is: `layer.trainable` is set by each of its parents', and of those the model's alone is asked.
    """
    return bool(model.trainable and layer.trainable)


def frozen_tables(model: keras.Model, layers: Sequence[StoreLayer]) -> tuple[str, ...]:
    """Names of the tables that are not trained by the flags as they are, sorted.

    Args:
        model: A built model.
        layers: Its layers with tables in a store.

    Raises:
        ModelError: layers that share a table differ in whether it is trained.
    """
    trained: dict[str, StoreLayer] = {}
    for layer in layers:
        other = trained.setdefault(layer.table_name, layer)
        if is_trained(model, layer) != is_trained(model, other):
            told = " and ".join(f"{each.name!r} (trainable={each.trainable})" for each in (other, layer))
            raise ModelError(
                f"layers {told} share the table {layer.table_name!r}, which is either trained or frozen: set trainable "
                "alike on both, or give one of them a table of its own"
            )
    return tuple(sorted(name for name, layer in trained.items() if not is_trained(model, layer)))
