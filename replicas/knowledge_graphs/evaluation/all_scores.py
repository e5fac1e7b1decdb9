"""Scores queries against all entities of all shards, in windows of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.evaluation.ranking import RankCounts, Ranks
from elastable.replicas.knowledge_graphs.graph.batch import Queries
from elastable.replicas.knowledge_graphs.graph.known_triples import KnownTriples
from elastable.replicas.knowledge_graphs.model import ShardedModel

__all__ = ["AllScores", "TopAnswers"]

_WINDOW_VALUES = 1 << 22  # scores held at once: 16 MiB


@dataclass(frozen=True, slots=True)
class TopAnswers:
    """The best answers to each query, best first: global ids int64 `[q, k]` and scores float32 `[q, k]`."""

    entities: Int64
    scores: Float32


class AllScores:
    """Everyone's queries against all entities: queries are gathered, scored on each shard, and small results returned.

    Every member of the group calls the same methods with its own part of the
    same batch of queries (`elastable.replicas.knowledge_graphs.sampling.queries`).

    Args:
        model: This worker's part of the model.
        window_values: Most scores in memory at once (at least one column per query).
        pool: Threads to compute with; they do not affect results.
    """

    def __init__(self, model: ShardedModel, window_values: int = _WINDOW_VALUES, pool: RangePool = SERIAL) -> None:
        if window_values < 1:
            raise BadInput(f"a window holds at least 1 score, got {window_values}")
        self.model, self.group, self.pool = model, model.group, pool
        self._window_values = window_values

    def ranks(self, queries: Queries, known: KnownTriples | None = None) -> Ranks:
        """Ranks of this worker's answers among all entities.

        Args:
            queries: This worker's part, with answers.
            known: Known answers, which do not compete; None: they do (raw ranks).
        """
        size = len(queries.row)
        flat, given, relation, answer = self._everyones(queries)
        counts = RankCounts(*self._true_scores(flat, answer))
        shards = self.model.sharding.shards
        if known is None:
            known = KnownTriples.create(self.model.sharding.entities, len(self.model.relations))
        left_out = known.exclusions(queries.side, given, relation, answer, self.model.sharding)
        for first, scores in self._windows(flat):
            without = left_out.window(self.group.rank, first, first + scores.shape[1])
            counts.add(scores, without=without)
        totals = self.group.reduce_scatter(np.stack([counts.greater, counts.equal], axis=1).reshape(shards, size, 2))
        return Ranks(1 + totals[:, 0], 1 + totals[:, 0] + totals[:, 1])

    def top(self, queries: Queries, k: int, known: KnownTriples | None = None) -> TopAnswers:
        """The best answers to this worker's queries; ties go to the lower global id.

        Args:
            queries: This worker's part; its answers are ignored.
            k: Number of answers.
            known: Known answers to leave out; None: none.

        Raises:
            BadInput: k below 1 or above the number of entities.
        """
        sharding, rank = self.model.sharding, self.group.rank
        if not 1 <= k <= sharding.entities:
            raise BadInput(f"the best {k} answers of {sharding.entities} entities: ask for 1 to {sharding.entities}")
        flat, given, relation, _ = self._everyones(queries)
        nobody = np.full(len(given), -1, np.int64)
        left_out = None if known is None else known.exclusions(queries.side, given, relation, nobody, sharding)
        best = np.full((len(flat), k), -1, np.int64)
        scores = np.full((len(flat), k), -np.inf, np.float32)
        for first, window in self._windows(flat):
            if left_out is not None:
                window[left_out.window(rank, first, first + window.shape[1])] = -np.inf
            ids = np.broadcast_to(sharding.entity_at[rank, first : first + window.shape[1]], window.shape)
            best, scores = _best(np.concatenate([best, ids], axis=1), np.concatenate([scores, window], axis=1), k)
        shape = (self.group.size, len(queries.row), k)
        all_ids = self.group.all_to_all(best.reshape(shape)).transpose(1, 0, 2).reshape(shape[1], -1)
        all_scores = self.group.all_to_all(scores.reshape(shape)).transpose(1, 0, 2).reshape(shape[1], -1)
        return TopAnswers(*_best(all_ids, all_scores, k))

    def _everyones(self, queries: Queries) -> tuple[Float32, Int64, Int64, Int64]:
        """Everyone's queries `[n * q, query_width]`, with given entities, relations and answers by global id."""
        model, score = self.model, self.model.score
        score.require_side(queries.side)
        given = score.prepared(model.entities[queries.row])
        mine = score.query(given, model.relations[queries.relation], queries.side)
        everyone = self.group.all_gather(np.ascontiguousarray(mine))
        ids = np.stack([queries.given, queries.relation.astype(np.int64), queries.answer])
        everyones_ids = self.group.all_gather(ids).transpose(1, 0, 2).reshape(3, -1)
        return everyone.reshape(-1, mine.shape[1]), everyones_ids[0], everyones_ids[1], everyones_ids[2]

    def _true_scores(self, flat: Float32, answer: Int64) -> tuple[Float32, Float32]:
        """Scores of the answers, each from its shard (-inf: no answer), and the tolerance for equal scores."""
        sharding, model = self.model.sharding, self.model
        mine = np.flatnonzero((answer >= 0) & (sharding.shard_of[answer] == self.group.rank))
        found = np.full((2, len(answer)), -np.inf, np.float32)
        if len(mine):
            rows = model.score.prepared(model.entities[sharding.row_of[answer[mine]]])
            found[0, mine] = model.score.comparison.scores(flat[mine], rows, np.arange(len(mine))[:, None])[:, 0]
            found[1, mine] = model.score.comparison.rounding(flat[mine], rows)
        scores, near = self.group.all_reduce(found, "max")
        return scores, np.maximum(near, 0)

    def _windows(self, flat: Float32) -> Iterator[tuple[int, Float32]]:
        """First row, and scores `[n * q, rows of the window]`."""
        model = self.model
        columns = max(1, self._window_values // max(1, len(flat)))
        for first in range(0, model.held, columns):
            rows = model.score.prepared(model.entities[first : min(first + columns, model.held)])
            places = np.arange(len(rows))[None]
            yield first, model.score.comparison.scores(flat, rows, places, self.pool)


def _best(ids: Int64, scores: Float32, k: int) -> tuple[Int64, Float32]:
    order = np.lexsort((ids, -scores))[:, :k]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
