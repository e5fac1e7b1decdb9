"""Known triples: the tails of every (head, relation) and the heads of every (relation, tail)."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.graph.sharding import Sharding, checked_triples


@dataclass(frozen=True, eq=False)
class AnswerLists:
    """The true answers of every (given entity, relation), as compressed sparse rows.

    Attributes:
        keys: int64 `[K]`, ascending: `given * relations + relation` of each pair that occurs.
        offsets: int64 `[K + 1]`: the answers of pair k are `answers[offsets[k]:offsets[k + 1]]`.
        answers: int32 `[A]`, ascending and unique within a pair.
    """

    keys: Int64
    offsets: Int64
    answers: Int32
    relations: int

    def spans(self, given: npt.NDArray[np.integer], relation: npt.NDArray[np.integer]) -> tuple[Int64, Int64]:
        """Where the answers of pairs begin and end, int64 `[q]` each; an unknown pair has none."""
        wanted = given.astype(np.int64) * self.relations + relation
        place = np.searchsorted(self.keys, wanted)
        found = place < len(self.keys)
        found[found] = self.keys[place[found]] == wanted[found]
        first, last = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
        first[found], last[found] = self.offsets[place[found]], self.offsets[place[found] + 1]
        return first, last


@dataclass(frozen=True, eq=False)
class KnownTriples:
    """The true triples, found from either end.

    Attributes:
        tails: The tails of every (head, relation).
        heads: The heads of every (tail, relation).
    """

    entities: int
    tails: AnswerLists
    heads: AnswerLists
    _placed: dict[Side, tuple[Sharding, Int64]] = field(default_factory=dict, repr=False)

    @classmethod
    def create(cls, entities: int, relations: int, *triples: npt.ArrayLike) -> "KnownTriples":
        """Indexes triples: four bytes per triple and end, sixteen per pair that occurs, and temporary memory.

        Args:
            relations: Number of relations, with inverse ones if the triples have them.
            triples: int `[N, 3]` each; all splits for filtered ranking, the training triples for filtered candidates.

        Raises:
            IdOutOfRange, BadInput: an id does not exist.
        """
        given = [checked_triples(part, entities) for part in triples]
        every = np.concatenate(given) if given else np.empty((0, 3), np.int32)
        if every.size and every[:, 1].max() >= relations:
            raise BadInput(f"known triples: relation {every[:, 1].max()} is not one of {relations}")
        return cls(
            entities,
            _answer_lists(every[:, 0], every[:, 1], every[:, 2], relations),
            _answer_lists(every[:, 2], every[:, 1], every[:, 0], relations),
        )

    def lists(self, side: Side) -> AnswerLists:
        """The answers of queries for this end."""
        return self.tails if side == "tail" else self.heads

    def exclusions(
        self, side: Side, given: Int64, relation: npt.NDArray[np.integer], answer: Int64, sharding: Sharding
    ) -> "Exclusions":
        """What a filtered evaluation does not rank: all known answers of each query, and its own answer.

        The first call for a side and a sharding sorts all answers by their
        positions and keeps those: eight bytes per answer.

        Args:
            given: int64 `[q]`, the given entities.
            relation: int `[q]`.
            answer: int64 `[q]`, -1: none. It is excluded even if it is not known: an
                answer does not compete with itself.
            sharding: The sharding whose windows hold the candidates.
        """
        lists = self.lists(side)
        first, last = lists.spans(given, relation)
        own = np.where(answer >= 0, sharding.place_of(np.maximum(answer, 0)), -1)
        return Exclusions(self._places(side, sharding), first, last, own, sharding.rows)

    def _places(self, side: Side, sharding: Sharding) -> Int64:
        """int64 `[A]`: positions of the answers, ascending within each pair."""
        kept = self._placed.get(side)
        if kept is None or kept[0] is not sharding:
            lists = self.lists(side)
            places = sharding.place_of(lists.answers)
            _sort_spans(places, lists.offsets)
            kept = self._placed[side] = (sharding, places)
        return kept[1]


@dataclass(frozen=True, eq=False)
class Exclusions:
    """Excluded pairs of query and entity, found one window of a shard at a time.

    Attributes:
        places: int64 `[A]`, `shard * rows + row` of answers.
        first, last: int64 `[q]`: query i excludes `places[first[i]:last[i]]`, ascending.
        own: int64 `[q]`: query i excludes `own[i]`, too; -1: none.
    """

    places: Int64
    first: Int64
    last: Int64
    own: Int64
    rows: int

    def window(self, shard: int, first_row: int, last_row: int) -> tuple[Int64, Int64]:
        """The excluded pairs among rows `first_row .. last_row - 1` of a shard.

        Returns:
            (query, column), int64 `[P]` each, by query, every pair once; columns are rows counted from `first_row`.
        """
        low, high = shard * self.rows + first_row, shard * self.rows + min(last_row, self.rows)
        return _window(self.places, self.first, self.last, self.own, low, high)


def _answer_lists(given: Int32, relation: Int32, answer: Int32, relations: int) -> AnswerLists:
    key = given.astype(np.int64) * relations + relation
    order = np.lexsort((answer, key))
    key, answer = key[order], answer[order]
    first_of_pair = np.ones(len(key), np.bool_)
    first_of_pair[1:] = (key[1:] != key[:-1]) | (answer[1:] != answer[:-1])  # a repeated triple counts once
    key, answer = key[first_of_pair], answer[first_of_pair]
    keys, offsets = np.unique(key, return_index=True)
    return AnswerLists(keys, np.append(offsets, len(key)).astype(np.int64), answer, relations)


@kernel
def _sort_spans(values: Int64, offsets: Int64) -> None:
    for i in range(len(offsets) - 1):
        values[offsets[i] : offsets[i + 1]].sort()


@kernel
def first_at_least(values: npt.NDArray[np.integer], low: int, high: int, wanted: int) -> int:
    """The first position of `values[low:high]`, ascending, with a value of at least `wanted`; else `high`."""
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _window(places: Int64, first: Int64, last: Int64, own: Int64, low: int, high: int) -> tuple[Int64, Int64]:
    """Each query's places in `low .. high - 1`, then its own if that is in there without being one of them."""
    begin, end, among = np.empty_like(first), np.empty_like(first), np.zeros(len(own), np.bool_)
    for i in range(len(first)):
        begin[i] = first_at_least(places, first[i], last[i], low)
        end[i] = first_at_least(places, begin[i], last[i], high)
        if low <= own[i] < high:
            found = first_at_least(places, begin[i], end[i], own[i])
            among[i] = not (found < end[i] and places[found] == own[i])
    query = np.empty((end - begin).sum() + among.sum(), np.int64)
    column, count = np.empty_like(query), 0
    for i in range(len(begin)):
        for a in range(begin[i], end[i]):
            query[count], column[count] = i, places[a] - low
            count += 1
        if among[i]:
            query[count], column[count] = i, own[i] - low
            count += 1
    return query, column
