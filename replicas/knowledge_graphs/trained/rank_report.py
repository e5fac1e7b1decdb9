"""Metrics of ranks by relation, category or side, and ranks as a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from elastable.embedding_store.contract.arrays import Bools, Float32, Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation.query_ranks import HITS, QueryRanks
from elastable.replicas.knowledge_graphs.graph import SIDES, Names
from elastable.replicas.knowledge_graphs.trained.relation_categories import CATEGORIES, relation_categories

__all__ = ["GROUPINGS", "RankGroup", "rank_groups", "save_ranks"]

GROUPINGS = ("relation", "category", "side")
"""What metrics can be broken down by."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Metrics of some of the queries.

    Attributes:
        name: Relation, category ("1-N: one head has many tails") or side.
        queries: Their number.
        metrics: As `QueryRanks.metrics`.
    """

    name: str
    queries: int
    metrics: dict[str, float]


def rank_groups(
    by: str,
    ranks: QueryRanks,
    triples: Int32,
    relations: Names,
    train: Int32,
    hits: Sequence[int] = HITS,
    ties: str = "average",
) -> list[RankGroup]:
    """Metrics of each group of queries; groups without queries are left out.

    Args:
        by: One of `GROUPINGS`.
        ranks: Ranks of `triples`.
        triples: int32 `[N, 3]`: what was ranked.
        relations: Names of relations.
        train: int32 `[M, 3]`: the triples that categories are drawn from; see `relation_categories`.
        hits, ties: As of `QueryRanks.metrics`.

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
        RankGroup(name, int(which.sum()), ranks.part(which).metrics(hits, ties)) for name, which in parts if which.any()
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
        path: The file.
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
    table = pa.table(columns).replace_schema_metadata(about)
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
