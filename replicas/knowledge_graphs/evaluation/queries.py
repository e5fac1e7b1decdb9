"""Batches of queries, each about an entity of its worker's shard; and the entities that compete to answer them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt8
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph import SIDES, PartitionedTriples, Queries, Sharding, Side

__all__ = ["Candidates", "QueryBatches", "TripleCandidates"]


class QueryBatches:
    """Triples as queries for one of their ends, the same number for every worker in every batch.

    Args:
        triples: int `[N, 3]`, global ids; -1 at the queried end if no answer is known.
        sharding: Sharding of the entities. A query belongs to the worker that owns its given entity.
        side: The queried end. (With reciprocal relations, head queries are tail
            queries of the inverse triples: `with_inverses`.)
        batch_per_worker: Queries of each worker in a batch, q.

    Attributes:
        side: See above.
        batches: Number of batches, as many as the fullest worker needs.

    Raises:
        BadInput: an unknown side, a batch below 1, or malformed triples.
        IdOutOfRange: an entity does not exist.
    """

    def __init__(self, triples: npt.ArrayLike, sharding: Sharding, side: Side, batch_per_worker: int) -> None:
        if side not in SIDES:
            raise BadInput(f"queries ask for one of {', '.join(SIDES)}, not for {side!r}")
        if batch_per_worker < 1:
            raise BadInput(f"a batch has at least 1 query a worker, got {batch_per_worker}")
        self._partition = PartitionedTriples.create(triples, sharding, "head" if side == "tail" else "tail")
        self._size = batch_per_worker
        self.side = side
        self.batches = -(-int(self._partition.counts.max()) // batch_per_worker)

    def batch(self, index: int, worker: int) -> Queries:
        """One worker's part of a batch. Raises BadInput if there is no such batch."""
        partition = self._partition
        if not 0 <= index < self.batches:
            raise BadInput(f"batch {index} of queries: there are {self.batches}")
        place = index * self._size + np.arange(self._size)
        mask = place < partition.counts[worker]
        place = np.where(mask, partition.offsets[worker] + place, 0)
        triples = partition.triples[place].astype(np.int64)
        given, answer = triples[:, 0], triples[:, 2]
        if self.side == "head":
            given, answer = answer, given
        return Queries(
            side=self.side,
            row=np.where(mask, partition.sharding.row_of[given], 0),
            given=np.where(mask, given, partition.sharding.entity_at[worker, 0]),
            relation=np.where(mask, triples[:, 1], 0).astype(np.int32),
            answer=np.where(mask, answer, -1),
            triple=np.where(mask, partition.source[place], -1),
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
    def of_list(cls, entities: npt.ArrayLike, count: int) -> Candidates:
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
    def of_types(cls, types: npt.ArrayLike, count: int, further: Int32 | None = None) -> Candidates:
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
    def of(cls, heads: npt.ArrayLike, tails: npt.ArrayLike, count: int) -> TripleCandidates:
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

    def require(self, triples: int) -> None:
        """Raises BadInput unless there are lists for so many triples."""
        if len(self.heads) != triples:
            raise BadInput(f"candidates are listed for {len(self.heads):,} triples; {triples:,} are ranked")
