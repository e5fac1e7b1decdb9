"""Listed candidates: a list for each triple, or one list for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph import (
    SIDES,
    Corruption,
    KnownTriples,
    Negatives,
    PartitionedTriples,
    Sharding,
    Side,
)
from elastable.replicas.knowledge_graphs.sampling.negatives import Exclude, NegativeSampler, StepTriples

__all__ = ["TripleNegatives"]


class TripleNegatives(NegativeSampler):
    """Candidates from lists, each scored on its own shard; padded so that all shards have the same number.

    Args:
        sharding: Sharding of the entities.
        heads: int `[N, k]`, global ids: candidates for the head of each triple, by its position in the partitioned
            array; or `[k]`: the same for all. -1 is padding. Needed for corruption "h" and "ht".
        tails: The same for tails; needed for "t" and "ht".
        corruption, exclude, known, tell_entities: As of `NegativeSampler`.

    Raises:
        BadInput: lists are missing or do not fit together.
        IdOutOfRange: a candidate is not an entity.
    """

    def __init__(
        self,
        sharding: Sharding,
        *,
        heads: npt.ArrayLike | None = None,
        tails: npt.ArrayLike | None = None,
        corruption: Corruption = "ht",
        exclude: Exclude = "nothing",
        known: KnownTriples | None = None,
        tell_entities: bool = False,
    ) -> None:
        lists = {
            side: _checked_lists(side, given, sharding.entities)
            for side, given in zip(SIDES, (heads, tails), strict=True)
            if side[0] in corruption
        }
        dimensions = {found.ndim for found in lists.values()}
        if len(dimensions) > 1:
            raise BadInput("listed candidates: heads and tails must both be [N, k], or both [k]")
        shared = dimensions == {1}
        self._lists = {side: found.reshape(-1, found.shape[-1]) for side, found in lists.items()}
        count = max((_most_on_a_shard(found, sharding) for found in self._lists.values()), default=1)
        super().__init__(
            sharding,
            max(1, count),
            corruption=corruption,
            shared=shared,
            exclude=exclude,
            known=known,
            tell_entities=tell_entities,
        )

    @property
    def _pads(self) -> bool:
        return True

    def check(self, partition: PartitionedTriples) -> None:
        super().check(partition)
        for side, found in self._lists.items():
            if not self.shared and len(found) != len(partition):
                raise BadInput(f"listed candidates: {len(found)} lists of {side}s for {len(partition)} triples")

    def draw(self, step: StepTriples, worker: int) -> Negatives:
        """One worker's part of a step's candidates, with their positions in the lists (`Negatives.column`)."""
        shards = np.arange(self.sharding.shards)
        column = self._split(shards, np.full(len(shards), worker), step)[1]
        return replace(super().draw(step, worker), column=np.ascontiguousarray(column.transpose(1, 0, 2)))

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        rows, column = self._split(shards, workers, step)
        return rows, column >= 0

    def _split(self, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Int32]:
        """The workers' listed candidates on the shards: rows and list positions (-1 at padding), `[k, B, m]`."""
        sets = len(self._lists) if self.shared else self.sharding.shards * step.block
        rows = np.zeros((len(shards), sets, self.count), np.int32)
        column = np.full(rows.shape, -1, np.int32)
        for place, (side, lists) in enumerate(self._lists.items()):
            for k, worker in enumerate(workers.tolist()):
                if self.shared:
                    which, source = np.array([place]), np.zeros(1, np.int64)
                else:
                    which = self.corrupted(side, step.block)
                    source = step.of(worker).source[which]
                _split(
                    lists, source, which, self.sharding.shard_of, self.sharding.row_of, shards[k], rows[k], column[k]
                )
        return rows, column


def _checked_lists(side: Side, given: npt.ArrayLike | None, entities: int) -> Int64:
    if given is None:
        raise BadInput(f"listed candidates: corruption replaces {side}s, but no {side}s are given")
    lists = np.asarray(given)
    if lists.ndim not in (1, 2) or lists.dtype.kind not in "iu" or not lists.shape[-1]:
        raise BadInput(f"listed {side}s must be integers [N, k] or [k], got {lists.dtype} {list(lists.shape)}")
    if lists.size and not -1 <= lists.min() <= lists.max() < entities:
        raise IdOutOfRange(f"listed {side}s are in {lists.min()} .. {lists.max()}; there are {entities} entities")
    return np.ascontiguousarray(lists, np.int64)


def _most_on_a_shard(lists: Int64, sharding: Sharding) -> int:
    return int(_most(lists, sharding.shard_of, np.zeros(sharding.shards, np.int64)))


@kernel
def _most(lists: Int64, shard_of: Int32, count: Int64) -> int:
    most = 0
    for i in range(lists.shape[0]):
        count[:] = 0
        for c in range(lists.shape[1]):
            if lists[i, c] >= 0:
                count[shard_of[lists[i, c]]] += 1
        for shard in range(len(count)):
            most = max(most, count[shard])
    return most


@kernel
def _split(
    lists: Int64,
    source: Int64,
    which: Int64,
    shard_of: Int32,
    row_of: Int32,
    shard: int,
    rows: Int32,
    column: Int32,
) -> None:
    """Writes the candidates of list `source[i]` on `shard` to `rows[which[i]]`, their positions to `column`."""
    for i in range(len(source)):
        if source[i] < 0:
            continue
        found = 0
        for c in range(lists.shape[1]):
            entity = lists[source[i], c]
            if entity >= 0 and shard_of[entity] == shard:
                rows[which[i], found] = row_of[entity]
                column[which[i], found] = c
                found += 1
