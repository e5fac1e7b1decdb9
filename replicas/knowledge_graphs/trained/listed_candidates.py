"""Files of candidates for each triple: OGB's arrays of negatives by id, or Parquet lists of names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation.triple_candidates import TripleCandidates
from elastable.replicas.knowledge_graphs.graph import DAMAGED, KnowledgeGraph

__all__ = ["read_triple_candidates"]

_ENDS = ("head", "tail")


def read_triple_candidates(file: Path, graph: KnowledgeGraph) -> TripleCandidates:
    """Reads the candidates of a split's triples, in their order.

    Args:
        file: `.npz` with OGB's arrays `head_neg` and `tail_neg`, int `[N, k]`; with `head_type` and `tail_type`, as of
            ogbl-biokg, ids count within the type. Or `.parquet` with columns `head_candidates` and `tail_candidates`,
            a list of names for each triple.
        graph: Its entities.

    Raises:
        BadInput: a file that cannot be read, without these arrays or columns, or with unknown names.
        IdOutOfRange: a candidate is not an entity.
    """
    if file.suffix not in (".npz", ".parquet"):
        raise BadInput(f"{file}: candidates for each triple are in a file .npz or .parquet")
    try:
        heads, tails = _ids(file, graph) if file.suffix == ".npz" else _names(file, graph)
    except (*DAMAGED, pa.ArrowException) as error:
        raise BadInput(f"{file}: cannot be read as candidates for each triple ({error})") from error
    return TripleCandidates.of(heads, tails, len(graph.entities))


def _ids(file: Path, graph: KnowledgeGraph) -> list[Array]:
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as saved:
        arrays: Mapping[str, Array] = {name: saved[name] for name in saved if not name.startswith("relation")}
    lists = []
    for end in _ENDS:
        found = arrays[f"{end}_neg"]
        kinds = arrays.get(f"{end}_type")
        if kinds is not None and found.ndim == 2 and kinds.shape == found.shape[:1]:
            found = _within_types(found, kinds, graph)
        lists.append(found)
    return lists


def _within_types(found: Array, kinds: Array, graph: KnowledgeGraph) -> Array:
    """Ids that count within the type of each row, int `[N, k]`, as ids of the graph; -1 stays."""
    if graph.types is None or graph.entity_types is None:
        raise BadInput("its ids count within types, and the graph has none")
    named, codes = np.unique(kinds, return_inverse=True)
    first, counts = [], []
    for name in named:
        members = np.flatnonzero(graph.entity_types == graph.types.id_of(str(name)))
        if not len(members) or members[-1] - members[0] + 1 != len(members):
            raise BadInput(f"ids count within types, but those of type {str(name)!r} do not follow each other")
        first.append(int(members[0]))
        counts.append(len(members))
    if (found >= np.array(counts)[codes][:, None]).any():
        raise BadInput("an id is beyond its type's entities")
    return np.where(found < 0, found, found + np.array(first)[codes][:, None])


def _names(file: Path, graph: KnowledgeGraph) -> list[Array]:
    columns = [f"{end}_candidates" for end in _ENDS]
    table = pyarrow.parquet.read_table(file, columns=columns)
    lists = []
    for column in columns:
        rows: list[list[str] | None] = table[column].to_pylist()
        ids = [graph.entities.ids_of(list(row or ())) for row in rows]
        found = np.full((len(rows), max((len(row) for row in ids), default=0)), -1, np.int64)
        for place, row in enumerate(ids):
            found[place, : len(row)] = row
        lists.append(found)
    return lists
