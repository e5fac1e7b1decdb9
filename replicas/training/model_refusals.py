"""Refuses models and losses that cannot be trained over replicas."""

import keras
import tensorflow as tf

from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.master.api import DivisorKind
from elastable.replicas.host_embeddings.host_embedding import HostEmbedding
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import TensorBatch
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.losses.loss_terms import LossTerms
from elastable.worker.losses.origins import Origins
from elastable.worker.losses.recording import Recording
from elastable.worker.step.traced.step_plan import changed_weight

_MEANS = ("sum_over_batch_size", "mean")
_DIVISORS = {
    DivisorKind.NOTHING: "is a sum",
    DivisorKind.AMOUNT: "is divided by weights, or by how many values count (a mask, ignore_class)",
    None: "is divided by an unknown number",
}
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


def refuse_scaled_tables(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Raises Unsupported for loss scaling with a host embedding, whose own optimizer would take scaled gradients."""
    scale = getattr(optimizer, "loss_scale_factor", None)
    layers = [layer for layer in layers_of(model) if isinstance(layer, HostEmbedding) and layer.table.optimizer]
    if scale and layers:
        raise Unsupported(
            f"{type(optimizer).__name__}(loss_scale_factor={scale:g}) with host embedding {layers[0].name!r}: the "
            "table's own optimizer would take the gradients of the scaled loss; leave loss_scale_factor out"
        )


def refuse_terms(model: keras.Model, loss: tf.Tensor, recorded: Recording, batch: TensorBatch) -> None:
    """Raises Unsupported for a traced loss with a term that is not a mean over the records of its batch.

    Args:
        model: For the message.
        loss: The loss; nothing is refused in eager mode, where its terms cannot be seen.
        batch: Of symbolic tensors.
    """
    if tf.executing_eagerly():
        return
    origins = Origins(batch, (), recorded.calls)
    for term in LossTerms(recorded.losses, origins).of(loss):
        if term.kind is not DivisorKind.RECORDS:
            raise Unsupported(
                f"model {model.name!r}: the term of its loss that operation {term.where} computes "
                f"{_DIVISORS[term.kind]}, and replicas weigh their gradients by their records, which is right for a "
                "mean over records only. Return one value per record from a loss function, so that Keras averages "
                "them; or end a term of add_loss or compute_loss in keras.ops.mean over the records; or mark it with "
                "et.averaged(term)"
            )


def refuse_own_changes(model: keras.Model, graph: tf.Graph) -> None:
    """Raises Unsupported if a traced forward pass assigns weights: replicas update them together, some in parts."""
    changed = changed_weight(model, graph)
    if changed is not None:
        raise Unsupported(
            f"model {model.name!r} changes its weight {changed!r} in the forward pass, as "
            "keras.layers.SpectralNormalization does: a replica that holds a part of it, or has no records, would "
            "not take part in the change; train it with et.fit, or on one replica"
        )
