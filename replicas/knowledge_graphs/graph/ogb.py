"""OGB's link-prediction graphs (ogbl-wikikg2, ogbl-biokg), as NumPy files of the arrays of `get_edge_split`."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.names import Names
from elastable.replicas.knowledge_graphs.graph.triple_files import DAMAGED

__all__ = ["GraphParts", "read_ogb"]

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


def _checked(given: Array, entities: int, relations: int, where: str) -> Int32:
    """int32 `[N, 3]`; raises BadInput for an id without a name, and names the triple."""
    for column, (what, count) in enumerate((("head", entities), ("relation", relations), ("tail", entities))):
        wrong = (given[:, column] < 0) | (given[:, column] >= count)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise BadInput(f"{where}, triple {place}: {what} {given[place, column]} has no name among {count}")
    return np.ascontiguousarray(given, np.int32)


def _names_by_id(pairs: Iterable[tuple[int, str]], what: str, where: str) -> Names:
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


_NAMES_OF_A_TRIPLE, _NAMES_OF_ANY = 100, 1 << 20
_RELATIONS = ("reltype2relid", "relidx2relname")


def read_ogb(folder: Path) -> GraphParts:
    """Reads `train.npz`, and `valid.npz` and `test.npz` if they are there.

    Their arrays are those of `LinkPropPredDataset.get_edge_split`: `head`, `relation`, `tail` (int `[N]`), and, where
    ids count within types as in ogbl-biokg, `head_type` and `tail_type` (strings `[N]`). Names come from OGB's folder
    `mapping`, if it is there; otherwise they are ids, and `TYPE:id` with types.

    Raises:
        BadInput: a file that is missing or malformed.
    """
    splits = {split: _arrays(folder / f"{split}.npz", split == "train") for split in ("train", "valid", "test")}
    if not len(splits["train"]["head"]):
        raise BadInput(f"{folder / 'train.npz'}: no training triple")
    typed = "head_type" in splits["train"]
    for split, arrays in splits.items():
        found = {f"{end}_type" in arrays for end in ("head", "tail")}
        if found != {typed} and (typed or len(arrays["head"])):
            raise BadInput(
                f"{folder / split}.npz: ids count within types in all splits, with head_type and tail_type, or in none"
            )
    named = [array for split in splits.values() for name, array in split.items() if name.endswith("_type")]
    types = np.unique(np.concatenate([np.empty(0, str), *named])).tolist()
    offsets, names, kinds = _entities(folder, splits, types)
    relations = _relations(folder, splits)
    triples = {}
    for split, arrays in splits.items():
        ends = [arrays[end] + (_offsets(arrays[f"{end}_type"], offsets) if typed else 0) for end in ("head", "tail")]
        stacked = np.stack([ends[0], arrays["relation"], ends[1]], axis=1)
        triples[split] = _checked(stacked, len(names), len(relations), str(folder / f"{split}.npz"))
    if not typed:
        return GraphParts(folder.resolve().name, names, relations, triples)
    return GraphParts(folder.resolve().name, names, relations, triples, kinds, Names(types, "type"))


def _arrays(file: Path, needed: bool) -> dict[str, Array]:
    if not file.is_file() and not needed:
        ids = dict.fromkeys(("head", "relation", "tail"), np.empty(0, np.int64))
        return {**ids, **dict.fromkeys(("head_type", "tail_type"), np.empty(0, str))}
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as saved:
            found = {name: saved[name] for name in ("head", "relation", "tail")}
            found |= {name: saved[name] for name in ("head_type", "tail_type") if name in saved}
    except DAMAGED as error:
        raise BadInput(
            f"{file}: not a NumPy file with the arrays head, relation and tail ({error}); write it by "
            'np.savez("train.npz", **dataset.get_edge_split()["train"])'
        ) from error
    lengths = {name: value.shape for name, value in found.items()}
    if len(set(lengths.values())) != 1 or found["head"].ndim != 1:
        raise BadInput(f"{file}: its arrays must be [N], as many as there are triples; they are {lengths}")
    for name, value in found.items():
        if value.dtype.kind not in ("U" if name.endswith("_type") else "iu"):
            raise BadInput(f"{file}: {name} is of {value.dtype}")
        if not name.endswith("_type") and len(value) and value.min() < 0:
            raise BadInput(f"{file}: {name} has an id below 0")
    return {name: value.astype(np.int64) if value.dtype.kind in "iu" else value for name, value in found.items()}


def _offsets(kinds: Array, offsets: Mapping[str, int]) -> Array:
    """int64 `[N]`: the first id of each entity's type."""
    unique, codes = np.unique(kinds, return_inverse=True)
    return np.array([offsets[each] for each in unique.tolist()], np.int64)[codes]


def _entities(
    folder: Path, splits: Mapping[str, Mapping[str, Array]], types: list[str]
) -> tuple[dict[str, int], Names, Int32]:
    """The first id of every type, the names, and each entity's type."""
    offsets: dict[str, int] = {}
    names: list[str] = []
    kinds: list[Array] = []
    for place, kind in enumerate(types or [""]):
        ids = [_of_type(split, end, kind) for split in splits.values() for end in ("head", "tail")]
        count = 1 + max((int(some.max()) for some in ids if len(some)), default=-1)
        mapped = _mapping(folder, f"{kind}_entidx2name" if kind else "nodeidx2entityid", "entity")
        if mapped is None:
            _require_dense(folder, count, kind or "entities", splits)
        elif len(mapped) < count:
            raise BadInput(f"{folder}/mapping has {len(mapped)} names of {kind or 'entities'}; triples have {count}")
        listed = [str(each) for each in range(count)] if mapped is None else list(mapped)
        offsets[kind] = len(names)
        names += [f"{kind}:{each}" for each in listed] if kind else listed
        kinds.append(np.full(len(listed), place, np.int32))
    return offsets, Names(names), np.concatenate(kinds)


def _require_dense(folder: Path, count: int, what: str, splits: Mapping[str, Mapping[str, Array]]) -> None:
    """Refuses ids so far apart that their names, which nothing lists, would not be worth their memory."""
    triples = sum(len(split["head"]) for split in splits.values())
    if count > _NAMES_OF_A_TRIPLE * triples + _NAMES_OF_ANY:
        raise BadInput(
            f"{folder}: the ids of {what} go up to {count - 1}, in {triples} triples; without OGB's folder mapping ids "
            "must be numbered closely"
        )


def _of_type(arrays: Mapping[str, Array], end: str, kind: str) -> Array:
    return arrays[end][arrays[f"{end}_type"] == kind] if kind else arrays[end]


def _relations(folder: Path, splits: Mapping[str, Mapping[str, Array]]) -> Names:
    for name in _RELATIONS:
        mapped = _mapping(folder, name, "relation")
        if mapped is not None:
            return mapped
    count = 1 + max(int(split["relation"].max()) for split in splits.values() if len(split["relation"]))
    _require_dense(folder, count, "relations", splits)
    return Names([str(each) for each in range(count)], "relation")


def _mapping(folder: Path, name: str, what: str) -> Names | None:
    """Names by id from a file of OGB: a header, then id and name."""
    file = folder / "mapping" / f"{name}.csv.gz"
    if not file.is_file():
        return None
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines))[1:]
        return _names_by_id([(int(row[0]), row[1]) for row in rows], what, str(file))
    except DAMAGED as error:
        raise BadInput(f"{file}: not a mapping of OGB ({error})") from error
