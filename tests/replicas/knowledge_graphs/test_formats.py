"""One graph in the files of other programs, each read as the graph that it is."""

import csv
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import GraphSource, load_graph, save_graph
from tests.replicas.knowledge_graphs.graphs import named

ENTITIES = [f'entity {k}, or "so"' if k == 3 else f"e{k}" for k in range(12)]
RELATIONS = ["near", "part of", "42"]
DRAW = np.random.default_rng(8)
TRIPLES = {
    split: DRAW.integers(0, [12, 3, 12], (count, 3)) for split, count in (("train", 40), ("valid", 6), ("test", 7))
}
Named = list[tuple[str, str, str]]


def _named(split: str) -> Named:
    return [(ENTITIES[h], RELATIONS[r], ENTITIES[t]) for h, r, t in TRIPLES[split].tolist()]


def _gz(file: Path, rows: list[list[object]], delimiter: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", newline="") as lines:
        csv.writer(lines, delimiter=delimiter, lineterminator="\n").writerows(rows)


def _ogb(home: Path) -> str:
    for split, triples in TRIPLES.items():
        h, r, t = triples.T
        extra = {} if split == "train" else {"head_neg": np.zeros((len(h), 5), np.int64)}
        np.savez(home / f"{split}.npz", head=h, relation=r, tail=t, **extra)  # type: ignore[arg-type]
    _gz(home / "mapping/nodeidx2entityid.csv.gz", [["node idx", "entity id"], *enumerate(ENTITIES)], ",")  # type: ignore[list-item]
    _gz(home / "mapping/reltype2relid.csv.gz", [["rel type", "rel id"], *enumerate(RELATIONS)], ",")  # type: ignore[list-item]
    return f"ogb:{home}"


def _tables(ending: str) -> Callable[[Path], str]:
    def write(home: Path) -> str:
        for split in TRIPLES:
            rows = _named(split)
            if ending == ".parquet":
                columns = list(zip(*rows, strict=True))
                numbers = pa.array([RELATIONS.index(each) for each in columns[1]])
                named = {
                    "weight": pa.array([0.5] * len(rows)),
                    "object": columns[2],
                    "n": numbers,
                    "subject": columns[0],
                }
                pyarrow.parquet.write_table(pa.table({**named, "predicate": columns[1]}), home / f"{split}.parquet")
                continue
            opened = gzip.open if ending.endswith(".gz") else open
            with opened(home / f"{split}{ending}", "wt", newline="") as lines:
                writer = csv.writer(lines)
                writer.writerow(["subject", "weight", "object", "predicate"])
                writer.writerows([head, 0.5, tail, relation] for head, relation, tail in rows)
        return f"{home}?head=subject&relation=predicate&tail=object"

    return write


def _text(home: Path) -> str:
    for split in TRIPLES:
        with gzip.open(home / f"{split}.txt.gz", "wt") as lines:
            lines.writelines("\t".join(triple) + "\n" for triple in _named(split))
    return str(home)


FORMATS = {
    "ogb": _ogb,
    "csv": _tables(".csv"),
    "csv.gz": _tables(".csv.gz"),
    "parquet": _tables(".parquet"),
    "txt.gz": _text,
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_graph(name: str, tmp_path: Path) -> None:
    source = FORMATS[name](tmp_path)
    graph = load_graph(source)
    for split in TRIPLES:
        assert named(graph, split) == _named(split)
    if name == "ogb":  # ids are those of the files
        assert list(graph.entities) == ENTITIES
        np.testing.assert_array_equal(graph.test, TRIPLES["test"])
    again = GraphSource.parse(str(GraphSource.parse(source).absolute()))
    assert named(load_graph(str(again)), "train") == _named("train")


def test_types_of_ogb_have_ids_of_their_own(tmp_path: Path) -> None:
    kinds = np.array(["drug", "disease"])
    for split, triples in TRIPLES.items():
        h, r, t = triples.T
        np.savez(tmp_path / f"{split}.npz", head=h, relation=r, tail=t, head_type=kinds[h % 2], tail_type=kinds[t % 2])
    graph = load_graph(f"ogb:{tmp_path}")
    for split, triples in TRIPLES.items():
        assert named(graph, split) == [
            (f"{kinds[h % 2]}:{h}", str(r), f"{kinds[t % 2]}:{t}") for h, r, t in triples.tolist()
        ]
    assert graph.types is not None
    assert graph.entity_types is not None
    assert all(
        graph.types[kind] == name.split(":")[0] for kind, name in zip(graph.entity_types, graph.entities, strict=True)
    )
    assert list(graph.types) == ["disease", "drug"]


def test_unseen_names_of_files_of_ids(tmp_path: Path) -> None:
    _ogb(tmp_path)
    for split, (head, relation, tail) in {
        "train": ([0, 1], [0, 1], [1, 2]),
        "test": ([0, 0, 3], [0, 2, 0], [2, 2, 1]),
    }.items():
        np.savez(tmp_path / f"{split}.npz", head=head, relation=relation, tail=tail)
    graph = load_graph(f"ogb:{tmp_path}")
    assert graph.unseen["test"] == 2
    assert len(load_graph(f"ogb:{tmp_path}", unseen="drop").test) == 1
    with pytest.raises(BadInput, match=r"valid triple \d+ \(from 0\): no training triple has"):
        load_graph(f"ogb:{tmp_path}", unseen="refuse")


def test_a_graph_is_written_and_read_again(tmp_path: Path) -> None:
    save_graph(load_graph(_text(tmp_path)), tmp_path / "text")
    graph = load_graph(tmp_path / "text")
    assert all(named(graph, split) == _named(split) for split in TRIPLES)
    with pytest.raises(BadInput, match="exists"):
        save_graph(graph, tmp_path / "text")


def test_malformed_files_of_ogb(tmp_path: Path) -> None:
    (tmp_path / "ogb").mkdir()
    _ogb(tmp_path / "ogb")
    good = dict(np.load(tmp_path / "ogb/test.npz"))
    for broken, message in (
        ({**good, "head": good["head"][:-1]}, "as many as there are triples"),
        ({**good, "head": good["head"] * 0.5}, "head is of float64"),
        ({**good, "tail": good["tail"] - 5}, "below 0"),
        ({**good, "tail": good["tail"] + (1 << 40)}, "12 names of entities; triples have"),
        ({"head": good["head"]}, "get_edge_split"),
        ({**good, "head": np.array([object()] * len(good["head"]))}, "get_edge_split"),  # a pickle is never read
    ):
        np.savez(tmp_path / "ogb/test.npz", **broken)
        with pytest.raises(BadInput, match=message):
            load_graph(f"ogb:{tmp_path / 'ogb'}")
    (tmp_path / "ogb/test.npz").write_bytes(b"PK\x03\x04cut off")
    with pytest.raises(BadInput, match="not a NumPy file"):
        load_graph(f"ogb:{tmp_path / 'ogb'}")


def test_malformed_tables_and_sources(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("head,relation,tail\na,r,b\nb,,c\n")
    with pytest.raises(BadInput, match=r"row 1 \(from 0\): column 'relation' is empty"):
        load_graph(tmp_path)
    with pytest.raises(BadInput, match="no column 'subject' among 'head', 'relation', 'tail'"):
        load_graph(f"{tmp_path}?head=subject")
    for query in ("?heads=x", "?head=", "?x"):
        with pytest.raises(BadInput, match="name columns as"):
            load_graph(f"{tmp_path}{query}")
    with pytest.raises(BadInput, match="no columns to name"):
        load_graph("ogb:somewhere?head=x")
    (tmp_path / "train.csv").unlink()
    (tmp_path / "train.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(BadInput, match="cannot be read"):
        load_graph(tmp_path)
    (tmp_path / "train.txt.gz").unlink()
    (tmp_path / "train.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(BadInput, match="cannot be read"):
        load_graph(tmp_path)


def test_names_in_columns_of_floats_are_integers(tmp_path: Path) -> None:
    def write(heads: Sequence[float | None]) -> None:
        count = len(heads)
        table = pa.table({"head": heads, "relation": ["r"] * count, "tail": np.arange(count) + 10**10})
        pyarrow.parquet.write_table(table, tmp_path / "train.parquet")

    write([1e10, 16_777_217.0])
    graph = load_graph(tmp_path)
    assert named(graph, "train") == [("10000000000", "r", "10000000000"), ("16777217", "r", "10000000001")]
    for heads, message in (
        ([1.0, 1.5], r"train\.parquet, row 1 \(from 0\): column 'head': 1\.5"),
        ([1.0, 2.0**53], "row 1 .* column 'head'"),
        ([1.0, None], "row 1 .* column 'head' is empty"),
    ):
        write(heads)
        with pytest.raises(BadInput, match=message):
            load_graph(tmp_path)


def test_damaged_or_made_up_files_are_refused(tmp_path: Path) -> None:
    """Whatever zlib, NumPy and Python would raise: digits without end, splits that do not fit, ids without bound."""
    digits = "9" * 5000
    (tmp_path / "ogb/mapping").mkdir(parents=True)
    ids = {"head": np.array([0, 1]), "relation": np.array([0, 0]), "tail": np.array([1, 2])}
    typed = {**ids, "head_type": np.array(["x", "y"]), "tail_type": np.array(["x", "y"])}
    nothing = {name: value[:0] for name, value in ids.items()}
    for train, valid, message in (
        (nothing, ids, "no training triple"),
        (typed, ids, r"valid\.npz: ids count within types in all splits"),
        (ids, typed, r"valid\.npz: ids count within types in all splits"),
        ({**ids, "head_type": typed["head_type"]}, ids, r"train\.npz: ids count within types in all splits"),
        ({**ids, "tail": np.array([1, 2**40])}, ids, f"ids of entities go up to {2**40}, in 4 triples"),
        (ids, {**ids, "relation": np.array([0, 2**62])}, f"ids of relations go up to {2**62}, in 4 triples"),
    ):
        np.savez(tmp_path / "ogb/train.npz", **train)  # type: ignore[arg-type]
        np.savez(tmp_path / "ogb/valid.npz", **valid)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=message):
            load_graph(f"ogb:{tmp_path / 'ogb'}")

    def torn(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[60:90] = b"\xff" * 30
        file.write_bytes(content)

    long = np.arange(3000)
    np.savez_compressed(tmp_path / "ogb/train.npz", head=long, relation=long, tail=long)
    torn(tmp_path / "ogb/train.npz")
    with pytest.raises(BadInput, match="not a NumPy file"):
        load_graph(f"ogb:{tmp_path / 'ogb'}")
    for split in ("train", "valid"):
        np.savez(tmp_path / f"ogb/{split}.npz", head=ids["head"], relation=ids["relation"], tail=ids["tail"])
    mapping = tmp_path / "ogb/mapping/nodeidx2entityid.csv.gz"
    _gz(mapping, [["id", "name"], [digits, "a"]], ",")
    with pytest.raises(BadInput, match="not a mapping of OGB"):
        load_graph(f"ogb:{tmp_path / 'ogb'}")
    _gz(mapping, [["id", "name"], *([place, f"n{place}"] for place in range(500))], ",")
    torn(mapping)
    with pytest.raises(BadInput, match="not a mapping of OGB"):
        load_graph(f"ogb:{tmp_path / 'ogb'}")
