"""Batches that visit every triple once per epoch, with padding where a shardpair has too few."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph import PartitionedTriples, shuffled_segments, stream_key
from elastable.replicas.knowledge_graphs.sampling.negatives import NegativeSampler
from elastable.replicas.knowledge_graphs.sampling.sampler import ShardedSampler

__all__ = ["RigidSampler"]

_STREAM = 0x0BDE  # of the sampler's seed
_EPOCHS_HELD = 2  # the current one, and the next one that a thread ahead has started


class RigidSampler(ShardedSampler):
    """Every triple once per epoch, in a different order each time.

    An epoch has as many steps as the fullest shardpair needs. The triples of every shardpair are spread evenly over
    them, and short blocks are padded, so steps hardly differ in the number of triples.

    Args:
        partition, batch_per_worker, seed, negatives, weights: As of `ShardedSampler`.
        shuffle: False: every epoch has the order of the partition.
    """

    def __init__(
        self,
        partition: PartitionedTriples,
        batch_per_worker: int,
        *,
        seed: int = 0,
        negatives: NegativeSampler | None = None,
        weights: Float32 | None = None,
        shuffle: bool = True,
    ) -> None:
        super().__init__(partition, batch_per_worker, seed=seed, negatives=negatives, weights=weights)
        self._steps = -(-int(self._counts.max()) // self.block)
        self._shuffle = shuffle
        self._orders: OrderedDict[int, Int64] = OrderedDict()
        self._making = threading.Lock()

    @property
    def steps_per_epoch(self) -> int:
        return self._steps

    def settings(self) -> dict[str, int | str]:
        return {**super().settings(), "shuffle": int(self._shuffle)}

    def _place(self, step: int, pairs: Int64) -> tuple[Int64, Bools]:
        epoch, part = divmod(step, self._steps)
        counts = self._counts[pairs]
        begin, end = counts * part // self._steps, counts * (part + 1) // self._steps
        triple = np.empty((len(pairs), self.block), np.int64)
        mask = np.zeros(triple.shape, np.bool_)
        # The half that gets an odd triple alternates with step and pair, so that both ends are corrupted equally often.
        head_half = (end - begin + (step + pairs) % 2) // 2 if self._halved else end - begin
        half = self.block // 2 if self._halved else self.block
        _fill(self._order(epoch), self._offsets[pairs], counts, begin, end, head_half, half, triple, mask)
        return triple, mask

    def _present(self, step: int) -> int:
        part = step % self._steps
        return int((self._counts * (part + 1) // self._steps - self._counts * part // self._steps).sum())

    def _pair_weights(self) -> Float32:
        return np.ones(self._counts.size, np.float32)

    def _order(self, epoch: int) -> Int64:
        if not self._shuffle:
            epoch = 0
        with self._making:
            order = self._orders.get(epoch)
            if order is None:
                ends = np.append(self._offsets, len(self.partition))
                order = np.arange(len(self.partition), dtype=np.int64)
                if self._shuffle:
                    order = shuffled_segments(ends, stream_key(self.seed, _STREAM, epoch))
                self._orders[epoch] = order
            self._orders.move_to_end(epoch)
            while len(self._orders) > _EPOCHS_HELD:
                self._orders.popitem(last=False)
            return order


@kernel
def _fill(
    order: Int64,
    offset: Int64,
    count: Int64,
    begin: Int64,
    end: Int64,
    head_half: Int64,
    half: int,
    triple: Int64,
    mask: Bools,
) -> None:
    """Block i: positions `begin .. end - 1` of pair i, the first `head_half` at its start, the others at `half`."""
    for i in range(len(offset)):
        here = end[i] - begin[i]
        for k in range(triple.shape[1]):
            if count[i] == 0:
                triple[i, k] = -1
                continue
            if k < head_half[i]:
                place = k
            elif k >= half and k - half + head_half[i] < here:
                place = k - half + head_half[i]
            else:
                place = -1
            mask[i, k] = place >= 0
            if place < 0:
                place = k % here if here > 0 else 0
            triple[i, k] = order[offset[i] + (begin[i] + place) % count[i]]
