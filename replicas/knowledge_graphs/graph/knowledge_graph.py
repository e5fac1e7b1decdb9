"""A knowledge graph: how the user names it, its triples with names and ids, reading and writing it."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, urlencode

import numpy as np

from elastable.embedding_store.contract.arrays import Int32, Int64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph.sharding import checked_triples
from elastable.replicas.knowledge_graphs.graph.triple_files import (
    TABLE_ENDINGS,
    Names,
    inverse_names,
    numbered,
    read_columns,
    read_entity_types,
    read_ogb,
    read_table_columns,
    without_header,
)

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("head", "relation", "tail")
"""Names of the columns of CSV and Parquet files, unless the source names others."""

FOREIGN = ("ogb",)
"""Formats that are named before a colon."""

HEADERS = ("auto", "yes", "no")
"""Whether files of names have a header: recognised by its words, always, or never."""

_HEADER = "header"


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph as the user named it.

    Attributes:
        place: A folder.
        kind: One of `FOREIGN`; "": files of names.
        columns: Names of the columns of head, relation and tail in CSV and Parquet files.
        header: Whether `train.txt` and CSV files, and those of the other splits, begin with a header; one of `HEADERS`.
    """

    place: str
    kind: str = ""
    columns: tuple[str, ...] = COLUMNS
    header: str = "auto"

    @classmethod
    def parse(cls, source: str | os.PathLike[str]) -> Self:
        """Reads a source; a folder that exists is one, whatever its name.

        Raises:
            BadInput: columns that are not named `head`, `relation` or `tail`, a header that is not one of `HEADERS`, or
                either for a format that has none.
        """
        said = os.fspath(source)
        if os.path.isdir(said):
            return cls(said)
        place, _, query = said.partition("?")
        kind, colon, rest = place.partition(":")
        known = bool(colon) and kind in FOREIGN
        if known and query:
            raise BadInput(f"{said}: files of {kind} have no columns to name, and no header to choose")
        named = dict(parse_qsl(query, keep_blank_values=True))
        if set(named) - {*COLUMNS, _HEADER} or not all(named.values()) or (query and not named):
            raise BadInput(f"{said}: name columns as FOLDER?head=A&relation=B&tail=C&header=yes; got {query!r}")
        columns, header = tuple(named.get(each, each) for each in COLUMNS), named.get(_HEADER, "auto")
        if header not in HEADERS:
            raise BadInput(f"{said}: header {header!r}: known are {', '.join(HEADERS)}")
        if header == "no" and columns != COLUMNS:
            raise BadInput(f"{said}: columns are named by a header; leave out their names, or header=no")
        return cls(rest if known else place, kind if known else "", columns, header)

    def absolute(self) -> Self:
        """The same graph, to be found from any working directory."""
        return replace(self, place=str(Path(self.place).resolve())) if os.path.isdir(self.place) else self

    def __str__(self) -> str:
        said = f"{self.kind}:{self.place}" if self.kind else self.place
        query = {} if self.columns == COLUMNS else dict(zip(COLUMNS, self.columns, strict=True))
        query |= {} if self.header == "auto" else {_HEADER: self.header}
        return f"{said}?{urlencode(query)}" if query else said


SPLITS = ("train", "valid", "test")
_ENDINGS = (".txt", ".tsv", ".txt.gz", ".tsv.gz", *TABLE_ENDINGS)
_TYPES = "entity_types"


