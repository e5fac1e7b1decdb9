"""Ranks of a trained model in groups and in files; lists of candidates from files; triple classification."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from elastable.embedding_store.contract.arrays import Array, Bools, Float32, Float64, Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation import HITS, QueryRanks, TripleCandidates
from elastable.replicas.knowledge_graphs.graph.batch import SIDES
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import KnowledgeGraph
from elastable.replicas.knowledge_graphs.graph.triple_files import DAMAGED, Names

GROUPINGS = ("relation", "category", "side")
"""What metrics can be broken down by."""


def rank_groups(
    by: str,
    ranks: QueryRanks,
    triples: Int32,
    relations: Names,
    train: Int32,
    hits: Sequence[int] = HITS,
    ties: str = "average",
) -> list[dict[str, object]]:
    """Metrics of each group of queries; groups without queries are left out.

    Args:
        by: One of `GROUPINGS`.
        ranks: Ranks of `triples`.
        triples: int32 `[N, 3]`: what was ranked.
        train: int32 `[M, 3]`: the triples that categories are drawn from; see `relation_categories`.
        hits, ties: As of `QueryRanks.metrics`.

    Returns:
        For each group its "name": relation, category ("1-N: one head has many tails") or side; its number of "queries";
        its "metrics", as `QueryRanks.metrics`.

    Raises:
        BadInput: an unknown grouping.
    """
    if by not in GROUPINGS:
        raise BadInput(f"metrics by {by!r}: known are {', '.join(GROUPINGS)}")
    relation = triples[ranks.triple, 1]
    parts: list[tuple[str, Bools]]
    if by == "side":
        parts = [(side, ranks.side == place) for place, side in enumerate(SIDES)]
    elif by == "category":
        category = relation_categories(train, len(relations))[relation]
        parts = [(name, category == place) for place, name in enumerate(CATEGORIES)]
        parts.append(("not trained", category == -1))
    else:
        parts = [(relations[each], relation == each) for each in np.unique(relation).tolist()]
    return [
        {"name": name, "queries": int(which.sum()), "metrics": ranks.part(which).metrics(hits, ties)}
        for name, which in parts
        if which.any()
    ]


def save_ranks(
    path: str | os.PathLike[str],
    ranks: QueryRanks,
    triples: Int32,
    scores: tuple[Float32, Float32],
    entities: Names,
    relations: Names,
    about: dict[str, str],
) -> None:
    """Writes a row per query as Parquet; replaces an existing file.

    Columns: head, relation, tail (string), side (string: the queried end), rank (double: the mean of the next two),
    optimistic, pessimistic (int64), score (float: of the triple).

    Args:
        ranks: Ranks of `triples`.
        triples: int32 `[N, 3]`.
        scores: float32 `[N]`, of the triples as head and as tail queries.
        entities, relations: Names by id.
        about: Metadata of the file.

    Raises:
        BadInput: the file cannot be written.
    """
    ids = triples[ranks.triple]
    columns = {
        "head": _named(entities, ids[:, 0]),
        "relation": _named(relations, ids[:, 1]),
        "tail": _named(entities, ids[:, 2]),
        "side": _named(SIDES, ranks.side),
        "rank": pa.array(ranks.ranks.average),
        "optimistic": pa.array(ranks.ranks.optimistic),
        "pessimistic": pa.array(ranks.ranks.pessimistic),
        "score": pa.array(np.where(ranks.side == 0, scores[0][ranks.triple], scores[1][ranks.triple])),
    }
    write_table(path, pa.table(columns).replace_schema_metadata(about))


def write_table(path: str | os.PathLike[str], table: pa.Table) -> None:
    """Writes a Parquet file, which replaces an existing one once it is whole. Raises BadInput if it cannot be."""
    draft = Path(path).with_name(f".{Path(path).name}.new")
    try:
        pyarrow.parquet.write_table(table, draft)
        draft.replace(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}") from error


def _named(names: Sequence[str], ids: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> pa.Array:
    """Strings, stored once each."""
    present, codes = np.unique(ids, return_inverse=True)
    dictionary = pa.array([names[each] for each in present.tolist()], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), dictionary)


CATEGORIES = ("1-1", "1-N", "N-1", "N-N")
"""Heads of a tail, then tails of a head: in "1-N" one head has many tails."""

_MANY = 1.5


def relation_categories(triples: npt.ArrayLike, relations: int) -> Int32:
    """The category of every relation, as Bordes et al. (2013) draw the line.

    A side counts as "N" if the average number of its entities, over the distinct pairs of relation and other end, is
    at least 1.5.

    Args:
        triples: int `[N, 3]`, usually those of training; repeated ones count once.
        relations: Number of relations, R.

    Returns:
        int32 `[R]`: index in `CATEGORIES`; -1 for a relation without triples.
    """
    unique = np.unique(np.asarray(triples).reshape(-1, 3), axis=0).astype(np.int64)
    count = np.bincount(unique[:, 1], minlength=relations)
    many = []
    for end in (2, 0):  # heads of a tail, tails of a head
        pairs = np.unique(unique[:, [1, end]], axis=0)
        distinct = np.bincount(pairs[:, 0], minlength=relations)
        many.append(count >= _MANY * np.maximum(distinct, 1))
    found = 2 * many[0] + many[1]
    return np.where(count > 0, found, -1).astype(np.int32)


_ENDS = ("head", "tail")


def read_triple_candidates(file: Path, graph: KnowledgeGraph) -> TripleCandidates:
    """Reads the candidates of a split's triples, in their order.

    Args:
        file: `.npz` with OGB's arrays `head_neg` and `tail_neg`, int `[N, k]`; with `head_type` and `tail_type`, as of
            ogbl-biokg, ids count within the type. Or `.parquet` with columns `head_candidates` and `tail_candidates`,
            a list of names for each triple.

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


