"""Batches drawn with replacement: without padding, with weights for the sizes of pairs."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Int64
from elastable.replicas.knowledge_graphs.graph import derived_keys, draw_between, stream_key
from elastable.replicas.knowledge_graphs.sampling.sampler import ShardedSampler

__all__ = ["RandomSampler"]

_STREAM = 0xD4A3  # of the sampler's seed


class RandomSampler(ShardedSampler):
    """Triples drawn with replacement, the same number from every non-empty shardpair.

    To keep the expected loss the mean over all triples for any n, a triple's weight is multiplied by its pair's share
    of the triples over its share of the draws. Arguments as of `ShardedSampler`.
    """

    @property
    def steps_per_epoch(self) -> int:
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
        return (self._counts * (self._drawn_pairs / len(self.partition))).astype(np.float32)

    @cached_property
    def _drawn_pairs(self) -> int:
        return int(np.count_nonzero(self._counts))
