"""A host embedding's state in a safetensors file: whole rows in order, with a checksum."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elastable.embedding_store.errors import CheckpointError
from elastable.master.checkpoints.storage.checkpoint_files import LocalFiles
from elastable.master.checkpoints.storage.tensor_file import parts_of, tensors_in
from elastable.replicas.groups.agreement import fail_together
from elastable.replicas.host_embeddings.host_table import HostTable, State

if TYPE_CHECKING:
    from elastable.replicas.host_embeddings.host_embedding import HostEmbedding

_FORMAT = "elastable host embedding 1"


def save_host_embedding(embedding: "HostEmbedding | HostTable", path: str | os.PathLike[str]) -> None:
    """Writes weights, slots and progress; every replica calls it, and rank 0 writes.

    An existing file is replaced once the new one is complete.

    Args:
        embedding: Registered or not.
        path: The file, by convention with the suffix ".safetensors".

    Raises:
        CheckpointError: the file cannot be written (StoreFailed with the reason, on other replicas).
    """
    table = _table(embedding)
    state = table.state()
    with fail_together(table.group):
        if table.group.rank == 0:
            _write(Path(path), table.spec.name, state)


def load_host_embedding(embedding: "HostEmbedding | HostTable", path: str | os.PathLike[str]) -> None:
    """Loads what `save_host_embedding` wrote; every replica calls it and reads the file.

    Raises:
        CheckpointError: the file is missing, damaged, or not of a host embedding; nothing has changed.
        BadInput: it is the state of another table; names the difference. Nothing has changed.
        StoreFailed: another replica could not read it; names the rank.
    """
    table = _table(embedding)
    with fail_together(table.group):
        state = _read(Path(path))
    table.restore(state)


def _table(embedding: "HostEmbedding | HostTable") -> HostTable:
    return embedding if isinstance(embedding, HostTable) else embedding.table


def _write(path: Path, name: str, state: State) -> None:
    tensors = {key: [values] for key, values in state.items()}
    note = {"format": _FORMAT, "name": name, "blake2b": _checksum(state)}
    draft = path.with_name(f".{path.name}.writing")
    try:
        draft.unlink(missing_ok=True)
        LocalFiles(path.parent).write(draft.name, parts_of(tensors, note))
        draft.replace(path)
    except OSError as error:
        raise CheckpointError(f"host embedding {name!r} cannot be written to {path}: {error}") from error


def _read(path: Path) -> State:
    try:
        tensors, note = tensors_in(LocalFiles(path.parent).read(path.name))
    except (OSError, ValueError) as failure:
        raise CheckpointError(f"{path} cannot be read as a host embedding: {failure}") from failure
    if note.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a host embedding: its format is {note.get('format')!r}")
    if _checksum(tensors) != note.get("blake2b"):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return dict(tensors)


def _checksum(state: State) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        digest.update(f"{name} {state[name].dtype} {state[name].shape};".encode())
        digest.update(np.ascontiguousarray(state[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