# Triple classification: a threshold of each relation, chosen on validation triples, tells true triples from false


def classification_metrics(predicted: Bools, labels: Bools) -> dict[str, float]:
    """How well predictions agree with labels, bool `[N]` each; precision, recall and F1 are of the true triples.

    Returns:
        "accuracy", "precision", "recall" and "f1", in 0 .. 1, and 0 where nothing can be divided; "triples", N.

    Raises:
        BadInput: there are no triples.
    """
    if not len(labels):
        raise BadInput("there are no triples to classify")
    both = float((predicted & labels).sum())
    precision = both / max(1.0, float(predicted.sum()))
    recall = both / max(1.0, float(labels.sum()))
    f1 = 2 * precision * recall / (precision + recall) if both else 0.0
    accuracy = float((predicted == labels).mean())
    return {"accuracy": accuracy, "precision": precision, "recall": recall, "f1": f1, "triples": len(labels)}


def choose_thresholds(relation: npt.NDArray[np.integer], scores: Float32, labels: Bools, relations: int) -> Float64:
    """The scores from which on triples count as true, with the best accuracy on validation triples.

    Args:
        relation: int `[N]`.
        scores: float32 `[N]`.
        labels: bool `[N]`: True for true triples.
        relations: Number of relations, R.

    Returns:
        float64 `[R]`; relations without validation triples have the threshold chosen over all relations together.

    Raises:
        BadInput: there are no triples.
    """
    if not len(scores):
        raise BadInput("thresholds need validation triples, true and false ones; there are none")
    found = np.full(relations, best_threshold(scores, labels), np.float64)
    for each in np.unique(relation):
        mine = relation == each
        found[each] = best_threshold(scores[mine], labels[mine])
    return found


def best_threshold(scores: Float32, labels: Bools) -> float:
    """The threshold with the best accuracy, halfway between two scores (-inf or inf: everything is true, or false).

    Of several, the highest.

    Args:
        scores: float32 `[N]`, N above 0.
        labels: bool `[N]`.
    """
    order = np.argsort(-scores, kind="stable")
    descending, true = scores[order].astype(np.float64), labels[order]
    # Right predictions if the first k count as true.
    right = np.concatenate([[0], np.cumsum(true)]) + np.concatenate([np.cumsum((~true)[::-1])[::-1], [0]])
    cut = np.concatenate([[True], descending[1:] != descending[:-1], [True]])  # not between equal scores
    best = int(np.argmax(np.where(cut, right, -1)))
    if best == 0:
        return float(np.inf)
    return float(-np.inf) if best == len(scores) else float((descending[best - 1] + descending[best]) / 2)
