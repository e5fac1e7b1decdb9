"""Ranks of true answers among all entities: queries, lists of candidates, scores in windows, filtered metrics."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Array, Bools, Float32, Float64, Int32, Int64, UInt8
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Queries, Side
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import KnowledgeGraph
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, Sharding, checked_triples
from elastable.replicas.knowledge_graphs.graph.triple_files import DAMAGED
from elastable.replicas.knowledge_graphs.graph_trainer import ShardedModel
from elastable.replicas.knowledge_graphs.ranking import QueryRanks, RankCounts, Ranks


def query_batches(triples: npt.ArrayLike, sharding: Sharding, side: Side, size: int, worker: int) -> Iterator[Queries]:
    """One worker's batches of triples as queries for one of their ends; every worker has as many, of the same size.

    Args:
        triples: int `[N, 3]`, global ids; -1 at the queried end if no answer is known.
        sharding: Sharding of the entities. A query belongs to the worker that owns its given entity.
        side: The queried end. (With reciprocal relations, head queries are tail
            queries of the inverse triples: `with_inverses`.)
        size: Queries of each worker in a batch, q.

    Raises:
        BadInput: an unknown side, a batch below 1, or malformed triples.
        IdOutOfRange: an entity does not exist.
    """
    if side not in SIDES:
        raise BadInput(f"queries ask for one of {', '.join(SIDES)}, not for {side!r}")
    if size < 1:
        raise BadInput(f"a batch has at least 1 query a worker, got {size}")
    asked, known = (2, 0) if side == "tail" else (0, 2)
    checked = checked_triples(triples, sharding.entities, unknown_in=(asked,)).astype(np.int64)
    owner = sharding.shard_of[checked[:, known]]
    mine = np.flatnonzero(owner == worker)
    for first in range(0, int(np.bincount(owner, minlength=1).max()), size):
        triple = np.full(size, -1)
        part = mine[first : first + size]
        triple[: len(part)] = part
        mask, found = triple >= 0, checked[triple]
        yield Queries(
            side=side,
            row=np.where(mask, sharding.row_of[found[:, known]], 0),
            given=np.where(mask, found[:, known], sharding.entity_at[worker, 0]),
            relation=np.where(mask, found[:, 1], 0).astype(np.int32),
            answer=np.where(mask, found[:, asked], -1),
            triple=triple,
            mask=mask,
        )


@dataclass(frozen=True, eq=False)
class Candidates:
    """The entities that a query's answer is ranked among; make them with `of_list` or `of_types`.

    Attributes:
        entities: int64 `[k]`, ascending global ids: the same for every query; None: every entity.
        types: int32 `[E]`: only entities of the type of the query's answer compete; None: of any type.
        members: uint8 `[E, bytes]`: the bits of each entity's types, where entities have several: those compete that
            share one with the answer.
    """

    entities: Int64 | None = None
    types: Int32 | None = None
    members: UInt8 | None = None

    @classmethod
    def of_list(cls, entities: npt.ArrayLike, count: int) -> "Candidates":
        """A list of global ids, each counted once.

        Args:
            entities: int `[k]`.
            count: Number of entities, E.

        Raises:
            BadInput: no candidate at all.
            IdOutOfRange: a candidate is not an entity.
        """
        given = np.unique(np.asarray(entities))
        if not given.size or given.dtype.kind not in "iu":
            raise BadInput(f"candidates must be at least 1 global id, int [k]; got {given.dtype} {list(given.shape)}")
        if not 0 <= given[0] <= given[-1] < count:
            raise IdOutOfRange(f"candidates are in {given[0]} .. {given[-1]}; there are {count} entities")
        return cls(entities=given.astype(np.int64))

    @classmethod
    def of_types(cls, types: npt.ArrayLike, count: int, further: Int32 | None = None) -> "Candidates":
        """Entities of the answer's type, or of one of its types.

        Args:
            types: int `[E]`.
            count: Number of entities, E.
            further: int `[K, 2]`: entity and type, for entities of several types.

        Raises:
            BadInput: types of another shape.
        """
        given = np.asarray(types)
        if given.shape != (count,) or given.dtype.kind not in "iu":
            raise BadInput(f"types of candidates must be integers [{count}]; got {given.dtype} {list(given.shape)}")
        if further is None or not len(further):
            return cls(types=given.astype(np.int32))
        has = np.zeros((count, int(max(given.max(), further[:, 1].max())) + 1), np.bool_)
        has[np.arange(count), given] = has[further[:, 0], further[:, 1]] = True
        return cls(types=given.astype(np.int32), members=np.packbits(has, axis=1))

    def rows(self, sharding: Sharding, shard: int) -> Int64 | None:
        """int64 `[c]`, ascending: a shard's rows that may compete; None: all."""
        if self.entities is None:
            return None
        mine = self.entities[sharding.shard_of[self.entities] == shard]
        return np.sort(sharding.row_of[mine]).astype(np.int64)

    def counted(self, answers: Int64, entities: Int64) -> Bools | None:
        """bool `[q, c]`: whether each of `entities` (int64 `[c]`) competes with each answer (int64 `[q]`, -1: none);
        None: all do."""
        if self.types is None:
            return None
        if self.members is not None:
            mine, others = self.members[answers], self.members[entities]
            shared = np.zeros((len(answers), len(entities)), np.bool_)
            for byte in range(mine.shape[1]):
                shared |= (mine[:, byte, None] & others[None, :, byte]) > 0
            return shared
        found: Bools = self.types[answers][:, None] == self.types[entities][None]
        return found


