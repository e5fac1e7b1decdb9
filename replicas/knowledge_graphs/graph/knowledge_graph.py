"""A knowledge graph: triples to train with, to validate and to test, their names and ids."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import Bools, Int32
from elastable.replicas.knowledge_graphs.graph.names import Names
from elastable.replicas.knowledge_graphs.graph.triple_file import line_of, read_columns

__all__ = ["INSTALLED_GRAPHS", "SPLITS", "KnowledgeGraph", "Unseen", "load_graph"]

Unseen = Literal["keep", "drop", "refuse"]

SPLITS = ("train", "valid", "test")
_ENDINGS = (".txt", ".tsv")
_TYPES = "entity_types"

INSTALLED_GRAPHS = ("kinships", "nations", "umls")
"""Graphs that come inside the wheel of pykeen, whose files are read without importing it."""


@dataclass(frozen=True, eq=False)
class KnowledgeGraph:
    """Triples by id, and what the ids are called.

    Attributes:
        name: Of the graph, for people.
        entities: Names by id: those of training first, in the order in which they are met there.
        relations: Likewise.
        train: int32 `[N, 3]`: head, relation, tail, to train with.
        valid: int32, to stop and choose by; may be empty.
        test: int32, to report; may be empty.
        unseen: How many triples of "valid" and of "test" hold an entity or relation
            that no training triple holds. They are among the triples, or were
            dropped, as `load_graph` was told.
        entity_types: int32 `[E]`, or None where the graph has no types.
        types: Their names, or None.
    """

    name: str
    entities: Names
    relations: Names
    train: Int32
    valid: Int32
    test: Int32
    unseen: dict[str, int]
    entity_types: Int32 | None = None
    types: Names | None = None

    def save_names(self, folder: str | os.PathLike[str]) -> None:
        """Writes `entities.txt` and `relations.txt`, a name a line in the order of ids, into a folder that is there."""
        self.entities.save(Path(folder) / "entities.txt")
        self.relations.save(Path(folder) / "relations.txt")


def load_graph(source: str | os.PathLike[str], *, unseen: Unseen = "keep") -> KnowledgeGraph:
    """Reads a graph.

    Args:
        source: A folder with `train.txt` and, if they are there, `valid.txt`, `test.txt`
            (or `.tsv`): head, relation and tail by name, tab-separated, one triple a
            line; and `entity_types.txt`, if it is there: entity and type, one entity a
            line. Or the name of an installed graph: see `INSTALLED_GRAPHS`.
        unseen: What becomes of validation and test triples with an entity or
            relation that no training triple has. "keep": it gets an id and an
            embedding that stays as it began, and the triple counts, as in LibKGE;
            "drop": the triple is left out; "refuse": it is an error.

    Raises:
        BadInput: no such graph, a malformed line (by file and number), no
            training triple, or an unseen name that is to be refused.
    """
    if unseen not in get_args(Unseen):
        raise BadInput(f"unseen {unseen!r}: known are {', '.join(get_args(Unseen))}")
    folder = _folder(source)
    files = {split: file for split in SPLITS if (file := _file(folder, split)) is not None}
    if "train" not in files:
        raise BadInput(f"{folder}: no train.txt (or .tsv) with triples to train with")
    entities, relations = _Ids(), _Ids()
    triples = {"train": _read(files["train"], entities, relations)}
    if not len(triples["train"]):
        raise BadInput(f"{files['train']}: no triple to train with")
    seen = (len(entities.names), len(relations.names), len(entities.names))
    counts = {}
    for split in SPLITS[1:]:
        found = _read(files[split], entities, relations) if split in files else np.empty((0, 3), np.int32)
        strange = found >= np.array(seen)
        counts[split] = int(strange.any(1).sum())
        if counts[split] and unseen == "refuse":
            _refuse(files[split], strange, found, entities.names, relations.names)
        triples[split] = found[~strange.any(1)] if unseen == "drop" else found
    if unseen == "drop":
        del entities.names[seen[0] :], relations.names[seen[1] :]
    names = Names(entities.names)
    types, entity_types = _types(_file(folder, _TYPES), names)
    return KnowledgeGraph(
        name=folder.resolve().name,
        entities=names,
        relations=Names(relations.names, "relation"),
        **triples,
        unseen=counts,
        entity_types=entity_types,
        types=types,
    )


class _Ids:
    """Ids of names, in the order in which the names come."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._ids: dict[str, int] = {}

    def ids(self, names: list[str]) -> Int64:
        for name in names:
            if name not in self._ids:
                self._ids[name] = len(self.names)
                self.names.append(name)
        return np.array([self._ids[name] for name in names], np.int64)


def _folder(source: str | os.PathLike[str]) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    if str(source) not in INSTALLED_GRAPHS:
        raise BadInput(f"{source}: neither a folder nor a graph that may be installed ({', '.join(INSTALLED_GRAPHS)})")
    found = importlib.util.find_spec("pykeen")  # finds its files; imports nothing of it
    for place in (found.submodule_search_locations or []) if found else []:
        inside = Path(place) / "datasets" / str(source)
        if inside.is_dir():
            return inside
    raise BadInput(
        f"graph {source!r} is inside the wheel of pykeen, which is not installed: pip install --no-deps pykeen"
    )


def _file(folder: Path, name: str) -> Path | None:
    return next((file for ending in _ENDINGS if (file := folder / f"{name}{ending}").is_file()), None)


def _read(file: Path, entities: _Ids, relations: _Ids) -> Int32:
    (heads, head), (kinds, relation), (tails, tail) = read_columns(file)
    # Line by line, the head before the tail: the order of a column's dictionary is that of its first lines.
    met = [
        (int(line), end, name)
        for end, (names, codes) in enumerate(((heads, head), (tails, tail)))
        for name, line in zip(names, np.unique(codes, return_index=True)[1], strict=True)
    ]
    entities.ids([name for _, _, name in sorted(met)])
    return np.stack([entities.ids(heads)[head], relations.ids(kinds)[relation], entities.ids(tails)[tail]], 1).astype(
        np.int32
    )


def _refuse(file: Path, strange: Bools, triples: Int32, entities: list[str], relations: list[str]) -> None:
    record = int(np.argmax(strange.any(1)))
    column = int(np.argmax(strange[record]))
    what, names = (("entity", entities), ("relation", relations))[column == 1]
    raise BadInput(
        f"{file}, line {line_of(file, record)}: no training triple has {what} {names[triples[record, column]]!r}; such "
        f"triples can be kept (unseen='keep') or dropped (unseen='drop')"
    )


def _types(file: Path | None, entities: Names) -> tuple[Names | None, Int32 | None]:
    """The names of types, and each entity's; lines of entities that the graph does not have are passed over."""
    if file is None:
        return None, None
    (named, entity), (types, kind) = read_columns(file, ("entity", "type"))
    place = np.array([entities.id_of(name) if name in entities else -1 for name in named], np.int64)[entity]
    found = np.full(len(entities), -1, np.int32)
    found[place[place >= 0]] = kind[place >= 0]
    twice = (place >= 0) & (found[place] != kind)
    if twice.any():
        record = int(np.argmax(twice))
        raise BadInput(f"{file}, line {line_of(file, record)}: entity {named[entity[record]]!r} has another type, too")
    if (found < 0).any():  # those without a type are a type of their own
        types, found = [*types, "(none)"], np.where(found < 0, len(types), found).astype(np.int32)
    return Names(types, "type"), found
