"""The base of batch samplers: a step's triples, the same number from every shardpair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Int32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import PartitionedTriples, StepBatch
from elastable.replicas.knowledge_graphs.sampling.negatives import NegativeSampler, StepTriples, WorkerTriples

__all__ = ["ShardedSampler"]


class ShardedSampler(ABC):
    """Batches as a pure function of (settings, step, worker): any worker can compute any batch, in any order.

    So a run's position is one number, and a run resumed at a step continues
    with the same batches. All methods are thread-safe.

    Args:
        partition: The training triples, in mode "pair".
        batch_per_worker: Least number of triples of a worker's step; rounded up to n
            blocks of one size (an even one for corruption "ht").
        seed: Seed of the order of triples.
        negatives: Draws their candidates; None: the batches have none.
        weights: float32 `[N]` by `partition.triples`, with mean 1 (`frequency_weights`); None: all weights are 1.

    Attributes:
        block: Triples of each shardpair in a step, p; a worker's step has `n * p`.

    Raises:
        BadInput: a partition of another mode, no triples, a batch below 1, or weights or candidates that do not fit.
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
        if partition.mode != "pair":
            raise BadInput(f"a batch sampler needs triples partitioned in mode 'pair', not {partition.mode!r}")
        if not len(partition):
            raise BadInput("a batch sampler needs at least one triple; got none")
        if batch_per_worker < 1:
            raise BadInput(f"a batch has at least 1 triple a worker, got {batch_per_worker}")
        if weights is not None and weights.shape != (len(partition),):
            raise BadInput(f"weights must be [{len(partition)}], one a triple; got {list(weights.shape)}")
        if negatives is not None:
            negatives.check(partition)
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

    @abstractmethod
    def _pair_weights(self) -> Float32:
        """float32 `[n * n]`: factor of the weights of each shardpair's triples."""

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

    def settings(self) -> dict[str, int | str]:
        """Everything that the batches depend on, except the step: equal settings give equal batches."""
        sharding = self.partition.sharding
        digest = blake2b(digest_size=16)
        for array in (self.partition.triples, sharding.shard_of, sharding.row_of, self._weights):
            digest.update(np.ascontiguousarray(array).tobytes())
        return {
            "sampler": type(self).__name__,
            "seed": self.seed,
            "shards": sharding.shards,
            "block": self.block,
            "triples": digest.hexdigest(),
            "negatives": "none" if self.negatives is None else self.negatives.settings(),
        }

    def _step_triples(self, step: int) -> StepTriples:
        """All workers' triples in a step; each worker's are computed once."""
        shards = self.partition.sharding.shards

        @lru_cache(maxsize=shards)
        def of(worker: int) -> WorkerTriples:
            place = self._place(step, worker * shards + np.arange(shards))[0].reshape(-1)
            return WorkerTriples(self._triples(place), np.where(place < 0, -1, self.partition.source[place]))

        return StepTriples(step, self.block, of)

    def _triples(self, place: Int64) -> Int32:
        """int32 `[..., 3]`: the triples at positions `[...]`, -1 for position -1."""
        return np.where(place[..., None] < 0, np.int32(-1), self.partition.triples[place])