@dataclass(frozen=True, eq=False)
class KnowledgeGraph:
    """Triples by id, and the names of ids.

    Attributes:
        entities: Names by id: those of training triples first, in order of first occurrence.
        relations: The same for relations.
        train: int32 `[N, 3]`: head, relation, tail.
        valid: int32 `[N, 3]`, for early stopping; may be empty.
        test: int32 `[N, 3]`, for the reported metrics; may be empty.
        entity_types: int32 `[E]`; None if the graph has no types.
        types: Their names; None if the graph has no types.
        further_types: int32 `[K, 2]`: entity and type, for entities of several types: those besides `entity_types`.
        unseen: Number of triples of "valid" and "test" with an entity or relation that
            no training triple has: these have an embedding that is never trained.
        trained_on: Number of triples of "valid" and "test" that are training triples, too.
        notes: What the reader noticed, for people.
    """

    name: str
    entities: Names
    relations: Names
    train: Int32
    valid: Int32
    test: Int32
    entity_types: Int32 | None = None
    types: Names | None = None
    further_types: Int32 | None = None
    unseen: dict[str, int] = field(init=False)
    trained_on: dict[str, int] = field(init=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        entity, relation = np.zeros(len(self.entities), np.bool_), np.zeros(len(self.relations), np.bool_)
        entity[self.train[:, [0, 2]]] = relation[self.train[:, 1]] = True
        keys = {split: self._keys(getattr(self, split)) for split in SPLITS}
        unseen, trained_on, notes = dict[str, int](), dict[str, int](), [*self.notes]
        for split in SPLITS[1:]:
            found: Int32 = getattr(self, split)
            unseen[split] = int((~(entity[found[:, [0, 2]]].all(axis=1) & relation[found[:, 1]])).sum())
            trained_on[split] = count = int(np.isin(keys[split], keys["train"]).sum())
            if count:
                notes.append(f"{count} of {len(found)} {split} triples are training triples, too; metrics count them")
        for name, value in (("unseen", unseen), ("trained_on", trained_on), ("notes", tuple(notes))):
            object.__setattr__(self, name, value)

    def _keys(self, triples: Int32) -> Int64:
        """int64 `[N]`: a number for each triple."""
        sizes = np.array([len(self.relations) * len(self.entities), len(self.entities), 1])
        keys: Int64 = triples.astype(np.int64) @ sizes
        return keys

    def save_names(self, folder: str | os.PathLike[str], reciprocal: bool = False) -> None:
        """Writes `entities.txt` and `relations.txt`, a name per line in the order of ids, into an existing folder.

        With reciprocal relations, the names of the inverse ones follow: `inverse_names`.
        """
        self.entities.save(Path(folder) / "entities.txt")
        names = self.relations if not reciprocal else Names([*self.relations, *inverse_names(self.relations)])
        names.save(Path(folder) / "relations.txt")

    def entities_of_type(self, name: str) -> Int64:
        """int64 `[k]`, ascending: the entities of a type. Raises BadInput for an unknown type, or without types."""
        if self.types is None or self.entity_types is None:
            raise BadInput(f"{self.name} has no entity_types.txt with entity and type, one per line")
        kind = self.types.id_of(name)
        found = np.flatnonzero(self.entity_types == kind)
        if self.further_types is None:
            return found
        return np.union1d(found, self.further_types[self.further_types[:, 1] == kind, 0]).astype(np.int64)


def load_graph(source: str | os.PathLike[str]) -> KnowledgeGraph:
    """Reads a graph. Entities and relations that no training triple has get ids, too, and their triples count.

    Args:
        source: A folder with `train.txt` and optionally `valid.txt`, `test.txt` (or `.tsv`; either may end in `.gz`):
            head, relation and tail by name, tab-separated, one triple per line, with or without a header
            (`triple_files.without_header`); and optionally `entity_types.txt`: entity and type, on several lines for an
            entity of several types. Files may end in `.csv`, `.csv.gz` or `.parquet`, with columns head,
            relation and tail, or those of `FOLDER?head=A&relation=B&tail=C`. `FOLDER?header=yes` or `header=no` says
            whether text and CSV files begin with a header. Or `ogb:FOLDER`: `read_ogb`.

    Raises:
        BadInput: no such graph, a malformed line (named by file and number), no training triple, or two files of one
            split.
    """
    asked = GraphSource.parse(source)
    return _of_ids(Path(asked.place)) if asked.kind else _of_names(Path(asked.place), asked)


def _of_ids(folder: Path) -> KnowledgeGraph:
    given, entities, relations, entity_types, types = read_ogb(folder)
    triples = dict[str, Int32]()
    for split, ids in given.items():
        try:
            triples[split] = checked_triples(ids, len(entities), len(relations))
        except (BadInput, IdOutOfRange) as error:
            raise BadInput(f"{folder / split}.npz, {error}") from error
    name = folder.resolve().name
    train, valid, test = (triples[split] for split in SPLITS)
    return KnowledgeGraph(name, entities, relations, train, valid, test, entity_types, types)


def _of_names(folder: Path, asked: GraphSource) -> KnowledgeGraph:
    import pyarrow as pa

    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; a graph is a folder with train.txt, or ogb:FOLDER")
    files = {split: file for split in SPLITS if (file := _file(folder, split)) is not None}
    if "train" not in files:
        raise BadInput(f"{folder}: no train.txt (or .tsv) with training triples")
    found = {split: _read(file, asked) for split, file in files.items()}
    if not len(found["train"][0]):
        raise BadInput(f"{files['train']}: no training triple")
    table = pa.concat_tables([split for split, _ in found.values()])
    entities, ends = numbered([table["head"], table["tail"]])
    relations, kinds = numbered([table["relation"]])
    every = np.concatenate([ends[:, :1], kinds, ends[:, 1:]], axis=1)
    lengths = [len(found[split][0]) if split in found else 0 for split in SPLITS]
    train, valid, test = np.split(every, np.cumsum(lengths)[:-1])
    names, file = Names(entities), _file(folder, _TYPES)
    types, kinds_of, further = (None, None, None) if file is None else read_entity_types(file, names)
    notes = tuple(f"{files[split]}: its first line is a header" for split, (_, header) in found.items() if header)
    named = folder.resolve().name, names, Names(relations, "relation")
    return KnowledgeGraph(*named, train, valid, test, kinds_of, types, further, notes=notes)


def _file(folder: Path, name: str) -> Path | None:
    found = [file for ending in _ENDINGS if (file := folder / f"{name}{ending}").is_file()]
    if len(found) > 1:
        raise BadInput(f"{folder} has {' and '.join(file.name for file in found)}; leave one of them")
    return found[0] if found else None


def _read(file: Path, asked: GraphSource) -> tuple["pa.Table", bool]:
    """Names in columns head, relation and tail; whether the first line was a header of a file that may have none."""
    if file.name.endswith(TABLE_ENDINGS):
        table, header = read_table_columns(file, asked.columns, asked.header != "no"), False
    else:
        table, header = without_header(file, read_columns(file), asked.header)
    return table.rename_columns(COLUMNS), header


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
            pairs = [*enumerate(graph.entity_types.tolist())]
            pairs += [] if graph.further_types is None else graph.further_types.tolist()
            with (folder / "entity_types.txt").open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{entities[entity]}\t{graph.types[kind]}\n" for entity, kind in pairs)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error}") from error
