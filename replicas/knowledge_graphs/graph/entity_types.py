"""Files of entity types: an entity and a type per line, several lines for an entity of several types."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Int32
from elastable.replicas.knowledge_graphs.graph.names import Names
from elastable.replicas.knowledge_graphs.graph.triple_file import read_columns

__all__ = ["read_entity_types"]


def read_entity_types(file: Path | None, entities: Names) -> tuple[Names | None, Int32 | None, Int32 | None]:
    """Reads types of entities; lines of others are skipped.

    Args:
        file: The file; None: there are no types.
        entities: The graph's.

    Returns:
        The names of types; int32 `[E]`, the first type of each entity; int32 `[K, 2]`, entity and type, further ones.
        Entities without a type have the type "(none)".

    Raises:
        BadInput: a malformed line.
    """
    if file is None:
        return None, None, None
    (named, entity), (types, kind) = read_columns(file, ("entity", "type"))
    place = np.array([entities.id_of(name) if name in entities else -1 for name in named], np.int64)[entity]
    pairs = np.stack([place, kind.astype(np.int64)], axis=1)[place >= 0]
    pairs = pairs[np.sort(np.unique(pairs, axis=0, return_index=True)[1])]  # each once, in the order of the file
    with_type, first = np.unique(pairs[:, 0], return_index=True)
    found = np.full(len(entities), -1, np.int32)
    found[with_type] = pairs[first, 1]
    if (found < 0).any():  # entities without a type get their own type
        types, found = [*types, "(none)"], np.where(found < 0, len(types), found).astype(np.int32)
    return Names(types, "type"), found, np.delete(pairs, first, axis=0).astype(np.int32)
