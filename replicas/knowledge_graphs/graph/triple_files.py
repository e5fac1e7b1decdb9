"""Names by id; files of triples: text, CSV and Parquet by name, OGB's NumPy files by id; files of entity types."""

import csv
import difflib
import gzip
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int32, Int64
from elastable.embedding_store.contract.malformed import UNREADABLE
from elastable.embedding_store.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa


# Names of entities or relations, with ids in order of first occurrence


_ALIKE_AMONG = 100_000  # how many names to search for similar ones


class Names(Sequence[str]):
    """Names by id, 0 .. n - 1, and ids by name.

    Args:
        names: Unique names in the order of their ids.
        what: What they name, for errors.

    Raises:
        BadInput: a name is repeated, empty, or contains a tab or line break.
    """

    def __init__(self, names: Iterable[str], what: str = "entity") -> None:
        self._names = list(names)
        self._ids = {name: place for place, name in enumerate(self._names)}
        self.what = what
        if len(self._ids) != len(self._names):
            twice = next(name for place, name in enumerate(self._names) if self._ids[name] != place)
            raise BadInput(f"{what} names: {twice!r} is there twice")
        for name in self._names:
            if not name or any(sign in name for sign in "\t\n\r"):
                raise BadInput(f"{what} names: {name!r} is empty or holds a tab or line break")

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        return self._names[place]

    def __contains__(self, name: object) -> bool:
        return name in self._ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self._names == other._names

    __hash__ = None  # type: ignore[assignment]

    def id_of(self, name: str) -> int:
        """The id of a name. Raises BadInput, with similar names, if there is none."""
        found = self._ids.get(name)
        if found is None:
            alike = difflib.get_close_matches(name, self._names[:_ALIKE_AMONG], n=3)
            hint = f"; alike are {', '.join(map(repr, alike))}" if alike else ""
            raise BadInput(f"no {self.what} {name!r} among {len(self)}{hint}")
        return found

    def ids_of(self, names: Iterable[str]) -> Int64:
        """int64 `[k]`: the ids of names; raises as `id_of`."""
        return np.array([self.id_of(name) for name in names], np.int64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the names, one per line in the order of ids; replaces an existing file."""
        with replaced(path) as file:
            file.writelines(f"{name}\n".encode() for name in self._names)

    @classmethod
    def load(cls, path: str | os.PathLike[str], what: str = "entity") -> "Names":
        """Reads what `save` wrote. Raises BadInput for a missing or malformed file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: not a file of {what} names ({error})") from error
        if text and not text.endswith("\n"):
            raise BadInput(f"{path}: the last of the {what} names is cut off")
        return cls(text.split("\n")[:-1], what)


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write, which replaces that of this path once all of it is on disk."""
    draft = Path(path).with_name(f".{Path(path).name}.new")
    with draft.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def inverse_names(relations: Sequence[str]) -> list[str]:
    """Names of the inverse relations: `NAME (inverse)`, or with more of that where a relation has such a name."""
    ending, known = " (inverse)", set(relations)
    while any(name + ending in known for name in relations):
        ending += " (inverse)"
    return [name + ending for name in relations]


def read_columns(path: str | os.PathLike[str], columns: tuple[str, ...] = ("head", "relation", "tail")) -> "pa.Table":
    """Reads a file of tab-separated names, UTF-8, without a header, quotes or comments; compressed if it ends in `.gz`.

    Blank lines are skipped but counted; a name may contain anything but tabs and line breaks.

    Args:
        columns: What each column is, for errors.

    Returns:
        Strings in each of `columns`, none of them empty.

    Raises:
        BadInput: no such file, or a malformed line, named by file and number.
    """
    import pyarrow as pa

    file = Path(path)
    if not file.is_file():
        raise BadInput(f"{file}: no such file; wanted: {', '.join(columns)}, separated by tabs, one a line")
    try:
        if not any(True for _ in _lines(file)):
            return pa.table({name: pa.array([], pa.string()) for name in columns})
        table = _csv(file, columns, delimiter="\t", quote_char=False)
    except (OSError, EOFError, zlib.error) as error:  # a .gz file that is not one, or is cut off
        raise BadInput(f"{file}: cannot be read ({error})") from error
    except pa.ArrowInvalid as error:
        _refuse_malformed(file, columns)  # finds the line that Arrow could not parse
        raise BadInput(f"{file}: cannot be read ({error})") from error
    if any(True for _ in _empty(table, columns)):
        _refuse_malformed(file, columns)
    return table


def _empty(table: "pa.Table", columns: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """The columns with a row without a name, and its number."""
    import pyarrow.compute as pc

    for name in columns:
        row = pc.index(pc.fill_null(table[name], ""), "").as_py()
        if row >= 0:
            yield name, row


def numbered(columns: Sequence["pa.ChunkedArray"]) -> tuple[list[str], Int32]:
    """The different names of columns in order of first occurrence, row by row, and int32 `[rows, columns]`: which."""
    import pyarrow as pa

    rows, count = len(columns[0]), len(columns)
    every = pa.concat_arrays([column.combine_chunks() for column in columns])
    order = np.arange(rows * count).reshape(count, rows).T.reshape(-1)
    encoded = (every if count == 1 else every.take(pa.array(order))).dictionary_encode()
    return encoded.dictionary.to_pylist(), np.asarray(encoded.indices, np.int32).reshape(rows, count)


_HEADERS = (
    {"head", "h", "head_entity", "subject", "subj", "s", "source", "src", "from", "start", "left", "entity1", "e1"},
    {"relation", "r", "rel", "relation_type", "relationship", "predicate", "pred", "p", "property", "edge",
     "edge_type"},
    {"tail", "t", "tail_entity", "object", "obj", "o", "target", "dst", "to", "end", "right", "entity2", "e2"},
)  # fmt: skip
"""Names of the columns of head, relation and tail by which a header is known."""


def without_header(path: str | os.PathLike[str], table: "pa.Table", header: str = "auto") -> tuple["pa.Table", bool]:
    """The rows of triples without a first line that names the columns, and whether there was one.

    Args:
        path: The file, for errors.
        table: Head, relation and tail, as `read_columns` returned them.
        header: "auto": a first line is a header if its names are those of columns, such as "subject, predicate,
            object", and occur on no other line; "yes": it is one whatever its names; "no": it is a triple.

    Raises:
        BadInput: a header names the columns in another order.
    """
    import pyarrow.compute as pc

    if not len(table) or header == "no":
        return table, False
    names, rest = [column[0].as_py() for column in table.columns], table.slice(1)
    said = [next((k for k, known in enumerate(_HEADERS) if name.strip().lower() in known), -1) for name in names]
    if header == "auto":
        meets = ((0, 0), (1, 1), (2, 2), (0, 2), (2, 0))  # which name is looked for in which column
        if sorted(said) != [0, 1, 2] or any(pc.index(rest[column], names[k]).as_py() >= 0 for k, column in meets):
            return table, False
    if sorted(said) == [0, 1, 2] != said:
        number, _ = next(_lines(Path(path)))
        raise BadInput(f"{path}, line {number}: the columns are {', '.join(names)}; they must be head, relation, tail")
    return rest, True


def line_of(path: str | os.PathLike[str], record: int) -> int:
    """The line (from 1, blank ones counted) of a file's record `record` (from 0)."""
    return next(number for place, (number, _) in enumerate(_lines(Path(path))) if place == record)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers; bytes that are not UTF-8 become surrogates."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line != "\n":
                yield number, line.removesuffix("\n")


def _refuse_malformed(file: Path, columns: tuple[str, ...]) -> None:
    """Raises BadInput for the first malformed line, if any."""
    for number, line in _lines(file):
        if any("\udc80" <= sign <= "\udcff" for sign in line):
            raise BadInput(f"{file}, line {number}: not UTF-8")
        names = line.split("\t")
        if len(names) != len(columns) or not all(names):
            shown = line if len(line) <= 80 else f"{line[:80]}..."
            raise BadInput(
                f"{file}, line {number}: {shown!r} is not {len(columns)} names ({', '.join(columns)}) with a tab "
                f"between them"
            )


TABLE_ENDINGS = (".csv", ".csv.gz", ".parquet")
"""Endings of files with named columns."""


def read_table_columns(file: Path, columns: tuple[str, ...], header: bool = True) -> "pa.Table":
    """Reads columns of names; what is not text becomes text, such as integers.

    Args:
        file: A CSV file (`.csv`, `.csv.gz`), or a Parquet file.
        columns: Names of the columns; others are skipped.
        header: Whether a CSV file's first line names its columns; without, it must have as many as `columns`, in this
            order.

    Raises:
        BadInput: a file that cannot be read, a column that is missing, or a row without a name or with a float that is
            no exact integer; names the row.
    """
    import pyarrow as pa

    if file.suffix == ".parquet" and not header:
        raise BadInput(f"{file}: columns of a Parquet file have names; leave out header=no")
    try:
        table = _parquet(file, columns) if file.suffix == ".parquet" else _csv(file, columns, header)
        _require_columns(file, table.column_names, columns)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{file}: cannot be read ({error})") from error
    for name, row in _empty(table, columns):
        raise BadInput(f"{file}, row {row} (from 0): column {name!r} is empty")
    return table.select(columns)


def _require_columns(file: Path, present: list[str], columns: tuple[str, ...]) -> None:
    for name in columns:
        if present.count(name) != 1:
            raise BadInput(
                f"{file}: no column {name!r} among {', '.join(map(repr, present[:20]))}, or several; name columns as "
                "FOLDER?head=A&relation=B&tail=C"
            )


def _csv(file: Path, columns: tuple[str, ...], header: bool = False, **parse: str | bool) -> "pa.Table":
    """The rows of a text file, in which every one of `columns` is text; `parse`: of pyarrow's `ParseOptions`."""
    import pyarrow as pa
    import pyarrow.csv

    return pyarrow.csv.read_csv(
        file,
        read_options=pyarrow.csv.ReadOptions(column_names=None if header else list(columns)),
        parse_options=pyarrow.csv.ParseOptions(**parse),
        convert_options=pyarrow.csv.ConvertOptions(column_types={name: pa.string() for name in columns}),
    )


def _parquet(file: Path, columns: tuple[str, ...]) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as read:
        _require_columns(file, read.schema_arrow.names, columns)
        table = read.read(columns=list(columns))
    return pa.table({name: _as_text(file, name, table[name]) for name in columns})


def _as_text(file: Path, name: str, values: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """Names as text: of floats, as pandas makes them of integers with nulls, and decimals the integers' digits."""
    import pyarrow as pa

    from elastable.worker.readers.formats.arrow_columns import At, as_type

    if pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
        at = At(name, lambda record: f"{file}, row {record} (from 0)")
        values = pa.chunked_array([as_type(values.combine_chunks(), pa.string(), at)])
    return values.cast(pa.string())


def read_entity_types(file: Path, entities: Names) -> tuple[Names, Int32, Int32]:
    """Reads types of entities; lines of others are skipped.

    Returns:
        The names of types; int32 `[E]`, the first type of each entity; int32 `[K, 2]`, entity and type, further ones.
        Entities without a type have the type "(none)".

    Raises:
        BadInput: a malformed line.
    """
    table = read_columns(file, ("entity", "type"))
    (named, entity), (types, kind) = (numbered([column]) for column in table.columns)
    place = np.array([entities.id_of(name) if name in entities else -1 for name in named], np.int64)[entity]
    pairs = np.concatenate([place, kind], axis=1)[place[:, 0] >= 0]
    pairs = pairs[np.sort(np.unique(pairs, axis=0, return_index=True)[1])]  # each once, in the order of the file
    with_type, first = np.unique(pairs[:, 0], return_index=True)
    found = np.full(len(entities), -1, np.int32)
    found[with_type] = pairs[first, 1]
    if (found < 0).any():  # entities without a type get their own type
        types, found = [*types, "(none)"], np.where(found < 0, len(types), found).astype(np.int32)
    return Names(types, "type"), found, np.delete(pairs, first, axis=0).astype(np.int32)


DAMAGED: tuple[type[Exception], ...] = (
    *UNREADABLE,
    EOFError,  # a file that is cut off
    zlib.error,
    zipfile.BadZipFile,
    csv.Error,
    MemoryError,  # of a shape that no machine could hold
    NotImplementedError,  # a compression that Python does not know
    RuntimeError,  # an archive with a password
    ZeroDivisionError,
)
"""For code that reads arrays of `np.load`, or text of `gzip`, and makes something of them."""


_NAMES_OF_A_TRIPLE, _NAMES_OF_ANY = 100, 1 << 20
_ENDS = ("head", "tail")


def read_ogb(folder: Path) -> tuple[dict[str, Array], Names, Names, Int32 | None, Names | None]:
    """Reads `train.npz`, and `valid.npz` and `test.npz` if they are there.

    Their arrays are those of `LinkPropPredDataset.get_edge_split`: `head`, `relation`, `tail` (int `[N]`), and, where
    ids count within types as in ogbl-biokg, `head_type` and `tail_type` (strings `[N]`). Names come from OGB's folder
    `mapping`, if it is there; otherwise they are ids, and `TYPE:id` with types.

    Returns:
        The triples of each split, int64 `[N, 3]`; names of entities and of relations by id; with types, those of the
        entities, int32 `[E]`, and their names.

    Raises:
        BadInput: a file that is missing or malformed.
    """
    splits, typed = _splits(folder)
    ids, kinds = (
        np.concatenate([arrays[end + more] for arrays in splits.values() for end in _ENDS]) for more in ("", "_type")
    )
    types, kind = np.unique(kinds, return_inverse=True)
    names, entity_types, ids = _entities(folder, ids, kind, types.tolist() if typed else None)
    wanted = 1 + max(int(arrays["relation"].max(initial=-1)) for arrays in splits.values())
    relations = _names_of_ids(
        folder, ("reltype2relid", "relidx2relname"), "relation", "relations", wanted, len(ids) // 2
    )
    lengths = [len(arrays[end]) for arrays in splits.values() for end in _ENDS]
    ends = np.split(ids, np.cumsum(lengths)[:-1])
    triples = {
        split: np.stack([head, arrays["relation"], tail], axis=1)
        for (split, arrays), head, tail in zip(splits.items(), ends[::2], ends[1::2], strict=True)
    }
    known = (entity_types, Names(types.tolist(), "type")) if typed else (None, None)
    return triples, Names(names), Names(relations, "relation"), *known


def _splits(folder: Path) -> tuple[dict[str, dict[str, Array]], bool]:
    """The arrays of each split, and whether ids count within types; if not, every type is ""."""
    splits = {split: _arrays(folder / f"{split}.npz", split == "train") for split in ("train", "valid", "test")}
    if not len(splits["train"]["head"]):
        raise BadInput(f"{folder / 'train.npz'}: no training triple")
    typed = "head_type" in splits["train"]
    for split, arrays in splits.items():
        found = {f"{end}_type" in arrays for end in _ENDS}
        if found != {typed} and (typed or len(arrays["head"])):
            raise BadInput(
                f"{folder / split}.npz: ids count within types in all splits, with head_type and tail_type, or in none"
            )
        if not typed:
            arrays |= {f"{end}_type": np.full(len(arrays[end]), "") for end in _ENDS}
    return splits, typed


def _entities(folder: Path, ids: Array, kind: Array, types: list[str] | None) -> tuple[list[str], Int32, Array]:
    """The names of all entities, type after type, their types, and the ids that count through all of them, by those
    that count within each of `types` (`kind`: which one); None: there are no types."""
    names, first = list[str](), list[int]()
    for place, of_type in enumerate([""] if types is None else types):
        wanted = 1 + int(ids[kind == place].max())
        mapped = "nodeidx2entityid" if types is None else f"{of_type}_entidx2name"
        listed = _names_of_ids(folder, (mapped,), "entity", of_type or "entities", wanted, len(ids) // 2)
        if len(listed) < wanted:
            raise BadInput(
                f"{folder}/mapping has {len(listed)} names of {of_type or 'entities'}; triples have {wanted}"
            )
        first.append(len(names))
        names += listed if types is None else [f"{of_type}:{each}" for each in listed]
    entity_types = np.repeat(np.arange(len(first), dtype=np.int32), np.diff([*first, len(names)]))
    return names, entity_types, ids + np.array(first)[kind]


def _arrays(file: Path, needed: bool) -> dict[str, Array]:
    ids, types = ("head", "relation", "tail"), ("head_type", "tail_type")
    if not file.is_file() and not needed:
        return {**dict.fromkeys(ids, np.empty(0, np.int64)), **dict.fromkeys(types, np.empty(0, str))}
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as saved:
            found = {name: saved[name] for name in (*ids, *types) if name in ids or name in saved}
    except DAMAGED as error:
        raise BadInput(
            f"{file}: not a NumPy file with the arrays head, relation and tail ({error}); write it by "
            'np.savez("train.npz", **dataset.get_edge_split()["train"])'
        ) from error
    lengths = {name: value.shape for name, value in found.items()}
    if len(set(lengths.values())) != 1 or found["head"].ndim != 1:
        raise BadInput(f"{file}: its arrays must be [N], as many as there are triples; they are {lengths}")
    for name, value in found.items():
        if value.dtype.kind not in ("iu" if name in ids else "U"):
            raise BadInput(f"{file}: {name} is of {value.dtype}")
        if name in ids and value.min(initial=0) < 0:
            raise BadInput(f"{file}: {name} has an id below 0")
    return {name: value.astype(np.int64) if name in ids else value for name, value in found.items()}


def _names_of_ids(folder: Path, files: Sequence[str], what: str, those: str, count: int, triples: int) -> list[str]:
    """The names of `count` ids, or of more: from the first of OGB's `files` that is there, a header, then id and name;
    else the ids. Refuses ids so far apart that their names, which nothing lists, would not be worth their memory."""
    file = next((file for name in files if (file := folder / f"mapping/{name}.csv.gz").is_file()), None)
    if file is None:
        if count > _NAMES_OF_A_TRIPLE * triples + _NAMES_OF_ANY:
            raise BadInput(
                f"{folder}: the ids of {those} go up to {count - 1}, in {triples} triples; without OGB's folder "
                "mapping ids must be numbered closely"
            )
        return [str(each) for each in range(count)]
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
            rows = [(int(row[0]), row[1]) for row in list(csv.reader(lines))[1:]]
    except DAMAGED as error:
        raise BadInput(f"{file}: not a mapping of OGB ({error})") from error
    found = dict(rows)
    for place in range(len(rows)):
        if place not in found:
            raise BadInput(
                f"{file}: ids of {len(rows)} {what} names must be 0 .. {len(rows) - 1}, each once; {place} is missing"
            )
    return [found[place] for place in range(len(rows))]
