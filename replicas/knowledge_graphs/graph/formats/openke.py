"""OpenKE's files: `entity2id.txt`, `relation2id.txt`, and `train2id.txt` with head, tail, relation in that order."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.formats.damage import is_whole_number
from elastable.replicas.knowledge_graphs.graph.formats.parts import GraphParts, id_triples, names_by_id
from elastable.replicas.knowledge_graphs.graph.names import Names

__all__ = ["read_openke"]


def read_openke(folder: Path) -> GraphParts:
    """Reads a folder of OpenKE; `valid2id.txt` and `test2id.txt` may be missing.

    The first line of every file is the number of lines that follow. In files of triples, columns are head, tail,
    relation, separated by spaces or tabs.

    Raises:
        BadInput: a file that is missing or malformed; names file and line.
    """
    entities = _names(folder / "entity2id.txt", "entity")
    relations = _names(folder / "relation2id.txt", "relation")
    triples = {}
    for split in ("train", "valid", "test"):
        file = folder / f"{split}2id.txt"
        if file.is_file() or split == "train":
            triples[split] = id_triples(_ids(file)[:, [0, 2, 1]], len(entities), len(relations), str(file))
        else:
            triples[split] = np.empty((0, 3), np.int32)
    return GraphParts(folder.resolve().name, entities, relations, triples)


def _lines(file: Path) -> list[str]:
    """The lines behind the first, as many as it says."""
    try:
        first, *lines = file.read_text(encoding="utf-8").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: not a file of OpenKE ({error})") from error
    if not is_whole_number(first.strip()) or int(first) != len(lines):
        raise BadInput(f"{file}, line 1: {first[:80]!r} is not the number of lines that follow, which is {len(lines)}")
    return lines


def _names(file: Path, what: str) -> Names:
    pairs = []
    for number, line in enumerate(_lines(file), start=2):
        name, tab, place = line.rpartition("\t") if "\t" in line else line.rpartition(" ")
        if not tab or not name.strip() or not is_whole_number(place.strip()):
            raise BadInput(f"{file}, line {number}: {line[:80]!r} is not a name and an id")
        pairs.append((int(place), name.strip()))
    return names_by_id(pairs, what, str(file))


def _ids(file: Path) -> Int32:
    rows = []
    for number, line in enumerate(_lines(file), start=2):
        words = line.split()
        if len(words) != 3 or not all(word.isdecimal() and len(word) < 10 for word in words):
            raise BadInput(f"{file}, line {number}: {line[:80]!r} is not head, tail and relation by id")
        rows.append(words)
    return np.array(rows, np.int32).reshape(-1, 3)
