"""Scores queries against all entities of all shards, in windows of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.evaluation.queries import Candidates
from elastable.replicas.knowledge_graphs.evaluation.ranking import RankCounts, Ranks
from elastable.replicas.knowledge_graphs.graph import Exclusions, KnownTriples, Queries
from elastable.replicas.knowledge_graphs.model import ShardedModel

__all__ = ["AllScores", "TopAnswers"]

_EXACT_VALUES = 1 << 20  # float64 values of pairs scored again at once: 8 MiB
_WINDOW_VALUES = 1 << 22  # scores held at once: 16 MiB
_EVERY = Candidates()


@dataclass(frozen=True, slots=True)
class TopAnswers:
    """The best answers to each query, best first: global ids int64 `[q, k]` and scores float32 `[q, k]`."""

    entities: Int64
    scores: Float32


class AllScores:
    """Everyone's queries against all entities: queries are gathered, scored on each shard, and small results returned.

    Every member of the group calls the same methods with its own part of the
    same batch of queries (`elastable.replicas.knowledge_graphs.evaluation.queries`).

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

    def ranks(self, queries: Queries, known: KnownTriples | None = None, among: Candidates = _EVERY) -> Ranks:
        """Ranks of this worker's answers among the candidates, by scores in double precision.

        All are scored in float32; those whose rounding errors may matter are scored again.

        Args:
            queries: This worker's part, with answers. An answer need not be a candidate.
            known: Known answers, which do not compete; None: they do (raw ranks).
            among: The candidates; all entities by default.
        """
        size = len(queries.row)
        flat, given, relation, answer = self._everyones(queries)
        counts = RankCounts(self._true_scores(flat, answer), self._rounding(flat))
        shards = self.model.sharding.shards
        if known is None:
            known = KnownTriples.create(self.model.sharding.entities, len(self.model.relations))
        left_out = known.exclusions(queries.side, given, relation, answer, self.model.sharding)
        for rows, scores in self._windows(flat, among):
            counted = among.counted(answer, self.model.sharding.entity_at[self.group.rank, rows])
            exact = partial(self._exact, flat, rows)
            counts.add(scores, counted=counted, without=self._columns(left_out, rows), exact=exact)
        totals = self.group.reduce_scatter(np.stack([counts.greater, counts.equal], axis=1).reshape(shards, size, 2))
        return Ranks(1 + totals[:, 0], 1 + totals[:, 0] + totals[:, 1])

    def ranks_among(self, queries: Queries, listed: Int64, known: KnownTriples | None = None) -> Ranks:
        """Ranks of this worker's answers among candidates listed for each query, by scores in double precision.

        Only those are scored. The answer itself does not compete; a candidate that is listed twice competes twice.

        Args:
            queries: This worker's part, with answers.
            listed: int64 `[q, k]`, global ids, -1 at padding; k is the same on every worker.
            known: Known answers, which do not compete; None: they do.
        """
        size, sharding, rank = len(queries.row), self.model.sharding, self.group.rank
        flat, given, relation, answer = self._everyones(queries)
        true = self._true_scores(flat, answer)
        everyones = self.group.all_gather(np.ascontiguousarray(listed)).reshape(len(flat), -1)
        query, column = np.nonzero(
            (everyones >= 0) & (everyones != answer[:, None]) & (sharding.shard_of[everyones] == rank)
        )
        row = sharding.row_of[everyones[query, column]].astype(np.int64)
        if known is not None:
            left_out = known.exclusions(queries.side, given, relation, answer, sharding)
            queries_out, rows_out = left_out.window(rank, 0, sharding.rows)
            competes = ~np.isin(query * sharding.rows + row, queries_out * sharding.rows + rows_out)
            query, row = query[competes], row[competes]
        scores = self._exact(flat, row, query, np.arange(len(query)))
        counts = np.zeros((len(flat), 2), np.int64)
        np.add.at(counts[:, 0], query, ~(scores <= true[query]))
        np.add.at(counts[:, 1], query, scores == true[query])
        totals = self.group.reduce_scatter(counts.reshape(sharding.shards, size, 2))
        return Ranks(1 + totals[:, 0], 1 + totals[:, 0] + totals[:, 1])

    def top(
        self, queries: Queries, k: int, known: KnownTriples | None = None, among: Candidates = _EVERY
    ) -> TopAnswers:
        """The best answers to this worker's queries; ties go to the lower global id.

        Args:
            queries: This worker's part; its answers are ignored.
            k: Number of answers.
            known: Known answers to leave out; None: none. Where fewer than k are left, the rest have score -inf.
            among: The entities that may answer, a list or all; types need an answer and do not apply.

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
        for rows, window in self._windows(flat, among):
            if left_out is not None:
                window[self._columns(left_out, rows)] = -np.inf
            ids = np.broadcast_to(sharding.entity_at[rank, rows], window.shape)
            best, scores = _best(np.concatenate([best, ids], axis=1), np.concatenate([scores, window], axis=1), k)
        shape = (self.group.size, len(queries.row), k)
        all_ids = self.group.all_to_all(best.reshape(shape)).transpose(1, 0, 2).reshape(shape[1], -1)
        all_scores = self.group.all_to_all(scores.reshape(shape)).transpose(1, 0, 2).reshape(shape[1], -1)
        return TopAnswers(*_best(all_ids, all_scores, k))

    def scores(self, queries: Queries) -> Float32:
        """float32 `[q, E]`: the score of each of this worker's queries with every entity, by global id.

        Answers are ignored. Unlike ranks and best answers, the result is not bounded by the window.
        """
        sharding = self.model.sharding
        flat, *_ = self._everyones(queries)
        mine = np.full((len(flat), sharding.rows), -np.inf, np.float32)
        for rows, window in self._windows(flat, _EVERY):
            mine[:, rows] = window
        parts = self.group.all_to_all(mine.reshape(self.group.size, len(queries.row), sharding.rows))
        found: Float32 = parts.transpose(1, 0, 2)[:, sharding.shard_of, sharding.row_of]
        return found

    def _everyones(self, queries: Queries) -> tuple[Float64, Int64, Int64, Int64]:
        """Everyone's queries `[n * q, query_width]`, with given entities, relations and answers by global id."""
        model, score = self.model, self.model.score
        score.require_side(queries.side)
        mine = score.exact_query(model.entities[queries.row], model.relations[queries.relation], queries.side)
        everyone = self.group.all_gather(np.ascontiguousarray(mine))
        ids = np.stack([queries.given, queries.relation.astype(np.int64), queries.answer])
        everyones_ids = self.group.all_gather(ids).transpose(1, 0, 2).reshape(3, -1)
        return everyone.reshape(-1, mine.shape[1]), everyones_ids[0], everyones_ids[1], everyones_ids[2]

    def _true_scores(self, flat: Float64, answer: Int64) -> Float64:
        """Scores of the answers, each from its shard; -inf: no answer."""
        sharding = self.model.sharding
        mine = np.flatnonzero((answer >= 0) & (sharding.shard_of[answer] == self.group.rank))
        found = np.full(len(answer), -np.inf)
        found[mine] = self._exact(flat, sharding.row_of[answer[mine]], mine, np.arange(len(mine)))
        return self.group.all_reduce(found, "max")

    def _exact(self, flat: Float64, rows: npt.NDArray[np.integer], query: Int64, column: Int64) -> Float64:
        """float64 `[P]`: scores of queries with this shard's `rows[column]`, some at a time."""
        score, found = self.model.score, np.empty(len(query), np.float64)
        some = max(1, _EXACT_VALUES // (flat.shape[1] + score.entity_width))
        for start in range(0, len(query), some):
            part = slice(start, start + some)
            ready = score.exact_rows(self.model.entities[rows[column[part]]])
            found[part] = score.comparison.exact_scores(flat[query[part]], ready)
        return found

    def _rounding(self, flat: Float64) -> Float64:
        """float64 `[n * q]`: how far scores in float32 with entities of this shard may be from exact ones."""
        rows = self.model.score.prepared(self.model.entities[: self.model.held])
        highest = np.zeros(rows.shape[1], np.float32)
        _widen(rows, highest)
        return self.model.score.comparison.rounding(flat, highest.astype(np.float64))

    def _windows(self, flat: Float64, among: Candidates) -> Iterator[tuple[Int64, Float32]]:
        """Ascending rows of this shard, int64 `[c]`, and everyone's scores with them `[n * q, c]`."""
        model, single = self.model, flat.astype(np.float32)
        listed = among.rows(model.sharding, self.group.rank)
        count = model.held if listed is None else len(listed)
        columns = max(1, self._window_values // max(1, len(flat)))
        for first in range(0, count, columns):
            window = slice(first, min(first + columns, count))
            rows = np.arange(window.start, window.stop) if listed is None else listed[window]
            raw = model.entities[window] if listed is None else model.entities[rows]
            places = np.arange(len(rows))[None]
            yield rows, model.score.comparison.scores(single, model.score.prepared(raw), places, self.pool)

    def _columns(self, left_out: Exclusions, rows: Int64) -> tuple[Int64, Int64]:
        """The excluded pairs of query and column of a window, int64 `[P]` each."""
        query, column = left_out.window(self.group.rank, int(rows[0]), int(rows[-1]) + 1)
        if len(rows) == rows[-1] - rows[0] + 1:
            return query, column
        row = column + rows[0]
        place = np.searchsorted(rows, row)
        listed = rows[place] == row
        return query[listed], place[listed]


@kernel
def _widen(rows: Float32, highest: Float32) -> None:
    """`highest` becomes at least the absolute value of every row, column by column (NaN scores NaN anyway)."""
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            value = abs(rows[i, j])
            highest[j] = highest[j] if highest[j] >= value else value


def _best(ids: Int64, scores: Float32, k: int) -> tuple[Int64, Float32]:
    order = np.lexsort((ids, -scores))[:, :k]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