@dataclass(frozen=True, eq=False)
class TripleCandidates:
    """For every triple of a split, the entities that its head and its tail are ranked among; make it with `of`.

    An entity that a list has twice competes twice, as in OGB's evaluators; the answer itself never does.

    Attributes:
        heads, tails: int64 `[N, k]`, global ids in the order of the split's triples; -1: fewer than k.
    """

    heads: Int64
    tails: Int64

    @classmethod
    def of(cls, heads: npt.ArrayLike, tails: npt.ArrayLike, count: int) -> "TripleCandidates":
        """Checked lists.

        Args:
            heads, tails: int `[N, k]`, -1 at padding; their k may differ.
            count: Number of entities, E.

        Raises:
            BadInput: other shapes or dtypes.
            IdOutOfRange: a candidate is not an entity; names the triple.
        """
        lists = []
        for side, given in (("heads", np.asarray(heads)), ("tails", np.asarray(tails))):
            if given.ndim != 2 or given.dtype.kind not in "iu":
                raise BadInput(
                    f"candidates of {side} must be integers [N, k], a list for each triple; got {given.dtype} "
                    f"{list(given.shape)}"
                )
            wrong = (given < -1) | (given >= count)
            if wrong.any():
                triple = int(np.argmax(wrong.any(axis=1)))
                entity = given[triple][wrong[triple]][0]
                raise IdOutOfRange(f"candidates of {side}, triple {triple}: {entity} is not one of {count} entities")
            lists.append(given.astype(np.int64))
        if len(lists[0]) != len(lists[1]):
            raise BadInput(f"there are candidates for {len(lists[0])} heads and {len(lists[1])} tails of the triples")
        return cls(*lists)

    def of_queries(self, side: Side, triple: Int64) -> Int64:
        """int64 `[q, k]`: the candidates of a side's queries, by positions of their triples (int64 `[q]`, -1: none)."""
        lists = self.heads if side == "head" else self.tails
        return np.where(triple[:, None] >= 0, lists[triple], -1)


def read_triple_candidates(file: Path, graph: KnowledgeGraph) -> TripleCandidates:
    """Reads the candidates of a split's triples, in their order.

    Args:
        file: `.npz` with OGB's arrays `head_neg` and `tail_neg`, int `[N, k]`; with `head_type` and `tail_type`, as of
            ogbl-biokg, ids count within the type.

    Raises:
        BadInput: a file that cannot be read, or without these arrays.
        IdOutOfRange: a candidate is not an entity.
    """
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as saved:
            arrays: Mapping[str, Array] = {name: saved[name] for name in saved if not name.startswith("relation")}
        lists = [arrays[f"{end}_neg"] for end in SIDES]
        for place, end in enumerate(SIDES):
            kinds = arrays.get(f"{end}_type")
            if kinds is not None and lists[place].ndim == 2 and kinds.shape == lists[place].shape[:1]:
                lists[place] = _within_types(lists[place], kinds, graph)
    except DAMAGED as error:
        raise BadInput(f"{file}: cannot be read as candidates for each triple ({error})") from error
    return TripleCandidates.of(lists[0], lists[1], len(graph.entities))


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


_EXACT_VALUES = 1 << 20  # float64 values of pairs scored again at once: 8 MiB
_WINDOW_VALUES = 1 << 22  # scores held at once: 16 MiB
_EVERY = Candidates()


