"""A graph written as a folder of triples by name, as `load_graph` reads it."""

from __future__ import annotations

from pathlib import Path

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import SPLITS, KnowledgeGraph

__all__ = ["save_graph"]


def save_graph(graph: KnowledgeGraph, folder: Path) -> None:
    """Writes `train.txt`, `valid.txt`, `test.txt` and, if there are types, `entity_types.txt`, into a new folder.

    Read again, the graph has the same triples by name; ids are assigned anew, in order of first occurrence, and names
    without a triple are gone.

    Raises:
        BadInput: the folder holds something, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists; a graph is written into a new folder")
    entities, relations = graph.entities, graph.relations
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            with (folder / f"{split}.txt").open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(
                    f"{entities[head]}\t{relations[relation]}\t{entities[tail]}\n"
                    for head, relation, tail in getattr(graph, split).tolist()
                )
        if graph.entity_types is not None and graph.types is not None:
            with (folder / "entity_types.txt").open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(
                    f"{entities[entity]}\t{graph.types[kind]}\n"
                    for entity, kind in enumerate(graph.entity_types.tolist())
                )
                file.writelines(
                    f"{entities[entity]}\t{graph.types[kind]}\n"
                    for entity, kind in ([] if graph.further_types is None else graph.further_types.tolist())
                )
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error}") from error
