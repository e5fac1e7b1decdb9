"""PyKEEN's datasets: those it saved as folders, its own by name, and `TriplesFactory` objects."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elastable.embedding_store.contract.arrays import Int32
from elastable.embedding_store.errors import BadInput, NotInstalled
from elastable.replicas.knowledge_graphs.graph.formats.damage import DAMAGED, is_whole_number
from elastable.replicas.knowledge_graphs.graph.formats.parts import GraphParts, id_triples, names_by_id
from elastable.replicas.knowledge_graphs.graph.names import Names

if TYPE_CHECKING:
    from pykeen.triples import CoreTriplesFactory

__all__ = ["parts_of_factories", "read_pykeen"]

_FOLDERS = {"train": "training", "valid": "validation", "test": "testing"}


def read_pykeen(place: str) -> GraphParts:
    """Reads a folder that `Dataset.to_directory_binary` wrote, without PyKEEN; or PyKEEN's dataset of that name.

    Raises:
        BadInput: a folder without PyKEEN's files, or a malformed one.
        NotInstalled: a name, and PyKEEN, or what it needs, is not installed.
    """
    if Path(place).is_dir():
        return _of_folder(Path(place))
    try:
        from pykeen.datasets import get_dataset
    except ImportError as error:
        raise NotInstalled(
            f"pykeen:{place} is no folder, and PyKEEN with torch is not installed: pip install pykeen, or save the "
            f"dataset elsewhere by to_directory_binary and name its folder ({error})"
        ) from error
    found = get_dataset(dataset=place)
    return parts_of_factories(place, found.training, found.validation, found.testing)


def parts_of_factories(
    name: str,
    training: CoreTriplesFactory,
    validation: CoreTriplesFactory | None = None,
    testing: CoreTriplesFactory | None = None,
) -> GraphParts:
    """The graph of up to three factories.

    Args:
        name: Name of the graph.
        training, validation, testing: `TriplesFactory`, or `CoreTriplesFactory`, whose entities and relations are then
            named by their ids. Inverse triples that a factory would create are not taken.

    Raises:
        BadInput: a factory's ids have no names, or two factories name ids differently.
    """
    entities, relations = _names(training, "entity"), _names(training, "relation")
    triples = {}
    for split, factory in (("train", training), ("valid", validation), ("test", testing)):
        if factory is None:
            triples[split] = np.empty((0, 3), np.int32)
            continue
        if (_names(factory, "entity"), _names(factory, "relation")) != (entities, relations):
            raise BadInput(f"{name}: the {_FOLDERS[split]} factory gives names other ids than the training factory")
        where = f"{name}, {_FOLDERS[split]}"
        triples[split] = id_triples(np.asarray(factory.mapped_triples), len(entities), len(relations), where)
    return GraphParts(name, entities, relations, triples)


def _names(factory: CoreTriplesFactory, what: str) -> Names:
    mapping: Mapping[str, int] | None = getattr(factory, f"{what}_to_id", None)
    if mapping is not None:
        pairs = [(int(place), name) for name, place in mapping.items()]
        return names_by_id(pairs, what, f"{what}_to_id of a factory")
    # `num_relations` counts inverse ones, where the factory would create them.
    count = factory.num_entities if what == "entity" else getattr(factory, "real_num_relations", factory.num_relations)
    return Names([str(place) for place in range(int(count))], what)


def _of_folder(folder: Path) -> GraphParts:
    parts = {split: folder / name for split, name in _FOLDERS.items() if (folder / name).is_dir()}
    if "train" not in parts:
        raise BadInput(f"{folder} is no dataset of PyKEEN: it has no folder training")
    found: tuple[Names, Names] | None = None
    triples = {}
    for split in _FOLDERS:
        if split not in parts:
            triples[split] = np.empty((0, 3), np.int32)
            continue
        entities, relations = (_labels(parts[split] / f"{what}_to_id.tsv.gz", what) for what in ("entity", "relation"))
        if found is not None and found != (entities, relations):
            raise BadInput(f"{parts[split]} gives names other ids than {parts['train']}")
        found = (entities, relations)
        file = parts[split] / "numeric_triples.tsv.gz"
        triples[split] = id_triples(_numbers(file), len(entities), len(relations), str(file))
    assert found is not None
    return GraphParts(folder.resolve().name, *found, triples)


def _rows(file: Path, header: list[str]) -> Iterable[list[str]]:
    """The rows of a table with this header, and of as many columns."""
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
            first, *rows = csv.reader(lines, delimiter="\t")
    except DAMAGED as error:
        raise BadInput(f"{file}: not a table of PyKEEN ({error})") from error
    for number, row in enumerate(rows, start=2):
        if first != header or len(row) != len(header):
            raise BadInput(f"{file}, line {number}: wanted the columns {', '.join(header)}")
    return rows


def _labels(file: Path, what: str) -> Names:
    rows = _rows(file, ["id", "label"])
    if not all(is_whole_number(place) for place, _ in rows):
        raise BadInput(f"{file}: an id is not a whole number")
    return names_by_id([(int(place), label) for place, label in rows], what, str(file))


def _numbers(file: Path) -> Int32:
    rows = list(_rows(file, ["head", "relation", "tail"]))
    if not all(word.isdecimal() and len(word) < 10 for row in rows for word in row):
        raise BadInput(f"{file}: an id is not a whole number")
    return np.array(rows, np.int32).reshape(-1, 3)