class AllScores:
    """Everyone's queries against all entities: queries are gathered, scored on each shard, and small results returned.

    Every member of the group calls the same methods with its own part of the same batch of queries (`query_batches`).

    Args:
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
        flat, given, relation, answer = self._everyones(queries)
        counts, sharding = RankCounts(self._true_scores(flat, answer), self._rounding(flat)), self.model.sharding
        mine = np.flatnonzero((answer >= 0) & (sharding.shard_of[answer] == self.group.rank))
        own = mine, sharding.row_of[answer[mine]].astype(np.int64)  # an answer does not compete with itself
        for rows, scores in self._windows(flat, among):
            left_out = self._known_rows(known, queries.side, given, relation, rows)
            counted = among.counted(answer, sharding.entity_at[self.group.rank, rows])
            counted = np.ones(scores.shape, np.bool_) if counted is None else counted
            counted[_columns(*own, rows)] = counted[_columns(*left_out, rows)] = False
            counts.add(scores, counted, partial(self._exact, flat, rows))
        return self._ranks(np.stack([counts.greater, counts.equal], axis=1))

    def ranks_among(self, queries: Queries, listed: Int64, known: KnownTriples | None = None) -> Ranks:
        """Ranks of this worker's answers among candidates listed for each query, by scores in double precision.

        Only those are scored. The answer itself does not compete; a candidate that is listed twice competes twice.

        Args:
            queries: This worker's part, with answers.
            listed: int64 `[q, k]`, global ids, -1 at padding; k is the same on every worker.
            known: Known answers, which do not compete; None: they do.
        """
        sharding, rank = self.model.sharding, self.group.rank
        flat, given, relation, answer = self._everyones(queries)
        true = self._true_scores(flat, answer)
        everyones = self.group.all_gather(np.ascontiguousarray(listed)).reshape(len(flat), -1)
        query, column = np.nonzero(
            (everyones >= 0) & (everyones != answer[:, None]) & (sharding.shard_of[everyones] == rank)
        )
        row = sharding.row_of[everyones[query, column]].astype(np.int64)
        queries_out, rows_out = self._known_rows(known, queries.side, given, relation, np.arange(sharding.rows))
        competes = ~np.isin(query * sharding.rows + row, queries_out * sharding.rows + rows_out)
        query, row = query[competes], row[competes]
        scores = self._exact(flat, row, query, np.arange(len(query)))
        counts = np.zeros((len(flat), 2), np.int64)
        np.add.at(counts[:, 0], query, ~(scores <= true[query]))
        np.add.at(counts[:, 1], query, scores == true[query])
        return self._ranks(counts)

    def top(
        self, queries: Queries, k: int, known: KnownTriples | None = None, among: Candidates = _EVERY
    ) -> tuple[Int64, Float32]:
        """The best answers to this worker's queries; ties go to the lower global id.

        Args:
            queries: This worker's part; its answers are ignored.
            k: Number of answers.
            known: Known answers to leave out; None: none. Where fewer than k are left, the rest have score -inf.
            among: The entities that may answer, a list or all; types need an answer and do not apply.

        Returns:
            The best answers to each query, best first: global ids int64 `[q, k]` and scores float32 `[q, k]`.

        Raises:
            BadInput: k below 1 or above the number of entities.
        """
        sharding, rank = self.model.sharding, self.group.rank
        if not 1 <= k <= sharding.entities:
            raise BadInput(f"the best {k} answers of {sharding.entities} entities: ask for 1 to {sharding.entities}")
        flat, given, relation, _ = self._everyones(queries)
        best = np.full((len(flat), k), -1, np.int64)
        scores = np.full((len(flat), k), -np.inf, np.float32)
        for rows, window in self._windows(flat, among):
            window[_columns(*self._known_rows(known, queries.side, given, relation, rows), rows)] = -np.inf
            ids = np.broadcast_to(sharding.entity_at[rank, rows], window.shape)
            best, scores = _best(np.concatenate([best, ids], axis=1), np.concatenate([scores, window], axis=1), k)
        shape = (self.group.size, len(queries.row), k)
        all_ids = self.group.all_to_all(best.reshape(shape)).transpose(1, 0, 2).reshape(shape[1], -1)
        all_scores = self.group.all_to_all(scores.reshape(shape)).transpose(1, 0, 2).reshape(shape[1], -1)
        return _best(all_ids, all_scores, k)

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

    def _ranks(self, counts: Int64) -> Ranks:
        """This worker's ranks, by each shard's counts of everyone's greater and equal candidates, `[n * q, 2]`."""
        totals = self.group.reduce_scatter(counts.reshape(self.group.size, -1, 2))
        return Ranks(1 + totals[:, 0], 1 + totals[:, 0] + totals[:, 1])

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
        # Of each column the largest absolute value, without a copy; a row of NaN scores NaN anyway.
        highest = np.maximum(np.fmax.reduce(rows, axis=0), -np.fmin.reduce(rows, axis=0))
        return self.model.score.comparison.rounding(flat, np.fmax(highest, 0).astype(np.float64))

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

    def _known_rows(
        self, known: KnownTriples | None, side: Side, given: Int64, relation: Int64, rows: Int64
    ) -> tuple[Int64, Int64]:
        """Pairs of everyone's queries and a window's rows (ascending) that are known answers, int64 `[P]` each."""
        if known is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        window = int(rows[0]), int(rows[-1]) + 1
        return known.answers_on(side, given, relation, self.model.sharding, self.group.rank, window)


