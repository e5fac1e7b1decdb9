"""Batches drawn with replacement: no padding, and weights that make up for the sizes of pairs."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.replicas.knowledge_graphs.graph.batch import Bools
from elastable.replicas.knowledge_graphs.graph.partition import PartitionedTriples
from elastable.replicas.knowledge_graphs.graph.randomness import derived_keys, draw_between, stream_key
from elastable.replicas.knowledge_graphs.sampling.negatives import NegativeSampler
from elastable.replicas.knowledge_graphs.sampling.sampler import ShardedSampler

__all__ = ["RandomSampler"]

_STREAM = 0xD4A3  # of the sampler's seed


class RandomSampler(ShardedSampler):
    """Triples drawn with replacement, as many from every pair of shards that has any.

    A pair of few triples is drawn from as often as one of many. So that no triple
    counts more for that, and the expected loss is the mean over all triples
    whatever n is, a triple's weight is multiplied by its pair's share of the
    triples over the share of the draws.

    Args: as `ShardedSampler`'s.
    """

    def __init__(
        self,
        partition: PartitionedTriples,
        batch_per_worker: int,
        *,
        seed: int = 0,
        negatives: NegativeSampler | None = None,
        weights: Float32 | None = None,
    ) -> None:
        super().__init__(partition, batch_per_worker, seed=seed, negatives=negatives, weights=weights)
        self._counts = partition.counts.reshape(-1)
        self._offsets = partition.offsets.reshape(-1)
        self._drawn_pairs = int(np.count_nonzero(self._counts))
        self._worth = (self._counts * (self._drawn_pairs / len(partition))).astype(np.float32)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which as many triples are drawn as there are."""
        return -(-len(self.partition) // (self._drawn_pairs * self.block))

    def _place(self, step: int, pairs: Int64) -> tuple[Int64, Bools]:
        keys = derived_keys(stream_key(self.seed, _STREAM, step), pairs)
        first, count = self._offsets[pairs], self._counts[pairs]
        drawn = draw_between(keys, first[:, None], count[:, None], self.block)[:, 0]
        full = np.broadcast_to(count[:, None] > 0, drawn.shape)
        return np.where(full, drawn, -1), full.copy()

    def _present(self, step: int) -> int:
        return self._drawn_pairs * self.block

    def _pair_weights(self) -> Float32:
        return self._worth
