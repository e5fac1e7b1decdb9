"""The base of candidate samplers: each shard draws for each worker, and excluded candidates are masked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt64
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import (
    CORRUPTIONS,
    SIDES,
    Corruption,
    KnownTriples,
    Negatives,
    PartitionedTriples,
    Sharding,
    Side,
    derived_keys,
    stream_key,
)
from elastable.replicas.knowledge_graphs.sampling.negative_masks import mask_each, mask_shared

__all__ = ["Exclude", "NegativeSampler", "StepTriples", "WorkerTriples"]

Exclude = Literal["nothing", "answer", "known"]

_STREAM = 0x4E47  # of a sampler's seed


@dataclass(frozen=True)
class WorkerTriples:
    """The triples of one worker in one step.

    Attributes:
        triples: int32 `[n * p, 3]`, global ids; -1 if a shardpair has none.
        source: int64 `[n * p]`: their positions in the partitioned array, or -1.
    """

    triples: Int32
    source: Int64


@dataclass(frozen=True)
class StepTriples:
    """All workers' triples in one step, computed on request.

    Attributes:
        step: Number of the step, from 0.
        block: Triples of each shardpair, p.
        of: Worker -> its triples.
    """

    step: int
    block: int
    of: Callable[[int], WorkerTriples]


class NegativeSampler(ABC):
    """Draws candidates with a separate key for every (shard, worker), so that any worker can repeat another's draws.

    Args:
        sharding: Sharding of the entities.
        count: Candidates from each shard, m: for each triple, or (shared) for all triples of the step.
        corruption: Which end they replace; see `batch.CORRUPTIONS`.
        shared: All triples of a step are scored with the same candidates (with `local`: all of a worker's).
        local: Draw only from the worker's own shard; nothing is exchanged.
        seed: Seed of the draws.
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
            step: All workers' triples.

        Returns:
            int32 `[k, B, m]`, rows of the shards; bool `[k, B, m]`, False at padding, or None if no step has padding.
        """

    @property
    @abstractmethod
    def _pads(self) -> bool:
        """Whether any candidate may be padding."""

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
            step: All workers' triples.
            worker: The worker.

        Returns:
            bool `[n * p, k, m]`, or `[1, k, m]` if it is the same for all triples.
        """
        blocks, sets, count = entities.shape
        flat = np.ascontiguousarray(entities.transpose(1, 0, 2)).reshape(sets, blocks * count)
        if self.exclude == "nothing" and sets == 1:
            return (flat >= 0).reshape(1, blocks, count)
        triples = step.of(worker).triples
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
