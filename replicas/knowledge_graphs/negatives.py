"""Candidates of a step: what all kinds share, their masks, and those that are not drawn: all entities, listed ones."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph.batch import CORRUPTIONS, SIDES, Corruption, Negatives, Side
from elastable.replicas.knowledge_graphs.graph.randomness import derived_keys, stream_key
from elastable.replicas.knowledge_graphs.graph.sharding import (
    KnownTriples,
    PartitionedTriples,
    Sharding,
    first_at_least,
)

Exclude = Literal["nothing", "answer", "known"]

_STREAM = 0x4E47  # of a sampler's seed


@dataclass(frozen=True)
class StepTriples:
    """All workers' triples in one step, computed on request.

    Attributes:
        step: Number of the step, from 0.
        block: Triples of each shardpair, p.
        of: Worker -> its triples, int32 `[n * p, 3]`, global ids, -1 if a shardpair has none; and their positions in
            the partitioned array, int64 `[n * p]`, or -1.
    """

    step: int
    block: int
    of: Callable[[int], tuple[Int32, Int64]]


class NegativeSampler(ABC):
    """Draws candidates with a separate key for every (shard, worker), so that any worker can repeat another's draws.

    Args:
        count: Candidates from each shard, m: for each triple, or (shared) for all triples of the step.
        corruption: Which end they replace; see `batch.CORRUPTIONS`.
        shared: All triples of a step are scored with the same candidates (with `local`: all of a worker's).
        local: Draw only from the worker's own shard; nothing is exchanged.
        exclude: What to mask besides padding: "nothing", the triple's own "answer",
            or every "known" answer, so that no true triple is a negative.
        known: The true triples; needed for exclude "known".
        tell_entities: Whether to set `Negatives.entities`.
        total: Candidates of a triple from all shards together, if fewer than n * m: shards in turn then draw one
            fewer, and their last candidate is padding. None: all count.

    Raises:
        BadInput: arguments that do not fit together.
    """

    _shareable = True
    _pads = True  # any candidate may be padding

    def __init__(
        self,
        sharding: Sharding,
        count: int,
        *,
        corruption: Corruption = "ht",
        shared: bool = False,
        local: bool = False,
        seed: int = 0,
        exclude: Exclude = "nothing",
        known: KnownTriples | None = None,
        tell_entities: bool = False,
        total: int | None = None,
    ) -> None:
        if count < 1:
            raise BadInput(f"candidates: at least 1 from each shard, got {count}")
        if corruption not in CORRUPTIONS:
            raise BadInput(f"corruption {corruption!r}: known are {', '.join(CORRUPTIONS)}")
        if exclude not in get_args(Exclude):
            raise BadInput(f"exclude {exclude!r}: known are {', '.join(get_args(Exclude))}")
        if exclude == "known" and known is None:
            raise BadInput("candidates that exclude known triples need `known`, the triples that are known")
        if shared and not self._shareable:
            raise BadInput(
                "candidates of the type of what they replace are drawn for each triple; they cannot be shared"
            )
        every = count * sharding.shards
        self._surplus = 0 if total is None else every - total
        if not 0 <= self._surplus < sharding.shards:
            raise BadInput(f"{total} candidates from {sharding.shards} shards are not {count} from each, or one fewer")
        self.sharding, self.count, self.corruption, self.shared = sharding, count, corruption, shared
        self.local, self.seed, self.exclude = local, seed, exclude
        self._known, self._tell_entities = known, tell_entities

    @abstractmethod
    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        """Candidates of k pairs of shard and worker.

        Args:
            keys: uint64 `[k]`: keys of the pairs' random numbers.
            shards: int64 `[k]`.
            workers: int64 `[k]`.

        Returns:
            int32 `[k, B, m]`, rows of the shards; bool `[k, B, m]`, False at padding, or None if no step has padding.
        """

    def check(self, partition: PartitionedTriples) -> None:
        """Raises BadInput for triples that do not match these candidates."""
        if partition.sharding != self.sharding:
            raise BadInput("the candidates and the triples are of two different shardings of the entities")

    def settings(self) -> str:
        """Everything that the candidates depend on, except the step and its triples."""
        return (
            f"{type(self).__name__} count={self.count} corruption={self.corruption} shared={self.shared} "
            f"local={self.local} seed={self.seed} exclude={self.exclude} surplus={self._surplus}"
        )

    def draw(self, step: StepTriples, worker: int) -> Negatives:
        """One worker's part of a step's candidates."""
        n = self.sharding.shards
        others, here = np.arange(n), np.full(n, worker)
        rows, valid = self._drawn(step, here, others, here if self.local else others)
        masked = self._pads or self._surplus > 0 or self.exclude != "nothing"
        own = None
        if masked or self._tell_entities:
            if not self.local and n > 1:
                own = self._entities(others, *self._drawn(step, others, here, here))
            else:
                own = self._entities(here, rows, valid)
        return Negatives(
            rows=rows,
            per_triple=not self.shared,
            corruption=self.corruption,
            local=self.local,
            mask=self._mask(own, step, worker) if masked and own is not None else None,
            entities=np.ascontiguousarray(own.transpose(1, 0, 2)) if self._tell_entities and own is not None else None,
        )

    def _drawn(self, step: StepTriples, shards: Int64, draws: Int64, workers: Int64) -> tuple[Int32, Bools | None]:
        """`_draw` for k pairs of shard and draw (`[k]` each), for these workers; what triples share is drawn once."""
        key, n = stream_key(self.seed, _STREAM, step.step), self.sharding.shards
        if self.shared and not self.local:
            draws = np.zeros_like(draws)
        rows, valid = self._draw(derived_keys(key, shards * n + draws), shards, workers, step)
        if not self._surplus:
            return rows, valid
        counts = np.ones(rows.shape, np.bool_)
        counts[(shards + step.step) % n < self._surplus, :, -1] = False
        return rows, counts if valid is None else valid & counts

    def _entities(self, shards: Int64, rows: Int32, valid: Bools | None) -> Int64:
        """The entities of rows `[k, B, m]` of shards `[k]`; -1 at padding."""
        entities = np.stack([self.sharding.entity_at[shard][found] for shard, found in zip(shards, rows, strict=True)])
        return entities if valid is None else np.where(valid, entities, -1)

    def _mask(self, entities: Int64, step: StepTriples, worker: int) -> Bools:
        """Which candidates count for a worker's triples.

        Args:
            entities: int64 `[k, B, m]`, -1 at padding.

        Returns:
            bool `[n * p, k, m]`, or `[1, k, m]` if it is the same for all triples.
        """
        blocks, sets, count = entities.shape
        flat = np.ascontiguousarray(entities.transpose(1, 0, 2)).reshape(sets, blocks * count)
        if self.exclude == "nothing" and sets == 1:
            return (flat >= 0).reshape(1, blocks, count)
        triples, _ = step.of(worker)
        of_side = {side: which for side in SIDES if (which := self.corrupted(side, step.block)).size}
        mask = flat >= 0
        if self.shared:
            mask = np.empty((len(triples), flat.shape[1]), np.bool_)
            for place, which in enumerate(of_side.values()):
                mask[which] = flat[min(place, sets - 1)] >= 0
        if self.exclude != "nothing":
            for place, (side, which) in enumerate(of_side.items()):
                answers, first, last = self._excluded(side, triples[which])
                if self.shared:
                    mask_shared(flat[min(place, sets - 1)], which, answers, first, last, mask)
                else:
                    mask_each(flat, which, answers, first, last, mask)
        return mask.reshape(len(mask), blocks, count)

    def corrupted(self, side: Side, block: int) -> Int64:
        """int64 `[q]`: the worker's triples, counted through its blocks, whose candidates replace this end."""
        place = np.arange(self.sharding.shards * block)
        if self.corruption == "ht":
            return np.flatnonzero((place % block < block // 2) == (side == "head"))
        return np.flatnonzero(np.full(len(place), self.corruption == side[0]))

    def _excluded(self, side: Side, triples: Int32) -> tuple[Int32, Int64, Int64]:
        """The excluded answers of `triples` (int32 `[q, 3]`).

        Returns:
            int32 `[a]`, ascending for each triple; int64 `[q]`, `[q]`: where each triple's begin and end.
        """
        given, answer = (triples[:, 2], triples[:, 0]) if side == "head" else (triples[:, 0], triples[:, 2])
        if self.exclude == "answer" or self._known is None:
            first = np.arange(len(triples))
            return np.ascontiguousarray(answer), first, first + (answer >= 0)
        lists = self._known.lists(side)
        return (lists.answers, *lists.spans(given, triples[:, 1]))


class AllEntities(NegativeSampler):
    """All rows of every shard, in order, for every triple; arguments as of `NegativeSampler`."""

    def __init__(
        self, sharding: Sharding, *, corruption: Corruption = "t", exclude: Exclude = "answer", **settings: Any
    ) -> None:
        super().__init__(sharding, sharding.rows, corruption=corruption, shared=True, exclude=exclude, **settings)
        self._pads = bool((sharding.counts < sharding.rows).any())

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        rows = np.broadcast_to(np.arange(self.count, dtype=np.int32), (len(shards), 1, self.count))
        return rows, rows < self.sharding.counts[shards][:, None, None]


class TripleNegatives(NegativeSampler):
    """Candidates from lists, each scored on its own shard; padded so that all shards have the same number.

    Args:
        heads: int `[N, k]`, global ids: candidates for the head of each triple, by its position in the partitioned
            array; or `[k]`: the same for all. -1 is padding. Needed for corruption "h" and "ht".
        tails: The same for tails; needed for "t" and "ht".
        corruption: As of `NegativeSampler`.
        settings: Its `exclude`, `known` and `tell_entities`.

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
        **settings: Any,
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
        count = max((_most(found, sharding.shard_of, sharding.shards) for found in self._lists.values()), default=1)
        super().__init__(sharding, max(1, count), corruption=corruption, shared=shared, **settings)

    def check(self, partition: PartitionedTriples) -> None:
        super().check(partition)
        for side, found in self._lists.items():
            if not self.shared and len(found) != len(partition):
                raise BadInput(f"listed candidates: {len(found)} lists of {side}s for {len(partition)} triples")

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        """The workers' listed candidates on the shards."""
        sets = len(self._lists) if self.shared else self.sharding.shards * step.block
        rows = np.zeros((len(shards), sets, self.count), np.int32)
        valid = np.zeros(rows.shape, np.bool_)
        for place, (side, lists) in enumerate(self._lists.items()):
            for k, worker in enumerate(workers.tolist()):
                if self.shared:
                    which, source = np.array([place]), np.zeros(1, np.int64)
                else:
                    which = self.corrupted(side, step.block)
                    source = step.of(worker)[1][which]
                _split(lists, source, which, self.sharding.shard_of, self.sharding.row_of, shards[k], rows[k], valid[k])
        return rows, valid


def _checked_lists(side: Side, given: npt.ArrayLike | None, entities: int) -> Int64:
    if given is None:
        raise BadInput(f"listed candidates: corruption replaces {side}s, but no {side}s are given")
    lists = np.asarray(given)
    if lists.ndim not in (1, 2) or lists.dtype.kind not in "iu" or not lists.shape[-1]:
        raise BadInput(f"listed {side}s must be integers [N, k] or [k], got {lists.dtype} {list(lists.shape)}")
    if lists.size and not -1 <= lists.min() <= lists.max() < entities:
        raise IdOutOfRange(f"listed {side}s are in {lists.min()} .. {lists.max()}; there are {entities} entities")
    return np.ascontiguousarray(lists, np.int64)


@kernel
def _most(lists: Int64, shard_of: Int32, shards: int) -> int:
    most, count = 0, np.zeros(shards, np.int64)
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
    lists: Int64, source: Int64, which: Int64, shard_of: Int32, row_of: Int32, shard: int, rows: Int32, valid: Bools
) -> None:
    """Writes the candidates of list `source[i]` on `shard` to `rows[which[i]]`; sets `valid` where one is."""
    for i in range(len(source)):
        if source[i] < 0:
            continue
        found = 0
        for c in range(lists.shape[1]):
            entity = lists[source[i], c]
            if entity >= 0 and shard_of[entity] == shard:
                rows[which[i], found] = row_of[entity]
                valid[which[i], found] = True
                found += 1


def mask_shared(entities: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools) -> None:
    """`mask_each` for candidates that triples share: `entities` is int64 `[c]`."""
    column = np.argsort(entities, kind="stable")
    _mask_shared(entities[column], column, which, answers, first, last, mask)


@kernel
def mask_each(entities: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools) -> None:
    """Masks answers among the candidates of each triple.

    Args:
        entities: int64 `[b, c]`: the candidates of every triple.
        which: int64 `[q]`: the triples to mask.
        answers: int32 `[a]`.
        first, last: int64 `[q]`: triple `which[i]` excludes `answers[first[i]:last[i]]`, ascending.
        mask: bool `[b, c]`, changed in place: False for excluded candidates.
    """
    for i in range(len(which)):
        if first[i] == last[i]:
            continue
        row = which[i]
        for c in range(entities.shape[1]):
            place = first_at_least(answers, first[i], last[i], entities[row, c])
            if place < last[i] and answers[place] == entities[row, c]:
                mask[row, c] = False


@kernel
def _mask_shared(
    entities: Int64, column: Int64, which: Int64, answers: Int32, first: Int64, last: Int64, mask: Bools
) -> None:
    candidates = len(entities)
    for i in range(len(which)):
        listed = last[i] - first[i]
        if listed <= candidates:  # walk the shorter of the two, search the longer
            for a in range(first[i], last[i]):
                place = first_at_least(entities, 0, candidates, answers[a])
                while place < candidates and entities[place] == answers[a]:  # a candidate may be drawn twice
                    mask[which[i], column[place]] = False
                    place += 1
        else:
            for c in range(candidates):
                place = first_at_least(answers, first[i], last[i], entities[c])
                if place < last[i] and answers[place] == entities[c]:
                    mask[which[i], column[c]] = False
