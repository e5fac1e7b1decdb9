"""Host embeddings of a model trained over replicas: found, saved and restored with the rest of its state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.replicas.groups.agreement import run_at_root
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.host_embeddings.embedding import HostEmbedding
from elastable.replicas.host_embeddings.state import require_state
from elastable.worker.keras.seeds import layers_of

__all__ = ["HOST", "host_embeddings", "host_tensors", "restore_hosts"]

HOST = "host/"
"""Prefix of their tensors' keys: "host/TABLE/ARRAY", with the arrays of `elastable.replicas.host_embeddings.file`."""


def host_embeddings(model: keras.Model) -> list[HostEmbedding]:
    """The model's layers that are host embeddings, by the names of their tables."""
    found = [layer for layer in layers_of(model) if isinstance(layer, HostEmbedding)]
    return sorted(found, key=lambda layer: str(layer.table.spec.name))


def host_tensors(model: keras.Model) -> Iterator[tuple[str, Array]]:
    """(key, whole tensor) of every host embedding's state; every replica iterates to the end."""
    for layer in host_embeddings(model):
        for name, array in layer.state().items():
            yield f"{HOST}{layer.table.spec.name}/{name}", np.asarray(array)


def restore_hosts(model: keras.Model, group: ReplicaGroup, tensors: Mapping[str, Array]) -> None:
    """Restores what `host_tensors` gave; every replica calls it.

    Args:
        model: This replica's.
        group: All replicas.
        tensors: Tensors by key; only rank 0's are used.

    Raises:
        CheckpointError: they do not fit the model's host embeddings; nothing has changed.
    """
    layers = host_embeddings(model)
    states = {layer.table.spec.name: _of_table(layer.table.spec.name, tensors) for layer in layers}

    def checked() -> str:
        known = {f"{HOST}{name}/{array}" for name, state in states.items() for array in state}
        foreign = sorted(key for key in tensors if key.startswith(HOST) and key not in known)
        if foreign:
            raise CheckpointError(f"the checkpoint has {foreign[0]}, and the model has no such host embedding")
        for layer in layers:
            try:
                require_state(layer.table.spec, states[layer.table.spec.name])
            except BadInput as error:
                raise CheckpointError(f"the checkpoint is of another model: {error}") from error
        return json.dumps(
            {
                table: {name: (str(array.dtype), array.shape) for name, array in state.items()}
                for table, state in states.items()
            }
        )

    kinds: dict[str, dict[str, tuple[str, list[int]]]] = json.loads(run_at_root(group, checked))
    for layer in layers:
        mine, taken = states[layer.table.spec.name], dict[str, Array]()
        for name, (dtype, shape) in kinds[layer.table.spec.name].items():
            array = np.asarray(mine[name], order="C") if group.rank == 0 else np.empty(shape, dtype)
            taken[name] = group.broadcast(array)
        layer.restore(taken)


def _of_table(table: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    start = f"{HOST}{table}/"
    return {key.removeprefix(start): array for key, array in tensors.items() if key.startswith(start)}
