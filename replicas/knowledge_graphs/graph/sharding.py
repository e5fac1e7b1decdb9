"""Which shard and row hold an entity; triples grouped by the shards of their ends; known triples by either end."""

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Array, Int32, Int64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.graph.randomness import permutation, stream_key
from elastable.replicas.knowledge_graphs.graph.triple_files import replaced

_STREAM = 0x5A4D  # the sharding's random stream
_FORMAT = 1
_MOST_TYPES = 1 << 20
_ANSWERS_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class Sharding:
    """The shard and row of every entity; `entity_at` is the inverse.

    Attributes:
        shard_of: int32 `[E]`.
        row_of: int32 `[E]`.
        entity_at: int64 `[n, rows]`: the entity of each row; -1 in the last row of a
            shard with one entity fewer than the others.
        counts: int64 `[n]`: entities of each shard; they differ by 1 at most.
        entity_types: int32 `[E]`; 0 if there are no types. A shard has those of a type in contiguous rows, and their
            numbers on two shards differ by 1 at most.
    """

    seed: int
    shard_of: Int32
    row_of: Int32
    entity_at: Int64
    counts: Int64
    entity_types: Int32

    @classmethod
    def create(
        cls, entities: int, shards: int, *, seed: int = 0, entity_types: npt.ArrayLike | None = None
    ) -> "Sharding":
        """Deals out the entities, shuffled within each type, type after type, to the shards in turn.

        Args:
            entities: Number of entities, E.
            shards: Number of workers, n.
            entity_types: int `[E]`, from 0; None: all are of type 0.

        Raises:
            BadInput: fewer entities than shards, or malformed types.
        """
        if shards < 1:
            raise BadInput(f"sharding of entities: shards must be at least 1, got {shards}")
        if not shards <= entities < 2**31:
            raise BadInput(
                f"sharding of entities: {entities} entities cannot be spread over {shards} workers; every worker needs "
                f"at least one (and there may be no more than 2**31 - 1)"
            )
        types = np.zeros(entities, np.int32) if entity_types is None else np.asarray(entity_types)
        if types.shape != (entities,) or types.dtype.kind not in "iu":
            raise BadInput(
                f"entity types must be integers [{entities}], one an entity; got {types.dtype} {types.shape}"
            )
        if types.min() < 0 or types.max() >= _MOST_TYPES:
            raise BadInput(
                f"entity types must be numbered from 0, below {_MOST_TYPES}; got {types.min()} to {types.max()}"
            )
        shuffled = permutation(entities, stream_key(seed, _STREAM, 0))
        dealt = shuffled[np.argsort(types[shuffled], kind="stable")]  # by type; shuffled within
        first = permutation(shards, stream_key(seed, _STREAM, 1))  # which shards get one more is random, too
        shard_of = np.empty(entities, np.int32)
        row_of = np.empty(entities, np.int32)
        shard_of[dealt] = np.resize(first, entities)
        row_of[dealt] = np.arange(entities) // shards
        counts = np.bincount(shard_of, minlength=shards)
        entity_at = np.full((shards, -(-entities // shards)), -1, np.int64)
        entity_at[shard_of, row_of] = np.arange(entities)
        return cls(seed, shard_of, row_of, entity_at, counts, types.astype(np.int32))

    @property
    def shards(self) -> int:
        """Number of shards, n."""
        return len(self.entity_at)

    @property
    def entities(self) -> int:
        """Number of entities, E."""
        return len(self.shard_of)

    @property
    def rows(self) -> int:
        """Rows of each shard's table, padding included: `ceil(E / n)`."""
        return int(self.entity_at.shape[1])

    def held_by(self, shard: int) -> Int64:
        """int64 `[counts[shard]]`: the entities of a shard, in the order of its rows."""
        return self.entity_at[shard, : self.counts[shard]]

    def shard_table(self, table: Array, shard: int) -> Array:
        """`[rows, ...]`: one shard of a table `[E, ...]`; padding rows are zero."""
        part = np.zeros((self.rows, *table.shape[1:]), table.dtype)
        part[: self.counts[shard]] = table[self.held_by(shard)]
        return part

    def whole_table(self, parts: Array) -> Array:
        """`[E, ...]`: the table of all shards' `[n, rows, ...]`, without padding rows."""
        whole: Array = parts[self.shard_of, self.row_of]
        return whole

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the sharding as a .npz file; replaces an existing one."""
        form, seed, shards = np.array([_FORMAT, self.seed, self.shards], np.int64)
        of, row, types = self.shard_of, self.row_of, self.entity_types
        with replaced(path) as file:
            np.savez(file, format=form, seed=seed, shards=shards, shard_of=of, row_of=row, entity_types=types)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sharding) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("shard_of", "row_of", "entity_types")
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class PartitionedTriples:
    """Triples grouped by the shards of head and tail; within a group they keep their order.

    Attributes:
        triples: int32 `[N, 3]`: head, relation, tail, global ids, group after group.
        source: int64 `[N]`: position of each in the input array.
        counts: int64 `[n, n]`: triples of each group, by head's and tail's shard; a group may be empty.
        offsets: int64 `[n, n]`: where each group begins.
    """

    sharding: Sharding
    triples: Int32
    source: Int64
    counts: Int64
    offsets: Int64

    @classmethod
    def create(cls, triples: npt.ArrayLike, sharding: Sharding) -> "PartitionedTriples":
        """Groups triples, int `[N, 3]`: head, relation, tail.

        Raises:
            BadInput: malformed triples.
            IdOutOfRange: an entity has no shard.
        """
        given, n = checked_triples(triples, sharding.entities), sharding.shards
        group = sharding.shard_of[given[:, 0]].astype(np.int64) * n + sharding.shard_of[given[:, 2]]
        counts = np.bincount(group, minlength=n * n).astype(np.int64)
        source = np.argsort(group, kind="stable")
        offsets = (np.cumsum(counts) - counts).reshape(n, n)
        return cls(sharding, given[source], source, counts.reshape(n, n), offsets)

    def __len__(self) -> int:
        return len(self.triples)


def with_inverses(triples: npt.ArrayLike, relations: int) -> Int32:
    """The triples, then the inverse of each: (tail, relation + relations, head).

    A query (?, relation, tail) becomes (tail, relation + relations, ?): a model
    with reciprocal relations answers tail queries only (Lacroix, Usunier and Obozinski,
    "Canonical tensor decomposition for knowledge base completion", ICML 2018).

    Args:
        triples: int `[N, 3]`.
        relations: Number of relations, R.

    Returns:
        int32 `[2 N, 3]`, with relations 0 .. 2 R - 1.

    Raises:
        BadInput: a relation outside 0 .. R - 1.
    """
    given = checked_triples(triples, 2**31 - 1, relations, unknown_in=(0, 2))
    inverse = given[:, ::-1] + np.array([0, relations, 0], np.int32)
    return np.concatenate([given, inverse])


def checked_triples(
    triples: npt.ArrayLike, entities: int, relations: int = 2**30, *, unknown_in: tuple[int, ...] = ()
) -> Int32:
    """Triples as int32 `[N, 3]`, C-contiguous.

    Args:
        triples: int `[N, 3]`.
        entities: Heads and tails are in 0 .. entities - 1.
        relations: Relations are in 0 .. relations - 1; there may be no more than 2**30.
        unknown_in: Columns that may contain -1.

    Raises:
        BadInput: another shape or dtype, or a relation out of range.
        IdOutOfRange: an entity out of range; names the first such triple.
    """
    given = np.asarray(triples)
    if given.ndim != 2 or given.shape[1] != 3 or given.dtype.kind not in "iu":
        raise BadInput(f"triples must be integers [N, 3] (head, relation, tail); got {given.dtype} {list(given.shape)}")
    for column, what in ((0, "head"), (2, "tail")):
        least = -1 if column in unknown_in else 0
        wrong = (given[:, column] < least) | (given[:, column] >= entities)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise IdOutOfRange(f"triple {place}: {what} {given[place, column]} is not one of {entities} entities")
    if len(given) >= 2**31:
        raise BadInput(f"{len(given)} triples; there may be no more than 2**31 - 1")
    wrong = (given[:, 1] < 0) | (given[:, 1] >= min(relations, 2**30))
    if wrong.any():
        place = int(np.argmax(wrong))
        raise BadInput(f"triple {place}: relation {given[place, 1]} is not one of {relations}")
    return np.ascontiguousarray(given, np.int32)


# Known triples: the tails of every (head, relation) and the heads of every (relation, tail)


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

    tails: AnswerLists
    heads: AnswerLists

    @classmethod
    def create(cls, entities: int, relations: int, *triples: npt.ArrayLike) -> "KnownTriples":
        """Indexes triples: four bytes per triple and end, sixteen per pair that occurs, and temporary memory.

        Args:
            relations: Number of relations, with inverse ones if the triples have them.
            triples: int `[N, 3]` each; all splits for filtered ranking, the training triples for filtered candidates.

        Raises:
            IdOutOfRange, BadInput: an id does not exist.
        """
        given = [checked_triples(part, entities, relations) for part in triples]
        every = np.concatenate(given) if given else np.empty((0, 3), np.int32)
        ends = every[:, 0], every[:, 2]
        return cls(*(_answer_lists(one, every[:, 1], other, relations) for one, other in (ends, ends[::-1])))

    def lists(self, side: Side) -> AnswerLists:
        """The answers of queries for this end."""
        return self.tails if side == "tail" else self.heads

    def answers_on(
        self,
        side: Side,
        given: Int64,
        relation: npt.NDArray[np.integer],
        sharding: Sharding,
        shard: int,
        rows: tuple[int, int] | None = None,
    ) -> tuple[Int64, Int64]:
        """The known answers of queries, int64 `[q]` and int `[q]`, among `rows[0] .. rows[1] - 1` of a shard, or all.

        Returns:
            (query, row of the shard), int64 `[P]` each, by query and row, every pair once.
        """
        lists, (low, high) = self.lists(side), rows or (0, sharding.rows)
        first, last = lists.spans(given, relation)
        # Some queries at a time, so that memory is bounded where hubs have many answers elsewhere.
        parts = np.flatnonzero(np.diff(np.cumsum(last - first) // _ANSWERS_AT_ONCE)) + 1
        found = [np.empty(0, np.int64)]
        for some in np.split(np.arange(len(first)), parts):
            count = (last - first)[some]
            query, skipped = np.repeat(some, count), first[some] - (np.cumsum(count) - count)
            answer = lists.answers[np.arange(len(query)) + np.repeat(skipped, count)]
            row = sharding.row_of[answer]
            here = (sharding.shard_of[answer] == shard) & (row >= low) & (row < high)
            found.append(np.sort(query[here] * sharding.rows + row[here]))
        places = np.concatenate(found)
        query = places // sharding.rows
        return query, places - query * sharding.rows


def _answer_lists(given: Int32, relation: Int32, answer: Int32, relations: int) -> AnswerLists:
    key = given.astype(np.int64) * relations + relation
    order = np.lexsort((answer, key))
    key, answer = key[order], answer[order]
    first_of_pair = np.ones(len(key), np.bool_)
    first_of_pair[1:] = (key[1:] != key[:-1]) | (answer[1:] != answer[:-1])  # a repeated triple counts once
    key, answer = key[first_of_pair], answer[first_of_pair]
    keys, offsets = np.unique(key, return_index=True)
    return AnswerLists(keys, np.append(offsets, len(key)).astype(np.int64), answer, relations)
