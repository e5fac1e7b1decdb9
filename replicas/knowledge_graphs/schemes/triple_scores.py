"""A worker's own triples: queries for an end, scores, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Int64
from elastable.replicas.knowledge_graphs.graph import Corruption, Side
from elastable.replicas.knowledge_graphs.schemes.dropout import QueryMasks
from elastable.replicas.knowledge_graphs.scores import ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels import add_rows

__all__ = ["Asked", "TripleScores", "asked_sides", "counted"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker's triples whose candidates replace the same end.

    Attributes:
        side: The queried end.
        triples: int64 `[q]`: indices of the worker's triples.
        place: Index of the side among shared candidates: 1 for tails in corruption "ht", else 0.
    """

    side: Side
    triples: Int64
    place: int


def asked_sides(corruption: Corruption, blocks: int, each: int) -> tuple[Asked, ...]:
    """The queried ends of `blocks` blocks of `each` triples; see `graph.batch`."""
    order = np.arange(blocks * each)
    if corruption == "h":
        return (Asked("head", order, 0),)
    if corruption == "t":
        return (Asked("tail", order, 0),)
    grid = order.reshape(blocks, each)
    half = each // 2
    return Asked("head", grid[:, :half].reshape(-1), 0), Asked("tail", grid[:, half:].reshape(-1), 1)


def counted(mask: Bools | None, triples: int) -> Bools | None:
    """A mask of candidates `[triples or 1, ...]` as bool `[triples, c]`; None stays None."""
    if mask is None:
        return None
    return np.ascontiguousarray(np.broadcast_to(mask, (triples, *mask.shape[1:])).reshape(triples, -1))


class TripleScores:
    """Scores of triples with given embeddings, through the queries that also score their candidates.

    Args:
        score: The score function.
        asked: The queried ends; each triple once.
        heads: float32 `[b, entity_width]`.
        relation: int `[b]`.
        tails: float32 `[b, entity_width]`.
        relations: float32 `[R, relation_width]`.
        masks: Makes what the values of a side's queries are multiplied by (`Dropout.masks`); None: nothing.

    Attributes:
        queries: For each of `asked`, float32 `[q, query_width]`.
        scores: float32 `[b]`: scores of the triples.
    """

    def __init__(
        self,
        score: ScoreFunction,
        asked: tuple[Asked, ...],
        heads: Float32,
        relation: Int64,
        tails: Float32,
        relations: Float32,
        masks: Callable[[Side, Float32, Float32], QueryMasks] | None = None,
    ) -> None:
        self.asked = asked
        self._masks: list[QueryMasks | None] = []
        self._score, self._relation, self._relations = score, relation, relations
        self._raw = {"head": heads, "tail": tails}
        self._ready = {"head": score.prepared(heads), "tail": score.prepared(tails)}
        self.queries: list[Float32] = []
        self.scores = np.empty(len(heads), np.float32)
        for part in asked:
            score.require_side(part.side)
            given, related = self._ready[_other(part.side)][part.triples], relations[relation[part.triples]]
            self._masks.append(None if masks is None else masks(part.side, given, related))
            query = score.query(*_masked(given, related, self._masks[-1]), part.side)
            self.queries.append(query)
            self.scores[part.triples] = self._compare(part, query)

    def _compare(self, part: Asked, query: Float32) -> Float32:
        answers = self._ready[part.side][part.triples]
        return self._score.comparison.scores(query, answers, np.arange(len(query))[:, None])[:, 0]

    def gradients(
        self, positive: Float32, to_queries: list[Float32]
    ) -> tuple[Float32, Float32, Float32, dict[str, Float32]]:
        """Gradients of heads and tails `[b, entity_width]`, of all relations, and of further variables.

        Args:
            positive: float32 `[b]`: gradients of the triples' scores.
            to_queries: For each of `asked`, the queries' gradients from their candidates.
        """
        found = {side: np.zeros_like(rows) for side, rows in self._raw.items()}
        to_relations = np.zeros_like(self._relations)
        dense: dict[str, Float32] = {}
        for part, query, more, masks in zip(self.asked, self.queries, to_queries, self._masks, strict=True):
            own = np.arange(len(query))[:, None]
            answers = self._ready[part.side][part.triples]
            to_answers = np.zeros_like(answers)
            to_query = more + self._score.comparison.gradients(
                query,
                answers,
                own,
                self.scores[part.triples][:, None],
                positive[part.triples][:, None],
                own,
                to_answers,
            )
            given, relation = self._ready[_other(part.side)][part.triples], self._relation[part.triples]
            used = _masked(given, self._relations[relation], masks)
            to_given, to_relation, to_dense = self._score.all_gradients(*used, part.side, to_query)
            to_given, to_relation = _masked(to_given, to_relation, masks)
            add_rows(to_relations, relation, np.ascontiguousarray(to_relation))
            found[part.side][part.triples] += to_answers
            found[_other(part.side)][part.triples] += to_given
            for name, gradient in to_dense.items():
                dense[name] = dense[name] + gradient if name in dense else gradient
        heads, tails = (self._score.unprepared(self._raw[side], found[side]) for side in ("head", "tail"))
        return heads, tails, to_relations, dense


def _masked(given: Float32, relation: Float32, masks: QueryMasks | None) -> tuple[Float32, Float32]:
    return (given, relation) if masks is None else (given * masks.given, relation * masks.relation)


def _other(side: Side) -> Side:
    return "head" if side == "tail" else "tail"
