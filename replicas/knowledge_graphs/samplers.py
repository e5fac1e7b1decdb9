"""Batch samplers: a step's triples, as many from every shardpair, each once an epoch or drawn; and their weights."""

from abc import ABC, abstractmethod
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Bools, Float32, Int32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph.batch import StepBatch
from elastable.replicas.knowledge_graphs.graph.randomness import (
    derived_keys,
    draw_between,
    shuffled_segments,
    stream_key,
)
from elastable.replicas.knowledge_graphs.graph.sharding import PartitionedTriples
from elastable.replicas.knowledge_graphs.negatives import RandomNegatives, StepTriples


class ShardedSampler(ABC):
    """Batches as a pure function of (settings, step, worker): any worker can compute any batch, in any order.

    So a run's position is one number, and a run resumed at a step continues
    with the same batches. All methods are thread-safe.

    Args:
        partition: The training triples.
        batch_per_worker: Least number of triples of a worker's step; rounded up to n
            blocks of one size (an even one for corruption "ht").
        seed: Seed of the order of triples.
        negatives: Draws their candidates; None: the batches have none.
        weights: float32 `[N]` by `partition.triples`, with mean 1 (`frequency_weights`); None: all weights are 1.

    Attributes:
        block: Triples of each shardpair in a step, p; a worker's step has `n * p`.

    Raises:
        BadInput: no triples, a batch below 1, or weights or candidates that do not fit.
    """

    def __init__(
        self,
        partition: PartitionedTriples,
        batch_per_worker: int,
        *,
        seed: int = 0,
        negatives: RandomNegatives | None = None,
        weights: Float32 | None = None,
    ) -> None:
        if not len(partition):
            raise BadInput("a batch sampler needs at least one triple; got none")
        if batch_per_worker < 1:
            raise BadInput(f"a batch has at least 1 triple a worker, got {batch_per_worker}")
        if weights is not None and weights.shape != (len(partition),):
            raise BadInput(f"weights must be [{len(partition)}], one a triple; got {list(weights.shape)}")
        if negatives is not None and negatives.sharding != partition.sharding:
            raise BadInput("the candidates and the triples are of two different shardings of the entities")
        self.partition, self.negatives, self.seed = partition, negatives, seed
        self._weights = np.ones(len(partition), np.float32) if weights is None else weights.astype(np.float32)
        self._counts, self._offsets = partition.counts.reshape(-1), partition.offsets.reshape(-1)
        self._halved = negatives is not None and negatives.corruption == "ht"
        block = -(-batch_per_worker // partition.sharding.shards)
        self.block = block + (block % 2 if self._halved else 0)

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Steps that visit every triple once (in a random sampler, on average)."""

    @abstractmethod
    def _place(self, step: int, pairs: Int64) -> tuple[Int64, Bools]:
        """The triples of these shardpairs in a step.

        Args:
            step: From 0.
            pairs: int64 `[k]`, each `head's shard * n + tail's shard`.

        Returns:
            int64 `[k, p]`, positions in `partition.triples`, -1 if a pair has none; bool `[k, p]`, False at padding.
        """

    @abstractmethod
    def _present(self, step: int) -> int:
        """Number of all workers' triples in a step, without padding."""

    def _pair_weights(self) -> Float32:
        """float32 `[n * n]`: factor of the weights of each shardpair's triples."""
        return np.ones(self._counts.size, np.float32)

    def batch(self, step: int, worker: int) -> StepBatch:
        """One worker's part of a step, counted from 0 through all epochs. Raises BadInput if there is none."""
        partition, n = self.partition, self.partition.sharding.shards
        if step < 0 or not 0 <= worker < n:
            raise BadInput(f"batch of step {step} for worker {worker}: steps count from 0, workers are 0 .. {n - 1}")
        others = np.arange(n)
        pairs = np.append(worker * n + others, others * n + worker)
        triple, mask = self._place(step, pairs)
        met = self._triples(triple)  # -1 (no triple) reads some row, which is replaced by 0
        rows = np.where(triple[..., None] < 0, 0, partition.sharding.row_of[met[..., [0, 2]]])
        weight = self._weights[triple[:n]] * self._pair_weights()[pairs[:n], None] * mask[:n]
        return StepBatch(
            step=step,
            worker=worker,
            head=np.ascontiguousarray(rows[:n, :, 0]),
            relation=np.where(triple[:n] < 0, 0, met[:n, :, 1]),
            tail=np.ascontiguousarray(rows[n:, :, 1]),
            triple=triple[:n],
            mask=mask[:n],
            weight=weight,
            present=self._present(step),
            negatives=None if self.negatives is None else self.negatives.draw(self._step_triples(step), worker),
        )

    def _step_triples(self, step: int) -> StepTriples:
        """All workers' triples in a step; each worker's are computed once."""
        shards = self.partition.sharding.shards

        @lru_cache(maxsize=shards)
        def of(worker: int) -> tuple[Int32, Int64]:
            place = self._place(step, worker * shards + np.arange(shards))[0].reshape(-1)
            return self._triples(place), np.where(place < 0, -1, self.partition.source[place])

        return StepTriples(step, self.block, of)

    def _triples(self, place: Int64) -> Int32:
        """int32 `[..., 3]`: the triples at positions `[...]`, -1 for position -1."""
        return np.where(place[..., None] < 0, np.int32(-1), self.partition.triples[place])


_RIGID_STREAM = 0x0BDE  # of the sampler's seed
_EPOCHS_HELD = 2  # the current one, and the next one that a thread ahead has started


class RigidSampler(ShardedSampler):
    """Every triple once per epoch, in a different order each time.

    An epoch has as many steps as the fullest shardpair needs. The triples of every shardpair are spread evenly over
    them, and short blocks are padded, so steps hardly differ in the number of triples.
    Arguments as of `ShardedSampler`.
    """

    def __init__(self, partition: PartitionedTriples, batch_per_worker: int, **settings: Any) -> None:
        super().__init__(partition, batch_per_worker, **settings)
        self._steps = -(-int(self._counts.max()) // self.block)
        self._order = lru_cache(_EPOCHS_HELD)(self._shuffled)

    @property
    def steps_per_epoch(self) -> int:
        return self._steps

    def _place(self, step: int, pairs: Int64) -> tuple[Int64, Bools]:
        epoch, part = divmod(step, self._steps)
        counts = self._counts[pairs]
        begin, end = counts * part // self._steps, counts * (part + 1) // self._steps
        # The half that gets an odd triple alternates with step and pair, so that both ends are corrupted equally often.
        head_half = (end - begin + (step + pairs) % 2) // 2 if self._halved else end - begin
        half = self.block // 2 if self._halved else self.block
        return _filled(self._order(epoch), self._offsets[pairs], counts, begin, end, head_half, half, self.block)

    def _present(self, step: int) -> int:
        part = step % self._steps
        return int((self._counts * (part + 1) // self._steps - self._counts * part // self._steps).sum())

    def _shuffled(self, epoch: int) -> Int64:
        ends = np.append(self._offsets, len(self.partition))
        return shuffled_segments(ends, stream_key(self.seed, _RIGID_STREAM, epoch))


@kernel
def _filled(
    order: Int64, offset: Int64, count: Int64, begin: Int64, end: Int64, head_half: Int64, half: int, block: int
) -> tuple[Int64, Bools]:
    """Block i: positions `begin .. end - 1` of pair i, the first `head_half` at its start, the others at `half`."""
    triple, mask = np.empty((len(offset), block), np.int64), np.zeros((len(offset), block), np.bool_)
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
    return triple, mask


_RANDOM_STREAM = 0xD4A3  # of the sampler's seed


class RandomSampler(ShardedSampler):
    """Triples drawn with replacement, the same number from every non-empty shardpair.

    To keep the expected loss the mean over all triples for any n, a triple's weight is multiplied by its pair's share
    of the triples over its share of the draws. Arguments as of `ShardedSampler`.
    """

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.partition) // (self._drawn_pairs * self.block))

    def _place(self, step: int, pairs: Int64) -> tuple[Int64, Bools]:
        keys = derived_keys(stream_key(self.seed, _RANDOM_STREAM, step), pairs)
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


def frequency_weights(triples: Int32) -> Float32:
    """The weights `1 / sqrt(count(head, relation) + count(relation, tail))`, scaled to a mean of 1.

    Counts are over all triples by global id, so weights do not depend on the number of shards. As in word2vec's
    subsampling and the code of Sun et al., "RotatE", ICLR 2019.

    Args:
        triples: int `[N, 3]`, global ids: all training triples.

    Returns:
        float32 `[N]`.
    """
    if not len(triples):
        return np.empty(0, np.float32)
    shared = _count_of_pair(triples[:, 0], triples[:, 1]) + _count_of_pair(triples[:, 2], triples[:, 1])
    weights = 1.0 / np.sqrt(shared)
    return np.asarray(weights / weights.mean(), np.float32)


def _count_of_pair(entity: npt.NDArray[np.integer], relation: npt.NDArray[np.integer]) -> Int64:
    """int64 `[N]`: number of triples with the same pair."""
    key = entity.astype(np.int64) * (int(relation.max()) + 1) + relation
    _, pair, counts = np.unique(key, return_inverse=True, return_counts=True)
    return counts[pair]
