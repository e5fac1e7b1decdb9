"""Refuses models and losses that cannot be trained over replicas."""

from __future__ import annotations

import keras

from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.worker.keras.seeds import layers_of
from elastable.worker.layers.model_tables import store_layers

__all__ = ["refuse_losses", "refuse_model"]

_MEANS = ("sum_over_batch_size", "mean")
_OWN_STEPS = ("train_step", "test_step", "predict_step")


def refuse_model(model: object) -> None:
    """Raises ModelError for anything but a Keras model, Unsupported for one that replicas cannot train."""
    if not isinstance(model, keras.Model):
        raise ModelError(f"et.ReplicaTrainer needs a keras.Model, got {type(model).__name__}")
    for method in _OWN_STEPS:
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise Unsupported(
                f"model {model.name!r} overrides {method}, which et.ReplicaTrainer cannot run: between its gradients "
                "and its update the replicas exchange; put what it does into call() or compute_loss()"
            )
    for layer in store_layers(model):
        raise Unsupported(
            f"embedding layer {layer.name!r} keeps its table in a store, which replicas cannot update; use "
            "keras.layers.Embedding or et.create_host_embedding, or train with et.fit"
        )
    for layer in layers_of(model):
        if getattr(layer, "synchronized", False):
            raise Unsupported(
                f"layer {layer.name!r} with synchronized=True: statistics of a batch are those of each replica's part; "
                "leave synchronized out, or use LayerNormalization"
            )


def refuse_losses(loss: object) -> None:
    """Raises Unsupported for a loss of `compile()` that is not a mean over records: averaging it would change it."""
    for one in keras.tree.flatten(loss):
        reduction = getattr(one, "reduction", "mean")
        if isinstance(one, keras.losses.Loss) and reduction not in _MEANS:
            raise Unsupported(
                f"loss {one.name!r} with reduction={reduction!r}: replicas weigh their gradients by their records, "
                f"which is right for a mean over records only; give it reduction={_MEANS[0]!r}"
            )
