"""A graph as files of ids give it, before triples with unseen names are counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.names import Names

__all__ = ["GraphParts", "id_triples", "names_by_id"]

_MOST_NAMES = 1 << 31


@dataclass(frozen=True, eq=False)
class GraphParts:
    """Names by id, and the triples of each split.

    Attributes:
        name: Name of the graph.
        entities, relations: Names by id.
        triples: "train", "valid" and "test" -> int32 `[N, 3]`.
        entity_types: int32 `[E]`; None if there are no types.
        types: Their names; None if there are no types.
    """

    name: str
    entities: Names
    relations: Names
    triples: Mapping[str, Int32]
    entity_types: Int32 | None = None
    types: Names | None = None


def id_triples(given: npt.ArrayLike, entities: int, relations: int, where: str) -> Int32:
    """int32 `[N, 3]`: triples by id, each of them checked.

    Args:
        given: int `[N, 3]`: head, relation, tail.
        entities, relations: Numbers of names.
        where: The file, for errors.

    Raises:
        BadInput: another shape, or an id without a name; names the triple.
    """
    triples = np.asarray(given)
    if triples.ndim != 2 or triples.shape[1] != 3 or triples.dtype.kind not in "iu":
        raise BadInput(f"{where}: triples must be integers [N, 3]; got {triples.dtype} {list(triples.shape)}")
    for column, (what, count) in enumerate((("head", entities), ("relation", relations), ("tail", entities))):
        wrong = (triples[:, column] < 0) | (triples[:, column] >= count)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise BadInput(f"{where}, triple {place}: {what} {triples[place, column]} has no name among {count}")
    return np.ascontiguousarray(triples, np.int32)


def names_by_id(pairs: Iterable[tuple[int, str]], what: str, where: str) -> Names:
    """The names in the order of their ids, which must be 0 .. n - 1, each once. Raises BadInput otherwise."""
    found: dict[int, str] = {}
    for place, name in pairs:
        if place in found or not 0 <= place < _MOST_NAMES:
            raise BadInput(f"{where}: id {place} of {what} {name!r} is there twice, or cannot be")
        found[place] = name
    if found and max(found) != len(found) - 1:
        missing = next(place for place in range(len(found)) if place not in found)
        raise BadInput(
            f"{where}: {len(found)} {what} names must have the ids 0 .. {len(found) - 1}; {missing} is missing"
        )
    return Names([found[place] for place in range(len(found))], what)