def _columns(query: Int64, row: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """The pairs of query and row (int64 `[P]` each) that a window of `rows`, ascending, has; by query and column."""
    column = np.minimum(np.searchsorted(rows, row), len(rows) - 1)
    there = rows[column] == row
    return query[there], column[there]


def _best(ids: Int64, scores: Float32, k: int) -> tuple[Int64, Float32]:
    order = np.lexsort((ids, -scores))[:, :k]
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)


_QUERIES = 256  # of all workers in a batch


class Evaluation:
    """Ranks triples over the group; every member calls it with the same triples and gets the same metrics.

    Args:
        known: True triples `[N, 3]` that do not compete: all splits.
        ties: "average", "optimistic" or "pessimistic" ranks.
        among: The entities that answers are ranked among, for all queries or for each triple; all by default.
        pool: Threads of this worker.
    """

    def __init__(
        self,
        model: ShardedModel,
        *known: Int32,
        ties: str = "average",
        among: Candidates | TripleCandidates | None = None,
        pool: RangePool = SERIAL,
    ) -> None:
        self._model, self._ties, self._known = model, ties, model.known(*known)
        self._scores = AllScores(model, pool=pool)
        self._listed = among if isinstance(among, TripleCandidates) else None
        self._among = among if isinstance(among, Candidates) else _EVERY

    def metrics(self, triples: Int32, stop: Callable[[], bool] | None = None) -> dict[str, float]:
        """MRR, mean rank and Hits@1, 3 and 10 of `triples` (int32 `[N, 3]`); see `QueryRanks.metrics`.

        Args:
            triples: The same on every member.
            stop: Asked at every batch, on every member if on any; where one says True, the result is {}.
        """
        found = self._everyones(triples, stop)
        return {} if found is None else found.metrics(ties=self._ties)

    def ranks(self, triples: Int32) -> QueryRanks:
        """The ranks of the heads and tails of `triples` (int32 `[N, 3]`): those of all workers, on every worker."""
        found = self._everyones(triples, None)
        assert found is not None
        return found

    def _everyones(self, triples: Int32, stop: Callable[[], bool] | None) -> QueryRanks | None:
        if not len(triples):
            raise BadInput("there are no triples to evaluate")
        listed, group, sharding = self._listed, self._model.group, self._model.sharding
        if listed is not None and len(listed.heads) != len(triples):
            raise BadInput(f"candidates are listed for {len(listed.heads):,} triples; {len(triples):,} are ranked")
        parts = [np.empty((0, 4), np.int64)]
        for place, side in enumerate(SIDES):
            asked, of = self._model.asked(triples, side)
            for queries in query_batches(asked, sharding, of, max(1, _QUERIES // group.size), group.rank):
                if listed is None:
                    ranks = self._scores.ranks(queries, self._known, self._among)
                else:
                    ranks = self._scores.ranks_among(queries, listed.of_queries(side, queries.triple), self._known)
                columns = queries.triple, np.full(len(queries.triple), place), ranks.optimistic, ranks.pessimistic
                parts.append(np.stack(columns, axis=1)[queries.mask])
                if stop is not None and group.all_reduce(np.array([int(stop())]), "max")[0]:
                    return None
        everyones = np.concatenate(group.all_gather_uneven(np.concatenate(parts)))
        triple, side_of, optimistic, pessimistic = everyones[np.lexsort((everyones[:, 0], everyones[:, 1]))].T
        return QueryRanks(triple, side_of, Ranks(optimistic, pessimistic))
