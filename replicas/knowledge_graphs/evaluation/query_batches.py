"""Batches of queries: each worker asks about the entities of its own shard."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import SIDES, PartitionedTriples, Queries, Sharding, Side

__all__ = ["QueryBatches"]


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
