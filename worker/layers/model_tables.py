"""The layers of a model whose tables live in a store, and the rows their tables begin with."""

from collections.abc import Sequence

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.errors import BadInput
from elastable.worker.keras.seeds import layers_of
from elastable.worker.rows.store_backed import StoreBacked
from elastable.worker.rows.store_layer import first_rows


def store_layers(model: keras.Model) -> list[StoreBacked]:
    """Every layer of the model whose table lives in a store."""
    found = []
    for layer in layers_of(model):
        if hasattr(layer, "table_spec") and not layer.on_worker:
            found.append(layer)
    return found


def pretrained_rows(layers: Sequence[StoreBacked], unseeded: bool = False) -> dict[str, Float32]:
    """Table name -> `[vocabulary, dim]` rows that it begins with: given to a layer, or drawn by Keras' initializer.

    Args:
        layers: Store-backed ones; of those that share a table the first that was given rows counts, or else the first.
            Those that read a store do not.
        unseeded: Whether initializers without a seed of their own draw, too.

    Raises:
        BadInput: layers that share a table were given different rows.
    """
    found, new = dict[str, Float32](), list[StoreBacked]()
    for layer in reversed(layers):
        if layer.source is None:
            new.append(layer)
    if not new:
        return found
    new.sort(key=lambda layer: layer.pretrained is not None)
    _refuse_different(new[::-1])
    for layer in new:
        if (rows := first_rows(layer, unseeded)) is not None:
            found[layer.table_name] = rows
    return found


def _refuse_different(layers: Sequence[StoreBacked]) -> None:
    given: dict[str, StoreBacked] = {}
    for layer in layers:
        if layer.pretrained is None:
            continue
        other = given.setdefault(layer.table_name, layer)
        if not np.array_equal(np.asarray(other.pretrained), layer.pretrained):
            raise BadInput(
                f"layers {other.name!r} and {layer.name!r} share the table {layer.table_name!r} and were given "
                "different rows to begin with: give them to one of the layers, or the same to both"
            )


def tables_given(layers: Sequence[StoreBacked]) -> list[str]:
    """Names of the tables whose rows came with the model: loaded, trained before, or set; sorted."""
    drawn = (layer for layer in layers if not np.ndim(getattr(layer.embeddings_initializer, "value", 0)))
    new = {id(layer) for layer in drawn if layer.source is None and layer.pretrained is None}
    return sorted({layer.table_name for layer in layers if id(layer) not in new})


def forget_rows(layers: Sequence[StoreBacked]) -> None:
    """Lets go of the rows that came with the model: what it is attached to next has the right ones."""
    for layer in layers:
        layer.pretrained = None
        layer.attach(None)
