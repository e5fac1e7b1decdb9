"""Ranks of true answers among candidates, and their metrics: in groups and in files; triple classification."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from elastable.embedding_store.contract.arrays import Bools, Float32, Float64, Int32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph.batch import SIDES
from elastable.replicas.knowledge_graphs.graph.triple_files import Names, replaced

TIES = ("average", "optimistic", "pessimistic")
"""How to rank an answer among candidates with the same score."""


ExactScores = Callable[[Int64, Int64], Float64]
"""`exact(query, column)`, int64 `[P]` each: float64 `[P]`."""

_PAIRS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Ranks:
    """The rank of each query's answer, from 1, depending on how ties are broken.

    Attributes:
        optimistic: int64 `[q]`: the answer before all candidates with the same score.
        pessimistic: int64 `[q]`: the answer after all of them.
    """

    optimistic: Int64
    pessimistic: Int64

    @property
    def average(self) -> Float64:
        """float64 `[q]`: the mean of the two, the expected rank in random order."""
        return (self.optimistic + self.pessimistic) / 2


class RankCounts:
    """Counts the candidates of each query that score higher than its answer, or the same.

    Counts of windows and shards add up: `greater` and `equal` may be summed
    over a replica group. Memory is two numbers per query, and the near candidates of a window.

    Args:
        true_scores: float64 `[q]`: scores of the queries' answers, in double precision.
        tolerance: float64 `[q]`, not negative: candidates whose scores come this close to the answer's are compared by
            their exact scores (`Comparison.rounding`).

    Attributes:
        greater: int64 `[q]`: candidates with a higher score so far. NaN counts as higher, and so does every candidate
            of an answer with NaN: a diverged model does not rank first.
        equal: int64 `[q]`: candidates with the same score so far.
    """

    def __init__(self, true_scores: Float64, tolerance: Float64) -> None:
        self._exact, near = np.ascontiguousarray(true_scores), np.ascontiguousarray(tolerance)
        if self._exact.ndim != 1:
            raise BadInput(f"true scores must be [q], one a query; got {list(self._exact.shape)}")
        if near.shape != self._exact.shape or (near < 0).any():
            raise BadInput(f"a tolerance must be [{len(self._exact)}], none below 0; got {list(near.shape)}")
        self._true = np.stack([self._exact - near, self._exact + near]).astype(np.float32)
        self.greater = np.zeros(len(near), np.int64)
        self.equal = np.zeros(len(near), np.int64)

    def add(self, scores: npt.NDArray[np.floating], counted: Bools, exact: ExactScores) -> None:
        """Counts the candidates of one window.

        Args:
            scores: float `[q, c]`, of each query with each candidate.
            counted: bool `[q, c]`: False for candidates that do not count, such as the answers themselves.
            exact: Scores of pairs of this window in double precision.

        Raises:
            BadInput: shapes that do not fit.
        """
        given: Float32 = np.ascontiguousarray(scores, np.float32)
        if given.ndim != 2 or len(given) != len(self.equal) or counted.shape != given.shape:
            raise BadInput(
                f"scores and what counts must be [{len(self.equal)}, c], a row for each query; got "
                f"{list(given.shape)} and {list(counted.shape)}"
            )
        near = np.zeros(len(given), np.int64)
        _count(given, self._true, counted, self.greater, near)
        queries = np.flatnonzero(near)
        parts = np.cumsum(near[queries]) // _PAIRS_AT_ONCE  # decided some queries at a time: memory is bounded
        for part in np.unique(parts):
            some = queries[parts == part]
            low, high = self._true[:, some, None]
            pairs = np.flatnonzero((given[some] >= low) & (given[some] <= high) & counted[some])
            query, column = some[pairs // given.shape[1]], pairs % given.shape[1]
            found, true = exact(query, column), self._exact[query]
            np.add.at(self.greater, query, ~(found <= true))
            np.add.at(self.equal, query, found == true)


@kernel
def _count(scores: Float32, true: Float32, counted: Bools, greater: Int64, near: Int64) -> None:
    """`true`: float32 `[2, q]`, the lowest and highest score near the answer's."""
    for q in range(scores.shape[0]):
        low, high = true[0, q], true[1, q]
        less, same, total = 0, 0, 0
        for c in range(scores.shape[1]):
            total += counted[q, c]
            less += counted[q, c] & (scores[q, c] < low)
            same += counted[q, c] & (scores[q, c] >= low) & (scores[q, c] <= high)
        greater[q] += total - less - same
        near[q] += same


HITS = (1, 3, 10)
"""The k of each Hits@k that is reported by default."""


@dataclass(frozen=True)
class QueryRanks:
    """The ranks of the answers of Q queries: head queries first, each side in the order of the triples.

    Attributes:
        triple: int64 `[Q]`: the query's triple, a position in the array that was ranked.
        side: int64 `[Q]`: the queried end, an index of `graph.batch.SIDES` (0: head, 1: tail).
        ranks: Their ranks, `[Q]`.
    """

    triple: Int64
    side: Int64
    ranks: Ranks

    def __len__(self) -> int:
        return len(self.triple)

    def part(self, which: Bools) -> "QueryRanks":
        """The queries that `which` (bool `[Q]`) selects."""
        ranks = Ranks(self.ranks.optimistic[which], self.ranks.pessimistic[which])
        return QueryRanks(self.triple[which], self.side[which], ranks)

    def metrics(self, hits: Sequence[int] = HITS, ties: str = "average") -> dict[str, float]:
        """The metrics of each side with queries ("tail_mrr", "tail_mean_rank", "tail_hits@10", ...).

        Names without a side ("mrr", ...) are the averages over the sides.

        Args:
            hits: The k of each Hits@k.
            ties: One of `TIES`.

        Raises:
            BadInput: a k below 1, unknown ties, or no query.
        """
        if ties not in TIES:
            raise BadInput(f"ranks {ties!r}: known are {', '.join(TIES)}")
        if not all(k >= 1 for k in hits):
            raise BadInput(f"hits at {list(hits)}: k counts from 1")
        if not len(self):
            raise BadInput("ranking metrics of no queries at all")
        rank = np.asarray(getattr(self.ranks, ties), np.float64)
        values = np.stack([1 / rank, rank, *(rank <= k for k in hits)])
        names = ["mrr", "mean_rank", *(f"hits@{k}" for k in hits)]
        parts = [(side, self.side == place) for place, side in enumerate(SIDES)]
        means = {side: values[:, mine].mean(axis=1) for side, mine in parts if mine.any()}
        found = dict(zip(names, np.mean(list(means.values()), axis=0).tolist(), strict=True))
        for side, of_side in means.items():
            found |= {f"{side}_{name}": value for name, value in zip(names, of_side.tolist(), strict=True)}
        return found


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
    try:
        with replaced(path) as file:
            pyarrow.parquet.write_table(pa.table(columns).replace_schema_metadata(about), file)
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
